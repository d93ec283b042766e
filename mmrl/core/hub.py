"""Checks that a model or data set is available on the hub before anything is loaded: in seconds,
and with the true cause if not. The loading libraries retry five times, for half a minute.
"""

from __future__ import annotations

import re
from pathlib import Path

from mmrl.core.errors import UserError

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")  # owner/name
PATIENCE = 5.0  # timeout of a request in seconds
CLIENTS = ("httpx", "requests")
REMEDY = (
    "`hf download {name}` where there is a network and copy that cache (HF_HOME) here, give the "
    "path of a folder that holds the model, or set HF_ENDPOINT to a mirror"
)


def check_model(path: str) -> None:
    """Raise UserError if a path is a hub id that is neither in the local cache nor available: the
    hub cannot be reached, or has no such model.

    A folder, ``world:NAME`` and everything else that is not ``owner/name`` passes, and so does what
    only a download can tell.
    """
    if not REPOSITORY.fullmatch(path) or Path(path).exists():
        return
    check_repository(path)


def check_repository(name: str) -> None:
    """Raise UserError as ``check_model`` does, for what can only be a hub id."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if cached(name):
        return
    remedy = REMEDY.format(name=name)
    cache = f"{name!r} is not in the cache {constants.HF_HUB_CACHE}"
    if constants.is_offline_mode():
        raise UserError(f"{cache}, and HF_HUB_OFFLINE is set: unset it, or {remedy}")
    try:
        if HfApi().model_info(name, timeout=PATIENCE).gated:
            HfApi().auth_check(name)
    except GatedRepoError as error:
        raise UserError(
            f"the model {name!r} is gated: accept its terms on {constants.ENDPOINT}/{name} and log "
            f"in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{constants.ENDPOINT} knows no model {name!r}, or it is private: check the name, "
            f"log in with `hf auth login`, or give a local folder (which is not there either: "
            f"{Path(name).absolute()})"
        ) from error
    except HfHubHTTPError:  # the hub answers: loading will report the problem
        return
    except Exception as error:
        if not is_of_the_network(error):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"{cache}, and {constants.ENDPOINT} cannot be reached ({reason}): {remedy}"
        ) from error


def ask_for_data_set(name: str, revision: str | None = None) -> None:
    """Query the hub for a data set, unless it is cached or the machine is set to offline.

    Raises:
        huggingface_hub's errors, or its HTTP client's, if it is not available.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if cached(name, "datasets") or constants.is_offline_mode():
        return
    try:
        if HfApi().dataset_info(name, revision=revision, timeout=PATIENCE).gated:
            HfApi().auth_check(name, repo_type="dataset")
    except (GatedRepoError, RepositoryNotFoundError):
        raise
    except HfHubHTTPError:  # the hub answers: loading will report the problem
        return


def is_of_the_network(error: BaseException) -> bool:
    """Tell whether an error is a connection error, of either HTTP library that huggingface_hub
    uses."""
    return isinstance(error, OSError) or type(error).__module__.startswith(CLIENTS)


def cached(name: str, kind: str = "models") -> bool:
    """Tell whether the local cache has a version of a model, or of one of the ``datasets``; missing
    files are downloaded while it loads."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}" / "snapshots"
    return folder.is_dir() and any(place.is_dir() for place in folder.iterdir())

"""Implements ``mmrl push``."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mmrl.apps.hub.card import Card, configuration, license_of, without_folders
from mmrl.apps.hub.loading import describe
from mmrl.apps.hub.plots import plot_curves
from mmrl.core.errors import UserError
from mmrl.core.files import json_object, whole_folder
from mmrl.experiment import build
from mmrl.monitoring.report.evidence import read_evaluation
from mmrl.monitoring.report.page import BEFORE_AFTER, before_after_picture
from mmrl.monitoring.report.pictures import saved_picture
from mmrl.monitoring.report.runs import read_run
from mmrl.policies.contracts import Exports

COPIED = ("metrics.jsonl", "evaluation.json")
# keys under which peft, transformers and diffusers record the base model's path
ORIGINS = ("base_model_name_or_path", "_name_or_path", "name_or_path")
LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


@dataclass(frozen=True)
class Request:
    """Holds the options of the command line."""

    repository: str
    checkpoint: str | None = None
    license: str | None = None
    private: bool = False
    message: str = "Trained with mmrl"


def push(run: Path, request: Request) -> str:
    """Write the card and the weights of a run and upload them. Returns the address.

    Raises UserError for a name that the hub does not accept, a missing login, a hub that cannot be
    reached; the folder to upload is then kept, and named.
    """
    check_name(request.repository)
    _check_login()
    folder = Path(tempfile.mkdtemp(prefix="mmrl-push-")) / "model"
    write(run, request, folder)
    address = _upload(folder, request)
    shutil.rmtree(folder.parent, ignore_errors=True)
    return address


def write(run: Path, request: Request, folder: Path) -> Path:
    """Write everything to upload into a new folder; needs no network."""
    check_name(request.repository)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; name a new folder")
    run = build.last_stage(run)
    history = read_run(run)
    session = build.trained(run, at=request.checkpoint)
    with whole_folder(folder) as draft:
        policy = Exports.of(session.policy)
        policy.export(draft)
        for name in COPIED:
            if (run / name).is_file():
                shutil.copyfile(run / name, draft / name)
        makes = policy.capabilities.makes
        export = describe(draft, history, policy.pipeline, makes, policy.auto_class)
        card = Card(
            run=history,
            evaluation=read_evaluation(history),
            export=export,
            repository=request.repository,
            license=license_of(export.base, request.license),
            has_curves=plot_curves(history, draft / "curves.png"),
            picture=_picture(run, draft),
        )
        _keep_apart(draft)
        _hide_origins(draft, export.base_id)
        (draft / "config.yaml").write_text(configuration(history), encoding="utf-8")
        (draft / "README.md").write_text(card.text(), encoding="utf-8")
    return folder


def check_name(repository: str) -> None:
    """Check a repository's name before anything is loaded. Raises UserError."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
        valid = repository.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise UserError(
            f"{repository!r} is no name for a repository; write org/name, of letters, digits, "
            f"'-', '_' and '.'"
        )


def _picture(run: Path, draft: Path) -> str:
    """Copy the before-and-after picture or film; returns its name, empty without one."""
    with suppress(UserError, OSError):  # a run of texts has none; the folder may be read-only
        before_after_picture(run)
    picture = saved_picture(run / BEFORE_AFTER)
    if picture is None:
        return ""
    shutil.copyfile(picture, draft / picture.name)
    return picture.name


def _keep_apart(draft: Path) -> None:
    """Rename a file of the export that has one of mmrl's names."""
    if (draft / "README.md").is_file():  # peft writes an empty card template
        (draft / "README.md").unlink()


def _hide_origins(draft: Path, base_id: str) -> None:
    """Replace local paths in the files of an export by the base's name on the hub, or the path's
    last part."""
    for path in draft.rglob("*.json"):
        content = json_object(path)
        local = {
            key: base_id or without_folders(value)
            for key in ORIGINS
            if isinstance(value := content.get(key), str) and without_folders(value) != value
        }
        if local:
            path.write_text(json.dumps(content | local, indent=2), encoding="utf-8")


def _check_login() -> None:
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UserError(
            "HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or write the folder with "
            "--dry-run FOLDER"
        )
    if get_token() is None:
        raise UserError(f"not logged in to the hub; {LOGIN}; --dry-run FOLDER needs neither")


def _upload(folder: Path, request: Request) -> str:
    from huggingface_hub import HfApi

    api = HfApi(library_name="mmrl")
    with _explained(api.endpoint, folder, request.repository):
        api.create_repo(request.repository, private=request.private, exist_ok=True)
        # the hub ignores `private` if the repository exists
        if request.private and not api.model_info(request.repository).private:
            raise UserError(
                f"{request.repository} exists and is public, so --private would upload in the "
                f"open; nothing was uploaded. Make it private in its settings on {api.endpoint}, "
                f"name another repository, or leave out --private"
            )
        api.upload_folder(
            repo_id=request.repository, folder_path=folder, commit_message=request.message
        )
    return f"{api.endpoint}/{request.repository}"


@contextmanager
def _explained(endpoint: str, folder: Path, repository: str) -> Iterator[None]:
    """Convert errors of the hub's client to a sentence; the folder to upload is kept."""
    from huggingface_hub.errors import HfHubHTTPError

    later = f"what was to be uploaded is in {folder}; later: hf upload {repository} {folder}"
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}; what was to be uploaded is in {folder}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            raise UserError(
                f"{endpoint} does not let you write to {repository} ({status}); {LOGIN} to it; "
                f"{later}"
            ) from error
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{endpoint} refused the upload: {reason}; {later}") from error
    except Exception as error:  # the client's HTTP library is httpx or httpx2, by version
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"the upload to {endpoint} failed ({reason}); check the network and HF_ENDPOINT; "
            f"{later}"
        ) from error

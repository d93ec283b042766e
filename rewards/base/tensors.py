"""Reads single-file checkpoints, on disk or on the hub, without executing code in them."""

from __future__ import annotations

from pathlib import Path

from mmrl.core.errors import UserError
from mmrl.core.hub import check_repository


def fetch(where: str, what: str) -> Path:
    """Find a file on disk, or ``org/repo/file`` on the hub (its cache first).

    Raises:
        UserError: it is neither here nor can be downloaded.
    """
    file = Path(where).expanduser()
    if file.is_file():
        return file
    parts = where.split("/")
    if file.is_absolute() or where[:1] in ("~", ".") or len(parts) < 3:
        raise UserError(f"no {what} checkpoint at {file}")
    from huggingface_hub import hf_hub_download

    repo = "/".join(parts[:2])
    name = "/".join(parts[2:])
    check_repository(repo)
    try:
        return Path(hf_hub_download(repo, name))
    except Exception as error:  # the hub has a dozen exception types for "not available"
        raise UserError(
            f"no {what} checkpoint: {where} is neither a file nor in the hub cache and "
            f"cannot be downloaded "
            f"({type(error).__name__}); run `hf download {repo} {name}` where there is a "
            f"network and copy HF_HOME, or "
            "give the path of the file"
        ) from error

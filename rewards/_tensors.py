"""Reads checkpoints that are one file, on disk or on the hub, without executing anything they may
hold."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

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
    except Exception as error:  # the hub has a dozen types for "cannot be had"
        raise UserError(
            f"no {what} checkpoint: {where} is neither a file nor in the hub cache and "
            f"cannot be downloaded "
            f"({type(error).__name__}); run `hf download {repo} {name}` where there is a "
            f"network and copy HF_HOME, or "
            "give the path of the file"
        ) from error


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read tensors by name; one level of ``state_dict``, ``model`` or ``module`` around them is
    taken off."""
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    # zip, pickle and safetensors each have their own types for "not my format"
    except Exception as error:
        first = (str(error) or "no message").splitlines()[0]
        raise UserError(
            f"cannot read {file} as tensors: {type(error).__name__}: {first}; a file that "
            f"holds a whole pickled module "
            "is not read: save its state_dict() where you trust it"
        ) from error
    for key in ("state_dict", "model", "module"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a {type(content).__name__}, not tensors by name")
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}

"""Reads published checkpoints into mmrl's modules without pickle, loads them strictly and writes
them under the same names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from mmrl.core import complete_weights, weight_files
from mmrl.core.errors import UserError
from mmrl.core.registry import locate

HUB = "hub:"
Published = dict[str, Tensor]
Network = TypeVar("Network", bound=nn.Module)


def find(path: str) -> Path:
    """Return the file or folder of ``path``; ``hub:owner/name/file`` is downloaded once."""
    if not path.startswith(HUB):
        return Path(locate(path))
    owner, _, rest = path.removeprefix(HUB).partition("/")
    name, _, file = rest.partition("/")
    if not file:
        raise UserError(f"{path}: write hub:owner/name/file")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(f"{owner}/{name}", file))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{path} cannot be downloaded: {reason}; give a local file instead"
        ) from error


def read(file: str | Path, within: Sequence[str] = ()) -> Published:
    """Read a ``.safetensors``, ``.pt`` or ``.pth`` file as name -> tensor; of a training script's
    checkpoint the entry ``within`` these keys. Prefixes of wrappers are removed."""
    file = Path(file)
    if not file.is_file():
        raise UserError(
            f"no file {file}; download the published checkpoint there, or write hub:owner/name/file"
        )
    weights = weight_files.read_tensors(file, within)
    return {complete_weights.unwrapped(name): tensor for name, tensor in weights.items()}


def load(module: Network, weights: Published, file: str | Path) -> Network:
    """Load strictly: every name and shape must match, with nothing left over."""
    try:
        module.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise UserError(
            f"{file} does not fit {type(module).__name__}: {str(error)[:600]}"
        ) from error
    return module.eval()


def save(weights: Published, file: Path) -> None:
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}, file
    )


def count(weights: Published, pattern: str) -> int:
    """Count how many of ``pattern.format(0)``, ``pattern.format(1)`` ... there are."""
    n = 0
    while any(name.startswith(pattern.format(n)) for name in weights):
        n += 1
    return n


def need(weights: Published, name: str, file: str | Path) -> Tensor:
    """Return a tensor whose shape reveals the architecture; UserError where the checkpoint has
    none."""
    if name not in weights:
        raise UserError(f"{file} holds no {name}: it is another kind of checkpoint")
    return weights[name]

"""Reads adapters as peft, TRL, LLaMA-Factory and ``mmrl export`` write them: a folder with
adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.weight_files import read_tensors
from mmrl.policies.lora import ADAPTER, ADAPTER_FILE

CONFIG = "adapter_config.json"
ROOT = "base_model.model."  # what peft writes before every name
# peft options that change what an adapter computes, and their values in mmrl's
PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "use_dora": False,
    "use_rslora": False,
    "bias": "none",
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read(folder: Path, net: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Read the weights of an adapter under the names of a policy's trainable weights.

    Args:
        folder: of the adapter.
        net: the policy's network, with an adapter of the same layers, rank and alpha.
        names: of its trainable weights.

    Raises:
        UserError: the adapter does not match the policy's ``lora``.
    """
    options = _options(folder)
    for key, plain in PLAIN.items():
        if (options.get(key) or plain) != plain:
            raise UserError(
                f"{folder / CONFIG}: {key} is {options[key]}, of which mmrl has no adapters; merge "
                f"it (`mmrl convert {folder} --into FOLDER`) and give that folder as policy path"
            )
    rank, alpha = int(options["r"]), float(options["lora_alpha"])
    _check_scaling(folder, net, rank, alpha)
    stored = {
        name.removeprefix(ROOT): tensor
        for name, tensor in read_tensors(folder / ADAPTER_FILE).items()
    }
    weights = {}
    for name in names:
        plain_name = name.replace(f".{ADAPTER}.", ".")
        ends = (plain_name.split(".", cut)[-1] for cut in range(3))
        if (stored_name := next((end for end in ends if end in stored), None)) is not None:
            weights[name] = stored.pop(stored_name)
    absent = sorted(set(names) - set(weights))
    if absent or stored:
        raise UserError(
            f"{folder} is no adapter of the layers that this policy's lora.targets choose: "
            f"{f'it has none of {absent[0]}' if absent else f'they leave out {min(stored)}'}; its "
            f"own are {_targets(options)}"
        )
    return weights


def _options(folder: Path) -> dict[str, Any]:
    try:
        options = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return {"r": options["r"], "lora_alpha": options["lora_alpha"], **options}
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder / CONFIG} is no config of a LoRA: {error!r}") from error


def _check_scaling(folder: Path, net: nn.Module, rank: int, alpha: float) -> None:
    """Raise UserError where the policy's adapter has a different rank or scale."""
    from peft.tuners.lora import LoraLayer

    layer = next((module for module in net.modules() if isinstance(module, LoraLayer)), None)
    if layer is None:
        raise UserError(
            f"{folder} is an adapter, and this policy trains all weights: set policy option lora: "
            f"{{rank: {rank}, alpha: {alpha:g}}}, or merge it (`mmrl convert {folder} --into "
            f"FOLDER`) and give that folder as policy path"
        )
    if layer.r[ADAPTER] != rank or abs(layer.scaling[ADAPTER] * rank - alpha) > 1e-6 * alpha:
        raise UserError(
            f"{folder} was trained with rank {rank} and alpha {alpha:g}: set policy option lora: "
            f"{{rank: {rank}, alpha: {alpha:g}}}"
        )


def _targets(options: Mapping[str, Any]) -> str:
    targets = options.get("target_modules") or []
    if isinstance(targets, str):
        return targets
    ends = sorted({str(name).rpartition(".")[2] for name in targets})
    return ", ".join(ends)

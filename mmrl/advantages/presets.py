"""Names the advantages of papers that are settings of ``group``.

Each is registered under its name and takes every option of ``group``, with these defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmrl.advantages.group import group
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards, Rollout


@dataclass(frozen=True)
class GroupPreset:
    """Holds what a paper or code base chooses of ``group``."""

    source: str
    settings: dict[str, Any]
    note: str


GROUP_PRESETS = {
    "flow_grpo": GroupPreset(
        "Flow-GRPO (Liu et al. 2025)",
        {"std": "global"},
        "The published SD3.5 recipes use the global std, the paper's eq. 4 the group's.",
    ),
    "dance_grpo": GroupPreset(
        "DanceGRPO (Xue et al. 2025)",
        {"ddof": 1, "eps": 1e-8},
        "With combine: aggregate it is MixGRPO's.",
    ),
    "gdpo": GroupPreset(
        "GDPO",
        {"combine": "gdpo", "eps": 1e-6, "eps_mode": "floor"},
        "Each reward is normalised in its group, the weighted sum over the batch. For text, TRL "
        "has ddof 1 and adds 1e-4 to the std, ms-swift 1e-8.",
    ),
    "dr_grpo": GroupPreset(
        "Dr. GRPO (Liu et al. 2025)",
        {"std": "none"},
        'Reward minus the mean of the group: "Understanding R1-Zero-like training".',
    ),
    "rloo": GroupPreset(
        "RLOO (Ahmadian et al. 2024)",
        {"std": "none", "baseline": "others"},
        'Reward minus the mean of the other answers of the group: "Back to basics".',
    ),
    "grpo": GroupPreset(
        "GRPO for text (Shao et al. 2024)",
        {"ddof": 1},
        "eps: 1e-4 in TRL, ms-swift and VLM-R1, 1e-6 in verl. std: global is TRL's and ms-swift's "
        '"batch", the "PPO-lite" of Liu et al. 2025 ("Tricks or traps?").',
    ),
}


def preset(name: str) -> Callable[..., Tensor]:
    """Register ``group`` with the settings of a preset as its defaults."""
    chosen = GROUP_PRESETS[name]

    def compared(rewards: Rewards | Tensor, rollout: Rollout, **options: Any) -> Tensor:
        advantage: Tensor = group(rewards, rollout, **chosen.settings | options)
        return advantage

    signature = inspect.signature(group, eval_str=True)
    parameters = [
        parameter.replace(default=chosen.settings.get(key, parameter.default))
        for key, parameter in signature.parameters.items()
    ]
    settings = ", ".join(f"{key}: {value}" for key, value in chosen.settings.items())
    vars(compared)["__signature__"] = signature.replace(parameters=parameters)
    compared.__name__ = compared.__qualname__ = name
    compared.__doc__ = f"Compare as {chosen.source} does: group with {settings}.\n\n{chosen.note}"
    return ADVANTAGES.register(name)(compared)


flow_grpo = preset("flow_grpo")
dance_grpo = preset("dance_grpo")
gdpo = preset("gdpo")
dr_grpo = preset("dr_grpo")
rloo = preset("rloo")
grpo = preset("grpo")

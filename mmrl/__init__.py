"""mmrl: reinforcement fine-tuning for vision-language models and image and video generators.

    import mmrl

    result = mmrl.train("digits/flow_grpo", {"train.iterations": 20})
    result.metrics, result.samples, result.policy.sample(["a red seven"], num_samples=4)

Everything of ``__all__`` is loaded when it is first used, so that importing mmrl stays light.
docs/api.md describes it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mmrl.core import rounding
from mmrl.core.version import __version__ as __version__

if TYPE_CHECKING:
    from mmrl.api.auditing import check_reward
    from mmrl.api.callbacks import Callback
    from mmrl.api.comparing import compare
    from mmrl.api.evaluating import Evaluation, evaluate
    from mmrl.api.media import Samples, Video
    from mmrl.api.names import list_names as list  # noqa: F401 - not in __all__
    from mmrl.api.policies import Policy, load_policy
    from mmrl.api.runs import Run, load_run, train
    from mmrl.api.trainer import Trainer
    from mmrl.core.errors import UserError

# Finds `rewards` and `samplers` by place, before anything imports them.
from mmrl.core import packages as _packages  # noqa: F401

# MKL reads its setting when torch is loaded, which a program may do before it uses mmrl
if "torch" not in sys.modules:
    rounding.prepare()

# name -> module that has it, and its name there
_PLACES = {
    "train": ("mmrl.train", ""),  # the package answers the call
    "Trainer": ("mmrl.api.trainer", "Trainer"),
    "Callback": ("mmrl.api.callbacks", "Callback"),
    "load_run": ("mmrl.api.runs", "load_run"),
    "Run": ("mmrl.api.runs", "Run"),
    "load_policy": ("mmrl.api.policies", "load_policy"),
    "Policy": ("mmrl.api.policies", "Policy"),
    "Samples": ("mmrl.api.media", "Samples"),
    "Video": ("mmrl.api.media", "Video"),
    "evaluate": ("mmrl.api.evaluating", "evaluate"),
    "Evaluation": ("mmrl.api.evaluating", "Evaluation"),
    "check_reward": ("mmrl.api.auditing", "check_reward"),
    "compare": ("mmrl.api.comparing", "compare"),
    "list": ("mmrl.api.names", "list_names"),
    "UserError": ("mmrl.core.errors", "UserError"),
}
# not ``list``: a star import would hide Python's
__all__ = [
    "Callback",
    "Evaluation",
    "Policy",
    "Run",
    "Samples",
    "Trainer",
    "UserError",
    "Video",
    "check_reward",
    "compare",
    "evaluate",
    "load_policy",
    "load_run",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place, attribute = _PLACES[name]
    module = importlib.import_module(place)
    return getattr(module, attribute) if attribute else module


def __dir__() -> Iterable[str]:
    return sorted([*_PLACES, "__version__"])

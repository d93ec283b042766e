"""Rewards map ``(media, prompts) -> [B]``, usable without the trainer; see ``docs/rewards.md``.

Importing this package registers every reward under its name in a configuration and offers it under
that name and under its own: ``from rewards import clip_score`` and ``from rewards import
ClipScore`` are the same class. A module of this folder needs no entry anywhere. Models are loaded
when a reward is constructed, never here.
"""

import importlib
import pkgutil

from mmrl.core.registry import REWARDS

for _found in pkgutil.iter_modules(__path__):
    if not _found.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_found.name}")

# After the imports, which leave the modules themselves under these names.
_own = {
    name: entry for name, entry in REWARDS.items() if entry.__module__.partition(".")[0] == __name__
}
globals().update({entry.__name__: entry for entry in _own.values()} | _own)
__all__ = sorted({*_own, *(entry.__name__ for entry in _own.values())})

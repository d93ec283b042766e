"""Makes bitsandbytes' 8-bit AdamW usable on shards (FSDP2); imported only where it is chosen."""

from __future__ import annotations

from typing import Any

from bitsandbytes.optim import AdamW8bit
from torch import Tensor

from mmrl.core.sharding import is_sharded, like
from mmrl.train.whole import WholeSteps

MOMENTS = ("state1", "state2")  # of the weight's shape; scales of blocks and tables are not


class WholeAdamW8bit(WholeSteps, AdamW8bit):
    """Keeps the blocks of whole weights, also where processes hold shards of them."""

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Restore a saved state. bitsandbytes makes a deep copy, which fails on shards: they go in
        as plain tensors, and are shards again afterwards."""
        plain = {**state_dict, "state": _plain(state_dict["state"])}
        AdamW8bit.load_state_dict(self, plain, move_to_device)
        for parameter, slots in self.state.items():
            for name in MOMENTS if is_sharded(parameter) else ():
                if isinstance(slots.get(name), Tensor):
                    slots[name] = like(parameter, slots[name])


def _plain(value: Any) -> Any:
    """Replace the shards in a nest of dictionaries by this process's parts of them."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, Tensor) and is_sharded(value):
        return value.to_local()
    return value

"""Makes Muon usable for whole networks: torch.optim.Muon for matrices, AdamW for all else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mmrl.train.whole import WholeSteps

MATRIX = "muon"  # key of a parameter group: which of the two algorithms steps it


class WholeMuon(WholeSteps, torch.optim.Muon):
    """Orthogonalises whole matrices, also where processes hold shards of them."""


class MuonWithAdamW(torch.optim.Optimizer):
    """Steps matrices by Muon (Jordan et al. 2024) and all other parameters by AdamW, as Muon is
    meant to be used.

    Both algorithms are torch's; they share the parameter groups and the state of this optimizer, so
    that learning rates, checkpoints and what wraps an optimizer see a single one. ``matrix`` and
    ``rest`` are the options of the two.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        matrix: Mapping[str, Any],
        rest: Mapping[str, Any],
    ):
        listed = list(parameters)
        groups: list[dict[str, Any]] = [
            entry if isinstance(entry, dict) else {"params": [entry]} for entry in listed
        ]
        if not all(isinstance(entry, dict) for entry in listed):
            groups = [{"params": listed}]
        split = []
        for group in groups:
            for is_matrix in (True, False):
                chosen = [p for p in group["params"] if (p.ndim == 2) is is_matrix]
                if chosen:
                    split.append({**group, "params": chosen, MATRIX: is_matrix})
        self.options = {True: dict(matrix), False: dict(rest)}
        self.steppers: dict[bool, torch.optim.Optimizer] = {}
        super().__init__(split, {"lr": lr})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let torch's optimizers work on the groups and the state of this one, which loading a
        checkpoint replaces."""
        kinds: dict[bool, type[torch.optim.Optimizer]] = {
            True: WholeMuon,
            False: torch.optim.AdamW,
        }
        for is_matrix, kind in kinds.items():
            groups = [group for group in self.param_groups if group[MATRIX] is is_matrix]
            if not groups:
                continue
            stepper: Any = kind([*groups[0]["params"]], **self.options[is_matrix])
            for group in groups:
                for name, value in stepper.defaults.items():
                    group.setdefault(name, value)
            stepper.param_groups = groups
            stepper.state = self.state
            self.steppers[is_matrix] = stepper

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step of each algorithm on its groups."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for is_matrix, stepper in self.steppers.items():
            # a wrapper may have replaced the list, as accelerate does for shards
            stepper.state = self.state
            stepper.param_groups = [g for g in self.param_groups if g[MATRIX] is is_matrix]
            stepper.step()
        return loss

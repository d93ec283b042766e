"""A policy that is a table of velocities, and rows that were re-noised for it."""

import torch

from mmrl.core.distributions import Gaussian
from mmrl.core.metrics import Meter
from tests.fixtures.records import make_point
from tests.fixtures.swapping import Swapping


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def table(*rows):
    return torch.tensor(rows, dtype=torch.float64)


class Velocities(Swapping):
    """The velocity of every row under each name of weights."""

    def __init__(self, **known):
        self.known = known

    def dist(self, point):
        v = self.known[self.name][point.row_id]
        return Gaussian(v, torch.full((len(v), 1), 0.5**0.5, dtype=v.dtype))


def renoised(advantage, t=0.5, target=0.0, group=None):
    """Rows of four numbers at one time; their error is the mean square of velocity less target."""
    rows = len(advantage)
    name = torch.arange(rows)
    target = torch.full((rows, 4), target, dtype=torch.float64)
    return make_point(
        group=name * 0 if group is None else torch.tensor(group),
        row_id=name,
        state=target * 0,
        target=target,
        mask=torch.ones(rows, 1, dtype=torch.bool),
        num_decisions=torch.ones(rows, dtype=torch.long),
        time=torch.full((rows,), t, dtype=torch.float64),
        x0_per_output=torch.full((rows,), t, dtype=torch.float64),
        advantage=advantage,
    )


def measured_loss(objective, policy, point):
    """(loss, what it tells the log), coupled first where it couples."""
    meter = Meter()
    with meter.listening():
        if hasattr(objective, "couple"):
            with torch.no_grad():
                point = objective.couple(point, objective.measure(policy, point))
        loss = objective.loss(policy, point)
    return loss, meter

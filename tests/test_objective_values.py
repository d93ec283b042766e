"""Objectives at single points against numbers by hand: bounds, corners, defaults, what the log counts."""

import math
from types import SimpleNamespace

import pytest
import torch

from mmrl.dists import Gaussian
from mmrl.metrics import Meter
from mmrl.objectives import AWM
from mmrl.objectives.awm import SCORES
from mmrl.objectives.corrections import Importance, off_policy
from mmrl.registry import UserError
from mmrl.types import Point


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


class Velocities:
    """A policy that is a table: the velocity of every row under each name of weights."""

    def __init__(self, **known):
        self.known, self.name, self.weights = known, "live", SimpleNamespace(using=self.using)

    def using(self, name):
        policy = self

        class Swap:
            def __enter__(self):
                policy.name = name

            def __exit__(self, *_):
                policy.name = "live"

        return Swap()

    def dist(self, point):
        v = self.known[self.name][point.row]
        return Gaussian(v, torch.full((len(v), 1), 0.5, dtype=v.dtype))


def renoised(advantage, t=0.5):
    """Rows at one time whose target is 0, so that an error is the mean square of the velocity."""
    rows = len(advantage)
    name = torch.arange(rows)
    return Point(
        group=name * 0,
        row=name,
        state=torch.zeros(rows, 4, dtype=torch.float64),
        target=torch.zeros(rows, 4, dtype=torch.float64),
        mask=torch.ones(rows, 1, dtype=torch.bool),
        length=torch.ones(rows, dtype=torch.long),
        time=torch.full((rows,), t, dtype=torch.float64),
        gain=torch.full((rows,), t, dtype=torch.float64),
        advantage=advantage,
    )


# -- advantage-weighted matching ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", SCORES)
def test_a_perfect_prediction_scores_zero_with_a_finite_gradient(weighting):
    error = column(0.0).requires_grad_()
    score = SCORES[weighting](error, column(0.5))
    assert score.item() == 0
    score.sum().backward()
    assert error.grad.isfinite().all() and error.grad.item() < 0


def test_awm_counts_the_ratios_beyond_its_clip_on_either_side():
    """Errors 0.04 now; 0.09, 0.04, 0.0 before: log-ratios 0.025, 0, -0.02 at time 1/2."""
    advantage = column(1.0, 1.0, 1.0)
    live = torch.full((3, 4), 0.2, dtype=torch.float64)
    old = column(0.3, 0.2, 0.0).expand(3, 4)
    policy = Velocities(live=live, old=old, ref=live)
    for clip, fraction in (((0.5, 0.01), 1 / 3), ((0.01, 0.5), 1 / 3), ((0.01, 0.01), 2 / 3), (0.5, 0.0)):
        meter = Meter()
        with meter.listening():
            loss = AWM(weighting="t", clip=clip, kl=0.0).loss(policy, renoised(advantage))
        assert meter.mean("clip_fraction") == pytest.approx(fraction)
        ratio = [math.exp(0.025), 1.0, math.exp(-0.02)]
        low, high = clip if isinstance(clip, tuple) else (clip, clip)
        wanted = [-min(r, min(max(r, 1 - low), 1 + high)) for r in ratio]
        assert loss.flatten().tolist() == pytest.approx(wanted, abs=1e-9)


def test_awm_as_published_and_what_it_refuses():
    awm = AWM()
    assert (awm.weighting, awm.clip, awm.advantage_clip, awm.draws, awm.kl, awm.ema_kl) == (
        "ghuber",
        1.0,
        1.0,
        6,
        1e-4,
        0.0,
    )
    for wrong in ({"clip": 0.0}, {"clip": (0.1, 0.0)}, {"advantage_clip": 0.0}):
        with pytest.raises(UserError, match="must be positive"):
            AWM(**wrong)


# -- corrections of text -----------------------------------------------------------------------------------------------


def answers(gap, advantage=None, mask=None):
    """Log-probs of the policy that are ``gap`` [B, L] above those of what sampled."""
    gap = torch.tensor(gap, dtype=torch.float64)
    name = torch.arange(len(gap))
    mask = torch.ones(gap.shape, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    return Point(
        group=name * 0,
        row=name,
        state=gap,
        mask=mask,
        logprob=gap - 1,
        sampled=torch.full_like(gap, -1.0),
        advantage=advantage,
    )


@pytest.mark.parametrize("beyond", ["truncate", "mask"])
def test_importance_at_and_beyond_its_bounds(beyond):
    ratios = [0.25, 0.5, 1.0, 2.0, 8.0]
    point = answers([[math.log(ratio) for ratio in ratios]])
    weight = Importance(beyond=beyond, low=0.4, high=3.0).weight(point)[0]
    inside = {"truncate": [0.4, 0.5, 1.0, 2.0, 3.0], "mask": [0.0, 0.5, 1.0, 2.0, 0.0]}[beyond]
    assert weight.tolist() == pytest.approx(inside, abs=1e-12)
    same = answers([[0.0]])
    for low, high in ((1.0, 2.0), (0.5, 1.0)):  # a ratio of 1 lies inside both
        assert Importance(beyond=beyond, low=low, high=high).weight(same).item() == 1.0
    default = Importance(beyond=beyond).weight(point)[0].tolist()
    assert default == pytest.approx([*ratios[:4], 3.0 if beyond == "truncate" else 0.0], abs=1e-12)


def test_importance_of_rows():
    """The product of a row, or its mean's, over what is trained on."""
    point = answers([[math.log(2.0), math.log(3.0), 5.0]], mask=[[1, 1, 0]])
    assert Importance(level="sequence", high=9.0).weight(point)[0, :2].tolist() == pytest.approx([6.0, 6.0])
    assert Importance(level="geometric").weight(point)[0, :2].tolist() == pytest.approx([math.sqrt(6.0)] * 2)
    alone = Importance().weight(point.replace(sampled=None))
    assert torch.equal(alone, torch.ones(1, 3, dtype=torch.float64))


def test_importance_bounds_must_differ():
    for low in (3.0, 4.0):
        with pytest.raises(UserError, match="must be less than high"):
            Importance(low=low)


def test_off_policy_answers_are_dropped_only_where_they_are_bad_and_far():
    """Mean log(p_sampler / p): 0.3, 0.3, 0.3, 0.1, and exactly the threshold."""
    logp = torch.tensor([[-1.5, -1.1], [-1.5, -1.1], [-1.5, -1.1], [-1.1, -1.1], [-1.25, -1.25]], dtype=torch.float64)
    point = answers([[0.0, 0.0]] * 5, advantage=column(-1.0, 1.0, 0.0, -1.0, -1.0))
    meter = Meter()
    with meter.listening():
        kept = off_policy(logp, point, 0.25)
    assert kept.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
    assert meter.mean("off_policy") == pytest.approx(0.2)
    recorded = off_policy(logp, point.replace(sampled=None, logprob=point.sampled), 0.25)
    assert torch.equal(recorded, kept)

import pytest
import torch

from mmrl.core.distributions import Gaussian
from mmrl.core.errors import UserError
from mmrl.core.metrics import Meter
from mmrl.objectives import PolicyGradient
from mmrl.objectives.decisions import subset
from mmrl.objectives.kl import KL
from mmrl.objectives.surrogates import clip
from samplers.kernels import flow_sde
from samplers.noise import Rng
from tests.fixtures import toys
from tests.fixtures.records import make_point
from tests.fixtures.swapping import Swapping

LOG_RATIO = torch.tensor([5e-5, -8e-5, 2e-4, -3e-4, 0, 0.01], dtype=torch.float64)[:, None]
ADVANTAGE = torch.tensor([1, -1, 2, -2, 0.5, -0.7], dtype=torch.float64)[:, None]


def test_the_clipped_surrogate_of_published_code():
    """PPO (Schulman et al. 2017), eq. 7, as _grpo_clip_loss of UniRL returns it."""
    loss = clip(LOG_RATIO.exp(), ADVANTAGE, 1e-4, None)
    expected = [-1.00004995, 0.99992001, -2.00020003, 1.99979997, -0.5, 0.70703512]
    torch.testing.assert_close(
        loss.flatten(), torch.tensor(expected, dtype=torch.float64), atol=2e-6, rtol=0
    )
    assert float(loss.mean()) == pytest.approx(0.03441751, abs=2e-6)


class OneStep(Swapping):
    """A policy of one Gaussian step, and of a snapshot with another velocity."""

    def __init__(self, x, v, v_ref, t, s, eta):
        self.args = (t, s, eta)
        self.v = v
        self.v_ref = v_ref
        self.x = x

    def dist(self, point):
        return Gaussian(
            *flow_sde(self.x, self.v if self.name == "live" else self.v_ref, *self.args)
        )


def one_step():
    x = torch.tensor([[0.5, -1, 1.5, 0.25], [-0.75, 0.4, 0.1, -1.2]]).view(2, 1, 2, 2)
    v = torch.tensor([[0.2, -0.6, 0.9, -0.3], [1.1, -0.5, 0.35, 0.7]]).view(2, 1, 2, 2)
    noise = torch.tensor([[1, -0.5, 0.3, -1.2], [0.7, 0.2, -0.9, 1.5]]).view(2, 1, 2, 2)
    t = torch.full((2,), 0.75)
    s = torch.full((2,), 0.5)
    eta = torch.full((2,), 0.7)
    sampled = Gaussian(*flow_sde(x, v, t, s, eta))
    target = sampled.sample(noise)
    two = torch.arange(2)
    point = make_point(
        group=two,
        row_id=two,
        state=x,
        mask=torch.ones(2, 1, dtype=torch.bool),
        target=target,
        time=t,
        next_time=s,
        noise_level=eta,
        logprob=sampled.log_prob(target),
        advantage=torch.tensor([[1.0], [-1.0]]),
    )
    return OneStep(x, v + 0.01, v, t, s, eta), point


def test_ratio_and_kl_of_published_code():
    """Flow-GRPO (Liu et al. 2025), eq. 9 and its KL: the velocity moved by 0.01 after sampling."""
    policy, point = one_step()
    meter = Meter()
    with meter.listening():
        loss = PolicyGradient(clip_range=1.0, kl=KL(weight=1.0, form="flow_grpo")).loss(
            policy, point
        )
    plain = PolicyGradient(clip_range=1.0).loss(policy, point)
    assert plain.flatten().tolist() == pytest.approx([-1.00050044, 0.99806345], abs=2e-6)
    assert (loss - plain).flatten().tolist() == pytest.approx([3.3e-6] * 2, abs=1e-7)
    # theirs is times the step length
    assert meter.mean("kl") == pytest.approx(3.3e-6 / 0.25, rel=0.02)
    exact = PolicyGradient(clip_range=1.0, kl=1.0).loss(policy, point) - plain
    assert exact.flatten().tolist() == pytest.approx([meter.mean("kl")] * 2, abs=2e-7)


def test_asymmetric_clip_bounds_each_side():
    ratio = torch.tensor([0.5, 0.95, 1.2, 2.0], dtype=torch.float64)
    for sign, expected in ((1, [-0.5, -0.95, -1.2, -1.3]), (-1, [0.9, 0.95, 1.2, 2.0])):
        assert clip(ratio, sign * torch.ones(4), 0.1, 0.3).tolist() == pytest.approx(expected)


def test_advantages_are_clipped_and_clipping_is_counted():
    policy, point = one_step()
    big = point.replace(advantage=torch.tensor([[50.0], [-1.0]]))
    with Meter().listening() as meter:
        loss = PolicyGradient(clip_range=1e-3, advantage_clip=5.0).loss(policy, big)
    assert float(loss[0]) == pytest.approx(-5 * 1.00050044, abs=1e-4)
    assert meter.mean("clip_fraction") == 0.5  # |0.998 - 1| > 1e-3, |1.0005 - 1| < 1e-3
    with pytest.raises(UserError, match="flow_grpo is for flow models"):
        PolicyGradient(kl=KL(weight=1.0, form="flow_grpo")).loss(policy, point.replace(step=None))


def test_random_subsets_are_unbiased():
    """Every decision is kept equally often, so a subset estimates the whole mean without bias."""
    mask = torch.tensor([[True, True, False, True, True]]).expand(4000, 5)
    chosen = subset(mask, 0.5, Rng.of("subset"), torch.arange(4000))
    assert chosen.sum(1).unique().tolist() == [2] and not chosen[:, 2].any()
    torch.testing.assert_close(
        chosen[:, [0, 1, 3, 4]].double().mean(0), torch.full((4,), 0.5).double(), atol=0.03, rtol=0
    )
    assert torch.equal(subset(mask, 1.0, None, torch.arange(4000)), mask)


def test_noise_weights_are_the_injected_noise():
    """TempFlow-GRPO: on the first step the gradient of every decision, times its standard
    deviation."""
    policy = toys.make("flow", double=True)
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(2), 2, Rng.of("noise"))
    rollout = rollout.replace(
        advantage=torch.tensor([[1.0], [-1.0], [0.5], [-0.5]], dtype=torch.float64)
    )
    even = PolicyGradient()
    noise = PolicyGradient(timestep_weighting="noise")
    for point in even.points(policy, rollout, Rng.of(0)):
        expected = even.loss(policy, point) * policy.dist(point).std
        torch.testing.assert_close(noise.loss(policy, point), expected)

"""What a plug-in returns in another shape than its contract says is one sentence, with the
function, the shape it gave and the shape it must give: most of them broadcast in silence."""

import pytest

from mmrl import advantages
from mmrl.core.effects import Requires
from mmrl.core.errors import UserError
from mmrl.objectives import PolicyGradient
from mmrl.objectives.base import Objective
from tests.fixtures import toys
from tests.train.test_trainer import make_trainer


def per_row(logp, old, advantage, mask):
    return (-(advantage * (logp - old).exp()) * mask).sum(-1)


def mean(logp, old, advantage, mask):
    return per_row(logp, old, advantage, mask).mean()


def elementwise(logp, old, advantage, mask):
    return -(advantage * (logp - old).exp())


class PerRow(Objective):
    """A loss of a row in place of one of every decision."""

    requires = Requires(reads="decisions", visits=True)

    def points(self, policy, rollout, rng):
        return policy.path(rollout)

    def loss(self, policy, point):
        return -policy.dist(point).log_prob(point.target).sum(-1)


def flat(rewards, rollout):
    total = rewards.total()
    return total - total.mean()


def of_prompts(rewards, rollout):
    return advantages.flow_grpo(rewards, rollout)[::8]


@pytest.mark.parametrize(
    ("family", "surrogate", "gave"),
    [("flow", per_row, r"\[16\]"), ("causal", mean, r"\[\]")],
)
def test_a_surrogate_returns_a_loss_for_every_decision(family, surrogate, gave):
    objective = PolicyGradient(surrogate=surrogate)
    sentence = (
        rf"surrogate {surrogate.__name__} must return .*\[B, L\] = \[16, \d+\]; it returned {gave}"
    )
    with pytest.raises(UserError, match=sentence):
        make_trainer(family, objective=objective).iterate()
    make_trainer(family, objective=PolicyGradient(surrogate=elementwise)).iterate()


def test_a_loss_of_ones_own_has_the_same_shape():
    with pytest.raises(UserError, match=r"PerRow.loss must return .*\[B, L\].*it returned \[16\]"):
        make_trainer(objective=PerRow()).iterate()


@pytest.mark.parametrize(("advantage", "gave"), [(flat, "64"), (of_prompts, "8, 1")])
def test_an_advantage_compares_rows_or_decisions(advantage, gave):
    with pytest.raises(
        UserError,
        match=rf"advantage {advantage.__name__} must return .*\[B, 1\] = \[64, 1\] or \[B, K\] .*"
        rf"it returned \[{gave}\]",
    ):
        make_trainer(advantage=advantage).iterate()


def test_as_many_rows_as_decisions_hide_nothing():
    sizes = {"prompts_per_iteration": 2, "group_size": toys.make("flow").steps // 2}
    with pytest.raises(UserError, match=r"advantage flat must return .* it returned \[6\]"):
        make_trainer(advantage=flat, train_batch_size=6, micro_batch_size=6, **sizes).iterate()


def test_a_reward_is_a_number_for_each_sample():
    def column(media, prompts):
        return toys.reward(media, prompts)[:, None]

    with pytest.raises(UserError, match=r"'toy' returned .*\[64, 1\].*expected \[B\] = \[64\]"):
        make_trainer(reward=column).iterate()


def test_rows_of_a_flow_do_not_see_each_other():
    micro = 16
    policy = toys.make("flow")
    own = type(policy).velocity

    class MeanFree(type(policy)):
        def velocity(self, x, t, cond):
            v = own(self, x, t, cond)
            return v - v.mean(0)

    policy.__class__ = MeanFree
    with pytest.raises(UserError, match="MeanFree.velocity must treat rows independently"):
        make_trainer(policy=policy, train_batch_size=64, micro_batch_size=micro).iterate()
    policy = toys.make("flow")
    policy.__class__ = MeanFree
    # single rows are compared with none
    make_trainer(
        policy=policy, micro_batch_size=1, prompts_per_iteration=2, group_size=2, train_batch_size=4
    ).iterate()


def test_conditions_have_a_row_for_each_prompt():
    policy = toys.make("flow")
    own = type(policy).encode

    class OneForAll(type(policy)):
        def encode(self, prompts):
            return {n: x[:1] for n, x in own(self, prompts).items() if n != "uncond"}

    policy.__class__ = OneForAll
    with pytest.raises(
        UserError, match=r"OneForAll.encode \(\w+\) must return .*\[P, features\] = \[8"
    ):
        make_trainer(policy=policy).iterate()


def test_guidance_asks_for_an_unconditional_input():
    policy = toys.make("flow")
    own = type(policy).encode

    class NoEmpty(type(policy)):
        def encode(self, prompts):
            return {n: x for n, x in own(self, prompts).items() if n != "uncond"}

    policy.__class__ = NoEmpty
    policy.guidance_scale = 2.0
    with pytest.raises(UserError, match='"uncond" from NoEmpty.encode, one row'):
        make_trainer(policy=policy).iterate()

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


def elementwise(logp, old, advantage, mask):
    return -(advantage * (logp - old).exp())


def per_row(logp, old, advantage, mask):
    return (elementwise(logp, old, advantage, mask) * mask).sum(-1)


def mean(logp, old, advantage, mask):
    return per_row(logp, old, advantage, mask).mean()


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


def column(media, prompts):
    return toys.reward(media, prompts)[:, None]


class MeanFree(toys.ToyFlow):
    def velocity(self, x, t, cond):
        v = super().velocity(x, t, cond)
        return v - v.mean(0)


class OneForAll(toys.ToyFlow):
    def encode(self, prompts):
        return {n: x[:1] for n, x in super().encode(prompts).items() if n != "uncond"}


class NoEmpty(toys.ToyFlow):
    def encode(self, prompts):
        return {n: x for n, x in super().encode(prompts).items() if n != "uncond"}


SIX = {"prompts_per_iteration": 2, "group_size": 3, "train_batch_size": 6, "micro_batch_size": 6}
ROW, MEAN = PolicyGradient(surrogate=per_row), PolicyGradient(surrogate=mean)
REFUSED = [
    ({"objective": ROW}, r"surrogate per_row must .*\[B, L\] = \[16, \d+\]; .* \[16\]"),
    ({"objective": MEAN}, r"surrogate mean must .*\[B, L\] = \[16, \d+\]; it returned \[\]"),
    ({"objective": PerRow()}, r"PerRow.loss must return .*\[B, L\].*it returned \[16\]"),
    ({"advantage": flat}, r"advantage flat must return .*\[B, 1\] = \[64, 1\] or .* \[64\]"),
    ({"advantage": of_prompts}, r"advantage of_prompts must return .*it returned \[8, 1\]"),
    # as many rows as decisions hide nothing
    ({"advantage": flat} | SIX, r"advantage flat must return .* it returned \[6\]"),
    ({"reward": column}, r"'toy' returned .*\[64, 1\].*expected \[B\] = \[64\]"),
    ({"policy": MeanFree()}, "MeanFree.velocity must treat rows independently"),
    ({"policy": OneForAll()}, r"OneForAll.encode \(\w+\) must .*\[P, features\] = \[8"),
    ({"policy": NoEmpty(guidance_scale=2.0)}, '"uncond" from NoEmpty.encode, one row'),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_a_wrong_shape_is_one_sentence(options, sentence):
    with pytest.raises(UserError, match=sentence):
        make_trainer(**options).iterate()


def test_a_right_one_passes_and_single_rows_are_compared_with_none():
    make_trainer(objective=PolicyGradient(surrogate=elementwise)).iterate()
    make_trainer(policy=MeanFree(), **SIX | {"micro_batch_size": 1}).iterate()

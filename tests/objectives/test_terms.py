"""Terms of the policy gradient: options, part of the loss and state come from the term alone, also
from one that is written elsewhere."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import torch
from annotated_types import Gt

from mmrl import config
from mmrl.core.errors import UserError
from mmrl.core.registry import OBJECTIVES, documentation, options
from mmrl.objectives import PolicyGradient
from mmrl.objectives.terms import TERMS, Term
from mmrl.zoo.objectives import HAPO, ClipCov, Guard, KLCov
from samplers.noise import Rng
from tests.fixtures import toys


@dataclass
class Halved(Term):
    """share: of tokens: of the policy loss; it falls by half after every iteration."""

    share: Annotated[float, Gt(0)] | None = None

    of = "tokens"
    instead = {"share": "it is of tokens: leave it out"}

    def factor(self, at):
        return torch.full_like(at.logp, self.share)

    def add(self, loss, at):
        return loss + 1

    def adapt(self, iteration, metrics):
        if self.share:
            self.share /= 2

    def state_dict(self):
        return {"share": self.share}

    def load_state_dict(self, state):
        self.share = state["share"]


class Mine(PolicyGradient):
    """Is the policy gradient with a term of another file."""

    term_types = (*TERMS, Halved)


def point_of(objective, kind="causal"):
    policy = toys.make(kind, double=True, **({"record_entropy": True} if kind == "causal" else {}))
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(2), 2, Rng.of("terms"))
    advantage = torch.tensor([[1.0], [-1.0], [0.5], [2.0]]).double()
    expert = torch.tensor([False, True, False, True])
    provenance = rollout.provenance.replace(is_ground_truth=expert)
    rollout = rollout.replace(advantage=advantage, provenance=provenance)
    return policy, next(iter(objective.points(policy, rollout, Rng.of("points"))))


def test_a_term_from_elsewhere_has_its_options_its_loss_and_its_state():
    OBJECTIVES["mine"] = Mine
    try:
        objective = config.build({"mine": {"share": 0.5, "clip_range": 0.1, "kl": 0.0}}, OBJECTIVES)
        with pytest.raises(UserError, match="share"):
            config.build({"mine": {"share": -1.0}}, OBJECTIVES)
    finally:
        del OBJECTIVES["mine"]
    assert list(options(Mine))[-1] == "share" and "share" not in options(PolicyGradient)
    assert options(Mine)["share"].annotation == Annotated[float, Gt(0)] | None
    assert "it falls by half" in documentation(Mine)
    policy, point = point_of(objective)
    plain = PolicyGradient(clip_range=0.1).loss(policy, point)
    assert torch.equal(objective.loss(policy, point), plain * 0.5 + 1)
    assert torch.equal(Mine(clip_range=0.1).loss(policy, point), plain), "by default it is off"
    objective.adapt(0, {})
    again = Mine(share=0.5)
    again.load_state_dict(objective.state_dict())
    assert again.term(Halved).share == 0.25
    assert list(objective.unfit(toys.make("flow"))) == [("share", "it is of tokens: leave it out")]
    assert not list(objective.unfit(policy)) and not list(Mine().unfit(toys.make("flow")))


@pytest.mark.parametrize(
    ("objective", "name"), [(PolicyGradient, "kll"), (HAPO, "timestep_fraction"), (Guard, "sft")]
)
def test_an_option_of_no_term_is_refused(objective, name):
    assert name not in options(objective)
    with pytest.raises(TypeError, match=rf"{objective.__name__}\(\) got an unexpected .*'{name}'"):
        objective(**{name: 0.5})


@pytest.mark.parametrize("objective", [PolicyGradient, HAPO, KLCov, ClipCov])
def test_guided_answers_have_the_shaped_loss_under_every_surrogate(objective):
    """LUFFY: -A rho / (rho + gamma), also where a subclass has its own loss."""
    policy, point = point_of(shaped := objective(shaping=0.1))
    loss, plain = (each.loss(policy, point) for each in (shaped, objective()))
    ratio = (policy.dist(point).log_prob(point.target) - point.recorded).exp().detach()
    expert = (point.mask & point.provenance.is_ground_truth[:, None]).nonzero().tolist()
    assert expert
    for row, token in expert:
        rho, advantage = float(ratio[row, token]), float(point.advantage[row, 0])
        assert float(loss.detach()[row, token]) == pytest.approx(
            -advantage * rho / (rho + 0.1), abs=1e-9
        )
    own = ~point.provenance.is_ground_truth
    assert torch.equal(loss[own], plain[own])


def test_a_whole_sample_and_a_share_of_a_step_are_refused_beside_imitation():
    for other in ({"top_entropy": 0.5}, {"surrogate": "gspo"}):
        objective = config.build({"policy_gradient": {"sft": {"peak": 0.5}, **other}}, OBJECTIVES)
        why = dict(objective.unfit(toys.make("flow")))
        assert why["sft"].startswith("it needs a loss of single decisions")
    alone = config.build({"policy_gradient": {"sft": {"peak": 0.5}}}, OBJECTIVES)
    assert not list(alone.unfit(toys.make("flow"))) and not list(alone.unfit(toys.make("causal")))

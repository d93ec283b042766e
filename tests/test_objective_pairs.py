"""Every objective with every kind of policy: what suits each other learns, what does not is refused with the reason.

Generated from the registries: a new objective is tested by being registered, with its defaults or what LEARNS says.
"""

from functools import partial

import pytest

from mmrl import config, registry
from mmrl.optimizers import adamw
from mmrl.options import KINDS, TrainOptions, unsuited
from mmrl.policies.masked import MaskedDiffusion
from mmrl.registry import ADVANTAGES, OBJECTIVES, POLICIES, UserError
from mmrl.scoring import Scorer
from mmrl.session import read
from mmrl.trainer import Trainer
from rewards.card import card
from samplers.kernels import memoryless

from . import toys

registry.load_built_in()


class ToyHidden(toys.ToyTokens, MaskedDiffusion):
    """Masked diffusion whose finished samples can be hidden again."""

    visible = toys.ToyMasked.visible

    def __init__(self, **options):
        super().__init__(toys.seeded(toys.Bag), length=6, mask_id=5, steps=3, **options)

    def encode(self, prompts):
        found = super().encode(prompts)
        return found | {"uncond": {"label": found["label"][:1]}}


TOKENS = {"masked", "causal", "hidden"}
RATE = {"flow": 2e-2, "video": 2e-2, "diffusion": 3e-3}
KIND = toys.POLICIES | {"hidden": ToyHidden}
# Options of the objective, and those of the toy policy, where the defaults are for networks a million times as large.
LEARNS = {
    "grpo": {"clip": 0.02},
    "guard": {"clip": 0.02},
    "flow_dppo": {"threshold": 0.01},
    "dgpo": {"beta": 5.0, "kl": 0.001},
    "crd": {"kl": 0.0},
    "diffusion_dpo": {"beta": 5.0, "draws": 4},
    "d3po": {"beta": 5.0},
    "seppo": {"beta": 50.0, "draws": 8, "lag": 0.3},
    "rwr": {"beta": 0.3, "draws": 4},
    "draft": {"last": 3},
    "adjoint_matching": {"strength": 20.0},
}
POLICY = {
    ("adjoint_matching", "flow"): {"kernel": memoryless, "eta": 1.0},
    ("adjoint_matching", "video"): {"kernel": memoryless, "eta": 1.0},
}
PAIRS = [(name, kind) for name, entry in OBJECTIVES.items() for kind in KIND if not unsuited(entry, KIND[kind])]


@card(differentiable=True)
def close(media, prompts):
    """Latents near one, or tokens that are the third."""
    return (toys.smooth_reward if media.is_floating_point() else toys.reward)(media, prompts)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_a_pair_that_suits_each_other_raises_the_reward(name, kind):
    policy = KIND[kind](**POLICY.get((name, kind), {} if kind in TOKENS else {"steps": 4}))
    tokens = policy.decisions == "categorical"
    trainer = Trainer(
        policy, toys.prompts(2), Scorer({"close": close}), ADVANTAGES["dance"],
        config.build({name: LEARNS.get(name, {})}, OBJECTIVES), partial(adamw, lr=RATE.get(kind, 1e-1)),
        TrainOptions(prompts=2, copies=12, batch_size=24, iterations=8, seed=1),
    )  # fmt: skip
    found = [trainer.iterate()["reward/mean"] for _ in range(8)]
    assert sum(found[-2:]) / 2 > found[0] + (0.1 if tokens else 0.2), found


WHOLE = """
policy: {{{policy}: {{path: someone/something}}}}
data: {{digits: {{kind: single}}}}
reward: {{{reward}: 1.0}}
advantage: group
objective: {objective}
optimizer: {{adamw: {{lr: 1e-3}}}}
train: {{prompts: 4, copies: 4, batch_size: 16, iterations: 1}}
"""
REWARDS = {"sd3": "digits", "vlm": "count", "masked_lm": "count"}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_pair_that_does_not_is_refused_when_the_configuration_is_read(objective, tmp_path):
    for policy, reward in REWARDS.items():
        why = unsuited(OBJECTIVES[objective], POLICIES[policy])
        if why is None:
            continue
        (tmp_path / "run.yaml").write_text(WHOLE.format(policy=policy, reward=reward, objective=objective))
        with pytest.raises(UserError, match="run.yaml:6.* is for") as error:
            read(tmp_path / "run.yaml", [])
        assert why in str(error.value) and any(kind in why for kind in KINDS.values())


@pytest.mark.parametrize("silent", ["policy.sd3.eta=0", "policy.sd3.kernel=ode"])
def test_what_looks_at_noise_is_refused_for_a_sampler_without(silent, tmp_path):
    for objective, entry in OBJECTIVES.items():
        (tmp_path / "run.yaml").write_text(WHOLE.format(policy="sd3", reward="digits", objective=objective))
        if not getattr(entry, "visits", False):
            continue
        read(tmp_path / "run.yaml", [])
        with pytest.raises(UserError, match="run.yaml:6.*looks at steps with noise, of which this policy has none"):
            read(tmp_path / "run.yaml", [silent])
    visits = {name for name, entry in OBJECTIVES.items() if getattr(entry, "visits", False)}
    assert visits == {"grpo", "guard", "flow_dppo", "d3po", "adjoint_matching"}
    (tmp_path / "run.yaml").write_text(WHOLE.format(policy="sd3", reward="digits", objective="dgpo"))
    read(tmp_path / "run.yaml", [silent])


def test_an_objective_that_follows_the_rewards_gradient_is_refused_for_one_without(tmp_path):
    follow = {name for name, entry in OBJECTIVES.items() if hasattr(entry, "attach")}
    assert follow == {"draft", "adjoint_matching"}
    for objective in sorted(follow):
        for reward, fine in (("digits", True), ("jpeg_compressibility", False)):
            (tmp_path / "run.yaml").write_text(WHOLE.format(policy="sd3", reward=reward, objective=objective))
            if fine:
                read(tmp_path / "run.yaml", [])
                read(tmp_path / "run.yaml", ["reward.jpeg_compressibility={monitor: true}"])
                continue
            with pytest.raises(
                UserError, match="run.yaml:4.*'jpeg_compressibility' cannot be used: it has no gradient"
            ):
                read(tmp_path / "run.yaml", [])


def test_which_pairs_suit_each_other():
    """The two tables of docs: flow objectives and objectives of text, and what lies between."""
    pairs = {
        name: {policy for policy in REWARDS if not unsuited(entry, POLICIES[policy])}
        for name, entry in OBJECTIVES.items()
    }
    assert pairs["grpo"] == set(REWARDS) and pairs["dgpo"] == {"sd3"} and pairs["text"] == set(REWARDS) - {"sd3"}
    assert pairs["masked"] == {"masked_lm"} and pairs["gvpo"] == {"vlm"}
    assert all(pairs.values()), "an objective without a policy"

"""Every objective with every kind of policy: what suits each other learns, what does not is refused
with the reason.

Generated from the registries: a new objective is tested by being registered, with its defaults or
what LEARNS says.
"""

import pytest
import torch

from mmrl import config
from mmrl.advantages import dance_grpo
from mmrl.config.compatibility import KINDS, unsuited
from mmrl.core import registry
from mmrl.core.errors import UserError
from mmrl.core.registry import OBJECTIVES, POLICIES
from mmrl.experiment.build import read
from mmrl.policies.masked.policy import MaskedDiffusion
from mmrl.zoo.objectives import GroupLoss
from rewards.card import card
from samplers.kernels import memoryless
from samplers.noise import Rng
from tests.fixtures import toys

registry.load_built_in()


class ToyHidden(toys.ToyTokens, MaskedDiffusion):
    """Masked diffusion whose finished samples can be hidden again."""

    visible = toys.ToyMasked.visible

    def __init__(self, **options):
        super().__init__(toys.seeded(toys.Bag), length=6, mask_id=5, steps=3, **options)

    def encode(self, prompts):
        cond = super().encode(prompts)
        return cond | {"uncond": {"label": cond["label"][:1]}}


LATENTS, TOKENS = {"flow", "video"}, {"masked", "causal", "hidden"}
RATE = {"flow": 2e-2, "video": 2e-2}
KIND = toys.POLICIES | {"hidden": ToyHidden}
# Options of the objective, and those of the toy policy, where the defaults are for networks a
# million times as large.
LEARNS = {
    "policy_gradient": {"clip_range": 0.02},
    "grpo_guard": {"clip_range": 0.02},
    "flow_dppo": {"threshold": 0.01},
    "dgpo": {"beta": 5.0, "kl": 0.001},
    "crd": {"kl": 0.0},
    "diffusion_dpo": {"beta": 5.0, "num_noise_draws": 4},
    "d3po": {"beta": 5.0},
    "seppo": {"beta": 50.0, "num_noise_draws": 8},
    "rwr": {"beta": 0.3, "num_noise_draws": 4},
    "draft": {"last": 3},
    "adjoint_matching": {"strength": 20.0},
}
GROUP = {"a_lol": 48}  # follows good samples only, without a baseline
POLICY = {
    ("adjoint_matching", "flow"): {"sde_type": memoryless, "noise_level": 1.0},
    ("adjoint_matching", "video"): {"sde_type": memoryless, "noise_level": 1.0},
    **{("hapo", kind): {"record_entropy": True} for kind in ("causal", "hidden", "masked")},
}
# they need steps with noise, and no tree
OF_GROUPS = {
    name
    for name, entry in OBJECTIVES.items()
    if isinstance(entry, type) and issubclass(entry, GroupLoss)
}
# Answers of the data are rewarded by nothing: tests/objectives/test_supervised.py. Teachers take
# the place of rewards: test_distillation.py, test_few_step.py. laser needs a further token, which
# toys have not: tests/policies/vlm/test_self_scores.py.
REWARDED = {
    name: entry
    for name, entry in OBJECTIVES.items()
    if not entry.requires.supervised and name not in ("laser", "distill", "dmd")
}


def one_of_each_sort():
    """For every objective a kind of latents and a kind of tokens, in turn, of those it is for; of
    groups, whose losses know no kinds, one of all.

    The untrained toy of diffusion is none of them: it throws samples far out, and rewards with
    them, whatever it learns.
    """
    for turn, (name, entry) in enumerate(sorted(REWARDED.items())):
        for sort in [LATENTS | TOKENS] if name in OF_GROUPS else [LATENTS, TOKENS]:
            kinds = [kind for kind in KIND if kind in sort and not unsuited(entry, KIND[kind])]
            if kinds:
                yield name, kinds[turn % len(kinds)]


PAIRS = list(one_of_each_sort())


@card(differentiable=True)
def close(media, prompts):
    """Latents near one, or tokens that are the third."""
    return (toys.smooth_reward if media.is_floating_point() else toys.reward)(media, prompts)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_a_pair_that_suits_each_other_raises_the_reward(name, kind):
    policy = KIND[kind](**POLICY.get((name, kind), {} if kind in TOKENS else {"steps": 4}))
    size = GROUP.get(name, 12)
    sizes = {"prompts_per_iteration": 2, "group_size": size, "train_batch_size": 2 * size}
    objective = config.build({name: LEARNS.get(name, {})}, OBJECTIVES)
    rate = RATE.get(kind, 1e-1)
    trainer = toys.trainer(
        policy, objective, close, dance_grpo, rate, data=toys.prompts(2), **sizes, seed=1
    )
    before = reward_now(policy)
    rewards = [trainer.iterate()["reward/mean"] for _ in range(8)]
    if name != "seppo":
        least = 0.1 if kind in TOKENS else 0.2
        assert sum(rewards[-2:]) / 2 > rewards[0] + least, rewards
    else:
        assert reward_now(policy) > before + 0.2, rewards


@torch.no_grad()
def reward_now(policy):
    """Of samples of the live weights, where earlier ones sample in training."""
    rollout = policy.rollout(toys.prompts(2), 48, Rng.of("live"))
    return close(policy.decode(rollout), None).mean().item()


WHOLE = """
policy: {{{policy}: {{path: someone/something}}}}
data: {{digits: {{kind: single}}}}
reward: {{{reward}: 1.0}}
advantage: group
objective: {objective}
optimizer: {{adamw: {{lr: 1e-3}}}}
train: {{prompts_per_iteration: 4, group_size: 4, train_batch_size: 16, iterations: 1}}
"""
REWARDS = {"sd3": "digits", "vlm": "count", "masked_lm": "count"}


def written(folder, policy, reward, objective):
    text = WHOLE.format(policy=policy, reward=reward, objective=objective)
    (folder / "run.yaml").write_text(text)
    return folder / "run.yaml"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_pair_that_does_not_is_refused_when_the_configuration_is_read(objective, tmp_path):
    for policy, reward in REWARDS.items():
        why = unsuited(OBJECTIVES[objective], POLICIES[policy])
        if why is None:
            continue
        file = written(tmp_path, policy, reward, objective)
        with pytest.raises(UserError, match="run.yaml:6.* is for") as error:
            read(file, [])
        assert why in str(error.value) and any(kind in why for kind in KINDS.values())


def test_what_looks_at_noise_is_refused_for_a_sampler_without(tmp_path):
    flow = {name for name, entry in OBJECTIVES.items() if not unsuited(entry, POLICIES["sd3"])}
    assert {name for name in flow if OBJECTIVES[name].requires.visits} == {
        "policy_gradient",
        "distill",
        "grpo_guard",
        "flow_dppo",
        "d3po",
        "adjoint_matching",
    } | (OF_GROUPS - {"orpo", "simpo"})  # which are for tokens
    teachers = "{distill: {teachers: [{policy: {sd3: {path: a/b}}}]}}"
    silent = ["policy.sd3.noise_level=0", "policy.sd3.sde_type=ode"]
    for objective in ("policy_gradient", teachers, "d3po", "adjoint_matching", "gvpo"):
        file = written(tmp_path, "sd3", "digits", objective)
        read(file, [])
        says = "run.yaml:6.*needs steps with noise, of which this policy has none"
        for option in silent:
            with pytest.raises(UserError, match=says):
                read(file, [option])
    for option in silent:
        read(written(tmp_path, "sd3", "digits", "dgpo"), [option])


def test_an_objective_that_follows_the_rewards_gradient_is_refused_for_one_without(tmp_path):
    follow = {name for name, entry in OBJECTIVES.items() if entry.requires.differentiates}
    assert follow == {"draft", "adjoint_matching"}
    for objective in sorted(follow):
        file = written(tmp_path, "sd3", "digits", objective)
        read(file, [])
        read(file, ["reward.jpeg_compressibility={monitor: true}"])
        file = written(tmp_path, "sd3", "jpeg_compressibility", objective)
        says = "run.yaml:4.*'jpeg_compressibility' cannot be used: it has no gradient"
        with pytest.raises(UserError, match=says):
            read(file, [])
    tree = "policy.sd3.tree={splits: 2}"
    with pytest.raises(UserError, match="run.yaml:6.*follows single paths: remove .* tree"):
        read(written(tmp_path, "sd3", "digits", "draft"), [tree])


def test_which_pairs_suit_each_other():
    """The two tables of docs: flow objectives and objectives of text, and what lies between."""
    pairs = {
        name: {policy for policy in REWARDS if not unsuited(entry, POLICIES[policy])}
        for name, entry in OBJECTIVES.items()
    }
    assert (
        pairs["policy_gradient"] == set(REWARDS)
        and pairs["dgpo"] == {"sd3"}
        and pairs["clip_cov"] == set(REWARDS) - {"sd3"}
    )
    assert pairs["masked"] == {"masked_lm"} and pairs["gvpo"] == set(REWARDS)
    assert all(pairs.values()), "an objective without a policy"

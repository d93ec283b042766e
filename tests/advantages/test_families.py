"""Every advantage on rollouts of every family: flow, diffusion, masked and causal tokens, trees."""

import json
import warnings

import pytest
import torch

from mmrl.advantages import by_edge
from mmrl.advantages.memory import capture, restore
from mmrl.core import registry
from mmrl.core.errors import UserError
from mmrl.core.registry import ADVANTAGES
from mmrl.core.types import Rewards
from mmrl.experiment.build import read
from mmrl.policies.diffusion.trees import Tree
from mmrl.zoo.models.image_tokens.var import VAR
from samplers.noise import Rng
from tests.core.test_imports import ROOT
from tests.experiment.test_resume import resumes
from tests.fixtures import toys
from tests.fixtures.image_tokens import tiny_var
from tests.train.test_trainer import make_trainer

registry.load_built_in()

KINDS = {
    "flow": lambda: toys.make("flow"),
    "diffusion": lambda: toys.make("diffusion"),
    "video": lambda: toys.make("video"),
    "masked": lambda: toys.make("masked", record_entropy=True),
    "causal": lambda: toys.make("causal", record_entropy=True),
    "tree": lambda: toys.make("flow", tree=Tree(splits=[0, 2]), steps=4),
}
TREES = ("tree", "token_tree")
CHOSEN = {
    "gcpo": {"behaviour": "second"},
    "filtered": {"keep": [3, 2], "by": "surprisal"},
    "single_stream": {"low": -9.0, "high": 9.0},
    "bnpo": {"low": -9.0, "high": 9.0},
    "drpo": {"reward": "first", "right": 0.0},
    "recorded": {"which": "surprisal"},
}
NEEDS_TREE = ("branch", "tree_grpo")


@pytest.fixture(scope="module", params=[*KINDS, "token_tree"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def rollout(kind, tmp_path_factory):
    if kind == "token_tree":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folder = tiny_var(tmp_path_factory.mktemp("var"), (1, 2, 3), 2)
            policy = VAR(str(folder), branch_at=2, branches=2, record_entropy=True)
        prompts = [{"text": str(label), "label": label} for label in range(3)]
    else:
        policy = KINDS[kind]()
        prompts = toys.prompts(3)
    with torch.no_grad():
        return policy.rollout(prompts, 4, Rng.of("families"))


def rewards(rollout):
    row = rollout.row_id.double()
    second = (row.remainder(3) == 0).double()
    return Rewards({"first": (row * 1.7).sin() * 3, "second": second}, {"second": 0.5})


SHIPPED = [
    name
    for name, entry in ADVANTAGES.items()
    if entry.__module__.startswith(("mmrl.advantages", "mmrl.zoo.advantages"))
]


def test_every_advantage_works_for_every_family(kind, rollout, subtests):
    for name in SHIPPED:
        with subtests.test(name):
            assert_works(name, kind, rollout)


def assert_works(name, kind, rollout):
    advantage = ADVANTAGES.build(name, **CHOSEN.get(name, {}))
    needs_tokens = hasattr(ADVANTAGES[name], "requires")
    latents = kind in ("flow", "diffusion", "video", "tree")
    if name in NEEDS_TREE and kind not in TREES or needs_tokens and latents:
        with pytest.raises(UserError, match="tree|tokens|record_entropy"):
            advantage(rewards(rollout), rollout)
        return
    for _ in range(2):  # with a memory, the second has one
        values = advantage(rewards(rollout), rollout)
        decisions = by_edge(values.float(), rollout)
        assert len(values) == 12 and values.shape[1] in (1, rollout.mask.shape[1])
        assert (values.isfinite() | values.isnan()).all() and values.isfinite().any()
        expected = rollout.mask.shape[1] if rollout.edge_id is not None else values.shape[1]
        assert decisions.shape == (12, expected)


def test_a_resumed_advantage_goes_on_where_it_was(subtests):
    """Alone, and under another one; what is saved goes through JSON."""
    for name in [name for name in SHIPPED if name not in (*NEEDS_TREE, "gtpo")]:
        with subtests.test(name=name):
            with torch.no_grad():
                policy = toys.make("causal", record_entropy=True)
                rollout = policy.rollout(toys.prompts(3), 4, Rng.of("resumed"))
            first = rewards(rollout)
            later = Rewards({key: x.flip(0) for key, x in first.items()}, first.weights)

            def build(name=name):
                inner = ADVANTAGES.build(name, **CHOSEN.get(name, {}))
                return ADVANTAGES.build("temporal", base=inner)

            advantage = build()
            advantage(first, rollout)
            resumed = build()
            restore(resumed, json.loads(json.dumps(capture(advantage))))
            torch.testing.assert_close(
                resumed(later, rollout), advantage(later, rollout), equal_nan=True, rtol=0, atol=0
            )


@pytest.mark.parametrize("advantage", ["gtpo", "{temporal: {base: gtpo}}"])
def test_an_advantage_of_tokens_is_refused_for_latents_when_the_configuration_is_read(advantage):
    path = ROOT / "configs" / "digits" / "flow_grpo.yaml"
    with pytest.raises(UserError, match="the advantage gtpo is for models that write tokens"):
        read(path, [f"advantage={advantage}"])
    assert read(path, ["advantage=unlikeliness"])


@pytest.mark.parametrize(
    ("chosen", "option"),
    [
        ("edge_grpo", "record_entropy"),
        ("{temporal: {base: gtpo}}", "record_entropy"),
        ("{recorded: {which: entropy}}", "record_entropy"),
        ("recorded", "record_self_certainty"),
        ("{focal: {spread: distributions}}", "record_divergence"),
    ],
)
def test_what_the_policy_must_record_is_said_when_the_configuration_is_read(chosen, option):
    path = ROOT / "configs" / "digits" / "ar_grpo.yaml"
    with pytest.raises(UserError, match=f"set policy.llamagen.{option} to true"):
        read(path, [f"advantage={chosen}"])
    assert read(path, [f"advantage={chosen}", f"policy.{option}=true"])


@pytest.mark.parametrize("advantage", ["branch", "tree_grpo", "{temporal: {base: branch}}"])
def test_an_advantage_of_trees_is_refused_where_nothing_is_shared(advantage):
    path = ROOT / "configs" / "digits" / "flow_grpo.yaml"
    with pytest.raises(UserError, match="compares the edges of a tree; set policy.sd3.tree"):
        read(path, [f"advantage={advantage}"])
    assert read(ROOT / "configs" / "digits" / "branch_grpo.yaml", [f"advantage={advantage}"])


def test_this_page_knows_all_of_them():
    assert set(CHOSEN) | set(NEEDS_TREE) <= set(ADVANTAGES)


NEW = "bnpo mapo noise_aware grpo_lead drpo asymre copo riskpo brpo pvpo aapo single_stream"
NEW = [*NEW.split(), "unlikeliness", "filtered", "hapo", "recorded"]


FAMILY_OF = {name: ("flow", "masked", "causal")[i % 3] for i, name in enumerate(NEW)}


@pytest.mark.parametrize(("name", "family"), list(FAMILY_OF.items()))
def test_a_trainer_learns_with_it_and_resumes_to_the_bit(name, family, tmp_path):
    chosen = {"drpo": {}, "filtered": {"keep": [2, 1], "by": "surprisal"}}
    chosen = CHOSEN | chosen | {"unlikeliness": {"right": -9.0}}

    def fresh():
        advantage = ADVANTAGES.build(name, **chosen.get(name, {}))
        sizes = {"prompts_per_iteration": 4, "group_size": 4, "train_batch_size": 16}
        return make_trainer(family, advantage=advantage, **sizes)

    trainer = fresh()
    before = [p.clone() for p in trainer.policy.weights.parameters().values()]
    trainer.iterate()
    after = list(trainer.policy.weights.parameters().values())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.isfinite().all() for p in after)
    resumes(fresh, tmp_path)


LEARNING = {
    "filtered": {"keep": 6, "by": "surprisal", "prefer": "lowest"},
    "gtpo": {"at_most": None},
}


@pytest.mark.slow
# with parts, with a memory of prompts, of rows it leaves out, of tokens
@pytest.mark.parametrize("name", ["copo", "single_stream", "filtered", "gtpo"])
def test_the_reward_rises_with_it(name):
    advantage = ADVANTAGES.build(name, **LEARNING.get(name, {}))
    trainer = make_trainer("causal", advantage=advantage, lr=1e-2)
    trainer.policy.quantities = ("entropy",)
    rewards = [trainer.iterate()["reward/mean"] for _ in range(20)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.08


def test_the_advantage_underneath_may_tell_decisions_apart(subtests):
    for name in ["mapo", "noise_aware", "grpo_lead", "drpo", "copo", "aapo"]:
        for missing in [False, True]:
            with subtests.test(name=name, missing=missing):
                with torch.no_grad():
                    rollout = toys.make("causal").rollout(toys.prompts(3), 4, Rng.of("nested"))
                earned = rewards(rollout)
                if missing:
                    earned["first"][5] = torch.nan
                inner = ADVANTAGES.build("temporal")
                values = ADVANTAGES.build(name, base=inner)(earned, rollout)
                assert values.shape == rollout.mask.shape
                assert values.isnan().any(1).nonzero()[:, 0].tolist() == ([5] if missing else [])
                assert values.isnan().all(1).nonzero()[:, 0].tolist() == ([5] if missing else [])

"""Every advantage on rollouts of latents, of masked and causal tokens, and of trees."""

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
from tests.fixtures import toys
from tests.fixtures.image_tokens import tiny_var

registry.load_built_in()

KINDS = {
    "flow": lambda: toys.make("flow"),
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


def token_tree(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = str(tiny_var(folder, (1, 2, 3), 2))
        return VAR(folder, branch_at=2, branches=2, record_entropy=True)


def rewards(rollout):
    row = rollout.row_id.double()
    second = (row.remainder(3) == 0).double()
    return Rewards({"first": (row * 1.7).sin() * 3, "second": second}, {"second": 0.5})


SHIPPED = [
    name
    for name, entry in ADVANTAGES.items()
    if entry.__module__.startswith(("mmrl.advantages", "mmrl.zoo.advantages"))
]


@pytest.mark.parametrize("kind", [*KINDS, "token_tree"])
def test_every_advantage_works_for_every_family(kind, subtests, tmp_path):
    policy = token_tree(tmp_path) if kind == "token_tree" else KINDS[kind]()
    prompts = [{"text": str(label), "label": label} for label in range(3)]
    with torch.no_grad():
        rollout = policy.rollout(prompts, 4, Rng.of("families"))
    for name in SHIPPED:
        with subtests.test(name):
            assert_works(name, kind, rollout)


def assert_works(name, kind, rollout):
    advantage = ADVANTAGES.build(name, **CHOSEN.get(name, {}))
    needs_tokens = hasattr(ADVANTAGES[name], "requires")
    latents = kind in ("flow", "tree")
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
    policy = toys.make("causal", record_entropy=True)
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(3), 4, Rng.of("resumed"))
    first = rewards(rollout)
    later = Rewards({key: x.flip(0) for key, x in first.items()}, first.weights)
    for name in [name for name in SHIPPED if name not in (*NEEDS_TREE, "gtpo")]:
        with subtests.test(name=name):

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


LATENTS = "flow_grpo"
TOKENS = "ar_grpo"
RECORD = "set policy.llamagen.%s to true"
MISFITS = [  # configuration, advantage, what is said, what makes it fit
    (LATENTS, "gtpo", "gtpo is for models that write tokens", "advantage=unlikeliness"),
    (LATENTS, "{temporal: {base: gtpo}}", "gtpo is for models that", "advantage=unlikeliness"),
    (LATENTS, "tree_grpo", "compares the edges of a tree; set policy.sd3.tree", None),
    (LATENTS, "{temporal: {base: branch}}", "the edges of a tree; set policy.sd3.tree", None),
    (TOKENS, "edge_grpo", RECORD, "record_entropy"),
    (TOKENS, "{temporal: {base: gtpo}}", RECORD, "record_entropy"),
    (TOKENS, "{recorded: {which: entropy}}", RECORD, "record_entropy"),
    (TOKENS, "recorded", RECORD, "record_self_certainty"),
    (TOKENS, "{focal: {spread: distributions}}", RECORD, "record_divergence"),
]


@pytest.mark.parametrize(("name", "advantage", "says", "remedy"), MISFITS)
def test_what_the_policy_does_not_have_is_said_when_it_is_read(name, advantage, says, remedy):
    chosen = [f"advantage={advantage}"]
    if name == TOKENS:
        says, remedy = says % remedy, f"policy.{remedy}=true"
    with pytest.raises(UserError, match=says):
        read(ROOT / "configs" / "digits" / f"{name}.yaml", chosen)
    fit = f"{name}.yaml" if remedy else "branch_grpo.yaml"
    assert read(ROOT / "configs" / "digits" / fit, chosen + ([remedy] if remedy else []))


@pytest.mark.parametrize("name", ["mapo", "noise_aware", "grpo_lead", "drpo", "copo", "aapo"])
def test_the_advantage_underneath_may_tell_decisions_apart(name):
    with torch.no_grad():
        rollout = toys.make("causal").rollout(toys.prompts(3), 4, Rng.of("nested"))
    earned = rewards(rollout)
    earned["first"][5] = torch.nan
    values = ADVANTAGES.build(name, base=ADVANTAGES.build("temporal"))(earned, rollout)
    assert values.shape == rollout.mask.shape
    assert torch.equal(values.isnan(), (torch.arange(12) == 5)[:, None].expand_as(values))

"""``Policy`` declares what is used of a policy, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mmrl.config.compatibility import unsupported_options
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.policies import contracts as module
from mmrl.policies.capabilities import Capabilities
from mmrl.policies.contracts import Contract, Demonstrates, FollowsProcess, Replays
from tests.fixtures import sources, toys

load_built_in()
MMRL = Path(__file__).parents[2] / "mmrl"
# the dry run and the worlds build policies of one family, and use what is that family's own; in
# config a ``policy`` is a section
CONCRETE = {"worlds", "config"}


def trees(inside: bool):
    """Parse the files of policies and models, or those of the rooms that know no family."""
    for path in sorted(MMRL.rglob("*.py")):
        parts = path.relative_to(MMRL).parts
        is_inside = parts[0] == "policies" or parts[:2] == ("zoo", "models")
        concrete = is_inside or parts[0] in CONCRETE or parts[:2] == ("apps", "dry_run")
        if is_inside if inside else not concrete:
            yield sources.tree(path)


def attributes(tree: ast.AST, owners: set[str]) -> set[str]:
    """Collect x of every ``owner.x`` and ``something.owner.x``."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (
            (isinstance(node.value, ast.Name) and node.value.id in owners)
            or (isinstance(node.value, ast.Attribute) and node.value.attr in owners)
        )
    }


def declared() -> set[str]:
    """Collect the public members of ``Policy`` and of the contracts that only some keep: methods,
    annotated fields, and what its constructor sets."""
    bodies = [
        node.body
        for file in ("base.py", "contracts.py")
        for node in ast.parse((MMRL / "policies" / file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        and (node.name == "Policy" or any(ast.unparse(x) == "Contract" for x in node.bases))
    ]
    nodes = [node for body in bodies for node in body]
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    names |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign)}
    constructor = next(node for node in nodes if getattr(node, "name", "") == "__init__")
    names |= {
        node.attr
        for node in ast.walk(constructor)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return {name for name in names if not name.startswith("_")}


def test_everything_used_of_a_policy_is_declared():
    used = set().union(*(attributes(tree, {"policy"}) for tree in trees(inside=False)))
    assert used and not used - declared()


def test_everything_declared_is_used_by_the_library_or_by_a_family():
    owners = {"policy", "limits", "replays"}
    used = set().union(*(attributes(tree, owners) for tree in trees(inside=False)))
    used |= set().union(*(attributes(tree, {"self", "policy"}) for tree in trees(inside=True)))
    # the registry reads it when options are listed
    assert declared() - used == {"not_options"}


def test_nobody_asks_a_policy_what_it_happens_to_have():
    questions = {
        ast.unparse(node)
        for tree in trees(inside=False)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("hasattr", "getattr")
        and ast.unparse(node.args[0]).rpartition(".")[2] == "policy"
    }
    assert not questions


def test_capabilities_hold_what_they_say():
    for name, entry in POLICIES.items():
        can = entry.capabilities
        assert isinstance(can, Capabilities), name
        assert (can.decisions == "categorical") != FollowsProcess.kept_by(entry), name
        assert Replays.kept_by(entry), name
        # the published folder of the one has no encoder of its tokens; the other has no objective
        # that learns from texts and from images whose denoising path is unknown
        assert Demonstrates.kept_by(entry) == (name not in ("glm_image", "unified_flow")), name


def contracts() -> list[type[Contract]]:
    """List the contracts that only some policies keep."""
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
    return [kind for kind in kinds if issubclass(kind, Contract) and kind is not Contract]


def test_who_does_not_keep_a_contract_is_refused_by_name():
    policy = toys.make("flow")
    assert Replays.of(policy) is policy
    for contract in contracts():
        with pytest.raises(UserError, match=f"^ToyBare {contract.lack}$"):
            contract.of(toys.ToyBare())


def test_options_are_held_against_the_capabilities():
    options = TrainOptions(
        2, 2, 4, 1, max_new_tokens_schedule=((1, 5),), ground_truth_rollout="answer"
    )
    assert not list(unsupported_options(options, POLICIES["vlm"]))
    assert len(list(unsupported_options(options, POLICIES["sd3"]))) == 2
    assert not list(unsupported_options(options, lambda: None)), "a function cannot say"

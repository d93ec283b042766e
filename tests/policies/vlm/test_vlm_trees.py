"""Answers of a vision-language model that branch: what they share is written, read and trained on
once, and every log-prob is that of the answer by itself."""

from functools import partial
from string import ascii_letters

import pytest
import torch

from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.types import Rewards
from mmrl.experiment.build import read
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.policies.vlm.trees import TextTree
from mmrl.rollout.stages import Drawn
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.advantages import tree_grpo, tree_mean
from mmrl.zoo.advantages.branch import Branch
from samplers.noise import Rng
from tests.core.test_imports import ROOT
from tests.policies.vlm.test_vlm_policy import (
    assert_near,
    gradient_of,
    logprobs,
    policy_of,
    prompts,
    rolled,
    weighted,
)

TREES = {
    "in turn": TextTree(every=2, rounds=2),
    "random": TextTree(every=1, choose="random", branches=2, rounds=2),
    "entropy": TextTree(every=1, choose="entropy", branches=1, rounds=3),
    "marks": TextTree(marks=tuple(ascii_letters), choose="random", branches=1, rounds=2),
}


@pytest.fixture(scope="module", params=["entropy", "marks"])
def grown(request):
    policy = policy_of(tree=TREES[request.param], max_new_tokens=9, temperature=0.9)
    return policy, rolled(policy, copies=2 * TREES[request.param].leaves)


def whole(policy, rollout):
    """The same answers, each by itself."""
    return rollout.replace(edge_id=None, mask=rollout.path_mask())


def test_answers_share_what_their_edges_say(grown):
    policy, rollout = grown
    leaves = policy.tree.leaves
    path = rollout.path_mask()
    assert len(rollout) == 3 * 2 * leaves
    for row in range(len(rollout)):
        for k in range(path.shape[1]):
            owner = int((rollout.row_id == rollout.edge_id[row, k]).nonzero())
            assert rollout.group[owner] == rollout.group[row]
            assert owner // leaves == row // leaves
            shared = rollout.sample[row, : k + 1]
            if path[row, k]:
                assert torch.equal(rollout.sample[owner, : k + 1], shared)
                assert rollout.logprob[owner, k] == rollout.logprob[row, k]
            assert rollout.mask[row, k] == (path[row, k] and owner == row)
    # without gaps, and every answer has its own token
    assert torch.equal(path, path.long().cumprod(1).bool())
    assert rollout.mask.any(1).all()
    begun = rollout.edge_id[:, 0].view(-1, leaves)
    assert (begun == begun[:, :1]).double().mean() > 0.5
    alone, answers = policy.decode(whole(policy, rollout)), policy.decode(rollout)
    assert [(str(a), a.tokens) for a in answers] == [(str(a), a.tokens) for a in alone]


def test_log_probs_are_those_of_answers_by_themselves(grown):
    policy, rollout = grown
    alone = whole(policy, rollout)
    assert policy.net.packed and policy.net.branches
    policy.net.packed = policy.net.branches = False
    expected = logprobs(policy, alone)
    policy.net.packed = True
    packed = logprobs(policy, alone)
    policy.net.branches = True
    scored = logprobs(policy, rollout)
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scored[rollout.mask], expected[rollout.mask], atol=1e-5, rtol=1e-5)
    path = alone.mask
    torch.testing.assert_close(rollout.logprob[path], expected[path], atol=1e-5, rtol=1e-5)


def gradient(policy, rollout, branches, packed=True):
    policy.net.packed, policy.net.branches = packed, branches
    found = gradient_of(policy.net, weighted(logprobs(policy, rollout) * rollout.mask))
    policy.net.packed = policy.net.branches = True
    return found


def test_a_shared_token_goes_through_the_network_once(grown):
    policy, rollout = grown
    shapes = []
    layer = policy.net.hf.base_model.language_model.layers[0].mlp
    hook = layer.register_forward_pre_hook(lambda module, x: shapes.append(x[0].shape[:2].numel()))
    shared = gradient(policy, rollout, True)
    apart = gradient(policy, rollout, False)
    hook.remove()
    assert_near(shared, apart)
    assert_near(shared, gradient(policy, rollout, False, packed=False))
    last = rollout.path_mask().sum(1) - 1  # the last token is not read
    beginnings = {
        (int(rollout.group[row]), tuple(rollout.sample[row, : k + 1].tolist()))
        for row in range(len(rollout))
        for k in range(int(last[row]))
    }
    assert shapes[1] == len(beginnings)
    assert shapes[3] == int(last.sum()) > shapes[1]


def test_passes_of_few_rows_have_the_gradient_of_one(grown):
    """Also where a pass has a branch without the answer that it grew from, in any order."""
    policy, rollout = grown
    weights = torch.linspace(-1, 1, rollout.mask.numel()).view_as(rollout.logprob) * rollout.mask
    order = torch.randperm(len(rollout), generator=torch.Generator().manual_seed(0))
    parts = [(logprobs(policy, rollout[at]) * weights[at]).sum() for at in order.split(5)]
    assert_near(gradient_of(policy.net, sum(parts)), gradient(policy, rollout, True))


def test_places_are_every_so_many_tokens_or_behind_marks():
    policy = policy_of(tree=TREES["in turn"], max_new_tokens=9)
    policy.ending = type(policy.ending)(**vars(policy.ending) | {"stops": ()})
    rollout = rolled(policy, copies=4)
    for names in rollout.edge_id.view(-1, 4, 9).unbind(0):
        a, b, c, d = names.unbind(0)
        for one, other, place in ((b, a, 2), (c, a, 4), (d, b, 4)):
            assert (one[:place] == other[:place]).all() and (one[place:] != other[place:]).all()
    marks = policy_of(tree=TREES["marks"], max_new_tokens=40, temperature=2.0)
    rollout = rolled(marks, copies=6)
    shared = (rollout.edge_id != rollout.row_id[:, None]).sum(1).tolist()
    texts = [marks.inputs.decode(row[:n].tolist()) for row, n in zip(rollout.sample, shared) if n]
    assert len(texts) > 6 and all(text[-1:] in ascii_letters for text in texts)


def test_the_highest_entropy_is_chosen():
    policy = policy_of(tree=TextTree(every=1, choose="entropy", rounds=1), max_new_tokens=9)
    rollout = rolled(policy, copies=2)
    point = next(iter(policy.path(whole(policy, rollout))))
    entropy = policy.dist(point).entropy()
    for trunk in range(0, len(rollout), 2):
        shared = int((rollout.edge_id[trunk + 1] == rollout.row_id[trunk]).sum())
        length = int(rollout.mask[trunk].sum())
        if length > 1:
            assert shared == 1 + int(entropy[trunk, 1:length].argmax())


def test_samples_do_not_depend_on_parts_or_processes():
    given = prompts()
    policy = policy_of(tree=TREES["random"], temperature=0.9)
    together = rolled(policy, given, copies=5)
    alone = rolled(policy, given[1:2], copies=5, rng=Rng.of("vlm").after(5, 1))
    assert torch.equal(together.sample[5:10], alone.sample)
    assert torch.equal(together.edge_id[5:10], alone.edge_id)
    policy.pass_sizes.rows = 5  # three parts of one tree each
    parts = rolled(policy, given, copies=5)
    assert torch.equal(parts.sample, together.sample)
    assert torch.equal(parts.edge_id, together.edge_id)


def test_advantages_of_trees_by_a_plain_loop(grown):
    policy, rollout = grown
    rewards = torch.linspace(0, 1, len(rollout)).double().sin() + rollout.path_mask().sum(1) / 7
    values = Rewards({"r": rewards})
    mean = tree_mean(values, rollout)
    base = tree_mean(values, rollout.replace(edge_id=None))[:, 0]
    depth = Branch()(values, rollout)
    for row in range(0, len(rollout), 3):
        for k in range(rollout.mask.shape[1]):
            names = rollout.edge_id[:, k]
            below = names == names[row]
            assert mean[row, k] == pytest.approx(float(base[below].mean()), abs=1e-6)
            same = rollout.group == rollout.group[row]
            edges = {int(n): float(rewards[names == n].mean()) for n in names[same]}
            spread = torch.tensor(list(edges.values()), dtype=torch.float64)
            expected = (edges[int(names[row])] - spread.mean()) / (spread.std() + 1e-8)
            assert depth[row, k] == pytest.approx(float(expected), abs=1e-5)
    assert tree_grpo(values, rollout).isfinite().all()


def test_what_cannot_branch_is_refused():
    policy = policy_of(tree=TREES["in turn"])
    with pytest.raises(UserError, match="train.group_size 3.*multiple of 4"):
        rolled(policy, copies=3)
    with policy.evaluating():
        assert rolled(policy, copies=3).edge_id is None
    with pytest.raises(UserError, match="policy option tree.*leave out engine"):
        policy_of(tree=TREES["in turn"], engine="hf")
    with pytest.raises(UserError, match="policy option tree.*mllama"):
        policy_of("mllama", tree=TREES["in turn"])


def test_what_an_unfinished_answer_shares_is_still_trained():
    policy = policy_of(tree=TextTree(every=2, rounds=1), max_new_tokens=4)
    trainer = Trainer(
        policy,
        prompts()[:2],
        Scorer({"length": lambda texts, given: [float(len(text)) for text in texts]}),
        tree_mean,
        PolicyGradient(),
        partial(adamw, lr=1e-2),
        TrainOptions(2, 4, 8, 1, mask_truncated_completions=True),
    )
    rollout = rolled(policy, prompts()[:2], copies=4)
    texts = policy.decode(rollout)
    for row, text in enumerate(texts):
        text.finished = row % 2 == 1  # of every tree the trunk alone is cut
    rewards = Rewards({"r": torch.arange(8.0)})
    compared = trainer._compare(Drawn(rollout, texts, rewards), rewards)
    shared = rollout.edge_id[1::2] != rollout.row_id[1::2, None]
    assert torch.equal(compared.mask[::2], rollout.mask[::2] & shared)
    assert torch.equal(compared.mask[1::2], rollout.mask[1::2])
    assert compared.trainable.all()


def test_options_that_exchange_answers_are_refused_beside_a_tree():
    config = ROOT / "configs" / "vlm" / "tree_rpo.yaml"
    read(config, [])
    for option, says in (
        ("train.stages=[replay_buffer]", "share their beginnings; leave it out"),
        ("train.ground_truth_rollout=answer", "share their beginnings; leave it out"),
        ("policy.vlm.tree=null", "compares the edges of a tree; set policy.vlm.tree"),
    ):
        with pytest.raises(UserError, match=says):
            read(config, [option])

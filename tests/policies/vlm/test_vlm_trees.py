"""Answers of a vision-language model that branch: what they share is written, read and trained on
once, and every log-prob is that of the answer by itself."""

from collections import Counter
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
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_policy import (  # noqa: F401
    assert_near,
    logprobs,
    policy_of,
    prompts,
    quiet,
    rolled,
)

TREES = {
    "in turn": TextTree(every=2, rounds=2),
    "three": TextTree(every=3, branches=2, rounds=1),
    "random": TextTree(every=1, choose="random", branches=2, rounds=2),
    "entropy": TextTree(every=1, choose="entropy", branches=1, rounds=3),
    "marks": TextTree(marks=tuple(ascii_letters), choose="random", branches=1, rounds=2),
}


@pytest.fixture(scope="module", params=["entropy", "marks", "three"])
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


def gradient_of(policy, rollout, branches, packed=True):
    policy.net.packed, policy.net.branches = packed, branches
    policy.net.zero_grad()
    weights = torch.linspace(-1, 1, rollout.mask.numel()).view_as(rollout.logprob)
    (logprobs(policy, rollout) * weights * rollout.mask).sum().backward()
    policy.net.packed = policy.net.branches = True
    grads = {n: p.grad.clone() for n, p in policy.net.named_parameters() if p.grad is not None}
    policy.net.zero_grad()
    return grads


def test_a_shared_token_goes_through_the_network_once(grown):
    policy, rollout = grown
    shapes = []
    layer = policy.net.hf.base_model.language_model.layers[0].mlp
    hook = layer.register_forward_pre_hook(lambda module, x: shapes.append(x[0].shape[:2].numel()))
    shared = gradient_of(policy, rollout, True)
    apart = gradient_of(policy, rollout, False)
    hook.remove()
    assert_near(shared, apart)
    assert_near(shared, gradient_of(policy, rollout, False, packed=False))
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
    policy.net.zero_grad()
    for part in order.split(5):
        (logprobs(policy, rollout[part]) * weights[part]).sum().backward()
    grads = {n: p.grad.clone() for n, p in policy.net.named_parameters() if p.grad is not None}
    assert_near(grads, gradient_of(policy, rollout, True))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_other_families_branch_too(family):
    policy = policy_of(family, tree=TREES["random"], max_new_tokens=7, temperature=0.9)
    rollout = rolled(policy, prompts(family), copies=5)
    expected = logprobs(policy, rollout)
    mask = rollout.mask
    torch.testing.assert_close(rollout.logprob[mask], expected[mask], atol=1e-5, rtol=1e-5)


def test_places_are_every_so_many_tokens_or_behind_marks():
    policy = policy_of(tree=TREES["in turn"], max_new_tokens=9)
    policy.ending = type(policy.ending)(**vars(policy.ending) | {"stops": ()})
    rollout = rolled(policy, copies=4)
    first = rollout.edge_id.view(-1, 4, 9)
    for names in first.unbind(0):
        a, b, c, d = names.unbind(0)
        assert (b[:2] == a[:2]).all() and (b[2:] != a[2:]).all()
        assert (c[:4] == a[:4]).all() and (c[4:] != a[4:]).all()
        assert (d[:4] == b[:4]).all() and (d[4:] != b[4:]).all()
    marks = policy_of(tree=TREES["marks"], max_new_tokens=40, temperature=2.0)
    rollout = rolled(marks, copies=6)
    starts = Counter()
    for row, sample in enumerate(rollout.sample):
        shared = int((rollout.edge_id[row] != rollout.row_id[row]).sum())
        text = marks.inputs.decode(sample[:shared].tolist())
        starts[text[-1:] in ascii_letters if shared else "anew"] += 1
    assert not starts[False] and starts[True] > 6


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
    siblings = Branch(among="siblings")(values, rollout)
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
    assert siblings.isfinite().all()
    if policy.tree == TREES["three"]:  # trunk and two branches after the third token
        for trunk in range(0, len(rollout), 3):
            leaves = rewards[trunk : trunk + 3]
            if rollout.path_mask()[trunk].sum() > 3:
                expected = (leaves - leaves.mean()) / (leaves.std() + 1e-8)
                last = siblings[trunk : trunk + 3, -1]
                torch.testing.assert_close(last, expected.float(), atol=1e-5, rtol=1e-5)
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


def test_texts_and_lengths_are_those_of_whole_paths(grown):
    policy, rollout = grown
    alone = policy.decode(whole(policy, rollout))
    answers = policy.decode(rollout)
    assert [str(a) for a in answers] == [str(a) for a in alone]
    assert [a.tokens for a in answers] == [a.tokens for a in alone]


def letters(texts, prompts):
    return [sum("a" <= c <= "z" for c in text) / 8 for text in texts]


def test_a_few_iterations_of_trees_raise_the_reward():
    given = [{"text": "what is this?", "images": [tiny_vlms.image(56, 56, i)]} for i in range(2)]
    trainer = Trainer(
        policy_of(tree=TextTree(every=2, rounds=2), max_new_tokens=8),
        given,
        Scorer({"letters": letters}),
        tree_grpo,
        PolicyGradient(),
        partial(adamw, lr=1e-2),
        TrainOptions(
            prompts_per_iteration=2,
            group_size=16,
            train_batch_size=32,
            micro_batch_size=8,
            mask_truncated_completions=False,
            iterations=8,
        ),
    )
    curve = [trainer.iterate() for _ in range(8)]
    means = [metrics["reward/mean"] for metrics in curve]
    assert curve[0]["decisions"] < 2 * 16 * 8 * 0.85
    assert means[0] < 0.3 and sum(means[-2:]) / 2 > means[0] + 0.25


def test_what_an_unfinished_answer_shares_is_still_trained():
    policy = policy_of(tree=TextTree(every=2, rounds=1), max_new_tokens=4)
    trainer = Trainer(
        policy,
        prompts()[:2],
        Scorer({"letters": letters}),
        tree_mean,
        PolicyGradient(),
        partial(adamw, lr=1e-2),
        TrainOptions(
            prompts_per_iteration=2,
            group_size=4,
            train_batch_size=8,
            iterations=1,
            mask_truncated_completions=True,
        ),
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


@pytest.mark.parametrize("key", ["stages=[replay_buffer]", "ground_truth_rollout=answer"])
def test_options_that_exchange_answers_are_refused_beside_a_tree(key):
    config = ROOT / "configs" / "vlm" / "tree_rpo.yaml"
    with pytest.raises(UserError, match="share their beginnings; leave it out"):
        read(config, [f"train.{key}"])
    read(config, [])
    with pytest.raises(UserError, match="compares the edges of a tree; set policy.vlm.tree"):
        read(config, ["policy.vlm.tree=null"])


def test_groups_of_trees_give_way_to_others_and_are_sampled_in_parts():
    """Names of edges stay apart: every answer has the length and log-prob that it was decoded
    with."""
    trainer = Trainer(
        policy_of(tree=TREES["random"], max_new_tokens=8),
        prompts() + [{"text": f"say {i}"} for i in range(5)],
        Scorer(
            {
                "equal": lambda texts, given: [
                    float(len(p["text"]) > 6) * len(t) for t, p in zip(texts, given, strict=True)
                ]
            }
        ),
        tree_grpo,
        PolicyGradient(),
        partial(adamw, lr=1e-3),
        TrainOptions(
            prompts_per_iteration=4,
            group_size=5,
            train_batch_size=20,
            micro_batch_size=5,
            epochs=2,
            iterations=2,
            dynamic_sampling_rounds=2,
            reward_overlap_chunks=2,
        ),
    )
    batch = trainer.collect()
    rollout = batch.rollout
    answers = trainer.policy.decode(rollout)
    assert [a.tokens for a in answers] == rollout.path_mask().sum(1).tolist()
    for row, answer in enumerate(answers):
        path = rollout.path_mask()[row]
        assert float(rollout.logprob[row][path].mean()) == pytest.approx(answer.logprob, abs=1e-5)
        owners = rollout.edge_id[row][path].unique().tolist()
        groups = rollout.group[torch.isin(rollout.edge_id[:, 0], torch.tensor(owners))]
        assert set(groups.tolist()) <= {int(rollout.group[row])}
    assert batch.metrics["resample/groups"] > 0
    metrics = trainer.iterate()
    assert metrics["grad_norm"] > 0 and metrics["skipped_steps"] == 0

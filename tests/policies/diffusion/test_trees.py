"""Trees of samples: what is shared, what it costs, what an edge is worth, and that their gradient
is the flat one."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mmrl.advantages import by_edge, dr_grpo
from mmrl.core.distributions import Gaussian
from mmrl.core.errors import UserError
from mmrl.core.types import Rewards
from mmrl.policies.diffusion.trees import Tree, size
from mmrl.rollout.collect import joined
from mmrl.rollout.stages import Drawn
from mmrl.zoo.advantages import Branch, tree_mean
from mmrl.zoo.stages.dynamic_sampling import exchanged
from samplers.kernels import dance_sde
from samplers.noise import Rng
from samplers.solvers import dpm
from samplers.windows import window
from tests.fixtures import toys
from tests.fixtures.records import make_point, make_rollout
from tests.train.test_trainer import make_trainer

TREE = Tree(splits=[0, 2], factor=2)


def grown(copies=8, family="flow", **options):
    policy = toys.make(family, double=True, **{"tree": TREE, "steps": 4} | options)
    with torch.no_grad():
        return policy, policy.rollout(toys.prompts(3), copies, Rng.of("tree"))


def stick(tree, steps):
    """Bare geometry as a rollout: one tree, every step stochastic."""
    spans = tree.spans(steps, tree.factor ** len(tree.at(steps)))
    row = torch.arange(spans[0])
    branch = torch.stack([row - row % span for span in spans[1:]], 1)
    mask = torch.stack([row % span == 0 for span in spans[1:]], 1)
    ones = torch.ones(mask.shape)
    return make_rollout(
        group=row * 0,
        row_id=row,
        sample=row,
        logprob=0 * ones,
        mask=mask,
        edge_id=branch,
        noise_level=ones,
    ), spans


@pytest.mark.parametrize(("steps", "forwards", "edges"), [(20, 203, 218), (16, 139, 154)])
def test_branch_grpo_what_a_tree_costs(steps, forwards, edges):
    """BranchGRPO (Li et al. 2025), its published trees: 16 leaves that split at steps 0, 3, 6 and
    9."""
    rollout, spans = stick(Tree(splits=[0, 3, 6, 9]), steps)
    cost = size(spans, 16, torch.ones(steps))
    assert cost == {"forwards": forwards / 16, "edges": edges / 16}
    assert int(rollout.mask.sum()) == edges


def test_the_network_sees_shared_states_once():
    policy, rollout = grown(copies=4)
    assert policy.report.forwards == 3 * (1 + 2 + 2 + 4)  # three prompts
    states = [len(torch.unique(rollout.latents.states[:4, k], dim=0)) for k in range(5)]
    assert states == [1, 2, 2, 4, 4] and rollout.mask[:4].sum(0).tolist() == [2, 2, 4, 4]
    assert rollout.edge_id[:4].tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [2, 2, 2, 2], [2, 2, 3, 3]]
    assert Tree(splits=4).at(20) == (0, 5, 10, 15) and Tree(splits=[9, 0, 3]).at(20) == (0, 3, 9)


def test_a_solver_forgets_what_lies_before_the_noise():
    """Its memory is of other states, and in a tree of another number of them."""
    options = {"noise_window": partial(window, start=2, stop=3), "steps": 6}
    for tree in (None, Tree(splits=[2], factor=4)):
        policy = toys.make("flow", double=True, solver=dpm, tree=tree, **options)
        with torch.no_grad():
            rollout = policy.rollout(toys.prompts(2), 4, Rng.of("solver"))
            first = make_point(
                group=rollout.group,
                cond=rollout.cond,
                row_id=rollout.row_id,
                state=rollout.latents.states[:, 3],
                time=rollout.latents.time[:, 3],
                next_time=rollout.latents.time[:, 4],
                noise_level=rollout.latents.noise_level[:, 3],
                mask=rollout.mask[:, :1],
            )
            euler = toys.make("flow", double=True, **options).dist(first).mean
        torch.testing.assert_close(euler, rollout.latents.states[:, 4], atol=1e-12, rtol=0)


@pytest.mark.parametrize("noise", ["independent", "correlated"])
def test_scoring_repeats_sampling_and_every_edge_once(noise):
    policy, rollout = grown(tree=Tree(splits=[0, 2], noise=noise))
    points = list(policy.path(rollout))
    assert sum(len(point) for point in points) == int(rollout.mask.sum())
    for point in points:
        torch.testing.assert_close(
            policy.dist(point).log_prob(point.target), point.logprob, atol=1e-12, rtol=0
        )


def test_batch_splits_and_widths_change_no_tree():
    _, whole = grown()
    _, parts = grown(fixed_batch_rows=4)
    torch.testing.assert_close(whole.latents.states, parts.latents.states, atol=1e-12, rtol=0)
    assert torch.equal(whole.edge_id, parts.edge_id) and torch.equal(whole.mask, parts.mask)


def test_correlated_noise_is_standard_normal_with_the_published_correlation():
    tree = Tree(noise="correlated", scale=2.0)
    rng = Rng.of("noise")
    child = torch.arange(40_000)
    xi = tree.draw(rng, child, child - child % 2, (1,), 1, torch.float64)[:, 0].view(-1, 2)
    assert abs(xi.mean()) < 0.02 and abs(xi.std() - 1) < 0.02
    assert abs((xi[:, 0] * xi[:, 1]).mean() - 1 / (1 + 2.0**2)) < 0.02


def test_branch_grpo_the_published_branch_step():
    """BranchGRPO (Li et al. 2025), flux_step_with_split: Dance-SDE from 0.75 to 0.5 with 4 times
    the noise; the log-prob is that of the noise unscaled."""
    x = torch.tensor([[0.5, -1, 1.5, 0.25], [-0.75, 0.4, 0.1, -1.2]]).view(2, 1, 2, 2)
    v = torch.tensor([[0.2, -0.6, 0.9, -0.3], [1.1, -0.5, 0.35, 0.7]]).view(2, 1, 2, 2)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    drawn = SimpleNamespace(normal=lambda *_: noise)
    row = torch.arange(2)
    dist = Gaussian(*dance_sde(x, v, 0.75, 0.5, 0.3))
    child = dist.sample(
        Tree(noise="published", scale=4.0).draw(drawn, row, row, x.shape[1:], 1, x.dtype)
    )
    published = torch.tensor([[-14.08383083], [-7.01628876]])
    torch.testing.assert_close(dist.log_prob(child), published, atol=5e-6, rtol=0)


def test_outside_the_window_steps_are_deterministic_but_splits_never():
    """The Mix variant: the window of steps 0 and 1, and the split at 2."""
    _, rollout = grown(noise_window=partial(window, stop=2))
    assert (rollout.latents.noise_level[0] > 0).tolist() == [True, True, True, False]
    assert not rollout.mask[:, 3].any() and rollout.logprob[:, 3].abs().max() == 0


@pytest.mark.parametrize(
    ("tree", "copies", "said"),
    [
        (Tree(splits=[0, 2]), 6, "multiple of 4"),
        (Tree(splits=[9]), 4, "between 0 and 3"),
        (Tree(splits=9), 4, "0 and 3"),
    ],
)
def test_trees_that_do_not_fit_or_are_not_there_are_refused(tree, copies, said):
    with pytest.raises(UserError, match=said):
        grown(copies=copies, tree=tree)
    flat = grown()[1].replace(edge_id=None)
    with pytest.raises(UserError, match="give the policy one"):
        Branch()(Rewards({"r": torch.zeros(len(flat))}), flat)


def test_branch_grpo_fused_and_normalised_by_depth():
    """BranchGRPO (Li et al. 2025), compute_hierarchical_advantages_by_depth: splits 0 and 2 of 4
    steps."""
    rollout, _ = stick(TREE, 4)
    reward = torch.tensor([0.1, 0.5, 0.9, 0.3], dtype=torch.float64)
    found = Branch()(reward, rollout)
    first = [-0.707107, -0.707107, 0.707107, 0.707107]
    last = [-1.024695, 0.146385, 1.317465, -0.439155]
    assert found[:, 0].tolist() == pytest.approx(first, abs=1e-6)
    assert found[:, 3].tolist() == pytest.approx(last, abs=1e-6)


def test_a_tree_compared_node_by_node():
    """An explicit recursion over dictionaries of nodes, several trees at once, both fusions."""
    _, rollout = grown()
    reward = Rng.of("reward").normal(torch.arange(len(rollout)), dtype=torch.float64)
    for fusion in ("mean", "path"):
        found = Branch(fusion=fusion, alpha=0.7)(reward, rollout)
        for group in range(3):
            rows = (rollout.group == group).nonzero()[:, 0].tolist()
            value = {(4, r): float(reward[r]) for r in rows}
            for depth in (3, 2, 1):
                for r in rows:
                    edge = rollout.edge_id[r, depth - 1]
                    mates = [m for m in rows if rollout.edge_id[m, depth - 1] == edge]
                    heirs = sorted({int(rollout.edge_id[m, depth]) for m in mates})
                    lp = torch.stack([rollout.logprob[h, depth] for h in heirs])
                    alike = torch.full_like(lp, 1 / len(heirs))
                    weight = (0.7 * lp).softmax(0) if fusion == "path" else alike
                    after = [float(w) * value[depth + 1, h] for w, h in zip(weight, heirs)]
                    value[depth, r] = sum(after)
            for depth in (1, 2, 3, 4):
                nodes = sorted({int(rollout.edge_id[r, depth - 1]) for r in rows})
                values = torch.tensor([value[depth, n] for n in nodes], dtype=torch.float64)
                for r in rows:
                    wanted = (value[depth, r] - values.mean()) / (values.std() + 1e-8)
                    assert abs(float(wanted) - float(found[r, depth - 1])) < 1e-5


@pytest.mark.parametrize("fusion", ["mean", "path"])
def test_no_edge_is_lost_where_rollouts_are_joined(fusion):
    """Parts of a rollout, and groups that replaced others, have edges with other ids than their
    rows."""
    policy, rollout = grown(copies=4)
    branch, rng = Branch(fusion=fusion, alpha=0.7), Rng.of("tree")
    reward = Rng.of("reward").normal(torch.arange(12), dtype=torch.float64)
    wanted = branch(reward, rollout)
    one_by_one = [[prompt] for prompt in toys.prompts(3)]
    with torch.no_grad():
        parts = [policy.rollout(p, 4, replace(rng, offset=n)) for n, p in enumerate(one_by_one)]
        fresh = policy.rollout(one_by_one[1], 4, Rng.of("other"))
    torch.testing.assert_close(branch(reward, joined(parts)), wanted, atol=1e-6, rtol=0)
    drawn = Drawn(rollout, list(range(12)), Rewards({"r": reward}))
    other = Drawn(fresh, list(range(4)), Rewards({"r": -2 * reward[4:8]}))
    mixed = exchanged(drawn, other, [1])
    wanted = torch.cat([wanted[:4], branch(other.rewards, fresh), wanted[8:]])
    torch.testing.assert_close(branch(mixed.rewards, mixed.rollout), wanted, atol=1e-6, rtol=0)


def test_the_weights_of_children_are_compared_among_siblings():
    """Log-probs are sums where the policy says so: far apart between prompts, which must not empty
    a softmax."""
    _, rollout = grown(copies=4)
    far = rollout.replace(logprob=rollout.logprob - 1e4 * rollout.group[:, None])
    reward = torch.arange(12.0)
    assert torch.equal(Branch(fusion="path")(reward, far), Branch(fusion="path")(reward, rollout))


def test_missing_leaves_leave_the_others():
    rollout, _ = stick(TREE, 4)
    found = Branch()(torch.tensor([0.1, float("nan"), 0.9, 0.3]), rollout)
    assert found[1, 3].isnan() and not found[0].isnan().any() and found[0, 0] == found[1, 0]
    gone = Branch()(torch.tensor([float("nan"), float("nan"), 0.9, 0.3]), rollout)
    # a lone edge has nothing to be compared with
    assert gone[:2].isnan().all() and (gone[2:, :2] == 0).all()


def test_the_tree_gradient_is_that_of_flat_rollouts_that_share_the_prefix():
    """An edge with the mean advantage of its leaves, as often as it has leaves, is the sum over the
    flat rows."""
    policy, rollout = grown()
    leaf = torch.linspace(-1, 1, len(rollout), dtype=torch.float64)

    def gradient(mask, weight):
        policy.net.zero_grad()
        for p in policy.path(rollout.replace(mask=mask, advantage=weight)):
            (p.advantage * policy.dist(p).log_prob(p.target) * p.mask).sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.net.parameters()])

    flat = gradient(torch.ones_like(rollout.mask), leaf[:, None].expand(-1, 4))
    edges = rollout.edge_id.T
    sums = [[float(leaf[edge == name].sum()) for name in edge] for edge in edges]
    weight = torch.tensor(sums, dtype=torch.float64).T
    torch.testing.assert_close(gradient(rollout.mask, weight), flat, rtol=1e-10, atol=1e-12)


def test_pruning_takes_edges_out_of_training_only():
    rollout, _ = stick(Tree(splits=[0, 2]), 6)
    reward = torch.tensor([0.1, 0.5, 0.9, 0.3])
    prune = Branch(prune_depth=[5, 6], slide_every=2, slide_stop=4)
    gone = [prune(reward, rollout).isnan().all(0).nonzero().flatten().tolist() for _ in range(6)]
    assert gone == [[4, 5], [4, 5], [3, 4], [3, 4], [3, 4], [3, 4]]
    again = Branch(prune_depth=[5, 6], slide_every=2, slide_stop=4)
    again.load_state_dict({"iteration": 2})
    assert again(reward, rollout).isnan().all(0).nonzero().flatten().tolist() == [3, 4]
    better = Branch(prune_width="siblings")(reward, rollout).isnan()
    assert better[:, 3:].all(1).tolist() == [True, False, False, True] and not better[:, :3].any()
    ends = Branch(prune_width="extremes")(reward, rollout).isnan()
    # the best, 0.9, and the worst, 0.1
    assert ends[:, 3:].all(1).tolist() == [False, True, False, True]


def test_a_shared_edge_has_the_mean_advantage_of_its_leaves_under_any_advantage():
    """It is trained on at its first leaf's row, whose own advantage says nothing of the others."""

    def score(media, prompts):
        reward = toys.reward(media, prompts)
        reward[4] = torch.nan  # the first of the second tree
        return Rewards({"toy": reward})

    policy = toys.make("flow", tree=TREE, steps=4)
    trainer = make_trainer(policy=policy, advantage=dr_grpo, group_size=4, train_batch_size=32)
    trainer.scorer = score
    batch = trainer.collect()
    rollout = batch.rollout
    own = dr_grpo(batch.rewards, rollout)[:, 0]
    values = rollout.advantage
    # the other below its edges has a reward
    assert rollout.mask[4, :2].all() and not rollout.mask[4, 2:].any()
    for row, k in rollout.mask.nonzero().tolist():
        below = rollout.edge_id[:, k] == rollout.edge_id[row, k]
        below &= rollout.group == rollout.group[row]
        assert float(values[row, k]) == pytest.approx(float(own[below].nanmean()), abs=1e-6)
    assert (values[:, 0] - own.nan_to_num(0.0)).abs().max() > 0.01
    assert not rollout.trainable[4] and rollout.trainable.sum() == 31
    assert trainer.iterate()["grad_norm"] > 0


def test_advantages_that_know_trees_are_left_as_they_are():
    rollout, _ = stick(TREE, 4)
    reward = torch.tensor([0.1, 0.5, 0.9, 0.3])
    for advantage in (Branch()(reward, rollout), tree_mean(reward, rollout, siblings=True)):
        assert torch.equal(by_edge(advantage, rollout), advantage)
    flat = rollout.replace(edge_id=None)
    assert torch.equal(by_edge(dr_grpo(reward, flat), flat), dr_grpo(reward, flat))


def test_edges_of_two_prompts_with_one_name_are_two():
    rollout, _ = stick(TREE, 4)
    rollout = rollout.replace(edge_id=rollout.edge_id * 0, group=torch.tensor([0, 0, 1, 1]))
    found = by_edge(torch.tensor([[1.0], [2.0], [5.0], [6.0]]), rollout)
    assert found.tolist() == [[1.5] * 4] * 2 + [[5.5] * 4] * 2
    each = torch.tensor([[1.0, 0, 0, 3], [2, 0, 0, 5], [4, 0, 0, 7], [6, 0, 0, 9]])
    assert by_edge(each, rollout)[:, [0, 3]].tolist() == [[1.5, 4.0]] * 2 + [[5.0, 8.0]] * 2

"""Estimators of masked diffusion against the gradient of the expected reward, on tables of all
conditionals."""

import itertools
import operator

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from mmrl.core import registry
from mmrl.core.errors import UserError
from mmrl.core.registry import ESTIMATORS, SURROGATES
from mmrl.policies.contracts import Remasks
from mmrl.policies.masked.policy import MaskedDiffusion
from mmrl.train.minibatches import loss_weights
from mmrl.zoo.objectives import Masked
from mmrl.zoo.objectives.mask_estimators import fading
from samplers.noise import Rng
from tests.fixtures import toys
from tests.fixtures.records import make_point, make_rollout

registry.load_built_in()

N = 3
ROWS = 3000
POINTS = Rng.of("points")


class Table(nn.Module):
    """Logits of every position in every state of three binary positions, hidden or not."""

    def __init__(self, seed):
        super().__init__()
        draw = Rng.of("table", seed).normal(torch.arange(3**N), (N, 2), dtype=torch.float64)
        self.logits = nn.Parameter(draw)

    def forward(self, ids):
        return self.logits[(ids * 3 ** torch.arange(N)).sum(1)]


class TablePolicy(MaskedDiffusion):
    def __init__(self, seed=0, **options):
        super().__init__(Table(seed), length=N, mask_id=2, **options)

    def encode(self, prompts):
        return {"none": torch.zeros(len(prompts), 1), "uncond": {"none": torch.zeros(1, 1)}}

    def logits(self, ids, cond):
        return self.active()(ids)


def reward(sample, seed):
    table = Rng.of("reward", seed).normal(torch.arange(2**N), dtype=torch.float64)
    return table[(sample * 2 ** torch.arange(N)).sum(1)]


def expected(policy, seed):
    """J by all orders of revealing, and its gradient."""
    sequences = torch.tensor(list(itertools.product(range(3), repeat=N)))
    p = torch.cat([policy.net(sequences).softmax(-1), torch.zeros(3**N, N, 1)], -1)
    token = (
        p[:, None]
        .expand(-1, 3**N, -1, -1)
        .gather(-1, sequences[None].expand(3**N, -1, -1)[..., None])[..., 0]
    )
    now = sequences[:, None]
    then = sequences[None]
    mass = torch.zeros(3**N).double()
    mass[-1] = 1
    for t in range(policy.passes):
        stay = policy.rates[t + 1].double() / policy.rates[t].double()
        transition = torch.where(
            now == 2, torch.where(then == 2, stay, (1 - stay) * token), (now == then).double()
        )
        mass = mass @ transition.prod(-1)
    j = (
        mass * torch.where((sequences < 2).all(1), reward(sequences.clamp(max=1), seed), 0.0)
    ).sum()
    return j.item(), torch.autograd.grad(j, policy.net.logits)[0].flatten()


def rolled(policy, seed, rows=ROWS):
    with torch.no_grad():
        rollout = policy.rollout([{"text": "x"}], rows, Rng.of("roll", seed))
    j, true = expected(policy, seed)
    return rollout.replace(advantage=(reward(rollout.sample, seed) - j)[:, None]), true


def estimate(policy, rollout, loss_agg_mode="token_sum", rng=POINTS, **options):
    objective = Masked(surrogate=SURROGATES["reinforce"], **options)
    policy.net.zero_grad()
    for point in objective.points(policy, rollout, rng):
        weight = loss_weights(point.replace(on_policy=True), loss_agg_mode, 1)
        (-objective.loss(policy, point.replace(on_policy=True)) * weight).sum().backward()
    return policy.net.logits.grad.flatten()


def bound(name, **options):
    return lambda *arguments: ESTIMATORS[name](*arguments, **options)


# (estimator, reduction): mean cosine measured by exact enumeration in an earlier study, for 1 and
# for 3 passes
STUDY = {
    "trajectory": (bound("trajectory"), "token_sum", 1.0, 1.0),
    "d1": (bound("d1"), "token_sum", 1.0, 0.827),
    "schedule_matched": (bound("schedule_matched"), "token_sum", 1.0, 0.917),
    "uni_grpo": (bound("uni_grpo", updates=1), "seq_mean_token_mean", 0.559, 0.776),
    "mask_grpo": (bound("mask_grpo", low=0.6), "token_sum", 0.861, 0.919),
}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", STUDY)
def test_cosines_to_the_true_gradient(steps, name):
    estimator, reduction, *published = STUDY[name]
    expected = published[steps > 1]
    cosines = []
    for seed in range(8):
        policy = TablePolicy(seed, steps=steps)
        rollout, true = rolled(policy, seed)
        rng = Rng.of("points", seed)
        found = estimate(policy, rollout, reduction, rng, estimator=estimator)
        cosines.append(cosine_similarity(found, true, dim=0))
    mean = torch.stack(cosines).mean().item()
    assert abs(mean - expected) < (0.01 if expected == 1 else 0.06), mean


def expected_of_choice(policy, seed):
    """Of the gradient of J of maskgit, one token kept a pass: by recursion over states, draws and
    choices."""
    known = {}

    def value(state, turn):
        if state in known:
            return known[state]
        p = policy.net(torch.tensor([state]))[0].softmax(-1)
        total = 0.0
        hidden = [i for i in range(N) if state[i] == 2]
        for draw in itertools.product(range(2), repeat=len(hidden)):
            each = torch.stack([p[i, token] for i, token in zip(hidden, draw, strict=True)])
            share = (each.log() / (policy.noises[turn] or 1)).softmax(0)
            for i, token, probability in zip(hidden, draw, share, strict=True):
                then = (*state[:i], token, *state[i + 1 :])
                done = 2 not in then
                total = total + each.prod() * probability * (
                    reward(torch.tensor([then]), seed)[0] if done else value(then, turn + 1)
                )
        return known.setdefault(state, total)

    j = value((2,) * N, 0)
    return j.item(), torch.autograd.grad(j, policy.net.logits)[0].flatten()


def every_choice(policy):
    """All 384 trajectories of maskgit that keep one token a pass."""
    rows = []
    for a, b, c in itertools.permutations(range(N)):
        for choice in itertools.product(range(2), repeat=N + 2 + 1):
            first = choice[:N]
            second = {b: choice[N], c: choice[N + 1]}
            third = choice[N + 2]
            decided = [
                [(first[i], 0 if i == a else N) for i in range(N)],
                [(second.get(i, 0), {a: N + 1, b: 0, c: N}[i]) for i in range(N)],
                [(third if i == c else 0, N if i == c else N + 1) for i in range(N)],
            ]
            sample = [{a: first[a], b: second[b], c: third}[i] for i in range(N)]
            rows.append((decided, sample, [{a: 0, b: 1, c: 2}[i] for i in range(N)]))
    drawn, sample, order = (torch.tensor(part) for part in zip(*rows, strict=True))
    mask = drawn[..., 1] <= N
    return make_rollout(
        group=torch.zeros(len(rows), dtype=torch.long),
        row_id=torch.arange(len(rows)),
        cond=policy.encode([{}]),
        prompts=({},),
        sample=sample,
        commit_step=order,
        proposals=drawn,
        mask=mask.flatten(1),
        logprob=torch.zeros(len(rows), N * N).double(),
    )


@pytest.mark.parametrize("noise", [1.0, 4.0])
def test_maskgits_scores_have_the_true_gradient(noise):
    """With the probability of the choice, by enumeration of everything that can be sampled."""
    for seed in range(4):
        policy = TablePolicy(seed, steps=3, sampler="maskgit", choice=(noise, 0.0))
        rollout = every_choice(policy)
        with torch.no_grad():
            logs = [
                policy.dist(point).log_prob(point.target).masked_fill(~point.mask, 0).sum(1)
                for point in policy.path(rollout)
            ]
            p = sum(logs).exp()
        assert p.sum().item() == pytest.approx(1, abs=1e-12)
        j, true = expected_of_choice(policy, seed)
        rollout = rollout.replace(advantage=(p * (reward(rollout.sample, seed) - j))[:, None])
        found = estimate(policy, rollout, estimator=bound("trajectory"))
        torch.testing.assert_close(found, true, atol=1e-12, rtol=1e-9)


def test_steps_picked_at_random_are_unbiased():
    policy = TablePolicy(steps=3)
    rollout, true = rolled(policy, 0, 8000)
    found = estimate(policy, rollout, estimator=bound("trajectory", passes=1))
    assert cosine_similarity(found, true, dim=0) > 0.99
    few = rollout[torch.arange(2000)]
    full = torch.cat([p.mask for p in policy.path(few)], 1)
    weights = []
    for n in range(60):
        points = ESTIMATORS["trajectory"](policy, few, Rng.of(n), passes=1)
        weights.append(torch.cat([p.mask * p.estimator_weight for p in points], 1))
    weight = torch.stack(weights).mean(0)
    assert (weight[full] - 1).mean().abs() < 0.02 and not weight[~full].any()
    assert ((weight > 0).sum() / full.sum()) > 0.99


SLOPE = torch.tensor([0.0, 1.0]).double()


def total(policy, rollout, name, rng, **options):
    objective = Masked(estimator=bound(name, **options))
    points = objective.points(policy, rollout, rng)
    losses = [objective.loss(policy, p) * loss_weights(p, "seq_mean_token_mean", 1) for p in points]
    return sum(loss.sum().item() for loss in losses)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_visible_positions_never_influence_the_loss_and_the_first_ratio_is_1(name):
    policy = TablePolicy(steps=3)
    rollout, _ = rolled(policy, 0, 64)
    policy.weights.keep("old")
    state = torch.get_rng_state()
    objective = Masked(estimator=bound(name))
    for point in objective.points(policy, rollout, POINTS):
        logp = policy.dist(point).log_prob(point.target)
        old = objective.recorded(policy, point, logp)
        assert torch.equal(old[point.mask], logp.detach()[point.mask])
        assert point.mask.shape == point.estimator_weight.shape == logp.shape
        assert (point.estimator_weight[point.mask] > 0).all()
    assert torch.equal(torch.get_rng_state(), state), "the generator is left alone"
    with torch.no_grad():
        policy.net.logits.mul_(1.1)
    logits = policy.logits

    def other_where_visible(ids, cond):
        return logits(ids, cond) + torch.where(ids == 2, 0.0, 3.0)[..., None] * SLOPE

    for seed in (0, 1):
        policy.logits = logits
        plain = total(policy, rollout, name, Rng.of(seed))
        policy.logits = other_where_visible
        assert total(policy, rollout, name, Rng.of(seed)) == plain != 0
        if name == "mask_grpo":  # as published it does
            assert total(policy, rollout, name, Rng.of(seed), fixed=False) != plain


def test_tracerl_without_shrinking_is_the_trajectory():
    policy = TablePolicy(steps=3)
    rollout, _ = rolled(policy, 0, 200)
    same = estimate(policy, rollout, estimator=bound("tracerl", shrink=1))
    torch.testing.assert_close(same, estimate(policy, rollout, estimator=bound("trajectory")))
    whole = estimate(policy, rollout, estimator=bound("tracerl", shrink=8))
    torch.testing.assert_close(whole, estimate(policy, rollout, estimator=bound("d1")))


class WideTable(nn.Module):
    """Logits of two positions with four tokens each, hidden (4) or not."""

    def __init__(self):
        super().__init__()
        draw = Rng.of("wide").normal(torch.arange(25), (2, 4), dtype=torch.float64)
        self.logits = nn.Parameter(draw)

    def forward(self, ids):
        return self.logits[(ids * 5 ** torch.arange(2)).sum(1)]


class WidePolicy(TablePolicy):
    def __init__(self, **options):
        MaskedDiffusion.__init__(self, WideTable(), length=2, mask_id=4, **options)


def test_sepo_sums_over_every_neighbour_of_a_larger_vocabulary():
    """-log of the sum of the scores of all samples one token away, written as a plain loop."""
    policy = WidePolicy(steps=2)
    policy.weights.keep("old")
    rollout = policy.rollout([{"text": ""}], 5, Rng.of("wide"))
    rollout = rollout.replace(advantage=torch.ones(5, 1).double())
    points = Masked(estimator=bound("sepo")).points(policy, rollout, POINTS)
    loss = sum(
        (Masked(estimator=bound("sepo")).loss(policy, p) * loss_weights(p, "token_sum", 1)).sum()
        for p in points
    )
    (ours,) = torch.autograd.grad(loss, policy.net.logits)
    true = 0.0
    for sample in rollout.sample:
        scores = 1.0
        for i in range(2):
            state = sample.clone()[None]
            state[0, i] = 4
            q = policy.net(state)[0, i].softmax(-1)
            for token in range(4):
                if token != sample[i]:
                    scores = scores + q[token] / q[sample[i]]
        true = true + scores.log()
    torch.testing.assert_close(ours, torch.autograd.grad(true, policy.net.logits)[0])


@pytest.mark.parametrize(("rate", "hidden"), [(0.5, 0.5), (0.8, 0.8), (0.1, 0.279), (0.3, 0.358)])
def test_fading_hides_late_tokens_and_half_or_more_as_asked(rate, hidden):
    keep = fading(torch.tensor(rate), 257)
    assert abs((1 - keep).mean().item() - hidden) < 2e-3
    assert (keep.diff(dim=1) <= 0).all() and keep[0, -1] == 0


def test_what_does_not_fit_is_refused():
    policy = toys.make("flow")
    assert Remasks.kept_by(TablePolicy) and not Remasks.kept_by(policy)
    with pytest.raises(UserError, match="hides no tokens"):
        Masked().points(policy, None, POINTS)
    policy = TablePolicy(steps=3)
    rollout, _ = rolled(policy, 0, 4)
    gspo = SURROGATES["gspo"]
    with pytest.raises(UserError, match="several passes"):
        every_pass = Masked(surrogate=gspo, estimator=lambda p, r, *_: list(p.path(r)))
        every_pass.points(policy, rollout, POINTS)
    for name in ("random", "coupled"):
        for low, high in ((0.5, 0.5), (0.9, 0.1)):
            with pytest.raises(UserError, match="low < high"):
                ESTIMATORS[name](Hides(), finished(2), Rng.of(0), low=low, high=high)
    (point,) = Masked(surrogate=gspo, estimator=bound("random")).points(policy, rollout, POINTS)
    assert torch.equal(point.num_decisions, point.mask.sum(1))
    assert (point.estimator_weight == 1).all() and "old" in Masked().snapshots


def test_in_several_epochs_every_rate_of_mask_grpo_comes_once_from_low_to_high():
    """MaskGRPO (Ma et al. 2025, arXiv 2510.02880): t_j = gamma + (1 - gamma) j / mu, one an inner
    update."""
    policy = TablePolicy(steps=3)
    rollout, _ = rolled(policy, 0, 6000)
    rates = [0.667, 0.733, 0.8, 0.867, 0.933, 0.999]

    def hidden(epoch, **options):
        points = ESTIMATORS["mask_grpo"](
            policy, rollout, Rng.of("update", epoch or 0), epoch, low=0.6, **options
        )
        return [point.mask.double().mean().item() for point in points]

    one_by_one = [rate for epoch in range(6) for rate in hidden(epoch)]
    assert one_by_one == pytest.approx(rates, abs=0.015)
    two_by_two = [rate for epoch in range(3) for rate in hidden(epoch, draws=2)]
    assert two_by_two == pytest.approx(rates, abs=0.015)
    assert hidden(6) == pytest.approx(rates[:1], abs=0.015), "then from the start"


def test_the_trainer_says_which_of_several_epochs_it_is():
    epochs_seen = []

    def estimator(policy, rollout, rng, epoch):
        epochs_seen.append(epoch)
        return ESTIMATORS["d1"](policy, rollout, rng, epoch, prompt=0)

    for epochs, expected in ((1, [None] * 2), (3, [0, 0, 1, 1, 2, 2])):
        epochs_seen.clear()
        toys.trainer(
            TablePolicy(steps=3),
            Masked(estimator=estimator),
            lambda media, prompts: reward(media, 0),
            prompts_per_iteration=2,
            train_batch_size=4,
            epochs=epochs,
        ).iterate()
        assert epochs_seen == expected


def test_schedule_matched_weights_are_those_of_the_passes():
    """In expectation every token is scored once: the sum over passes of rate times weight is 1."""
    policy = TablePolicy(steps=4)
    rollout, _ = rolled(policy, 0, 40)
    rates = policy.rates.double().tolist()
    points = ESTIMATORS["schedule_matched"](policy, rollout, POINTS)
    weights = [float(point.estimator_weight.unique()) for point in points]
    assert weights == pytest.approx([(now - then) / now for now, then in itertools.pairwise(rates)])
    assert sum(map(operator.mul, rates, weights)) == pytest.approx(1.0) and len(points) == 4
    for passes in (1, 2):
        chosen = ESTIMATORS["schedule_matched"](policy, rollout, POINTS, passes=passes)
        expected = [weight * 4 / passes for weight in weights]
        assert len(chosen) == passes
        for point in chosen:
            found = float(point.estimator_weight.unique())
            assert min(abs(found - weight) for weight in expected) < 1e-9


# Which tokens an estimator hides, counted


class Hides:
    """A policy that only writes down what was hidden and what is scored."""

    epoch = None

    rates = torch.tensor([1.0, 0.8, 0.6, 0.3, 0.0])

    def at(self, rollout, hide, score=None):
        mask = rollout.mask & (hide if score is None else score)
        return make_point(
            group=rollout.group,
            row_id=rollout.row_id,
            state=hide,
            mask=mask,
            logprob=rollout.logprob,
        )


def finished(rows=4000, length=16):
    row = torch.arange(rows)
    zero = torch.zeros(rows, length, dtype=torch.float64)
    return make_rollout(
        group=row * 0,
        row_id=row,
        sample=zero.long(),
        logprob=zero,
        mask=zero == 0,
        commit_step=zero.long(),
    )


def shares(name, **options):
    """[draws] of all tokens, and [draws, B] of every row: how many are hidden."""
    hidden = torch.stack(
        [p.state for p in ESTIMATORS[name](Hides(), finished(), Rng.of("hides"), **options)]
    ).double()
    return hidden.mean((1, 2)), hidden.mean(2), hidden


@pytest.mark.parametrize(
    ("options", "low", "high"), [({}, 0.1, 0.9), ({"low": 0.2, "high": 0.4, "draws": 3}, 0.2, 0.4)]
)
def test_random_and_coupled_masks_have_rates_between_low_and_high(options, low, high):
    draws = options.get("draws", 1)
    spread = (high - low) ** 2 / 12  # of the rates, besides that of 16 draws at one rate
    mean = (low + high) / 2
    variance = torch.full((draws,), spread + (mean - spread - mean**2) / 16).double()
    for name, each in (("random", 1), ("coupled", 2)):
        whole, rows, hidden = shares(name, **options)
        assert len(whole) == each * draws and (whole[::each] - mean).abs().max() < 0.01
        torch.testing.assert_close(rows[::each].var(1), variance, atol=0.004, rtol=0)
    assert torch.equal(hidden[::2], 1 - hidden[1::2])


RATES = [  # estimator, options, the rates of its draws
    ("uni_grpo", {"draws": 4}, [1 / 2, 2 / 3, 5 / 6, 1]),
    ("uni_grpo", {"updates": 2, "draws": 2}, [1 / 2, 1]),
    ("uni_grpo", {"updates": 1}, [1 / 2]),
    ("mask_grpo", {"draws": 6}, [0.8 + 0.2 * n / 6 for n in range(1, 6)] + [0.999]),
    ("mask_grpo", {"low": 0.5, "updates": 2, "draws": 2}, [0.75, 0.999]),
    ("mask_grpo", {"low": 0.6, "draws": 6}, [0.667, 0.733, 0.8, 0.867, 0.933, 0.999]),
]


@pytest.mark.parametrize(("name", "options", "rates"), RATES)
def test_rates_rise_evenly_as_published(name, options, rates):
    whole, _, _ = shares(name, **options)
    assert whole.sort().values.tolist() == pytest.approx(rates, abs=0.01)


def test_fading_masks_hide_late_tokens_more():
    """min(1, 2 (1 - r) (1 - n / (L - 1))) is the chance to stay visible."""
    _, _, hidden = shares("mask_grpo", low=0.4, updates=3, draws=3, field="fading")
    by_place = sorted(hidden.mean(1).tolist(), key=sum)
    for rate, row in zip((0.6, 0.8, 0.999), by_place, strict=True):
        expected = [1 - min(1.0, 2 * (1 - rate) * (1 - n / 15)) for n in range(16)]
        assert row == pytest.approx(expected, abs=0.03) and row[-1] == 1.0


@pytest.mark.parametrize("length", [1, 16])
def test_mask_grpos_published_weights_are_sums_of_masks(length):
    """fixed: false. A token counts as often as any of the masks hides it, on average 1 where one
    does."""
    options = {"low": 0.05, "updates": 2}
    batch = finished(2000, length)
    batch = batch.replace(mask=torch.arange(length).expand(2000, -1) < max(1, length - 1))
    masks = sum(
        p.state.double()
        for p in ESTIMATORS["mask_grpo"](Hides(), batch, Rng.of(1), draws=2, **options)
    )
    (point,) = ESTIMATORS["mask_grpo"](Hides(), batch, Rng.of(1), draws=1, fixed=False, **options)
    some = masks > 0
    assert torch.equal(point.mask, some) and (length == 1 or not some.all())
    expected = masks * some.sum(1, keepdim=True) / masks.sum(1, keepdim=True).clamp_min(1)
    torch.testing.assert_close(point.estimator_weight, expected, atol=1e-12, rtol=0)
    nothing = batch.replace(mask=batch.mask & False)
    (gone,) = ESTIMATORS["mask_grpo"](Hides(), nothing, Rng.of(1), fixed=False, **options)
    assert not gone.mask.any() and gone.estimator_weight.isfinite().all()


def test_udm_grpo_looks_at_adjacent_early_rates():
    starts = set()
    for seed in range(12):
        points = ESTIMATORS["udm_grpo"](Hides(), finished(500), Rng.of(seed), starts=2, window=2)
        rates = [float(p.state.double().mean()) for p in points]
        first = int((rates[0] - Hides.rates).abs().argmin())
        starts.add(first)
        assert rates == pytest.approx(Hides.rates[first : first + 2].tolist(), abs=0.03)
        total = sum(p.mask.sum(1, keepdim=True) for p in points)
        for p in points:
            count = p.mask.sum(1, keepdim=True)
            torch.testing.assert_close(
                p.estimator_weight * 2 * count.clamp_min(1),
                total.to(p.estimator_weight) * torch.ones_like(p.estimator_weight),
            )
    assert starts == {0, 1}
    for seed in range(12):  # more starts than steps: the last one, alone
        late = ESTIMATORS["udm_grpo"](Hides(), finished(500), Rng.of(seed), starts=10_000, window=3)
        assert [float(p.state.double().mean()) for p in late] == pytest.approx([0.3], abs=0.03)


def test_d1_hides_everything_and_a_share_of_the_prompt():
    corrupted = []

    class Corrupts(Hides):
        def corrupted(self, cond, share, rng):
            corrupted.append(share)
            return "corrupted"

        def at(self, rollout, hide, score=None):
            corrupted.append(rollout.cond)
            return super().at(rollout, hide, score)

    for options, expected in (
        ({}, [0.15, "corrupted"]),
        ({"prompt": 0.5}, [0.5, "corrupted"]),
        ({"prompt": 0.0}, [None]),
    ):
        corrupted.clear()
        (point,) = ESTIMATORS["d1"](Corrupts(), finished(3), Rng.of(0), **options)
        assert point.state.all() and corrupted == expected

"""Prompts chosen by their records: by plain loops, on Bernoulli prompts, and after a resume."""

import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import beta

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA, load_built_in
from mmrl.core.types import Rewards
from mmrl.data.base import Outcome, batch
from mmrl.rollout.stages import Drawn
from mmrl.zoo.curricula.budget import Knapsack
from mmrl.zoo.curricula.curriculum import Hints, Replay
from mmrl.zoo.curricula.features import ValueModel
from mmrl.zoo.curricula.selection import Pcl, Sec, Vade, Vas
from mmrl.zoo.curricula.statistics import PromptStatistics, mean_advantage
from mmrl.zoo.curricula.subsets import Depo
from mmrl.zoo.stages.diversity import diversity, entropies_of, self_bleu, share_of
from samplers.noise import Rng
from tests.fixtures import toys
from tests.fixtures.records import make_rollout
from tests.train.test_trainer import make_trainer

load_built_in()
SEED = 3


class Bernoulli:
    """Prompts that are right with their own probability."""

    def __init__(self, rates):
        self.train = [
            {"text": f"{i}", "p": p, "category": "easy" if p > 0.9 else "hard" if p < 0.1 else "ok"}
            for i, p in enumerate(rates)
        ]
        self.held_out = []


def answered(prompts, iteration, size=8):
    """Answers of an iteration; each place has its own randomness."""
    u = Rng.of("answers", iteration).uniform(torch.arange(len(prompts)), (size,))
    results = []
    for i, prompt in enumerate(prompts):
        rewards = tuple((u[i] < prompt["p"]).double().tolist())
        mean = sum(rewards) / size
        results.append(Outcome(prompt["entry"], mean, len(set(rewards)) == 1, rewards))
    return results


def simulate(data, iterations, count=8, start=0):
    """The prompts drawn and the outcomes of all iterations."""
    drawn = []
    for iteration in range(start, start + iterations):
        prompts = batch(data, count, iteration, SEED)
        assert len(prompts) == count
        assert batch(data, count, iteration, SEED) == prompts, "repeatable until learn"
        results = answered(prompts, iteration)
        if "diversity" in data.measures:
            data.see("diversity", {p["entry"]: p["p"] / 2 for p in prompts})
        data.learn(results)
        drawn.append((prompts, results))
    return drawn


RATES = [0.0, 0.02, 0.5, 0.98, 1.0, 0.5, 0.01, 0.99] * 8
BOTH = {"value": "both"}
SOURCES = [("vade", {}), ("vas", {}), ("pcl", {}), ("pcl", BOTH), ("sec", {}), ("depo", {})]


def signals(drawn):
    """The share of groups whose rewards differ."""
    flat = [outcome.flat for _, results in drawn for outcome in results]
    return 1 - sum(flat) / len(flat)


@pytest.mark.parametrize(("name", "options"), SOURCES)
def test_a_resumed_run_draws_the_same_and_more_groups_have_a_signal(name, options):
    """More than of prompts drawn alike."""
    rates = Bernoulli(RATES).train
    plain = [{**prompt, "entry": i} for i, prompt in enumerate(rates)]
    alike = [answered(batch(plain, 8, i, SEED), i) for i in range(30, 60)]
    data, again = (DATA[name](Bernoulli(RATES), **options).train for _ in range(2))
    part = data.restricted(data.prompts[10:13])
    assert {p["entry"] for p in batch(part, 8, 0, SEED)} <= {10, 11, 12}
    simulate(data, 30)
    again.load_state_dict(json.loads(json.dumps(data.state_dict())))
    found = [simulate(one, 30, start=30) for one in (data, again)]
    first, second = ([[p["entry"] for p in prompts] for prompts, _ in one] for one in found)
    assert first == second
    assert signals(found[0]) > 1.25 * signals([(None, results) for results in alike])


def test_weights_of_answers_fade_at_visits_and_between_them():
    statistics = PromptStatistics(0.5, drift=0.9)
    visits = {0: (1.0, 1.0), 3: (0.0,), 4: (1.0, 0.0, 0.0)}
    total = 0.0
    mean = 0.0
    last = None
    for iteration in range(8):
        rewards = visits.get(iteration)
        if rewards:
            left = total * 0.5 * (0.9 ** (iteration - 1 - last) if last is not None else 1)
            mean = (left * mean + sum(rewards)) / (left + len(rewards))
            total = left + len(rewards)
            last = iteration
        statistics.learn([Outcome(5, 0.0, False, rewards)] if rewards else [])
        expected = total * 0.9 ** (iteration - last)
        assert statistics.weight(5) == pytest.approx(expected, abs=1e-12)
        assert statistics[5].mean == pytest.approx(mean, abs=1e-12)
    assert statistics.weight(6) == 0
    statistics = PromptStatistics(0.5)
    for rewards in ((1.0, 0.0, 0.5), (0.25, 0.75)):
        statistics.learn([Outcome(5, 0.0, False, rewards)])
    spread = np.cov([1.0, 0.0, 0.5, 0.25, 0.75], aweights=[0.5, 0.5, 0.5, 1, 1], ddof=0)
    assert statistics[5].variance == pytest.approx(float(spread), abs=1e-12)
    assert statistics[5].advantage == mean_advantage((0.25, 0.75)) == pytest.approx(1.0)


def test_vade_draws_rates_from_beta_posteriors():
    """By scipy's quantiles, in a loop."""
    source = Vade(Bernoulli(RATES), prior=2.0)
    data = source.train
    simulate(data, 5)
    rng = Rng.of(SEED, "vade", 5)
    scores = []
    for entry in range(len(RATES)):
        weight = data.statistics.weight(entry)
        mean = data.statistics[entry].mean
        u = float(rng.uniform(torch.tensor([entry])))
        theta = beta.ppf(u, 2 + weight * mean, 2 + weight * (1 - mean))
        assert float(source.rates(data.prompts, rng)[entry]) == pytest.approx(theta, abs=1e-9)
        scores.append(theta * (1 - theta))
    best = sorted(range(len(RATES)), key=lambda i: -scores[i])[:8]
    assert [p["entry"] for p in batch(data, 8, 5, SEED)] == best


def test_vas_scores_by_variance_and_diversity_and_keeps_a_uniform_share():
    source = Vas(Bernoulli(RATES), share=0.75, variance=0.7, diversity=0.3)
    data = source.train
    assert data.measures == {"diversity"}
    simulate(data, 30)
    record = data.statistics[2]
    score = 0.7 * record.mean * (1 - record.mean) + 0.3 * 0.25
    assert source.promotion(2) == pytest.approx(score, abs=1e-12)
    chosen = batch(data, 8, 30, SEED)
    plain = batch(data.inner, 2, 30, SEED)
    assert chosen[6:] == plain and len({p["entry"] for p in chosen}) == 8
    count = Counter(p["entry"] for i in range(400) for p in batch(data, 8, i, SEED)[:6])
    order = sorted(range(len(RATES)), key=source.promotion)
    assert count[order[-1]] > 2 * count[order[0]]
    assert not Vas(Bernoulli(RATES), diversity=0.0).train.measures


def test_pcl_takes_the_candidates_nearest_to_the_target():
    source = Pcl(Bernoulli(RATES), target=0.4, candidates=3.0, prior=2.0)
    data = source.train
    simulate(data, 12)
    candidates = batch(data.inner, 24, 12, SEED)
    means = [record.mean for record in data.statistics.records.values()]
    usual = sum(means) / len(means)
    gaps = []
    for prompt in candidates:
        weight = data.statistics.weight(prompt["entry"])
        mean = data.statistics[prompt["entry"]].mean
        gaps.append(abs((weight * mean + 2 * usual) / (weight + 2) - 0.4))
    order = sorted(range(24), key=lambda i: gaps[i])[:8]
    assert batch(data, 8, 12, SEED) == [candidates[i] for i in order]


def test_the_value_model_takes_the_steps_of_its_formula(tmp_path):
    """min sum (x'w - r)^2 + ridge |w - old|^2, in closed form."""
    rng = np.random.default_rng(0)
    model = ValueModel(ridge=0.7, start=0.4)
    w = np.zeros(4)
    for _ in range(3):
        features, rewards = rng.normal(size=(5, 3)), rng.random(5)
        x = np.concatenate([features, np.ones((5, 1))], 1)
        w = np.linalg.solve(x.T @ x + 0.7 * np.eye(4), x.T @ (rewards - 0.4) + 0.7 * w)
        model.learn(features, rewards)
        np.testing.assert_allclose(model.weights, w, atol=1e-9)
    np.testing.assert_allclose(model.predict(features), 0.4 + x @ w, atol=1e-9)
    file = tmp_path / "rows.npy"
    np.save(file, np.eye(5))
    data = Pcl(Bernoulli([0.1, 0.5, 0.9, 0.5, 0.1]), value="model", embeddings=file).train
    simulate(data, 20, count=2)
    values = data.predicted(data.prompts)
    assert values[0] < values[1] < values[2]
    with pytest.raises(UserError, match=r"pcl.embeddings: .* needs a row for each of the 64"):
        Pcl(Bernoulli(RATES), value="model", embeddings=file)


def test_sec_learns_the_value_of_a_category_by_td_and_draws_by_softmax():
    source = Sec(Bernoulli(RATES), rate=0.3, temperature=0.2)
    data = source.train
    values = dict.fromkeys(data.members, 0.0)
    named = {p["entry"]: p["category"] for p in data.prompts}
    for _, results in simulate(data, 20):
        for name in values:
            levels = [mean_advantage(o.rewards) for o in results if named[o.entry] == name]
            if levels:
                values[name] += 0.3 * (sum(levels) / len(levels) - values[name])
    assert data.values == pytest.approx(values, abs=1e-12)
    total = sum(math.exp(value / 0.2) for value in values.values())
    expected = {name: math.exp(value / 0.2) / total for name, value in values.items()}
    assert data.probabilities() == pytest.approx(expected, abs=1e-12)
    count = Counter(p["category"] for i in range(300) for p in batch(data, 8, i, SEED))
    for name, share in expected.items():
        assert count[name] / 2400 == pytest.approx(share, abs=0.03)
    assert len({p["entry"] for p in batch(data, 8, 0, SEED)}) == 8, "no repeats"


def test_depo_asks_what_explores_and_replays_what_was_rarely_asked():
    data = Depo(Bernoulli(RATES), replay=0.25).train
    simulate(data, 40)
    chosen = [p["entry"] for p in batch(data, 8, 40, SEED)]
    visits = [data.statistics[entry].visits for entry in range(len(RATES))]
    assert sorted(visits)[1] >= max(visits[entry] for entry in chosen[6:])
    candidates = [p["entry"] for p in batch(data.inner, 16, 40, SEED)]
    candidates = [entry for entry in candidates if entry not in chosen[6:]]
    assert chosen[:6] == sorted(candidates, key=lambda e: -data.statistics[e].variance)[:6]


def explored_by_loop(answers, noise):
    rewards = [r for r, _ in answers]
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    better = [h for r, h in answers if r > mean]
    score = 0.0
    for r, h in answers:
        noisy = r <= mean and h > noise * sum(better) / max(len(better), 1)
        score += 0.0 if noisy else abs((r - mean) / (std + 1e-8) * h)
    return score


def test_depo_explores_by_the_entropy_of_the_last_visits():
    source = Depo(Bernoulli([0.5] * 12), explore="entropy", window=2, noise=1.2, replay=0.0)
    data = source.train
    assert data.measures == {"entropy"}
    traces = {}
    for iteration in range(12):
        prompts = batch(data, 4, iteration, SEED)
        answers = {}
        for i, outcome in enumerate(answered(prompts, iteration)):
            u = Rng.of("entropy", iteration, i).uniform(torch.arange(8)).tolist()
            answers[outcome.entry] = list(map(list, zip(outcome.rewards, u)))
        data.see("entropy", answers)
        data.learn(answered(prompts, iteration))
        for entry, known in answers.items():
            traces.setdefault(entry, []).append(explored_by_loop(known, 1.2))
    for entry, trace in traces.items():
        last = trace[-2:]
        assert data.explorability(entry) == pytest.approx(sum(last) / len(last), abs=1e-9)
    candidates = {p["entry"]: data.explorability(p["entry"]) for p in data.drawn(8, 12, SEED)}
    widest = sorted(candidates, key=lambda entry: -candidates[entry])[:4]
    assert sorted(p["entry"] for p in batch(data, 4, 12, SEED)) == sorted(widest)


def bleu_by_loop(answer, others):
    """Papineni et al. 2002 with the nearest reference's length; 1 added to counts of n > 1."""
    if not others:
        return 1.0
    nearest = min(others, key=lambda other: (abs(len(other) - len(answer)), len(other)))
    if not answer:
        return float(not nearest)
    product = 1.0
    orders = min(4, len(answer))
    for n in range(1, orders + 1):
        grams = [
            Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1))
            for text in [answer, *others]
        ]
        right = sum(min(k, max(o[gram] for o in grams[1:])) for gram, k in grams[0].items())
        total = sum(grams[0].values())
        product *= right / total if n == 1 else (right + 1) / (total + 1)
    brevity = min(1.0, math.exp(1 - len(nearest) / len(answer)))
    return brevity * product ** (1 / orders)


@pytest.mark.parametrize("seed", range(4))
def test_diversity_of_tokens_is_the_inverse_self_bleu_by_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    count, width = 14, (1, 3, 9, 12)[seed]
    tokens = torch.randint(7, 7 + 2 + seed, (count, width), generator=generator)
    mask = torch.rand(count, width, generator=generator) < 0.8
    mask[3:5] = False
    group = torch.randint(0, 4, (count,), generator=generator)
    group[6] = 9
    texts = [tokens[i][mask[i]].tolist() for i in range(count)]
    scores = []
    for i in range(count):
        others = [texts[j] for j in range(count) if j != i and group[j] == group[i]]
        scores.append(bleu_by_loop(texts[i], others))
    computed = self_bleu(tokens, mask, group.unique(return_inverse=True)[1])
    assert computed.tolist() == pytest.approx(scores, abs=1e-9)


def test_diversity_of_latents_is_their_spread():
    sample = 0.3 * torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0)).double()
    group = torch.tensor([0, 1, 0, 1, 0, 1])
    shape = {"mask": torch.ones(6, 1).bool(), "logprob": torch.zeros(6, 1)}
    _, values = diversity(make_rollout(group=group, row_id=group, sample=sample, **shape))
    for g in range(2):
        variance = sample[group == g].flatten(1).var(0, correction=1).mean()
        assert float(values[g]) == pytest.approx(float(variance) ** 0.5, abs=1e-12)


TOYS = SimpleNamespace(train=toys.prompts(16), held_out=[])


def test_vas_scores_all_prompts_anew_by_extra_answers(monkeypatch):
    source = Vas(TOYS, threshold=0.2, refresh=2, rollouts=3)
    sizes = {"prompts_per_iteration": 5, "group_size": 4, "train_batch_size": 20}
    trainer = make_trainer("masked", prompts=source.train, **sizes)
    samples = []
    plain = trainer.sample

    def recorded(prompts, rng, copies, *graphs):
        samples.append((len(prompts), copies))
        return plain(prompts, rng, copies, *graphs)

    monkeypatch.setattr(trainer, "sample", recorded)
    metrics = [trainer.iterate() for _ in range(3)]
    assert [m.get("diversity/rescored") for m in metrics] == [16, None, 16]
    sizes = [(5, 4), (5, 3), (5, 3), (5, 3), (1, 3)]
    assert samples == [*sizes, (5, 4), *sizes]
    records = source.train.statistics.records
    assert sorted(records) == list(range(16))
    # those just trained on: half of the three before, and four
    assert Counter(record.samples for record in records.values()) == {3: 11, 5.5: 5}
    parts = [share_of([{"entry": i} for i in range(7)], rank, 3) for rank in range(3)]
    assert [share for share, _ in parts] == [3, 3, 3] == [len(local) for _, local in parts]
    entries = [prompt["entry"] for _, local in parts for prompt in local if "entry" in prompt]
    assert entries == list(range(7)), "of several processes each scores its share"


def test_the_entropies_of_samples_reach_depo():
    source = Depo(TOYS, explore="entropy", noise=9.0)
    policy = toys.POLICIES["causal"](record_entropy=True)
    trainer = make_trainer(policy=policy, prompts=source.train)
    trainer.iterate()
    assert any(sum(trace) != 0 for trace in source.train.traces.values())
    rollout = trainer.collect().rollout
    mask = rollout.mask
    entropy = (rollout.entropies() * mask).sum(1) / mask.sum(1)
    rewards = {"r": torch.arange(len(rollout)).double()}
    known = entropies_of(Drawn(rollout, rollout.sample, Rewards(rewards)))
    rows = [row for answers in known.values() for row in answers]
    assert len(rows) == len(rollout)
    for reward, value in rows:
        assert value == pytest.approx(float(entropy[int(reward)]), rel=1e-5)


@pytest.mark.parametrize("outer", ["vade", "vas", "sec", "pcl", "depo"])
def test_what_lies_inside_a_selection_still_acts(outer):
    """Hints are written, budgets shared out and hard prompts asked again, whoever chooses."""
    source = Bernoulli([0.0, 0.5, 0.5, 1.0, 0.3, 0.7] * 4)
    for prompt in source.train:
        prompt["answer"] = "one two three four"
    inside = Knapsack(Replay(Hints(source, share=0.5), share=0.5, below=0.2), least=2, most=32)
    data = DATA[outer](inside, **({"diversity": 0.0} if outer == "vas" else {})).train
    part = data.restricted(data.prompts[3:6])  # to what a policy takes
    assert {p["entry"] for p in part.inner.inner.inner.batch(9, 0, SEED)} == {3, 4, 5}
    replay = data.inner.inner
    differ = False
    for iteration in range(8):
        prompts = batch(data, 8, iteration, SEED)
        assert prompts == batch(data, 8, iteration, SEED) and len(prompts) == 8
        assert all(prompt["prefill"] == "one two " for prompt in prompts)
        waiting = replay.waiting[:4] if iteration else []
        assert [p["entry"] for p in prompts[len(prompts) - len(waiting) :]] == waiting
        sizes = data.copies(prompts, 4, iteration)
        assert sum(sizes) == 32
        differ |= len(set(sizes)) > 1
        data.learn(answered(prompts, iteration))
    assert differ and replay.waiting

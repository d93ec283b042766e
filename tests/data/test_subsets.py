"""Prompts chosen by rewards recorded in a file: what is written, read and kept."""

import json
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.data.base import Outcome, batch
from mmrl.zoo.curricula.drawing import with_entries
from mmrl.zoo.curricula.subsets import (
    ByVariance,
    Depo,
    Limr,
    Recorded,
    alignment,
    pagerank,
    read_curves,
    spread_out,
)
from samplers.noise import Rng
from tests.data.test_selection import Bernoulli, answered

RATES = [0.0, 0.2, 0.5, 0.8, 1.0, 0.4] * 4
COUNT = len(RATES)


def recorded(tmp_path, rates=RATES, iterations=6, learns=None):
    """A file of a run over the whole data; ``learns`` moves the rates of an iteration."""
    path = tmp_path / "runs" / "rewards.jsonl"
    data = Recorded(Bernoulli(rates), str(path)).train
    for iteration in range(iterations):
        prompts = batch(data, len(rates), iteration, 0)
        moved = [{**p, "p": learns(p, iteration) if learns else p["p"]} for p in prompts]
        data.learn(answered(moved, iteration))
    return path


def test_every_visit_is_recorded_once_also_after_a_resume(tmp_path, monkeypatch):
    path = tmp_path / "rewards.jsonl"
    data = Recorded(Bernoulli(RATES), str(path)).train
    first = [Outcome(3, 0.5, False, (1.0, 0.0)), Outcome(3, 0.0, True, (0.0,)), Outcome(1, 0, True)]
    data.learn(first)
    state = json.loads(json.dumps(data.state_dict()))
    data.learn([Outcome(3, 1.0, True, (1.0,))])  # will be repeated by the resumed run
    again = Recorded(Bernoulli(RATES), str(path)).train
    again.load_state_dict(state)
    again.learn([Outcome(3, 0.0, True, (0.0, 0.0))])
    monkeypatch.setattr(distributed, "process", lambda: (1, 2))
    again.learn([Outcome(3, 1.0, True, (1.0,))])  # another process writes this
    assert read_curves(path, data.prompts) == {3: [[1.0, 0.0, 0.0], [0.0, 0.0]]}


def test_a_file_of_other_data_is_refused_and_what_it_lacks_left_out(tmp_path):
    path = recorded(tmp_path)
    with pytest.raises(UserError, match="use the same data source"):
        ByVariance(Bernoulli(RATES[:5]), path)
    lines = [line for line in path.read_text().splitlines() if json.loads(line)["entry"] != 2]
    path.write_text("\n".join(lines))
    with pytest.warns(UserWarning, match="1 of 24 prompts are not in"):
        assert 2 not in {p["entry"] for p in ByVariance(Bernoulli(RATES), path).train}
    path.write_text('{"entry": 1}\n')
    with pytest.raises(UserError, match="rewards.jsonl:1: not a line that `recorded` wrote"):
        ByVariance(Bernoulli(RATES), path)


def test_prompts_of_informative_variance_are_kept(tmp_path):
    path = recorded(tmp_path)
    source = Bernoulli(RATES)
    curves = read_curves(path, Recorded(source, "unused").train.prompts)
    spreads = [float(np.std(sum(curves[entry], []))) for entry in range(COUNT)]
    wide = [entry for entry in range(COUNT) if spreads[entry] >= 0.45]
    assert [p["entry"] for p in ByVariance(source, path, least=0.45).train] == wide
    half = sorted(wide, key=lambda entry: (-spreads[entry], entry))[: int(len(wide) / 2 + 0.5)]
    chosen = ByVariance(source, path, least=0.45, share=0.5)
    assert [p["entry"] for p in chosen.train] == sorted(half) and chosen.held_out == []
    assert all(0 < source.train[p["entry"]]["p"] < 1 for p in ByVariance(source, path).train)


def test_alignment_is_the_formula_of_limr():
    curves = {
        entry: Rng.of("curves", entry).uniform(torch.arange(4), (3,)).tolist()[: 2 + entry % 3]
        for entry in range(6)
    }
    scores = alignment(curves)
    for entry, curve in curves.items():
        gap = room = 0.0
        for k, rewards in enumerate(curve):
            mean = fmean([fmean(other[k]) for other in curves.values() if k < len(other)])
            gap += (fmean(rewards) - mean) ** 2
            room += (1 - mean) ** 2
        assert scores[entry] == pytest.approx(1 - gap / room, abs=1e-9)
    assert alignment({0: [[1.0]], 1: [[1.0, 1.0]]}) == {0: 1.0, 1: 1.0}


def test_limr_keeps_the_prompts_that_learn_with_the_others(tmp_path):
    """Three kinds of prompts: learnt like the mean, always right, never right."""

    def learns(prompt, iteration):
        return {0.5: iteration / 7, 0.99: 0.99, 0.01: 0.01}[prompt["p"]]

    rates = [0.5, 0.5, 0.99, 0.01] * 6
    path = recorded(tmp_path, rates, iterations=8, learns=learns)
    source = Limr(Bernoulli(rates), path, share=0.5)
    assert {p["p"] for p in source.train} == {0.5} and len(source.train) == 12


def test_pagerank_is_the_stationary_walk():
    rows = Rng.of("rows").uniform(torch.arange(7), (4,)).numpy()
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    weights = (1 + rows @ rows.T) / 2
    np.fill_diagonal(weights, 0)
    walk = weights / weights.sum(1, keepdims=True)
    matrix = 0.15 / 7 + 0.85 * walk.T
    values, vectors = np.linalg.eig(matrix)
    expected = np.real(vectors[:, np.argmax(np.real(values))])
    np.testing.assert_allclose(pagerank(rows, 0.85), 7 * expected / expected.sum(), atol=1e-9)


def test_rows_are_spread_out_by_the_greedy_determinant():
    rows = Rng.of("dpp").normal(torch.arange(8), (3,), dtype=torch.float64).numpy()
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    quality = 1 + Rng.of("quality").uniform(torch.arange(8)).numpy()
    kernel = quality[:, None] * (rows @ rows.T + 1e-3 * np.eye(8)) * quality
    expected = []
    for _ in range(6):
        left = [row for row in range(8) if row not in expected]

        def volume(row):
            return np.linalg.slogdet(kernel[np.ix_([*expected, row], [*expected, row])])[1]

        expected.append(max(left, key=volume))
    assert spread_out(rows, quality, 6) == expected


def test_depo_keeps_prompts_of_middle_difficulty(tmp_path):
    source = Bernoulli(RATES * 4)
    path = recorded(tmp_path, RATES * 4)
    options = {"diverse": 1.0, "share": 0.25, "spread": 0.15}
    data, other = (Depo(source, path, **options, seed=seed).train for seed in (0, 1))
    rates = [p["p"] for p in data.prompts]
    assert len(rates) == COUNT and fmean(abs(rate - 0.5) for rate in rates) < 0.2
    assert data.prompts != other.prompts
    file = tmp_path / "rows.npy"
    few, path = Bernoulli(RATES), recorded(tmp_path / "few")
    np.save(file, np.eye(COUNT)[:, :5] + 0.1)
    assert len(Depo(few, path, embeddings=file).train) == 5


def test_rewards_of_a_reference_choose_prompts_too(tmp_path):
    """PVPO: the file that is its baseline says which prompts are neither too easy nor too hard."""
    source = SimpleNamespace(train=[{"text": text} for text in "abcb"], held_out=[])
    path = tmp_path / "reference.jsonl"
    lines = [("a", [1, 1, 1]), ("b", [0, 1]), ("b", [1]), ("c", 0.0)]
    path.write_text("\n".join(json.dumps({"text": t, "reward": r}) for t, r in lines))
    curves = read_curves(path, with_entries(source.train))
    assert curves == {0: [[1, 1, 1]], 1: [[0, 1, 1]], 2: [[0]], 3: [[0, 1, 1]]}
    kept = ByVariance(source, path).train
    assert [prompt["text"] for prompt in kept] == ["b", "b"]

"""The outcome of a mixture predicted from others: the fit by a loop, the best mixture by a grid."""

import json
import sys
from itertools import product

import numpy as np
import pytest
import yaml

from mmrl.apps.prepare import mixture as mixture_tool
from mmrl.core.errors import UserError
from mmrl.zoo.curricula.mixing import best_mixture, features, fit, shares

GRID = np.array([w for w in product(np.linspace(0, 1, 21), repeat=3) if abs(sum(w) - 1) < 1e-9])


def outcome(mixture):
    """a + b'w + w'Cw with a maximum inside, at about (0.26, 0.33, 0.41)."""
    a, b, c = np.moveaxis(np.asarray(mixture), -1, 0)
    return 0.5 + 0.1 * b - (a - 0.3) ** 2 - 0.8 * (c - 0.45) ** 2 + 0.4 * a * b


def drawn(count, seed=0):
    return np.random.default_rng(seed).dirichlet(np.ones(3), count)


def test_a_quadratic_outcome_is_found_again_and_its_best_mixture():
    mixtures = drawn(14)
    surrogate = fit(7 * mixtures, outcome(mixtures))  # weights need not have a sum of 1
    assert surrogate.error < 1e-5 < surrogate.spread
    np.testing.assert_allclose(surrogate.predict(GRID), outcome(GRID), atol=1e-5)
    best = best_mixture(surrogate, 3)
    assert outcome(best) >= outcome(GRID).max() - 1e-5 and abs(best.sum() - 1) < 1e-9
    assert (best_mixture(surrogate, 3, least=0.3) >= 0.3 - 1e-9).all()
    linear = fit(mixtures, outcome(mixtures), "linear")
    assert linear.error > 100 * surrogate.error  # as the paper finds, it does not fit
    with pytest.raises(UserError, match="at least three runs"):
        fit(drawn(2), np.zeros(2))


@pytest.mark.parametrize("form", ["quadratic", "linear"])
def test_the_fit_is_its_loop(form):
    mixtures = shares(drawn(9, 2))
    noise = 0.05 * np.sin(np.arange(9))
    scores = outcome(mixtures) + noise
    surrogate = fit(mixtures, scores, form)
    # the definition: least squares of the rest with a penalty, one row after the other left out
    squares = []
    for row in range(9):
        rest = np.arange(9) != row
        middle = scores[rest].mean()
        x = features(mixtures[rest], form)
        penalty = 8 * surrogate.ridge * np.eye(x.shape[1])
        weights = np.linalg.solve(x.T @ x + penalty, x.T @ (scores[rest] - middle))
        predicted = middle + features(mixtures[row : row + 1], form)[0] @ weights
        squares.append((scores[row] - predicted) ** 2)
    assert surrogate.error == pytest.approx(np.sqrt(np.mean(squares)), abs=1e-9)


def test_the_script_reads_runs_and_files_and_proposes_an_override(tmp_path, monkeypatch, capsys):
    mixtures = drawn(12, 4)
    runs = [tmp_path / f"run{i}" for i in range(4)]
    for run, mixture in zip(runs, mixtures):
        run.mkdir()
        weights = dict(zip("abc", mixture.tolist()))
        section = {"replay": {"of": {"mixture": {"sources": {}, "weights": weights}}}}
        (run / "config.yaml").write_text(yaml.safe_dump({"data": section}))
        rewards = {"right": {"mean": outcome(mixture)}, "format": {"mean": 1.0}}
        rows = [{"model": "base", "rewards": {}}, {"model": "trained", "rewards": rewards}]
        (run / "evaluation.json").write_text(json.dumps({"rows": rows}))
    rows = ({"weights": dict(zip("abc", m)), "score": outcome(m)} for m in mixtures[4:].tolist())
    (tmp_path / "others.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["mixture", *map(str, runs), str(tmp_path / "others.jsonl"), "--reward", "right"]
    monkeypatch.setattr(sys, "argv", words)
    mixture_tool.main()
    override = capsys.readouterr().out.splitlines()[-1].strip("'")
    assert override.startswith("data.mixture.weights={a: ")
    best = yaml.safe_load(override.partition("=")[2])
    assert outcome([best[name] for name in "abc"]) >= outcome(GRID).max() - 1e-3

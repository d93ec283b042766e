"""Runs from Python: the objects of the command line, and no trace of one call on the next."""

import contextlib
import os
import random
import signal
import sys
import threading
from functools import partial

import numpy as np
import pytest
import torch
import yaml

import mmrl
from mmrl.core.registry import ALL
from tests.api.worlds import POLICY, QUIET, SETTINGS, TEXTS, redness
from tests.fixtures.mistakes import message

pandas = pytest.importorskip("pandas")


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A user's folder with prompts and one finished run of a configuration file."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "prompts.txt").write_text("\n".join(TEXTS))
    (folder / "tiny.yaml").write_text(yaml.safe_dump(SETTINGS))
    with contextlib.chdir(folder):
        mmrl.train("tiny.yaml", {"run": "first"}, progress=False)
    return folder


@pytest.fixture(autouse=True)
def at_the_desk(desk, monkeypatch):
    monkeypatch.chdir(desk)


def state():
    """What of the process a run could change."""
    return {
        "random": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "streams": (sys.stdout, sys.stderr),
        "handlers": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
        "registries": {kind: dict(registry) for kind, registry in ALL.items()},
    }


def test_a_run_has_metrics_samples_and_a_policy(desk):
    run = mmrl.load_run("first")
    assert run.finished and "2 iterations" in repr(run) and not run.stopped
    assert list(run.metrics.index) == [1, 2] and run.metrics["reward/mean"].notna().all()
    assert list(run.samples) == ["before", "after"]
    assert run.samples["after"][0].size == (32, 32) and run.samples["after"].prompts[0]["text"]
    assert run.config["train"]["iterations"] == 2
    assert any(event["kind"] == "checkpoint" for event in run.events)
    drawn = run.policy.sample(["a red one", "a blue two"], num_samples=2)
    assert [p["text"] for p in drawn.prompts] == ["a red one"] * 2 + ["a blue two"] * 2
    again = mmrl.load_policy("first").sample(["a red one", "a blue two"], num_samples=2)
    assert [a.tobytes() for a in drawn] == [b.tobytes() for b in again]
    base = mmrl.load_policy("tiny.yaml").sample(["a red one"], 1, seed=3)
    assert base[0].tobytes() != mmrl.load_policy("tiny.yaml").sample(["a red one"], 1)[0].tobytes()
    assert len(run.policy.prompts) >= 1 and "LoRA" not in repr(run.policy)


def test_evaluation_and_report_of_a_run(desk):
    run = mmrl.load_run("first")
    measured = run.evaluate()
    estimate = measured["trained", "jpeg_compressibility"]
    assert estimate.low <= estimate.mean <= estimate.high
    assert run.evaluation["trained", "jpeg_compressibility"].mean == estimate.mean
    assert set(measured.frame["model"]) == {"base", "trained"}
    assert "<table>" in measured._repr_html_()
    with pytest.raises(KeyError, match="models: base, trained"):
        _ = measured["trained", "beauty"]
    page = run._repr_html_()  # in a notebook
    assert page.startswith("<iframe sandbox") and "&lt;svg" in page and "data:image/png" in page
    assert "src=&#34;http" not in page and "src=&quot;http" not in page


def test_two_runs_leave_no_trace_on_each_other(desk):
    """Also not on the program around them; each alone and after another is the same to the bit."""
    torch.manual_seed(5)
    before = state()
    words = {"train.seed": 3, **QUIET}
    alone = mmrl.train("tiny.yaml", words | {"run": "alone"}, progress=False)
    assert state() == before
    mmrl.train("tiny.yaml", {"train.iterations": 1, "run": "between"}, progress=False)
    assert state() == before
    after = mmrl.train("tiny.yaml", words | {"run": "after"}, progress=False)
    columns = [name for name in alone.metrics if name.startswith(("reward", "loss", "grad"))]
    pandas.testing.assert_frame_equal(alone.metrics[columns], after.metrics[columns])
    first, second = (run.policy.model.weights.full() for run in (alone, after))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_edited_file_is_read_again(desk):
    file = desk / "mine.py"
    rewards = []
    for value in (1.0, 2.0):
        file.write_text(f"def level(media, prompts):\n    return [{value}] * len(prompts)\n")
        os.utime(file, (value, value))  # Python's cache goes by seconds
        changes = {"reward": {"mine:level": 1.0}, "run": f"level-{value}", "train.iterations": 1}
        run = mmrl.train("tiny.yaml", changes, progress=False)
        rewards.append(run.metrics["reward/mean"].iloc[0])
    assert rewards == [1.0, 2.0] and "mine" not in sys.modules


def test_a_mistake_is_the_sentence_of_the_command_line(desk):
    unrewarded = {key: value for key, value in SETTINGS.items() if key != "reward"}
    for call, sentence in [
        (lambda: mmrl.train("tiny.yaml", {"run": "first"}), "first already holds a run; go on wi"),
        (lambda: mmrl.train("tiny.yaml", {"train.itterations": 2}), "train.itterations"),
        (lambda: mmrl.train("first"), "first is a folder; to go on with a run"),
        (lambda: mmrl.train("digits/flow_grop"), "no configuration 'digits/flow_grop'"),
        (lambda: mmrl.load_run("frist"), "no run folder"),
        (lambda: mmrl.train("tiny.yaml", callbacks=[print]), "expected mmrl.Callback"),
        (lambda: mmrl.train(unrewarded), "section 'reward' is missing"),
    ]:
        assert sentence in message(call)


def test_a_configuration_may_be_a_dict_and_a_run_goes_on(desk):
    run = mmrl.train(SETTINGS | {"run": "dict"}, {"train.iterations": 1}, progress=False)
    assert run.finished and len(run.metrics) == 1
    more = run.resume({"train.iterations": 2}, progress=False)
    assert list(more.metrics.index) == [1, 2] and more.folder == run.folder
    assert more.report().is_file() and any(more.export(desk / "exported").iterdir())
    assert "exists and is not empty" in message(more.export, desk / "exported")


def test_callbacks_see_iterations_rollouts_and_evaluations_and_may_end_the_run(desk):
    rewards, rollouts, evaluations = {}, {}, {}

    def on_iteration(i, metrics):
        rewards[i] = metrics["reward/mean"]
        return i == 2

    callback = mmrl.Callback(on_iteration, rollouts.__setitem__, evaluations.__setitem__)
    words = {"run": "watched", "train.evaluate_every": 2, "train.iterations": 3}
    run = mmrl.train("tiny.yaml", words, callbacks=callback, progress=False)
    assert run.stopped == "ended by a callback" and not run.finished
    assert rewards == pytest.approx(run.metrics["reward/mean"].to_dict())
    samples = rollouts[1]
    assert len(samples) == 4 and len(samples.rewards["jpeg_compressibility"]) == 4
    assert samples[0].size == (32, 32) and samples.prompts[0] == samples.prompts[1]
    assert list(evaluations) == [2] and evaluations[2]["jpeg_compressibility"].n == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_saves_and_returns_the_run(desk, capsys, number):
    """As the stop button of a notebook: the kernel, here pytest, lives on; SIGTERM is handed on."""
    delivered = []
    handler = signal.getsignal(number)
    if number == signal.SIGTERM:
        handler = lambda n, _: delivered.append(n)  # noqa: E731
    before = signal.signal(number, handler)
    try:
        callback = mmrl.Callback(on_iteration=lambda i, metrics: signal.raise_signal(number))
        run = mmrl.train("tiny.yaml", {"run": number.name}, callbacks=callback)
        assert number.name in run.stopped and len(run.metrics) == 1
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert "mmrl train --resume" in capsys.readouterr().out
    assert delivered == ([number] if number == signal.SIGTERM else [])
    if number == signal.SIGINT:
        assert len(run.resume(progress=False).metrics) == 2


def test_another_thread_takes_no_signal_handlers(desk):
    handlers, runs = [], []
    now = partial(signal.getsignal, signal.SIGINT)
    callback = mmrl.Callback(on_iteration=lambda *_: handlers.append(now()))
    words = {"run": "thread", "train.iterations": 1}
    train = partial(mmrl.train, "tiny.yaml", words, callbacks=callback, progress=False)
    thread = threading.Thread(target=lambda: runs.append(train()))
    thread.start()
    thread.join()
    assert runs[0].finished and handlers == [now()]


def test_a_policy_alone_needs_no_training_sections():
    policy = mmrl.load_policy(POLICY)
    (picture,) = policy.sample("a red one", 1)
    assert picture.size == (32, 32)
    measured = mmrl.evaluate(policy, prompts=TEXTS[:3], reward=redness, num_samples=2)
    assert -2 < measured["policy", "redness"].mean < 1
    assert "without data" in message(lambda: policy.prompts)
    assert "at least 1" in message(policy.sample, "a", 0)
    assert "give the reward" in message(mmrl.evaluate, policy, prompts=TEXTS)

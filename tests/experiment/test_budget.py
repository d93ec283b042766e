"""A budget ends a run with the iteration that exceeds it, and goes on counting after a resume."""

import json
from types import SimpleNamespace

import pytest

from mmrl.config import Config
from mmrl.config.options import Budget
from mmrl.config.sections import LogOptions
from mmrl.experiment import loop
from mmrl.monitoring.log import RunLog
from tests.experiment.test_resume import SMALL
from tests.train.test_trainer import make_trainer


def run_of(folder, budget, resume=False):
    trainer = make_trainer("flow", iterations=5 if resume else 3, budget=budget, **SMALL)
    start = len((folder / "metrics.jsonl").read_text().splitlines()) if resume else 0
    trainer.iteration = start
    scorer = SimpleNamespace(
        failures={}, counters=dict, weights={}, seconds={}, sub_scores=dict, rewards={}
    )
    session = SimpleNamespace(
        options=trainer.options,
        policy=trainer.policy,
        scorer=scorer,
        config=Config({"reward": {}}),
        summaries=(),
    )
    options = LogOptions(tensorboard=False)
    log = RunLog(folder, resume, start=start + 1, options=options)
    run = loop.Run(session, trainer, log, folder)
    run.recount(log.past)
    return run


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["samples", "forwards"])
def test_a_run_ends_with_the_iteration_that_exceeds_its_budget(name, tmp_path):
    first = run_of(tmp_path / "first", None)
    first.loop()
    (each, *_) = (line[loop.COSTS[name]] for line in lines(tmp_path / "first"))
    assert first.trainer.iteration == 3 and not first.finished
    for more, iterations in ((1, 2), (0, 1)):
        limited = run_of(tmp_path / f"{more}", Budget(**{name: int(each + more)}))
        limited.loop()
        assert limited.trainer.iteration == iterations
        assert limited.finished.endswith(f"{name} spent")


def test_processor_time_is_that_of_iterations_and_counts_on_after_a_resume(tmp_path, monkeypatch):
    clock = iter(range(0, 1000, 10))  # an iteration takes ten seconds, and so does what is between
    monkeypatch.setattr(loop.time, "process_time", lambda: float(next(clock)))
    run = run_of(tmp_path, Budget(cpu_seconds=15.0))
    run.loop()
    assert run.trainer.iteration == 2 and run.spent["cpu_seconds"] == 20
    assert [line["cpu_seconds"] for line in lines(tmp_path)] == [10, 10]
    assert all(line["memory/peak_gib"] > 0 for line in lines(tmp_path))
    resumed = run_of(tmp_path, Budget(cpu_seconds=35.0), resume=True)
    resumed.loop()
    assert resumed.trainer.iteration == 4

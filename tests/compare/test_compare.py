"""The command ``mmrl compare`` from its words to its page, with runs that cost nothing."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from mmrl.apps.compare import command, measures, runs
from mmrl.apps.compare.measures import Comparison
from mmrl.apps.compare.plan import plan
from mmrl.apps.compare.settings import budget_of, overrides_of, settings_of
from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in
from mmrl.core.statistics import Interval
from tests.fixtures.mistakes import message

load_built_in()
FAKE = Path(__file__).with_name("fake_mmrl.py")
CONFIG = {
    "policy": {"sd3": {"path": "world:digits/sd3-test", "size": 32, "steps": 3}},
    "data": {"digits": {"captions": 40}},
    "reward": {"jpeg_compressibility": 2.0},
    "objective": {"policy_gradient": {"clip_range": 0.001}},
    "optimizer": {"adamw": {"lr": 0.1}},
    "train": {"prompts_per_iteration": 2, "group_size": 4, "train_batch_size": 4, "iterations": 2},
    "evaluate": {"reward": {"sharpness": 1.0}},
}


def written(folder, name="a", **changes):
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(CONFIG | changes))


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "COMMAND", (sys.executable, str(FAKE)))
    written(tmp_path)
    return tmp_path


def calls(desk):
    path = desk / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []


def test_words_become_settings():
    words = ["digits/awm", "digits/nft+train.epochs=2+optimizer.adamw.lr=1e+3", "train.seed=3"]
    awm, nft = settings_of(words)
    assert (awm.config, awm.changes, awm.label) == ("digits/awm", ("train.seed=3",), "awm")
    assert nft.label == "nft + epochs=2 + lr=1e+3" and nft.folder == "nft-epochs-2-lr-1e-3"
    assert nft.changes == ("train.seed=3", "train.epochs=2", "optimizer.adamw.lr=1e+3")
    base, gspo = settings_of(["digits/d1"], ["objective.surrogate=gspo train.epochs=2"])
    assert base.changes == () and gspo.changes == ("objective.surrogate=gspo", "train.epochs=2")
    called = settings_of(["a+label=GSPO, 1+x.y=2", "a"], (), ["x.z=1,2"])
    assert [s.label for s in called][:2] == ["GSPO, 1 + z=1", "GSPO, 1 + z=2"]
    assert called[0].changes == ("x.y=2", "x.z=1")
    grid = settings_of(["sd3/flow_grpo", "flux/flow_grpo"], (), ["a.b=1,2", "c.d=x,y"])
    assert len(grid) == 8 and [s.arm for s in grid] == [0] * 4 + [1] * 4
    assert grid[1].label == "sd3/flow_grpo + b=1 + d=y"


def test_wrong_words_and_budgets_are_one_sentence(subtests):
    for words, vary, sweep, sentence in [
        (["a"], [], [], "nothing to compare with"),
        (["a", "a"], [], [], "'a' is named 2 times"),
        (["a", "b"], ["train.epochs=2"], [], "name one"),
        (["a"], ["epochs"], [], "expected key=value"),
        (["a"], [], ["train.epochs=2"], "expected key=v1,v2"),
    ]:
        with subtests.test(words=words, vary=vary):
            assert sentence in message(settings_of, words, vary, sweep)
    for text, sentence in [
        ("cpu=1", "no such budget"),
        ("samples=1.5", "whole number"),
        ("samples=x", "samples=NUMBER"),
        ("cpu_seconds=0", "above 0"),
    ]:
        assert sentence in message(budget_of, [text])


def test_a_budget_lifts_the_limit_of_iterations_where_nothing_depends_on_it(desk):
    words = ["a.yaml", "a.yaml+train.iterations=7", "a.yaml+train.lr_schedule=cosine"]
    budget = budget_of(["cpu_seconds=1.5"])
    lifted = ["train.iterations=1000000" in overrides_of(s, budget, 4) for s in settings_of(words)]
    assert lifted == [True, False, False]
    (steady, *_) = settings_of(words)
    known = ["train.seed=4", "evaluate.split=development", "train.budget={cpu_seconds: 1.5}"]
    assert overrides_of(steady, budget, 4)[:3] == known
    assert overrides_of(steady, {"iterations": 9.0}, 0)[-1] == "train.iterations=9"


def test_what_cannot_be_paired_is_said_before_any_run(desk):
    both, judge = settings_of(["a.yaml", "b.yaml"]), {"reward": {"colourfulness": 1.0}}
    for changes, sentence in [
        ({"evaluate": CONFIG["evaluate"] | {"num_samples": 2}}, "evaluate.num_samples=None, b 2"),
        ({"data": {"digits": {"captions": 60, "kind": "pairs"}}}, "holds out other prompts"),
        (judge | {"evaluate": {}}, "share no judge"),
    ]:
        written(desk, "b", **changes)
        assert sentence in message(plan, both, 2, {})
    written(desk, "b", **judge)
    by_judge = plan(both, 2, {})
    assert by_judge.primary == "sharpness" and "judge sharpness decides" in by_judge.note
    misspelt = settings_of(["a.yaml"], ["objective.clip_rangs=1"])
    assert "clip_rangs" in message(plan, misspelt, 2, {}) and not calls(desk)
    same = settings_of(["a.yaml"], ["optimizer.adamw.lr=0.1"])
    assert "lr=0.1 is the same configuration as a" in message(plan, same, 2, {})


def test_a_comparison_is_written_and_not_done_twice(desk):
    request = command.Request(vary=["optimizer.adamw.lr=0.2"], seeds=3, jobs=2)
    path, sentences = command.compare(["a.yaml"], request)
    assert len(calls(desk)) == 12  # two settings, three seeds, trained and evaluated
    assert sentences[0].startswith("a + lr=0.2 has a higher held-out reward than a (+2, 95 %")
    assert any("But its sharpness, which was not trained on, is lower" in s for s in sentences)
    content = json.loads((path.parent / "compare.json").read_text())
    assert content["costs"]["a"]["cpu_seconds"] == 3 and content["costs"]["a"]["samples"] == 16
    assert content["curves"]["forwards"]["a"]["x"] == [40, 80]
    gain = content["means"]["test"]["a"]["jpeg_compressibility"]["gain"]
    assert gain["mean"] == pytest.approx(1.0)
    kinds = {"reward": "trained on", "sharpness": "not trained on"}
    assert kinds.items() <= content["measures"].items()
    page = path.read_text()
    assert "a + lr=0.2 − a" in page and "<svg" in page and "CPU seconds" in page
    plain = (path.parent / "compare.md").read_text()
    assert "| a + lr=0.2 - a | **+2.000 (" in plain and "| a | 2 | 16 | 80 | 3.0 |" in plain
    assert f"* {sentences[0]}" in plain and "`optimizer.adamw.lr=0.2`" in plain
    # the page may be written later than its runs, and be moved
    assert content["commits"] == ["unknown"] and "the runs at commit unknown. Again" in plain
    folder = path.parent
    assert all((folder / run[1]).is_dir() for run in content["runs"])
    (folder / content["runs"][0][1] / "machine.json").write_text('{"commit": "abc"}')
    command.compare(["a.yaml"], request)
    content = json.loads((folder / "compare.json").read_text())
    assert content["commits"] == ["abc", "unknown"]


def test_more_seeds_are_added_and_other_settings_refused(desk):
    vary = ["optimizer.adamw.lr=0.2"]
    for seeds, count in ((1, 4), (1, 4), (2, 8)):
        command.compare(["a.yaml"], command.Request(vary=vary, seeds=seeds))
        assert len(calls(desk)) == count
    other = command.Request(vary=vary, budget=["samples=9"])
    assert "of other settings (train.budget, " in message(command.compare, ["a.yaml"], other)


def test_a_sweep_is_chosen_on_development_and_reported_on_test(desk):
    request = command.Request(sweep=["optimizer.adamw.lr=0.1,0.3,0.2"], seeds=2)
    path, sentences = command.compare(["a.yaml"], request)
    assert sentences[0] == "Chosen on the development prompts: a + lr=0.3."
    content = json.loads((path.parent / "compare.json").read_text())
    between = {(c["candidate"], c["baseline"]) for c in content["comparisons"]}
    assert between == {("a + lr=0.3", "a + lr=0.1"), ("a + lr=0.3", "a + lr=0.2")}
    assert content["prompts"]["test"][0] == "test 0"
    assert content["prompts"]["development"][0] == "development 0"


def test_a_failed_run_is_named_and_taken_up_again(desk):
    (desk / "broken").touch()
    request = command.Request(vary=["optimizer.adamw.lr=0.2"], seeds=1)
    with pytest.raises(UserError, match="1 of 2 runs failed.*\n.*the reward fell over"):
        command.compare(["a.yaml"], request)
    assert len(calls(desk)) == 3  # the other one went on
    _, sentences = command.compare(["a.yaml"], request)
    assert len(calls(desk)) == 5 and "One seed" in sentences[-1]


def test_a_killed_run_goes_on_from_its_checkpoint(desk):
    (desk / "slow").touch()

    def kill():
        while not (desk / "waiting").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=kill)
    thread.start()
    request = command.Request(vary=["optimizer.adamw.lr=0.2"], seeds=1)
    with pytest.raises(KeyboardInterrupt):
        command.compare(["a.yaml"], request)
    thread.join()
    assert len(calls(desk)) == 1
    command.compare(["a.yaml"], request)
    assert calls(desk)[1] == f"train --resume {Path('comparison/a/seed-0/run')}"


def test_a_verdict_never_says_more_than_the_interval():
    for low, high, sentence in [
        (0.1, 0.3, "b has a higher held-out reward than a (+0.2,"),
        (-0.3, -0.1, "b has a lower held-out reward"),
        (-0.1, 0.3, "may be up to 0.3 better or 0.1 worse"),
        (0.0, 0.2, "No difference in held-out reward is shown"),
        (-np.inf, np.inf, "too little was measured"),
        (0.0, 0.0, "all scores are equal, as if both were the same training"),
    ]:
        difference = Interval((low + high) / 2, low, high, 0.01, 5.0, 3, 20)
        assert sentence in measures.sentence(Comparison("b", "a", "reward", difference, 0.01), 1)
    among = Comparison("b", "a", "reward", Interval(0.2, 0.1, 0.3, 0.01, 5.0, 3, 20), 0.2)
    assert "among 4 comparisons that is not enough" in measures.sentence(among, 4)


def test_holm_counts_the_comparisons_of_a_measure():
    rng = np.random.default_rng(0)
    tables = {
        label: measures.Measured({"reward": rng.normal(size=(3, 8)) + shift}, {}, [], True)
        for label, shift in (("a", 0.0), ("b", 1.0), ("c", 0.1))
    }
    alone = measures.compare(tables, ["reward"], [("b", "a")])[0]
    both = measures.compare(tables, ["reward"], [("b", "a"), ("c", "a")])
    assert alone.holm == alone.difference.p
    assert both[0].difference == alone.difference and both[0].holm == pytest.approx(2 * alone.holm)

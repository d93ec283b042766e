"""A run repeated from its folder: equal to the bit, or what differs."""

import json

import pytest

from mmrl.core.errors import UserError
from mmrl.experiment import lifecycle
from mmrl.experiment.rerun import compare, rerun
from scripts.dev.soak_parts import killing


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rerun")
    file = killing.configuration(folder, "ToyCausal", 3)
    return lifecycle.train(file, [f"run={folder / 'run'}"])


@pytest.mark.slow
def test_a_run_is_repeated_to_the_bit_from_its_folder(run):
    (run.parent / "ToyCausal.yaml").unlink()
    outcome = rerun(run)
    assert (outcome.folder.name, outcome.iterations) == ("run-rerun", 3)
    assert (outcome.differences, outcome.surroundings) == ((), ())
    assert next(outcome.lines()).startswith("bit-equal: weights, optimizer and metrics of 3")
    report = json.loads((outcome.folder / "rerun.json").read_text())
    assert report["equal"] is True and report["of"] == str(run)
    with pytest.raises(UserError, match="already holds a run"):
        rerun(run)


@pytest.mark.slow
def test_what_differs_is_named(run, tmp_path):
    second = lifecycle.train(run / "config.yaml", [f"run={tmp_path / 'b'}", "train.seed=1"])
    machine = json.loads((second / "machine.json").read_text())
    machine |= {"threads": 99, "versions": machine["versions"] | {"torch": "0.1"}}
    (second / "machine.json").write_text(json.dumps(machine))
    text = "\n".join(compare(run, second).lines())
    assert "first differing metric:" in text and "in iteration 1" in text
    assert "weights of iteration-000003:" in text and "tensors differ, by at most" in text
    assert "now 99" in text and "now 0.1" in text


@pytest.mark.slow
def test_what_was_changed_on_the_way_is_named(run, tmp_path):
    first = lifecycle.train(run / "config.yaml", [f"run={tmp_path / 'c'}", "train.iterations=2"])
    lifecycle.train(first, ["optimizer.adamw.lr=0.5", "train.iterations=3"], resume=True)
    outcome = rerun(first)
    assert outcome.differences
    assert any("lr was 0.003 and is now 0.5 after iteration 2" in x for x in outcome.surroundings)


def test_an_unfinished_run_or_one_with_stages_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("policy: a\n")
    with pytest.raises(UserError, match="is not finished; go on with it first"):
        rerun(tmp_path)
    (tmp_path / "config.yaml").write_text("stages: {sft: {policy: a}, rl: {policy: a}}\n")
    with pytest.raises(UserError, match="repeat them one by one, mmrl rerun .*1-sft"):
        rerun(tmp_path)

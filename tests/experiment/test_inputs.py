"""What a run is made of is found from anywhere, and a resume says what of it has changed."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import yaml

from mmrl import config
from mmrl.core.registry import DATA, load_built_in
from mmrl.data.ledger import collecting
from mmrl.experiment import inputs
from mmrl.experiment.build import resolved

load_built_in()
CODE = "def score(media, prompts): return [1.0] * len(prompts)\n"


@pytest.fixture()
def project(tmp_path, monkeypatch):
    """A project whose configuration lies in a subfolder, in the working folder; beside it ``b``."""
    for name in ("a/sub", "b"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("quick_one", "quick_two"):
        (tmp_path / f"a/{name}.py").write_text(CODE)
    (tmp_path / "a/sub/beside_it.py").write_text(CODE)
    (tmp_path / "a/p.txt").write_text("one\ntwo\n")
    monkeypatch.chdir(tmp_path / "a")
    return tmp_path


def written(project, reward, **more) -> config.Config:
    plain = {"data": {"prompts": {"path": "p.txt", "held_out": 0}}, "reward": reward, **more}
    (project / "a/sub/c.yaml").write_text(yaml.safe_dump(plain))
    return config.load(project / "a/sub/c.yaml", required=("data",))


def again(project, known: config.Config) -> config.Config:
    """The configuration as the run's folder holds it, read elsewhere."""
    (project / "b/config.yaml").write_text(config.dump(known))
    os.chdir(project / "b")
    return config.load("config.yaml", required=("data",))


@pytest.mark.parametrize(
    "reward",
    [
        {"quick_one.py:score": 1.0, "quick_two.py:score": 0.5},
        {"quick_one.py:score": {"weight": 2.0}, "other": {"use": "quick_two.py:score"}},
        "quick_one.py:score",
        {"beside_it.py:score": 1.0},
    ],
)
def test_a_run_s_files_are_found_from_anywhere(project, reward):
    first = written(project, reward)
    entries = {name: each.reward.entry for name, each in resolved(first, ("reward",)).items()}
    (project / "b/p.txt").write_text("other\n" * 5)  # others of these names are not taken
    (project / "b/quick_one.py").write_text("def score(): raise ValueError\n")
    second = again(project, first)
    for name, chosen in resolved(second, ("reward",)).items():
        assert chosen.reward.entry is entries[name]  # its curves are called as before
    assert len(second.build("data", DATA).train) == 2


def test_a_reward_inside_another_keeps_its_form(project):
    spec = {"by_task": {"reward": "quick_one.py:score"}, "quick_two.py:score": 1.0}
    (project / "a/runs").mkdir()
    whole = config.anchored({"start": "runs", "run": "runs", "reward": spec}, project / "a/s")
    one, two = (f"{project / 'a' / name}.py:score" for name in ("quick_one", "quick_two"))
    wanted = {"by_task": {"reward": one}, "quick_two.py:score": {"use": two, "weight": 1.0}}
    assert whole == {"start": str(project / "a/runs"), "run": "runs", "reward": wanted}


def known(configuration: config.Config) -> inputs.Known:
    with collecting() as summaries:
        configuration.build("data", DATA)
    return inputs.known(SimpleNamespace(config=configuration, summaries=summaries))


def test_what_changed_between_stop_and_resume_is_said(project):
    (project / "a/helping.py").write_text("BY = 1.0\n")
    (project / "a/helped.py").write_text("from helping import *\nimport helping\n" + CODE)
    (project / "a/rows.csv").write_text("text,n\none,1\n")
    configuration = written(project, {"helped.py:score": 1.0, "quick_two.py:score": 1.0})
    before = known(configuration)
    assert inputs.changed(before, known(again(project, configuration))) == []
    os.chdir(project / "a")
    (project / "a/helping.py").write_text("BY = -1.0\n")
    (project / "a/p.txt").write_text("one\ntwo\nthree\n")
    assert inputs.changed(before, known(configuration)) == [
        "changed since the checkpoint: reward 'helped.py:score': helping.py",
        "changed since the checkpoint: data p.txt: 2 rows then, 3 now",
    ]
    (project / "a/p.txt").write_text("one\nthree\n")
    assert inputs.changed(before, known(configuration))[1].endswith("p.txt: 2 rows, other ones")

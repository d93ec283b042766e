"""The files of the release (workflows, forms, containers) are valid, and name what there is."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
MADE = ("dist", "build", ".venv")  # by the steps before
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def jobs(workflow):
    return yaml.safe_load(workflow.read_text())["jobs"]


def steps():
    """(workflow, job, step) of every step."""
    return [
        (workflow, name, step)
        for workflow in WORKFLOWS
        for name, job in jobs(workflow).items()
        for step in job["steps"]
    ]


RUN = [(workflow, step["run"]) for workflow, _, step in steps() if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_valid_and_bounded(workflow):
    known = yaml.safe_load(workflow.read_text())
    assert known["permissions"] == {"contents": "read"}, "no more than it needs"
    assert known[True], "YAML reads the key on as true"
    for name, job in jobs(workflow).items():
        assert job["runs-on"] and (job.get("timeout-minutes") or name == "publish"), name
        needs = job.get("needs", [])
        assert {needs} <= jobs(workflow).keys() if isinstance(needs, str) else not needs
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            if "uses" in step:
                assert re.fullmatch(r"[\w.-]+/[\w.-]+@(v\d+|release/v\d+)", step["uses"]), step


def test_a_step_names_files_and_extras_that_there_are():
    """Programs, scripts, tests and folders of the repository."""
    wrong = []
    for workflow, text in RUN:
        for line in filter(None, map(str.strip, text.splitlines())):
            words = shlex.split(line, comments=True)
            words = shlex.split(words[2]) if words[:2] == ["bash", "-c"] else words
            places = [word.split("<")[-1].strip("()'\"") for word in words]
            places = [p for p in places if "/" in p and not re.search(r"[$:*>]", p)]
            missing = [p for p in places if not p.startswith(MADE) and not (ROOT / p).exists()]
            extras = re.findall(r"(?:^|\s)\.\[(\w+)\]", " ".join(words))
            missing += set(extras) - PROJECT["optional-dependencies"].keys()
            wrong += [f"{workflow.name}: {line}: {name}" for name in missing]
    assert not wrong


def test_the_versions_of_python_are_those_that_are_promised():
    promised = {
        line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)
    }
    quick = jobs(GITHUB / "workflows" / "test.yml")["quick"]["strategy"]["matrix"]["python"]
    assert set(quick) == promised
    assert PROJECT["requires-python"] == f">={min(promised, key=lambda v: int(v[2:]))}"

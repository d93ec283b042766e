"""The files of the release (workflows, forms, containers) are valid, and name what there is."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
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
        for need in [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", []):
            assert need in jobs(workflow)
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            if "uses" in step:
                assert re.fullmatch(r"[\w.-]+/[\w.-]+@(v\d+|release/v\d+)", step["uses"]), step


@pytest.mark.parametrize(("workflow", "text"), RUN, ids=[f"{w.stem}-{t[:40]}" for w, t in RUN])
def test_a_step_names_files_and_extras_that_there_are(workflow, text):
    """Programs, scripts, tests and folders of the repository."""
    for line in filter(None, map(str.strip, text.splitlines())):
        words = shlex.split(line, comments=True)
        if words[:2] == ["bash", "-c"]:
            words = shlex.split(words[2])
        for word in words:
            place = word.split("<")[-1].strip("()'\"")
            inner = "/" in place and not re.search(r"[$:*>]", place)
            if inner and not place.startswith(MADE):
                assert (ROOT / place).exists(), f"{workflow.name}: {line}: {place}"
            for extra in re.findall(r"^\.\[(\w+)\]$", word):
                assert extra in PROJECT["optional-dependencies"], f"{workflow.name}: {extra}"


def test_the_versions_of_python_are_those_that_are_promised():
    promised = {
        line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)
    }
    quick = jobs(GITHUB / "workflows" / "test.yml")["quick"]["strategy"]["matrix"]["python"]
    assert set(quick) == promised
    assert PROJECT["requires-python"] == f">={min(promised, key=lambda v: int(v[2:]))}"


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_is_valid(form):
    known = yaml.safe_load(form.read_text())
    if form.stem == "config":
        assert set(known) <= {"blank_issues_enabled", "contact_links"}
        return
    assert known["name"] and known["description"] and known["body"]
    fields = [field for field in known["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) > 0
    assert all(field["attributes"]["label"] for field in fields)


def test_containers_take_files_that_there_are():
    text = (ROOT / "Dockerfile").read_text()
    assert re.findall(r"^FROM (\S+)", text, re.M) == ["python:${PYTHON}-slim"] * 2
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    for script in re.findall(r"scripts/\w+", container["postCreateCommand"] + text):
        assert (ROOT / script).is_file(), script
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"mmrl", "rewards", "samplers", "configs", "pyproject.toml", "README.md"} & {
        name.strip("/") for name in ignored
    }, "the image builds the wheel"

"""What ``pip install .`` gives: one package with all its parts, the command, the licence."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import mmrl

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def pip(*words):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(ROOT))
    (built,) = folder.glob("multimodal_rl-*.whl")
    return built


def test_the_wheel_holds_every_module_config_and_template(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        (Path("mmrl") / path.relative_to(ROOT / (folder if folder == "mmrl" else "."))).as_posix()
        for folder in ("mmrl", "rewards", "samplers", "configs")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected <= held, f"left out of the wheel: {sorted(expected - held)}"
    rest = {name for name in held if name.partition("/")[0] != "mmrl"}
    assert all(".dist-info/" in name for name in rest), (
        f"a name of ours at the top of site-packages would break a user's: {sorted(rest)}"
    )
    assert any(name.endswith("licenses/LICENSE") for name in rest)
    (points,) = [name for name in held if name.endswith("entry_points.txt")]
    assert b"mmrl = mmrl.cli.app:main" in zipfile.ZipFile(wheel).read(points)


def test_the_wheel_brings_the_pages_and_no_dead_link(wheel):
    archive = zipfile.ZipFile(wheel)
    pages = {f"mmrl/{path.relative_to(ROOT)}" for path in (ROOT / "docs").rglob("*.md")}
    held = {name for name in archive.namelist() if name.startswith("mmrl/docs/")}
    assert pages == held
    (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
    shown = archive.read(name).decode()
    assert "Project-URL: " in shown and "text/markdown" in shown
    assert not re.findall(r"\]\((?!https?:|#|mailto:)[^)]*\)", shown)
    assert "The first hour" in shown  # the text of a link stays


TINY = """
policy: {sd3: {path: "world:digits/sd3-test", size: 32, steps: 3}}
data: digits
reward: {jpeg_compressibility: 1.0, "rewards:redness": 1}
objective: policy_gradient
train: {prompts_per_iteration: 2, group_size: 2, train_batch_size: 4, iterations: 1}
"""


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Give ``run(*words)``, which runs a program of an environment that holds the wheel and, from
    here, only the libraries it needs: this checkout and its editable installation are not in it."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home / "env", with_pip=False)
    binaries = home / "env" / "bin"
    (site,) = (home / "env" / "lib").glob("python*/site-packages")
    # a line of a .pth adds the folder of the libraries without reading the .pth files in it
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("--python", str(binaries / "python"), "install", "--no-deps", "--no-index", str(wheel))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)

    def run(program, *words, cwd=home):
        command = [str(binaries / program), *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    return run


PARTS = """
import contextlib, runpy, sys
import mmrl.core.paths as p, mmrl.monitoring.report.page, mmrl.rewards, rewards
assert mmrl.rewards is rewards
print(p.PACKAGE, *p.config_names())
for module in sys.argv[1:]:
    sys.argv = [module, "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def test_an_installed_copy_finds_its_own_parts_and_the_programs_of_the_docs(installed):
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    modules = {name for name in re.findall(r"-m (mmrl\.[\w.]+)", pages) if name.islower()}
    assert "mmrl.apps.prepare.mixture" in modules
    first, *shown = installed("python", "-c", PARTS, *sorted(modules)).splitlines()
    assert "\n".join(shown).lower().count("usage") == len(modules), shown
    place, *names = first.split()
    assert not Path(place).is_relative_to(ROOT)
    configs = ROOT / "configs"
    shipped = (path.relative_to(configs).with_suffix("") for path in configs.rglob("*.yaml"))
    assert set(names) == {path.as_posix() for path in shipped}
    assert (Path(place) / "monitoring" / "report" / "templates" / "report.html").is_file()


NEEDS = """
from importlib.metadata import requires, version
from packaging.requirements import Requirement
for need in map(Requirement, requires('multimodal-rl')):
    if need.marker is None or need.marker.evaluate({'extra': ''}):
        assert need.specifier.contains(version(need.name), prereleases=True), need
print(version('multimodal-rl'))
"""


def test_what_the_distribution_needs_is_what_is_installed(installed):
    """Its metadata, read where it is installed, name libraries that are there in these versions.
    The version is written once, in mmrl/core/version.py."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and "version" in project["dynamic"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    installed_version = installed("python", "-c", NEEDS).strip()
    assert installed_version == mmrl.__version__ == str(citation["version"])


OWN = """
from rewards_of_mine import shade

print("here is", __file__)


def redness(media, prompts):
    return shade(media)
"""


def test_a_users_modules_of_our_names_are_no_harm(installed, tmp_path):
    """The command, and a program, in a folder that has a ``rewards.py`` and a ``samplers/``;
    launchers, which start modules as Python does: scripts/dev/try_wheel."""
    (tmp_path / "rewards.py").write_text(OWN)
    (tmp_path / "rewards_of_mine.py").write_text("def shade(media):\n    return media[:, 0]\n")
    (tmp_path / "samplers").mkdir()
    (tmp_path / "samplers" / "__init__.py").write_text("raise RuntimeError('not to be imported')")
    (tmp_path / "tiny.yaml").write_text(TINY)
    assert "clip_score" in installed("mmrl", "list", "rewards", cwd=tmp_path)
    code = "from mmrl import config; config.check(config.load('tiny.yaml'))"
    printed = installed("python", "-c", code, cwd=tmp_path)
    assert f"here is {tmp_path / 'rewards.py'}" in printed


def test_remedies_name_the_distribution_and_extras_that_it_has():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        name
        for room in ("mmrl", "rewards", "samplers", "docs")
        for path in (ROOT / room).rglob("*")
        if path.suffix in (".py", ".md")
        for name in re.findall(r"([\w-]*mmrl|multimodal-rl)\[(\w+)\]", path.read_text())
    }
    assert named and named == {(project["name"], extra) for _, extra in named}
    assert {extra for _, extra in named} <= set(project["optional-dependencies"])

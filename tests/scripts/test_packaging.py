"""What ``pip install .`` gives: three packages, the command, the configurations, the licence."""

import configparser
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def pip(*words):
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip(
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    )
    (found,) = folder.glob("mmrl-*.whl")
    return found


def test_the_wheel_holds_every_module_config_and_template(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in ("mmrl", "rewards", "samplers")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    expected |= {
        f"mmrl/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "configs").rglob("*.yaml")
    }
    assert expected <= held, f"left out of the wheel: {sorted(expected - held)}"
    rest = {name for name in held if name.partition("/")[0] not in ("mmrl", "rewards", "samplers")}
    assert all(".dist-info/" in name for name in rest), (
        f"only the three packages are installed, not {sorted(rest)}"
    )
    assert any(name.endswith("licenses/LICENSE") for name in rest)


def test_the_command_is_installed(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    points = configparser.ConfigParser()
    points.read_string(archive.read(name).decode())
    assert dict(points["console_scripts"]) == {"mmrl": "mmrl.cli.app:main"}


def test_an_installed_copy_finds_its_own_parts(wheel, tmp_path):
    site = tmp_path / "site"
    pip("install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    code = (
        "import mmrl.utils.paths as p, mmrl.monitoring.report.page, rewards, samplers; "
        "print(p.PACKAGE, "
        "*p.config_names())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        env=os.environ | {"PYTHONPATH": str(site)},
    )
    assert done.returncode == 0, done.stderr
    place, *names = done.stdout.split()
    assert Path(place) == (site / "mmrl").resolve()
    shipped = {
        path.relative_to(ROOT / "configs").with_suffix("").as_posix()
        for path in (ROOT / "configs").rglob("*.yaml")
    }
    assert set(names) == shipped
    assert (site / "bin" / "mmrl").is_file()
    assert (site / "mmrl" / "report" / "templates" / "report.html").is_file()


def test_the_version_is_written_once():
    import mmrl

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == mmrl.__version__

"""The artifact cache: whole or not at all, checked by hash, built once by many processes."""

import json
import shutil
from dataclasses import astuple, fields, make_dataclass, replace
from pathlib import Path

import pytest

from mmrl.cli.commands import QUICKSTART
from mmrl.core.errors import UserError
from mmrl.core.registry import ARTIFACTS, load_built_in
from mmrl.worlds import cache, recipes
from tests.fixtures import warm


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))


class Builder:
    def __init__(self, text="weights"):
        self.calls = 0
        self.text = text

    def __call__(self, folder):
        self.calls += 1
        (folder / "sub").mkdir()
        (folder / "sub" / "a.bin").write_text(self.text)


def test_built_once_then_found():
    build = Builder()
    first = cache.fetch("toy/model", "r1", build)
    assert first == cache.fetch("toy/model", "r1", build) and build.calls == 1
    assert (first / "sub" / "a.bin").read_text() == "weights"
    assert cache.damage(first, "r1") is None
    manifest = json.loads((first / cache.MANIFEST).read_text())
    assert manifest["recipe"] == "r1" and list(manifest["files"]) == ["sub/a.bin"]


@pytest.mark.parametrize("harm", ["change", "remove", "tear"])
def test_damage_is_named_and_repaired(harm, capsys):
    build = Builder()
    folder = cache.fetch("toy", "r1", build)
    target = folder / "sub" / "a.bin"
    if harm == "remove":
        target.unlink()
    elif harm == "change":
        target.write_text("weightx")
    else:
        (folder / cache.MANIFEST).write_text("{")
    assert cache.damage(folder, "r1")
    assert cache.fetch("toy", "r1", build) == folder and build.calls == 2
    assert target.read_text() == "weights"
    warning = capsys.readouterr().err
    assert str(folder) in warning and ("a.bin" in warning or cache.MANIFEST in warning)


def test_two_processes_build_once(tmp_path):
    script = (
        "import sys, time, pathlib; from mmrl.worlds import cache\n"
        "def build(folder):\n"
        "    with open(sys.argv[1], 'a') as log: log.write('built ')\n"
        "    time.sleep(0.2); (folder / 'x').write_text('x')\n"
        "print(cache.fetch('toy', 'r1', build))\n"
    )
    log = tmp_path / "log"
    running = [warm.start(["-c", script, log]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    outputs = {process.stdout for process in running}
    assert log.read_text() == "built " and len(outputs) == 1


def test_the_recipe_hash_follows_values_and_versions_and_no_names():
    base = cache.recipe_hash((recipes.SD3,), [1, 1])
    assert base == cache.recipe_hash((replace(recipes.SD3),), [1, 1])
    names = [(f"x{i}", object) for i in range(len(fields(recipes.SD3)))]
    renamed = make_dataclass("Renamed", names)(*astuple(recipes.SD3))
    assert base == cache.recipe_hash((renamed,), [1, 1])
    others = ((recipes.SD3_CLEAN,), [1, 1]), ((recipes.SD3,), [1, 2])
    assert base not in [cache.recipe_hash(*other) for other in others]


def test_every_part_of_the_code_has_a_version_that_something_depends_on(monkeypatch):
    """Raising any one number names another folder of some artifact."""

    def folders():
        return {name: ARTIFACTS.find(name)() for name in sorted(ARTIFACTS)}

    load_built_in()
    monkeypatch.setattr(cache, "fetch", lambda name, recipe, build: Path(f"{name}-{recipe}"))
    before = folders()
    for part, version in recipes.VERSIONS.items():
        with monkeypatch.context() as patch:
            patch.setitem(recipes.VERSIONS, part, version + 1)
            assert folders() != before, part


def test_a_build_that_failed_or_was_killed_leaves_nothing():
    (cache.root() / ".toy-r1-abcd").mkdir(parents=True)

    def broken(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        cache.fetch("toy", "r1", broken)
    assert [path.name for path in cache.root().iterdir()] in ([], ["toy-r1.lock"])
    assert cache.fetch("toy", "r1", Builder()).is_dir()


def test_where_the_cache_is(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="MMRL_CACHE"):  # it cannot be written to
        cache.fetch("toy", "r1", Builder())
    monkeypatch.delenv("MMRL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.root() == tmp_path / "mmrl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.root() == Path.home() / ".cache" / "mmrl"


def test_a_shipped_folder_is_used_where_it_lies_unless_it_is_another_or_damaged(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(cache, "SHIPPED", tmp_path / "shipped")
    shipped = tmp_path / "shipped" / "toy"
    shutil.copytree(cache.fetch("toy", "r1", Builder("as shipped")), shipped)
    shutil.rmtree(cache.root())
    build = Builder("new")
    assert cache.fetch("toy", "r1", build) == shipped and build.calls == 0
    assert not cache.root().exists()
    folder = cache.fetch("toy", "r2", build)
    assert folder.parent == cache.root() and (folder / "sub" / "a.bin").read_text() == "new"
    assert not capsys.readouterr().err
    (shipped / "sub" / "a.bin").write_text("as shippeD")
    folder = cache.fetch("toy", "r1", build)
    assert folder.parent == cache.root() and (folder / "sub" / "a.bin").read_text() == "new"
    assert "a.bin has changed" in capsys.readouterr().err


def test_what_is_shipped_is_what_quickstart_needs_by_the_present_recipe(monkeypatch):
    """Else run `python scripts/dev/ship_world.py` and commit."""
    monkeypatch.setattr(cache, "_build", lambda *_: pytest.fail("run scripts/dev/ship_world.py"))
    load_built_in()
    for name in QUICKSTART:
        folder = ARTIFACTS.find(name)()
        assert folder == cache.SHIPPED / name
        files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
        listed = json.loads((folder / cache.MANIFEST).read_text())["files"]
        assert files == {cache.MANIFEST, *listed}
        kinds = {Path(file).suffix for file in files}
        assert kinds <= {".safetensors", ".json", ".txt"}, "nothing that executes"
    held = {str(f.parent.relative_to(cache.SHIPPED)) for f in cache.SHIPPED.rglob(cache.MANIFEST)}
    assert held == set(QUICKSTART)
    assert sum(file.stat().st_size for file in cache.SHIPPED.rglob("*")) < 10e6

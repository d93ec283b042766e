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


def test_another_recipe_is_another_folder():
    first = cache.fetch("toy", "r1", Builder("1"))
    two = cache.fetch("toy", "r2", Builder("2"))
    assert first != two and (first / "sub/a.bin").read_text() == "1"


@pytest.mark.parametrize("harm", ["change", "remove", "tear"])
def test_damage_is_named_and_repaired(harm, capsys):
    build = Builder()
    folder = cache.fetch("toy", "r1", build)
    target = folder / "sub" / "a.bin"
    {
        "change": lambda: target.write_text("weightx"),
        "remove": target.unlink,
        "tear": lambda: (folder / cache.MANIFEST).write_text("{"),
        "manifest": (folder / cache.MANIFEST).unlink,
    }[harm]()
    assert cache.damage(folder, "r1")
    assert cache.fetch("toy", "r1", build) == folder and build.calls == 2
    assert target.read_text() == "weights"
    warning = capsys.readouterr().err
    assert str(folder) in warning and ("a.bin" in warning or cache.MANIFEST in warning)


def test_a_build_that_fails_leaves_nothing():
    def broken(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        cache.fetch("toy", "r1", broken)
    assert [path.name for path in cache.root().iterdir()] in ([], ["toy-r1.lock"])
    assert cache.fetch("toy", "r1", Builder()).is_dir()


def test_leftovers_of_a_killed_build_are_swept():
    cache.root().mkdir()
    (cache.root() / ".toy-r1-abcd").mkdir()
    (cache.root() / ".toy-r1-abcd" / "half").write_text("half")
    cache.fetch("toy", "r1", Builder())
    assert not (cache.root() / ".toy-r1-abcd").exists()


def test_two_processes_build_once(tmp_path):
    script = (
        "import sys, time, pathlib; from mmrl.worlds import cache\n"
        "def build(folder):\n"
        "    with open(sys.argv[1], 'a') as log: log.write('built ')\n"
        "    time.sleep(0.5); (folder / 'x').write_text('x')\n"
        "print(cache.fetch('toy', 'r1', build))\n"
    )
    log = tmp_path / "log"
    running = [warm.start(["-c", script, log]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    outputs = {process.stdout for process in running}
    assert log.read_text() == "built " and len(outputs) == 1


def test_unwritable_cache_is_a_readable_message(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="MMRL_CACHE"):
        cache.fetch("toy", "r1", Builder())


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("MMRL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.root() == tmp_path / "mmrl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.root() == Path.home() / ".cache" / "mmrl"


def test_the_recipe_hash_follows_values_and_versions_and_no_names():
    base = cache.recipe_hash((recipes.SD3,), [1, 1])
    assert base == cache.recipe_hash((replace(recipes.SD3),), [1, 1])
    renamed = make_dataclass(
        "Renamed", [(f"x{i}", object) for i in range(len(fields(recipes.SD3)))]
    )
    assert base == cache.recipe_hash((renamed(*astuple(recipes.SD3)),), [1, 1])
    changes = [
        ((recipes.SD3_CLEAN,), [1, 1]),
        ((recipes.SD3,), [1, 2]),
        ((recipes.SD3, recipes.PARTS), [1, 1]),
    ]
    assert len({base, *(cache.recipe_hash(*changed) for changed in changes)}) == 4


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


# -- what comes with the package
# ---------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that came with ``toy`` of recipe r1."""
    monkeypatch.setattr(cache, "SHIPPED", tmp_path / "shipped")
    shutil.copytree(cache.fetch("toy", "r1", Builder("as shipped")), tmp_path / "shipped" / "toy")
    shutil.rmtree(cache.root())
    return tmp_path / "shipped" / "toy"


def test_a_shipped_folder_is_used_where_it_lies_and_nothing_is_built_or_copied(package, capsys):
    build = Builder()
    assert cache.fetch("toy", "r1", build) == package and build.calls == 0
    assert not cache.root().exists() and not capsys.readouterr().err


def test_a_shipped_folder_of_another_recipe_is_left_alone(package, capsys):
    build = Builder("new")
    folder = cache.fetch("toy", "r2", build)
    assert (
        build.calls == 1
        and folder.parent == cache.root()
        and (folder / "sub" / "a.bin").read_text() == "new"
    )
    assert not capsys.readouterr().err


def test_a_damaged_shipped_folder_is_named_and_its_like_is_built_in_the_cache(package, capsys):
    (package / "sub" / "a.bin").write_text("as shippeD")
    folder = cache.fetch("toy", "r1", Builder())
    assert folder.parent == cache.root() and (folder / "sub" / "a.bin").read_text() == "weights"
    assert "a.bin has changed" in capsys.readouterr().err


SHIP = (
    "the present recipe names something else than what is shipped: run `python "
    "scripts/dev/ship_world.py` and commit"
)


@pytest.mark.parametrize("name", QUICKSTART)
def test_what_is_shipped_is_what_the_present_recipe_names(name, monkeypatch):
    def refuse(*_):
        pytest.fail(f"{name}: {SHIP}")

    monkeypatch.setattr(cache, "_build", refuse)
    load_built_in()
    folder = ARTIFACTS.find(name)()
    assert folder == cache.SHIPPED / name
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert files == {cache.MANIFEST, *json.loads((folder / cache.MANIFEST).read_text())["files"]}
    assert {Path(file).suffix for file in files} <= {".safetensors", ".json", ".txt"}, (
        "nothing that executes"
    )


def test_only_what_quickstart_needs_is_shipped():
    held = {
        str(file.parent.relative_to(cache.SHIPPED)) for file in cache.SHIPPED.rglob(cache.MANIFEST)
    }
    assert held == set(QUICKSTART)
    assert sum(file.stat().st_size for file in cache.SHIPPED.rglob("*")) < 10e6

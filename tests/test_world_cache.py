"""The artifact cache: whole or not at all, checked by hash, built once by many processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.registry import UserError
from mmrl.worlds import cache, recipes, scenes

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))


class Builder:
    def __init__(self, text="weights"):
        self.calls, self.text = 0, text

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
    one, two = cache.fetch("toy", "r1", Builder("1")), cache.fetch("toy", "r2", Builder("2"))
    assert one != two and (one / "sub/a.bin").read_text() == "1"


@pytest.mark.parametrize("harm", ["change", "remove", "tear", "manifest"])
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
    said = capsys.readouterr().err
    assert str(folder) in said and ("a.bin" in said or cache.MANIFEST in said)


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
    command = [sys.executable, "-c", script, str(log)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert log.read_text() == "built " and len(said) == 1


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


def test_recipe_hash_follows_constants_and_sources():
    one = cache.recipe_hash((recipes.SD3,), [scenes])
    assert one == cache.recipe_hash((recipes.SD3,), [scenes])
    assert (
        len({one, cache.recipe_hash((recipes.SD3_CLEAN,), [scenes]), cache.recipe_hash((recipes.SD3,), [cache])}) == 3
    )

"""An export is there whole or not at all."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from mmrl.cli import commands
from mmrl.core.errors import UserError
from mmrl.policies.contracts import Exports
from tests.fixtures import toys


class Exported(toys.ToyBare, Exports):
    """A policy that writes two files, and fails between them on request."""

    def __init__(self, error=None):
        self.error = error

    def export(self, folder):
        (folder / "config.json").write_text("{}")
        if self.error:
            raise self.error
        (folder / "part").mkdir()
        (folder / "part" / "weights").write_text("all of them")


@pytest.fixture
def opened(monkeypatch):
    """Lets ``mmrl export`` open a run of this policy."""

    def open_run(policy):
        session = SimpleNamespace(policy=policy)
        monkeypatch.setattr(commands.build, "trained", lambda run, at: session)
        monkeypatch.setattr(commands, "_show_loading", lambda *_: None)

    return open_run


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


WHOLE = {"config.json", "part", "part/weights"}
PLACES = ["new", "deep/er/new", "empty", "link"]
FAILING = {
    "fails": Exported(OSError("no space left on device")),
    "stopped": Exported(KeyboardInterrupt()),
    "cannot be exported": toys.make("causal"),
}


@pytest.fixture
def desk(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    return tmp_path


@pytest.mark.parametrize("place", PLACES)
def test_an_export_is_whole_or_leaves_nothing(desk, opened, place):
    (desk / ".new.partial").mkdir()  # what a killed export left
    (desk / ".new.partial" / "old").write_text("half")
    before = files(desk)
    for policy in FAILING.values():
        opened(policy)
        with pytest.raises((OSError, KeyboardInterrupt, UserError)):
            commands.export(Path("run"), desk / place)
        assert files(desk) in (before, before - {".new.partial", ".new.partial/old"})
    opened(Exported())
    folder = commands.export(Path("run"), desk / place)
    assert folder == desk / place and files(folder) == WHOLE and (desk / "link").is_symlink()
    assert oct(folder.stat().st_mode) == oct((desk / "elsewhere").stat().st_mode)


def test_a_file_or_a_full_folder_is_refused(desk, opened):
    opened(Exported())
    (desk / "file").write_text("mine")
    for place in (desk / "file", desk):
        with pytest.raises(UserError, match="exists and is not empty; name a new folder"):
            commands.export(Path("run"), place)

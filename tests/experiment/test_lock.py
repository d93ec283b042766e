"""One training a folder: who is refused, who takes over from whom."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from mmrl.core.errors import UserError
from mmrl.core.files import write_json
from mmrl.experiment import lock
from mmrl.experiment.lock import FolderLock, Owner
from tests.fixtures import waiting

ROOT = Path(__file__).parents[2]
HOLD = (
    "import sys, time; from pathlib import Path; from mmrl.experiment.lock import FolderLock\n"
    "with FolderLock(Path(sys.argv[1])):\n"
    "    print('held', flush=True); exec(sys.argv[2]); sys.stdout.flush(); time.sleep(600)"
)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT", 0.02)
    monkeypatch.setattr(lock, "STALE", 0.3)
    monkeypatch.setattr(lock, "SETTLE", 0.0)


def holder(folder, then=""):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), then],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout.readline() == "held\n"
    return process


def foreign(folder, **changes):
    """Write an owner of another machine."""
    owner = replace(Owner.me(), host="elsewhere", boot="another", pid=7, token="theirs", **changes)
    write_json(folder / lock.OWNER, vars(owner))
    return owner


def test_a_second_process_is_refused_and_a_dead_ones_folder_is_taken_over(tmp_path):
    process = holder(tmp_path)
    with pytest.raises(UserError, match=rf"in use by process {process.pid} on .*began at 20"):
        FolderLock(tmp_path).__enter__()
    process.kill()
    process.wait(waiting.HANG)
    assert json.loads((tmp_path / lock.OWNER).read_text())["pid"] == process.pid
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / lock.OWNER).read_text())["pid"] == os.getpid()
    assert not (tmp_path / lock.OWNER).exists()


def test_two_in_one_program_are_kept_apart(tmp_path):
    with FolderLock(tmp_path), pytest.raises(UserError, match=f"kill {os.getpid()}"):
        FolderLock(tmp_path).__enter__()
    with FolderLock(tmp_path), FolderLock(tmp_path, active=False) as second:
        second.check()  # a process that is not the main one takes nothing
    with pytest.raises(ZeroDivisionError), FolderLock(tmp_path):
        raise ZeroDivisionError
    with FolderLock(tmp_path):  # it was let go
        pass


@pytest.mark.parametrize("seen", [None, 1e9, 4e9])  # by a clock that was put back
def test_another_machines_folder_is_taken_over_when_it_gives_no_sign_of_life(tmp_path, fast, seen):
    foreign(tmp_path)
    if seen:
        os.utime(tmp_path / lock.OWNER, (seen, seen))
    with FolderLock(tmp_path) as held:
        assert Owner.read(tmp_path / lock.OWNER) == held.owner
    assert not list(tmp_path.glob(".probe*"))


def test_another_machine_that_lives_is_seen(tmp_path, fast, monkeypatch):
    monkeypatch.setattr(lock, "STALE", 60.0)
    foreign(tmp_path)
    signs = iter([(100.0, 1.0), (100.0, 2.0), (102.0, 0.1)])
    monkeypatch.setattr(FolderLock, "_sign", lambda held: next(signs))
    with pytest.raises(UserError, match="in use by process 7 on elsewhere"):
        FolderLock(tmp_path).__enter__()


def test_an_owner_gives_signs_of_life_and_writes_nothing_once_it_was_taken_over(tmp_path, fast):
    with FolderLock(tmp_path) as held:
        path = tmp_path / lock.OWNER
        os.utime(path, (1e9, 1e9))
        waiting.until(lambda: path.stat().st_mtime > 1e9 + 1)
        held.check()
        foreign(tmp_path)
        with pytest.raises(UserError, match="taken over by process 7 on elsewhere"):
            held.check()
    assert Owner.read(tmp_path / lock.OWNER).token == "theirs"  # and is not taken from them


def test_on_a_disk_without_locks_the_owners_file_decides(tmp_path, monkeypatch):
    def unsupported(*_, **__):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.FileLock, "acquire", unsupported)
    owner = replace(Owner.me(), token="theirs")
    write_json(tmp_path / lock.OWNER, vars(owner))
    with pytest.raises(UserError, match="in use"):
        FolderLock(tmp_path).__enter__()
    write_json(tmp_path / lock.OWNER, vars(replace(owner, created=owner.created - 60)))
    with FolderLock(tmp_path):
        pass  # another process has its number now


def test_a_dead_owners_lock_is_waited_for_and_who_keeps_it_is_named(tmp_path, monkeypatch):
    with FolderLock(tmp_path):
        owner = Owner.read(tmp_path / lock.OWNER)
    ended = subprocess.Popen(["true"])
    ended.wait(waiting.HANG)
    write_json(tmp_path / lock.OWNER, vars(replace(owner, pid=ended.pid)))
    with (tmp_path / lock.LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with monkeypatch.context() as patch, pytest.raises(UserError, match="a process it started"):
            patch.setattr(lock, "LINGER", 0.1)
            FolderLock(tmp_path).__enter__()
        timer = threading.Timer(0.3, fcntl.flock, [file, fcntl.LOCK_UN])
        timer.start()
        with FolderLock(tmp_path):
            assert not timer.is_alive()
        timer.join()

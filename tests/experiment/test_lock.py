"""One training a folder: who is refused, who takes over from whom."""

import fcntl
import json
import os
import signal
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
    """Make signs of life and waiting for them short."""
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


def test_it_is_let_go_at_the_end_and_after_an_error(tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), FolderLock(tmp_path):
            raise ZeroDivisionError
    with FolderLock(tmp_path / "new" / "folder"):
        pass


def test_two_in_one_program_are_kept_apart(tmp_path):
    with FolderLock(tmp_path), pytest.raises(UserError, match=f"kill {os.getpid()}"):
        FolderLock(tmp_path).__enter__()


def test_a_process_that_is_not_the_main_one_takes_nothing(tmp_path):
    with FolderLock(tmp_path), FolderLock(tmp_path, active=False) as second:
        second.check()


def test_another_machines_folder_is_taken_over_when_it_gives_no_sign_of_life(tmp_path, fast):
    foreign(tmp_path)
    with FolderLock(tmp_path) as held:
        assert Owner.read(tmp_path / lock.OWNER) == held.owner
    old = foreign(tmp_path)
    os.utime(tmp_path / lock.OWNER, (1e9, 1e9))
    with FolderLock(tmp_path) as held:
        assert held.owner.token != old.token
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".probe")] == []


def test_another_machine_that_lives_is_seen(tmp_path, fast, monkeypatch):
    monkeypatch.setattr(lock, "STALE", 60.0)
    foreign(tmp_path)
    signs = iter([(100.0, 1.0), (100.0, 2.0), (102.0, 0.1)])
    monkeypatch.setattr(FolderLock, "_sign", lambda held: next(signs))
    with pytest.raises(UserError, match="in use by process 7 on elsewhere"):
        FolderLock(tmp_path).__enter__()
    monkeypatch.undo()
    (tmp_path / lock.OWNER).unlink()
    with FolderLock(tmp_path):  # the refused one has let the lock go
        pass


def test_a_clock_that_was_put_back_holds_nobody_up(tmp_path, fast):
    foreign(tmp_path)
    os.utime(tmp_path / lock.OWNER, (4e9, 4e9))
    with FolderLock(tmp_path) as held:
        assert Owner.read(tmp_path / lock.OWNER) == held.owner


def test_the_owner_gives_signs_of_life(tmp_path, fast):
    with FolderLock(tmp_path):
        path = tmp_path / lock.OWNER
        os.utime(path, (1e9, 1e9))
        waiting.until(lambda: path.stat().st_mtime > 2e9 or path.stat().st_mtime > 1e9 + 1)


def test_one_whose_folder_was_taken_over_writes_nothing_more(tmp_path):
    with FolderLock(tmp_path) as held:
        held.check()
        foreign(tmp_path)
        with pytest.raises(UserError, match="taken over by process 7 on elsewhere"):
            held.check()
    assert Owner.read(tmp_path / lock.OWNER).token == "theirs"  # and is not taken from them


@pytest.mark.parametrize("alive", [True, False])
def test_on_a_disk_without_locks_the_owners_file_decides(tmp_path, monkeypatch, alive):
    def unsupported(*_, **__):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.FileLock, "acquire", unsupported)
    owner = replace(Owner.me(), token="theirs", created=Owner.me().created - (0 if alive else 60))
    write_json(tmp_path / lock.OWNER, vars(owner))
    if alive:
        with pytest.raises(UserError, match="in use"):
            FolderLock(tmp_path).__enter__()
    else:
        with FolderLock(tmp_path):
            pass


def test_an_owners_file_that_is_torn_is_nobodys(tmp_path):
    (tmp_path / lock.OWNER).write_text('{"host": "a"')
    assert Owner.read(tmp_path / lock.OWNER) is None
    with FolderLock(tmp_path) as held:
        assert Owner.read(tmp_path / lock.OWNER) == held.owner


def test_a_child_of_a_dead_owner_does_not_keep_the_folder(tmp_path):
    process = holder(
        tmp_path, "import os; child = os.fork(); child or time.sleep(600); print(child)"
    )
    child = int(process.stdout.readline())
    process.kill()
    process.wait(waiting.HANG)
    os.kill(child, 0)  # it is still there
    with FolderLock(tmp_path):
        pass
    os.kill(child, signal.SIGKILL)


@pytest.fixture
def held(tmp_path):
    """The lock of an owner that has died, in a hand that still holds it."""
    with FolderLock(tmp_path):
        owner = Owner.read(tmp_path / lock.OWNER)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(waiting.HANG)
    write_json(tmp_path / lock.OWNER, vars(replace(owner, pid=ended.pid)))
    with (tmp_path / lock.LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def test_who_lets_go_of_a_dead_owners_lock_is_waited_for(tmp_path, held):
    timer = threading.Timer(0.3, fcntl.flock, [held, fcntl.LOCK_UN])
    timer.start()
    with FolderLock(tmp_path):
        assert not timer.is_alive()
    timer.join()


def test_what_keeps_a_dead_owners_lock_is_named(tmp_path, held, monkeypatch):
    monkeypatch.setattr(lock, "LINGER", 0.1)
    with pytest.raises(UserError, match=r"that has ended, but a process it started still holds"):
        FolderLock(tmp_path).__enter__()

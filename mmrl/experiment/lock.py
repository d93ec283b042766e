"""Keeps a run folder to one training at a time: a second one, such as a requeued job, is refused.

Two things say who writes: a lock of the system on ``.lock``, which ends with its process, and
``owner.json`` with host, pid and start, which the owner touches every few seconds. On one machine
the first decides. From another machine, where locks of a network disk may not reach, the second
does: an owner that gives no sign of life for ``STALE`` seconds is taken for dead. Readers of a run
take no lock.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mmrl.core.errors import UserError
from mmrl.core.files import write_json

LOCK = ".lock"
OWNER = "owner.json"
HEARTBEAT = 10.0  # seconds between signs of life
STALE = 90.0  # seconds without one; more than network disks keep what they know of a file
SETTLE = 2.0  # seconds in which two that take over at once see each other
LINGER = 5.0  # seconds in which the system lets go of what a process held that has just died
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Owner:
    """Says who trains in a folder. ``boot`` names the running system, "" where it has no name."""

    host: str
    boot: str
    pid: int
    began: str
    created: float  # when the process was created, by the system's clock
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def me(cls) -> Owner:
        import psutil

        began = datetime.now().astimezone().isoformat(timespec="seconds")
        created = psutil.Process().create_time()
        return cls(platform.node(), _boot(), os.getpid(), began, created)

    @classmethod
    def read(cls, path: Path) -> Owner | None:
        """Read who owns a folder; None if nobody does, or the file is not whole."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(**content)
        except (OSError, ValueError, TypeError):
            return None

    def is_here(self) -> bool:
        """Tell whether the owner ran on this machine, since it was last started."""
        return (self.boot, self.host) == (_boot(), platform.node()) or (
            self.boot != "" and self.boot == _boot()
        )

    def runs(self) -> bool:
        """Tell whether a process of this machine with that number and birth is there."""
        import psutil

        try:
            return bool(abs(psutil.Process(self.pid).create_time() - self.created) < 2.0)
        except psutil.Error:
            return False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, which began at {self.began}"


class FolderLock:
    """Holds a run folder from ``with`` to its end. Does nothing unless ``active``, as in all but
    the main one of several processes."""

    def __init__(self, folder: Path, active: bool = True):
        self.folder = folder
        self.active = active
        self.path = folder / OWNER
        self.lock: Any = None
        self.owner: Owner | None = None
        self.ended = threading.Event()

    def __enter__(self) -> FolderLock:
        if self.active:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take()
        return self

    def __exit__(self, *_: object) -> None:
        if self.owner is None:
            return
        self.ended.set()
        known = Owner.read(self.path)
        if known is not None and known.token == self.owner.token:
            with suppress(OSError):  # of a disk that takes no more: the next one sees that we ended
                self.path.unlink(missing_ok=True)
        self.owner = None
        self._release()

    def check(self) -> None:
        """Raise UserError if another process has taken the folder over, as one may that found this
        one without a sign of life: then nothing more may be written."""
        if self.owner is None:
            return
        known = Owner.read(self.path)
        if known is not None and known.token != self.owner.token:
            raise UserError(
                f"{self.folder} was taken over by {known}, which found no sign of life of this "
                f"process for {STALE:g} s; this one ends and writes nothing more"
            )

    def _take(self) -> None:
        lock = FileLock(self.folder / LOCK, timeout=0, thread_local=False, fallback_to_soft=False)
        try:
            self._acquire(lock)
            self.lock = lock
        except Timeout:
            raise UserError(self._held(Owner.read(self.path))) from None
        except (OSError, NotImplementedError):  # a disk without locks: the owner's file decides
            self.lock = None
        try:
            owner = Owner.read(self.path)
            foreign = owner is not None and not owner.is_here()
            if owner is not None and self._lives(owner):
                raise UserError(self._held(owner))
            self.owner = Owner.me()
            write_json(self.path, asdict(self.owner))
            if foreign:  # another machine may have come to the same end at the same time
                time.sleep(SETTLE)
                self.check()
        except BaseException:
            self.owner = None
            self._release()
            raise
        threading.Thread(target=self._beat, args=(self.owner,), daemon=True).start()

    def _acquire(self, lock: FileLock) -> None:
        """Take the system's lock. Where its owner has ended, wait a little: a child that it had
        just started holds a copy until it first runs. Raises Timeout."""
        end = time.monotonic() + LINGER
        while True:
            try:
                lock.acquire()
                return
            except Timeout:
                owner = Owner.read(self.path)
                if owner is None or not owner.is_here() or owner.runs() or time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def _lives(self, owner: Owner) -> bool:
        """Tell whether the owner still trains; watch one of another machine for as long as it takes
        to know. That is at most ``STALE`` seconds, whatever clocks say."""
        if owner.is_here():
            return self.lock is None and owner.runs()
        first = sign = self._sign()
        end = time.monotonic() + STALE
        while sign is not None and first is not None:
            at, age = sign
            if at != first[0]:  # a sign of life
                return True
            if age > STALE or time.monotonic() > end:
                return False
            time.sleep(min(HEARTBEAT / 4, STALE))
            sign = self._sign()
        return False

    def _sign(self) -> tuple[float, float] | None:
        """Return when the owner last gave a sign of life and how many seconds ago, both by the
        clock of the disk; None if it has left."""
        probe = self.folder / f".probe-{uuid.uuid4().hex}"
        try:
            probe.touch()
            with self.path.open("rb") as file:  # opening asks the server of a network disk anew
                at = os.fstat(file.fileno()).st_mtime
            return at, probe.stat().st_mtime - at
        except FileNotFoundError:
            return None
        finally:
            probe.unlink(missing_ok=True)

    def _beat(self, owner: Owner) -> None:
        """Give signs of life until the end."""
        while not self.ended.wait(HEARTBEAT):
            known = Owner.read(self.path)
            if known is not None and known.token == owner.token:
                try:
                    os.utime(self.path)
                except OSError:  # a disk in trouble: whoever writes to it says so
                    continue

    def _release(self) -> None:
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def _held(self, owner: Owner | None) -> str:
        if owner is None:
            return f"{self.folder} is in use by another training; wait for its end, or stop it"
        remedy = f"wait for its end, or stop it (kill {owner.pid} on {owner.host})"
        if owner.is_here() and not owner.runs():
            remedy = f"that has ended, but a process it started still holds {LOCK}: end that"
        return f"{self.folder} is in use by {owner}; {remedy}"


def _boot() -> str:
    """Name the running system, equal in all containers of a machine, until it is started again."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""

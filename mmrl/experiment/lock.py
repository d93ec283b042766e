"""Keeps a run folder to one training at a time: a second one, such as a requeued job, is refused.

Ownership has two marks: a system lock on ``.lock``, which ends with its process, and ``owner.json``
with host, pid and start, which the owner touches every few seconds. On one machine the first
decides. Across machines, where locks of a network disk may not work, the second does: an owner
without a heartbeat for ``STALE`` seconds counts as dead. Readers of a run take no lock.
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
HEARTBEAT = 10.0  # seconds between heartbeats
STALE = 90.0  # seconds without one; more than the attribute cache of network disks
SETTLE = 2.0  # seconds in which two simultaneous takeovers see each other
LINGER = 5.0  # seconds in which the system releases the locks of a dead process
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Owner:
    """Identifies who trains in a folder. ``boot`` is the boot id of the system, "" if unknown."""

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
        """Read the owner of a folder; None if there is none, or the file is incomplete."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(**content)
        except (OSError, ValueError, TypeError):
            return None

    def is_here(self) -> bool:
        """Tell whether the owner ran on this machine since its last boot."""
        return (self.boot, self.host) == (_boot(), platform.node()) or (
            self.boot != "" and self.boot == _boot()
        )

    def runs(self) -> bool:
        """Tell whether a process with that pid and start time runs on this machine."""
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
            with suppress(OSError):  # on a full disk: the next owner sees that this process ended
                self.path.unlink(missing_ok=True)
        self.owner = None
        self._release()

    def check(self) -> None:
        """Raise UserError if another process has taken the folder over, for lack of heartbeats:
        then nothing more may be written."""
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
        except (OSError, NotImplementedError):  # a disk without locks: the owner file decides
            self.lock = None
        try:
            owner = Owner.read(self.path)
            foreign = owner is not None and not owner.is_here()
            if owner is not None and self._lives(owner):
                raise UserError(self._held(owner))
            self.owner = Owner.me()
            write_json(self.path, asdict(self.owner))
            if foreign:  # another machine may take over at the same time
                time.sleep(SETTLE)
                self.check()
        except BaseException:
            self.owner = None
            self._release()
            raise
        threading.Thread(target=self._beat, args=(self.owner,), daemon=True).start()

    def _acquire(self, lock: FileLock) -> None:
        """Take the system lock. If its owner has ended, wait a little: a child that it had just
        forked holds a copy until exec. Raises Timeout."""
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
        """Tell whether the owner still trains; an owner on another machine is watched for at most
        ``STALE`` seconds, independent of clocks."""
        if owner.is_here():
            return self.lock is None and owner.runs()
        first = sign = self._sign()
        end = time.monotonic() + STALE
        while sign is not None and first is not None:
            at, age = sign
            if at != first[0]:  # a heartbeat
                return True
            if age > STALE or time.monotonic() > end:
                return False
            time.sleep(min(HEARTBEAT / 4, STALE))
            sign = self._sign()
        return False

    def _sign(self) -> tuple[float, float] | None:
        """Return the owner's last heartbeat and its age in seconds, both by the disk's clock; None
        if it has left."""
        probe = self.folder / f".probe-{uuid.uuid4().hex}"
        try:
            probe.touch()
            with self.path.open(
                "rb"
            ) as file:  # opening refreshes the attributes from a network disk
                at = os.fstat(file.fileno()).st_mtime
            return at, probe.stat().st_mtime - at
        except FileNotFoundError:
            return None
        finally:
            probe.unlink(missing_ok=True)

    def _beat(self, owner: Owner) -> None:
        """Write heartbeats until the end."""
        while not self.ended.wait(HEARTBEAT):
            known = Owner.read(self.path)
            if known is not None and known.token == owner.token:
                try:
                    os.utime(self.path)
                except OSError:  # a failing disk: the next write reports it
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
    """Return the system's boot id, equal in all containers of a machine."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""

"""Cuts the power, fills the disk and makes it read-only at every write of a run in turn.

The run folders lie on a real ext4 file system in an image file, which needs root and loop devices.
A power cut is ext4's ``abort``, which discards what is not on disk yet, and a kill.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mmrl.core.errors import UserError
from scripts.dev.soak_parts import killing
from scripts.dev.soak_parts.killing import Fault, killed
from scripts.dev.soak_parts.page import Experiment, Soak
from scripts.dev.soak_parts.writes import in_turn

MEBIBYTE = 2**20
SIZE = 96  # MiB of the file system
SENTENCES = ("cannot write", "No space left", "Read-only file system")


class Disk:
    """Holds a separate ext4 file system, mounted at ``place``."""

    def __init__(self, folder: Path):
        self.image = folder / "disk.img"
        self.place = folder / "disk"
        self.ballast = self.place / "ballast"

    def __enter__(self) -> Disk:
        self.place.mkdir(parents=True)
        with self.image.open("wb") as file:
            file.truncate(SIZE * MEBIBYTE)
        _command("mkfs.ext4", "-q", self.image)
        self.mount()
        return self

    def __exit__(self, *_: object) -> None:
        _command("umount", self.place)

    def mount(self) -> None:
        _command("mount", "-o", "loop", self.image, self.place)

    def abort(self) -> None:
        """Make the file system fail: unsynced data is lost, and nothing can be written."""
        _command("mount", "-o", "remount,abort", self.place)

    def repair(self) -> None:
        """Remount it, as after a restart: the journal is replayed."""
        _command("umount", self.place)
        self.mount()

    def fill(self) -> None:
        """Take all space that is left."""
        with suppress(OSError), self.ballast.open("ab", buffering=0) as file:
            for size in (MEBIBYTE, 4096, 1):
                with suppress(OSError):
                    while file.write(bytes(size)):
                        pass

    def drain(self) -> None:
        self.ballast.unlink(missing_ok=True)


def _command(*words: str | Path) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"{' '.join(map(str, words))}: {done.stderr.strip()}; this section mounts a file "
            f"system, which only root may"
        )


def _sentence(status: int | None, printed: str) -> str:
    """Say what is wrong with the end of a run that could not write: it must end with one sentence,
    or succeed if it needed no space."""
    if status == 0 and "finished" in printed:
        return ""
    if status != 2 or "Traceback" in printed:
        return f"ended with {status}: {printed[-600:]}"
    return "" if any(words in printed for words in SENTENCES) else f"said: {printed[-300:]}"


def run(soak: Soak) -> Iterator[Experiment]:
    """Inject every fault at every write of a run, or at as many as time allows."""
    killing.warm()
    end = time.monotonic() + soak.seconds
    with Disk(soak.folder) as disk:

        def cut() -> None:
            disk.abort()
            killed()

        faults = {
            "power cut at every write in turn (ext4)": Fault(cut, killing.KILL.wrong, disk.repair),
            "disk full at every write in turn": Fault(disk.fill, _sentence, disk.drain, False),
            "read-only at every write in turn": Fault(disk.abort, _sentence, disk.repair, False),
        }
        for index, (name, fault) in enumerate(faults.items()):
            until = end - (end - time.monotonic()) * (1 - 1 / (len(faults) - index))
            place = disk.place / str(index)
            place.mkdir()
            yield in_turn(name, soak, soak.folder / str(index), until, fault, place)
            os.sync()

"""Caches values of a reward by the content of sample and prompt: in memory, and in a file for other
runs.

A key is the SHA-256 of the sample's bytes, of all fields of its prompt, and of what the reward is;
a value that is not finite is never stored.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.media.sound import SoundVideos
from mmrl.core.paths import cache_dir
from mmrl.core.types import Media, Prompt
from rewards.base.files import PATH, of_a_request

log = logging.getLogger(__name__)


class Unhashable(Exception):
    """Signals that a prompt or sample holds something whose content cannot be read."""


class Cache:
    """Holds values in memory and drops the least recently used first. ``hits`` and ``misses`` are
    counted in units."""

    def __init__(self, entries: int, store: Store | None = None):
        self.store = store
        self.values: LRUCache[bytes, Tensor] = LRUCache(entries)
        self.hits = self.misses = 0

    def key(self, media: Media, prompts: Sequence[Prompt], rows: Sequence[int]) -> bytes | None:
        """Return the key of the samples in ``rows``, scored together; None if something in them has
        no content."""
        digest = sha256()
        try:
            for row in rows:
                feed(digest, media[row])
                feed(
                    digest, {name: value for name, value in prompts[row].items() if name != "group"}
                )
        except Unhashable:
            return None
        return digest.digest()

    def get(self, keys: Sequence[bytes | None]) -> dict[bytes, Tensor]:
        """Return the known values of these keys."""
        readable = [key for key in keys if key is not None]
        hits = {key: self.values[key] for key in readable if key in self.values}
        if self.store:
            stored = self.store.get([key for key in readable if key not in hits])
            self.values.update(stored)
            hits |= stored
        self.hits += sum(key in hits for key in keys)
        self.misses += sum(key not in hits for key in keys)
        return hits

    def put(self, values: Mapping[bytes, Tensor]) -> None:
        # not a view that holds a whole batch
        copies = {key: value.clone() for key, value in values.items()}
        self.values.update(copies)
        if self.store:
            self.store.put(copies)


class Store:
    """Stores values in an SQLite file, which several processes may use at once. A file that fails
    is left alone."""

    def __init__(self, file: Path, entries: int):
        self.file = file
        self.entries = entries
        self.lock = threading.Lock()
        self.broken = False
        file.parent.mkdir(parents=True, exist_ok=True)
        self.base = sqlite3.connect(file, timeout=30, check_same_thread=False, isolation_level=None)
        self._do(self._create)

    def _create(self) -> None:
        self.base.execute("pragma journal_mode=wal")
        # losing the last values costs time, nothing else
        self.base.execute("pragma synchronous=off")
        self.base.execute(
            "create table if not exists scores (key blob primary key, used integer, "
            "shape text, value blob)"
        )
        self.base.execute("create index if not exists by_use on scores (used)")

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Tensor]:
        return self._do(self._get, keys) or {}

    def _get(self, keys: Sequence[bytes]) -> dict[bytes, Tensor]:
        values = {}
        now = time.time_ns()
        for key in keys:
            row = self.base.execute(
                "select shape, value from scores where key = ?", (key,)
            ).fetchone()
            if row:
                shape = [int(n) for n in row[0].split()]
                values[key] = torch.from_numpy(np.frombuffer(row[1], "<f4").copy()).view(shape)
        with self.base:
            self.base.execute("begin")
            self.base.executemany(
                "update scores set used = ? where key = ?", [(now, key) for key in values]
            )
            self.base.execute("commit")
        return values

    def put(self, values: Mapping[bytes, Tensor]) -> None:
        self._do(self._put, values)

    def _put(self, values: Mapping[bytes, Tensor]) -> None:
        now = time.time_ns()
        rows = [
            (k, now, " ".join(map(str, v.shape)), v.numpy().astype("<f4").tobytes())
            for k, v in values.items()
        ]
        with self.base:
            self.base.execute("begin immediate")
            self.base.executemany("insert or replace into scores values (?, ?, ?, ?)", rows)
            (count,) = self.base.execute("select count(*) from scores").fetchone()
            if count > self.entries:
                oldest = "select key from scores order by used limit ?"
                self.base.execute(
                    f"delete from scores where key in ({oldest})", (count - self.entries,)
                )
            self.base.execute("commit")

    def _do(self, call: Any, *args: Any) -> Any:
        with self.lock:
            if self.broken:
                return None
            try:
                return call(*args)
            except sqlite3.Error as error:
                self.broken = True
                log.warning("cache %s cannot be used and is left alone: %s", self.file, error)
                return None


def open_cache(kind: str | None, entries: int, identity: str | None, name: str) -> Cache | None:
    if kind is None:
        return None
    if kind == "memory":
        return Cache(entries)
    if identity is None:
        raise UserError(
            f"reward {name!r}: a cache on disk needs to know what the reward is made of, "
            f"which only a configuration "
            "says; use cache: memory for a reward that code made"
        )
    return Cache(
        entries,
        Store(cache_dir() / "scores" / f"{sha256(identity.encode()).hexdigest()[:24]}.db", entries),
    )


def feed(digest: Any, value: Any) -> None:
    """Put the content of a value into a hash, with its type, so that no two different ones look
    alike."""
    if isinstance(value, Tensor):
        tensor = value.detach().contiguous().cpu()
        _tagged(
            digest,
            f"tensor {tensor.dtype} {list(tensor.shape)}",
            tensor.flatten().view(torch.uint8).numpy().data,
        )
        if isinstance(value, SoundVideos):
            feed(digest, [value.sound, value.sampling_rate])
    elif isinstance(value, np.ndarray) and value.dtype != object:
        _tagged(
            digest, f"array {value.dtype.str} {value.shape}", np.ascontiguousarray(value).tobytes()
        )
    elif isinstance(value, (str, Path)):
        _tagged(digest, f"text {stamp(value)}", str(value).encode(errors="surrogatepass"))
        if getattr(value, "__dict__", None):  # a completion knows its length
            feed(digest, vars(value))
    elif value is None or isinstance(value, (bool, int, float, complex, bytes, np.generic)):
        _tagged(digest, type(value).__name__, repr(value).encode())
    elif isinstance(value, (Mapping, list, tuple)):
        mapping = isinstance(value, Mapping)
        _tagged(digest, f"{'mapping' if mapping else 'list'} {len(value)}", b"")
        pairs = [(key, value[key]) for key in sorted(value, key=str)] if mapping else []
        for item in chain.from_iterable(pairs) if mapping else value:
            feed(digest, item)
    # a PIL image
    elif hasattr(value, "tobytes") and hasattr(value, "mode") and hasattr(value, "size"):
        _tagged(digest, f"image {value.mode} {value.size}", value.tobytes())
    else:
        raise Unhashable(type(value).__name__)


def stamp(text: str | Path) -> str:
    """Return size and time of the file, if this is the path of one: the same path may hold another
    picture tomorrow. What came with a request is none."""
    if (
        of_a_request()
        or not str(text).startswith("/")
        or len(str(text)) > PATH
        or "\0" in str(text)
    ):
        return ""
    try:
        status = Path(text).stat()
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


def _tagged(digest: Any, tag: str, content: Any) -> None:
    size = content.nbytes if isinstance(content, memoryview) else len(content)
    digest.update(f"{tag} {size}:".encode())
    digest.update(content)

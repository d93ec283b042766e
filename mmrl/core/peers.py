"""Makes the processes of a run aware of each other: they meet before anything is loaded, and each
learns at once of one that has died, by a connection that the system closes with it."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from mmrl.core.errors import UserError

START = 300.0  # seconds in which all processes come
LAST = 25.0  # seconds after which a process that waits for one that is gone is ended
NEWS = 3.0  # seconds in which the news arrives of what has ended a collective call
AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # by which torch takes a store for one that is served
DIGITS = 8  # of a rank, as a process names itself
FAILED, LEFT = b"failed\n", b"left\n"
WORDS = {
    "died": "has died (killed, perhaps for want of memory)",
    "failed": "has ended with an error, which it has printed",
}


class Peers:
    """Knows which other process is gone: ``gone`` is its rank and what became of it."""

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size
        self.gone: tuple[int, str] | None = None
        self.news = threading.Event()
        self.handled = threading.Event()  # the main thread ends the process by itself
        self.connections: dict[socket.socket, int] = {}  # to the rank at the other end
        self.server: socket.socket | None = None  # of rank 0, until all have connected
        self.store: Any = None  # in which processes find each other
        self.serves = False  # whether rank 0 does, not a launcher

    def sentence(self) -> str:
        """Say who is gone."""
        assert self.gone is not None
        rank, how = self.gone
        return f"process {rank} of {self.size} {WORDS[how]}, and the others cannot go on without it"

    def listen(self) -> None:
        """Hear of the others, in a thread: rank 0 of all, and every other of rank 0, which tells
        it of the rest."""
        missing = self.size - 1 if self.server else 0
        while (self.connections or self.server) and not self.news.is_set():
            sockets = [*self.connections, *([self.server] if self.server else [])]
            for ready in select.select(sockets, [], [])[0]:
                if ready is self.server:
                    missing -= self._accept(ready)
                    if not missing:
                        ready.close()
                        self.server = None
                else:
                    self._read(ready)

    def _accept(self, server: socket.socket) -> bool:
        """Take a connection, whose first word is the rank; False: a stranger's."""
        connection, _ = server.accept()
        connection.settimeout(NEWS)
        try:
            rank = int(connection.recv(DIGITS))
        except (OSError, ValueError):
            connection.close()
            return False
        self.connections[connection] = rank
        _keep_alive(connection)
        return True

    def _read(self, connection: socket.socket) -> None:
        """Read a word from a connection: how its process or another one has ended."""
        rank = self.connections[connection]
        try:
            content = connection.recv(64)
        except OSError:
            content = b""
        if content.startswith(LEFT):
            del self.connections[connection]
        else:
            line = content.decode().split("\n")[0] or "died"
            word, _, number = line.partition(" ")
            self._hear(int(number) if number else rank, word)

    def _hear(self, rank: int, how: str) -> None:
        """Note who is gone, tell the others of it, and see that this process ends too."""
        self.gone = (rank, how)
        self.tell(f"{how} {rank}\n".encode())
        self.news.set()
        if not self.handled.wait(LAST):
            print(f"error: {self.sentence()}", file=sys.stderr, flush=True)
            os._exit(2)

    def tell(self, word: bytes) -> None:
        """Send a word to all that are connected."""
        for connection in list(self.connections):
            with suppress(OSError):
                connection.sendall(word)


_met: list[Peers] = []
_past: list[Peers] = []  # whose store others may still look into


def meet(limit: float = START) -> None:
    """Wait for all processes that a launcher has started, once; nothing where there is one.

    Raises UserError, on each, where the port of the first is in use, or one does not come within
    ``limit`` seconds.
    """
    from torch import distributed as dist

    size = int(os.environ.get("WORLD_SIZE", "1"))
    named = all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    if size == 1 or not named or _met or dist.is_initialized():
        return
    peers = Peers(int(os.environ["RANK"]), size)
    peers.store = _store(peers, limit)
    prefix = f"mmrl/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    if peers.rank == 0:
        near = os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost")
        peers.server = socket.create_server(("127.0.0.1" if near else "", 0), backlog=size)
        peers.store.set(f"{prefix}/port", str(peers.server.getsockname()[1]))
    _gather(peers, [f"{prefix}/{rank}" for rank in range(size)], limit)
    _met.append(peers)
    with suppress(OSError):  # without connections all works, but a dead process is found later
        if peers.rank:
            _connect(peers, int(peers.store.get(f"{prefix}/port")))
        threading.Thread(target=peers.listen, daemon=True).start()


def _gather(peers: Peers, keys: list[str], limit: float) -> None:
    """Say in the store that this process is here, and wait until every one has said so."""
    missing = ["0"]  # which serves the store, where that does not answer
    try:
        peers.store.set(keys[peers.rank], "here")
        try:
            peers.store.wait(keys, timedelta(seconds=limit))
        except RuntimeError:
            missing = [str(rank) for rank, key in enumerate(keys) if not peers.store.check([key])]
            raise
    except RuntimeError as error:
        raise UserError(
            f"of {peers.size} processes, {', '.join(missing)} did not come within {limit:g} s; "
            f"look at what they have printed, and start all of them again"
        ) from error


def _store(peers: Peers, limit: float) -> Any:
    """Open the store of all processes, as torchrun does or as rank 0 then serves it, in which torch
    finds the others too."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    peers.serves = os.environ.get(AGENT) != "True"
    serves = peers.rank == 0 and peers.serves
    try:
        store = _opened(host, port, serves, limit)
    except (RuntimeError, OSError, ValueError) as error:
        if serves:
            why = "is in use" if "EADDRINUSE" in str(error) else f"cannot be opened ({error})"
            raise UserError(
                f"port {port}, where the processes of this run meet, {why}; start them with "
                f"another, such as MASTER_PORT={port + 1} (torchrun: --master-port {port + 1})"
            ) from error
        raise UserError(
            f"process {peers.rank} of {peers.size} found no process 0 at {host}:{port} within "
            f"{limit:g} s; look at what that one has printed, and at MASTER_ADDR and MASTER_PORT"
        ) from error
    os.environ[AGENT] = "True"
    os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")
    return store


def _opened(host: str, port: int, serves: bool, limit: float) -> Any:
    """Open a store within ``limit`` seconds: torch itself waits for ever where something else
    listens at the port and says nothing. Raises RuntimeError or OSError."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    wait = timedelta(seconds=limit)
    outcome: list[Any] = []

    def open_it() -> None:
        try:
            outcome.append(TCPStore(host, port, None, serves, wait, wait_for_workers=False))
        except (RuntimeError, ValueError) as error:
            outcome.append(error)

    thread = threading.Thread(target=open_it, daemon=True)
    thread.start()
    thread.join(limit + NEWS)
    if not outcome:
        raise TimeoutError("no answer")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _connect(peers: Peers, port: int) -> None:
    connection = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=NEWS)
    connection.sendall(f"{peers.rank:0{DIGITS}d}".encode())
    peers.connections[connection] = 0
    _keep_alive(connection)


def _keep_alive(connection: socket.socket) -> None:
    """Let the system find out within 20 s where the other machine has gone without a word."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2)):
        if hasattr(socket, name):  # Linux has all three
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def gone(error: BaseException) -> Peers | None:
    """Tell of a process that is gone, where that may be what has ended this one's work by
    ``error``; from then on this process ends by itself."""
    if not _met or not isinstance(error, RuntimeError):
        return None
    peers = _met[0]
    if not peers.news.wait(NEWS):
        return None
    peers.handled.set()
    return peers


@contextmanager
def watched(limit: float = START) -> Iterator[None]:
    """Meet the other processes within ``limit`` seconds, and raise UserError for one that is gone;
    tell them where an error ends this one."""
    meet(limit)
    try:
        yield
    except BaseException as error:
        peers = gone(error)
        for met in _met:
            met.handled.set()
            met.tell(FAILED)
        if peers is None:
            raise
        raise UserError(peers.sentence()) from error


def leave() -> bool:
    """Tell the others that this process is done; returns False where one of them was gone before,
    and can no longer be spoken to."""
    for peers in _met:
        peers.handled.set()
        peers.tell(LEFT)
        if peers.serves:  # a second run in this program meets again
            del os.environ[AGENT]
    _past.extend(_met)
    _met.clear()
    return not any(peers.gone for peers in _past)

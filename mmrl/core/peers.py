"""Connects the processes of a run: they rendezvous before anything is loaded, and each detects at
once that another has died, since the system closes its connection."""

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

START = 300.0  # seconds for all processes to connect
LAST = 25.0  # seconds after which a process that waits for a dead one is ended
NEWS = 3.0  # seconds to wait for the cause of a failed collective call
AGENT = (
    "TORCHELASTIC_USE_AGENT_STORE"  # variable by which torch knows that a launcher serves the store
)
DIGITS = 8  # bytes of a rank, as a process identifies itself
FAILED, LEFT = b"failed\n", b"left\n"
WORDS = {
    "died": "has died (killed, perhaps for want of memory)",
    "failed": "has ended with an error, which it has printed",
}


class Peers:
    """Tracks the other processes: ``gone`` is the rank of a dead one and what happened to it."""

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size
        self.gone: tuple[int, str] | None = None
        self.news = threading.Event()
        self.handled = threading.Event()  # the main thread is ending the process
        self.connections: dict[socket.socket, int] = {}  # connection -> rank at the other end
        self.server: socket.socket | None = None  # of rank 0, until all have connected
        self.store: Any = None  # the rendezvous store
        self.serves = False  # whether rank 0 serves it, not a launcher

    def sentence(self) -> str:
        """Return a sentence about the dead process."""
        assert self.gone is not None
        rank, how = self.gone
        return f"process {rank} of {self.size} {WORDS[how]}, and the others cannot go on without it"

    def listen(self) -> None:
        """Watch the others, in a thread: rank 0 watches all, and every other rank 0, which forwards
        the rest."""
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
        """Accept a connection, whose first word is the rank; False: not a process of this run."""
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
        """Read a message from a connection: how its process or another one has ended."""
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
        """Record the dead process, notify the others, and make this process end too."""
        self.gone = (rank, how)
        self.tell(f"{how} {rank}\n".encode())
        self.news.set()
        if not self.handled.wait(LAST):
            print(f"error: {self.sentence()}", file=sys.stderr, flush=True)
            os._exit(2)

    def tell(self, word: bytes) -> None:
        """Send a message to all that are connected."""
        for connection in list(self.connections):
            with suppress(OSError):
                connection.sendall(word)


_met: list[Peers] = []
_past: list[Peers] = []  # others may still read its store


def meet(limit: float = START) -> None:
    """Wait for all processes that a launcher has started, once; does nothing for one process.

    Raises UserError, on each, if the port of the first is in use, or one does not connect within
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
    with suppress(OSError):  # without connections all works, but a dead process is detected later
        if peers.rank:
            _connect(peers, int(peers.store.get(f"{prefix}/port")))
        threading.Thread(target=peers.listen, daemon=True).start()


def _gather(peers: Peers, keys: list[str], limit: float) -> None:
    """Register this process in the store, and wait until all have done so."""
    missing = ["0"]  # the server of the store, if that does not answer
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
            f"check their output, and start all of them again"
        ) from error


def _store(peers: Peers, limit: float) -> Any:
    """Open the common store, served by torchrun or else by rank 0; torch uses it as well."""
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
            f"{limit:g} s; check its output, and MASTER_ADDR and MASTER_PORT"
        ) from error
    os.environ[AGENT] = "True"
    os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")
    return store


def _opened(host: str, port: int, serves: bool, limit: float) -> Any:
    """Open a store within ``limit`` seconds: torch waits forever if something else listens at the
    port without answering. Raises RuntimeError or OSError."""
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
    """Let the system detect within 20 s that the other machine is unreachable (TCP keep-alive)."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2)):
        if hasattr(socket, name):  # Linux has all three
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def gone(error: BaseException) -> Peers | None:
    """Return the sentence about a dead process that may have caused ``error`` here; after that this
    process ends by itself."""
    if not _met or not isinstance(error, RuntimeError):
        return None
    peers = _met[0]
    if not peers.news.wait(NEWS):
        return None
    peers.handled.set()
    return peers


@contextmanager
def watched(limit: float = START) -> Iterator[None]:
    """Connect to the other processes within ``limit`` seconds, and raise UserError if one dies;
    notify them if an error ends this one."""
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
    """Tell the others that this process is done; returns False if one of them has died before."""
    for peers in _met:
        peers.handled.set()
        peers.tell(LEFT)
        if peers.serves:  # a second run in this program connects again
            del os.environ[AGENT]
    _past.extend(_met)
    _met.clear()
    return not any(peers.gone for peers in _past)

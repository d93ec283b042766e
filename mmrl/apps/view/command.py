"""Implements ``mmrl view``."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from pathlib import Path

from mmrl.apps.view.folders import Runs
from mmrl.core.errors import UserError

PORT = 7007


def view(places: Sequence[Path], rate: Path | None, host: str, port: int) -> None:
    """Serve the runs until Ctrl-C. Raises UserError for a folder without runs, a port in use, a
    file of ratings that cannot be written."""
    import uvicorn

    from mmrl.apps.view.pairs import Pairs
    from mmrl.apps.view.server import application

    runs = Runs(places)
    pairs = Pairs(runs, rate) if rate else None
    app = application(runs, pairs, [host])
    listener = listening(host, port)
    address = address_of(listener, host)
    count = len(runs.look())
    print(f"{count} run{'s' * (count != 1)}: {address}  (Ctrl-C ends it)", flush=True)
    if pairs:
        print(f"rate pairs: {address}/rate  (written to {rate})", flush=True)
    if not is_loopback(listener):
        print("anyone who reaches this address can read these runs", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        print("stopped")


def listening(host: str, port: int) -> socket.socket:
    """Open the port; 0: any free one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} of {host} is in use, perhaps by another mmrl view; name another "
                f"with --port, or --port 0 for any that is free"
            ) from error
        raise UserError(
            f"cannot listen on {host}, port {port} ({error.strerror or error}); name an address of "
            f"this machine with --host and a port above 1023 with --port"
        ) from error
    return listener


def address_of(listener: socket.socket, host: str) -> str:
    """Return the address for a browser on this machine."""
    port = listener.getsockname()[1]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    import ipaddress

    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback

"""Implements ``mmrl serve-reward`` and ``mmrl serve-teacher``, which serve a configuration's
rewards, or its policy as a teacher, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

from mmrl.apps.serve.requests import Listening
from mmrl.apps.serve.service import ServeOptions, make_app
from mmrl.apps.serve.teaching import TEACHER_VARIABLE, TeachOptions, make_teacher_app
from mmrl.config import Config, Weighted, import_plugins
from mmrl.config.overrides import SECTIONS, override_with
from mmrl.config.values import show
from mmrl.config.yamltext import read
from mmrl.core.errors import UserError, suggest
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.experiment.build import short_names
from rewards.servers.tokens import VARIABLE, Tokens

MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h: larger blocks are mapped separately
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# what is served, by section of a configuration
EXAMPLES = {
    "reward": "reward: {jpeg_compressibility: 1.0}\n    serve: {port: 8123}",
    "policy": "policy: {vlm: {path: my_teacher}}\n    serve: {port: 8124}",
}


def read_config(path: Path, overrides: Sequence[str] = (), section: str = "reward") -> Config:
    """Read ``serve:``, ``plugins:`` and the served section of a file; other sections of a training
    configuration are ignored."""
    file = str(path)
    example = f"a configuration looks like\n    {EXAMPLES[section]}"
    try:
        plain, lines = read(path.read_bytes().decode("utf-8-sig"), file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from error
    if not isinstance(plain, dict):
        raise UserError(f"{file}: expected sections, `name: ...`; {example}")
    marks = {keys: f"{file}:{line}" for keys, line in lines.items()} | {(): file}
    for override in overrides:
        _override(plain, marks, override)
    config = Config(plain, file, marks)
    for key in plain:
        if key not in (*SECTIONS, "serve"):
            raise UserError(
                config.place((key,)).say(
                    f"unknown section; {suggest(str(key), (*SECTIONS, 'serve'))}"
                )
            )
    if plain.get(section) is None:
        raise UserError(f"{file}: the section '{section}' is missing; {example}")
    return config


def _override(plain: dict[str, Any], marks: dict[tuple[Any, ...], str], override: str) -> None:
    """Apply ``serve.key=value``, which training lacks; everything else as in training."""
    source = f"command line: {override}"
    name, equals, text = override.partition("=")
    if not name.startswith("serve.") or not equals:
        override_with(plain, marks, override)
        return
    section = plain.get("serve") or {}
    key = name.removeprefix("serve.").strip()
    if not isinstance(section, dict):
        raise UserError(f"{source}: serve is {show(section)}, not options")
    plain["serve"] = {**section, key: read(text, source)[0]}
    marks[("serve", key)] = source


def load(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Weighted], ServeOptions]:
    """Build the rewards and return them with the options, which are checked first, since models
    load slowly."""
    load_built_in()
    config = read_config(path, overrides)
    options = config.section("serve", ServeOptions)
    check_reach(config, options, VARIABLE)
    import_plugins(config)
    rewards = config.rewards()
    names = short_names(rewards)
    return {names[name]: reward for name, reward in rewards.items()}, options


def load_teacher(path: Path, overrides: Sequence[str] = ()) -> tuple[Any, TeachOptions]:
    """Build the policy and return it with the options, which are checked first."""
    load_built_in()
    config = read_config(path, overrides, "policy")
    options = config.section("serve", TeachOptions)
    check_reach(config, options, TEACHER_VARIABLE)
    import_plugins(config)
    policy = config.build("policy", POLICIES)
    policy.net.requires_grad_(False)
    if torch.accelerator.is_available():
        policy.net.to(torch.accelerator.current_accelerator())
    return policy, options


def check_reach(config: Config, options: ServeOptions | TeachOptions, variable: str) -> None:
    """Raise UserError if other machines would be served without a token."""
    tokens = Tokens(options.token, options.token_file, variable)
    if options.host not in LOOPBACK and not tokens.valid():
        raise UserError(
            f"{config.where('serve')}: serve.host {options.host} can be reached from other "
            f"machines; "
            f"set a token in the environment variable {variable} (or serve.token_file)"
        )


def bind(options: Listening) -> socket.socket:
    """Bind the port without listening yet. Raises UserError if it is not available."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # asyncio sets TCP_NODELAY (40 ms) only if proto is TCP
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((options.host, options.port))
    except OSError as error:
        sock.close()
        raise UserError(
            f"cannot serve on {options.host} port {options.port}: {error.strerror or error}; "
            "another one: serve.port=8124, a free one: serve.port=0"
        ) from error
    return sock


def server(rewards: dict[str, Weighted], options: ServeOptions) -> uvicorn.Server:
    """Return a uvicorn server of rewards, not running yet."""
    return http_server(make_app(rewards, options), options)


def http_server(app: FastAPI, options: Listening) -> uvicorn.Server:
    """Return a uvicorn server, not running yet."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",  # bounds the size of headers
            ws="none",
            log_level="error",  # invalid HTTP must not fill the log
            access_log=False,
            lifespan="on",
            loop="asyncio",
            timeout_graceful_shutdown=10,
            timeout_keep_alive=30,
            limit_concurrency=options.max_connections,
            server_header=False,
            ssl_certfile=options.certificate,
            ssl_keyfile=options.private_key,
        )
    )


def serve(path: Path, overrides: Sequence[str] = ()) -> None:
    """Serve rewards until SIGTERM or SIGINT; requests in progress are answered first."""
    rewards, options = load(path, overrides)
    run(server(rewards, options), options, ", ".join(rewards))


def serve_teacher(path: Path, overrides: Sequence[str] = ()) -> None:
    """Serve a policy as a teacher until SIGTERM or SIGINT."""
    policy, options = load_teacher(path, overrides)
    app = make_teacher_app(policy, options)
    run(http_server(app, options), options, f"{type(policy).__name__} as a teacher")


def run(http: uvicorn.Server, options: Listening, what: str) -> None:
    """Run a server until it is stopped, and print where it listens."""
    return_memory()
    with bind(options) as sock:
        host, port = sock.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        # uvicorn re-raises them at the end: nothing more to do
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore)
        scheme = "http" if options.certificate is None else "https"
        print(f"serving {what} on {scheme}://{host}:{port}", flush=True)
        http.run(sockets=[sock])
    print("stopped", flush=True)


def return_memory() -> None:
    """Return the memory of large requests to the system at once: glibc would keep some per
    thread."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").mallopt(MMAP_THRESHOLD, 2**20)


def _ignore(number: int, frame: object) -> None:
    """Ignore a signal that has been handled."""

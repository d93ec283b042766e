"""Reads the token of reward servers: literal, from the environment, or from a file that may
change."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from mmrl.core.errors import UserError
from rewards.servers.wire import check_token

VARIABLE = "MMRL_REWARD_TOKEN"


class Tokens:
    """Holds the currently valid tokens.

    Args:
        token: the only one; None: the environment variable ``MMRL_REWARD_TOKEN``, or none.
        variable: the environment variable, if it is another.
        file: has one per line, instead of the two; it is read again when it changes. A server
            accepts all, a client sends the first.

    Raises:
        UserError: when constructed, for a file that cannot be read or has no token. Invalid later
            changes are ignored.
    """

    def __init__(
        self, token: str | None = None, file: Path | None = None, variable: str = VARIABLE
    ):
        if token and file:
            raise UserError("token and token_file: give one of them")
        self.file = None if file is None else Path(file).expanduser()
        self._lock = threading.Lock()
        self._stamp: tuple[int, ...] = ()
        first = check_token(token or os.environ.get(variable) or None)
        self._tokens: tuple[str, ...] = (first,) if first else ()
        if self.file is not None:
            self._tokens = self._read(self.file)

    def valid(self) -> tuple[str, ...]:
        """Return the tokens, empty if none is required."""
        if self.file is None:
            return self._tokens
        with self._lock:
            try:
                status = self.file.stat()
                stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
                if stamp != self._stamp:
                    self._tokens = self._read(self.file)
                    self._stamp = stamp
            except (OSError, UserError):
                pass  # being replaced: the previous ones stay valid until it is back
        return self._tokens

    def current(self) -> str | None:
        """Return the token that a client sends."""
        return next(iter(self.valid()), None)

    @staticmethod
    def _read(file: Path) -> tuple[str, ...]:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"token_file {file} cannot be read: {error}") from error
        tokens = tuple(token for line in lines if (token := check_token(line.strip() or None)))
        if not tokens:
            raise UserError(f"token_file {file} has no token; write one on every line")
        return tokens

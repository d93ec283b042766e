"""Keeps texts as they are where the locale knows ASCII alone, as in bare containers and cron."""

from __future__ import annotations

import locale
import os
import sys


def use_utf8() -> None:
    """Start this process again in Python's UTF-8 mode where the locale has another encoding: names
    of runs, prompts and pages are UTF-8 everywhere else. It must be called before anything is done.
    """
    is_utf8 = locale.getpreferredencoding(False).lower().replace("-", "") == "utf8"
    if sys.flags.utf8_mode or is_utf8 or os.name != "posix":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

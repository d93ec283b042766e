"""Forces UTF-8 where the locale is ASCII only, as in bare containers and cron."""

from __future__ import annotations

import locale
import os
import sys


def use_utf8() -> None:
    """Restart this process in Python's UTF-8 mode if the locale has another encoding: run names,
    prompts and pages are UTF-8. Call it before anything else.
    """
    is_utf8 = locale.getpreferredencoding(False).lower().replace("-", "") == "utf8"
    if sys.flags.utf8_mode or is_utf8 or os.name != "posix":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

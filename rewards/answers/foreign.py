"""Runs libraries that a model's answer may hang or crash, in a separate process.

``rewards.answers.sandbox`` starts this file with ``python -P``, so it imports nothing of mmrl. Each
request is a line of JSON, [name of a function, arguments], and so is each answer, {"value": ...} or
{"error": ...}. It exits when its input ends. A call that takes too much CPU time is interrupted; C
code, which cannot be interrupted, is killed with the process after twice that time.
"""

import base64
import json
import logging
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=4096)
def parsed(text: str) -> tuple[Any, ...]:
    """Return what math-verify parses from a formula, with and without dollars; empty if nothing."""
    from math_verify import parse

    body = text.strip().strip("$")
    expressions = parse(f"${body}$", parsing_timeout=None) or parse(body, parsing_timeout=None)
    return tuple(expressions)


def readable(text: str) -> bool:
    """Tell whether a formula can be parsed."""
    return bool(parsed(text))


DIGITS = 4000  # of a power or factorial that is computed


def explodes(expression: Any) -> bool:
    """Tell whether a tree that math-verify has parsed, and not computed, holds a power or factorial
    of numbers with more digits than that."""
    import sympy

    if not isinstance(expression, sympy.Basic) or isinstance(expression, sympy.Atom):
        return False
    if any(explodes(part) for part in expression.args):
        return True
    if not isinstance(expression, (sympy.Pow, sympy.factorial)) or expression.free_symbols:
        return False
    sizes = [abs(complex(part)) for part in expression.args]
    base = max(sizes[0], 1 / sizes[0]) if sizes[0] else 1.0
    count = sizes[1] if isinstance(expression, sympy.Pow) else sizes[0]
    return not count * math.log10(max(base, 1.0)) <= DIGITS


def equal(right: str, answer: str) -> bool | None:
    """Tell whether two formulas are equal as mathematics; None if the second cannot be read, or has
    powers that explode."""
    from math_verify import verify

    expressions = parsed(answer)
    if not expressions:
        return None
    try:
        if any(explodes(expression) for expression in expressions):
            return None
    except (OverflowError, TypeError, ValueError):  # what is too large to be a float
        return None
    return bool(verify(list(parsed(right)), list(expressions), timeout_seconds=None))


def png(svg: str, size: int) -> str | None:
    """Draw an SVG ``size`` pixels wide on white: PNG in base 64; None if resvg cannot draw it."""
    import resvg_py

    try:
        picture = resvg_py.svg_to_bytes(
            svg_string=svg, background="#ffffff", skip_system_fonts=True, width=size
        )
    except ValueError:
        return None
    return base64.b64encode(bytes(picture)).decode("ascii")


def repaired(text: str) -> Any:
    """Return a broken JSON value as json_repair reads it; None if it cannot."""
    from json_repair import repair_json

    value = repair_json(text, return_objects=True, skip_json_loads=True)
    return value if isinstance(value, (dict, list)) else None


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "readable": readable,
    "equal": equal,
    "png": png,
    "repaired": repaired,
}
WARM_UP: dict[str, tuple[Any, ...]] = {
    "repaired": ("[1",),
    "equal": ("x^2", "x^2"),
    "readable": ("x^2",),
    "png": ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"></svg>', 16),
}


def main(warm: str, seconds: float, memory: int) -> None:
    """Answer questions until the input ends. ``warm``: the function to try first; ``seconds``: CPU
    time allowed per question; ``memory``: bytes of address space."""
    logging.disable(logging.CRITICAL)
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print is not an answer
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(answers, "w", encoding="ascii") as stream:
        stream.write(json.dumps(asked([warm, WARM_UP[warm]])) + "\n")
        stream.flush()
        signal.signal(signal.SIGVTALRM, interrupted)
        for line in sys.stdin:
            signal.setitimer(signal.ITIMER_PROF, 2 * seconds)  # SIGPROF ends the process
            reply = asked(json.loads(line), seconds)
            signal.setitimer(signal.ITIMER_PROF, 0)
            stream.write(json.dumps(reply) + "\n")
            stream.flush()


class TooLong(BaseException):
    """Interrupts a call; no library catches it by accident."""


def interrupted(signal_number: int, frame: Any) -> None:
    raise TooLong


def asked(question: list[Any], seconds: float = 0.0) -> dict[str, Any]:
    """Call a function, for at most ``seconds`` of CPU time (0: no limit); an exception is reported
    as an error."""
    name, arguments = question
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        value = FUNCTIONS[name](*arguments)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return {"value": value}
    except TooLong:
        return {"error": "TooLong"}
    except Exception as error:  # a library may raise anything on an answer
        return {"error": type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))

"""Writes docs/api.md, the page of the Python API, from the docstrings of what ``import mmrl``
offers: run this after changing one.

    python scripts/dev/api.py

The part before the reference is written by hand; tests/api/test_page.py runs its examples.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import mmrl  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
# in the order in which a reader needs them
NAMES = (
    "train",
    "Trainer",
    "Callback",
    "load_policy",
    "Policy",
    "load_run",
    "Run",
    "Samples",
    "Video",
    "evaluate",
    "Evaluation",
    "check_reward",
    "compare",
    "list",
)
TITLE = "## Reference\n"


def page() -> str:
    """Return the whole page: the hand-written part and the reference."""
    by_hand = PAGE.read_text(encoding="utf-8").partition(TITLE)[0]
    return by_hand + TITLE + "\n" + "\n".join(entry(name) for name in NAMES)


def entry(name: str) -> str:
    """Describe a function, or a class with its methods and properties."""
    thing = documented(name)
    lines = [f"### mmrl.{name}\n", f"`{name}{signature(thing)}`\n", text_of(thing)]
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            if not member.startswith("_") and inspect.getdoc(value) and described(value):
                lines.append(method(member, value))
    return "\n".join(lines)


def documented(name: str) -> Any:
    """Return the function of a callable package, and anything else unchanged."""
    thing = getattr(mmrl, name)
    if inspect.ismodule(thing):
        from mmrl.core.callable_module import called_for

        return called_for(thing)
    return thing


def described(value: Any) -> bool:
    return inspect.isfunction(value) or hasattr(value, "fget") or hasattr(value, "func")


def method(name: str, value: Any) -> str:
    """Describe a method or a property below its class, in one paragraph with its call."""
    known = signature(value) if inspect.isfunction(value) else ""
    known = known.replace("(self, ", "(").replace("(self)", "()")
    return f"**`.{name}{known}`** {text_of(value)}"


def signature(thing: Any) -> str:
    """Write names and defaults of a signature, and what it returns; the text describes the
    types."""
    known = inspect.signature(thing)
    parts: list[str] = []
    for parameter in known.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        given = parameter.default is not parameter.empty
        parts.append(f"{parameter.name}={parameter.default!r}" if given else parameter.name)
    hides = inspect.isclass(thing) or known.return_annotation in (known.empty, "None", None)
    result = "" if hides else f" -> {short(known.return_annotation)}"
    return f"({', '.join(parts)}){result}"


def short(annotation: Any) -> str:
    """Write an annotation without the names of modules."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)


def text_of(thing: Any) -> str:
    """Return a docstring as Markdown: paragraphs, with reST's double backticks made single, and
    without what it raises, which the page says of all."""
    text = textwrap.dedent(inspect.getdoc(thing) or "").replace("``", "`")
    return re.sub(r"\s*Raises UserError[^.]*\.(?=\s|$)", "", text).strip() + "\n"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()

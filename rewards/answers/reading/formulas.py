r"""Parses formulas of school and university, LaTeX or plain, to trees that can be evaluated: two
formulas that differ at a point are not equal, and an exploding power shows in the tree.

math-verify decides what is equal; this decides, in a tenth of a millisecond, what is not.
"""

from __future__ import annotations

import cmath
import math
import random
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NoReturn

from rewards.answers.reading.tokens import FIGURE, value_of

Value = complex
Tree = tuple[str, tuple["Tree | str | complex", ...]]
LARGEST = 1e300
MOST_DIGITS = 4000.0  # of a power or factorial too large to compute exactly
DEEPEST = 40
POINTS = 3
FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "cot": lambda v: 1 / cmath.tan(v),
    "sec": lambda v: 1 / cmath.cos(v),
    "csc": lambda v: 1 / cmath.sin(v),
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "sinh": cmath.sinh,
    "cosh": cmath.cosh,
    "tanh": cmath.tanh,
    "ln": cmath.log,
    "log": cmath.log,
    "exp": cmath.exp,
    "sqrt": cmath.sqrt,
    "abs": lambda v: complex(abs(v)),
}
GREEK = (
    "alpha beta gamma delta epsilon theta lambda mu nu xi rho sigma tau phi chi psi omega "
    "Delta Omega Theta varphi"
).split()
LEXEME = re.compile(
    rf"(?P<figure>{FIGURE})|(?P<command>\\[A-Za-z]+|\\.)|"
    r"(?P<word>arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|"
    r"pi)(?![a-z])|(?P<letter>[A-Za-z\u03b1-\u03c9])|(?P<sign>\S)",
    re.X,
)
DROPPED = {r"\left", r"\right", r"\displaystyle", r"\,", r"\;", r"\!", r"\:", r"\ ", "$"}
GROUPED = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
PRODUCTS = {r"\cdot", r"\times", "*", "\u00b7", "\u00d7", r"\ast"}
QUOTIENTS = {"/", r"\div", "\u00f7"}


class Unread(Exception):
    """Signals a formula that this reader does not know; math-verify may."""


class Explodes(Exception):
    """Signals a power or factorial too large to compute."""


class _Reader:
    """Reads one formula by precedence: sums, products, signs, powers, atoms."""

    def __init__(self, text: str):
        text = re.sub(r"(?<=\d)\\[,;: !](?=\d{3}(?!\d))|\{,\}(?=\d{3})", "", text)
        bare = GROUPED.sub(lambda match: match[0].replace(",", ""), text)
        if "," in bare or "," in text and any(bracket in text for bracket in "([{"):
            self.stop()  # a tuple, a set, an interval
        self.lexemes = [
            (str(match.lastgroup), match[0])
            for match in LEXEME.finditer(text)
            if match[0] not in DROPPED
        ]
        self.at = 0
        self.depth = 0

    def peek(self) -> str:
        return self.lexemes[self.at][1] if self.at < len(self.lexemes) else ""

    def take(self, *texts: str) -> bool:
        if self.peek() in texts and self.peek():
            self.at += 1
            return True
        return False

    def need(self, text: str) -> None:
        if not self.take(text):
            self.stop()

    def stop(self) -> NoReturn:
        raise Unread

    def whole(self) -> Tree:
        tree = self.sum()
        if self.at < len(self.lexemes):
            self.stop()
        return tree

    def sum(self) -> Tree:
        self.depth += 1
        if self.depth > DEEPEST:
            self.stop()
        tree = self.product()
        while self.peek() in ("+", "-"):
            sign = self.peek()
            self.at += 1
            right = self.product()
            tree = ("+", (tree, right if sign == "+" else ("neg", (right,))))
        self.depth -= 1
        return tree

    def product(self) -> Tree:
        tree = self.signed()
        while True:
            if self.peek() in PRODUCTS:
                self.at += 1
                tree = ("*", (tree, self.signed()))
            elif self.peek() in QUOTIENTS:
                self.at += 1
                tree = ("/", (tree, self.signed()))
            elif self._begins():
                if (
                    self.lexemes[self.at][0] == "figure"
                    and self.lexemes[self.at - 1][0] == "figure"
                ):
                    self.stop()
                tree = ("*", (tree, self.power()))
            else:
                return tree

    def _begins(self) -> bool:
        if self.at >= len(self.lexemes):
            return False
        kind, text = self.lexemes[self.at]
        return (
            kind in ("figure", "letter", "word")
            or text in ("(", "{", "\u221a", "\u03c0")
            or (
                kind == "command"
                and text not in PRODUCTS | QUOTIENTS | {r"\%", r"\}", r"\)", r"\]", r"\|"}
            )
        )

    def signed(self) -> Tree:
        if self.take("-"):
            return ("neg", (self.signed(),))
        self.take("+")
        return self.power()

    def power(self) -> Tree:
        tree = self.atom()
        while self.take("!"):
            tree = ("!", (tree,))
        if (
            self.peek() == "*"
            and self.at + 1 < len(self.lexemes)
            and self.lexemes[self.at + 1][1] == "*"
        ):
            self.at += 2
            return ("^", (tree, self.signed()))
        if self.take("^"):
            tree = ("^", (tree, self.exponent()))
            if self.peek() == "^":
                self.stop()
        return tree

    def exponent(self) -> Tree:
        if self.peek() in ("{", "("):
            return self.power() if self.peek() == "(" else self.group()
        if self.take("-"):
            return ("neg", (self.atom(),))
        kind, text = self.lexemes[self.at] if self.at < len(self.lexemes) else ("", "")
        if (
            kind == "figure"
            and len(text) > 1
            and self.at
            and "\\" in "".join(t for _, t in self.lexemes)
        ):
            self.stop()  # 2^10 is 2 to the 1, times 0, for TeX
        tree = self.atom()
        return ("^", (tree, self.exponent())) if self.take("^") else tree

    def group(self) -> Tree:
        self.need("{")
        tree = self.sum()
        self.need("}")
        return tree

    def atom(self) -> Tree:
        if self.at >= len(self.lexemes):
            self.stop()
        kind, text = self.lexemes[self.at]
        self.at += 1
        if kind == "figure":
            return ("value", (complex(value_of(text)),))
        if text in ("(", "{", "["):
            tree = self.sum()
            self.need({"(": ")", "{": "}", "[": "]"}[text])
            return tree
        if text == "|":
            tree = self.sum()
            self.need("|")
            return ("abs", (tree,))
        if text == "i":
            self.stop()  # a variable or the imaginary unit
        if kind == "letter" and text not in "\u03c0":
            return ("e", ()) if text == "e" else ("name", (text,))
        if text in ("pi", "\u03c0", r"\pi"):
            return ("pi", ())
        return self.called(text)

    def called(self, text: str) -> Tree:
        name = text.lstrip("\\")
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            return ("/", (self.argument(), self.argument()))
        if name in ("sqrt", "\u221a"):
            if self.take("["):
                index = self.sum()
                self.need("]")
                return ("^", (self.argument(), ("/", (("value", (1 + 0j,)), index))))
            return ("sqrt", (self.argument(),))
        if name in GREEK:
            return ("name", (name,))
        if name not in FUNCTIONS:
            self.stop()
        return self.function(name)

    def function(self, name: str) -> Tree:
        exponent = self.exponent() if self.take("^") else None
        if name == "log" and self.take("_"):
            base = self.argument()
            tree: Tree = ("/", (("ln", (self.inside(),)), ("ln", (base,))))
        elif name == "log" or exponent and exponent[0] == "neg":
            self.stop()  # base 10 or e, and inverse functions: ambiguous, left to math-verify
        else:
            tree = (name, (self.inside(),))
        return ("^", (tree, exponent)) if exponent else tree

    def inside(self) -> Tree:
        """Read a function's argument: brackets, or a product such as 2x."""
        if self.peek() in ("(", "{"):
            return self.atom()
        tree = self.power()
        while (
            self._begins()
            and self.lexemes[self.at][0] in ("letter", "figure")
            or self.peek() in (r"\pi", "\u03c0")
        ):
            tree = ("*", (tree, self.power()))
        return tree

    def argument(self) -> Tree:
        if self.peek() == "{":
            return self.group()
        kind, text = self.lexemes[self.at] if self.at < len(self.lexemes) else ("", "")
        if kind == "figure" and len(text) > 1:
            self.lexemes[self.at : self.at + 1] = [("figure", digit) for digit in text]
            if not text.isdigit():
                self.stop()
        return self.atom()


@lru_cache(maxsize=4096)
def tree_of(text: str) -> Tree | None:
    """Parse a formula; None if this reader does not know it."""
    try:
        return _Reader(text).whole()
    except (Unread, IndexError, ValueError, OverflowError, RecursionError):
        return None


def evaluate(tree: Tree, at: Mapping[str, complex]) -> complex:
    """Evaluate a formula at a point. Raises Explodes and arithmetic errors."""
    kind, parts = tree
    if kind == "value":
        return complex(parts[0])  # type: ignore[arg-type]
    if kind == "name":
        return at[str(parts[0])]
    if kind in ("pi", "e"):
        return complex(math.pi if kind == "pi" else math.e)
    values = [evaluate(part, at) for part in parts if isinstance(part, tuple)]
    if kind == "+":
        return values[0] + values[1]
    if kind == "*":
        return values[0] * values[1]
    if kind == "/":
        return values[0] / values[1]
    if kind == "neg":
        return -values[0]
    if kind == "^":
        return values[0] ** values[1]
    if kind == "!":
        return _factorial(values[0])
    return FUNCTIONS[kind](values[0])


def _factorial(value: complex) -> complex:
    if value.imag or value.real < 0 or value.real != int(value.real):
        raise ValueError
    return complex(math.factorial(int(value.real)) if value.real < 170 else math.inf)


def explodes(text: str) -> bool:
    """Tell whether a formula holds a power or factorial of numbers that would fill the memory: more
    than 4,000 digits. The tree is searched, so bold text (**) does not count."""
    tree = tree_of(text)
    return tree is not None and _explodes(tree)


def _explodes(tree: Tree) -> bool:
    kind, parts = tree
    if any(_explodes(part) for part in parts if isinstance(part, tuple)):
        return True
    if kind not in ("^", "!") or _names(tree):
        return False
    try:
        values = [evaluate(part, {}) for part in parts if isinstance(part, tuple)]
        digits = (
            abs(values[1].real) * math.log10(max(abs(values[0]), 1 / max(abs(values[0]), 1e-300)))
            if kind == "^"
            else abs(values[0]) * math.log10(max(abs(values[0]), 1))
        )
    except (OverflowError, ZeroDivisionError, ValueError):
        return True
    return not digits <= MOST_DIGITS


def _names(tree: Tree) -> set[str]:
    kind, parts = tree
    if kind == "name":
        return {str(parts[0])}
    return {name for part in parts if isinstance(part, tuple) for name in _names(part)}


def differ(first: str, second: str) -> bool | None:
    """Tell whether two formulas differ at one of three points drawn from a seed of their names;
    None if one of them cannot be parsed or evaluated.

    False is no proof: it says that they agree to 1e-9 at all points.
    """
    trees = tree_of(first), tree_of(second)
    if trees[0] is None or trees[1] is None:
        return None
    names = sorted(_names(trees[0]) | _names(trees[1]))
    computed = 0
    close = True
    for turn in range(POINTS if names else 1):
        draw = random.Random(f"{turn} {names}")
        sign = -1 if turn == 2 else 1
        at = {name: complex(sign * draw.uniform(0.3, 1.7)) for name in names}
        try:
            left, right = evaluate(trees[0], at), evaluate(trees[1], at)
        except (OverflowError, ZeroDivisionError, ValueError):
            continue
        size = max(abs(left), abs(right))
        if not (cmath.isfinite(left) and cmath.isfinite(right)) or size > LARGEST:
            continue
        computed += 1
        gap = abs(left - right)
        if gap > 1e-5 * size:
            return True
        close = close and gap <= 1e-9 * size
    return False if computed and close else None

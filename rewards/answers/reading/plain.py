r"""Strips formatting from an answer: Unicode forms, LaTeX around text and numbers, Markdown.

No sign, operator, factorial or grade is lost: superscripts, vulgar fractions and roots are kept
(NFKC would turn 10³ into 103 and 3½ into 31/2), and asterisks between numbers are products. That is
why Markdown is not read by a Markdown library here: CommonMark takes 2*3*4 for emphasis.
"""

from __future__ import annotations

import re
import unicodedata

DASHES = dict.fromkeys(
    map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d\u2796"), "-"
)
SIGNS = {
    ord(sign): plain
    for sign, plain in {
        "\u2018": "'",
        "\u2019": "'",
        "\u02bc": "'",
        "\u201c": '"',
        "\u201e": '"',
        "\u201d": '"',
        "\u2795": "+",
        "\u2715": "\u00d7",
        "\u2716": "\u00d7",
        "\u22c5": "\u00b7",
        "\u2217": "*",
        "\u2044": "/",
        "\u2215": "/",
        "\u00ba": "\u00b0",
        "\u3002": ".",
        "\u200b": "",
        "\u2060": "",
        "\ufeff": "",
        "\u00ad": "",
        "\u2032": "'",
        "\u2033": '"',
    }.items()
} | DASHES
SHORT = 1_500  # characters of an answer that is short
# kept as they are: category No (superscripts, vulgar fractions), the degree of a temperature
KEPT = frozenset("\u2103\u2109\u2126\u00b5\u207a\u207b")


def evened(text: str) -> str:
    """Normalise Unicode forms: full width, dashes, quotes, blanks, digits of other scripts."""
    if text.isascii():
        return text
    return WIDE_COLON.sub(": ", text).translate(LETTERS)


WIDE_COLON = re.compile("(?<!\\d)\uff1a(?=\\S)")  # of words, not of times: no blank follows


class _Letters(dict[int, str]):
    """Maps each character, computed when it first occurs."""

    def __missing__(self, code: int) -> str:
        self[code] = _letter(chr(code))
        return self[code]


def _letter(letter: str) -> str:
    if letter < "\x80" or letter in KEPT:
        return letter
    kind = unicodedata.category(letter)
    if kind == "Nd":
        return str(unicodedata.digit(letter))
    if kind == "No" and not unicodedata.name(letter, "").startswith("CIRCLED"):
        return letter
    return " " if kind == "Zs" else unicodedata.normalize("NFKC", letter)


LETTERS = _Letters(SIGNS)


# ------------------------------------------------------------------------------------------ LaTeX

WRAPPER = re.compile(
    r"\\(?:text\w*|math(?:rm|bf|it|sf|tt|cal|bb)|mbox|operatorname|emph|underline|boldsymbol|bm)"
    r"\s*\{([^{}]{0,400})\}"
)
DOLLARS = re.compile(r"(?<!\\)(\$\$?)(?=\S)([^$\n]{1,400}?)(?<=\S)(?<!\\)\1(?!\d)")
COMMANDS = {
    r"\times": "\u00d7",
    r"\cdot": "\u00b7",
    r"\div": "\u00f7",
    r"\pm": "\u00b1",
    r"\approx": "\u2248",
    r"\sim": "~",
    r"\leq": "\u2264",
    r"\le": "\u2264",
    r"\geq": "\u2265",
    r"\ge": "\u2265",
    r"\neq": "\u2260",
    r"\ne": "\u2260",
    r"\lt": "<",
    r"\gt": ">",
    r"\sqrt": "\u221a",
    r"\pi": "\u03c0",
    r"\infty": "\u221e",
    r"\pounds": "\u00a3",
    r"\euro": "\u20ac",
    r"\left": "",
    r"\right": "",
    r"\displaystyle": "",
    r"\degree": "\u00b0",
    r"\quad": " ",
    r"\qquad": " ",
    r"\textdegree": "\u00b0",
    r"\ast": "*",
    r"\mu": "\u03bc",
}
COMMAND = re.compile(
    "|".join(re.escape(name) for name in sorted(COMMANDS, key=len, reverse=True)).join(
        ("(?:", ")(?![A-Za-z])")
    )
)
DEGREE = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\}|\\degree(?![A-Za-z]))")
FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]{0,200})\}|(\d))\s*(?:\{([^{}]{0,200})\}|(\d))")
POWER = re.compile(r"\^\s*\{([^{}]{0,200})\}")
ROOT = re.compile(r"\\sqrt\s*\{([^{}]{0,200})\}")
BRACES = re.compile(r"(?<!\\)\{([^{}\\]{0,200})\}")
SPACE = re.compile(r"\\[,;: ]|~(?=\d)(?<=\d~)|\\\\")


def without_latex(text: str) -> str:
    r"""Strip LaTeX from text and numbers: ``\text{B}``, ``$5$``, ``1\,234``, ``\frac{1}{2}`` as
    ((1)/(2))."""
    if "$" in text:
        text = DOLLARS.sub(r" \2 ", text).strip()
    if "\\" in text:
        text = re.sub(r"\\[()\[\]]", " ", text).strip()
        text = _repeated(WRAPPER, r"\1", text)
        text = DEGREE.sub("\u00b0", text).replace(r"\!", "")
        text = SPACE.sub(" ", text)
        for _ in range(4):
            before = text
            text = ROOT.sub("\u221a(\\1)", text)
            text = FRACTION.sub(_ratio, text)
            text = POWER.sub(r"^(\1)", text)
            if text == before:
                break
        text = COMMAND.sub(lambda name: COMMANDS[name[0]], text)
        text = re.sub(r"\\([%$#&_])", r"\1", text)
    if "{" in text:
        text = POWER.sub(r"^(\1)", text).replace("{,}", ",")
        text = _repeated(BRACES, r"\1", text) if "\\" not in text and '"' not in text else text
    return text


def _ratio(found: re.Match[str]) -> str:
    return f"(({found[1] or found[2]})/({found[3] or found[4]}))"


def _repeated(pattern: re.Pattern[str], by: str, text: str) -> str:
    for _ in range(4):
        text, count = pattern.subn(by, text)
        if not count:
            break
    return text


# --------------------------------------------------------------------------------------- Markdown

EMPHASIS = re.compile(
    r"(?<![A-Za-z\d_*\\])(\*{1,3}|__?|~~|``?)(?=[^\s*_`~])([^*`\n]{0,160}?[^\s*_`~\\]|"
    r"[^\s*_`~])\1(?![A-Za-z\d_*])"
)
# what ends emphasis; a text without it has none
EMPHASIS_END = re.compile(r"[^\s*_`~][*_`~]{1,3}(?![A-Za-z\d_*])")
HEADING = re.compile(r"(?m)^[ \t]{0,3}#{1,6}[ \t]+([^\n#]*?)[ \t]*#*[ \t]*$")


def without_markdown(text: str) -> str:
    """Strip heading marks, emphasis and code marks around words."""
    if "#" in text:
        text = HEADING.sub(r"\1", text)
    if any(sign in text for sign in "*_`~"):
        if EMPHASIS_END.search(text):
            text = _repeated(EMPHASIS, r"\2", text)
        text = re.sub(r"(?m)^[ \t]{0,3}\*[ \t]+(?=\S)", "", text) if text.count("\n") == 0 else text
        text = re.sub(r"(?<=[^\s*])\*\*\s*$|^\s*\*\*(?=[^\s*])", "", text)  # one half of a pair
    return text


def plain(text: str) -> str:
    """Strip Markdown, LaTeX and Unicode variants from a short answer, of at most 1,500 characters;
    runs of blanks become one, lines stay."""
    if len(text) > SHORT:
        return _single(evened(text))
    return _single(without_latex(evened(without_markdown(text))))


def _single(text: str) -> str:
    """Collapse blanks, and strip those around a text."""
    return (re.sub(r"[ \t]+", " ", text) if "  " in text or "\t" in text else text).strip()


# ticks and cheerful signs around an answer; none that means no or doubt
_CHEER = (
    "[\u2705\u2713\u2714\u2611\u2b50\u2728\u27a1\U0001f300-\U0001f44d\U0001f44f-\U0001f5ff"
    "\U0001f600-\U0001f64f\U0001f680-\U0001f6aa\U0001f6ac-\U0001f6ff\U0001f900-\U0001f913"
    "\U0001f915-\U0001f936\U0001f938-\U0001f9ff]"
)
CHEER = re.compile(rf"\s*(?:{_CHEER}\ufe0f?\s*)+")
CHEER_BACKWARDS = re.compile(rf"\s*(?:\ufe0f?{_CHEER}\s*)+")  # of a text written backwards


def bare(text: str) -> str:
    """Strip what encloses a whole answer: quotes, ticks, brackets, a full stop."""
    for _ in range(6):
        before = text
        if not text.isascii():
            text = _cheerless(text)
        text = text.strip().strip("\"'`\u300c\u300d\u300e\u300f\u3010\u3011\u00ab\u00bb").strip()
        if text.endswith((".", "\u3002")) and not text.endswith(".."):
            text = text[:-1].rstrip()
        if text == before:
            break
    return text


def _cheerless(text: str) -> str:
    """Strip ticks and cheerful signs from both ends, unless there is nothing else."""
    last = CHEER_BACKWARDS.match(text[::-1])
    if last and (rest := text[: -last.end()]).strip():
        text = rest
    first = CHEER.match(text)
    return text[first.end() :] or text if first else text


ALIGNED = re.compile(
    r"\\(?:begin|end)\{(?:aligned|align|alignat|split|gather|gathered|equation)\*?\}"
)
VULGAR = re.compile(r"(\d+)?\s?([\u00bc-\u00be\u2150-\u215e])")
RAISED = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b", "0123456789+-"
)
EXPONENT = re.compile(r"[\u2070\u00b9\u00b2\u00b3\u2074-\u207b]+")
UNICODE_COMMANDS = {
    "\u00d7": r"\times ",
    "\u00b7": r"\cdot ",
    "\u00f7": r"\div ",
    "\u00b1": r"\pm ",
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2208": r"\in ",
    "\u222a": r"\cup ",
    "\u00b0": r"^\circ",
    "\u2229": r"\cap ",
    "\u2205": r"\emptyset ",
}


def latex(text: str) -> str:
    """Return a formula as LaTeX without dollars, brackets of displays and Markdown: \u221a2 as
    \\sqrt{2}, \u00bd as \\frac{1}{2}, x\u00b2 as x^{2}, 1,234 and 1 234 as 1234."""
    text = evened(without_markdown(text)).strip()
    if ALIGNED.search(text):
        text = re.sub(r"&|\\\\", " ", ALIGNED.sub(" ", text))
    text = DOLLARS.sub(r" \2 ", text)
    text = re.sub(r"\\[()\[\]]|\$", " ", text).strip()
    text = re.sub(r"(?<=\d)(?:\\[,;:! ]|\{,\}|~| )(?=\d{3}(?!\d))", "", text)
    if not text.isascii():
        text = VULGAR.sub(_fraction, text)
        text = EXPONENT.sub(lambda found: "^{" + found[0].translate(RAISED) + "}", text)
        text = re.sub(
            r"\u221a\s*(?:\(([^()]{0,200})\)|(\d+(?:\.\d+)?|[A-Za-z]))",
            lambda found: rf"\sqrt{{{found[1] or found[2]}}}",
            text,
        )
        for sign, command in UNICODE_COMMANDS.items():
            text = text.replace(sign, command)
    return bare(text)


def _fraction(found: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", found[2]).partition("\u2044")
    return (
        f"{found[1]}+\\frac{{{above}}}{{{below}}}" if found[1] else f"\\frac{{{above}}}{{{below}}}"
    )

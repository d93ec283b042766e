"""Writes rewards as Markdown tables from the registry: a short one for ``docs/rewards.md``, and one
with ranges, scalings and sources for ``mmrl list rewards --markdown``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmrl.core.registry import REWARDS, Plugin, describe, load_built_in, options
from rewards.card import Card, card_of

BEGIN = "<!-- generated: scripts/dev/reward_table.py -->"
END = "<!-- end of the generated table -->"
HEAD = (
    "name",
    "what it says",
    "judges",
    "needs",
    "range",
    "scaling",
    "options",
    "source",
    "licence",
)
KINDS = {
    "sample": "",
    "group": "groups of ",
    "step": "steps of ",
    "batch": "an iteration of ",
}


def markdown() -> str:
    """Write one line for each registered reward, with all that its card says."""
    load_built_in()
    return _table(HEAD, (row(name, entry) for name, entry in sorted(REWARDS.items())))


def short() -> str:
    """Write the rewards of this repository: what they judge, and whose weights they load; those
    that check answers, which docs/verifiable-rewards.md describes, and those with gradients by
    name only."""
    load_built_in()
    defined = {n: e for n, e in sorted(REWARDS.items()) if e.__module__.startswith("rewards.")}
    checks = [
        name for name, entry in defined.items() if entry.__module__.startswith("rewards.answers")
    ]
    rows = (
        [f"`{name}`", _about(entry), _judges(card_of(entry)), _weights(card_of(entry))]
        for name, entry in defined.items()
        if name not in checks
    )
    table = _table(("name", "what it says", "judges", "weights and licence"), rows)
    smooth = [name for name, entry in defined.items() if card_of(entry).differentiable]
    return (
        f"{table}\nDifferentiable: {_names(smooth)}.\n\n"
        f"[Of answers](verifiable-rewards.md#what-there-is): {_names(checks)}.\n"
    )


def row(name: str, entry: Plugin) -> list[str]:
    card = card_of(entry)
    return [
        f"`{name}`",
        _about(entry),
        _judges(card),
        _names(card.needs),
        span(card),
        card.scaling,
        _names(options(entry)),
        card.source + ("; differentiable" if card.differentiable else ""),
        card.licence,
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines]) + "\n"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _about(entry: Plugin) -> str:
    return describe(entry).rstrip(".").replace("``", "`")


def _judges(card: Card) -> str:
    return KINDS[card.of] + ", ".join(card.media)


def _weights(card: Card) -> str:
    """Name what a reward loads and under which licence; "" for one that loads nothing."""
    return f"{card.source}: {card.licence}" if card.licence else ""


def span(card: Card) -> str:
    """Return the range of a reward: ``0..1``, ``above 0``, ``below 0`` or nothing."""
    if card.low is None and card.high is None:
        return ""
    if card.high is None:
        return f"{card.low:g} and above"
    return f"{card.high:g} and below" if card.low is None else f"{card.low:g}..{card.high:g}"


def renewed(page: str, table: str) -> str:
    """Return the page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}{END}{after}"

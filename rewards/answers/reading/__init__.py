"""Reads what a model wrote, once, for all rewards; it never raises and always says how well it
went.

A text is parted into thought and final answer (``final``), of which ``stated`` finds the span that
says it; ``quantity``, ``options``, ``items`` and the readers of JSON make a typed value of that.
Rewards compare values and take no characters off on their own.
"""

from rewards.answers.reading.figures import NUMBER, RUN, calm, real, reals
from rewards.answers.reading.names import NOTHING, items, normal, same_name
from rewards.answers.reading.numbers import Quantity, number, quantity, quantity_in
from rewards.answers.reading.objects import loose_json, strict_json
from rewards.answers.reading.parsed import SEVERITY, UNPARSEABLE, Parsed, Status, worst
from rewards.answers.reading.parts import LONGEST, Final, boxed, fenced, final, last_inside
from rewards.answers.reading.plain import plain
from rewards.answers.reading.stated import stated

__all__ = [
    "LONGEST",
    "NOTHING",
    "NUMBER",
    "RUN",
    "SEVERITY",
    "UNPARSEABLE",
    "Final",
    "Parsed",
    "Quantity",
    "Status",
    "boxed",
    "calm",
    "fenced",
    "final",
    "items",
    "last_inside",
    "loose_json",
    "normal",
    "number",
    "plain",
    "quantity",
    "quantity_in",
    "real",
    "reals",
    "same_name",
    "stated",
    "strict_json",
    "worst",
]

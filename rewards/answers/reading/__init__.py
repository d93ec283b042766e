"""Parses a model's answer, once, for all rewards; never raises, and always reports how well it
went.

A text is split into thought and final answer (``final``), in which ``stated`` finds the span that
states it; ``quantity``, ``options``, ``items`` and the JSON readers turn that into a typed value.
Rewards compare values and strip no characters themselves.
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

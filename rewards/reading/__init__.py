"""Reads what a model wrote, once, for all rewards; it never raises and always says how well it
went.

A text is parted into thought and final answer (``parts``), whose value is then read as a number,
a name, a list or JSON. Rewards compare values and take no characters off on their own.
"""

from rewards.reading.figures import NUMBER, RUN, calm, real, reals
from rewards.reading.names import NOTHING, items, normal
from rewards.reading.numbers import number
from rewards.reading.objects import loose_json, strict_json
from rewards.reading.parsed import SEVERITY, UNPARSEABLE, Parsed, Status, worst
from rewards.reading.parts import LONGEST, Final, boxed, fenced, final, last_inside

__all__ = [
    "LONGEST",
    "NOTHING",
    "NUMBER",
    "RUN",
    "SEVERITY",
    "UNPARSEABLE",
    "Final",
    "Parsed",
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
    "real",
    "reals",
    "strict_json",
    "worst",
]

"""Verifiable rewards of vision tasks: one parser, one coordinate module, NaN only where the prompt is at fault.

All judge texts against right answers in the prompt; ``docs/verifiable-rewards.md`` has the table.
"""

from rewards.vision.grounding import Grounding, Referring
from rewards.vision.words import Answer, Choice, Classification, Count, LabelSet

__all__ = ["Answer", "Choice", "Classification", "Count", "Grounding", "LabelSet", "Referring"]

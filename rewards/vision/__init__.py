"""Verifiable rewards of vision tasks: one parser, one coordinate module, NaN only where the prompt is at fault.

All judge texts against right answers in the prompt; ``docs/verifiable-rewards.md`` has the table.
"""

from rewards.vision.detection import Confidence, Detection
from rewards.vision.grounding import Grounding, Referring
from rewards.vision.masks import Segmentation
from rewards.vision.pointing import Gui, Point
from rewards.vision.spans import Temporal, Tracking
from rewards.vision.words import Answer, Choice, Classification, Count, LabelSet

__all__ = [
    "Answer",
    "Choice",
    "Classification",
    "Confidence",
    "Count",
    "Detection",
    "Grounding",
    "Gui",
    "LabelSet",
    "Point",
    "Referring",
    "Segmentation",
    "Temporal",
    "Tracking",
]

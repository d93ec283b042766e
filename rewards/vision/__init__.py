"""Verifies answers to vision tasks: one parser, one coordinate module, NaN only where the prompt is
at fault.

All judge texts against ground truths in the prompt; ``docs/verifiable-rewards.md`` has the table.
"""

from rewards.vision.detection import Confidence, Detection
from rewards.vision.grounding import Grounding, Referring
from rewards.vision.masks import Segmentation
from rewards.vision.maths import Chart, Maths
from rewards.vision.maze import MazeWalk
from rewards.vision.pointing import Gui, Point
from rewards.vision.reference import Bleu, Structured
from rewards.vision.shaping import CosineLength, Format, Length, Overlong, Repetition, ThinkOrNot
from rewards.vision.spans import Temporal, Tracking
from rewards.vision.steps import KeySteps, Routed, VideoQa, Vqa
from rewards.vision.svg import Svg
from rewards.vision.tables import Table
from rewards.vision.words import Answer, Choice, Classification, Count, LabelSet
from rewards.vision.writing import TextSimilarity, Transcription

__all__ = [
    "Answer",
    "Bleu",
    "Chart",
    "Choice",
    "Classification",
    "Confidence",
    "CosineLength",
    "Count",
    "Detection",
    "Format",
    "Grounding",
    "Gui",
    "KeySteps",
    "LabelSet",
    "Length",
    "Maths",
    "MazeWalk",
    "Transcription",
    "Overlong",
    "Point",
    "Referring",
    "Repetition",
    "Routed",
    "Segmentation",
    "Structured",
    "Svg",
    "Table",
    "Temporal",
    "TextSimilarity",
    "ThinkOrNot",
    "Tracking",
    "VideoQa",
    "Vqa",
]

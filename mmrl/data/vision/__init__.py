"""Reads questions about images and videos, from the formats they come in. Importing this registers
the source."""

from mmrl.data.vision.paired import Paired as Paired
from mmrl.data.vision.source import Vision as Vision

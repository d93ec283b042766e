"""Questions about images and videos, from the formats they come in. Importing this registers the
source."""

from .paired import Paired as Paired
from .source import Vision as Vision

"""Policies: generative models behind one contract; one thin file a model family. Importing this registers them."""

from . import sd3 as sd3
from .vlm import policy as policy

"""Policies: generative models behind one contract; one thin file a model family. Importing this registers them."""

from . import diffusion as diffusion
from . import flux as flux
from . import sd3 as sd3
from . import wan as wan
from .vlm import policy as policy

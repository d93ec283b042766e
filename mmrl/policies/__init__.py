"""Policies: generative models behind one contract; one thin file a model family. Importing this
registers them."""

from . import amused as amused
from . import cogvideox as cogvideox
from . import diffusion as diffusion
from . import flux as flux
from . import flux2 as flux2
from . import flux_kontext as flux_kontext
from . import hunyuan as hunyuan
from . import lcm as lcm
from . import ltx as ltx
from . import masked_image_lm as masked_image_lm
from . import masked_lm as masked_lm
from . import module as module
from . import qwen_edit as qwen_edit
from . import qwen_image as qwen_image
from . import sana as sana
from . import sd3 as sd3
from . import wan as wan
from . import wan_i2v as wan_i2v
from . import z_image as z_image
from .images import emu3 as emu3
from .images import glm_image as glm_image
from .images import imagegpt as imagegpt
from .images import janus as janus
from .images import llamagen as llamagen
from .images import var as var
from .unified.policy import JanusUnified as JanusUnified
from .vlm import policy as policy

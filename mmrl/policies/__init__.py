"""Registers the policies: generative models behind one contract, in one thin file for each model
family."""

from mmrl.policies.diffusion import any_pipeline as any_pipeline
from mmrl.policies.diffusion import custom_module as custom_module
from mmrl.policies.diffusion.models import cogvideox as cogvideox
from mmrl.policies.diffusion.models import flux as flux
from mmrl.policies.diffusion.models import flux2 as flux2
from mmrl.policies.diffusion.models import flux_kontext as flux_kontext
from mmrl.policies.diffusion.models import hunyuan as hunyuan
from mmrl.policies.diffusion.models import lcm as lcm
from mmrl.policies.diffusion.models import ltx as ltx
from mmrl.policies.diffusion.models import qwen_edit as qwen_edit
from mmrl.policies.diffusion.models import qwen_image as qwen_image
from mmrl.policies.diffusion.models import sana as sana
from mmrl.policies.diffusion.models import sd3 as sd3
from mmrl.policies.diffusion.models import stable_diffusion as stable_diffusion
from mmrl.policies.diffusion.models import wan as wan
from mmrl.policies.diffusion.models import wan_i2v as wan_i2v
from mmrl.policies.diffusion.models import z_image as z_image
from mmrl.policies.image_tokens.models import emu3 as emu3
from mmrl.policies.image_tokens.models import glm_image as glm_image
from mmrl.policies.image_tokens.models import janus as janus
from mmrl.policies.image_tokens.models import llamagen as llamagen
from mmrl.policies.image_tokens.models import var as var
from mmrl.policies.masked import amused as amused
from mmrl.policies.masked import masked_image_lm as masked_image_lm
from mmrl.policies.masked import masked_lm as masked_lm
from mmrl.policies.unified import local_flow as local_flow
from mmrl.policies.unified import local_masked as local_masked
from mmrl.policies.unified.policy import JanusUnified as JanusUnified
from mmrl.policies.vlm import policy as policy

"""Advantages say what a reward is worth beside others; ``mmrl.core.registry.ADVANTAGES`` names
them."""

from mmrl.advantages.all_samples import all_samples
from mmrl.advantages.branch import Branch, by_edge
from mmrl.advantages.ddpo import DDPO
from mmrl.advantages.group import group
from mmrl.advantages.online import MaxMin, Running
from mmrl.advantages.presets import dance_grpo, dr_grpo, flow_grpo, gdpo, grpo, rloo
from mmrl.advantages.process import process
from mmrl.advantages.sequence_level import gpg, opo, pass_at_k, reinforce, reinforce_pp
from mmrl.advantages.shaping import focal, ngrpo, pairs, soft, temporal
from mmrl.advantages.summary import outcomes, statistics
from mmrl.advantages.tree_mean import tree_mean

__all__ = [
    "Branch",
    "DDPO",
    "MaxMin",
    "Running",
    "all_samples",
    "by_edge",
    "dance_grpo",
    "dr_grpo",
    "flow_grpo",
    "focal",
    "gdpo",
    "gpg",
    "group",
    "grpo",
    "ngrpo",
    "opo",
    "outcomes",
    "pairs",
    "pass_at_k",
    "process",
    "reinforce",
    "reinforce_pp",
    "rloo",
    "tree_mean",
    "soft",
    "statistics",
    "temporal",
]

"""Advantages: what a reward is worth beside the others. ``mmrl.registry.ADVANTAGES`` knows them by
name."""

from mmrl.advantages.answers import gpg, grpo, opo, pass_at_k, reinforce, reinforce_pp
from mmrl.advantages.branch import Branch, by_edge
from mmrl.advantages.ddpo import DDPO
from mmrl.advantages.grouped import dance_grpo, dr_grpo, flow_grpo, gdpo, group, rloo
from mmrl.advantages.online import MaxMin, Running
from mmrl.advantages.shaping import focal, ngrpo, pairs, soft, temporal
from mmrl.advantages.shared import tree_mean
from mmrl.advantages.steps import process
from mmrl.advantages.summary import outcomes, statistics

__all__ = [
    "Branch",
    "DDPO",
    "MaxMin",
    "Running",
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

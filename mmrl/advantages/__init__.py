"""Advantages say what a reward is worth beside others; ``mmrl.core.registry.ADVANTAGES`` names
them."""

from mmrl.advantages.all_samples import all_samples
from mmrl.advantages.baseline import AAPO, PVPO, SingleStream
from mmrl.advantages.branch import Branch, by_edge
from mmrl.advantages.ddpo import DDPO
from mmrl.advantages.entropy import edge_grpo, hapo, recorded
from mmrl.advantages.filtered import Filtered
from mmrl.advantages.group import group
from mmrl.advantages.likelihood import GCPO, gtpo, unlikeliness
from mmrl.advantages.memory import capture, restore
from mmrl.advantages.online import MaxMin, Running
from mmrl.advantages.pivot import BRPO
from mmrl.advantages.presets import dance_grpo, dr_grpo, flow_grpo, gdpo, grpo, rloo
from mmrl.advantages.process import parts_of, process
from mmrl.advantages.risk import RiskPO
from mmrl.advantages.sequence_level import gpg, opo, pass_at_k, reinforce, reinforce_pp
from mmrl.advantages.shaping import focal, ngrpo, pairs, soft, temporal
from mmrl.advantages.strata import strata
from mmrl.advantages.summary import outcomes, statistics
from mmrl.advantages.tree_mean import tree_grpo, tree_mean
from mmrl.advantages.weighted import COPO, asymre, bnpo, drpo, grpo_lead, mapo, noise_aware

__all__ = [
    "AAPO",
    "BRPO",
    "COPO",
    "Branch",
    "DDPO",
    "GCPO",
    "Filtered",
    "MaxMin",
    "PVPO",
    "RiskPO",
    "Running",
    "SingleStream",
    "asymre",
    "bnpo",
    "all_samples",
    "by_edge",
    "capture",
    "dance_grpo",
    "dr_grpo",
    "drpo",
    "edge_grpo",
    "flow_grpo",
    "focal",
    "gdpo",
    "gpg",
    "group",
    "grpo",
    "grpo_lead",
    "gtpo",
    "hapo",
    "mapo",
    "ngrpo",
    "noise_aware",
    "opo",
    "outcomes",
    "pairs",
    "parts_of",
    "pass_at_k",
    "process",
    "recorded",
    "reinforce",
    "reinforce_pp",
    "restore",
    "rloo",
    "soft",
    "statistics",
    "strata",
    "temporal",
    "tree_grpo",
    "tree_mean",
    "unlikeliness",
]

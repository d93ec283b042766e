"""Objectives: what to minimise, and where. Importing this registers them."""

from mmrl.objectives.base import Objective as Objective
from mmrl.objectives.base import frozen as frozen
from mmrl.objectives.consistency import Consistency as Consistency
from mmrl.objectives.covariance import ClipCov as ClipCov
from mmrl.objectives.covariance import KLCov as KLCov
from mmrl.objectives.distillation import Distill as Distill
from mmrl.objectives.distribution_matching import DistributionMatching as DistributionMatching
from mmrl.objectives.forward_process.awm import AWM as AWM
from mmrl.objectives.forward_process.crd import CRD as CRD
from mmrl.objectives.forward_process.dgpo import DGPO as DGPO
from mmrl.objectives.forward_process.fpo import FPO as FPO
from mmrl.objectives.forward_process.nft import NFT as NFT
from mmrl.objectives.forward_process.reward_weighted import (
    RewardWeightedRegression as RewardWeightedRegression,
)
from mmrl.objectives.group_contrast import DRPO as DRPO
from mmrl.objectives.group_contrast import PACS as PACS
from mmrl.objectives.group_contrast import REAL as REAL
from mmrl.objectives.group_contrast import DisCO as DisCO
from mmrl.objectives.group_contrast import MultiPreference as MultiPreference
from mmrl.objectives.group_loss import GroupLoss as GroupLoss
from mmrl.objectives.group_preference import DPO as DPO
from mmrl.objectives.group_preference import IPO as IPO
from mmrl.objectives.group_preference import KTO as KTO
from mmrl.objectives.group_preference import ORPO as ORPO
from mmrl.objectives.group_preference import P3O as P3O
from mmrl.objectives.group_preference import REBEL as REBEL
from mmrl.objectives.group_preference import CoPG as CoPG
from mmrl.objectives.group_preference import SimPO as SimPO
from mmrl.objectives.group_regression import GVPO as GVPO
from mmrl.objectives.group_regression import OPMD as OPMD
from mmrl.objectives.group_regression import ALoL as ALoL
from mmrl.objectives.group_regression import RegGRPO as RegGRPO
from mmrl.objectives.grpo_guard import Guard as Guard
from mmrl.objectives.hapo import HAPO as HAPO
from mmrl.objectives.laser import LaSeR as LaSeR
from mmrl.objectives.masked import Masked as Masked
from mmrl.objectives.policy_gradient import PolicyGradient as PolicyGradient
from mmrl.objectives.preference import D3PO as D3PO
from mmrl.objectives.preference import DiffusionDPO as DiffusionDPO
from mmrl.objectives.preference import SePPO as SePPO
from mmrl.objectives.reward_gradient import AdjointMatching as AdjointMatching
from mmrl.objectives.reward_gradient import Draft as Draft
from mmrl.objectives.supervised import SFT as SFT
from mmrl.objectives.supervised import Supervised as Supervised
from mmrl.objectives.trust_region import FlowDPPO as FlowDPPO
from mmrl.objectives.unified import Unified as Unified

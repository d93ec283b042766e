"""Objectives: what to minimise, and where. Importing this registers them."""

from .awm import AWM as AWM
from .base import Coupled as Coupled
from .base import Differentiates as Differentiates
from .base import Lagging as Lagging
from .base import Objective as Objective
from .base import frozen as frozen
from .covariance import ClipCov as ClipCov
from .covariance import KLCov as KLCov
from .crd import CRD as CRD
from .dgpo import DGPO as DGPO
from .direct import AdjointMatching as AdjointMatching
from .direct import Draft as Draft
from .dppo import FlowDPPO as FlowDPPO
from .fpo import FPO as FPO
from .guard import Guard as Guard
from .nft import NFT as NFT
from .policy_gradient import PolicyGradient as PolicyGradient
from .policy_gradient import clipped as clipped
from .preference import D3PO as D3PO
from .preference import DiffusionDPO as DiffusionDPO
from .preference import SePPO as SePPO
from .regression import RewardWeightedRegression as RewardWeightedRegression
from .regressions import GVPO as GVPO
from .regressions import REAL as REAL
from .regressions import RegGRPO as RegGRPO
from .text import Text as Text

"""Objectives: what to minimise, and where. Importing this registers them."""

from .awm import AWM as AWM
from .base import Coupled as Coupled
from .base import Lagging as Lagging
from .base import Objective as Objective
from .base import frozen as frozen
from .covariance import ClipCov as ClipCov
from .covariance import KLCov as KLCov
from .dgpo import DGPO as DGPO
from .dppo import FlowDPPO as FlowDPPO
from .guard import Guard as Guard
from .nft import NFT as NFT
from .policy_gradient import PolicyGradient as PolicyGradient
from .policy_gradient import clipped as clipped
from .preference import DiffusionDPO as DiffusionDPO
from .regression import RewardWeightedRegression as RewardWeightedRegression
from .text import Text as Text

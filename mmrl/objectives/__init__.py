"""Objectives: what to minimise, and where. Importing this registers them."""

from .base import Coupled as Coupled
from .base import Lagging as Lagging
from .base import Objective as Objective
from .base import frozen as frozen
from .policy_gradient import PolicyGradient as PolicyGradient
from .policy_gradient import clipped as clipped

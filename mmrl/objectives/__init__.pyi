from .base import Objective as Objective
from .base import frozen as frozen
from .policy_gradient import PolicyGradient as PolicyGradient
from .supervised import SFT as SFT
from .supervised import Supervised as Supervised

"""Terms of the policy gradient, in the order in which they are applied."""

from mmrl.objectives.terms.base import Scored as Scored
from mmrl.objectives.terms.base import Term as Term
from mmrl.objectives.terms.entropy import EntropyBonus as EntropyBonus
from mmrl.objectives.terms.imitation import Imitation as Imitation
from mmrl.objectives.terms.imitation import Shaping as Shaping
from mmrl.objectives.terms.importance_sampling import ImportanceSampling as ImportanceSampling
from mmrl.objectives.terms.kl_penalty import KLPenalty as KLPenalty
from mmrl.objectives.terms.off_policy import OffPolicyMask as OffPolicyMask
from mmrl.objectives.terms.shares import TimestepShare as TimestepShare
from mmrl.objectives.terms.shares import TimestepWeighting as TimestepWeighting
from mmrl.objectives.terms.shares import TopEntropy as TopEntropy

TERMS: tuple[type[Term], ...] = (
    ImportanceSampling,  # over whole samples, before decisions are left out
    OffPolicyMask,
    TopEntropy,
    TimestepShare,
    TimestepWeighting,
    Shaping,
    Imitation,  # divides the policy loss, to which the next two are added
    KLPenalty,
    EntropyBonus,
)
# those that apply to models that write tokens
OF_TOKENS = tuple(term for term in TERMS if term.of != "steps")

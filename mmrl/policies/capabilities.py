"""Lists what a family of policies can do, for checks before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

NOISELESS = (  # of an objective, and of a policy whose sampler draws no noise
    "needs steps with noise, of which this policy has none: give it a stochastic sde_type and a "
    "noise_level above 0 (sde_type: flow_sde, noise_level: 0.7), more steps where the last has no "
    "noise (of a pipeline with a strength, raise that) or another noise_window, or take an "
    "objective of finished samples: dgpo, nft, awm, fpo, crd, rwr, diffusion_dpo"
)
Medium = Literal["image", "video", "text"]
# "mixed": tokens and denoising steps of an image in one sample
Decisions = Literal["gaussian", "categorical", "mixed"]


@dataclass(frozen=True)
class Capabilities:
    """What a family of policies can do; the configuration is checked against it."""

    # what a decision is drawn from; objectives that need one kind refuse the other
    decisions: Decisions
    # what ``decode`` returns; None: unknown, and no reward is refused
    makes: Medium | None = None
    sound: bool = False  # its videos may have one, ``mmrl.core.media.sound``
    one_pass: bool = True  # one forward pass scores all tokens of an answer
    # parts of its context that ``rollout`` supports: a ground truth may replace one answer of a
    # group, an answer may start with the accepted prefix of an earlier one
    ground_truth: bool = False
    drafts: bool = False


def capabilities_of(policy: Any) -> Capabilities | None:
    """Look up the ``Capabilities`` of a policy (an object or a class); None for a factory
    function."""
    return cast(Capabilities | None, getattr(policy, "capabilities", None))

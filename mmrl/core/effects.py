"""Declares what an option does to an iteration, once, where the option is written: a stage has
``effects``, any other option has them in its annotation, ``Annotated[int, Effects(...)]``; and what
an objective or an advantage needs, in its ``requires``.

``mmrl.config.effects`` derives from it what goes with what: no list elsewhere names an option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Resumes = Literal["free", "warned", "refused"]
Reads = Literal["path", "decisions", "sample"]  # states of a path that somebody needs


@dataclass(frozen=True)
class Effects:
    """States what an option of ``train``, or a stage, does to an iteration; of options of a policy
    only the last four are asked. What follows from others need not be said: who looks at samples
    is idle without them, and who returns rows looks at them, exchanges and renames rows."""

    # does nothing where answers come from the data
    idle_without_samples: bool = False
    # needs the samples of an iteration before those of the next are drawn
    looks_at_samples: bool = False
    # changes the policy, or its context, in ways that a worker elsewhere does not hear of
    changes_sampling: bool = False
    # leaves answers of an iteration to the next
    writes_in_parts: bool = False
    # lets answers begin with earlier ones
    begins_answers: bool = False
    # exchanges, adds or remembers single rows of a group, which those of a tree are not
    exchanges_rows: bool = False
    # gives rows other names, which are the key of the noise on their paths
    renames_rows: bool = False
    # puts rows of earlier iterations beside those of this one
    returns_rows: bool = False
    # puts answers that others made in groups
    brings_answers: bool = False
    # a dry run, which has neither weights nor data, takes it as it is; False: leaves it out
    in_dry_run: bool = True
    # what a change means for a run that goes on
    resumes: Resumes = "warned"
    # samples share their beginnings
    branches: bool = False
    # settles how many rows a pass has
    sizes_passes: bool = False
    # decides which weights a policy trains: a stage that goes on with those of another has the same
    chooses_weights: bool = False

    def __post_init__(self) -> None:
        follows = {
            "looks_at_samples": self.returns_rows,
            "exchanges_rows": self.returns_rows,
            "renames_rows": self.returns_rows,
            "idle_without_samples": self.returns_rows or self.looks_at_samples,
        }
        for name in (name for name, is_so in follows.items() if is_so):
            object.__setattr__(self, name, True)


FREE_AT_RESUME = Effects(resumes="free")  # where, how fast, what is kept of it: not what is learned
REFUSED_AT_RESUME = Effects(resumes="refused")  # the run would be another
CHOOSES_WEIGHTS = Effects(resumes="refused", chooses_weights=True)


@dataclass(frozen=True)
class Requires:
    """States what an objective needs and does: of a class, before a model is built, and of an
    instance, whose options may change it. An advantage states ``decisions`` alone."""

    # of which kind the policy's decisions must be; "": any
    decisions: Literal["", "gaussian", "categorical", "masked", "one pass"] = ""
    # trains tokens and steps of pictures in one sample
    mixes: bool = False
    # states of a path that it needs: all, those before and after decisions, the finished one
    reads: Reads = "path"
    # evaluates steps with noise: a sampler without any is refused
    visits: bool = False
    # samples must not share steps of their paths, as those of trees do
    single_paths: bool = False
    # learns from answers in the data: see ``mmrl.objectives.supervised``
    supervised: bool = False
    # learns from compared answers that others made (``train.preferences``), and from single ones
    offline: bool = False
    unpaired: bool = False
    # learns from finished pictures of others
    imitates: bool = False
    # uses advantages; else the rewards are only measured
    compares: bool = True
    # the loss of a row of advantage 0 has no gradient but that of ``extra_terms``
    proportional: bool = False
    # follows the gradient of the rewards, which ``attach`` hands over
    differentiates: bool = False
    # corrects for samples of another engine or of older weights
    corrects: bool = False
    # has points of several kinds: its loss is the sum of their means, and their passes are unlike
    sums_kinds: bool = False

    def states_read(self) -> Reads:
        """Return which states of paths are kept: without steps with noise, the finished one
        alone."""
        return "sample" if self.reads == "decisions" and not self.visits else self.reads

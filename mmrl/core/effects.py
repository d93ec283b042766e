"""Declares what an option does to an iteration, where the option is defined: a stage has
``effects``, any other option an annotation, ``Annotated[int, Effects(...)]``; an objective or
advantage declares its needs in ``requires``.

``mmrl.config.effects`` derives from it which options can be combined: no list elsewhere names an
option.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Resumes = Literal["free", "warned", "refused"]
Reads = Literal["path", "decisions", "sample"]  # states of a path that are needed


@dataclass(frozen=True)
class Effects:
    """States what an option of ``train``, or a stage, does to an iteration; options of a policy use
    only the last four. Implied effects need not be declared: an option that reads samples is idle
    without them, and one that returns rows reads samples, exchanges and renames rows."""

    # does nothing if answers come from the data
    idle_without_samples: bool = False
    # needs the samples of an iteration before those of the next are drawn
    looks_at_samples: bool = False
    # changes the policy, or its context, without updating remote workers
    changes_sampling: bool = False
    # leaves answers of an iteration to the next
    writes_in_parts: bool = False
    # starts answers with prefixes of earlier ones
    begins_answers: bool = False
    # exchanges, adds or stores single rows of a group; rows of a tree are not independent
    exchanges_rows: bool = False
    # renames rows; names are the key of the noise on their paths
    renames_rows: bool = False
    # adds rows of earlier iterations to those of this one
    returns_rows: bool = False
    # adds external answers (demonstrations) to groups
    brings_answers: bool = False
    # a dry run, without weights and data, keeps it; False: leaves it out
    in_dry_run: bool = True
    # what a change means for a resumed run
    resumes: Resumes = "warned"
    # samples share their beginnings
    branches: bool = False
    # sets the number of rows in a forward pass
    sizes_passes: bool = False
    # decides which weights are trained: a stage that continues from another must agree
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


FREE_AT_RESUME = Effects(resumes="free")  # where, how fast, what is saved: not what is learned
REFUSED_AT_RESUME = Effects(resumes="refused")  # the run would be another
CHOOSES_WEIGHTS = Effects(resumes="refused", chooses_weights=True)


@dataclass(frozen=True)
class Requires:
    """States what an objective needs and does: of a class, before a model is built, and of an
    instance, whose options may change it. An advantage states ``decisions`` alone."""

    # required kind of the policy's decisions; "": any
    decisions: Literal["", "gaussian", "categorical", "masked", "one pass"] = ""
    # trains tokens and steps of pictures in one sample
    mixes: bool = False
    # states of a path that it needs: all, those before and after decisions, the finished one
    reads: Reads = "path"
    # evaluates steps with noise: deterministic samplers are refused
    visits: bool = False
    # samples must not share steps of their paths, as in trees
    single_paths: bool = False
    # learns from answers in the data: see ``mmrl.objectives.supervised``
    supervised: bool = False
    # learns from external preference pairs (``train.preferences``), and from single answers
    offline: bool = False
    unpaired: bool = False
    # learns from external pictures
    imitates: bool = False
    # uses advantages; else the rewards are only measured
    compares: bool = True
    # a row of advantage 0 has no gradient except that of ``extra_terms``
    proportional: bool = False
    # uses the gradient of the rewards, passed to ``attach``
    differentiates: bool = False
    # corrects for samples of another engine or of older weights (importance sampling)
    corrects: bool = False
    # has points of several kinds: its loss is the sum of their means, and their passes differ
    sums_kinds: bool = False

    def states_read(self) -> Reads:
        """Return which states of paths are kept: without steps with noise, only the final one."""
        return "sample" if self.reads == "decisions" and not self.visits else self.reads

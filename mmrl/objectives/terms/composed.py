"""The part of an objective with terms that forwards to them what happens around the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from mmrl.core.types import Rewards, Rollout
from mmrl.core.weights import Weights
from mmrl.objectives.contracts import MovesSnapshots, ShapesRewards, Stateful, WeighsPoints
from mmrl.objectives.terms.base import Term
from mmrl.policies.base import Policy
from samplers.noise import Rng

T = TypeVar("T", bound=Term)


class Composed(MovesSnapshots, ShapesRewards, WeighsPoints, Stateful):
    """An objective with terms, whose fields are options of its constructor (``**options``) and
    whose state is saved with it."""

    # a subclass may leave some out, or have its own
    term_types: ClassVar[tuple[type[Term], ...]] = ()

    def compose(self, options: dict[str, Any]) -> None:
        """Make the terms, each from its own options. Raises TypeError for options of none."""
        known = {f.name for kind in self.term_types for f in fields(kind)}
        if unknown := options.keys() - known:
            name = type(self).__name__
            raise TypeError(f"{name}() got an unexpected keyword argument {min(unknown)!r}")
        self.terms = [
            kind(**{f.name: options[f.name] for f in fields(kind) if f.name in options})
            for kind in self.term_types
        ]
        for term in self.terms:
            # subclasses read the options as they would of any base
            vars(self).update({f.name: getattr(term, f.name) for f in fields(term)})
        self.active = [term for term in self.terms if term.active()]
        self.snapshots = tuple(name for term in self.active for name in term.snapshots())
        self.requires = replace(
            self.requires,
            single_paths=any(term.single_paths() for term in self.active),
            corrects=any(term.corrects for term in self.active),
            imitates=any(term.imitates for term in self.active),
        )

    def term(self, kind: type[T]) -> T:
        """Return the term of a kind."""
        return next(term for term in self.terms if isinstance(term, kind))

    def extra_terms(self) -> str:
        return next((name for t in self.active if t.moves_all() for name in t.chosen()), "")

    def before_step(self, masks: Sequence[tuple[Tensor, bool]]) -> None:
        for term in self.active:
            term.before_step(masks)

    def shaped(self, policy: Policy, rollout: Rollout, rewards: Rewards) -> Rewards:
        for term in self.active:
            rewards = term.shaped(policy, rollout, rewards)
        return rewards

    def begin_iteration(self, weights: Weights, iteration: int, rng: Rng) -> None:
        for term in self.active:
            term.begin_iteration(weights, iteration)

    def restarts(self, iteration: int) -> bool:
        return any(term.restarts(iteration) for term in self.active)

    def adapt(self, iteration: int, metrics: dict[str, float]) -> None:
        for term in self.terms:
            term.adapt(iteration, metrics)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for term in self.terms for key, value in term.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for term in self.terms:
            term.load_state_dict(state)

"""Predicts the value of every prompt by a value model trained alongside the policy: for the
advantage ``pvpo`` (A-LoL) and the data source ``pcl`` (Prompt Curriculum Learning)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from mmrl.advantages.groups import measured
from mmrl.core import distributed
from mmrl.core.effects import Effects
from mmrl.core.errors import UserError, called
from mmrl.core.numbers import Count
from mmrl.core.registry import STAGES
from mmrl.core.types import Prompt
from mmrl.data.base import Curriculum
from mmrl.policies.contracts import ReadsPrompts
from mmrl.rollout.stages import Drawn, KnowsPrompts, Sample, Setup
from mmrl.zoo.advantages.baseline import read_references
from mmrl.zoo.stages.value_network import ValueNetwork, ValueOptions


@STAGES.register("prompt_value")
@dataclass
class PromptValues(ValueOptions, KnowsPrompts):
    """Predicts the value of every prompt by a value model trained alongside the policy.

    The model is the policy's initial network with a head on its hidden state of the prompt.

    ``base``: that network is frozen (A-LoL) or trained with the head (PCL: a model of the policy's
    size; only the trainable weights, such as adapters, are duplicated). ``width``: of the head's
    hidden layer; 0: it is linear. ``start``: the value of every prompt before the first step.
    ``lr``: of Adam for the head. ``base_lr``: of Adam for the network. ``steps``: optimizer steps
    on the squared error of an iteration's prompts. ``learn``: from the mean reward of every group;
    false: only from ``path``. ``path``: reference rewards as written by
    ``mmrl.apps.prepare.reference_rewards``, to which the model is fitted before the first
    iteration. ``epochs``: passes over ``path``. ``batch``: its prompts in an optimizer step.
    ``key``: the field that identifies a prompt there.

    Rows get the value of their prompt (the record ``value`` [B]) before the model learns from the
    rewards of this iteration.
    """

    learn: bool = True
    path: Path | None = None
    epochs: Count = 20
    batch: Count = 64
    key: str = "text"
    saved_as = "prompt_value"
    effects = Effects(looks_at_samples=True)

    def __post_init__(self) -> None:
        if not self.learn and self.path is None:
            raise UserError("prompt_value: with learn: false nothing is learnt; set path")

    def setup(self, setup: Setup) -> None:
        self.prompts = setup.prompts
        self.network = ValueNetwork(setup.policy, self, setup.options.seed)
        self.origins = {}
        self.fitted = self.path is None
        self.references = {} if self.path is None else read_references(self.path, self.key)
        if self.references and not any(self._names(prompt) for prompt in self.prompts):
            raise UserError(
                f"train.stages.prompt_value: {self.path} has no reward for any prompt of the "
                f"data; key names the field of a prompt that its lines repeat"
            )
        if isinstance(self.prompts, Curriculum):
            self.prompts.predict_by(self._predict)

    @classmethod
    def unfit(cls, options: PromptValues, policy: Any) -> Iterator[tuple[str, str]]:
        if options.base == "trained" and not ReadsPrompts.kept_by(policy):
            yield (
                "",
                f"base: trained is for policies whose own network reads the prompt (vlm); "
                f"{called(policy)} sees what an encoder makes of it: set base to frozen",
            )

    def groups(
        self, drawn: Drawn, iteration: int, sample: Sample
    ) -> tuple[Drawn, dict[str, float]]:
        self._fit()
        rollout = drawn.rollout
        known = [self.origins.get(id(prompt), prompt) for prompt in rollout.prompts]
        values = self.network.of(known)
        of_rows = values[rollout.group]
        count = torch.tensor(float(len(known)), device=values.device).double()
        mean, number = distributed.all_sum(torch.stack([values.sum(), count])).tolist()
        metrics = {"prompt_value/mean": mean / number}
        if self.learn:
            metrics["prompt_value/error"] = self._learn(drawn)
        rollout = rollout.recorded("value", of_rows.to(rollout.logprob), of_prompts=True)
        return replace(drawn, rollout=rollout), metrics

    def _learn(self, drawn: Drawn) -> float:
        """Learn from the mean reward of every group that the policy sampled itself."""
        rollout, rewards = drawn.sampled()
        double, groups = measured(rewards.per_row(), rollout)
        means = groups.mean(double.total()).tolist()
        names = rollout.group.unique().tolist()
        sizes = groups.size().tolist()
        scored = [
            (self.origins.get(id(rollout.prompts[name]), rollout.prompts[name]), mean)
            for name, mean, size in zip(names, means, sizes, strict=True)
            if size
        ]
        idle = self.origins.get(id(rollout.prompts[0]), rollout.prompts[0])
        return self.network.learn([p for p, _ in scored], [mean for _, mean in scored], idle)

    def _predict(self, prompts: Sequence[Prompt]) -> list[float]:
        self._fit()
        return self.network.predict(prompts)

    def _fit(self) -> None:
        """Fit the model to the rewards of a reference, once, for ``epochs`` epochs."""
        if self.fitted:
            return
        self.fitted = True
        rank, size = distributed.world()
        every = [prompt for prompt in self.prompts if self._names(prompt)]
        width = self.batch
        for _ in range(self.epochs):
            for first in range(0, len(every), width):
                prompts = every[first : first + width][rank::size]
                rewards = [fmean(self.references[str(p[self.key])]) for p in prompts]
                self.network.learn(prompts, rewards, every[0])

    def _names(self, prompt: Prompt) -> bool:
        return str(prompt.get(self.key)) in self.references

    def state_dict(self) -> tuple[dict[str, Tensor], Any]:
        return self.network.state_dict(), {"step": self.network.step, "fitted": self.fitted}

    def load_state_dict(self, tensors: Mapping[str, Tensor], plain: Any) -> None:
        if plain is not None:
            self.network.load_state_dict(tensors, plain["step"])
            self.fitted = plain["fitted"]

"""Supervised fine-tuning on answers in the data, for every family of models.

Nothing is sampled and nothing is rewarded; the policy turns answers into the samples that it would
have made (``Demonstrates.demonstrate``), and the loss is that of the model's own pre-training.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from mmrl.core.effects import Requires
from mmrl.core.errors import UserError
from mmrl.core.metrics import observe
from mmrl.core.numbers import Draws
from mmrl.core.registry import OBJECTIVES, TIMES
from mmrl.core.types import Point, Prompt, Renoised, Rollout
from mmrl.objectives.contracts import ChecksRows
from mmrl.objectives.forward_process import mean_square, noised, velocity
from mmrl.objectives.timestep_samplers import TimeSampler, uniform
from mmrl.policies.base import Policy
from mmrl.policies.capabilities import capabilities_of
from mmrl.policies.contracts import Demonstrates, Remasks, WritesText
from samplers.noise import Rng

FIELD = re.compile(r"\{(\w+)\}")
THOUGHT = ("<think>", "</think>")
EMPTY = "\n\n"  # what a dropped thought leaves between its tags (TON)
SHOWN = 5  # broken rows in a message
LEAST = 1e-3  # smallest share of hidden tokens under the bound, LLaDA's: the weight is at most 1000


class Supervised(ChecksRows):
    """Learns from answers in the data: nothing is sampled, rewarded or compared."""

    requires = Requires(supervised=True)

    @abstractmethod
    def answers(self, policy: Demonstrates, prompts: Sequence[Prompt], rng: Rng) -> list[Any]:
        """Return the answer to each prompt, as ``Demonstrates.demonstrate`` takes it."""

    @abstractmethod
    def check(self, policy: Policy, prompts: Sequence[Prompt]) -> None:
        """Raise UserError, with file and line, if a row has no usable answer."""

    def trimmed(self, policy: Policy, rollout: Rollout, answers: Sequence[Any]) -> Rollout:
        """Remove decisions from ``mask`` that are not trained on."""
        return rollout


@OBJECTIVES.register("sft")
@dataclass
class SFT(Supervised):
    """Minimise the loss of answers in the data: supervised fine-tuning (SFT), for every family.

    Tokens: -log p(answer | prompt), at temperature 1, without guidance and with nothing cut off.
    Masked models: -log p of hidden tokens at a random share t of them; ``masking`` elbo draws t
    uniformly from [1e-3, 1], hides each token with probability t and weights by 1 / t (LLaDA, Nie
    et al. 2025), maskgit draws t = cos(pi u / 2), hides at least one token, all of equal weight
    (Chang et al. 2022); auto is elbo for texts and maskgit for images. Flows and
    diffusion: the mean squared error of the network's output at fresh noise, ``num_noise_draws``
    times a row at times of ``timestep_sampler``; ``weighting`` min_snr weights the error of the
    predicted clean sample by min(SNR, gamma) (Hang et al. 2023, eq. 8), plain takes the error of
    what the network predicts.

    field: of the data's row, that holds the answer: a text, or a path of a picture or video.
    template: the answer's text with {fields} of the row in it, such as
    "<think>{thought}</think><answer>{answer}</answer>"; null: the field alone. thought_dropout:
    share of answers whose thought, between <think> and </think>, is emptied, drawn again at every
    visit (TON, Wang et al. 2025, uses 0.5). train_on: the tokens that are trained: all, those of
    the thought with its tags, or those after it.

    masking: of masked models: auto, elbo or maskgit. timestep_sampler: draws the times of flows and
    diffusion. num_noise_draws: times of a row. weighting: plain, or min_snr. gamma: of min_snr.
    """

    place: ClassVar[str] = "objective.sft"  # its options, in messages

    field: str = "answer"
    template: str | None = None
    thought_dropout: Annotated[float, Ge(0), Le(1)] = 0.0
    train_on: Literal["all", "thought", "answer"] = "all"
    masking: Literal["auto", "elbo", "maskgit"] = "auto"
    timestep_sampler: Annotated[TimeSampler, TIMES] = uniform
    num_noise_draws: Draws = 1
    weighting: Literal["plain", "min_snr"] = "plain"
    gamma: Annotated[float, Gt(0)] = 5.0

    def unfit(self, policy: Any) -> Iterator[tuple[str, str]]:
        can = capabilities_of(policy)
        if can is None:
            return
        if not Demonstrates.kept_by(policy):
            yield "field", "this policy takes no demonstrations"
        for option in ("template", "thought_dropout"):
            if getattr(self, option) and can.makes in ("image", "video"):
                yield option, f"it is for answers in text, and this policy makes {can.makes}s"
        if self.train_on != "all" and (can.makes != "text" or Remasks.kept_by(policy)):
            yield "train_on", "it is for vision-language models: vlm"
        if self.weighting != "plain" and can.decisions != "gaussian":
            yield "weighting", "it is for flow and diffusion models"

    # ----------------------------------------------------------------------------------------------
    # answers

    def answers(self, policy: Demonstrates, prompts: Sequence[Prompt], rng: Rng) -> list[Any]:
        draws = rng.fold("thoughts").uniform(rng.rows(len(prompts), 1)).tolist()
        return [
            self._answer(policy, prompt, draw < self.thought_dropout)
            for prompt, draw in zip(prompts, draws, strict=True)
        ]

    def _answer(self, policy: Demonstrates, prompt: Prompt, is_dropped: bool) -> Any:
        medium = policy.medium_of(prompt)
        if medium in ("image", "video", None):
            return policy.open_answer(prompt, prompt[self.field])
        text = self.text(prompt)
        return without_thought(text) if is_dropped else text

    def text(self, prompt: Prompt) -> str:
        """Return the whole answer as text."""
        template = self.template or f"{{{self.field}}}"
        return FIELD.sub(lambda match: str(prompt[match[1]]), template)

    def check(self, policy: Policy, prompts: Sequence[Prompt]) -> None:
        problems = []
        policy = Demonstrates.of(policy)
        for prompt in prompts:
            if why := self._problem(policy, prompt):
                place = prompt.get("origin") or repr(str(prompt.get("text", ""))[:60])
                problems.append(f"{place}: {why}")
        if problems:
            rest = f"\n    and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise UserError(
                f"{len(problems)} of {len(prompts)} rows have no answer to learn from:\n    "
                + "\n    ".join(problems[:SHOWN])
                + rest
            )

    def _problem(self, policy: Demonstrates, prompt: Prompt) -> str | None:
        """Describe what is wrong with a row's answer; None: nothing."""
        medium = policy.medium_of(prompt)
        names = FIELD.findall(self.template) if self.template and medium == "text" else [self.field]
        for name in names:
            if prompt.get(name) is None or prompt[name] == "":
                known = ", ".join(key for key in prompt if key != "origin")
                return (
                    f"no {name!r}, which holds the answer; it has {known}; add it, or name "
                    f"another with {self.place}.field"
                )
        if medium == "text":
            return self._text_problem(prompt)
        return policy.unreadable(prompt, prompt[self.field])

    def _text_problem(self, prompt: Prompt) -> str | None:
        if not isinstance(prompt.get(self.field, ""), (str, int, float)):
            return (
                f"{self.field!r} is {type(prompt[self.field]).__name__}, expected text; name the "
                f"field that holds the whole answer with {self.place}.field, or write a template"
            )
        thinks = self.thought_dropout > 0 or self.train_on != "all"
        if thinks and not all(tag in self.text(prompt) for tag in THOUGHT):
            return (
                "its answer has no <think> ... </think>, which thought_dropout and train_on look "
                "for; write it, or a template with it"
            )
        return None

    def trimmed(self, policy: Policy, rollout: Rollout, answers: Sequence[Any]) -> Rollout:
        if self.train_on == "all":
            return rollout
        policy = WritesText.of(policy)
        ids = rollout.sample.tolist()
        lengths = rollout.mask.sum(1).tolist()
        ends = [
            thought_tokens(policy, row[:length], answer)
            for row, length, answer in zip(ids, lengths, answers, strict=True)
        ]
        place = torch.arange(rollout.mask.shape[1], device=rollout.mask.device)
        thought = place < torch.tensor(ends, device=place.device)[:, None]
        return rollout.replace(
            mask=rollout.mask & (thought if self.train_on == "thought" else ~thought)
        )

    # ----------------------------------------------------------------------------------------------
    # loss

    def points(self, policy: Policy, rollout: Rollout, rng: Rng) -> Iterable[Point]:
        can = policy.capabilities
        if can.decisions == "gaussian":
            draws = self.num_noise_draws
            return noised(policy, rollout, rng, self.timestep_sampler, draws)
        if isinstance(policy, Remasks):
            return [self._hidden(policy, rollout, rng)]
        return (point.replace(logprob=None, guidance=1.0) for point in policy.path(rollout))

    def _hidden(self, policy: Remasks, rollout: Rollout, rng: Rng) -> Point:
        """Hide a random share of the tokens. ``estimator_weight`` is each token's in the loss."""
        u = rng.uniform(rollout.row_id, (1,), step=0)  # [B, 1]
        draw = rng.uniform(rollout.row_id, rollout.sample.shape[1:], step=1)
        read = rollout.mask
        if self._elbo(policy):
            share = LEAST + (1 - LEAST) * u
            hide = read & (draw < share)
            # the bound's mean is over all tokens of an answer: one with none hidden counts, as 0
            point = policy.at(rollout, hide, read)
            weight = hide / share
        else:
            first = draw.masked_fill(~read, torch.inf)
            forced = first == first.amin(1, keepdim=True)  # MaskGIT rounds their number up
            hide = read & ((draw < torch.cos(u * torch.pi / 2)) | forced)
            point = policy.at(rollout, hide)
            weight = hide.to(u)
        return point.replace(guidance=1.0, estimator_weight=weight.to(rollout.logprob))

    def _elbo(self, policy: Policy) -> bool:
        if self.masking == "auto":
            return policy.capabilities.makes != "image"
        return self.masking == "elbo"

    def loss(self, policy: Policy, point: Point) -> Tensor:
        with policy.untempered():
            dist = policy.dist(point)
            if isinstance(point.step, Renoised):
                error = mean_square(velocity(dist) - point.target)
                observe("denoising_error", error, point.mask)
                return error * self._weight(point)
            loss = -dist.log_prob(point.target)
        where_scored = point.mask
        if point.estimator_weight is not None:
            where_scored = where_scored & (point.estimator_weight > 0)
        # a token that cannot be sampled, such as a suppressed one, is not trained either
        where_scored = where_scored & loss.detach().isfinite()
        loss = torch.where(where_scored, loss, 0.0)
        observe("nll", loss, where_scored)
        return loss if point.estimator_weight is None else loss * point.estimator_weight

    def _weight(self, point: Point) -> Tensor | float:
        """Return the weight of the output's squared error [B, 1]. The clean sample's squared error
        is larger by the square of its derivative in the output."""
        if self.weighting == "plain":
            return 1.0
        step = point.renoised
        if step.snr is None:
            raise UserError("objective.sft.weighting min_snr: this model knows no noise levels")
        weight = step.snr.clamp(max=self.gamma) * step.x0_per_output.square()
        return weight.nan_to_num(0.0)[:, None]


def without_thought(text: str) -> str:
    """Empty the thought of an answer; an answer without one stays as it is."""
    before, opening, rest = text.partition(THOUGHT[0])
    _, closing, behind = rest.partition(THOUGHT[1])
    return f"{before}{opening}{EMPTY}{closing}{behind}" if closing else text


def thought_tokens(policy: WritesText, ids: Sequence[int], answer: str | None) -> int:
    """Count the first tokens of an answer that spell its thought, with both tags."""
    if answer is None or THOUGHT[1] not in answer:
        return 0
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if THOUGHT[1] in policy.text_of(list(ids[:middle])):
            high = middle
        else:
            low = middle + 1
    return low

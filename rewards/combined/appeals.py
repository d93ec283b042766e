"""Fallback judges: as the reward itself, or to estimate how often the first judge is wrong."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Media, Prompt, Reward
from rewards.card import card, card_of
from rewards.combined.members import counters_of, merged, rows_of, scores_of

Part = Annotated[Reward, REWARDS]
LEAST_TRUTH = 0.05  # lower bound of 1 - fp - fn, so that a division by it stays bounded


@REWARDS.register("fall_back")
@card(
    source="[TinyV](https://arxiv.org/abs/2505.14625)",
    scaling="that of its parts, which must be alike",
)
class FallBack:
    """Fallback judge (TinyV): a second reward scores only the samples that the first one rejects.

    R = first if first > above, else max(first, second). TinyV (Xu et al. 2025): a small model
    rechecks what a rule calls wrong, since rules reject many right answers. A sample that the first
    cannot score also goes to the second (our reading); one that the second cannot score is NaN.

    Args:
        first: the cheap reward, such as ``answer``.
        second: the reward of rejected samples, such as a judge.
        above: values of the first up to this are rejections.

    Attributes:
        checked: samples scored by the second so far.
        rescued: those of them that it gave more than ``above``. Both are logged, as
            ``judged/<name>/checked`` and ``rescued``; their quotient is the rescue rate.
    """

    def __init__(self, first: Part, second: Part, above: float = 0.0):
        self.first = first
        self.second = second
        self.above = above
        self.card = merged([first, second])
        if self.card.of == "step":
            raise UserError("fall_back: its parts must be rewards of whole samples, not of steps")
        self.checked = 0
        self.rescued = 0

    @property
    def rescue_rate(self) -> float:
        """Return the share of the checked samples that were rescued; NaN before the first."""
        return self.rescued / self.checked if self.checked else torch.nan

    def counters(self) -> dict[str, float]:
        counts = {"checked": float(self.checked), "rescued": float(self.rescued)}
        return counts | counters_of({"first": self.first, "second": self.second})

    def __call__(self, media: Media, prompts: list[Prompt]) -> Tensor:
        (values,) = scores_of([self.first], media, prompts)
        refused = ~(values > self.above)
        rows = refused.nonzero()[:, 0].tolist()
        if not rows:
            return values
        # a reward of groups must see the others of the group
        asked_rows = list(range(len(prompts))) if card_of(self.second).of == "group" else rows
        (second,) = scores_of(
            [self.second], rows_of(media, asked_rows), [prompts[row] for row in asked_rows]
        )
        second = second[rows] if len(asked_rows) > len(rows) else second
        self.checked += len(rows)
        self.rescued += int((second > self.above).sum())
        first = values[rows].nan_to_num(nan=-torch.inf)
        values = values.clone()
        values[rows] = torch.maximum(first, second)  # NaN if the second is
        return values


@REWARDS.register("noisy_appeals")
@card(
    of="batch",
    source="[Cai et al. 2025](https://arxiv.org/abs/2510.00915)",
    scaling="0/1 becomes numbers outside 0..1, as with noisy",
)
class NoisyAppeals:
    """Correct a 0/1 verifier by its rate of false negatives, measured by appeals to a judge.

    A share of the rejected samples is shown to a second judge. With A accepted and N rejected
    samples of which n were shown and m accepted by the judge, fn = (N m / n) / (A + N m / n), over
    all processes; A, N m / n are decayed sums over iterations. What is paid is ``noisy``'s backward
    form, (r - fp) / (1 - fp - fn), or its forward form, r - 1 + fn (for ``advantage: reinforce``).
    Cai et al. 2025: their lightweight appeals verifier; how many appeal and the decay are our
    reading. Which samples appeal follows from their content, so it depends neither on the order of
    the rows nor on the number of processes.

    Args:
        of: a reward of 0 and 1.
        judge: a reward that says of a rejected sample whether it is right: more than one half.
        share: part of the rejected samples that appeal.
        false_positive: how often a wrong answer is accepted.
        false_negative: how often a right one is rejected, until an appeal was heard.
        decay: of the sums, for each iteration.
        forward: pay the forward form.
    """

    def __init__(
        self,
        of: Part,
        judge: Part,
        share: Annotated[float, Gt(0), Le(1)] = 0.1,
        false_positive: Annotated[float, Ge(0), Lt(1)] = 0.0,
        false_negative: Annotated[float, Ge(0), Lt(1)] = 0.0,
        decay: Annotated[float, Ge(0), Le(1)] = 0.9,
        forward: bool = False,
    ):
        if false_positive + false_negative > 1 - LEAST_TRUTH:
            raise UserError(
                "noisy_appeals: the two error rates add up to about 1 or more: such a verifier "
                "says nothing"
            )
        self.of = of
        self.judge = judge
        self.share = share
        self.fp = false_positive
        self.first_guess = false_negative
        self.decay = decay
        self.forward = forward
        self.card = merged([of, judge], of="batch")
        self.accepted = 0.0  # decayed sums of the iterations of training
        self.wronged = 0.0
        self.latest = (0.0, 0.0)  # both of the last call

    def __call__(
        self,
        media: Media,
        prompts: list[Prompt],
        gather: Callable[[list[list[int]]], list[list[int]]] = list,
    ) -> Tensor:
        """Score [B]; ``gather`` returns the rows of all processes."""
        values = torch.zeros(0)
        counts = [0, 0, 0, 0]
        if prompts:
            (values,) = scores_of([self.of], media, prompts)
            counts = self._heard(values, media, prompts)
        accepted, rejected, shown, granted = (sum(row) for row in zip(*gather([counts])))
        self.latest = (float(accepted), rejected * granted / shown if shown else 0.0)
        fn = self.false_negative()
        return values - 1 + fn if self.forward else (values - self.fp) / (1 - self.fp - fn)

    def _heard(self, values: Tensor, media: Media, prompts: list[Prompt]) -> list[int]:
        """Count what was accepted, rejected, shown to the judge, and granted."""
        if not ((values == 0) | (values == 1) | values.isnan()).all():
            raise UserError(
                f"noisy_appeals corrects rewards of 0 and 1, got {values[:4].tolist()} ..."
            )
        rejected = (values == 0).nonzero()[:, 0].tolist()
        rows = [row for row in rejected if lot(media[row], prompts[row]) < self.share]
        verdicts = torch.zeros(0)
        if rows:
            (verdicts,) = scores_of(
                [self.judge], rows_of(media, rows), [prompts[row] for row in rows]
            )
        heard = verdicts[~verdicts.isnan()]
        return [
            int((values == 1).sum()),
            len(rejected),
            len(heard),
            int((heard > 0.5).sum()),
        ]

    def false_negative(self) -> float:
        """Return the estimated rate of false negatives, with the last call."""
        accepted = self.decay * self.accepted + self.latest[0]
        wronged = self.decay * self.wronged + self.latest[1]
        right = accepted + wronged
        rate = wronged / right if right else self.first_guess
        return min(rate, 1 - LEAST_TRUTH - self.fp)

    def remember(self) -> None:
        """Add the last call, which was one of training, to the sums."""
        self.accepted = self.decay * self.accepted + self.latest[0]
        self.wronged = self.decay * self.wronged + self.latest[1]
        self.latest = (0.0, 0.0)

    def counters(self) -> dict[str, float]:
        return counters_of({"of": self.of, "judge": self.judge})

    def state_dict(self) -> dict[str, Any]:
        return {"accepted": self.accepted, "wronged": self.wronged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.accepted = float(state["accepted"])
        self.wronged = float(state["wronged"])


def lot(sample: Any, prompt: Prompt) -> float:
    """Return a number in 0..1 that follows from a sample and the text of its prompt alone."""
    digest = sha256(str(prompt.get("text", "")).encode())
    if isinstance(sample, Tensor):
        digest.update(sample.detach().float().cpu().contiguous().numpy().tobytes())
    else:
        digest.update(b"\x00" + str(sample).encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest()[:7], "big") / 2**56

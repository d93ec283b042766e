"""Rewards without ground truth: by majority vote, by frequency, by the model's confidence.

Answers are extracted as by the verifiable rewards: the last ``<answer>`` or box, else the text, in
normal form. A text without an answer has no vote and earns 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Completion, Prompt
from rewards.answers.reading import normal, quantity_in, stated
from rewards.base.groups import groups_of
from rewards.card import card


@REWARDS.register("majority_vote")
@card(media="text", of="group", low=0, high=1, source="[TTRL](https://arxiv.org/abs/2504.16084)")
def majority_vote(
    media: Sequence[str],
    prompts: list[Prompt],
    *,
    share: Annotated[float, Ge(0)] = 0.0,
    most: Annotated[float, Ge(0)] = 1.0,
) -> Tensor:
    """Reward the majority answer of the prompt's group (TTRL, SeRL); needs no ground truth.

    In a tie the first answer wins. ``share``: the part of the group that must agree; if fewer do,
    the group has no majority and is left out (NaN). ``most``: the part that may agree; if more do,
    the question is too easy and is also left out (SeRL's difficulty filter has both bounds).
    """
    votes = votes_of(media, "majority_vote")
    scores = torch.zeros(len(media))
    for rows in groups_of(prompts):
        winner, count = leading([votes[row] for row in rows])
        agreed = winner is not None and count >= share * len(rows)
        outside = count > most * len(rows) or (share > 0 and not agreed)
        for row in rows:
            scores[row] = torch.nan if outside else float(agreed and votes[row] == winner)
    return scores


@REWARDS.register("answer_frequency")
@card(media="text", of="group", high=1, source="TTRV, Test-time RL for vision-language models")
def answer_frequency(
    media: Sequence[str], prompts: list[Prompt], *, entropy: Annotated[float, Ge(0)] = 0.0
) -> Tensor:
    """Reward the share of the group with the same answer, minus ``entropy`` times their entropy
    (TTRV).

    The entropy (nats) is the same for a whole group: it matters only for advantages that compare
    prompts.
    """
    votes = votes_of(media, "answer_frequency")
    scores = torch.zeros(len(media))
    for rows in groups_of(prompts):
        counts: Counter[str | None] = Counter(
            vote for row in rows if (vote := votes[row]) is not None
        )
        total = sum(counts.values())
        spread = -sum(n / total * math.log(n / total) for n in counts.values())
        for row in rows:
            scores[row] = counts.get(votes[row], 0) / len(rows) - entropy * spread
    return scores


@REWARDS.register("co_reward")
@card(
    media="text",
    of="batch",
    needs="twin",
    low=0,
    high=1,
    source="[Co-Reward](https://arxiv.org/abs/2508.00410)",
)
class CoReward:
    """Reward agreement with the majority answer to the prompt's twin, a rephrased question
    (Co-Reward).

    Prompts with the same ``twin`` are versions of one question: rephrased, or with the image
    augmented. Each is judged by the vote on the others (Zhang et al. 2025): that of this iteration
    on any process, else the latest earlier one, which is saved in checkpoints; until there is one,
    the prompt's own vote decides.
    """

    def __init__(self) -> None:
        # twin -> version -> its last majority in an earlier call
        self.votes: dict[str, dict[str, str]] = {}
        # twin, version and majority of every group of the last call
        self.latest: list[list[str]] = []

    def __call__(
        self,
        media: Sequence[str],
        prompts: list[Prompt],
        gather: Callable[[list[list[str]]], list[list[str]]] = list,
    ) -> Tensor:
        """Score [B]. ``gather`` returns the rows of all processes; without it there is only this
        one."""
        votes = votes_of(media, "co_reward")
        scores = torch.zeros(len(media))
        groups = groups_of(prompts)
        majorities = []
        for rows in groups:
            winner, _ = leading([votes[row] for row in rows])
            if winner is not None:
                majorities.append([twin(prompts[rows[0]]), version(prompts[rows[0]]), winner])
        self.latest = gather(majorities)
        known = merged_votes(self.votes, self.latest)
        for rows in groups:
            of_twin = known.get(twin(prompts[rows[0]]), {})
            own_version = version(prompts[rows[0]])
            answers = [vote for name, vote in of_twin.items() if name != own_version]
            label, _ = leading(answers or [of_twin.get(own_version)])
            for row in rows:
                scores[row] = float(label is not None and votes[row] == label)
        return scores

    def remember(self) -> None:
        """Keep the votes of the last call; those of an evaluation are dropped."""
        self.votes = merged_votes(self.votes, self.latest)
        self.latest = []

    def state_dict(self) -> dict[str, Any]:
        return {"votes": self.votes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.votes = {name: dict(versions) for name, versions in state["votes"].items()}


def merged_votes(
    before: dict[str, dict[str, str]], latest: Sequence[Sequence[str]]
) -> dict[str, dict[str, str]]:
    """Merge twin -> version -> vote, the latest of each."""
    merged = {name: dict(versions) for name, versions in before.items()}
    for name, one_version, winner in latest:
        merged.setdefault(name, {})[one_version] = winner
    return merged


@REWARDS.register("mean_logprob")
@card(media="text", high=0, scaling="nats a token")
def mean_logprob(media: Sequence[str], prompts: list[Prompt], *, scale: float = 1.0) -> Tensor:
    """Measure the model's confidence: the mean log-probability of the sampled tokens.

    It needs no judge, and is easily hacked by short answers; NaN for external texts.
    """
    logprobs = [Completion.of(text).logprob for text in media]
    return scale * torch.tensor([math.nan if value is None else value for value in logprobs])


@REWARDS.register("self_certainty")
@card(
    media="text",
    low=0,
    scaling="nats a token",
    source="[Kang et al. 2025](https://arxiv.org/abs/2502.18581), Intuitor",
)
def self_certainty(media: Sequence[str], prompts: list[Prompt], *, scale: float = 1.0) -> Tensor:
    """Measure self-certainty: the mean over tokens of KL(uniform || the model's distribution).

    Intuitor's reward (Zhao et al. 2025, arXiv:2505.19590). The ``vlm`` policy records it with
    ``record_self_certainty: true``.

    Raises:
        UserError: no text has a recorded certainty.
    """
    known = [Completion.of(text).self_certainty for text in media]
    if known and all(value is None for value in known):
        raise UserError(
            "reward 'self_certainty': the texts do not say how sure their model was; set "
            "policy.vlm.record_self_certainty"
        )
    return scale * torch.tensor([math.nan if value is None else float(value) for value in known])


@REWARDS.register("self_aligned")
@card(
    media="text",
    low=-1,
    high=1,
    source="[Han et al. 2025](https://arxiv.org/abs/2509.05489), SAR",
)
def self_aligned(media: Sequence[str], prompts: list[Prompt]) -> Tensor:
    """Measure how much the question lowers the perplexity of an answer, relatively (SAR).

    SAR: (ppl(answer) - ppl(answer | question)) / ppl(answer), within [-1, 1], which favours short,
    relevant answers. The ``vlm`` policy records it with ``record_question_gain: true``; without its
    question an answer follows an empty one in the same template (our reading). The paper adds 0.2
    of it to a reward of right answers.

    Raises:
        UserError: no text has a recorded gain.
    """
    gains = recorded(
        [Completion.of(text).question_gain for text in media],
        "self_aligned",
        "record_question_gain to true",
    )
    return (1 - (-gains).exp()).clamp(-1, 1).float()


@REWARDS.register("last_token")
@card(
    media="text",
    scaling="1 for right answers, 0 for wrong ones, once trained",
    source="[Yang et al. 2025](https://arxiv.org/abs/2510.14943), LaSeR",
)
def last_token(
    media: Sequence[str],
    prompts: list[Prompt],
    *,
    scale: float = 0.1,
    reference: float = -23.0,
) -> Tensor:
    """Use the policy's last-token self-reward: scale (log p(token after the answer) - reference).

    From LaSeR; the objective laser trains it. scale: beta_v. reference: the log-prob of the token
    under the base model, nats, about the same after every answer; the curve reward/last_token of a
    run's first iteration with reference 0 shows it. The ``vlm`` policy records it with
    ``self_score``.

    Raises:
        UserError: no text has a recorded score.
    """
    scores = recorded(
        [Completion.of(text).last_logprob for text in media], "last_token", "self_score to a token"
    )
    return (scale * (scores - reference)).float()


def recorded(values: Sequence[float | None], reward: str, remedy: str) -> Tensor:
    """Return a recorded value of the texts, [B] float64, NaN if missing; UserError if all are."""
    if values and all(value is None for value in values):
        raise UserError(
            f"reward {reward!r}: the texts do not hold what it reads; set policy.vlm.{remedy}"
        )
    numbers = [math.nan if value is None else float(value) for value in values]
    return torch.tensor(numbers, dtype=torch.float64)


def twin(prompt: Prompt) -> str:
    """Return the key that the versions of a question share."""
    return str(prompt.get("twin"))


def version(prompt: Prompt) -> str:
    """Return the key that distinguishes the versions of a question."""
    return str(prompt.get("version", prompt.get("text")))


def votes_of(media: Sequence[str], reward: str) -> list[str | None]:
    """Return the answer in every text, in normal form; None if there is none."""
    if isinstance(media, Tensor):
        raise UserError(f"reward {reward!r} compares texts, not images or videos")
    return [vote(text) for text in media]


def vote(text: str) -> str | None:
    answer = stated(text).value
    parsed = quantity_in(answer)
    value = parsed.value
    if parsed.status == "ok" and value is not None and not value.noun:
        unit = value.unit
        if unit is None:
            return f"{value.value:.12g}"  # 7, 7.0 and seven are one vote
        return f"{value.value * unit.factor:.12g} {unit.kind}"
    return normal(answer) or None


def leading(votes: Sequence[str | None]) -> tuple[str | None, int]:
    """Return the most frequent vote, the first of several, and how many gave it."""
    counts = Counter(vote for vote in votes if vote is not None)
    return counts.most_common(1)[0] if counts else (None, 0)

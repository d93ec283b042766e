"""Rewards answers without a right one: by the majority, by frequency, by how sure the model was.

Answers are read out of the texts as the verifiable rewards read them: the last ``<answer>`` or box,
else the text, in normal form. A text without one has no vote and earns 0.
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
    """Reward the answer that most answers to the prompt give (TTRL, SeRL); no ground truth is
    needed.

    Of equally frequent answers the one given first wins. ``share``: the part of the group that must
    agree; where fewer do, the group has no majority and every answer has NaN, which leaves it out.
    ``most``: the part that may agree; where more do, the question is too easy and is left out too
    (SeRL's filter of difficulty has both ends).
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
    """Reward the share of the group with the same answer, less ``entropy`` times their entropy
    (TTRV).

    The entropy (nats) is the same for a whole group: it only matters for advantages that compare
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
    """Reward an answer that agrees with most answers to the prompt's twin, which asks it in other
    words.

    Prompts with one ``twin`` are versions of one question: rephrased, or with the image augmented.
    Each is judged by the vote on the others (Zhang et al. 2025, Co-Reward), that of this iteration
    on any process, else the last one before it, which is remembered and saved in checkpoints; as
    long as there is none, the prompt's own vote decides.
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
        """Score [B]. ``gather`` returns the rows of all processes; without it there is but this
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
        """Keep the votes of the last call; those of an evaluation are forgotten."""
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
    """Measure how sure the model was of its answer: the mean log-probability of its tokens as
    sampled.

    A signal without any judge, and one that is easily hacked by saying little; NaN for texts of
    unknown origin.
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
    """Measure how far the model was from guessing: mean over tokens of KL(uniform || its
    distribution).

    Intuitor's reward (Zhao et al. 2025, arXiv:2505.19590). The ``vlm`` policy records it with
    ``record_self_certainty: true``.

    Raises:
        UserError: no text knows its certainty.
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
    """Measure how much likelier the question makes an answer: the relative drop of its perplexity.

    SAR: (ppl(answer) - ppl(answer | question)) / ppl(answer), within [-1, 1], which prefers short
    answers to the point. The ``vlm`` policy records it with ``record_question_gain: true``; without
    its question an answer follows an empty one in the same template (our reading). The paper adds
    0.2 of it to a reward of right answers.

    Raises:
        UserError: no text knows its gain.
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
    """Take the policy's own verdict: scale (log p(its token behind the answer) - reference).

    LaSeR's last-token self-reward, which the objective laser trains. scale: beta_v. reference: the
    log-prob that the base model gives the token, nats, about the same behind every answer; the
    curve reward/last_token of a run's first iteration with reference 0 shows it. The ``vlm`` policy
    records it with ``self_score``.

    Raises:
        UserError: no text knows its score.
    """
    scores = recorded(
        [Completion.of(text).last_logprob for text in media], "last_token", "self_score to a token"
    )
    return (scale * (scores - reference)).float()


def recorded(values: Sequence[float | None], reward: str, remedy: str) -> Tensor:
    """Return what texts know of themselves, [B] float64, NaN for those that do not; UserError where
    none does."""
    if values and all(value is None for value in values):
        raise UserError(
            f"reward {reward!r}: the texts do not hold what it reads; set policy.vlm.{remedy}"
        )
    numbers = [math.nan if value is None else float(value) for value in values]
    return torch.tensor(numbers, dtype=torch.float64)


def twin(prompt: Prompt) -> str:
    """Return what the versions of a question share."""
    return str(prompt.get("twin"))


def version(prompt: Prompt) -> str:
    """Return what tells the versions of a question apart."""
    return str(prompt.get("version", prompt.get("text")))


def votes_of(media: Sequence[str], reward: str) -> list[str | None]:
    """Return the answer in every text, in normal form; None where there is none."""
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

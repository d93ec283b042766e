"""A reward of steps and whole in one: the formula by a loop, in any order and any parts."""

import re

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS, load_built_in
from rewards import Hierarchical
from rewards.card import card
from rewards.combined.compose import Bounded

load_built_in()
TEXTS = [
    "load the table\n\nsum it up\n \n<answer>12</answer>",
    "<step>load</step><step></step><step>plot the sum</step>",
    "",
    "\n\n",
    "one long step",
    "\n\n".join(f"step {i}" for i in range(40)),
]
PROMPTS = [{"text": f"question {i}", "answer": 12} for i in range(len(TEXTS))]


@card(media="text")
def words(texts, prompts):
    return torch.tensor([len(text.split()) / 10 for text in texts])


@card(media="text")
def letters(texts, prompts):
    return torch.tensor([len(text) / 100 for text in texts])


def by_loop(text, share, how, context, most):
    ends = [match.end() for match in re.finditer(r"\n\s*\n|</step>", text)]
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)])]
    real = [
        (sum(map(len, pieces[:i])), piece)
        for i, piece in enumerate(pieces)
        if piece.replace("</step>", "").strip()
    ]
    size = max(1, -(-len(real) // most))
    scores = []
    for i in range(0, len(real), size):
        group = real[i : i + size]
        end = group[-1][0] + len(group[-1][1])
        scores.append(len(text[0 if context else group[0][0] : end].split()) / 10)
    middle = (min(scores) if how == "weakest" else sum(scores) / len(scores)) if scores else 0.0
    return share * middle + (1 - share) * len(text) / 100


@pytest.mark.parametrize("how", ["mean", "weakest"])
@pytest.mark.parametrize("context", [False, True])
def test_steps_and_whole_are_the_formula(how, context):
    reward = Hierarchical(words, letters, 0.3, how=how, context=context, most=8)
    values = reward(TEXTS, PROMPTS)
    expected = [by_loop(text, 0.3, how, context, 8) for text in TEXTS]
    assert values.tolist() == pytest.approx(expected, abs=1e-6)
    order = [3, 5, 0, 4, 2, 1]
    turned = reward([TEXTS[i] for i in order], [PROMPTS[i] for i in order])
    assert torch.equal(turned, values[order])
    alone = [reward([text], [prompt]) for text, prompt in zip(TEXTS, PROMPTS)]
    torch.testing.assert_close(torch.cat(alone), values)


def test_parts_that_do_not_fit_are_refused():
    for part in (Bounded(REWARDS.build("ocr"), low=0), REWARDS.build("majority_vote")):
        with pytest.raises(UserError, match="rewards of texts|different media"):
            Hierarchical(words, part)
    with pytest.raises(UserError, match="not a regular expression"):
        Hierarchical(words, split="(")
    with pytest.raises(UserError, match="judges texts"):
        Hierarchical(words)(torch.zeros(1, 3, 4, 4), PROMPTS[:1])

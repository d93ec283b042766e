"""Rewards whose text encoder reads the beginning of a prompt say so once."""

import logging

import pytest
import torch

from mmrl.core.registry import REWARDS, load_built_in
from rewards.base.truncation import Beginning
from tests.fixtures.tiny_rewards import save_tiny_clip

load_built_in()


def counted(limit):
    """A tokenizer of words, and what it was asked."""
    asked = []

    def lengths(texts):
        asked.append(list(texts))
        return [len(text.split()) for text in texts]

    return Beginning("a reward", limit, lengths), asked


def test_the_first_prompts_that_are_cut_are_told_once(caplog):
    watch, asked = counted(3)
    watch.look(["a", "b"])
    assert not asked and not watch.told  # too short for three tokens, whatever they are
    watch.look(["one two three", "one two three four", "one two three four"])
    assert "a reward reads the first 3 tokens of a prompt: 2 of 3 are longer" in caplog.text
    watch.look(["one two three four five"])
    assert len(asked) == 1 and caplog.text.count("reads the first") == 1


@pytest.mark.parametrize("words, cut", [(60, False), (400, True)])
def test_clip_score_tells_of_77_tokens(words, cut, tmp_path, caplog):
    reward = REWARDS.build("clip_score", model=save_tiny_clip(tmp_path / "clip"))
    text = "red " * words
    with caplog.at_level(logging.WARNING):
        reward(torch.rand(1, 3, 8, 8), [{"text": text}])
    assert ("reads the first 77 tokens of a prompt: 1 of 1" in caplog.text) == cut

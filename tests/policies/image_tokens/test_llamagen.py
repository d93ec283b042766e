"""LlamaGen's prompts and guidance."""

import pytest
import torch

from mmrl.core.errors import UserError
from tests.fixtures.image_tokens import at, every, policy_of

PROMPT = {"text": "a red seven", "label": 2}


def test_a_prompt_without_a_class_is_named():
    with pytest.raises(UserError, match="prompt 1 needs 'label', a class of 0..4"):
        policy_of("llamagen-classes").encode([PROMPT, {"text": "a seven"}])


@torch.no_grad()
def test_guidance_ends_where_the_published_loop_ends_it():
    """It draws the first token, then counts from 0: token j + 1 is guided up to j = interval."""
    ids = every(3, 4)[::7]
    chosen = {"part": (3.0, 0), "all": (3.0, None), "none": (1.0, None)}
    score = {}
    for name, (scale, interval) in chosen.items():
        policy = policy_of("llamagen-classes", guidance_scale=scale, cfg_interval=interval)
        score[name] = policy.dist(at(policy, ids, PROMPT)).log_prob(ids)
    torch.testing.assert_close(score["part"][:, :2], score["all"][:, :2])
    torch.testing.assert_close(score["part"][:, 2:], score["none"][:, 2:], atol=1e-9, rtol=0)
    assert (score["all"] - score["none"]).abs().max() > 0.01


def test_texts_that_are_cut_are_said_once():
    policy, unseen = policy_of("llamagen"), policy_of("llamagen")
    prompts = [PROMPT, {"text": "red " * 50 + "seven"}]
    policy.admit(prompts)
    policy.encode(prompts)
    assert "1 of 2 prompts are longer than the 40 tokens" in policy.report.notes[-1]
    assert not policy.report.warnings
    unseen.encode(prompts)
    unseen.encode([{"text": "blue " * 60}])
    assert len(unseen.report.warnings) == 1 and "40 tokens" in unseen.report.warnings[0]

"""Frozen towers: features of an image are computed once, and give the log-probs and gradients of
computing them in every pass."""

import pytest
import torch

from mmrl.policies.vlm.parts import Parts
from mmrl.policies.vlm.recent import Recent
from tests.policies.vlm.test_vlm_policy import (  # noqa: F401
    assert_near,
    gradient,
    logprobs,
    policy_of,
    prompts,
    quiet,
    rolled,
)

FROZEN = Parts("full", "frozen", "frozen")
# every form of features there is
FAMILIES = ("qwen3_vl", "internvl", "llava_next", "gemma3")


def anew(policy):
    """The same policy, which encodes every image in every pass."""
    policy._image_features = lambda encoded: {}
    return policy


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_features_are_those_of_every_pass(family):
    vlm = policy_of(family, train=FROZEN)
    anew_each_pass = anew(policy_of(family, train=FROZEN))
    vlm.checked = anew_each_pass.checked = True  # the comparison with the class encodes them too
    questions = prompts(family)
    rollout = rolled(vlm, questions)
    expected = rolled(anew_each_pass, questions)
    assert torch.equal(rollout.sample, expected.sample)
    torch.testing.assert_close(
        logprobs(vlm, rollout), logprobs(anew_each_pass, expected), atol=1e-5, rtol=1e-5
    )
    assert_near(gradient(vlm, rollout), gradient(anew_each_pass, expected))
    again = rolled(vlm, questions)  # the prompts of the next epoch
    assert torch.equal(again.sample, rollout.sample)
    assert vlm.towered == vlm.images / 2 and anew_each_pass.towered > vlm.images


def test_packed_rows_take_them_too():
    packed = policy_of(train=FROZEN, remove_padding=True)
    padded = policy_of(train=FROZEN)
    rollout = rolled(padded)
    torch.testing.assert_close(
        logprobs(packed, rollout), logprobs(padded, rollout), atol=1e-5, rtol=1e-5
    )
    assert_near(gradient(packed, rollout), gradient(padded, rollout))


def test_the_room_for_features_is_bounded_and_trained_towers_look_anew():
    vlm = policy_of(train=FROZEN)
    vlm.features = Recent(1)
    rollout = rolled(vlm)
    logprobs(vlm, rollout)
    assert not vlm.features.entries and vlm.towered == 2 * vlm.images
    for options in ({}, {"train": Parts("full", "full", "frozen")}):
        trained = policy_of(**options)
        logprobs(trained, rolled(trained))
        assert not trained.features.entries and trained.towered == 2 * trained.images
    assert policy_of(lora=2).sees is False

"""Frozen towers: features of an image are computed once, and give the log-probs and gradients of
looking anew."""

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
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "internvl", "llava_next", "gemma3")


def anew(policy):
    """The same policy, which looks at every image in every pass."""
    policy._image_features = lambda encoded: {}
    return policy


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_features_are_those_of_every_pass(family):
    one = policy_of(family, train=FROZEN)
    other = anew(policy_of(family, train=FROZEN))
    given = prompts(family)
    rollout = rolled(one, given)
    wanted = rolled(other, given)
    assert torch.equal(rollout.sample, wanted.sample)
    torch.testing.assert_close(
        logprobs(one, rollout), logprobs(other, wanted), atol=1e-5, rtol=1e-5
    )
    assert_near(gradient(one, rollout), gradient(other, wanted))
    again = rolled(one, given)  # the prompts of the next epoch
    assert torch.equal(again.sample, rollout.sample)
    assert one.towered == one.images / 2 and other.towered > one.images


def test_packed_rows_take_them_too():
    one = policy_of(train=FROZEN, remove_padding=True)
    other = policy_of(train=FROZEN)
    rollout = rolled(other)
    torch.testing.assert_close(
        logprobs(one, rollout), logprobs(other, rollout), atol=1e-5, rtol=1e-5
    )
    assert_near(gradient(one, rollout), gradient(other, rollout))


def test_the_room_for_features_is_bounded_and_trained_towers_look_anew():
    one = policy_of(train=FROZEN)
    one.features = Recent(1)
    rollout = rolled(one)
    logprobs(one, rollout)
    assert not one.features.entries and one.towered == 2 * one.images
    for options in ({}, {"train": Parts("full", "full", "frozen")}):
        trained = policy_of(**options)
        logprobs(trained, rolled(trained))
        assert not trained.features.entries and trained.towered == 2 * trained.images
    assert policy_of(lora=2).sees is False

"""Towers in fewer calls give what transformers' own loops give; frozen ones look once."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from mmrl.policies.vlm.parts import Parts
from mmrl.policies.vlm.policy import VLM
from mmrl.policies.vlm.recent import Recent
from mmrl.policies.vlm.vision import PACKED, Patches, by_length
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_inputs import loaded, mixed
from tests.policies.vlm.test_vlm_policy import (
    assert_near,
    gradient,
    logprobs,
    policy_of,
    prompts,
    rolled,
)


def reference(query, key, value, lengths, scale):
    """[N, heads, D], with the mask written out."""
    piece = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    scores = scores.masked_fill(piece[:, None] != piece[None, :], -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@pytest.mark.parametrize("lengths", [[4, 4, 4], [3, 7, 3, 1, 7, 2]])
def test_pieces_attend_to_themselves_only(lengths):
    torch.manual_seed(0)
    tensors = [
        torch.randn(sum(lengths), 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]
    attended, expected = (attend(*tensors, lengths, 0.3) for attend in (by_length, reference))
    torch.testing.assert_close(attended, expected, atol=1e-12, rtol=0)
    weights = torch.randn_like(attended)
    grads = [torch.autograd.grad((x * weights).sum(), tensors) for x in (attended, expected)]
    torch.testing.assert_close(*grads, atol=1e-12, rtol=0)


def test_patches_are_embedded_as_by_a_convolution():
    torch.manual_seed(0)
    plain = nn.Conv3d(3, 6, (2, 4, 4), stride=(2, 4, 4), dtype=torch.float64)
    quick = Patches(deepcopy(plain))
    for size in ((2, 4, 4), (4, 8, 8)):  # patches, and a whole video
        x = torch.randn(5, 3, *size, dtype=torch.float64)
        torch.testing.assert_close(quick(x), plain(x), atol=1e-12, rtol=0)
        for tower in (plain, quick):
            tower.zero_grad()
            tower(x).square().sum().backward()
        torch.testing.assert_close(quick.weight.grad, plain.weight.grad, atol=1e-11, rtol=0)


@pytest.mark.parametrize("name", PACKED)
def test_a_tower_sees_the_same(name):
    """Images and a video of unlike sizes in one batch: features and gradients."""
    vlm = VLM(str(tiny_vlms.folder(name)), max_new_tokens=2, coordinate_space="original")
    plain = loaded(name)
    assert "flash" in vlm.net.hf.config.vision_config._attn_implementation
    encoded = vlm.inputs.collate([vlm.inputs.encode(prompt) for prompt in mixed(name)])
    features = []
    for net in (vlm.net.hf, plain):
        logits = net(**encoded).logits[encoded["attention_mask"].bool()]
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        features.append(
            [logits.detach(), *(p.grad for n, p in net.named_parameters() if "visual" in n)]
        )
    for ours, theirs in zip(*features, strict=True):
        near = 1e-4 * float(theirs.abs().max()) + 1e-5
        torch.testing.assert_close(ours, theirs, atol=near, rtol=1e-4)


FROZEN = Parts("full", "frozen", "frozen")


def test_kept_features_have_the_gradient_of_every_pass():
    """Of all families test_vlm_families.py compares the log-probs."""
    vlm, plain = (policy_of("qwen3_vl", train=FROZEN) for _ in range(2))
    plain._image_features = lambda encoded: {}  # encodes every image in every pass
    vlm.checked = plain.checked = True  # the comparison with the class encodes them too
    questions = prompts()
    rollout = rolled(vlm, questions)
    assert torch.equal(rollout.sample, rolled(plain, questions).sample)
    assert_near(gradient(vlm, rollout), gradient(plain, rollout))
    again = rolled(vlm, questions)  # the prompts of the next epoch
    assert torch.equal(again.sample, rollout.sample)
    assert vlm.towered == vlm.images / 2 and plain.towered > plain.images / 2


def test_the_room_for_features_is_bounded_and_trained_towers_look_anew():
    for options in ({"train": FROZEN}, {}, {"train": Parts("full", "full", "frozen")}):
        vlm = policy_of(**options)
        if options == {"train": FROZEN}:
            vlm.features = Recent(1)
        logprobs(vlm, rolled(vlm))
        assert not vlm.features.entries and vlm.towered == 2 * vlm.images
    assert policy_of(lora=2).sees is False

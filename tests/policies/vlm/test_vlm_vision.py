"""Towers that compute in fewer calls give what transformers' own loops give."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from mmrl.policies.vlm.vision import PACKED, Patches, by_length, pack_vision_attention
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_inputs import loaded, mixed


def reference(query, key, value, lengths, scale):
    """[N, heads, D], with the mask written out."""
    piece = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    scores = scores.masked_fill(piece[:, None] != piece[None, :], -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@pytest.mark.parametrize("lengths", [[4, 4, 4], [3, 7, 3, 1, 7, 2], [9]])
def test_pieces_attend_to_themselves_only(lengths):
    torch.manual_seed(0)
    tensors = [
        torch.randn(sum(lengths), 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]
    attended, expected = (attend(*tensors, lengths, 0.3) for attend in (by_length, reference))
    torch.testing.assert_close(attended, expected, atol=1e-12, rtol=0)
    weights = torch.randn_like(attended)
    for first, second in zip(
        *(torch.autograd.grad((x * weights).sum(), tensors) for x in (attended, expected)),
        strict=True,
    ):
        torch.testing.assert_close(first, second, atol=1e-12, rtol=0)


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
    from mmrl.policies.vlm.policy import VLM

    vlm = VLM(str(tiny_vlms.folder(name)), max_new_tokens=2, coordinate_space="original")
    plain = loaded(name)[0]
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
        torch.testing.assert_close(
            ours, theirs, atol=1e-4 * float(theirs.abs().max()) + 1e-5, rtol=1e-4
        )


def test_other_models_stay_as_they_are():
    net = loaded("llava")[0]
    kinds = [type(module) for module in net.modules()]
    pack_vision_attention(net)
    assert kinds == [type(module) for module in net.modules()]
    assert net.config.vision_config._attn_implementation == "sdpa"

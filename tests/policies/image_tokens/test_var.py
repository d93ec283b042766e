"""VAR: its quantiser, the weights of its scales, and images that branch."""

import pytest
import torch
from torch.nn import functional as F

from mmrl import advantages
from mmrl.core.errors import UserError
from mmrl.train.minibatches import loss_weights
from mmrl.zoo.advantages import tree_mean
from mmrl.zoo.models.image_tokens.var_vq import shared
from samplers.noise import Rng
from tests.fixtures.image_tokens import every, flat_grad, policy_of

PROMPTS = [{"label": 2}, {"label": 0}]


def make(**options):
    """Scales of 1, 4 and 9 tokens."""
    return policy_of("var-3", vocab=2, **options)


def test_the_shared_convolutions_of_ten_scales_are_those_of_float64():
    """In float32 ties fall elsewhere and images degrade silently, in VAR's published quantiser
    (Tian et al. 2024)."""
    assert shared(10) == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]


def test_an_image_is_the_sum_of_its_scales():
    quantizer = make().vae.quantize
    ids = every(2, 14)[1234:1237]
    f = quantizer.blank(3)
    expected = 0
    for k, (part, side) in enumerate(zip(quantizer.split(ids), quantizer.sides, strict=True)):
        f = quantizer.add(f, part, k)
        h = quantizer.embedding.weight[part].permute(0, 2, 1).reshape(3, -1, side, side)
        h = F.interpolate(h, size=(3, 3), mode="bicubic") if side < 3 else h
        conv = quantizer.quant_resi.qresi_ls[[0, 2, 3][k]]
        expected = expected + 0.5 * h + 0.5 * F.conv2d(h, conv.weight, conv.bias, padding=1)
        torch.testing.assert_close(f, expected, atol=1e-12, rtol=0)
    # area averages
    torch.testing.assert_close(quantizer.at_scale(f, 0)[:, 0], f.mean((2, 3)), atol=1e-12, rtol=0)


def test_encoding_takes_the_nearest_entries_scale_by_scale():
    vae = make().vae
    images = Rng.of("image").normal(torch.arange(2), (3, 6, 6), dtype=torch.float64)
    ids = vae.encode(images)
    rest = vae.quant_conv(vae.encoder(images))
    first = vae.quantize.embedding.weight - rest.mean((2, 3))[:, None]  # [B, V, D]
    assert torch.equal(ids[:, 0], first.square().sum(-1).argmin(-1))
    assert ids.shape == (2, 14) and vae.decode(ids).shape == (2, 3, 6, 6)


@pytest.mark.parametrize("alpha", [0.7, 1.0])
def test_scales_are_weighed(alpha):
    policy = make(scale_alpha=alpha)
    (point,) = policy.path(policy.rollout(PROMPTS, 2, Rng.of("weights")))
    found = loss_weights(point, "token_mean", 1)
    each = torch.tensor([1.0] + [4.0] * 4 + [9.0] * 9)
    torch.testing.assert_close(found, (each**-alpha).expand(4, -1), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "options", [{"guidance_scale": 3.0, "top_k": 2}, {"logprob_guidance": "conditional"}]
)
def test_images_that_branch_are_those_that_go_on_from_a_common_beginning(options):
    """Shared scales are computed once; the row they belong to is the one it would be alone; the
    others are scored, all of their decisions, as if each had been drawn in full."""
    tree = make(branch_at=2, branches=3, **options)
    flat = make(**options)
    rollout, alone = (one.rollout(PROMPTS, 6, Rng.of("branch")) for one in (tree, flat))
    # of scales 1, 4 and 9
    rows = torch.arange(12)
    scale = torch.arange(14) >= 5
    assert torch.equal(rollout.sample[::3], alone.sample[::3])
    assert torch.equal(rollout.sample[:, ~scale], alone.sample[::3, ~scale].repeat_interleave(3, 0))
    assert len(rollout.sample[:6].unique(dim=0)) > 2
    assert torch.equal(rollout.mask, scale | (rows % 3 == 0)[:, None])
    assert torch.equal(
        rollout.edge_id, torch.where(scale, rows[:, None], (rows - rows % 3)[:, None])
    )
    (point,) = flat.path(rollout.replace(mask=torch.ones_like(rollout.mask)))
    with torch.no_grad():
        torch.testing.assert_close(
            flat.dist(point).log_prob(point.target), rollout.logprob, atol=1e-12, rtol=0
        )
    assert tree.report.forwards == 2 * (4 + 4 + 12) and alone.edge_id is None


def test_the_gradient_of_branches_is_the_average_of_samples():
    tree = make(branch_at=2, branches=2, guidance_scale=2.0, scale_alpha=0.7)
    flat = make(guidance_scale=2.0, scale_alpha=0.7)
    reward = torch.linspace(0, 3, 8, dtype=torch.float64).cos()
    rollout = tree.rollout(PROMPTS, 4, Rng.of("tree"))

    def gradient(policy, rollout, advantage):
        (point,) = policy.path(rollout.replace(advantage=advantage.double()))
        loss = -point.advantage * policy.dist(point).log_prob(point.target)
        return flat_grad(policy, (loss * loss_weights(point, "token_sum", 1)).sum())

    found = gradient(tree, rollout, tree_mean(reward, rollout, base=advantages.dr_grpo))
    rows = rollout.replace(mask=torch.ones_like(rollout.mask), edge_id=None)
    wanted = gradient(flat, rows, advantages.dr_grpo(reward, rows))
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-9)
    assert wanted.abs().max() > 0.01


def test_branches_fit_the_copies_and_the_scales():
    with pytest.raises(UserError, match="multiple of it"):
        make(branch_at=1).rollout(PROMPTS[:1], 3, Rng.of("odd"))
    with pytest.raises(UserError, match="this model has 3 scales"):
        make(branch_at=3)

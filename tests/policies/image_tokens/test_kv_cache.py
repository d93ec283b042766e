"""Keys and values written in place: attention equals that over whole sequences."""

import pytest
import torch
import torch.nn.functional as F

from mmrl.policies.image_tokens.attention import attend
from mmrl.policies.image_tokens.kv_cache import Rooms, put
from samplers.noise import Rng


def random(name, *shape):
    return (
        Rng.of(name)
        .normal(torch.zeros(1), (torch.Size(shape).numel(),), dtype=torch.float64)
        .view(shape)
    )


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("heads", "own"), [(4, 4), (4, 2)])
def test_tokens_see_their_prompt_and_themselves(heads, own, padded, fixed):
    prompts = 2
    copies = 3
    steps = 4
    size = 6
    length = 5
    rows = torch.arange(prompts).repeat_interleave(copies)
    read = random("k", prompts, own, length, size), random("v", prompts, own, length, size)
    padding = torch.ones(prompts, length, dtype=torch.bool)
    padding[1, :3] = not padded
    rooms = Rooms.after([read], rows, length + steps)
    q, k, v = (
        random(name, steps, prompts * copies, n, 1, size)
        for name, n in (("q", heads), ("k", own), ("v", own))
    )
    new = [part[:, :, :, 0].permute(1, 2, 0, 3) for part in (k, v)]  # [B, heads, steps, D]
    whole = [torch.cat([part[rows], later], 2) for part, later in zip(read, new, strict=True)]
    for t in range(steps):
        place = rooms.next(1, fixed)
        mask = rooms.attention_mask(place, padding[rows] if padded else None)
        attended = attend(q[t], *put(rooms.layers[0], k[t], v[t], place), mask, scale=0.3)
        mask_row = F.pad(padding[rows], (0, t + 1), value=True)[:, None, None]
        past = [part[:, :, : length + t + 1] for part in whole]
        expected = F.scaled_dot_product_attention(
            q[t], *past, attn_mask=mask_row, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(attended, expected, atol=1e-12, rtol=0)
    assert rooms.length == length + steps

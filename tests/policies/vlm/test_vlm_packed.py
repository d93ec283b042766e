"""Batches without padding give the log-probs, gradients and samples of padded ones, in every family
that shares."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from mmrl.core.errors import UserError
from mmrl.policies.vlm import packing, prefix_sharing
from mmrl.policies.vlm.packing import Layout
from mmrl.policies.vlm.prefix_sharing import SharedPrefix
from tests.policies.vlm.test_vlm_policy import (  # noqa: F401
    assert_near,
    gradient,
    logprobs,
    policy_of,
    prompts,
    quiet,
    rolled,
)

# of all families this is tested in test_vlm_families.py
FAMILIES = ("qwen2_5_vl", "gemma3", "llava_onevision")
# of answers; one of them has a single token, which needs no further pass
LENGTHS = (8, 1, 3, 5, 8, 2, 7, 4, 6)


def ragged(rollout):
    steps = torch.arange(rollout.mask.shape[1])
    lengths = torch.tensor([LENGTHS[i % len(LENGTHS)] for i in range(len(rollout))])
    return rollout.replace(mask=rollout.mask & (steps < lengths[:, None]))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_the_padded_ones(family):
    padded = policy_of(family, temperature=0.8, remove_padding=False)
    packed = policy_of(family, temperature=0.8, remove_padding=True)
    rollout = rolled(padded, prompts(family))
    again = rolled(packed, prompts(family))
    assert torch.equal(again.sample, rollout.sample)
    torch.testing.assert_close(again.logprob, rollout.logprob, atol=1e-5, rtol=1e-5)
    rollout = ragged(rollout)
    expected, scores = (logprobs(p, rollout)[rollout.mask] for p in (padded, packed))
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    assert_near(gradient(packed, rollout), gradient(padded, rollout))


def test_passes_of_much_padding_are_packed_by_themselves(monkeypatch):
    plain, choosing = (policy_of(remove_padding=choice) for choice in (False, None))
    rollout = rolled(plain)
    for policy in (plain, choosing):
        policy.net.double()
        policy.net.enable_gradient_checkpointing()  # layers computed again know the layout too
        policy.checked = True  # the comparison with the class packs too
    packed = []
    pack = SharedPrefix._packed
    monkeypatch.setattr(SharedPrefix, "_packed", lambda *a: packed.append(1) or pack(*a))
    monkeypatch.setattr(prefix_sharing, "SPARSE", 0.05)
    for points, passes in ((rollout, 0), (ragged(rollout), 1)):
        expected = gradient(plain, points)
        assert not packed
        changed = gradient(choosing, points)
        assert len(packed) == passes
        for name, value in expected.items():
            torch.testing.assert_close(changed[name], value, atol=1e-10, rtol=1e-10)
    assert not policy_of(prefix_sharing="none").net.packs_sparse


def test_no_padding_reaches_the_language_model():
    packed = policy_of(remove_padding=True)
    rollout = ragged(rolled(packed))
    shapes = []
    hook = packed.net.hf.base_model.language_model.layers[0].mlp.register_forward_pre_hook(
        lambda module, given: shapes.append(tuple(given[0].shape[:2]))
    )
    logprobs(packed, rollout)
    hook.remove()
    prompt_tokens = sum(cond["input_ids"].shape[1] for cond in rollout.cond)
    assert shapes == [(1, prompt_tokens), (1, int((rollout.mask.sum(1) - 1).sum()))]


def test_layers_computed_again_give_the_same_gradient():
    packed = policy_of(remove_padding=True)
    rollout = ragged(rolled(packed))
    plain = gradient(packed, rollout)
    packed.enable_gradient_checkpointing()
    assert_near(gradient(packed, rollout), plain, 1e-7)


def test_what_is_exported_knows_nothing_of_it(tmp_path):
    packed = policy_of(remove_padding=True)
    packed.export(tmp_path)
    assert packing.NAME not in (tmp_path / "config.json").read_text()


def test_adapters_train_packed():
    packed, padded = (policy_of(lora=2, remove_padding=p) for p in (True, False))
    rollout = ragged(rolled(padded))
    with torch.no_grad():
        for p in (packed, padded):
            for name, parameter in p.net.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.1)
    assert_near(gradient(packed, rollout), gradient(padded, rollout))


def test_what_cannot_be_packed_is_refused():
    for options in ({"prefix_sharing": "none"}, {"attention": "eager"}):
        with pytest.raises(UserError, match="remove_padding needs"):
            policy_of(remove_padding=True, **options)
    with pytest.raises(UserError, match="mllama"):
        policy_of("mllama", remove_padding=True)


def test_layers_that_do_not_hand_the_layout_on_are_found_out():
    packed = policy_of(remove_padding=True)
    packed.net.hf.config.get_text_config()._attn_implementation = "sdpa"
    with pytest.raises(UserError, match="attend in a way of their own"):
        rolled(packed)


# --------------------------------------------------------------------------------------------------
# attention


def naive(layout: Layout, q, k, v, scale, window=None):
    """Row by row, key by key."""
    attended = torch.zeros_like(q)
    start = 0
    first = 0
    for n, m in zip(layout.queries.tolist(), layout.keys.tolist(), strict=True):
        at = torch.arange(first, first + m) if layout.at is None else layout.at[first : first + m]
        for i in range(n):
            last = m - n + i
            visible = at[max(0, last + 1 - window) if window else 0 : last + 1]
            weight = (torch.einsum("hd,hmd->hm", q[:, start + i], k[:, visible]) * scale).softmax(
                -1
            )
            attended[:, start + i] = torch.einsum("hm,hmd->hd", weight, v[:, visible])
        start = start + n
        first = first + m
    return attended


def layouts():
    lengths = torch.tensor([3, 5])
    read = Layout(lengths, lengths)
    rows = torch.tensor([0, 0, 1, 1])
    answers = torch.tensor([2, 0, 4, 1])
    return [read, packing.continued(lengths, rows, answers, False)]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("window", [None, 3])
def test_a_layout_attends_inside_its_rows(which, window):
    torch.manual_seed(0)
    layout = layouts()[which]
    n = int(layout.queries.sum())
    m = 8 if which == 0 else 8 + int(layout.queries.sum())
    q, k, v = (
        torch.randn(2, size, 4, dtype=torch.float64, requires_grad=True) for size in (n, m, m)
    )
    attended = layout.attend(q, k, v, 0.3, window)
    expected = naive(layout, q, k, v, 0.3, window)
    torch.testing.assert_close(attended, expected)
    weights = torch.randn_like(attended)
    grads = [torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (attended, expected)]
    for packed_gradient, naive_gradient in zip(*grads, strict=True):
        torch.testing.assert_close(packed_gradient, naive_gradient)


def test_xformers_is_given_one_block_diagonal_mask(monkeypatch):
    """A stand-in with the signatures of xformers 0.0.3x; the real one runs in
    tests/gpu/test_packed.py."""

    class Mask:
        @classmethod
        def from_seqlens(cls, q_seqlen, kv_seqlen=None):
            mask = cls()
            mask.q = q_seqlen
            mask.k = kv_seqlen
            return mask

    def attention(query, key, value, attn_bias=None, p=0.0, scale=None):
        assert (
            query.shape[0] == 1
            and sum(attn_bias.q) == query.shape[1]
            and sum(attn_bias.k) == key.shape[1]
        )
        rows = []
        for q, k, v in zip(
            query[0].split(attn_bias.q), key[0].split(attn_bias.k), value[0].split(attn_bias.k)
        ):
            visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            rows.append(
                F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale).transpose(
                    0, 1
                )
            )
        return torch.cat(rows)[None]

    bias = types.SimpleNamespace(BlockDiagonalCausalFromBottomRightMask=Mask)
    fmha = types.SimpleNamespace(attn_bias=bias, memory_efficient_attention=attention)
    monkeypatch.setitem(sys.modules, "xformers", types.ModuleType("xformers"))
    monkeypatch.setitem(sys.modules, "xformers.ops", types.SimpleNamespace(fmha=fmha))
    packed = policy_of(remove_padding=True)
    padded = policy_of()
    packed.net.fused = True
    rollout = ragged(rolled(padded))
    assert torch.equal(rolled(packed).sample, rolled(padded).sample)
    torch.testing.assert_close(
        logprobs(packed, rollout)[rollout.mask], logprobs(padded, rollout)[rollout.mask]
    )
    assert_near(gradient(packed, rollout), gradient(padded, rollout))

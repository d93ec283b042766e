"""Batches without padding give the log-probs, gradients and samples of padded ones, in every family
that shares."""

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.policies.vlm import packing, prefix_sharing
from mmrl.policies.vlm.packing import Layout
from mmrl.policies.vlm.prefix_sharing import SharedPrefix
from tests.policies.vlm.test_vlm_policy import assert_near, gradient, policy_of, rolled

# of answers; one of them has a single token, which needs no further pass
LENGTHS = (8, 1, 3, 5, 8, 2, 7, 4, 6)


def ragged(rollout):
    steps = torch.arange(rollout.mask.shape[1])
    lengths = torch.tensor([LENGTHS[i % len(LENGTHS)] for i in range(len(rollout))])
    return rollout.replace(mask=rollout.mask & (steps < lengths[:, None]))


def test_packed_rows_are_the_padded_ones(tmp_path):
    """Without padding in any layer, also where those are computed again; of families by themselves
    in test_vlm_families.py."""
    padded, packed = (policy_of(lora=2, remove_padding=p) for p in (False, True))
    rollout = rolled(padded)
    again = rolled(packed)
    assert torch.equal(again.sample, rollout.sample)
    torch.testing.assert_close(again.logprob, rollout.logprob, atol=1e-5, rtol=1e-5)
    rollout = ragged(rollout)
    with torch.no_grad():
        for name, parameter in [*padded.net.named_parameters(), *packed.net.named_parameters()]:
            if "lora_B" in name:
                parameter.add_(0.1)
    shapes = []
    (layer,) = {
        m for n, m in packed.net.named_modules() if n.endswith("language_model.layers.0.mlp")
    }
    layer.register_forward_pre_hook(lambda module, given: shapes.append(given[0].shape[:2]))
    expected = gradient(padded, rollout)
    assert_near(gradient(packed, rollout), expected)
    read = sum(cond["input_ids"].shape[1] for cond in rollout.cond)
    assert shapes == [(1, read), (1, int((rollout.mask.sum(1) - 1).sum()))]
    packed.enable_gradient_checkpointing()
    assert_near(gradient(packed, rollout), expected)
    packed.export(tmp_path)
    assert not any(packing.NAME in file.read_text() for file in tmp_path.glob("*.json"))


def test_passes_of_much_padding_are_packed_by_themselves(monkeypatch):
    plain, choosing = (policy_of(remove_padding=choice) for choice in (False, None))
    rollout = rolled(plain)
    for policy in (plain, choosing):
        policy.net.double()
        policy.net.enable_gradient_checkpointing()  # layers computed again know the layout too
    choosing.checked = True  # the comparison with the class packs too
    packed = []
    pack = SharedPrefix._packed
    monkeypatch.setattr(SharedPrefix, "_packed", lambda *a: packed.append(1) or pack(*a))
    monkeypatch.setattr(prefix_sharing, "SPARSE", 0.05)
    for points, passes in ((rollout, 0), (ragged(rollout), 1)):
        assert_near(gradient(choosing, points), gradient(plain, points), 1e-10)
        assert len(packed) == passes
    assert not policy_of(prefix_sharing="none").net.packs_sparse


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
            score = torch.einsum("hd,hmd->hm", q[:, start + i], k[:, visible]) * scale
            attended[:, start + i] = torch.einsum("hm,hmd->hd", score.softmax(-1), v[:, visible])
        start = start + n
        first = first + m
    return attended


LENGTH = torch.tensor([3, 5])
CONTINUED = packing.continued(LENGTH, torch.tensor([0, 0, 1, 1]), torch.tensor([2, 0, 4, 1]), False)


@pytest.mark.parametrize("layout", [Layout(LENGTH, LENGTH), CONTINUED], ids=["read", "continued"])
@pytest.mark.parametrize("window", [None, 3])
def test_a_layout_attends_inside_its_rows(layout, window):
    torch.manual_seed(0)
    n = int(layout.queries.sum())
    m = n if layout is not CONTINUED else 8 + n
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

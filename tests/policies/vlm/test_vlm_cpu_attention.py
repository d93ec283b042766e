"""Attention of our own on a CPU: what torch's computes on copied prompts, forwards and backwards,
and what compiled policies make of it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mmrl.policies import native
from mmrl.policies.vlm import compiled, cpu_attention
from mmrl.policies.vlm.cascade import direct
from mmrl.policies.vlm.policy import VLM
from samplers.noise import Rng
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_policy import gradient, logprobs, quiet, rolled  # noqa: F401

pytestmark = pytest.mark.skipif(
    not cpu_attention.serves(16, torch.zeros(1)), reason="no AVX-512, or no C++ compiler"
)
ASKED = [
    {"text": "what is this?", "images": [tiny_vlms.image(28, 28, 0)]},
    {"text": "hello, what is a longer question?"},
    {"text": "and?", "images": [tiny_vlms.image(56, 28, 1)]},
]
# rows, heads, heads of keys, tokens, columns of prompts, prompts, size
SHAPES = [
    (6, 4, 2, 13, 7, 3, 16),
    (5, 4, 4, 8, 40, 3, 32),
    (4, 6, 1, 33, 5, 2, 64),
    (3, 7, 1, 2, 3, 2, 80),
    # several tiles of 64 columns: of answers, of prompts, of both; rows of one prompt in a row
    (4, 4, 2, 131, 9, 3, 16),
    (4, 4, 2, 5, 147, 2, 16),
    (3, 2, 2, 78, 70, 2, 32),
]
ops = torch.ops.mmrl_vlm


def inputs(rows, heads, groups, tokens, columns, prompts, size):
    """Queries, keys and values of answers and of prompts; the last prompt has no answer."""

    def normal(name, *shape):
        return Rng.of(name).normal(torch.zeros(1), (torch.Size(shape).numel(),)).view(shape)

    of_answers = [
        normal(name, rows, tokens, number, size).transpose(1, 2)
        for name, number in (("q", heads), ("k", groups), ("v", groups))
    ]
    of_prompts = [normal(name, prompts, groups, columns, size) for name in ("pk", "pv")]
    prompt_of = torch.arange(rows) % (prompts - 1)
    start = torch.arange(prompts) % columns  # one without padding
    return [*of_answers, *of_prompts], prompt_of, start


def by_torch(x, rows, start, seen, scale):
    """Attention in float64 to copied prompts; ``seen`` [rows, 1, tokens, columns of answers]."""
    q, k, v, pk, pv = (tensor.double() for tensor in x)
    real = torch.arange(pk.shape[2]) >= start[rows][:, None]
    attended = torch.cat([real[:, None, None].expand(-1, 1, q.shape[2], -1), seen], -1)
    keys, values = torch.cat([pk[rows], k], 2), torch.cat([pv[rows], v], 2)
    repeated = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (keys, values))
    return F.scaled_dot_product_attention(q, *repeated, attended, scale=scale).transpose(1, 2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_answers_and_their_gradients_are_torchs(shape):
    x, rows, start = inputs(*shape)
    leaves = [tensor.requires_grad_() for tensor in x]
    attended, _ = ops.attend(*leaves, rows, start, 0.3)
    causal = torch.ones(shape[3], shape[3]).tril().bool().expand(len(rows), 1, -1, -1)
    expected = by_torch(leaves, rows, start, causal, 0.3)
    torch.testing.assert_close(attended.double(), expected, atol=5e-6, rtol=0)
    weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    computed = torch.autograd.grad((attended * weights).sum(), leaves)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    for ours, theirs in zip(computed, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    assert not computed[3][-1].any()  # of a prompt without answers


@pytest.mark.parametrize("shape", SHAPES[-3:], ids=str)
def test_threads_and_the_order_of_rows_change_nothing(shape):
    x, rows, start = inputs(*shape)

    def computed(order, threads):
        leaves = [t[order] for t in x[:3]] + x[3:]
        leaves = [t.detach().requires_grad_() for t in leaves]
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        attended, _ = ops.attend(*leaves, rows[order], start, 0.3)
        gradients = torch.autograd.grad(attended.square().sum(), leaves)
        torch.set_num_threads(before)
        back = order.argsort()
        return [t[back].detach() for t in (attended, *gradients[:3])], gradients[3:]

    one = computed(torch.arange(len(rows)), 1)
    two = computed(torch.arange(len(rows)), 2)
    turned = computed(rows.argsort(stable=True).flip(0), 1)
    for ours, theirs in zip(
        [*one[0], *one[1], *one[0]], [*two[0], *two[1], *turned[0]], strict=True
    ):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(one[1], turned[1], strict=True):  # sums of rows in another order
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_is_torchs(shape, threads):
    x, rows, start = inputs(*shape)
    q, k, v, pk, pv = x
    seen = Rng.of("seen").uniform(torch.arange(len(rows)), (k.shape[2],)) > 0.4
    seen[:, -1] = True
    seen[0] = True
    query = q[:, :, :1]
    wide = torch.full((*k.shape[:2], k.shape[2] + 5, k.shape[3]), torch.nan)
    roomy = [wide.clone() for _ in range(2)]  # what is behind the columns is not read
    for room, columns in zip(roomy, (k, v), strict=True):
        room[:, :, : k.shape[2]] = columns
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    columns = [*(room[:, :, : k.shape[2]] for room in roomy), pk, pv]
    attended = ops.attend_step(query, columns, rows, start, seen[:, None, None], 0.3)
    torch.set_num_threads(before)
    expected = by_torch([query, k, v, pk, pv], rows, start, seen[:, None, None], 0.3)
    torch.testing.assert_close(attended.double(), expected, atol=5e-6, rtol=0)


def test_large_exponents_and_hidden_columns_give_no_nan():
    x, rows, start = inputs(*SHAPES[0])
    x[0] = x[0] * 1e4
    leaves = [tensor.requires_grad_() for tensor in x]
    attended, _ = ops.attend(*leaves, rows, torch.full_like(start, 7), 1.0)  # no prompt has any
    assert attended.isfinite().all()
    computed = torch.autograd.grad(attended.sum(), leaves)
    assert all(tensor.isfinite().all() for tensor in computed)
    assert not computed[3].any() and not computed[4].any()


def test_what_it_does_not_serve_is_left_to_torch(monkeypatch):
    x, rows, start = inputs(*SHAPES[0])
    prompts = [(x[3], x[4])]
    mask = torch.arange(7) >= start[:, None]
    assert direct(prompts, mask, rows) is not None
    mask[0, -1] = False  # padding that is not on the left
    assert direct(prompts, mask, rows) is None
    assert not cpu_attention.serves(24, x[3])
    assert not cpu_attention.serves(16, x[3].double())
    with pytest.raises(TypeError, match="float32"):
        ops.attend(*(tensor.double() for tensor in x), rows, start, 1.0)

    from torch._inductor.codecache import CppCodeCache

    def fails(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(CppCodeCache, "load", fails)
    with pytest.warns(UserWarning, match="not built.*no compiler"):
        assert native.library.__wrapped__(cpu_attention.SOURCE, "#define HEAD 48") is None


@pytest.fixture(scope="module")
def vlm(quiet, tmp_path_factory):  # noqa: F811
    """Heads of 16, in float32, graphs that run as they are traced."""
    folder = tiny_vlms.with_heads_of_16(tmp_path_factory.mktemp("vlm"))
    policy = VLM(str(folder), max_new_tokens=14, compile="eager")
    policy.net.packs_sparse = False  # those passes are not compiled
    policy.ending = replace(policy.ending, stops=tuple(range(0, 256, 8)))
    return policy


def plainly(policy, work, *arguments):
    graphs = policy.net.compiled
    policy.net.compiled = None
    try:
        return work(policy, *arguments)
    finally:
        policy.net.compiled = graphs


def test_compiled_policies_sample_score_and_learn_alike(vlm, monkeypatch):
    described = []
    describe = compiled.direct
    monkeypatch.setattr(
        compiled, "direct", lambda *x: described.append(describe(*x)) or described[-1]
    )
    for refill, rows in (("none", None), ("rows", 5)):
        vlm.refill = refill
        vlm.fixed_batch_rows = rows
        quick = rolled(vlm, ASKED, copies=5)
        plain = plainly(vlm, rolled, ASKED, 5)
        lengths = quick.mask.sum(1)
        assert lengths.min() < lengths.max()  # rows leave, or make room
        assert torch.equal(quick.sample, plain.sample)
        torch.testing.assert_close(quick.logprob, plain.logprob, atol=2e-5, rtol=0)
        scored = torch.where(quick.mask, logprobs(vlm, quick).detach(), 0.0)
        torch.testing.assert_close(scored, quick.logprob, atol=2e-5, rtol=0)
        wanted = plainly(vlm, gradient, quick)
        computed = gradient(vlm, quick)
        assert wanted.keys() == computed.keys()
        scale = max(float(g.abs().max()) for g in wanted.values())
        for name, g in wanted.items():
            torch.testing.assert_close(computed[name], g, atol=1e-5 * scale, rtol=0, msg=name)
    assert described and None not in described
    assert {key[2][0] for key in vlm.net.compiled.tokens} == {cpu_attention.Direct}
    assert len(vlm.net.compiled.tokens) == 2  # with the draw and, of refilled rows, without


def test_graphs_of_sampling_are_of_one_state(vlm):
    """They trust the network while answers are sampled, and none that has changed since."""
    layer = vlm.net.hf.get_output_embeddings()
    vlm.refill = "none"
    vlm.fixed_batch_rows = None
    rolled(vlm, ASKED, copies=3)
    before = compiled.state_of(vlm.net)
    graphs = len(vlm.net.compiled.tokens)
    with torch.no_grad():
        for p in vlm.net.parameters():
            p.mul_(1.25)  # an update is no other state
    assert compiled.state_of(vlm.net) == before
    quick = rolled(vlm, ASKED, copies=3)
    torch.testing.assert_close(
        quick.logprob, plainly(vlm, rolled, ASKED, 3).logprob, atol=5e-5, rtol=0
    )
    assert len(vlm.net.compiled.tokens) == graphs
    assert vlm.net.compiled.state is None
    for switch in ("_disable_adapters", "active_adapters"):
        setattr(layer, switch, ["reference"])
        assert compiled.state_of(vlm.net) != before
        delattr(layer, switch)
    handle = layer.register_forward_hook(lambda *call: call[2] * 0.5)
    assert compiled.state_of(vlm.net) != before
    halved = rolled(vlm, ASKED, copies=3)
    torch.testing.assert_close(
        halved.logprob, plainly(vlm, rolled, ASKED, 3).logprob, atol=5e-5, rtol=0
    )
    handle.remove()
    assert not torch.equal(halved.sample, quick.sample)


def test_passes_of_the_update_fit_a_cache(vlm, monkeypatch):
    assert vlm.rows_of_pass(1000) == 8192 // 14
    assert vlm.rows_of_pass(20) == 20
    monkeypatch.setattr(vlm, "ending", replace(vlm.ending, tokens=10_000))
    assert vlm.rows_of_pass(1000) == 8
    monkeypatch.setattr("mmrl.core.distributed.world", lambda: (0, 2))
    assert vlm.rows_of_pass(1000) == 1000

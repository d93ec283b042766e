"""Tokens by code of ours: the same as the layers' own, on CPUs that have AVX-512."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mmrl.policies import native
from mmrl.policies.base import NO_CONTEXT, Drafts
from mmrl.policies.image_tokens import checkpoints, decoder
from mmrl.policies.image_tokens.kv_cache import Rooms
from mmrl.policies.image_tokens.models import llama, llamagen_gpt
from mmrl.policies.image_tokens.models.janus import Janus
from mmrl.policies.image_tokens.models.llamagen import LlamaGen
from mmrl.policies.image_tokens.models.llamagen_gpt import LlamaGenGPT, Shape
from mmrl.policies.image_tokens.models.llamagen_vq import LlamaGenVQ
from samplers.noise import Rng
from tests.fixtures.image_tokens import randomize, tiny_janus, tiny_llamagen

pytestmark = pytest.mark.skipif(not native.able(), reason="needs Linux on a CPU with AVX-512")

PROMPTS = [{"text": "a red seven", "label": 1}, {"text": "a blue two of a green nine", "label": 3}]
VOCAB = 37
BEFORE = 21  # columns that were read before the first token


def llama_of(heads, groups, size):
    """A Llama of transformers, its description, and its pass for one token."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=size,
        vocab_size=8,
        rms_norm_eps=1e-3,
    )
    model = randomize(LlamaModel(config))

    def token(x, rope, mask, place, rooms):
        return llama.token(model, x, rope, mask, place, rooms, "sdpa")

    def rotations(rows, at, like):
        cos, sin = llama.rotations(model, like, 3 * torch.arange(rows) + at, 1)
        return (cos, sin), (cos[:, 0, 0], sin[:, 0, 0])

    return SimpleNamespace(
        net=model, described=lambda: llama.described(model), token=token, rotations=rotations
    )


def gpt_of(heads, size):
    """The same of LlamaGen's network."""
    net = randomize(LlamaGenGPT(Shape(heads * size, 2, heads, VOCAB, 5, grid=8, feed=80)))

    def token(x, rope, mask, place, rooms):
        return llamagen_gpt.token(net, x, rope, mask, place, rooms)

    def rotations(rows, at, like):
        rope = net._rope(at, at + 1, like)
        return rope, llamagen_gpt.parts(rope)

    return SimpleNamespace(net=net, described=net.llama, token=token, rotations=rotations)


@pytest.mark.parametrize("rows", [1, 3, 8, 19])
@pytest.mark.parametrize(
    "model", [lambda: llama_of(4, 2, 16), lambda: llama_of(3, 3, 48), lambda: gpt_of(2, 32)]
)
@torch.no_grad()
def test_tokens_are_those_of_the_layers_in_float64(model, rows):
    """Three tokens one after the other, of rows that are padded by different lengths, in a cache
    that holds more columns than are written."""
    case = model()
    described = case.described()
    weights = decoder.Weights.of(described)
    shape = (rows, described.groups, BEFORE, described.size)
    read = [
        tuple(Rng.of(i, part).normal(torch.arange(rows), shape[1:]) for part in "kv")
        for i in range(len(described.layers))
    ]
    padding = torch.arange(BEFORE) >= (5 * torch.arange(rows) % (BEFORE + 1))[:, None]
    padding[:, -1] = True
    each = torch.arange(rows)
    rooms = Rooms.after(read, each, BEFORE + 4)
    exact = Rooms.after([(k.double(), v.double()) for k, v in read], each, BEFORE + 4)
    passes = weights.following(rooms, padding)
    width = len(described.norm)
    for at in range(3):
        x = Rng.of("x", at).normal(each, (1, width))
        _, turns = case.rotations(rows, at, x)
        found = passes.token(x, *turns, rooms)
        case.net.double()
        rope, _ = case.rotations(rows, at, x.double())
        place = exact.next(1)
        mask = exact.attention_mask(place, padding)
        wanted = case.token(x.double(), rope, mask, place, exact.layers)
        case.net.float()
        torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=0)
    assert rooms.length == exact.length
    for ours, theirs in zip(rooms, exact, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=0)


@pytest.mark.parametrize("outputs", [1, 16, 31, 33, 80])
@torch.no_grad()
def test_products_are_those_of_the_layer(outputs):
    layer = randomize(nn.Linear(23, outputs))
    matrix = decoder.Matrix.of(layer)
    for rows in range(1, 18):
        x = Rng.of("x").normal(torch.arange(rows), (2, 23))[:, 1]
        torch.testing.assert_close(matrix(x), layer(x), atol=1e-5, rtol=0)


def janus(folder, **options):
    return Janus(tiny_janus(folder, VOCAB, heads=2), **options)


def classes(folder, **options):
    return LlamaGen(str(wide_llamagen(folder)), **options)


def texts(folder, **options):
    return LlamaGen(
        str(wide_llamagen(folder, text=True)), text_encoder=str(folder / "t5"), **options
    )


def wide_llamagen(folder, text=False):
    """A tiny one whose heads are of 16 numbers."""
    tiny_llamagen(folder, text, VOCAB)
    shape = Shape(
        32, 2, 2, VOCAB, 0 if text else 5, caption=12, condition=40 if text else 1, grid=2, feed=48
    )
    checkpoints.save(randomize(LlamaGenGPT(shape)).state_dict(), folder / "gpt.safetensors")
    checkpoints.save(
        randomize(LlamaGenVQ(VOCAB, 4, 16, 32, (1, 1), 1, used=8)).state_dict(),
        folder / "vq.safetensors",
    )
    return folder


@pytest.fixture
def counted(monkeypatch):
    """Counts the passes that are made by code of ours."""
    counts = {"token": 0, "matrix": 0}

    def counting(kind, name, method):
        def call(*inputs):
            counts[name] += 1
            return method(*inputs)

        monkeypatch.setattr(kind, method.__name__, call)

    counting(decoder.Decoder, "token", decoder.Decoder.token)
    counting(decoder.Matrix, "matrix", decoder.Matrix.__call__)
    return counts


def assert_alike(ours, theirs):
    assert torch.equal(ours.sample, theirs.sample)
    torch.testing.assert_close(ours.logprob, theirs.logprob, atol=2e-5, rtol=0)


@pytest.mark.parametrize("options", [{"guidance_scale": 3.0}, {"guidance_scale": 1.0}, {"lora": 2}])
@pytest.mark.parametrize("make", [janus, classes, texts])
@torch.no_grad()
def test_compiled_rollouts_are_those_that_are_not(make, options, tmp_path, counted):
    """Prompts of different lengths; after an update too, whose weights the next rollout reads."""
    policy = make(tmp_path, **options)
    compiled = make(tmp_path, compile=True, **options)
    for update in range(2):
        for i, (a, b) in enumerate(
            zip(policy.net.parameters(), compiled.net.parameters(), strict=True)
        ):
            if a.requires_grad:
                a += 0.1 * Rng.of(update, i).normal(torch.zeros(1), (a.numel(),)).view(a.shape)
            b.copy_(a)
        rng = Rng.of("rollout", update)
        assert_alike(compiled.rollout(PROMPTS, 3, rng), policy.rollout(PROMPTS, 3, rng))
    assert counted["token"] == 2 * 3 and counted["matrix"] == 2 * 4
    assert compiled.net.weights is None and compiled.net.last is None


@pytest.mark.parametrize("make", [janus, texts])
@torch.no_grad()
def test_drafts_are_drawn_on_by_it(make, tmp_path, counted):
    """Rows that keep 0, 1, 2 ... tokens of their drafts."""
    policy, compiled = (make(tmp_path, guidance_scale=2.0, compile=on) for on in (False, True))
    old = policy.rollout(PROMPTS, 4, Rng.of("old"))
    wanted = torch.arange(4) < (torch.arange(8) % 5)[:, None]
    rollouts = []
    for each in (policy, compiled):
        drafts = Drafts(
            ids=old.sample,
            mask=old.mask,
            logprob=torch.where(wanted, -1e3, 1e3),  # certain to be kept, or not
            lenience=torch.ones(8),
        )
        context = NO_CONTEXT.__class__(drafts=lambda *_, drafts=drafts: drafts)
        rollouts.append(each.rollout(PROMPTS, 4, Rng.of("new"), context))
    assert_alike(*rollouts[::-1])
    assert counted["token"] > 0


@torch.no_grad()
def test_autocast_leaves_it_out(tmp_path, counted):
    policy = classes(tmp_path, compile="eager")
    policy.net.native = True
    with torch.autocast("cpu", torch.bfloat16):
        policy.rollout(PROMPTS, 2, Rng.of("autocast"))
    assert counted == {"token": 0, "matrix": 0}


@torch.no_grad()
def test_what_others_want_to_see_or_compute_is_left_to_them(tmp_path, counted):
    """Hooks, double precision, adapters that are no plain LoRA, biases of layers, and sizes that
    registers do not fill: no code of ours."""
    layer = nn.Linear(16, 16, bias=False)
    assert torch.equal(decoder.weight_of(layer), layer.weight)
    assert decoder.weight_of(nn.Linear(16, 16)) is None
    assert decoder.weight_of(nn.Linear(16, 16).double(), biased=True) is None
    layer.register_forward_hook(lambda *_: None)
    assert decoder.weight_of(layer) is None
    assert decoder.weight_of(type("Other", (nn.Linear,), {})(16, 16, bias=False)) is None
    assert decoder.Weights.of(gpt_of(2, 24).described()) is None
    assert decoder.Weights.of(None) is None
    case = llama_of(4, 2, 16)
    case.net.config.hidden_act = "gelu"
    assert case.described() is None
    weights = decoder.Weights.of(gpt_of(2, 32).described())
    key_values = torch.zeros(2, 2, 4, 32)
    rooms = Rooms.after([(key_values, key_values)] * 2, torch.arange(2), 8)
    holes = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 1]]).bool()
    assert weights.following(rooms, holes) is None
    assert weights.following(Rooms([(key_values, key_values)] * 2, 4), None) is None
    assert counted == {"token": 0, "matrix": 0}


def test_adapters_count_as_peft_counts_them():
    from peft import LoraConfig, inject_adapter_in_model

    for options, served in (({}, True), ({"use_dora": True}, False)):
        net = nn.Sequential(nn.Linear(16, 24, bias=False))
        config = LoraConfig(r=2, lora_alpha=3, target_modules=["0"], **options)
        layer = randomize(inject_adapter_in_model(config, net))[0]
        weight = decoder.weight_of(layer)
        assert (weight is not None) == served
        if weight is not None:
            x = Rng.of("x").normal(torch.arange(3), (16,))
            torch.testing.assert_close(F.linear(x, weight), layer(x), atol=1e-5, rtol=0)
            layer.enable_adapters(False)
            assert torch.equal(decoder.weight_of(layer), layer.get_base_layer().weight)

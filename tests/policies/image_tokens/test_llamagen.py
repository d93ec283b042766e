"""LlamaGen: published names and shapes at full size, exact by enumeration, the published traps."""

import warnings
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.zoo.models.image_tokens.llamagen import _T5, LlamaGen
from mmrl.zoo.models.image_tokens.llamagen_gpt import LlamaGenGPT, Shape, rotations
from mmrl.zoo.models.image_tokens.llamagen_vq import LlamaGenVQ
from samplers.noise import Rng
from tests.fixtures import image_tokens, published_vq
from tests.fixtures.image_tokens import (
    assert_adapters_are_exported,
    assert_checkpointing_changes_nothing,
    assert_compiles,
    assert_frequencies,
    assert_half_precision,
    assert_importance_weights_are_unbiased,
    assert_only_the_matched_gradient_is_true,
    assert_trains,
    at,
    every,
    logp,
    support,
    tiny_llamagen,
)

PROMPT = {"text": "a red seven", "label": 2}
PROMPTS = [PROMPT, {"text": "a blue two left of a green nine", "label": 0}]
VOCAB = 3
TOKENS = 4
IDS = every(VOCAB, TOKENS)
REWARD = torch.linspace(-1, 2, len(IDS), dtype=torch.float64).sin()


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folders = {
        kind: tiny_llamagen(tmp_path_factory.mktemp(kind), kind == "text", VOCAB)
        for kind in ("class", "text")
    }

    def make(kind="class", double=True, **options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            policy = LlamaGen(str(folders[kind]), text_encoder=str(folders[kind] / "t5"), **options)
        policy.net.to(torch.float64 if double else torch.float32)
        return policy

    return make


# --------------------------------------------------------------------------------------------------
# checkpoints

SIZES = {  # name: width, layers, heads, parameters as published, in millions
    "GPT-B": (768, 12, 12, 111),
    "GPT-XL": (1280, 36, 20, 775),
    "GPT-3B": (3200, 24, 32, 3100),
}


def published(dim, layers, text=False, vocab=16384):
    """Names and shapes of a published checkpoint, written down from its definition."""
    feed = -(-int(8 * dim / 3) // 256) * 256
    head = {"cls_embedding.embedding_table.weight": (1001, dim)}
    if text:
        head = {
            "cls_embedding.cap_proj.fc1.weight": (dim, 2048),
            "cls_embedding.cap_proj.fc2.weight": (dim, dim),
            "cls_embedding.uncond_embedding": (120, 2048),
        }
    block = {
        "attention.wqkv.weight": (3 * dim, dim),
        "attention.wo.weight": (dim, dim),
        "attention_norm.weight": (dim,),
        "feed_forward.w1.weight": (feed, dim),
        "feed_forward.w3.weight": (feed, dim),
        "feed_forward.w2.weight": (dim, feed),
        "ffn_norm.weight": (dim,),
    }
    ends = {
        "tok_embeddings.weight": (vocab, dim),
        "norm.weight": (dim,),
        "output.weight": (vocab, dim),
    }
    return (
        head
        | ends
        | {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
    )


@pytest.mark.parametrize(("name", "text"), [("GPT-B", False), ("GPT-XL", True), ("GPT-3B", False)])
def test_published_transformers_load_strictly_at_full_size(name, text):
    from mmrl.zoo.models.image_tokens.llamagen import shape_of

    dim, layers, heads, millions = SIZES[name]
    state = {
        key: torch.empty(shape, device="meta")
        for key, shape in published(dim, layers, text).items()
    }
    shape = shape_of(state, "checkpoint", 16, None)
    assert (shape.layers, shape.heads, shape.condition) == (layers, heads, 120 if text else 1)
    with torch.device("meta"):
        net = LlamaGenGPT(shape)
    net.load_state_dict(state, strict=True, assign=True)
    assert sum(p.numel() for p in net.parameters()) / 1e6 == pytest.approx(millions, rel=0.04)


def test_the_published_tokenizer_loads_strictly_at_full_size():
    state = {
        name: torch.empty(shape, device="meta") for name, shape in published_vq.llamagen().items()
    }
    with torch.device("meta"):
        vq = LlamaGenVQ.like(state, "checkpoint")
    vq.load_state_dict(state, strict=True, assign=True)
    assert (
        sum(p.numel() for p in vq.parameters()) / 1e6 == pytest.approx(72, abs=1)
        and vq.factor == 16
    )


def test_a_checkpoint_as_published_is_read(make, tmp_path):
    """A dictionary under "model" in a .pt file, with the rotations some of them carry."""
    policy = make(double=False)
    torch.save(
        {"model": policy.net.state_dict() | {"freqs_cis": torch.zeros(3)}}, tmp_path / "c2i.pt"
    )
    torch.save({"model": policy.vq.state_dict()}, tmp_path / "vq.pt")
    again = LlamaGen(str(tmp_path / "c2i.pt"), vq=str(tmp_path / "vq.pt"), size=4, heads=2)
    assert all(
        torch.equal(v, again.net.state_dict()[k]) for k, v in policy.net.state_dict().items()
    )
    with pytest.raises(UserError, match="vq is missing"):
        LlamaGen(str(tmp_path / "c2i.pt"))
    with pytest.raises(UserError, match="another kind of checkpoint"):
        LlamaGen(str(tmp_path / "vq.pt"), vq=str(tmp_path / "vq.pt"), size=4)
    broken = policy.net.state_dict()
    del broken["norm.weight"]
    torch.save({"model": broken}, tmp_path / "broken.pt")
    with pytest.raises(UserError, match=r"(?s)does not fit LlamaGenGPT.*norm\.weight"):
        LlamaGen(str(tmp_path / "broken.pt"), vq=str(tmp_path / "vq.pt"), size=4, heads=2)
    with pytest.raises(UserError, match="write hub:owner/name/file"):
        LlamaGen("hub:peizesun/llamagen_t2i")
    with pytest.raises(UserError, match="no file"):
        LlamaGen(str(tmp_path / "nothing.pt"), vq=str(tmp_path / "vq.pt"))


# -------------------------------------------------------------------------------------------------
# the transformer


def test_rotations_are_two_dimensional_and_the_condition_has_none():
    table = rotations(grid=3, dim=8, condition=2)
    assert table.shape == (11, 4, 2) and table[:2].abs().max() == 0
    row = 2
    column = 1
    # 10000^(-2 i / 4) of each half
    angles = torch.tensor([row * 1.0, row * 0.01, column * 1.0, column * 0.01])
    torch.testing.assert_close(
        table[2 + 3 * row + column], torch.stack([angles.cos(), angles.sin()], -1)
    )


def test_attention_scores_depend_on_the_distance_in_rows_and_columns():
    from mmrl.zoo.models.image_tokens.llamagen_gpt import rotated

    q, k = (
        Rng.of("qk", i).normal(torch.zeros(1), (1, 1, 8), dtype=torch.float64).expand(1, 1, 9, 8)
        for i in (0, 1)
    )
    rope = rotations(3, 8, 0).double()
    scores = (rotated(q, rope) @ rotated(k, rope).transpose(-1, -2))[0, 0].view(3, 3, 3, 3)
    torch.testing.assert_close(scores[0, 0, 1, 1], scores[1, 1, 2, 2], atol=1e-6, rtol=0)
    torch.testing.assert_close(scores[0, 2, 1, 1], scores[1, 2, 2, 1], atol=1e-6, rtol=0)
    assert (scores[0, 0, 0, 1] - scores[0, 0, 1, 0]).abs() > 1e-3


def test_an_image_token_sees_every_token_of_a_text_alike(make):
    """Keys of the condition are zero, so only values differ; what is padded is not seen at all."""
    policy = make("text")
    inputs = policy.collate(policy.encode(PROMPTS))
    assert not inputs["mask"].all() and inputs["mask"][:, -1].all() and not inputs["mask"][0, 0]
    with torch.no_grad():
        first = policy.net.teach(inputs, IDS[5:7])
        noise = torch.randn(inputs["text"].shape, generator=torch.Generator().manual_seed(0))
        moved = torch.where(inputs["mask"][..., None], inputs["text"], noise)
        torch.testing.assert_close(
            policy.net.teach(inputs | {"text": moved}, IDS[5:7]), first, atol=1e-12, rtol=0
        )


# --------------------------------------------------------------------------------------------------
# exactness

MODES = [
    {"guidance_scale": 1.0},
    {"guidance_scale": 3.0, "temperature": 0.7},
    {"guidance_scale": 4.0, "logprob_guidance": "conditional"},
]


@pytest.mark.parametrize(("kind", "options"), zip(("class", "text", "text"), MODES), ids=str)
def test_probabilities_of_all_images_sum_to_1(make, kind, options):
    with torch.no_grad():
        p = logp(make(kind, **options), IDS, PROMPT).exp()
    assert abs(p.sum() - 1) < 1e-10 and (p > 0).all()


@pytest.mark.parametrize(
    "options", [{"guidance_scale": 3.0, "top_k": 2}, {"top_p": 0.8, "temperature": 1.3}], ids=str
)
def test_probabilities_of_what_can_be_sampled_sum_to_1(make, options):
    policy = make("text", **options)
    with torch.no_grad():
        p = logp(policy, IDS, PROMPT).exp()
        possible = support(policy, IDS, PROMPT)
    assert 1 < possible.sum() < len(IDS) and abs(p[possible].sum() - 1) < 1e-10


@pytest.mark.parametrize(("kind", "guidance"), [("class", 1.0), ("text", 4.0)])
def test_token_by_token_is_all_at_once(make, kind, guidance):
    policy = make(kind, guidance_scale=guidance)
    with torch.no_grad():
        rollout = policy.rollout(PROMPTS, 3, Rng.of("once"))
        (point,) = policy.path(rollout)
        again = policy.dist(point).log_prob(point.target)
    torch.testing.assert_close(again, rollout.logprob, atol=1e-11, rtol=0)


def test_samples_come_at_the_rate_of_their_score(make):
    policy = make(guidance_scale=3.0, top_k=2)
    copies = 1000
    with torch.no_grad():
        rollout = policy.rollout([PROMPT], copies, Rng.of("frequencies"))
        p = logp(policy, IDS, PROMPT).exp()
    index = (rollout.sample * VOCAB ** torch.arange(TOKENS - 1, -1, -1)).sum(1)
    counts = torch.bincount(index, minlength=len(IDS))
    sampled = counts > 0
    assert sampled.sum() <= 2**TOKENS and abs(p[sampled].sum() - 1) < 0.02
    assert_frequencies(counts[sampled], p[sampled], copies)


def test_the_matched_gradient_is_the_true_one_and_the_published_is_not(make):
    assert_only_the_matched_gradient_is_true(make, IDS, REWARD, PROMPT, below=0.999)


def test_importance_weights_are_unbiased(make):
    policy = make(guidance_scale=2.0)
    assert_importance_weights_are_unbiased(
        policy, lambda: logp(policy, IDS, PROMPT), REWARD, within=1e-10
    )


def test_scoring_with_gradient_checkpointing_is_the_same(make):
    assert_checkpointing_changes_nothing(make, IDS[:9], PROMPT)


@pytest.mark.parametrize("kind", ["class", "text"])
def test_the_first_ratio_is_one_in_training(make, kind):
    assert_trains(make(kind, double=False, guidance_scale=3.0), PROMPTS)


# --------------------------------------------------------------------------------------------------
# the rest


def test_the_tokenizer_reads_back_its_own_codes(make):
    """Ids whose latents pass through decoder and encoder are random; the quantiser itself is
    exact."""
    vq = make(double=False).vq
    z = vq.quantize.codebook()[IDS[3]] * 1.7
    from mmrl.zoo.models.image_tokens.vq_parts import nearest

    assert torch.equal(
        nearest(torch.nn.functional.normalize(z, dim=-1), vq.quantize.codebook()), IDS[3]
    )
    images = vq.decode(IDS[:2])
    assert images.shape == (2, 3, 4, 4) and vq.encode(images).shape == (2, 4)


def test_adapters_are_added_to_what_is_exported(make, tmp_path: Path):
    policy = make(double=False, lora=2)
    assert_adapters_are_exported(LlamaGen, policy, IDS, PROMPT, tmp_path)


def test_a_prompt_without_a_class_is_named(make):
    with pytest.raises(UserError, match="prompt 1 needs 'label', a class of 0..4"):
        make().encode([PROMPT, {"text": "a seven"}])


@pytest.mark.parametrize("kind", ["class", "text"])
def test_half_precision(make, kind):
    assert_half_precision(make(kind, double=False, guidance_scale=3.0), PROMPTS, apart=2e-2)


@pytest.mark.parametrize("kind", ["class", "text"])
def test_a_compiled_token_is_the_same(make, kind, monkeypatch):
    assert_compiles(make(kind, guidance_scale=3.0), PROMPTS, monkeypatch)


def test_shapes_are_told_by_width():
    assert Shape(1280, 36, 20).width() == 3584


# --------------------------------------------------------------------------------------------------
# checkpoints as people have them


@pytest.fixture(scope="module")
def given():
    """The transformer's tensors and the tokenizer's file of the class-conditional model."""
    from safetensors.torch import load_file

    folder = image_tokens.folder("llamagen-classes")
    return load_file(folder / "gpt.safetensors"), str(folder / "vq.safetensors")


def saved(place, name, gpt, **beside):
    torch.save({"model": gpt, **beside}, place / name)
    return str(place / name)


@pytest.mark.parametrize(
    ("name", "beside", "grid"),
    [
        ("c2i_L_384.pt", {}, 192),
        ("t2i_XL_stage2_512.pt", {}, 256),
        ("0050000.pt", {"args": Namespace(image_size=96, downsample_size=16)}, 6),
        ("c2i_L_384.pt", {"positions": 5}, 5),
    ],
)
def test_pictures_have_the_size_of_the_checkpoint(name, beside, grid, given, tmp_path):
    """The tokenizer of these tests makes two by two pixels of a token."""
    gpt, vq = given
    cells = beside.pop("positions", None)
    table = {} if cells is None else {"freqs_cis": torch.zeros(1 + cells**2, 4, 2)}
    policy = LlamaGen(saved(tmp_path, name, gpt | table, **beside), vq=vq, heads=2)
    assert policy.size == 2 * grid and policy.net.shape.grid == grid and not policy.report.notes


def test_a_size_that_nothing_tells_or_another_one_is_said(given, tmp_path):
    gpt, vq = given
    unknown = LlamaGen(saved(tmp_path, "gpt.pt", gpt), vq=vq, heads=2)
    assert unknown.size == 256 and "neither gpt.pt nor its name says" in unknown.report.notes[0]
    other = LlamaGen(saved(tmp_path, "c2i_L_384.pt", gpt), vq=vq, heads=2, size=4)
    assert other.size == 4 and "was trained at 384 pixels" in other.report.notes[0]


def test_a_checkpoint_of_the_published_training_is_read_without_other_pickles(given, tmp_path):
    gpt, vq = given
    wrapped = {f"_orig_mod.{name}": value for name, value in gpt.items()}
    file = saved(tmp_path, "0050000.pt", wrapped, optimizer={}, steps=1, args=Namespace(lr=1))
    policy = LlamaGen(file, vq=vq, heads=2, size=4)
    for name, value in gpt.items():
        assert torch.equal(policy.net.state_dict()[name], value)
    file = saved(tmp_path, "other.pt", gpt, args=Path("anything"))
    with pytest.raises(UserError, match="cannot read .*other.pt as tensors"):
        LlamaGen(file, vq=vq, heads=2, size=4)


def test_guidance_ends_where_the_published_loop_ends_it(make):
    """It draws the first token, then counts from 0: token j + 1 is guided up to j = interval."""
    sample = IDS[::7]
    policies = {
        name: make(guidance_scale=scale, cfg_interval=interval)
        for name, scale, interval in (("part", 3.0, 0), ("all", 3.0, None), ("none", 1.0, None))
    }
    score = {name: each(policy, sample) for name, policy in policies.items()}
    torch.testing.assert_close(score["part"][:, :2], score["all"][:, :2])
    torch.testing.assert_close(score["part"][:, 2:], score["none"][:, 2:], atol=1e-9, rtol=0)
    assert (score["all"] - score["none"]).abs().max() > 0.01


def each(policy, ids):
    """Log-probs of every token."""
    with torch.no_grad():
        return policy.dist(at(policy, ids, PROMPT)).log_prob(ids)


def test_texts_that_are_cut_are_said_once(make):
    policy = make("text")
    prompts = [PROMPT, {"text": "red " * 50 + "seven"}]
    policy.admit(prompts)
    assert "1 of 2 prompts are longer than the 40 tokens" in policy.report.notes[-1]
    with torch.no_grad():
        policy.encode(prompts)
    assert not policy.report.warnings
    unseen = make("text")
    unseen.encode(prompts), unseen.encode([{"text": "blue " * 60}])
    assert len(unseen.report.warnings) == 1 and "40 tokens" in unseen.report.warnings[0]


def test_what_does_not_fit_is_one_sentence(make, given, tmp_path):
    gpt, vq = given
    with pytest.raises(UserError, match="heads 3: the width 16"):
        LlamaGen(saved(tmp_path, "gpt_256.pt", gpt), vq=vq, heads=3)
    (tmp_path / "config.json").write_text('{"hidden_size": 16}')
    with pytest.raises(UserError, match="has no size and no heads"):
        LlamaGen(str(tmp_path), vq=vq)
    policy = make("text")
    with pytest.raises(
        UserError, match="its features have 12 numbers, and the checkpoint reads 16"
    ):
        _T5(policy.text_encoder, 16)

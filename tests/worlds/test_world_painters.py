"""Tokenizers and token painters of the digits world, on the barely trained ``-test`` variants."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mmrl.core.registry import POLICIES, load_built_in, locate
from mmrl.worlds import painting, recipes, scales, vq, vq_names
from mmrl.worlds.data import Digits
from mmrl.worlds.render import render
from mmrl.worlds.scenes import captions, is_held_out, singles
from mmrl.zoo.models.image_tokens.var_vq import VARVQ
from mmrl.zoo.models.image_tokens.vq_parts import nearest
from samplers.noise import Rng
from tests.fixtures.records import make_point

OPTIONS = {"llamagen": {}, "janus": {}, "var": {}, "amused": {"steps": 3, "fixed_batch_rows": 4}}
RECIPE = recipes.VQ_TEST


@pytest.fixture(scope="module", autouse=True)
def registered():
    load_built_in()
    for name in OPTIONS:  # built before any test that computes without gradients
        locate(f"world:digits/{name}-test")


@pytest.fixture(scope="module")
def codec(registered):
    """LlamaGen's VQ with all weights moved, so that nothing is zero."""
    found = vq.load_vq(Path(locate("world:digits/vq-test")))
    with torch.no_grad():
        for i, p in enumerate(found.parameters()):
            p.add_(0.05 * Rng.of("move", i).normal(torch.zeros(1), (p.numel(),)).view(p.shape))
        found.post_quant_conv.bias.zero_()
    return found


@pytest.fixture(scope="module")
def images():
    prompts = captions("triples", 12)
    return render(prompts, Rng.of(3)).images * 2 - 1


def make(name, **options):
    return POLICIES[name](path=f"world:digits/{name}-test", **OPTIONS[name], **options)


# --------------------------------------------------------------------------------------------------
# the tokenizers


@torch.no_grad()
def test_three_classes_are_one_tokenizer(codec, images):
    from transformers import JanusVQVAE, JanusVQVAEConfig

    janus = JanusVQVAE(JanusVQVAEConfig(**vq_names.janus_config(codec), num_patches=4)).eval()
    vq_names.into_janus(codec, janus)
    ids = codec.encode(images)
    assert (
        torch.equal(janus.encode(images).image_tokens.view_as(ids), ids) and len(ids.unique()) > 2
    )
    pixels = codec.decode(ids)
    torch.testing.assert_close(janus.decode(ids), pixels, atol=1e-4, rtol=1e-4)
    theirs = vq_names.diffusers_vq(codec, 32)
    found = theirs.decode(
        ids.view(-1, 4, 4), force_not_quantize=True, shape=(len(ids), 4, 4, 12)
    ).sample
    torch.testing.assert_close(2 * found - 1, pixels, atol=1e-4, rtol=1e-4)
    latents = theirs.encode(images / 2 + 0.5).latents
    # padding differs at the border
    assert (theirs.quantize(latents)[2][2].view_as(ids) == ids).float().mean() > 0.5


@torch.no_grad()
def test_vars_tokenizer_begins_as_the_same_network(codec, images):
    new = scales.begun(codec, RECIPE).eval()
    z = codec.quant_conv(codec.encoder(images))
    torch.testing.assert_close(new.quant_conv(new.encoder(images)), z, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        new.decoder(new.post_quant_conv(z)),
        codec.decoder(codec.post_quant_conv(z)),
        atol=1e-3,
        rtol=1e-3,
    )


@torch.no_grad()
def test_fitting_the_scales_lowers_what_is_missing_and_uses_the_codebook(codec, images):
    new = scales.begun(codec, replace(RECIPE, vocab=24)).eval()
    z = new.quant_conv(new.encoder(images))
    scales.fit(new, images)
    compared, f = scales.residuals(new, z)
    assert (f - z).square().mean() < 0.5 * z.square().mean()
    used = nearest(torch.cat(compared), new.quantize.embedding.weight).unique()
    assert len(used) > 20
    ids = new.encode(images)  # what encodes pictures is what was fitted
    again = new.quantize.blank(len(ids))
    for k, part in enumerate(new.quantize.split(ids)):
        again = new.quantize.add(again, part, k)
    torch.testing.assert_close(again, f, atol=1e-4, rtol=1e-4)


def test_k_means_finds_clusters_and_a_round_never_makes_it_worse():
    centres = 10 * torch.eye(5)
    points = torch.cat(
        [centres + 0.1 * Rng.of("k", i).normal(torch.arange(5), (5,)) for i in range(20)]
    )
    book = vq.k_means(points, 5, Rng.of(0))
    assert (
        nearest(book, centres).unique().numel() == 5
        and torch.cdist(book, centres).amin(1).max() < 0.2
    )
    book = points[:7]

    def error(book):
        return (points - book[nearest(points, book)]).square().sum()

    for _ in range(4):
        after = vq.lloyd(points, book)
        assert error(after) <= error(book) + 1e-4
        book = after


def test_pages_hold_the_nearest_entries_and_every_entry_is_used(images):
    recipe = replace(RECIPE, scenes=120)
    new = vq.new_vq(recipe)
    pages = vq.paginate(new, recipe)
    assert len(pages.ids.unique()) > 0.9 * recipe.vocab
    torch.testing.assert_close(pages.codes.norm(dim=1), torch.ones_like(pages.codes[:, 0]))
    entries = vq.entries(new, pages.ids)
    flat = entries.permute(0, 2, 3, 1).flatten(0, 2)
    # an entry is its own nearest
    assert torch.equal(nearest(flat, new.quantize.codebook()), pages.ids.flatten())
    assert (entries - pages.codes).square().sum(1).mean() < 0.3  # of 2 for a stranger


@torch.no_grad()
def test_at_first_the_whole_decoder_enlarges_the_half_one():
    new = vq.new_vq(RECIPE)
    q = F.normalize(Rng.of("q").normal(torch.arange(2), (12, 4, 4)), dim=1)
    half = vq.half(new, q)
    whole = new.decoder(new.post_quant_conv(q))
    # away from the border's padding
    inside = (slice(None), slice(None), slice(2, -2), slice(2, -2))
    twice = F.interpolate(half, scale_factor=2.0)
    assert half.shape == (2, 3, 16, 16) and whole.shape == (2, 3, 32, 32)
    assert (whole - twice)[inside].abs().mean() < 0.5 * twice.std()


def test_no_held_out_caption_is_pictured():
    seen = [p["text"] for p in vq.pictured(900, 0)]
    seen += [
        p["text"]
        for p in painting.prepare(
            lambda x: torch.zeros(len(x), 1), replace(recipes.VAR, scenes=200)
        )[2]
    ]
    assert len(set(seen)) > 300 and not any(map(is_held_out, seen))


# --------------------------------------------------------------------------------------------------
# the generators


@pytest.mark.parametrize("name", OPTIONS)
def test_the_policy_loads_the_folder_and_paints(name):
    policy = make(name, guidance_scale=2.0)
    prompts = Digits().held_out[:2]
    with torch.no_grad():
        rollout = policy.rollout(prompts, 2, Rng.of(0))
        pixels = policy.decode(rollout)
    assert pixels.shape == (4, 3, 32, 32) and pixels.min() >= 0 and pixels.max() <= 1
    assert (
        rollout.sample.shape[1] == (21 if name == "var" else 16)
        and rollout.logprob.isfinite().all()
    )


def test_the_libraries_load_the_folders_and_paint():
    from diffusers import AmusedPipeline
    from transformers import AutoProcessor, JanusForConditionalGeneration

    place = locate("world:digits/janus-test")
    model = JanusForConditionalGeneration.from_pretrained(place).eval()
    reads = AutoProcessor.from_pretrained(place)
    asked = reads(
        text=["a red seven", "a blue two in the middle"],
        generation_mode="image",
        padding=True,
        return_tensors="pt",
    )
    assert asked["input_ids"][0].tolist().count(reads.tokenizer.unk_token_id) == 0
    ids = model.generate(**asked, generation_mode="image", do_sample=False, guidance_scale=2.0)
    assert model.decode_image_tokens(ids).shape == (2, 32, 32, 3)
    pipe = AmusedPipeline.from_pretrained(locate("world:digits/amused-test"))
    pipe.set_progress_bar_config(disable=True)
    assert pipe("a red seven", num_inference_steps=2, output_type="np").images.shape == (
        1,
        32,
        32,
        3,
    )


@pytest.mark.parametrize(
    ("name", "absent"), [("llamagen", True), ("janus", False), ("janus", True), ("var", True)]
)
@torch.no_grad()
def test_what_training_minimises_is_what_the_policy_scores(name, absent):
    """The loss of given ids under a caption, or without one, is the mean of the policy's own
    log-probs."""
    import importlib

    world = importlib.import_module(f"mmrl.worlds.{name}")
    policy = make(name, guidance_scale=1.0)
    prompts = Digits().train[:3]
    net = policy.net
    vocab = policy.net.vocab
    ids = (Rng.of("ids").uniform(torch.arange(3), (sum(net.turns),)) * vocab).long()
    cond = policy.encode(prompts)
    inputs = policy.collate(cond)
    given = policy.empty(inputs) if absent else inputs
    every = torch.ones_like(ids).bool()
    want = -net.score(given, None, ids, every, torch.ones(ids.shape[1]), policy.warp, False)[
        1
    ].logprob
    shown = torch.full((3,), 3) if absent else torch.arange(3)
    batch = painting.Batch(ids, shown, torch.arange(3), Rng.of(0))
    if name == "janus":
        table = {"input_ids": inputs["ids"], "attention_mask": inputs["mask"]}
        found = world.loss(net, table, [policy.bos, policy.start], batch)
    else:
        found = world.loss(
            net, torch.tensor([*(p["label"] for p in prompts), painting.CLASSES]), batch
        )
    torch.testing.assert_close(found, want.mean())


@torch.no_grad()
def test_what_the_masked_model_minimises_is_what_the_policy_scores():
    from mmrl.worlds import amused

    policy = make("amused")
    prompts = Digits().train[:3]
    ids = (Rng.of("ids").uniform(torch.arange(3), (16,)) * 16).long()
    cond = policy.encode(prompts)
    rng = Rng.of("loss")
    group = torch.arange(3)
    batch = painting.Batch(ids, group, group, rng)
    u = rng.uniform(group, (17,)).float()
    hidden = (u[:, 1:] < (u[:, :1] * torch.pi / 2).cos()) | (
        u[:, 1:] == u[:, 1:].amin(1, keepdim=True)
    )
    point = make_point(
        group=group,
        cond=cond,
        row_id=group,
        state=torch.where(hidden, 16, ids),
        target=ids,
        mask=hidden,
    )
    want = -policy.dist(point).log_prob(ids)[hidden].mean()
    torch.testing.assert_close(
        amused.loss(policy.net, {k: cond[k] for k in ("text", "pooled")}, batch), want
    )


def test_embeddings_of_classes_are_sums_until_training_ends():
    known = singles()
    weight = painting.Composed(8)(torch.zeros(241, 8))
    number = {p["text"]: i for i, p in enumerate(known)}
    for one, two in itertools.combinations(("a red seven", "a blue two", "a green zero"), 2):
        step = [
            weight[number[f"{text} in the top left"]] - weight[number[text]] for text in (one, two)
        ]
        torch.testing.assert_close(*step)
    assert len(weight.unique(dim=0)) == 241
    labels = {p["text"]: p["label"] for p in [*Digits().train, *Digits().held_out]}
    assert labels == number and set(range(240)) == set(labels.values())
    assert isinstance(make("var").vae, VARVQ)

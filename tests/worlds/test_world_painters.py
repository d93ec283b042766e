"""Tokenizers and token painters of the digits world, on the barely trained ``-test`` variants."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmrl.core.registry import POLICIES, load_built_in, locate
from mmrl.worlds import amused, painting, recipes, scales, vq, vq_names
from mmrl.worlds.data import Digits
from mmrl.worlds.render import render
from mmrl.worlds.scenes import captions, is_held_out
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
    assert torch.equal(janus.encode(images).image_tokens.view_as(ids), ids)
    assert len(ids.unique()) > 2
    pixels = codec.decode(ids)
    torch.testing.assert_close(janus.decode(ids), pixels, atol=1e-4, rtol=1e-4)
    theirs = vq_names.diffusers_vq(codec, 32)
    shape = (len(ids), 4, 4, 12)
    found = theirs.decode(ids.view(-1, 4, 4), force_not_quantize=True, shape=shape).sample
    torch.testing.assert_close(2 * found - 1, pixels, atol=1e-4, rtol=1e-4)
    latents = theirs.encode(images / 2 + 0.5).latents
    # padding differs at the border
    assert (theirs.quantize(latents)[2][2].view_as(ids) == ids).float().mean() > 0.5


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


def test_no_held_out_caption_is_pictured():
    few = replace(recipes.VAR, scenes=200)
    painted = painting.prepare(lambda x: torch.zeros(len(x), 1), few)[2]
    seen = {p["text"] for p in (*vq.pictured(900, 0), *painted)}
    assert len(seen) > 300 and not any(map(is_held_out, seen))


# --------------------------------------------------------------------------------------------------
# the generators


@pytest.mark.parametrize("name", OPTIONS)
def test_the_policy_loads_the_folder_and_paints(name):
    policy = make(name, guidance_scale=2.0)
    with torch.no_grad():
        rollout = policy.rollout(Digits().held_out[:2], 2, Rng.of(0))
        pixels = policy.decode(rollout)
    assert pixels.shape == (4, 3, 32, 32) and pixels.min() >= 0 and pixels.max() <= 1
    assert rollout.sample.shape[1] == (21 if name == "var" else 16)


def test_the_libraries_load_the_folders_and_paint():
    from diffusers import AmusedPipeline
    from transformers import AutoProcessor, JanusForConditionalGeneration

    place = locate("world:digits/janus-test")
    model = JanusForConditionalGeneration.from_pretrained(place).eval()
    reads = AutoProcessor.from_pretrained(place)
    texts = ["a red seven", "a blue two in the middle"]
    asked = reads(text=texts, generation_mode="image", padding=True, return_tensors="pt")
    assert reads.tokenizer.unk_token_id not in asked["input_ids"][0].tolist()
    ids = model.generate(**asked, generation_mode="image", do_sample=False, guidance_scale=2.0)
    assert model.decode_image_tokens(ids).shape == (2, 32, 32, 3)
    pipe = AmusedPipeline.from_pretrained(locate("world:digits/amused-test"))
    pipe.set_progress_bar_config(disable=True)
    images = pipe("a red seven", num_inference_steps=2, output_type="np").images
    assert images.shape == (1, 32, 32, 3)


@pytest.mark.parametrize(
    ("name", "absent"), [("llamagen", True), ("janus", False), ("janus", True), ("var", True)]
)
@torch.no_grad()
def test_what_training_minimises_is_what_the_policy_scores(name, absent):
    """The loss of given ids under a caption, or without one, is the mean of the policy's own
    log-probs."""
    world = importlib.import_module(f"mmrl.worlds.{name}")
    policy = make(name, guidance_scale=1.0)
    prompts = Digits().train[:3]
    net = policy.net
    ids = (Rng.of("ids").uniform(torch.arange(3), (sum(net.turns),)) * net.vocab).long()
    inputs = policy.collate(policy.encode(prompts))
    given = policy.empty(inputs) if absent else inputs
    scales = torch.ones(ids.shape[1])
    _, score = net.score(given, None, ids, torch.ones_like(ids).bool(), scales, policy.warp, False)
    shown = torch.full((3,), 3) if absent else torch.arange(3)
    batch = painting.Batch(ids, shown, torch.arange(3), Rng.of(0))
    if name == "janus":
        table = {"input_ids": inputs["ids"], "attention_mask": inputs["mask"]}
        found = world.loss(net, table, [policy.bos, policy.start], batch)
    else:
        labels = torch.tensor([*(p["label"] for p in prompts), painting.CLASSES])
        found = world.loss(net, labels, batch)
    torch.testing.assert_close(found, -score.logprob.mean())


@torch.no_grad()
def test_what_the_masked_model_minimises_is_what_the_policy_scores():
    policy = make("amused")
    prompts = Digits().train[:3]
    ids = (Rng.of("ids").uniform(torch.arange(3), (16,)) * 16).long()
    cond = policy.encode(prompts)
    rng = Rng.of("loss")
    group = torch.arange(3)
    batch = painting.Batch(ids, group, group, rng)
    u = rng.uniform(group, (17,)).float()
    least = u[:, 1:] == u[:, 1:].amin(1, keepdim=True)
    hidden = (u[:, 1:] < (u[:, :1] * torch.pi / 2).cos()) | least
    state = torch.where(hidden, 16, ids)
    shown = {"state": state, "target": ids, "mask": hidden}
    point = make_point(group=group, cond=cond, row_id=group, **shown)
    want = -policy.dist(point).log_prob(ids)[hidden].mean()
    found = amused.loss(policy.net, {k: cond[k] for k in ("text", "pooled")}, batch)
    torch.testing.assert_close(found, want)

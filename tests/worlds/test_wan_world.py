"""The tiny Wan of the digits world: complete folders that diffusers' own pipelines load, and our
policies with them."""

import pytest
import torch

from mmrl.core.registry import DATA, POLICIES, load_built_in, locate
from mmrl.worlds.moving import FRAMES, captions, film
from samplers.noise import Rng

# Where the autoencoder does not compress time, diffusers (0.42) makes one frame more than asked
# for.
SIZES = {
    "height": 32,
    "width": 32,
    "num_frames": FRAMES - 1,
    "num_inference_steps": 3,
    "max_sequence_length": 8,
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    load_built_in()


@pytest.fixture(scope="module")
def pipe():
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(locate("world:digits/wan-test"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_plain_pipeline_makes_a_video(pipe):
    names = {
        name: type(part).__name__ for name, part in pipe.components.items() if part is not None
    }
    assert names["tokenizer"].startswith("T5Tokenizer")
    assert {name: names[name] for name in ("text_encoder", "vae", "transformer", "scheduler")} == {
        "text_encoder": "UMT5EncoderModel",
        "vae": "AutoencoderKLWan",
        "transformer": "WanTransformer3DModel",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
    }
    video = pipe("a red seven moving left", guidance_scale=2.0, output_type="pt", **SIZES).frames
    assert video.shape == (1, FRAMES, 3, 32, 32) and video.isfinite().all()


def test_the_policy_makes_the_same_video(pipe):
    policy = POLICIES.build(
        "wan",
        path="world:digits/wan-test",
        size=32,
        frames=FRAMES,
        steps=3,
        text_length=8,
        fixed_batch_rows=2,
    )
    prompts = [{"text": "a red seven moving left"}, {"text": "a blue two standing still"}]
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout(prompts, 1, Rng.of(0))
        ours = policy.decode(rollout)
    texts = [prompt["text"] for prompt in prompts]
    theirs = pipe(
        texts, guidance_scale=1.0, latents=rollout.latents.states[:, 0], output_type="pt", **SIZES
    ).frames
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_image_to_video_by_pipeline_and_policy():
    from diffusers import WanImageToVideoPipeline

    pipe = WanImageToVideoPipeline.from_pretrained(locate("world:digits/wan_i2v-test"))
    pipe.set_progress_bar_config(disable=True)
    policy = POLICIES.build(
        "wan_i2v",
        path="world:digits/wan_i2v-test",
        size=32,
        frames=FRAMES,
        steps=3,
        text_length=8,
        fixed_batch_rows=1,
    )
    prompt = DATA.build("digits_moving", images=1).held_out[0]
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout([prompt], 1, Rng.of(0))
        ours = policy.decode(rollout)
    theirs = pipe(
        prompt["image"],
        prompt["text"],
        guidance_scale=1.0,
        latents=rollout.latents.states[:, 0],
        output_type="pt",
        **SIZES,
    ).frames
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_training_sees_what_the_pipelines_encode(pipe):
    from mmrl.worlds.wan import first_frames
    from mmrl.worlds.wan_parts import embed_texts

    texts = ["a red seven moving left", "", "a yellow zero standing still"]
    ours = embed_texts(pipe.text_encoder, pipe.tokenizer, texts)
    theirs, _ = pipe.encode_prompt(texts, do_classifier_free_guidance=False, max_sequence_length=8)
    torch.testing.assert_close(ours, theirs)
    policy = POLICIES.build(
        "wan_i2v", path="world:digits/wan_i2v-test", size=32, frames=FRAMES, text_length=8
    )
    prompt = DATA.build("digits_moving", images=1).train[0]
    clip = film([prompt], Rng.of(0, "first frames")).frames.transpose(1, 2)
    seen = policy.encode([prompt])["condition"]
    # the image has 8 bits
    torch.testing.assert_close(first_frames(pipe.vae, clip), seen, atol=0.05, rtol=0)


def test_every_word_is_one_token(pipe):
    ids = pipe.tokenizer([p["text"] for p in captions()]).input_ids
    assert {len(row) for row in ids} == {6} and len({tuple(row) for row in ids}) == 200
    assert pipe.tokenizer.model_max_length == 8


def test_the_autoencoder_is_the_projection_it_says():
    """Real AutoencoderKLWan, weights in closed form: equal to principal components of squares by
    plain arithmetic."""
    from mmrl.worlds.recipes import WanVaeRecipe
    from mmrl.worlds.wan_parts import closed_form_vae, encode_clips

    vae = closed_form_vae(WanVaeRecipe(scenes=160))
    clips = film(captions()[:24], Rng.of(3), "judge").frames.transpose(1, 2)
    latents = encode_clips(vae, clips)
    assert latents.shape == (24, 40, FRAMES, 2, 2) and abs(latents.std() - 1) < 0.1
    back = vae.decode(latents).sample / 2 + 0.5
    assert -10 * (back - clips).square().mean().log10() > 26
    again = encode_clips(vae, back.clamp(0, 1))
    assert (again - latents).square().mean() < 0.02  # but for what clamping takes away
    squares = (
        clips.unflatten(-1, (2, 16))
        .unflatten(-3, (2, 16))
        .permute(0, 2, 3, 5, 1, 4, 6)
        .reshape(-1, 768)
    )
    codes = latents.permute(0, 2, 3, 4, 1).reshape(-1, 40)
    design = torch.cat([squares, torch.ones(len(squares), 1)], 1).double()
    fitted = design @ torch.linalg.lstsq(design, codes.double(), driver="gelsd").solution
    assert (fitted - codes).abs().max() < 2e-2  # affine: silence and normalisation add nothing


def test_a_network_begins_by_passing_noise_on():
    from mmrl.worlds import recipes
    from mmrl.worlds.artifacts import wan_parts
    from mmrl.worlds.wan import load_parts, new_transformer

    net = new_transformer(
        load_parts(wan_parts("digits/wan-parts-test", recipes.WAN_PARTS_TEST)), recipes.WAN_TEST
    )
    noise = torch.randn(4, 8, FRAMES, 2, 2, generator=torch.Generator().manual_seed(0))
    out = net(noise, torch.full((4,), 1000.0), torch.zeros(4, 8, 64), return_dict=False)[0]
    assert torch.nn.functional.cosine_similarity(out.flatten(1), noise.flatten(1)).min() > 0.3

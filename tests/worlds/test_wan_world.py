"""The tiny Wan of the digits world: complete folders that diffusers' own pipelines load, and our
policies with them."""

import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline

from mmrl.core.registry import DATA, POLICIES, load_built_in, locate
from mmrl.worlds.moving import FRAMES, captions, film
from mmrl.worlds.wan import first_frames
from mmrl.worlds.wan_parts import embed_texts
from samplers.noise import Rng

# Where the autoencoder does not compress time, diffusers (0.42) makes one frame more than asked
# for.
SIZES = {"height": 32, "width": 32, "num_frames": FRAMES - 1, "num_inference_steps": 3}
SIZES |= {"max_sequence_length": 8, "output_type": "pt"}
load_built_in()


def piped(kind, name):
    pipe = kind.from_pretrained(locate(f"world:digits/{name}-test"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def pipe():
    return piped(WanPipeline, "wan")


def policy_of(name, **options):
    path = f"world:digits/{name}-test"
    return POLICIES.build(name, path=path, size=32, frames=FRAMES, text_length=8, **options)


def drawn(name, prompts):
    policy = policy_of(name, steps=3, fixed_batch_rows=len(prompts))
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout(prompts, 1, Rng.of(0))
        return policy.decode(rollout), rollout.latents.states[:, 0]


def test_the_policy_makes_the_video_of_the_plain_pipeline(pipe):
    texts = ["a red seven moving left", "a blue two standing still"]
    ours, latents = drawn("wan", [{"text": text} for text in texts])
    theirs = pipe(texts, guidance_scale=1.0, latents=latents, **SIZES).frames
    assert theirs.shape == (2, FRAMES, 3, 32, 32)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_image_to_video_by_pipeline_and_policy():
    prompt = DATA.build("digits_moving", images=1).held_out[0]
    ours, latents = drawn("wan_i2v", [prompt])
    shown = prompt["image"], prompt["text"]
    other = piped(WanImageToVideoPipeline, "wan_i2v")
    theirs = other(*shown, guidance_scale=1.0, latents=latents, **SIZES).frames
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_training_sees_what_the_pipelines_encode(pipe):
    texts = ["a red seven moving left", "", "a yellow zero standing still"]
    ours = embed_texts(pipe.text_encoder, pipe.tokenizer, texts)
    theirs, _ = pipe.encode_prompt(texts, do_classifier_free_guidance=False, max_sequence_length=8)
    torch.testing.assert_close(ours, theirs)
    policy = policy_of("wan_i2v")
    prompt = DATA.build("digits_moving", images=1).train[0]
    clip = film([prompt], Rng.of(0, "first frames")).frames.transpose(1, 2)
    seen = policy.encode([prompt])["condition"]
    # the image has 8 bits
    torch.testing.assert_close(first_frames(pipe.vae, clip), seen, atol=0.05, rtol=0)


def test_every_word_is_one_token(pipe):
    ids = pipe.tokenizer([p["text"] for p in captions()]).input_ids
    assert {len(row) for row in ids} == {6} and len({tuple(row) for row in ids}) == 200
    assert pipe.tokenizer.model_max_length == 8

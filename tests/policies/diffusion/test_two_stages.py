"""Kandinsky 2.2 by the policy ``pipeline``: its decoder is trained on the embedding that its prior
samples for each prompt, by the prompt's own numbers."""

from __future__ import annotations

import json

import diffusers
import pytest
import torch

from mmrl.policies.diffusion.two_stages import generator_of
from tests.fixtures import tiny_diffusers
from tests.policies.diffusion.test_any_pipeline import (
    PROMPTS,
    RNG,
    evaluated,
    make,
    place_of,
    sampled,
)

TEXTS = [prompt["text"] for prompt in PROMPTS]
BOTH = "kandinsky22-combined"


def combined():
    pipe = diffusers.KandinskyV22CombinedPipeline.from_pretrained(place_of(BOTH))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def called(pipe, text, noise, guidance, prior_guidance=4.0, negative=None, row=0):
    """The two stages by diffusers alone, from this noise of the decoder."""
    embeddings, zeros = pipe.prior_pipe(
        text,
        negative_prompt=negative,
        num_inference_steps=3,
        guidance_scale=prior_guidance,
        generator=generator_of(text, row),
        return_dict=False,
    )
    pictures = pipe.decoder_pipe(
        image_embeds=embeddings,
        negative_image_embeds=zeros,
        height=16,
        width=16,
        num_inference_steps=4,
        guidance_scale=guidance,
        latents=noise,
        output_type="np",
        return_dict=False,
    )[0]
    return torch.from_numpy(pictures).permute(0, 3, 1, 2)


def noise_of(policy, row):
    return RNG.normal(torch.tensor([row]), policy.shape, 0, torch.float32)


@pytest.mark.parametrize(
    ("guidance", "call"),
    [(2.5, {}), (4.0, {"prior_guidance_scale": 1.0, "negative_prompt": "a blue"})],
)
def test_pictures_are_those_of_both_stages(guidance, call):
    policy = make(BOTH, check=True, guidance_scale=guidance, fixed_batch_rows=None)
    if call:
        policy.arguments.call = policy.arguments.call | call
    policy.prepare(PROMPTS)
    _, ours = evaluated(policy)
    pipe = combined()
    for row, text in enumerate(TEXTS):
        options = {"prior_guidance": call.get("prior_guidance_scale", 4.0)}
        options |= {"negative": call.get("negative_prompt"), "row": row}
        theirs = called(pipe, text, noise_of(policy, row), guidance, **options)
        torch.testing.assert_close(ours[row], theirs[0], atol=1e-4, rtol=0)
    other = called(pipe, TEXTS[0], noise_of(policy, 1), guidance)
    assert (other[0] - ours[1]).abs().max() > 1e-4  # the embedding is seen


def test_rows_of_a_prompt_have_an_embedding_each():
    policy = make(BOTH, fixed_batch_rows=None)
    rollout = sampled(policy, 2)
    x, t = torch.zeros(3, *policy.shape), torch.full((3,), float(policy.times[0]))
    cond = {"prompt": rollout.cond["prompt"][[0, 0, 0]]}
    with torch.no_grad():
        outputs = policy.velocity(x, t, policy._of_rows(cond, torch.tensor([5, 6, 5])))
    torch.testing.assert_close(outputs[2], outputs[0])
    assert (outputs[1] - outputs[0]).abs().max() > 1e-4
    trained = {p for p in policy.net.parameters() if p.requires_grad}
    assert trained == set(policy.replay.pipe.__dict__["unet"].parameters())


def test_a_variance_that_the_network_learned_is_left_out(tmp_path):
    """Folders of the hub may have DDPM with variances that are learned; the mean is as without."""
    tiny_diffusers.pipeline(BOTH).save_pretrained(tmp_path)
    file = tmp_path / "scheduler" / "scheduler_config.json"
    config = json.loads(file.read_text()) | {"variance_type": "learned_range"}
    file.write_text(json.dumps(config | {"_class_name": "DDPMScheduler"}))
    policy = make(BOTH, path=str(tmp_path), fixed_batch_rows=None)
    (_, ours), (_, plain) = (evaluated(p) for p in (policy, make(BOTH, fixed_batch_rows=None)))
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=0)

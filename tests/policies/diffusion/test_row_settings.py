"""What families read of a row besides its text: a negative prompt, as diffusers has it; what they
do not read is said before training."""

import logging

import diffusers
import pytest
import torch

from mmrl.core.registry import POLICIES, load_built_in
from mmrl.policies.diffusion import prompt_lengths
from samplers.noise import Rng
from tests.fixtures import tiny_diffusers
from tests.policies.diffusion import test_folder_families as folders
from tests.policies.diffusion import test_image_families as images

load_built_in()

NEGATIVE = "green moving left"
TEXTS = ["a red seven", "a blue two"]


def pictures(policy, prompts):
    with policy.evaluating(2.5), torch.no_grad():
        rollout = policy.rollout(prompts, 1, Rng.of("same"))
        return rollout, policy.decode(rollout)


@pytest.mark.parametrize("name", ["sd", "sdxl", "flux", "wan", "sana"])
def test_a_negative_prompt_is_the_pipelines(name):
    """By the option, and by a row's own column, which stands before it."""
    own, call = (
        folders.CASES[name][1::2]
        if name in folders.CASES
        else (images.CASES[name].own, images.CASES[name].call)
    )
    torch.manual_seed(0)
    place = str(tiny_diffusers.folder(name))
    made = dict(path=place, steps=2, fixed_batch_rows=None, **own)
    policy = POLICIES.build(name, **made, negative_prompt=NEGATIVE)
    rollout, ours = pictures(policy, [{"text": text} for text in TEXTS])
    pipe = getattr(diffusers, policy.pipeline).from_pretrained(place)
    pipe.set_progress_bar_config(disable=True)
    guide = "true_cfg_scale" if name == "flux" else "guidance_scale"
    more = {"guidance_scale": policy.embedded_guidance} if name == "flux" else {}
    first, (height, width) = rollout.latents.states[:, 0], policy.size
    theirs = pipe(
        TEXTS,
        negative_prompt=[NEGATIVE] * 2,
        latents=folders.pack(first) if name == "flux" else first,
        num_inference_steps=2,
        height=height,
        width=width,
        output_type="pt",
        **{guide: 2.5},
        **call,
        **more,
    )[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    plain = POLICIES.build(name, **made)
    mixed = [{"text": TEXTS[0], "negative_prompt": NEGATIVE}, {"text": TEXTS[1]}]
    _, by_row = pictures(plain, mixed)
    _, without = pictures(plain, [{"text": text} for text in TEXTS])
    torch.testing.assert_close(by_row[0], theirs[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(by_row[1], without[1], atol=1e-4, rtol=0)
    assert not torch.equal(by_row[0], without[0])


LONG = " ".join(["a red blue green seven two"] * 10) + " zero"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sd", ["1 of 2 prompts are longer than the 12 tokens", "tokenizer (CLIP)"]),
        ("flux", ["tokenizer (CLIP)", "the 16 tokens", "raise policy option text_length"]),
    ],
)
def test_prompts_that_are_cut_are_counted_once_and_the_libraries_are_silent(name, words, caplog):
    policy = folders.make(name)
    prompts = [{"text": LONG}, {"text": "a red seven"}]
    assert policy.admit(prompts) == prompts and policy.admit(prompts) == prompts
    told = " | ".join(policy.notes)
    assert all(word in told for word in words) and len(policy.notes) == (2 if name == "flux" else 1)
    logging.getLogger("diffusers").propagate = True
    try:
        policy.encode(prompts)
    finally:
        logging.getLogger("diffusers").propagate = False
    assert "truncated" not in caplog.text and "longer than" not in caplog.text
    short = folders.make(name)
    short.admit([{"text": "a red seven"}])
    assert not short.notes


def test_columns_that_look_like_settings_are_mentioned():
    rows = [{"text": "a", "seed": 1, "negativ_prompt": "b", "style": "flat"}]
    (line,) = prompt_lengths.unread(rows, ("negative_prompt",))
    assert "negativ_prompt, seed" in line and "read of a row: negative_prompt" in line
    assert not prompt_lengths.unread([{"text": "a", "negative_prompt": "b"}], ("negative_prompt",))

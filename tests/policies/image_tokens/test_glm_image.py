"""GLM-Image's token prior: exact by enumeration on a tiny pipeline of the real classes, and equal
to its own tokens."""

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.zoo.models.image_tokens.glm_image import GlmImage
from samplers.noise import Rng
from samplers.warp import Warp
from tests.fixtures.image_tokens import (
    assert_gradient_is_true,
    assert_sampled_is_scored,
    assert_trains,
    every,
    flat_grad,
    logp,
)
from tests.fixtures.tiny_transformers_images import tiny_glm_image

PROMPT = {"text": "a red seven"}
PROMPTS = [{"text": "a red seven"}, {"text": "two"}]
IDS = every(3, 5)  # one token of the small image, four of the large one
REWARD = torch.linspace(-1, 2, len(IDS), dtype=torch.float64).sin()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_glm_image(tmp_path_factory.mktemp("glm")))


@pytest.fixture
def make(folder):
    def make(double=True, **options):
        policy = GlmImage(folder, size=64, steps=2, **options)
        policy.net.to(torch.float64 if double else torch.float32)
        return policy

    return make


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}], ids=str)
def test_probabilities_of_all_images_sum_to_1_and_the_gradient_is_the_true_one(make, options):
    policy = make(**options)
    p = logp(policy, IDS, PROMPT).exp()
    assert abs(p.sum() - 1) < 1e-12 and (p > 0).all()
    assert_gradient_is_true(policy, lambda: logp(policy, IDS, PROMPT), REWARD)


def test_token_by_token_is_all_at_once_with_ragged_prompts(make):
    assert_sampled_is_scored(make(), PROMPTS)


def test_greedy_tokens_and_images_are_those_of_the_pipeline(make, folder):
    """Without the tokens that begin and end images, which its own sampling could draw in an image's
    midst."""
    from diffusers import GlmImagePipeline

    policy = make(double=False)
    policy.warp = Warp(temperature=0.0)
    rollout = policy.rollout(PROMPTS, 1, Rng.of("greedy"))
    pipeline = GlmImagePipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vision_language_encoder.eval()
    plain = pipeline.vision_language_encoder.generate
    pipeline.vision_language_encoder.generate = lambda **given: plain(
        **given | {"do_sample": False, "suppress_tokens": [3, 4]}
    )
    generated = [pipeline.generate_prior_tokens(p["text"], 64, 64)[0] for p in PROMPTS]
    large = (
        rollout.sample[:, 1:]
        .view(2, 2, 2)
        .repeat_interleave(2, 1)
        .repeat_interleave(2, 2)
        .flatten(1)
    )
    assert torch.equal(large, torch.cat(generated))
    latents = Rng.of("glm_image").normal(rollout.row_id, (4, 8, 8), 16)
    images = pipeline(
        prompt=[p["text"] for p in PROMPTS],
        height=64,
        width=64,
        prior_token_ids=large,
        latents=latents,
        num_inference_steps=2,
        guidance_scale=1.5,
        output_type="pt",
    ).images
    torch.testing.assert_close(policy.decode(rollout), images, atol=1e-5, rtol=0)


def test_positions_are_those_of_transformers(make):
    policy = make()
    policy.net.hf.model.get_rope_index(
        torch.tensor([[7, 8, 3]]), torch.tensor([[1, 2, 2], [1, 1, 1]]), torch.tensor([2])
    )
    theirs = policy.net.hf.model._cached_decode_position_ids[0, :, :5]
    assert torch.equal(policy.net.offsets + 3, theirs)


def test_the_first_ratio_is_one_in_training_and_layers_may_be_recomputed(make):
    policy = make()
    plain = make()
    policy.enable_gradient_checkpointing()
    first, second = (flat_grad(p, logp(p, IDS[:9], PROMPT).sum()) for p in (plain, policy))
    torch.testing.assert_close(first, second, atol=1e-12, rtol=1e-9)
    assert_trains(make(double=False), PROMPTS)


def test_mistakes_are_named(folder, tmp_path):
    with pytest.raises(UserError, match="cannot load it"):
        GlmImage(str(tmp_path))
    with pytest.raises(UserError, match="multiples of 32"):
        GlmImage(folder, size=(64, 40))

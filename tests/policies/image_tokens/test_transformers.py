"""Janus, Emu3 and GLM-Image draw the tokens and images of their own classes, and what of them is
trained."""

import pytest
import torch

from mmrl.core.errors import UserError
from samplers.noise import Rng
from samplers.warp import Warp
from tests.fixtures.image_tokens import every, flat_grad, folder, logp, policy_of

PROMPTS = [{"text": "a red seven"}, {"text": "a blue two left of a green nine"}]
IDS = every(3, 4)


def greedy(name, prompts, **options):
    policy = policy_of(name, double=False, **options)
    policy.warp = Warp(temperature=0.0)
    rollout = policy.rollout(prompts, 1, Rng.of("greedy"))
    return policy, rollout, policy.decode(rollout)


@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_greedy_janus_is_that_of_transformers(guidance):
    """Its own generation crashes at guidance 1, so the unguided case is compared at 1 + 1e-6."""
    policy, rollout, images = greedy("janus-images", PROMPTS, guidance_scale=guidance)
    inputs = policy.collate(policy.encode(PROMPTS))
    hf = policy.net.hf
    hf.generation_config.bos_token_id = policy.bos
    hf.generation_config.pad_token_id = policy.pad
    hf.generation_config.generation_kwargs = {"boi_token_id": policy.start}
    theirs = hf.generate(
        inputs["ids"],
        attention_mask=inputs["mask"],
        generation_mode="image",
        guidance_scale=max(guidance, 1 + 1e-6),
        do_sample=False,
    )
    assert torch.equal(rollout.sample, theirs)
    expected = (hf.decode_image_tokens(theirs).permute(0, 3, 1, 2) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(images, expected.detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_greedy_emu3_is_that_of_transformers(guidance):
    """Rows' ends are forced there by a constraint on the next token, here they are no decisions."""
    policy, rollout, images = greedy("emu3", PROMPTS[:1], guidance_scale=guidance, size=24)
    hf, net = policy.net.hf, policy.net
    ids = policy.encode(PROMPTS[:1])[0]["ids"]
    visual = net.visual.tolist()

    def allowed(_, so_far):
        return [net.end] if (len(so_far) - ids.shape[1] + 1) % 4 == 0 else visual

    guided = {"guidance_scale": guidance, "negative_prompt_ids": policy.negative}
    theirs = hf.generate(
        ids,
        max_new_tokens=12,
        do_sample=False,
        prefix_allowed_tokens_fn=allowed,
        eos_token_id=-1,
        pad_token_id=0,
        **(guided if guidance != 1 else {}),
    )[:, ids.shape[1] :]
    rows = theirs.view(3, 4)
    assert torch.equal(net.visual[rollout.sample].view(3, 3), rows[:, :3])
    assert (rows[:, 3] == net.end).all()
    # end of file, of image and of sequence, which its decoder cuts off
    tail = torch.zeros(1, 3, dtype=torch.long)
    pixels = hf.decode_image_tokens(image_tokens=torch.cat([theirs, tail], 1), height=3, width=3)
    mean = torch.tensor([0.5, 0.4, 0.5])[:, None, None]
    std = torch.tensor([0.5, 0.5, 0.6])[:, None, None]
    torch.testing.assert_close(images, (pixels * std + mean).clamp(0, 1), atol=1e-6, rtol=0)


def test_greedy_tokens_and_images_of_glm_are_those_of_the_pipeline():
    """Without the tokens that begin and end images, which its own sampling could draw in an image's
    midst."""
    from diffusers import GlmImagePipeline

    policy, rollout, images = greedy("glm_image", PROMPTS)
    pipeline = GlmImagePipeline.from_pretrained(folder("glm_image", 3))
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vision_language_encoder.eval()
    plain = pipeline.vision_language_encoder.generate
    pipeline.vision_language_encoder.generate = lambda **given: plain(
        **given | {"do_sample": False, "suppress_tokens": [3, 4]}
    )
    texts = [prompt["text"] for prompt in PROMPTS]
    generated = [pipeline.generate_prior_tokens(text, 64, 64)[0] for text in texts]
    large = rollout.sample[:, 1:].view(2, 2, 2)
    large = large.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
    assert torch.equal(large, torch.cat(generated))
    theirs = pipeline(
        prompt=texts,
        height=64,
        width=64,
        prior_token_ids=large,
        latents=Rng.of("glm_image").normal(rollout.row_id, (4, 8, 8), 16),
        num_inference_steps=2,
        guidance_scale=1.5,
        output_type="pt",
    ).images
    torch.testing.assert_close(images, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("train", ["language", "generation"])
def test_without_gradient_through_the_unconditional_branch(train):
    """The gradient of the guided score with z_u held fixed, in the head too, and the same value;
    what is trained gets one."""
    stop, whole = (
        policy_of("janus-images", guidance_scale=3.0, logprob_guidance=kind, train=train)
        for kind in ("guided_stopgrad_uncond", "guided")
    )
    reward = torch.linspace(-1, 2, len(IDS), dtype=torch.float64).sin()
    scores = [logp(policy, IDS, PROMPTS[0]) for policy in (stop, whole)]
    torch.testing.assert_close(*scores, atol=1e-12, rtol=0)
    gradient = flat_grad(stop, (reward * scores[0]).sum())
    inputs = whole.collate(whole.encode(PROMPTS[:1]) * len(IDS))
    z = whole.net.vocabulary(whole.net.teach(inputs, IDS))
    z_empty = whole.net.vocabulary(whole.net.teach(whole.empty(inputs), IDS)).detach()
    guided = (z_empty + 3 * (z - z_empty)).log_softmax(-1).gather(-1, IDS[..., None]).sum((1, 2))
    expected = flat_grad(whole, (reward * guided).sum())
    torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=1e-8)
    logp(whole, IDS[:2], PROMPTS[0]).sum().backward()
    with_gradient = {name for name, p in whole.net.named_parameters() if p.grad is not None}
    assert with_gradient == {n for n, p in whole.net.named_parameters() if p.requires_grad}
    assert any("generation_head" in name for name in with_gradient) == (train == "generation")


def test_what_memory_allows_is_measured_on_few_tokens(monkeypatch):
    policy = policy_of("janus-images", sampling_memory_gib=1.0)
    widths = []
    draw = policy._draw
    monkeypatch.setattr(policy, "_draw", lambda *given: widths.append(given[4:]) or draw(*given))
    rollout = policy.rollout(PROMPTS, 2, Rng.of("memory"))
    assert widths == [(2,), (2,), ()] and rollout.sample.shape == (4, 4)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("janus-images", {}, "cannot load it|missing"),
        ("emu3", {}, "cannot load it"),
        ("glm_image", {}, "cannot load it"),
        ("emu3", {"path": None, "ratio": "wide"}, "width:height"),
        ("glm_image", {"path": None, "size": (64, 40)}, "multiples of 32"),
    ],
)
def test_mistakes_are_named(name, options, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        policy_of(name, **{"path": tmp_path} | options)

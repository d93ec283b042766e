"""What the digits world builds: complete folders of the real classes, on the barely trained
``-test`` variants."""

import json

import pytest
import torch

from mmrl.core.registry import ARTIFACTS, load_built_in, locate
from mmrl.worlds import cache
from mmrl.worlds.render import render
from mmrl.worlds.scenes import captions, is_held_out
from mmrl.worlds.text import clip_tokenizer
from samplers.noise import Rng


@pytest.fixture(scope="module", autouse=True)
def registered():
    load_built_in()


@pytest.fixture(scope="module")
def pipe(registered):
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(locate("world:digits/sd3-test"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, prompt, scale):
    generator = torch.Generator().manual_seed(0)
    options = {
        "num_inference_steps": 3,
        "height": 32,
        "width": 32,
        "max_sequence_length": 16,
        "output_type": "pt",
    }
    return pipe(prompt, guidance_scale=scale, generator=generator, **options).images


def test_the_pipeline_is_complete_and_draws(pipe):
    names = {
        name: type(part).__name__ for name, part in pipe.components.items() if part is not None
    }
    assert names == {
        "tokenizer": "CLIPTokenizer",
        "tokenizer_2": "CLIPTokenizer",
        "tokenizer_3": names["tokenizer_3"],
        "text_encoder": "CLIPTextModelWithProjection",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "text_encoder_3": "T5EncoderModel",
        "transformer": "SD3Transformer2DModel",
        "vae": "AutoencoderKL",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
    }
    assert (
        names["tokenizer_3"].startswith("T5Tokenizer") and pipe.tokenizer_3.model_max_length == 16
    )
    images = draw(pipe, ["a red seven", ""], 1.0)
    assert images.shape == (2, 3, 32, 32) and images.isfinite().all()


def test_guidance_and_the_empty_prompt(pipe):
    assert not torch.allclose(draw(pipe, "a red seven", 1.0), draw(pipe, "a red seven", 4.0))
    # nothing to guide to
    torch.testing.assert_close(draw(pipe, "", 1.0), draw(pipe, "", 4.0), atol=1e-4, rtol=0)


def test_training_and_pipeline_see_the_same_embeddings(pipe):
    from mmrl.worlds.text import embed

    texts = [
        "a red seven above a blue two",
        "",
        "three digits: a red one, a blue two and a green three",
    ]
    tokens, pooled = embed(pipe.components, texts)
    theirs = pipe.encode_prompt(
        texts, texts, texts, do_classifier_free_guidance=False, max_sequence_length=16
    )
    torch.testing.assert_close(tokens, theirs[0])
    torch.testing.assert_close(pooled, theirs[2])
    assert len(pooled.unique(dim=0)) == 3


def test_every_word_is_one_token_and_every_caption_fits(pipe):
    texts = captions("mixed", 400)
    for tokenizer in (pipe.tokenizer, pipe.tokenizer_3):
        ids = tokenizer([p["text"] for p in texts]).input_ids
        assert max(map(len, ids)) <= 16
        assert len(tokenizer("a red seven", add_special_tokens=False).input_ids) == 3
        assert len({tuple(row) for row in ids}) == 400
    clip = pipe.tokenizer
    assert (
        clip.decode(clip("three digits").input_ids, skip_special_tokens=True).strip()
        == "three digits"
    )
    assert clip.eos_token_id == pipe.text_encoder.config.eos_token_id == len(clip) - 1


def test_every_build_gives_words_the_same_numbers():
    first, *others = (clip_tokenizer().get_vocab() for _ in range(4))
    assert all(other == first for other in others)


def test_latents_have_mean_zero_and_deviation_one(pipe):
    from mmrl.worlds.vae import encode, training_prompts

    images = render(training_prompts(200, 0.4, 0), Rng.of(4)).images
    config = pipe.vae.config
    latents = (encode(pipe.vae, images) - config.shift_factor) * config.scaling_factor
    assert latents.shape == (200, 4, 8, 8)
    assert abs(latents.mean()) < 0.15 and abs(latents.std() - 1) < 0.15


def test_pretraining_never_sees_a_held_out_caption():
    from mmrl.worlds.vae import training_prompts

    trained = {p["text"] for p in training_prompts(3000, 0.7, 0)}
    assert not any(map(is_held_out, trained)) and len(trained) > 200


def test_building_twice_gives_the_same_bytes(tmp_path, monkeypatch):
    folder = ARTIFACTS["digits/reader-test"]()
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path))
    again = ARTIFACTS["digits/reader-test"]()
    assert folder != again
    first, second = (json.loads((f / cache.MANIFEST).read_text())["files"] for f in (folder, again))
    assert first["config.json"] == second["config.json"]
    from safetensors.torch import load_file

    for a, b in zip(*(load_file(f / "model.safetensors").values() for f in (folder, again))):
        # thread counts may differ between machines
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_building_leaves_the_global_random_numbers_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path))
    torch.manual_seed(7)
    state = torch.get_rng_state()
    for name in ("digits/reader-test", "digits/clip-test", "digits/sd3-test"):
        ARTIFACTS[name]()
    assert torch.equal(state, torch.get_rng_state())


def test_open_clip_loads_the_clip_folder():
    open_clip = pytest.importorskip("open_clip")
    name = f"local-dir:{locate('world:digits/clip-test')}"
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    tokens = open_clip.get_tokenizer(name)(["a red seven", "two digits: a red one and a blue two"])
    assert tokens.shape == (2, 16)
    assert model.encode_text(tokens).shape == model.encode_image(torch.zeros(2, 3, 32, 32)).shape


@pytest.mark.slow
def test_the_worlds_clip_tells_captions_apart():
    open_clip = pytest.importorskip("open_clip")
    name = f"local-dir:{locate('world:digits/clip')}"
    model, _, _ = open_clip.create_model_and_transforms(name)
    held_out = [p for p in captions("single", 240) if is_held_out(p["text"])]
    images = render(held_out, Rng.of(3), "reader").images  # scans it never saw
    with torch.no_grad():
        features = torch.nn.functional.normalize(model.eval().encode_image(images * 2 - 1), dim=-1)
        read = model.encode_text(open_clip.get_tokenizer(name)([p["text"] for p in held_out]))
        match = features @ torch.nn.functional.normalize(read, dim=-1).T
    own_match = match.diagonal()
    mean_match = match.mean(1)
    assert (own_match > mean_match).float().mean() > 0.95

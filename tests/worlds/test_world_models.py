"""What the digits world builds: complete folders of the real classes, on the barely trained
``-test`` variants."""

import json

import pytest
import torch
from safetensors.torch import load_file

from mmrl.core.registry import ARTIFACTS, load_built_in, locate
from mmrl.worlds import cache
from mmrl.worlds.scenes import captions, is_held_out
from mmrl.worlds.text import clip_tokenizer, embed
from mmrl.worlds.vae import training_prompts


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
    sizes = {"height": 32, "width": 32, "num_inference_steps": 3, "max_sequence_length": 16}
    options = sizes | {"output_type": "pt", "generator": generator}
    return pipe(prompt, guidance_scale=scale, **options).images


def test_the_pipeline_is_complete_draws_and_is_guided(pipe):
    assert all(pipe.components[name] is not None for name in ("vae", "tokenizer_3", "scheduler"))
    assert pipe.tokenizer_3.model_max_length == 16
    images = draw(pipe, ["a red seven", ""], 1.0)
    assert images.shape == (2, 3, 32, 32) and images.isfinite().all()
    assert not torch.allclose(draw(pipe, "a red seven", 1.0), draw(pipe, "a red seven", 4.0))
    # nothing to guide to
    torch.testing.assert_close(draw(pipe, "", 1.0), draw(pipe, "", 4.0), atol=1e-4, rtol=0)


def test_training_and_pipeline_see_the_same_embeddings(pipe):
    texts = ["a red seven above a blue two", "", "three digits: a red one and a blue two"]
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
    said = clip.decode(clip("three digits").input_ids, skip_special_tokens=True)
    assert said.strip() == "three digits"
    assert clip.eos_token_id == pipe.text_encoder.config.eos_token_id == len(clip) - 1


def test_pretraining_never_sees_a_held_out_caption():
    trained = {p["text"] for p in training_prompts(3000, 0.7, 0)}
    assert not any(map(is_held_out, trained)) and len(trained) > 200


def test_building_twice_gives_the_same_and_leaves_the_global_random_numbers_alone(
    tmp_path, monkeypatch
):
    first, *others = (clip_tokenizer().get_vocab() for _ in range(4))
    assert all(other == first for other in others)
    names = ("digits/reader-test", "digits/clip-test")
    folder = ARTIFACTS[names[0]]()
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path))
    state = torch.get_rng_state()
    again, *_ = (ARTIFACTS[name]() for name in names)
    assert torch.equal(state, torch.get_rng_state())
    manifests = [json.loads((f / cache.MANIFEST).read_text())["files"] for f in (folder, again)]
    assert folder != again and manifests[0]["config.json"] == manifests[1]["config.json"]
    weights = (load_file(f / "model.safetensors") for f in (folder, again))
    # thread counts may differ between machines
    torch.testing.assert_close(*weights, atol=1e-5, rtol=1e-4)


def test_open_clip_loads_the_clip_folder():
    open_clip = pytest.importorskip("open_clip")
    name = f"local-dir:{locate('world:digits/clip-test')}"
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    tokens = open_clip.get_tokenizer(name)(["a red seven", "two digits: a red one and a blue two"])
    assert tokens.shape == (2, 16)
    assert model.encode_text(tokens).shape == model.encode_image(torch.zeros(2, 3, 32, 32)).shape

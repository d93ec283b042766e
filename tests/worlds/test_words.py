"""The words world: captions, pictures in real fonts, and the tiny Stable Diffusion 3."""

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.registry import ARTIFACTS, load_built_in
from mmrl.data.prompts import development_and_test
from mmrl.worlds.words.signs import LONGEST, Words, is_held_out
from samplers.noise import Rng

load_built_in()


@pytest.fixture
def lettering():
    pytest.importorskip("font_roboto", reason="the fonts are not installed: multimodal-rl[words]")
    from mmrl.worlds.words import lettering

    return lettering


def words(prompts):
    return {word for prompt in prompts for word in prompt["words"].lower().split()}


@pytest.mark.parametrize("kind", ["single", "pairs", "triples", "mixed"])
def test_words_of_training_development_and_test_are_apart(kind):
    data = Words(kind=kind, captions=60, held_out=40)
    assert len(data.train) == 60 and len(data.held_out) == 40
    assert all(is_held_out(word) for word in words(data.held_out))
    assert not any(is_held_out(word) for word in words(data.train))
    assert all(f'"{p["words"]}"' in p["text"] for p in data.train)
    assert max(len(p["words"]) for p in data.train) <= LONGEST
    if kind == "single":
        development, test = map(words, development_and_test(data.held_out))
        assert development and test and not development & test


def test_more_captions_than_there_are_words_are_refused():
    with pytest.raises(UserError, match=r"data\.words\.captions is 5000: .* only \d+"):
        Words(captions=5000)


def test_a_picture_depends_on_its_row_alone_and_is_read_by_real_ocr(lettering):
    pytest.importorskip("rapidocr_onnxruntime")
    from rewards import OCR

    prompts = Words(captions=24).train
    pictures = lettering.draw(prompts, Rng.of(0))
    assert pictures.shape == (24, 3, 32, 96) and 0 <= pictures.min() < pictures.max() <= 1
    assert torch.equal(lettering.draw(prompts[:5], Rng.of(0)), pictures[:5])
    ocr = OCR(threads=1, detect=False)
    right = ocr(pictures, prompts)
    assert right.mean() > 0.9 and ocr(pictures, prompts[1:] + prompts[:1]).mean() < 0.4
    assert torch.equal(ocr(pictures[:3], prompts[:3]), right[:3])  # a batch is its rows


def test_the_base_model_is_a_pipeline_of_diffusers(lettering):
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(ARTIFACTS.find("words/sd3-test")())
    seen = [pipe.tokenizer_3.tokenize(word) for word in ('"own"', '"won"')]
    assert sorted(seen[0]) == sorted(seen[1]) and seen[0] != seen[1]  # character by character
    shown = pipe(
        'the word "own"', height=32, width=96, num_inference_steps=2, guidance_scale=1.0
    ).images
    assert shown[0].size == (96, 32)

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

    folder = ARTIFACTS.find("words/sd3-test")()
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=torch.float32)
    seen = [pipe.tokenizer_3.tokenize(word) for word in ('"own"', '"won"')]
    assert sorted(seen[0]) == sorted(seen[1]) and seen[0] != seen[1]  # character by character
    shown = pipe(
        'the word "own"', height=32, width=96, num_inference_steps=2, guidance_scale=1.0
    ).images
    assert shown[0].size == (96, 32)


def test_letters_stand_where_the_words_are_drawn(lettering):
    from mmrl.worlds.recipes import WORDS_TEST
    from mmrl.worlds.words import spelling
    from mmrl.worlds.words.positions import columns

    tokenizer = spelling.text_models(WORDS_TEST)["tokenizer_3"]
    prompts = spelling.training_prompts(WORDS_TEST)
    ids = spelling.tokens({"tokenizer_3": tokenizer}, "_3", [p["text"] for p in prompts])
    covered, quoted = columns(tokenizer, prompts, ids)
    for prompt, row, letters in zip(prompts, covered, quoted, strict=True):
        assert letters.sum() <= len(prompt["words"])
        width = 8 * row.sum()  # of all letters, in pixels
        assert width == pytest.approx(min(90, 13 * len(prompt["words"])), abs=0.01)
        middle = (row.sum(0) * (torch.arange(12) * 8 + 4)).sum() / row.sum()
        assert middle == pytest.approx(48, abs=0.01)
        order = (row * torch.arange(12)).sum(-1)[letters] / row.sum(-1)[letters]
        assert (order.diff() >= 0).all()
    drawn = lettering.draw([{**prompts[0], "ground": None}], Rng.of(0))[0]
    edges = (drawn.diff(dim=-1).abs().amax((0, 1)) > 0.3).nonzero()
    assert edges.float().mean() == pytest.approx(48, abs=10)

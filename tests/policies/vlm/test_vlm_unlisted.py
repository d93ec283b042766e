"""Families that are not in the table: general rules that are compared before they are used, or a
clear refusal."""

import json
import shutil
import warnings
from dataclasses import replace

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.policies.vlm.policy import VLM
from mmrl.policies.vlm.trees import TextTree
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_policy import (  # noqa: F401
    assert_near,
    gradient,
    logprobs,
    native,
    quiet,
    rolled,
)


def mistral3():
    import transformers as hf

    names = {
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    }
    tok = tiny_vlms.tokenizer(list(names.values()), **names)
    image = hf.PixtralImageProcessor(
        size={"longest_edge": 56}, patch_size={"height": 14, "width": 14}
    )
    template = tiny_vlms.template("[IMG]")
    processor = hf.PixtralProcessor(
        image, tok, patch_size=14, spatial_merge_size=2, chat_template=template
    )
    config = hf.Mistral3Config(
        text_config=tiny_vlms.text_config(tok, model_type="mistral", head_dim=8),
        vision_config=tiny_vlms.TOWER | {"model_type": "pixtral", "head_dim": 8},
        spatial_merge_size=2,
        image_token_index=tok.convert_tokens_to_ids("[IMG]"),
    )
    return hf.Mistral3ForConditionalGeneration(config), processor


def qwen3_5():
    """Half of its layers keep a state instead of keys and values."""
    import transformers as hf

    tok = tiny_vlms.tokenizer(list(tiny_vlms.QWEN.values()), **tiny_vlms.QWEN)
    image = hf.Qwen2VLImageProcessor(patch_size=16, min_pixels=32 * 32, max_pixels=32 * 32 * 9)
    video = hf.Qwen3VLVideoProcessor(size={"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 32})
    processor = hf.Qwen3VLProcessor(image, tok, video, chat_template=tiny_vlms._qwen_template())
    linear = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    rope = tiny_vlms.ROPE | {
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 1.0,
    }
    config = hf.Qwen3_5Config(
        text_config=tiny_vlms.text_config(
            tok,
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            rope_parameters=rope,
            **linear,
        ),
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 4,
            "intermediate_size": 64,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
        },
        **tiny_vlms.ids(tok, **tiny_vlms.QWEN_IDS),
    )
    return hf.Qwen3_5ForConditionalGeneration(config), processor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Builds a family once."""
    built = {}

    def of(make):
        if make not in built:
            built[make] = tmp_path_factory.mktemp(make.__name__)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model, processor = make()
                tiny_vlms._wake(model)
            model.save_pretrained(built[make])
            processor.save_pretrained(built[make])
        return str(built[make])

    return of


ASKED = [
    {"text": "what is this?", "images": [tiny_vlms.image(60, 50, 0)]},
    {"text": "hello, what is a longer one?"},
]


def lfm2_vl():
    """Half of its layers are short convolutions."""
    import transformers as hf

    names = {
        "image_token": "<image>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail": "<|img_thumbnail|>",
    }
    tok = tiny_vlms.tokenizer(list(names.values()), **names)
    image = hf.Lfm2VlImageProcessor(
        tile_size=64, do_image_splitting=False, encoder_patch_size=16, max_num_patches=64
    )
    processor = hf.Lfm2VlProcessor(image, tok, chat_template=tiny_vlms.template("<image>"))
    config = hf.Lfm2VlConfig(
        text_config=tiny_vlms.text_config(
            tok, model_type="lfm2", layer_types=["conv", "full_attention"], conv_L_cache=3
        ),
        vision_config=tiny_vlms.TOWER
        | {"model_type": "siglip2_vision_model", "patch_size": 16, "num_patches": 64},
        image_token_id=tok.convert_tokens_to_ids("<image>"),
    )
    return hf.Lfm2VlForConditionalGeneration(config), processor


HYBRIDS = [qwen3_5, lfm2_vl]


@pytest.mark.parametrize("make", [mistral3, *HYBRIDS])
def test_a_family_by_general_rules_is_that_of_transformers(folder, make):
    vlm = VLM(folder(make), max_new_tokens=6)
    assert any("is not in mmrl's table" in note for note in vlm.notes)
    assert any("coordinate space" in note for note in vlm.notes)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        rollout = rolled(vlm, ASKED, copies=2)
    assert vlm.net.share
    assert not any("read once for every answer" in str(w.message) for w in warned)
    torch.testing.assert_close(rollout.logprob, native(vlm, rollout), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        logprobs(vlm, rollout).detach(), rollout.logprob, atol=1e-5, rtol=1e-5
    )
    assert_near(gradient(vlm, rollout), gradient(vlm, rollout, share=False))
    if make is mistral3:
        packed = VLM(folder(make), max_new_tokens=6, remove_padding=True)
        assert_near(gradient(packed, rollout), gradient(vlm, rollout))


def ending(folder, make, stops, **options):
    """A policy whose answers end at any of many tokens, so that they differ in length."""
    vlm = VLM(folder(make), max_new_tokens=12, **options)
    vlm.ending = replace(vlm.ending, stops=stops)
    return vlm


@pytest.mark.parametrize("make", HYBRIDS)
def test_answers_behind_a_copied_state_are_those_of_separate_prompts(folder, make):
    stops = tuple(range(0, 288, 4))
    wanted = rolled(ending(folder, make, stops, prefix_sharing="none"), ASKED, copies=6)
    lengths = wanted.mask.sum(1)
    assert lengths.min() < lengths.max()  # rows have left the batch
    for refill in ("none", "rows"):
        vlm = ending(folder, make, stops, prefix_sharing="prefix", refill=refill)
        vlm.fixed_batch_rows = 4
        rollout = rolled(vlm, ASKED, copies=6)
        assert torch.equal(rollout.sample, wanted.sample)
        assert torch.equal(rollout.mask, wanted.mask)
        torch.testing.assert_close(rollout.logprob, wanted.logprob, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", HYBRIDS)
def test_a_state_computed_again_for_the_gradient_changes_nothing(folder, make):
    vlm = VLM(folder(make), max_new_tokens=6, prefix_sharing="prefix")
    rollout = rolled(vlm, ASKED, copies=2)
    before = gradient(vlm, rollout)
    vlm.enable_gradient_checkpointing()
    assert_near(gradient(vlm, rollout), before)


def test_what_cuts_a_prompts_memory_is_refused_where_layers_keep_a_state(folder):
    with pytest.raises(UserError, match="none of whose layers keeps a state"):
        VLM(folder(qwen3_5), remove_padding=True)
    with pytest.raises(UserError, match="answers that branch"):
        VLM(folder(qwen3_5), tree=TextTree(every=4, rounds=2))


def test_a_processor_that_does_not_fit_its_network_is_named(folder):
    vlm = VLM(folder(mistral3), max_new_tokens=4)
    vlm.net.hf.config.spatial_merge_size = 1
    vlm.net.hf.base_model.get_image_features = lambda *a, **k: (_ for _ in ()).throw(
        ValueError("do not match")
    )
    with pytest.raises(UserError, match="mistral3 is not in mmrl's table.*do not match"):
        rolled(vlm, ASKED[:1])


def test_an_encoder_with_a_decoder_is_refused(folder, tmp_path):
    shutil.copytree(folder(mistral3), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="go on with one sequence"):
        VLM(str(tmp_path))

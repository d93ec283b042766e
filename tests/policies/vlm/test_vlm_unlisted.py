"""Families that are not in the table: general rules that are compared before they are used, or a
clear refusal."""

import json
import shutil
import warnings

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.policies.vlm.policy import VLM
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
            model.save_pretrained(built[make])
            processor.save_pretrained(built[make])
        return str(built[make])

    return of


ASKED = [
    {"text": "what is this?", "images": [tiny_vlms.image(60, 50, 0)]},
    {"text": "hello, what is a longer one?"},
]


@pytest.mark.parametrize("make, shares", [(mistral3, True), (qwen3_5, False)])
def test_a_family_by_general_rules_is_that_of_transformers(folder, make, shares):
    vlm = VLM(folder(make), max_new_tokens=6)
    assert any("is not in mmrl's table" in note for note in vlm.notes)
    assert any("coordinate space" in note for note in vlm.notes)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        rollout = rolled(vlm, ASKED, copies=2)
    assert (
        vlm.net.share
        == shares
        == (not any("read once for every answer" in str(w.message) for w in warned))
    )
    torch.testing.assert_close(rollout.logprob, native(vlm, rollout), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        logprobs(vlm, rollout).detach(), rollout.logprob, atol=1e-5, rtol=1e-5
    )
    if shares:
        assert_near(gradient(vlm, rollout), gradient(vlm, rollout, share=False))
        packed = VLM(folder(make), max_new_tokens=6, remove_padding=True)
        assert_near(gradient(packed, rollout), gradient(vlm, rollout))


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

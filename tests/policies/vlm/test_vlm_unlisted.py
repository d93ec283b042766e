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


def vipllava():
    import transformers as hf

    tok = tiny_vlms.tokenizer(["<image>"], image_token="<image>")
    square = {"height": tiny_vlms.SIDE, "width": tiny_vlms.SIDE}
    image = hf.CLIPImageProcessor(size={"shortest_edge": tiny_vlms.SIDE}, crop_size=square)
    processor = hf.LlavaProcessor(
        image,
        tok,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tiny_vlms.template("<image>"),
    )
    config = hf.VipLlavaConfig(
        text_config=tiny_vlms.text_config(tok, model_type="llama"),
        vision_config=tiny_vlms._clip(),
        image_seq_length=16,
        image_token_index=tok.convert_tokens_to_ids("<image>"),
        vision_feature_layers=[-1, -2],
    )
    return hf.VipLlavaForConditionalGeneration(config), processor


@pytest.fixture(scope="module")
def unlisted(tmp_path_factory):
    place = tmp_path_factory.mktemp("vipllava")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, processor = vipllava()
        tiny_vlms._wake(model)
    model.save_pretrained(place)
    processor.save_pretrained(place)
    return str(place)


ASKED = [
    {"text": "what is this?", "images": [tiny_vlms.image(60, 50, 0)]},
    {"text": "hello, what is a longer one?"},
]


# layers of theirs keep a state instead of keys and values
HYBRIDS = ("qwen3_5", "lfm2_vl")


def test_a_family_by_general_rules_is_that_of_transformers(unlisted):
    vlm = VLM(unlisted, max_new_tokens=6)
    assert any("is not in mmrl's table" in note for note in vlm.report.notes)
    assert any("coordinate space" in note for note in vlm.report.notes)
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
    packed = VLM(unlisted, max_new_tokens=6, remove_padding=True)
    assert_near(gradient(packed, rollout), gradient(vlm, rollout))


def ending(name, stops, **options):
    """A policy whose answers end at any of many tokens, so that they differ in length."""
    vlm = VLM(str(tiny_vlms.folder(name)), max_new_tokens=12, **options)
    vlm.ending = replace(vlm.ending, stops=stops)
    return vlm


@pytest.mark.parametrize("name", HYBRIDS)
def test_answers_behind_a_copied_state_are_those_of_separate_prompts(name):
    stops = tuple(range(0, 288, 4))
    wanted = rolled(ending(name, stops, prefix_sharing="none"), ASKED, copies=6)
    lengths = wanted.mask.sum(1)
    assert lengths.min() < lengths.max()  # rows have left the batch
    for refill in ("none", "rows"):
        vlm = ending(name, stops, prefix_sharing="prefix", refill=refill)
        vlm.pass_sizes.rows = 4
        rollout = rolled(vlm, ASKED, copies=6)
        assert torch.equal(rollout.sample, wanted.sample)
        assert torch.equal(rollout.mask, wanted.mask)
        torch.testing.assert_close(rollout.logprob, wanted.logprob, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_state_computed_again_for_the_gradient_changes_nothing(name):
    vlm = VLM(str(tiny_vlms.folder(name)), max_new_tokens=6, prefix_sharing="prefix")
    rollout = rolled(vlm, ASKED, copies=2)
    before = gradient(vlm, rollout)
    vlm.enable_gradient_checkpointing()
    assert_near(gradient(vlm, rollout), before)


def test_what_cuts_a_prompts_memory_is_refused_where_layers_keep_a_state():
    folder = str(tiny_vlms.folder("qwen3_5"))
    with pytest.raises(UserError, match="none of whose layers keeps a state"):
        VLM(folder, remove_padding=True)
    with pytest.raises(UserError, match="answers that branch"):
        VLM(folder, tree=TextTree(every=4, rounds=2))


def test_a_processor_that_does_not_fit_its_network_is_named(unlisted):
    vlm = VLM(unlisted, max_new_tokens=4)
    vlm.net.hf.base_model.get_image_features = lambda *a, **k: (_ for _ in ()).throw(
        ValueError("do not match")
    )
    with pytest.raises(UserError, match="vipllava is not in mmrl's table.*do not match"):
        rolled(vlm, ASKED[:1])


def test_an_encoder_with_a_decoder_is_refused(unlisted, tmp_path):
    shutil.copytree(unlisted, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="go on with one sequence"):
        VLM(str(tmp_path))

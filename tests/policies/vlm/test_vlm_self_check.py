"""Passes are compared with a model's own before training, and made plainer or refused."""

import re

import pytest
import torch
import transformers as hf

from mmrl.core.errors import UserError
from mmrl.policies.vlm import self_check
from mmrl.policies.vlm.lengths import Limits
from mmrl.policies.vlm.policy import VLM
from mmrl.policies.vlm.self_check import chosen, rounded
from samplers.noise import Rng
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_families import log_probs
from tests.policies.vlm.test_vlm_policy import native

ASKED = [
    {"text": "why?"},
    {"text": "a question that is several times as long as the other, so that it is padded"},
    {"text": "what is this?", "images": [tiny_vlms.image(60, 50, 0)]},
]


@pytest.fixture
def saved(tmp_path):
    """Save a LLaVA around a text model, and load it as a policy."""

    def of(text: dict, **options) -> VLM:
        model, processor = tiny_vlms.build("llava")
        known = model.config.to_dict()
        config = model.config.from_dict(known | {"text_config": known["text_config"] | text})
        torch.manual_seed(0)
        model = type(model)(config)
        tiny_vlms._wake(model)
        model.save_pretrained(tmp_path)
        processor.save_pretrained(tmp_path)
        return VLM(str(tmp_path), max_new_tokens=4, **options)

    return of


def apart(vlm: VLM, asked=ASKED) -> float:
    with torch.no_grad():
        rollout = vlm.rollout(asked, [2, *[1] * (len(asked) - 1)], Rng.of("x"))
        wanted = native(vlm, rollout)
        scored = log_probs(vlm, rollout)
    return float(torch.stack([scored - wanted, rollout.logprob - wanted]).abs().max())


JAMBA = {"model_type": "jamba", "num_experts": 2, "num_experts_per_tok": 1}
JAMBA |= {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
JAMBA |= {"expert_layer_offset": 1, "mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 2}
JAMBA |= {"mamba_dt_rank": 4, "use_mamba_kernels": False}


def test_states_that_do_not_go_on_by_several_tokens_are_read_for_every_answer(saved):
    vlm = saved(JAMBA)
    with pytest.warns(UserWarning, match="llava: prompts are read once for every answer"):
        assert apart(vlm) < 1e-4
    assert not vlm.net.share
    with pytest.raises(UserError, match="shared by their answers of llava .jamba.*auto"):
        saved(JAMBA, prefix_sharing="prefix").rollout(ASKED, 1, Rng.of("x"))


def test_layers_that_attend_by_code_of_their_own_do_so_to_prompt_and_answer(saved):
    vlm = saved({"model_type": "diffllama"})
    assert apart(vlm) < 1e-4
    assert vlm.net.share and not vlm.net.cascades


def test_prompts_that_padding_changes_are_read_alone(saved, monkeypatch):
    vlm = saved({})
    reading = vlm.net.read

    def padded(inputs):
        prefix = reading(inputs)
        hidden = prefix.hidden + (~prefix.mask).sum(1, keepdim=True)
        return prefix.__class__(**{**vars(prefix), "hidden": hidden})

    monkeypatch.setattr(vlm.net, "read", padded)
    with pytest.warns(UserWarning, match="every prompt is a batch of its own"):
        assert apart(vlm) < 1e-4
    assert vlm.net.share


def scaled(vlm, monkeypatch, by):
    head = vlm.net.head
    monkeypatch.setattr(vlm.net, "head", lambda hidden: by * head(hidden))
    vlm.net.head.vocabulary = head.vocabulary
    return vlm


def test_what_is_never_the_models_own_is_refused_by_its_part(saved, monkeypatch):
    vlm = scaled(saved({}), monkeypatch, 1.5)
    with pytest.raises(UserError, match="one prompt at a time, of llava .llama. differ"):
        vlm.rollout(ASKED, 1, Rng.of("x"))


def test_half_precision_may_round_and_no_more(saved, monkeypatch):
    """An error of a twentieth of a nat on average is no rounding, though every single token could
    be that far off. Bounds are steps of the precision: those of float16 are eight times as fine."""
    coarse, fine = rounded(torch.bfloat16), rounded(torch.float16)
    assert (coarse.largest, coarse.mean) == (8 * fine.largest, 8 * fine.mean) == (0.25, 0.03125)
    vlm = saved({}, dtype="bfloat16")
    vlm.rollout(ASKED, 1, Rng.of("x"))
    assert vlm.net.cascades and vlm.net.share
    vlm = scaled(saved({}, dtype="bfloat16"), monkeypatch, 1.06)
    monkeypatch.setattr(self_check, "_looks_ahead", lambda *_: False)
    with pytest.raises(UserError, match="one prompt at a time, of llava") as refused:
        vlm.rollout(ASKED, 1, Rng.of("x"))
    gap = re.search(r"scored (\S+) nats .on average ([^)]+)", str(refused.value)).groups()
    assert float(gap[0]) < coarse.largest and float(gap[1]) > coarse.mean


def test_the_check_changes_nothing_of_what_follows(saved, monkeypatch):
    """Samples, counters and warps are those of a policy that was not compared."""
    vlm = saved({}, temperature=0.7, top_k=5)
    compared = vlm.rollout(ASKED, 2, Rng.of("x"))
    other = saved({}, temperature=0.7, top_k=5)
    other.checked = True
    plain = other.rollout(ASKED, 2, Rng.of("x"))
    assert torch.equal(compared.sample, plain.sample)
    assert torch.equal(compared.logprob, plain.logprob)
    counts = [(p.images, p.towered, p.report.forwards) for p in (vlm, other)]
    assert counts[0] == counts[1]
    monkeypatch.setattr(self_check, "_compared", lambda *_: pytest.fail("a second time"))
    vlm.rollout(ASKED, 1, Rng.of("y"))


def test_prompts_of_the_data_are_chosen_with_pictures_and_of_unlike_lengths():
    picture = tiny_vlms.image(30, 30)
    rows = [{"text": "x" * n, "images": [picture]} for n in (9, 2, 5, 7)] + [{"text": "y" * 20}]
    assert [len(row["text"]) for row in chosen(rows)] == [2, 20, 9]
    assert [len(row["text"]) for row in chosen(rows[:4])] == [2, 7, 9]
    assert chosen(rows[:1]) == rows[:1] and chosen([]) == []  # all rows are broken
    late = [{"text": "x"}] * 300 + [{"text": "y" * 20}]
    assert late[-1] not in chosen(late)
    assert late[-1] in chosen(late, thresholds=True)


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0] * 4}
LONG |= {"short_factor": [1.0] * 4, "original_max_position_embeddings": 64, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
THRESHOLDS = [
    (hf.LlamaConfig(rope_parameters=LONG, max_position_embeddings=4096), Limits(long=64)),
    (hf.LlamaConfig(rope_parameters=DYNAMIC, max_position_embeddings=512), Limits(dynamic=512)),
    (hf.LlamaConfig(rope_parameters=DYNAMIC | {"alpha": 1000.0}), Limits()),
    (hf.Llama4TextConfig(attn_temperature_tuning=True, floor_scale=8192), Limits(columns=8192)),
    (hf.LlamaConfig(index_topk_blocks=16, index_block_size=128), Limits(columns=2048)),
    (hf.LlamaConfig(indexer_budget=2048), Limits(columns=2048)),
]


def test_thresholds_are_read_from_the_configuration():
    for config, limits in THRESHOLDS:
        assert Limits.of(config) == limits
    assert not Limits.of(hf.LlamaConfig()).some


def test_rows_on_both_sides_of_a_threshold_are_batches_of_their_own(saved):
    """With longrope; an answer that would cross it is refused, as is dynamic rope beyond it."""
    vlm = saved({"rope_parameters": LONG})
    assert apart(vlm) < 1e-4
    crossing = {"text": "x" * 44, "origin": "d.jsonl:9"}
    assert 60 <= vlm.inputs.encode(crossing)["input_ids"].shape[1] <= 64
    with pytest.raises(UserError, match="d.jsonl:9: its 6. positions and 4 .* beyond 64.*longrope"):
        vlm.rollout([crossing], 1, Rng.of("x"))
    vlm = saved({"rope_parameters": DYNAMIC, "max_position_embeddings": 64})
    with pytest.raises(UserError, match="beyond 64, where the dynamic rope"):
        vlm.rollout(ASKED, 1, Rng.of("x"))


def test_a_full_picture_of_phi_4_is_not_read_beside_a_masked_one():
    """Its tower attends causally where no tile is masked, and in both directions elsewhere."""
    vlm = VLM(str(tiny_vlms.folder("phi4_multimodal")), max_new_tokens=3)
    asked = [
        {"text": "what is it?", "images": [tiny_vlms.image(*size)]}
        for size in ((56, 56), (120, 50), (112, 112), (56, 112))
    ]
    vlm.checked = True
    assert apart(vlm, asked) < 1e-5
    masks = {bool(vlm.inputs.encode(row)["image_attention_mask"].all()) for row in asked}
    assert masks == {True, False}

"""Every family of vision-language models against transformers itself: log-probs, gradients, what is
saved. The oracle is the plain model on one prompt and one answer, nothing shared, padded or cached.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import permutations
from unittest import mock

import pytest
import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Rollout
from mmrl.policies.vlm import packing
from mmrl.policies.vlm.caches import divisible
from mmrl.policies.vlm.families import OWN_DTYPE, modules_of
from mmrl.policies.vlm.options import pack_batches
from mmrl.policies.vlm.policy import VLM
from mmrl.policies.vlm.positions import axes, following, positions
from mmrl.policies.vlm.prefix_sharing import language_model
from mmrl.policies.vlm.recent import Recent
from mmrl.policies.vlm.routing import Routing
from mmrl.policies.vlm.trees import TextTree
from samplers.noise import Rng
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_inputs import inputs, mixed
from tests.policies.vlm.test_vlm_policy import (
    assert_near,
    gradient,
    gradient_of,
    native,
    point_of,
    weighted,
)
from tests.policies.vlm.test_vlm_policy import rolled as answered

NAMES = tiny_vlms.FAMILIES
LATER = NAMES[NAMES.index("qwen3_5") :]  # of 2025 and 2026
TOKENS = 4
HARMLESS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|media_content|>")


@cache
def policy(name: str) -> VLM:
    return VLM(str(tiny_vlms.folder(name)), max_new_tokens=TOKENS, temperature=1.3)


def sampled(one: VLM, name: str, asked: list[dict]) -> Rollout:
    """Two answers to the first prompt, one to each of the others."""
    return one.rollout(asked, [2] + [1] * (len(asked) - 1), Rng.of("families", name))


@cache
def rolled(name: str) -> Rollout:
    return sampled(policy(name), name, mixed(name))


def log_probs(one: VLM, rollout: Rollout) -> Tensor:
    point = point_of(one, rollout)
    return one.dist(point).log_prob(point.target) * point.mask


def assert_alike(gradient: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert gradient.keys() == expected.keys()
    size = torch.stack([g.norm() for g in expected.values()]).norm()
    apart = torch.stack([(gradient[key] - g).norm() for key, g in expected.items()]).norm()
    assert apart < 2e-5 * size


@contextmanager
def precisely(one: VLM) -> Iterator[None]:
    """Compute in float64 throughout, also where the library and the oracle call ``float``."""
    plain = Tensor.float

    def kept(tensor: Tensor, *args, **kwargs) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else plain(tensor, *args, **kwargs)

    one.net.double()
    try:
        with mock.patch.object(Tensor, "float", kept):
            yield
    finally:
        one.net.float()


@pytest.mark.parametrize("name", [*NAMES, "qwen3_5_moe"])  # and experts beside a state
def test_groups_in_a_padded_batch_are_each_answer_alone(name):
    """Log-probs, those that were sampled included, and gradients."""
    vlm = policy(name)
    rollout = rolled(name)
    # its gradients are small differences of large ones: in float32 2.5e-5 apart on Intel's CPUs
    with precisely(vlm) if name == "paligemma" else nullcontext():
        compare_with_each_answer_alone(name, vlm, rollout)


def compare_with_each_answer_alone(name: str, vlm: VLM, rollout: Rollout) -> None:
    together = log_probs(vlm, rollout)
    # in the chunks of a delta rule one unit of rounding of the weights moves as much
    near = 5e-5 if name.startswith("qwen3_5") else 1e-5
    assert (together.detach() - rollout.logprob * rollout.mask).abs().max() < 1e-5
    shared = gradient_of(vlm.net, weighted(together))
    expected = native(vlm, rollout, grad=True)
    assert ((together - expected) * rollout.mask).abs().max() < near
    with torch.no_grad():
        last = log_probs(vlm, rollout[-1:])[0]
        assert (together[-1] - last).abs().max() < near
    alone = gradient_of(vlm.net, weighted(expected))
    looked_up = name == "chameleon"  # images are codes of a vocabulary, which have no gradient
    assert any("vis" in key or "image" in key for key in alone) != looked_up
    assert_alike(shared, alone)
    # DDP waits for every trainable parameter: those that take no part in answers must be known
    trained = {key for key, p in vlm.net.named_parameters() if p.requires_grad}
    assert trained == alone.keys()


@pytest.mark.parametrize("name", ["gemma3", "llama4", "qwen3_5"])
def test_what_is_saved_is_what_was_loaded(name, tmp_path):
    vlm, before = policy(name), tiny_vlms.folder(name)
    vlm.export(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in before.iterdir()}
    again = VLM(str(tmp_path), max_new_tokens=TOKENS, temperature=1.3)
    answers = sampled(again, name, mixed(name))
    for new, old in zip(answers.cond, rolled(name).cond, strict=True):
        assert all(torch.equal(new[key], old[key]) for key in old)
    assert torch.equal(answers.sample, rolled(name).sample)
    assert torch.equal(answers.logprob, rolled(name).logprob)


@pytest.mark.parametrize("name", ["gemma3", "chameleon"])
def test_probabilities_sum_to_one_over_what_may_be_sampled(name):
    vlm = policy(name)
    point = point_of(vlm, rolled(name))
    with torch.no_grad():
        dist = vlm.dist(point)
        tokens = torch.arange(vlm.net.text_config.vocab_size)
        every = torch.stack([dist.log_prob(torch.full_like(point.target, v)) for v in tokens])
    assert (every.exp().sum(0)[dist.where] - 1).abs().max() < 1e-5
    assert not every[list(vlm.inputs.suppressed)].exp()[:, dist.where].any()


# of which a part cannot be packed: states, attention in chunks, attention past the cache
UNPACKED = ("qwen3_5", "qwen3_5_moe", "lfm2_vl", "minicpmv4_7", "llama4", "mllama")


def test_batches_that_cannot_be_packed_are_refused():
    for name in NAMES:
        vlm = policy(name)
        assert divisible(vlm.net.hf) == (name not in UNPACKED), name
        if name in UNPACKED:
            with pytest.raises(UserError, match=f"remove_padding needs.*{name}"):
                pack_batches(vlm, vlm.net, "sdpa", True, False)


# causal, windows, both ways over images, keys of other layers, experts
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "gemma4", "molmo2", "glm46v", "kimi_k25"])
def test_batches_without_padding_are_those_with(name):
    vlm = policy(name)
    lengths = torch.arange(len(rolled(name))) % TOKENS + 1
    rollout = rolled(name)
    rollout = rollout.replace(mask=rollout.mask & (torch.arange(TOKENS) < lengths[:, None]))
    expected = log_probs(vlm, rollout)
    packing.enable(vlm.net.hf)
    vlm.net.packed = True
    try:
        scores = log_probs(vlm, rollout)
        assert (scores - expected).abs().max() < 1e-5
        again = sampled(vlm, name, mixed(name))
        assert torch.equal(again.sample, rollout.sample)
    finally:
        vlm.net.packed = False
    assert_alike(*(gradient_of(vlm.net, weighted(each)) for each in (scores, expected)))


# Phi-4's pass takes no features; those of Chameleon are embeddings of its language model
LOOKS_ANEW = ("phi4_multimodal", "chameleon")


@pytest.mark.parametrize("name", ["qwen3_vl", "llava_next", "gemma3", *LATER])
def test_a_frozen_tower_looks_once_at_an_image(name, monkeypatch):
    vlm = policy(name)
    rollout = rolled(name)
    if name in tiny_vlms.VIDEO:  # features of videos are not kept
        rollout = rollout[: int((rollout.group < len(rollout.prompts) - 1).sum())]
    looks = []
    original = vlm.net.look
    monkeypatch.setattr(vlm.net, "look", lambda cond: looks.append(1) or original(cond))
    monkeypatch.setattr(vlm, "features", Recent(2**28))
    monkeypatch.setattr(vlm, "sees", False)
    with torch.no_grad():
        for _ in range(2):
            gap = (log_probs(vlm, rollout) - rollout.logprob) * rollout.mask
            assert gap.abs().max() < 1e-5
    with_images = sum("pixel_values" in cond for cond in rollout.cond)
    assert len(looks) == (0 if name in LOOKS_ANEW else with_images)


def test_adapters_are_in_the_language_model_and_special_tokens_are_not_answered(subtests):
    for name in LATER:
        with subtests.test(name):
            vlm = policy(name)
            hf = vlm.net.hf
            adapted = {hf.get_submodule(key) for key in modules_of(hf, "language")}
            around = name in LOOKS_ANEW  # the language model is around the rest
            inside = set(hf.model.layers.modules() if around else language_model(hf).modules())
            assert adapted and adapted <= inside | {hf.get_output_embeddings()}
            assert not any("audio" in key for key, p in hf.named_parameters() if p.requires_grad)
            tokenizer = vlm.inputs.tokenizer
            allowed = {tokenizer.convert_tokens_to_ids(token) for token in HARMLESS}
            known = {i for i in tokenizer.added_tokens_decoder if i < vlm.net.head.vocabulary}
            assert known - allowed - set(vlm.inputs.stops) <= set(vlm.inputs.suppressed)


@pytest.mark.parametrize("name", ["mllama", "molmo2"])
def test_a_token_without_a_logit_is_neither_forbidden_nor_taught(name):
    """Those of images come after the vocabulary of the head."""
    reader = inputs(name)
    assert reader.tokenizer.convert_tokens_to_ids("<|image|>") >= policy(name).net.head.vocabulary
    assert reader.tokens("a picture") is not None
    assert reader.tokens("a <|image|>") is None


EXPERTS = ["qwen3_5_moe", "gemma4_moe", "glm4v_moe", "llama4", "kimi_k25"]


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_those_of_the_sampler(name):
    """Recorded and replayed nothing changes; with other experts the weights are the router's own,
    as for those it would have chosen."""
    vlm = policy(name)
    asked = mixed(name)[:2]
    plain_answers = sampled(vlm, name, asked)
    routing = Routing(vlm.net.hf)
    vlm.net.routing = routing
    try:
        rollout = sampled(vlm, name, asked)
        assert torch.equal(rollout.sample, plain_answers.sample)
        with torch.no_grad():
            gap = log_probs(vlm, rollout) - rollout.logprob * rollout.mask
            assert gap.abs().max() < 1e-5
            routes = rollout.tokens.routes
            moved = torch.where(routes < 0, routes, (routes + 1) % 4)
            order = rollout.tokens.replace(routes=moved)
            other = log_probs(vlm, rollout.replace(trajectory=order))
        taken = routing.last().view(len(rollout), -1, routing.width)
        sent = moved[:, : taken.shape[1]]
        assert torch.equal(taken[sent >= 0], sent[sent >= 0])
        assert (other - rollout.logprob * rollout.mask).abs().max() > 1e-4
    finally:
        vlm.net.routing = None
        for router in routing.routers:
            router._forward_hooks.clear()


@pytest.mark.parametrize("name", OWN_DTYPE)
def test_pixels_have_the_dtype_of_a_half_precise_network(name):
    """With adapters, which a router that is a linear layer does not get."""
    place = str(tiny_vlms.folder(name))
    vlm = VLM(place, max_new_tokens=TOKENS, temperature=1.3, dtype="bfloat16", lora=2)
    rollout = sampled(vlm, name, mixed(name)[:2])
    scores = log_probs(vlm, rollout)
    assert (scores - rollout.logprob * rollout.mask).abs().max() < 0.1
    scores.sum().backward()
    assert all(p.grad is not None for p in vlm.net.parameters() if p.requires_grad)


def test_what_a_family_does_not_take_is_said_of_the_prompt():
    clip = {"text": "when?", "video": tiny_vlms.video(4), "fps": 2.0, "origin": "d.jsonl:2"}
    picture = {"images": [tiny_vlms.image(56, 56)]}
    for name, row, says in (
        ("mistral3", clip, "mistral3 takes no videos; give frames"),
        ("molmo2", clip | picture, "molmo2 takes images or a video"),
        ("smolvlm", clip | picture, "smolvlm takes images or a video"),
    ):
        with pytest.raises(UserError, match=f"d.jsonl:2: {says}"):
            inputs(name).encode(row)
    reader = inputs("molmo2")
    with pytest.raises(UserError, match="it needs images or videos, not both"):
        reader.collate([reader.encode(clip), reader.encode({"text": "?"} | picture)])


def test_a_model_that_also_speaks_is_refused_before_it_is_loaded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe"}))
    with pytest.raises(UserError, match="also speaks; save its thinker by itself, with transf"):
        VLM(str(tmp_path))


def test_a_video_of_the_thinker_is_placed_by_its_seconds():
    """Its processor makes hundreds of tokens of the shortest one."""
    vlm = policy("qwen3_omni_moe_thinker")
    clip = {"text": "when?", "video": tiny_vlms.video(4), "fps": 2.0}
    rollout = sampled(vlm, "qwen3_omni_moe_thinker", [clip])
    gap = (rollout.logprob - native(vlm, rollout)) * rollout.mask
    assert gap.abs().max() < 1e-5


def test_kimi_s_clips_are_one_video_each_to_whoever_rewards():
    """Its processor cuts a video into clips of four frames, each with its own grid and as many
    tokens as a frame."""
    reader = inputs("kimi_k25")
    films = [tiny_vlms.video(5, seed=1), tiny_vlms.video(3, seed=2)[:, :28]]
    encoded, view = reader.take({"text": "which?", "videos": films, "fps": 2.0})
    grids = encoded["video_grid_thw"].tolist()
    assert [frames for frames, _, _ in grids] == [4, 1, 3]
    assert view["resized"] == [[14 * w, 14 * h] for _, h, w in (grids[0], grids[2])]
    assert reader.placeholders(encoded) == sum(h * w // 4 for _, h, w in grids)


# --------------------------------------------------------------------------------------------------
# positions with axes

AXES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "minicpmv4_7", "glm46v"]
ANSWER = 3


def asked(mixes: bool) -> list[dict]:
    """A clip that lasts longer than the text after it is wide, pictures and text in every order,
    and two clips."""
    clip = tiny_vlms.video(40, seed=3)
    media = {"video": clip, "fps": 2.0} | ({"images": [tiny_vlms.image(90, 60)]} if mixes else {})
    marks = ["<video>", "when?", *["<image>"] * mixes]
    rows = [{"text": "".join(order), **media} for order in permutations(marks)]
    two = [clip, tiny_vlms.video(5, seed=4)]
    return [*rows, {"text": "<video>or<video>", "videos": two, "fps": 2.0}]


@pytest.mark.parametrize("name", AXES)
def test_an_answer_stands_where_one_pass_puts_it(name):
    vlm = policy(name)
    hf = vlm.net.hf
    assert axes(hf) == 3
    for prompt in asked(mixes=name != "glm46v"):
        encoded = vlm.inputs.encode(prompt)
        start = following({"position_ids": positions(hf, encoded)})
        added = {"input_ids": 5, "attention_mask": 1, "mm_token_type_ids": 0}
        longer = encoded | {
            key: torch.cat([encoded[key], torch.full((1, ANSWER), value)], 1)
            for key, value in added.items()
            if key in encoded
        }
        wanted = positions(hf, longer)[..., -ANSWER:]
        assert torch.equal(wanted, (start + torch.arange(ANSWER)).expand_as(wanted))


@pytest.mark.parametrize("options", [{"prefix_sharing": "none"}, {"engine": "hf"}])
def test_answers_behind_a_long_clip_are_scored_as_by_one_pass(options):
    """Among rows of other lengths; transformers' own ``generate`` would begin elsewhere."""
    vlm = VLM(str(tiny_vlms.folder("qwen2_5_vl")), max_new_tokens=4, **options)
    rollout = sampled(vlm, "qwen2_5_vl", asked(True)[:3])
    latest = [cond["places"].amax() - cond["places"][0, -1].amax() for cond in rollout.cond]
    assert min(latest) > 0
    wanted = native(vlm, rollout)
    torch.testing.assert_close(rollout.logprob, wanted, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(log_probs(vlm, rollout), wanted, atol=1e-5, rtol=1e-5)


# --------------------------------------------------------------------------------------------------
# general rules, and layers that keep a state

ASKED = [
    {"text": "what is this?", "images": [tiny_vlms.image(60, 50, 0)]},
    {"text": "hello, what is a longer one?"},
]


def test_a_family_by_general_rules_shares_and_is_packed():
    vlm = VLM(str(tiny_vlms.folder("vipllava")), max_new_tokens=6)
    notes = " ".join(vlm.report.notes)
    assert "is not in mmrl's table" in notes and "coordinate space" in notes
    rollout = answered(vlm, ASKED, copies=2)
    assert vlm.net.share
    packed = VLM(vlm.place, max_new_tokens=6, remove_padding=True)
    assert_near(gradient(packed, rollout), gradient(vlm, rollout))
    vlm.checked = False
    refused = mock.Mock(side_effect=ValueError("do not match"))
    vlm.net.hf.base_model.get_image_features = refused
    with pytest.raises(UserError, match="vipllava is not in mmrl's table.*do not match"):
        answered(vlm, [dict(ASKED[0])])


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2_vl"])
def test_answers_behind_a_copied_state_are_those_of_separate_prompts(name):
    def ending(**options):
        vlm = VLM(str(tiny_vlms.folder(name)), max_new_tokens=12, **options)
        vlm.ending = replace(vlm.ending, stops=tuple(range(0, 288, 4)))
        return vlm

    wanted = answered(ending(prefix_sharing="none"), ASKED, copies=6)
    lengths = wanted.mask.sum(1)
    assert lengths.min() < lengths.max()  # rows have left the batch
    for refill in ("none", "rows"):
        vlm = ending(prefix_sharing="prefix", refill=refill)
        vlm.pass_sizes.rows = 4
        rollout = answered(vlm, ASKED, copies=6)
        assert torch.equal(rollout.sample, wanted.sample)
        assert torch.equal(rollout.mask, wanted.mask)
        torch.testing.assert_close(rollout.logprob, wanted.logprob, atol=1e-5, rtol=1e-5)
    before = gradient(vlm, rollout)
    vlm.enable_gradient_checkpointing()  # a state computed again changes nothing
    assert_near(gradient(vlm, rollout), before)


def test_what_cannot_be_is_refused(tmp_path):
    folder = tiny_vlms.folder("qwen3_5")
    with pytest.raises(UserError, match="none of whose layers keeps a state"):
        VLM(str(folder), remove_padding=True)
    with pytest.raises(UserError, match="answers that branch"):
        VLM(str(folder), tree=TextTree(every=4, rounds=2))
    config = json.loads((folder / "config.json").read_text()) | {"is_encoder_decoder": True}
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="go on with one sequence"):
        VLM(str(tmp_path / "model"))

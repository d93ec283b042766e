"""Every family of vision-language models against transformers itself: log-probs, gradients, greedy
answers, what is saved.

The oracle is the plain model on one prompt and one answer, nothing shared, padded or cached.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.types import Point, Rollout
from mmrl.policies.vlm import packing, parts
from mmrl.policies.vlm.caches import divisible
from mmrl.policies.vlm.families import OWN_DTYPE, modules_of
from mmrl.policies.vlm.loading import auto_class
from mmrl.policies.vlm.options import pack_batches
from mmrl.policies.vlm.policy import VLM
from mmrl.policies.vlm.prefix_sharing import language_model
from mmrl.policies.vlm.recent import Recent
from mmrl.policies.vlm.routing import Routing
from samplers.noise import Rng
from tests.fixtures import tiny_vlms, tiny_vlms_2026
from tests.policies.vlm.test_vlm_inputs import mixed

LATER = list(tiny_vlms_2026.BUILDERS)
SIBLINGS = [*tiny_vlms.EXPERTS, *tiny_vlms_2026.SIBLINGS]
NAMES = [*tiny_vlms.BUILDERS, *LATER]
VIDEO = (*tiny_vlms.VIDEO, *tiny_vlms_2026.VIDEO)
# of which no image has a gradient: it is looked up in a vocabulary
LOOKED_UP = ("chameleon",)
TOKENS = 4


@cache
def policy(name: str) -> VLM:
    import transformers as hf

    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    return VLM(str(tiny_vlms.folder(name)), max_new_tokens=TOKENS, temperature=1.3)


def prompts(name: str) -> list[dict]:
    """Unlike ones: one image, none, two, a video."""
    return mixed(name)


def sampled(one: VLM, name: str, asked: list[dict]) -> Rollout:
    """Two answers to the first prompt, one to each of the others."""
    return one.rollout(asked, [2] + [1] * (len(asked) - 1), Rng.of("families", name))


@cache
def rolled(name: str) -> Rollout:
    return sampled(policy(name), name, prompts(name))


def plain(encoded: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the processor gave, without the positions that the policy keeps beside it."""
    return {key: value for key, value in encoded.items() if key != "places"}


def point_of(one: VLM, rollout: Rollout) -> Point:
    (point,) = one.path(rollout)
    return point


def log_probs(one: VLM, rollout: Rollout) -> Tensor:
    point = point_of(one, rollout)
    return one.dist(point).log_prob(point.target) * point.mask


def gradient_of(one: VLM, objective: Tensor) -> dict[str, Tensor]:
    one.net.zero_grad()
    objective.backward()
    found = {key: p.grad.clone() for key, p in one.net.named_parameters() if p.grad is not None}
    one.net.zero_grad()
    return found


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


def oracle(name: str, net: torch.nn.Module, rollout: Rollout, i: int) -> Tensor:
    """[n] log-probs of row i's n tokens under the warped distribution, by one plain pass."""
    vlm = policy(name)
    encoded = plain(rollout.cond[int(rollout.group[i])])
    answer = rollout.sample[i, : int(rollout.mask[i].sum())][None]
    longer = encoded | {"input_ids": torch.cat([encoded["input_ids"], answer], 1)}
    for key, value in (
        ("attention_mask", 1),
        ("token_type_ids", int(name == "paligemma")),
        ("mm_token_type_ids", 0),
    ):
        if key in encoded:
            longer[key] = torch.cat([encoded[key], torch.full_like(answer, value)], 1)
    if "cross_attention_mask" in encoded:  # an answer looks where the last token of its prompt does
        last = encoded["cross_attention_mask"][:, -1:].expand(-1, answer.shape[1], -1, -1)
        longer["cross_attention_mask"] = torch.cat([encoded["cross_attention_mask"], last], 1)
    logits = net(**longer, use_cache=False).logits[:, -answer.shape[1] - 1 : -1].float()
    # Chameleon's own pass forbids what it cannot answer, in the place
    never = torch.tensor(vlm.inputs.suppressed, dtype=torch.long)
    logits = logits.index_fill(-1, never, -torch.inf)
    return (logits / 1.3).log_softmax(-1).gather(-1, answer[..., None])[0, :, 0]


@pytest.mark.parametrize("name", [*NAMES, *SIBLINGS])
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
    weight = torch.linspace(-1, 1, rollout.mask.numel()).reshape(rollout.mask.shape)
    shared = gradient_of(vlm, (together * weight).sum())
    expected = [oracle(name, vlm.net.hf, rollout, i) for i in range(len(rollout))]
    for i, values in enumerate(expected):
        assert (together[i, : len(values)] - values).abs().max() < near
    with torch.no_grad():
        alone = log_probs(vlm, rollout[-1:])[0]
        assert (together[-1] - alone).abs().max() < near
    each = sum((x * weight[i, : len(x)]).sum() for i, x in enumerate(expected))
    alone = gradient_of(vlm, each)
    assert any("vis" in key or "image" in key for key in alone) != (name in LOOKED_UP)
    assert_alike(shared, alone)
    # DDP waits for every trainable parameter: those that take no part in answers must be known
    trained = {key for key, p in vlm.net.named_parameters() if p.requires_grad}
    assert trained == alone.keys()


def assert_holds(saved: object, content: object) -> None:
    """What was loaded is saved with further keys: dtypes, where it was loaded from, how it pads."""
    if isinstance(content, dict):
        for key, value in content.items():
            assert_holds(saved[key], value)
    elif content is not None:
        assert saved == content


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "llama4", "mllama", "qwen3_5"])
def test_what_is_saved_is_what_was_loaded(name, tmp_path):
    """Model, processor, tokenizer and chat template, file by file."""
    policy(name).export(tmp_path)
    before = tiny_vlms.folder(name)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in before.iterdir()}
    for path in before.iterdir():
        saved = tmp_path / path.name
        if name == "qwen3_5" and path.name.startswith("tokenizer"):
            continue  # transformers converts it to its own class
        if path.suffix != ".json":
            assert saved.read_bytes() == path.read_bytes(), path.name
            continue
        assert_holds(*(json.loads(p.read_text()) for p in (saved, path)))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llama4", "qwen3_5"])
def test_what_is_saved_answers_the_same(name, tmp_path):
    vlm = policy(name)
    rollout = rolled(name)
    vlm.export(tmp_path)
    again = VLM(str(tmp_path), max_new_tokens=TOKENS, temperature=1.3)
    answers = sampled(again, name, prompts(name))
    for new, old in zip(answers.cond, rollout.cond, strict=True):
        assert all(torch.equal(new[key], old[key]) for key in old)
    assert torch.equal(answers.sample, rollout.sample)
    assert torch.equal(answers.logprob, rollout.logprob)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl", "gemma3", "chameleon"])
def test_probabilities_sum_to_one_over_what_may_be_sampled(name):
    vlm = policy(name)
    rollout = rolled(name)
    point = point_of(vlm, rollout)
    with torch.no_grad():
        dist = vlm.dist(point)
        every = torch.stack(
            [
                dist.log_prob(torch.full_like(point.target, v))
                for v in range(vlm.net.text_config.vocab_size)
            ]
        )
    total = every.exp().sum(0)[dist.where]
    assert (total - 1).abs().max() < 1e-5
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


@pytest.mark.parametrize("name", [name for name in LATER if name not in UNPACKED])
def test_batches_without_padding_are_those_with(name):
    vlm = policy(name)
    steps = torch.arange(TOKENS)
    lengths = torch.arange(len(rolled(name))) % TOKENS + 1
    rollout = rolled(name)
    rollout = rollout.replace(mask=rollout.mask & (steps < lengths[:, None]))
    expected = log_probs(vlm, rollout)
    packing.enable(vlm.net.hf)
    vlm.net.packed = True
    try:
        scores = log_probs(vlm, rollout)
        assert (scores - expected).abs().max() < 1e-5
        again = sampled(vlm, name, prompts(name))
        assert torch.equal(again.sample, rollout.sample)
    finally:
        vlm.net.packed = False
    weight = torch.linspace(-1, 1, rollout.mask.numel()).reshape(rollout.mask.shape)
    assert_alike(
        gradient_of(vlm, (scores * weight).sum()), gradient_of(vlm, (expected * weight).sum())
    )


# --------------------------------------------------------------------------------------------------
# families of 2025 and 2026; of the others the files beside this one test the same


# Phi-4's pass takes no features; those of Chameleon are embeddings of its language model
LOOKS_ANEW = ("phi4_multimodal", "chameleon")


@pytest.mark.parametrize("name", LATER)
def test_a_frozen_tower_looks_once_at_an_image(name, monkeypatch):
    vlm = policy(name)
    rollout = rolled(name)
    if name in VIDEO:  # features of videos are not kept
        last = len(rollout.prompts) - 1
        rollout = rollout[: int((rollout.group < last).sum())]
    looks = []
    original = vlm.net.look
    monkeypatch.setattr(vlm.net, "look", lambda cond: looks.append(1) or original(cond))
    monkeypatch.setattr(vlm, "features", Recent(2**28))
    with torch.no_grad():
        expected = log_probs(vlm, rollout)
        monkeypatch.setattr(vlm, "sees", False)
        for _ in range(2):
            assert (log_probs(vlm, rollout) - expected).abs().max() < 1e-5
    with_images = sum("pixel_values" in cond for cond in rollout.cond)
    assert len(looks) == (0 if name in LOOKS_ANEW else with_images)


def test_adapters_are_in_the_language_model_and_special_tokens_are_not_answered():
    for name in LATER:
        looked_at(name)


def looked_at(name):
    vlm = policy(name)
    hf = vlm.net.hf
    adapted = {hf.get_submodule(key) for key in modules_of(hf, "language")}
    around = name in ("phi4_multimodal", "chameleon")  # the language model is around the rest
    inside = set(hf.model.layers.modules() if around else language_model(hf).modules())
    assert adapted and adapted <= inside | {hf.get_output_embeddings()}
    assert not any("audio" in key for key, p in hf.named_parameters() if p.requires_grad)
    tokenizer = vlm.inputs.tokenizer
    harmless = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|endoftext|>", "<|media_content|>")
    allowed = {tokenizer.convert_tokens_to_ids(token) for token in harmless}
    known = {i for i in tokenizer.added_tokens_decoder if i < vlm.net.head.vocabulary}
    special = known - allowed - set(vlm.inputs.stops)
    assert special <= set(vlm.inputs.suppressed)


@pytest.mark.parametrize("name", ["mllama", "molmo2"])
def test_a_token_without_a_logit_is_neither_forbidden_nor_taught(name):
    """Those of images come after the vocabulary of the head."""
    inputs = policy(name).inputs
    assert inputs.tokenizer.convert_tokens_to_ids("<|image|>") >= policy(name).net.head.vocabulary
    assert inputs.tokens("a picture") is not None
    assert inputs.tokens("a <|image|>") is None


EXPERTS = [name for name in LATER + SIBLINGS if "moe" in name] + ["llama4", "kimi_k25"]


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_those_of_the_sampler(name):
    """Recorded and replayed nothing changes; with other experts the weights are the router's own,
    as for those it would have chosen."""
    vlm = policy(name)
    asked = prompts(name)[:2]
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
    rollout = sampled(vlm, name, prompts(name)[:2])
    scores = log_probs(vlm, rollout)
    assert (scores - rollout.logprob * rollout.mask).abs().max() < 0.1
    scores.sum().backward()
    assert all(p.grad is not None for p in vlm.net.parameters() if p.requires_grad)


def test_what_a_family_does_not_take_is_said_of_the_prompt():
    clip = {"text": "when?", "video": tiny_vlms.video(4), "fps": 2.0, "origin": "d.jsonl:2"}
    with pytest.raises(UserError, match="d.jsonl:2: mistral3 takes no videos; give frames"):
        policy("mistral3").inputs.encode(clip)
    both = clip | {"images": [tiny_vlms.image(56, 56)]}
    with pytest.raises(UserError, match="d.jsonl:2: molmo2 takes images or a video"):
        policy("molmo2").inputs.encode(both)
    reader = policy("molmo2").inputs
    pair = [reader.encode(prompt) for prompt in (clip, {"text": "?", "images": both["images"]})]
    with pytest.raises(UserError, match="it needs images or videos, not both"):
        reader.collate(pair)


def test_a_model_that_also_speaks_is_refused_before_it_is_loaded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe"}))
    with pytest.raises(UserError, match="also speaks; save its thinker by itself, with transf"):
        VLM(str(tmp_path))


def test_a_video_of_the_thinker_is_placed_by_its_seconds():
    """Its processor makes hundreds of tokens of the shortest one."""
    vlm = policy("qwen3_omni_moe_thinker")
    clip = {"text": "when?", "video": tiny_vlms.video(4), "fps": 2.0}
    rollout = sampled(vlm, "qwen3_omni_moe_thinker", [clip])
    expected = oracle("qwen3_omni_moe_thinker", vlm.net.hf, rollout, 0)
    assert (rollout.logprob[0, : len(expected)] - expected).abs().max() < 1e-5


def test_parameters_that_take_no_part_are_known():
    for name, path in (
        ("cohere2_vision", "vision_tower.head."),
        ("phi4_multimodal", "img_processor.encoder.layers.1."),
        ("qwen3_omni_moe_thinker", "audio_tower."),
    ):
        assert any(path in key for key in parts.idle(policy(name).net.hf))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "phi4_multimodal", "gemma4"])
def test_the_class_that_a_model_card_names_loads_the_family(kind, tmp_path):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    name = auto_class(str(tmp_path))
    assert transformers.CONFIG_MAPPING[kind] in getattr(transformers, name)._model_mapping


def test_kimi_s_clips_are_one_video_each_to_whoever_rewards():
    """Its processor cuts a video into clips of four frames, each with its own grid and as many
    tokens as a frame; transformers before 5.24 cannot tell their features apart."""
    vlm = policy("kimi_k25")
    films = [tiny_vlms.video(5, seed=1), tiny_vlms.video(3, seed=2)[:, :28]]
    question = {"text": "which?", "videos": films, "fps": 2.0, "origin": "d.jsonl:2"}
    encoded, view = vlm.inputs.take(question)
    grids = encoded["video_grid_thw"].tolist()
    assert [frames for frames, _, _ in grids] == [4, 1, 3]
    assert view["resized"] == [[14 * w, 14 * h] for _, h, w in (grids[0], grids[2])]
    assert vlm.inputs.placeholders(encoded) == sum(h * w // 4 for _, h, w in grids)
    early = replace(vlm.inputs.family, video=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vlm.inputs, "family", early)
        with pytest.raises(UserError, match="d.jsonl:2: kimi_k25 takes no videos; give frames"):
            vlm.inputs.take(question)

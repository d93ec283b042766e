"""Every family of vision-language models against transformers itself: log-probs, gradients, greedy
answers, reloads.

The oracle is the plain model on one prompt and one answer, nothing shared, padded or cached.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from mmrl.core.types import Point, Rollout
from mmrl.policies.vlm.policy import VLM
from samplers.noise import Rng
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_inputs import loaded, mixed

NAMES = list(tiny_vlms.BUILDERS)
COPIES = 3
TOKENS = 5


@cache
def policy(name: str) -> VLM:
    import transformers as hf

    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    return VLM(str(tiny_vlms.folder(name)), max_new_tokens=TOKENS, temperature=1.3)


def prompts(name: str) -> list[dict]:
    """Unlike ones; for Mllama as many images in each as its networks allow."""
    rows = mixed(name)
    return (
        rows[:1] + [{"text": "where?", "images": [tiny_vlms.image(50, 90, 7)]}]
        if name == "mllama"
        else rows
    )


@cache
def rolled(name: str) -> Rollout:
    return policy(name).rollout(prompts(name), COPIES, Rng.of("families", name))


def encoded_by(one: VLM, asked: list[dict]) -> list[dict[str, Tensor]]:
    return [one._placed(one.inputs.encode(prompt)) for prompt in asked]


def plain(encoded: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the processor gave, without the positions that the policy keeps beside it."""
    return {key: value for key, value in encoded.items() if key != "places"}


def point_of(one: VLM, rollout: Rollout) -> Point:
    (point,) = one.path(rollout)
    return point


def log_probs(one: VLM, rollout: Rollout) -> Tensor:
    point = point_of(one, rollout)
    return one.dist(point).log_prob(point.target) * point.mask


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
    logits[..., list(vlm.inputs.suppressed)] = -torch.inf
    return (logits / 1.3).log_softmax(-1).gather(-1, answer[..., None])[0, :, 0]


@pytest.mark.parametrize("name", NAMES)
def test_groups_in_a_padded_batch_score_as_each_answer_alone(name):
    vlm = policy(name)
    rollout = rolled(name)
    with torch.no_grad():
        together = log_probs(vlm, rollout)
        # as they were sampled
        assert (together - rollout.logprob * rollout.mask).abs().max() < 1e-5
        for i in range(0, len(rollout), 2):
            alone = log_probs(vlm, rollout[i : i + 1])[0]
            expected = oracle(name, vlm.net.hf, rollout, i)
            assert (together[i] - alone).abs().max() < 1e-5
            assert (together[i, : len(expected)] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_group_are_those_of_its_answers_alone(name):
    vlm = policy(name)
    rollout = rolled(name)
    weight = torch.linspace(-1, 1, rollout.mask.numel()).reshape(rollout.mask.shape)
    vlm.net.zero_grad()
    (log_probs(vlm, rollout) * weight).sum().backward()
    shared = {key: p.grad.clone() for key, p in vlm.net.named_parameters() if p.grad is not None}
    vlm.net.zero_grad()
    total = sum(
        (oracle(name, vlm.net.hf, rollout, i) * weight[i, : int(rollout.mask[i].sum())]).sum()
        for i in range(len(rollout))
    )
    total.backward()
    alone = {key: p.grad for key, p in vlm.net.named_parameters() if p.grad is not None}
    assert shared.keys() == alone.keys() and any("vis" in key for key in alone)
    size = torch.stack([grad.norm() for grad in alone.values()]).norm()
    apart = torch.stack([(shared[key] - grad).norm() for key, grad in alone.items()]).norm()
    assert apart < 2e-5 * size
    vlm.net.zero_grad()


@pytest.mark.parametrize("name", NAMES)
def test_another_image_changes_its_own_rows_only(name):
    vlm = policy(name)
    rollout = rolled(name)
    changed = [dict(prompts(name)[0], images=[tiny_vlms.image(70, 60, 99)]), *prompts(name)[1:]]
    cond = encoded_by(vlm, changed)
    with torch.no_grad():
        before = log_probs(vlm, rollout)
        after = log_probs(vlm, rollout.replace(cond=cond))
    moved = (before - after).abs().amax(1)
    its_rows = rollout.group == 0
    assert moved[its_rows].min() > 1e-4 and moved[~its_rows].max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_are_those_of_transformers(name):
    vlm = policy(name)
    net = loaded(name)[0]
    with vlm.evaluating():
        rollout = vlm.rollout(prompts(name), 1, Rng.of("greedy"))
    for i, encoded in enumerate(rollout.cond):
        expected = net.generate(
            **plain(encoded),
            max_new_tokens=TOKENS,
            do_sample=False,
            suppress_tokens=list(vlm.inputs.suppressed),
            eos_token_id=list(vlm.inputs.stops),
            pad_token_id=vlm.inputs.pad,
        )[0, encoded["input_ids"].shape[1] :]
        assert rollout.sample[i, rollout.mask[i]].tolist() == expected.tolist()


@pytest.mark.parametrize("name", tiny_vlms.VIDEO)
def test_another_video_changes_its_own_rows_only(name):
    """A video is seen while answers are sampled and while they are scored."""
    vlm = policy(name)
    rollout = rolled(name)
    last = len(rollout.prompts) - 1
    another_clip = encoded_by(
        vlm, [{"text": "when?", "video": tiny_vlms.video(5, seed=9), "fps": 2.0}]
    )
    changed = rollout.replace(cond=[*rollout.cond[:last], *another_clip])
    with torch.no_grad():
        moved = (log_probs(vlm, rollout) - log_probs(vlm, changed)).abs().amax(1)
    assert moved[rollout.group == last].min() > 1e-4 and moved[rollout.group != last].max() < 1e-5
    questions = [*prompts(name)[:last], prompts(name)[last] | {"video": tiny_vlms.video(5, seed=9)}]
    again = vlm.rollout(questions, COPIES, Rng.of("families", name))
    gap = (again.logprob - rollout.logprob).abs().amax(1)
    assert gap[rollout.group == last].min() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_answers_the_same(name, tmp_path):
    vlm = policy(name)
    rollout = rolled(name)
    vlm.export(tmp_path)
    again = VLM(str(tmp_path), max_new_tokens=TOKENS, temperature=1.3)
    answers = again.rollout(prompts(name), COPIES, Rng.of("families", name))
    # processor and chat template come along
    for new, old in zip(answers.cond, rollout.cond, strict=True):
        assert all(torch.equal(new[key], old[key]) for key in old)
    assert torch.equal(answers.sample, rollout.sample) and torch.equal(
        answers.logprob, rollout.logprob
    )
    with torch.no_grad():
        assert torch.equal(log_probs(again, answers), log_probs(vlm, rollout))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl", "gemma3"])
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

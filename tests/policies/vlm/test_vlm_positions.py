"""Positions of answers are those of transformers' one pass over prompt and answer, wherever clips
and pictures are in the prompt."""

from itertools import permutations

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.policies.vlm.policy import VLM
from mmrl.policies.vlm.positions import axes, following, positions
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_families import log_probs, policy, sampled
from tests.policies.vlm.test_vlm_policy import native

# families whose positions have axes, and whether a prompt may hold both
AXES = {
    "qwen2_vl": True,
    "qwen2_5_vl": True,
    "qwen3_vl": True,
    "qwen3_5": True,
    "minicpmv4_7": True,
    "glm46v": False,
}
ANSWER = 3


def asked(mixes: bool) -> list[dict]:
    """A clip that lasts longer than the text after it is wide, pictures and text in every order,
    and two clips."""
    clip = tiny_vlms.video(40, seed=3)
    short = tiny_vlms.video(5, seed=4)
    media = {"video": clip, "fps": 2.0} | ({"images": [tiny_vlms.image(90, 60)]} if mixes else {})
    marks = ["<video>", "when?", *["<image>"] * mixes]
    rows = [{"text": "".join(order), **media} for order in permutations(marks)]
    return [*rows, {"text": "<video>or<video>", "videos": [clip, short], "fps": 2.0}]


@pytest.mark.parametrize("name", AXES)
def test_an_answer_stands_where_one_pass_puts_it(name):
    vlm = policy(name)
    hf = vlm.net.hf
    assert axes(hf) == 3
    for prompt in asked(AXES[name]):
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


@pytest.mark.parametrize("options", [{}, {"prefix_sharing": "none"}, {"engine": "hf"}])
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


def test_a_picture_and_a_clip_of_which_a_processor_keeps_one_are_refused():
    row = {
        "text": "?",
        "images": [tiny_vlms.image(60, 60)],
        "video": tiny_vlms.video(4),
        "fps": 2.0,
    }
    with pytest.raises(UserError, match="d.jsonl:3: smolvlm takes images or a video in a prompt"):
        policy("smolvlm").inputs.encode(row | {"origin": "d.jsonl:3"})

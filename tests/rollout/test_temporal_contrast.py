"""T-GRPO's contrast of ordered and shuffled frames: who gets the bonus, what the model sees."""

import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from mmrl.config.compatibility import unsupported_options
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.types import Rewards, per_prompt
from mmrl.rollout.stages import Drawn, Setup, stages_of
from mmrl.zoo.stages.temporal_contrast import Contrasted, has_video
from samplers.noise import Rng
from tests.fixtures import tiny_vlms, toys
from tests.fixtures.records import make_rollout
from tests.policies.vlm.test_vlm_inputs import inputs

SIZE = 4
CLIP = torch.zeros(2, 2, 2, 3, dtype=torch.uint8).numpy()


class Answers(toys.ToyCausal):
    """A policy that says of itself that it answers in words."""

    capabilities = replace(toys.ToyCausal.capabilities, makes="text")


def options_of(reward, **options):
    return TrainOptions(1, SIZE, SIZE, 1, stages=(Contrasted(reward, **options),))


def stage(**options):
    train = options_of("right", **options)
    setup = Setup(train, Answers(), asked(0.5), {"right": None, "format": None})
    (contrasted,) = stages_of(setup)
    return contrasted


def asked(*rates):
    """Prompts with a video whose answers are right with a probability: in order, shuffled."""
    rates = [rate if isinstance(rate, tuple) else (rate, rate) for rate in rates]
    return [{"text": str(i), "video": CLIP, "p": p} for i, p in enumerate(rates)]


def answered(prompts, rng, copies):
    """A row's reward is 1 with the probability of its prompt, and a fifth of them are missing."""
    sizes = per_prompt(copies, len(prompts))
    rows = rng.rows(len(prompts), copies)
    group = torch.arange(len(prompts)).repeat_interleave(torch.tensor(sizes))
    rates = torch.tensor([prompt["p"]["frame_order" in prompt] for prompt in prompts])[group]
    u = rng.uniform(rows, (2,)).double()
    right = torch.where(u[:, 1] < 0.2, math.nan, (u[:, 0] < rates).double())
    rollout = make_rollout(
        group=group,
        row_id=rows,
        prompts=tuple(dict(prompt) for prompt in prompts),
        sample=u,
        mask=torch.ones(len(rows), 1, dtype=torch.bool),
        logprob=torch.zeros(len(rows), 1, dtype=torch.float64),
    )
    return Drawn(rollout, u, Rewards({"right": right, "format": 0 * right + 1}))


def contrasted(prompts, log, copies=SIZE, **options):
    one = stage(**options)
    one.begin(7)

    def sample(again, rng, copies):
        drawn = answered(again, rng, copies)
        one.observe(again, drawn)
        log.append((again, copies, drawn))
        return drawn

    first = answered(prompts, Rng.of("first"), copies)
    one.observe(prompts, first)
    return first, *one.groups(first, 7, sample)


def test_right_answers_of_groups_that_need_the_order_get_the_bonus():
    prompts = asked((0.9, 0.1), (0.3, 0.9), 0.5, (1.0, 0.0), (0.0, 1.0), 0.7, 0.5, 0.6, (0.7, 0.9))
    del prompts[2]["video"]
    log = []
    copies = [3, 5, 2, 4, 6, 1, 4, 4, 4]
    first, drawn, counts = contrasted(prompts, log=log, copies=copies, share=0.75)
    ((again, number, shuffled),) = log
    assert number == 3 and [prompt["text"] for prompt in again] == list("01345678")
    given = 0
    for place, prompt in enumerate(prompts):
        rows = first.rollout.group == place
        plain = first.rewards["right"][rows].tolist()
        expected = plain
        if prompt["text"] != "2":
            mates = shuffled.rollout.group == [p["text"] for p in again].index(prompt["text"])
            other = shuffled.rewards["right"][mates].tolist()
            known = [[x for x in values if x == x] for values in (plain, other)]
            if all(known) and fmean(known[0]) >= 0.8 * fmean(known[1]):
                expected = [x + 0.3 if x > 0.1 else x for x in plain]
                given += 1
        assert drawn.rewards["right"][rows].tolist() == pytest.approx(expected, nan_ok=True)
    assert counts["temporal/groups"] == 8 and 0 < given < 8
    assert torch.equal(drawn.rewards["format"].nan_to_num(), first.rewards["format"].nan_to_num())
    assert drawn.rollout is first.rollout, "shuffled answers are not trained on"
    assert len(drawn.sampled()[0]) == len(first.rollout), "nor counted"


def test_nothing_is_sampled_without_videos():
    prompts = [{"text": str(i), "p": (0.5, 0.5)} for i in range(2)]
    log = []
    first, drawn, counts = contrasted(prompts, log=log)
    assert drawn is first and counts == {"temporal/groups": 0.0} and not log
    assert has_video({"messages": [{"content": [{"type": "video", "path": "a.mp4"}]}]})
    assert not has_video({"messages": [{"content": "text"}], "text": "a", "video": None})


@pytest.mark.parametrize(
    ("policy", "prompts", "reward", "sentence"),
    [
        (Answers, asked(0.5), "right", "'accuracy' is no reward .* is right: right"),
        (Answers, [{"text": "a"}], "accuracy", "no prompt of the data has a video"),
        (toys.ToyFlow, asked(0.5), "accuracy", "ToyFlow sees no order of frames"),
    ],
)
def test_what_cannot_be_contrasted_is_refused(policy, prompts, reward, sentence):
    train = options_of("accuracy")
    with pytest.raises(UserError, match=sentence):
        stages_of(Setup(train, policy(), prompts, {reward: None}))
    assert bool([*unsupported_options(train, policy)]) == (policy is toys.ToyFlow)


def test_the_model_sees_the_same_frames_in_another_order():
    reader = inputs("qwen2_5_vl")
    frames = tiny_vlms.video(6, seed=1)
    prompt = {"text": "when?", "video": frames, "fps": 2.0}
    plain, again = reader.encode(prompt), reader.encode({**prompt, "frame_order": "7 when?"})
    order = Rng.of("frames", "7 when?", "video 0").permutation(len(frames))
    assert order.tolist() != list(range(len(frames)))
    moved = reader.encode({**prompt, "video": frames[order.numpy()]})
    for name, value in again.items():
        assert torch.equal(value, moved[name]), name
    assert not torch.equal(again["pixel_values_videos"], plain["pixel_values_videos"])
    assert torch.equal(again["input_ids"], plain["input_ids"])

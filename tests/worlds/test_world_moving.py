"""The moving digits: captions and splits, drawing, and what ``digits_motion`` makes of true and
false clips."""

import math

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA, REWARDS, load_built_in
from mmrl.worlds.moving import MOTIONS, captions, film, trained_on
from mmrl.worlds.scenes import CANVAS, COLORS, DIGITS, is_held_out
from samplers.noise import Rng

load_built_in()
PROMPTS = captions()
MOVES = torch.tensor([prompt["motion"] != "still" for prompt in PROMPTS])


@pytest.fixture(scope="module")
def clips():
    return film(PROMPTS, Rng.of(0))


@pytest.fixture(scope="module")
def reward():
    return REWARDS.build("digits_motion")


def test_captions_are_all_there_are_and_held_out_ones_nobodys_to_train_on():
    assert len({p["text"] for p in PROMPTS}) == len(PROMPTS) == 10 * len(COLORS) * len(MOTIONS)
    assert captions() == PROMPTS != captions(1)
    for prompt in PROMPTS:
        item = prompt["objects"][0]
        assert f"a {item['color']} {DIGITS[item['digit']]} " in prompt["text"]
        moves = {"still": "standing still"}.get(prompt["motion"], f"moving {prompt['motion']}")
        assert prompt["text"].endswith(moves)
    source = DATA.build("digits_moving")
    held_out = {p["text"] for p in source.held_out}
    assert not held_out & {p["text"] for p in [*source.train, *trained_on()]}
    assert len(source.held_out) == 40 and all(map(is_held_out, held_out))
    assert {p["motion"] for p in source.held_out} == set(MOTIONS)


def test_first_frames_show_the_digit_and_not_the_motion():
    source = DATA.build("digits_moving", images=2)
    assert len(source.train) == 320 and len(source.held_out) == 80
    row = source.train[0]
    assert row["image"].size == (CANVAS, CANVAS)
    first, *others = (film([row | {"motion": m}], Rng.of(0)).frames[0, 0] for m in MOTIONS)
    assert all(torch.equal(first, frame) for frame in others)
    with pytest.raises(UserError, match="digits_moving.images is -1"):
        DATA.build("digits_moving", images=-1)


def test_every_frame_is_the_first_one_moved(clips):
    assert torch.equal(clips.frames[:7], film(PROMPTS[:7], Rng.of(0)).frames)
    for prompt, frames in zip(PROMPTS[:60], clips.frames):
        x, y = (int(v) for v in MOTIONS[prompt["motion"]])
        for step in (1, 2):  # later the outermost pixels of some are cut off at the edge
            moved = frames[0].roll((2 * step * y, 2 * step * x), (-2, -1))
            torch.testing.assert_close(frames[step], moved, atol=1e-5, rtol=0)


def test_true_clips_score_one_and_false_ones_less(reward, clips):
    true = clips.frames
    scores = reward(true, PROMPTS)
    assert scores.min() > 0.95 and scores.max() <= 1
    for harm, falsified in {
        "reversed": true.flip(1),
        "still": true[:, :1].expand_as(true),
        "blank": torch.zeros_like(true),
        "noise": torch.rand(true.shape, generator=torch.Generator().manual_seed(0)),
        "shuffled": true[:, [3, 0, 4, 1, 2]],
        "jump": true[:, [0, 0, 0, 4, 4]],
        "half": true[:, [0, 0, 1, 1, 2]],
        "vanishing": true * torch.linspace(1, 0, 5).view(-1, 1, 1, 1),
    }.items():
        most = {"half": 0.55, "jump": 0.25}.get(harm, 0.01)
        values = reward(falsified, PROMPTS)
        assert values[MOVES].max() <= most, harm
        if harm in ("blank", "noise", "vanishing"):
            assert values[~MOVES].max() <= 0.01, harm
    ways = list(MOTIONS)
    for turn in (1, 2, 3, 4):
        turned = [p | {"motion": ways[(ways.index(p["motion"]) + turn) % 5]} for p in PROMPTS]
        assert reward(true, turned).max() <= 0.01


def test_numbers_of_a_moving_square():
    """A square of 4 pixels on 32: amount, heading and evenness by hand."""

    def score(places, motion, **options):
        frames = torch.zeros(1, len(places), 3, 32, 32)
        for frame, (x, y) in zip(frames[0], places):
            frame[:, y : y + 4, x : x + 4] = 1
        return float(REWARDS.build("digits_motion", **options)(frames, [{"motion": motion}]))

    line = [(14 - 2 * i, 14) for i in range(5)]  # 8 pixels to the left, a quarter of the canvas
    assert score(line, "left") == pytest.approx(1, abs=1e-5)
    assert score(line, "left", travel=0.5) == pytest.approx(0.5, abs=1e-5)
    assert score(line, "left", travel=0.2) == pytest.approx(0.75, abs=1e-5)
    assert score(line, "right") == score(line, "up") == 0
    slant = [(14 - 2 * i, 14 - 2 * i) for i in range(5)]
    assert score(slant, "left") == pytest.approx(math.sqrt(0.5), abs=1e-5)
    late = [(14, 14), (14, 14), (14, 14), (10, 14), (6, 14)]  # behind by 0, 2, 4, 2, 0 of 8 pixels
    assert score(late, "left") == pytest.approx(1 - (8 / 5) / 2, abs=1e-5)
    wobble = [(14, 14), (15, 14), (14, 14), (15, 14), (14, 14)]
    assert score(wobble, "still") == pytest.approx(1 - 4 / 8, abs=1e-5)


def test_wrong_input_is_a_readable_message(reward, clips):
    with pytest.raises(UserError, match="one has 'round'.*digits_moving"):
        reward(clips.frames[:1], [{"motion": "round"}])
    with pytest.raises(UserError, match="3 frames or more"):
        reward(clips.frames[:1, :2], PROMPTS[:1])
    broken = clips.frames[:2].clone()
    broken[0, 0, 0, 0, 0] = torch.nan
    assert reward(broken, PROMPTS[:2]).isnan().tolist() == [True, False]

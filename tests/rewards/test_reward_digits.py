"""The ``digits`` reward: exact arithmetic on a stub of detections, and real readers on real
renderings."""

import math

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS, load_built_in
from mmrl.worlds.render import render
from mmrl.worlds.scenes import COLORS, PLACES, SIZES, captions, pair, single, thing, triple
from rewards.images.digit_reader import Detections, Reader
from rewards.images.digits import Digits
from samplers.noise import Rng

CONFIG = {"image_size": 32, "channels": [8, 8, 8], "kernel": 3, "pool": False}
CONFIG |= {"digits": list("0123456789"), "colors": list(COLORS)}
CONFIG |= {"sizes": list(SIZES), "places": PLACES}


class Saw(Reader):
    """A reader that reports given detections, in any picture: (confidence, digit, colour, size, x,
    y) each."""

    def __init__(self, *things):
        super().__init__(CONFIG)
        self.things = things

    def detect(self, images, most=5):
        table = torch.zeros(most, 6)
        table[: len(self.things)] = torch.tensor(self.things).view(-1, 6)
        one_hot = [
            torch.nn.functional.one_hot(table[:, k].long(), n).float()
            for k, n in ((1, 10), (2, len(COLORS)), (3, 2))
        ]
        rows = [table[:, 0], *one_hot, table[:, 4:]]
        return Detections(*(row[None].expand(len(images), *row.shape) for row in rows))


@pytest.fixture
def score(tmp_path):
    Reader(CONFIG).save(tmp_path)

    def score(prompt, *things, strict=False):
        reward = Digits(str(tmp_path), strict=strict)
        reward.reader = Saw(*things)
        return float(reward(torch.zeros(1, 3, 32, 32), [prompt])[0])

    return score


RED = 0
GREEN = 1
SEVEN = single(thing(7, "red", "large", "top left"))


THREE = triple([thing(d, "red") for d in (1, 2, 3)])
TWICE = pair(thing(7, "red"), thing(7, "red"), None)
ABOVE, BELOW = (pair(thing(7, "red"), thing(2, "green"), where) for where in ("above", "below"))
RIGHT = (1.0, 7, RED, 1, 8, 8)
UP, DOWN = (1.0, 7, RED, 0, 16, 8), (1.0, 2, GREEN, 0, 16, 24)
SWAPPED = (1.0, 7, RED, 0, 16, 24), (1.0, 2, GREEN, 0, 16, 8)


def test_terms_by_hand(score, subtests):
    for prompt, things, value in (
        (SEVEN, [RIGHT], 1),
        # colour, size, place are a third each
        (SEVEN, [(1.0, 7, GREEN, 1, 8, 8)], 2 / 3),
        (SEVEN, [(1.0, 7, RED, 0, 8, 8)], 2 / 3),
        (SEVEN, [(1.0, 7, RED, 1, 16, 8)], (2 + math.exp(-1)) / 3),  # 3 pixels outside
        (SEVEN, [(1.0, 6, RED, 1, 8, 8)], 0),  # without the right digit nothing earns
        (SEVEN, [RIGHT, (1.0, 3, RED, 1, 24, 24)], 1 / 2),  # one too many
        (SEVEN, [], 0),
        (SEVEN, [(0.5, 7, RED, 1, 8, 8)], 0.5 / 1.5),
        (ABOVE, [UP, DOWN], 1),
        (ABOVE, [DOWN, UP], 1),
        (ABOVE, SWAPPED, 2 / 3),
        (ABOVE, [UP], (1 / 3) / 2),  # one object, no relation, one too few
        (BELOW, SWAPPED, 1),
        # one detection serves one object
        (TWICE, [(1.0, 7, RED, 0, 8, 8)], 0.5 / 2),
        (TWICE, [(1.0, 7, RED, 0, 8, 8), (1.0, 7, RED, 0, 24, 8)], 1),
    ):
        with subtests.test(prompt=prompt["text"], things=things):
            assert score(prompt, *things) == pytest.approx(value, abs=1e-4)
    three = [(0.9, d, RED, 0, 8 * d, 8) for d in (3, 1, 2)]
    assert score(THREE, *three, strict=True) == score(SEVEN, RIGHT, strict=True) == 1
    for things in ([(0.9, 7, GREEN, 1, 8, 8)], [(0.9, 7, RED, 1, 20, 8)], [RIGHT, *three[:1]]):
        assert score(SEVEN, *things, strict=True) == 0


def test_wrong_input_is_a_readable_message(tmp_path):
    Reader(CONFIG).save(tmp_path)
    reward = Digits(str(tmp_path))
    with pytest.raises(UserError, match="objects"):
        reward(torch.zeros(1, 3, 32, 32), [{"text": "a horse"}])
    with pytest.raises(UserError, match="config.json"):
        Digits(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="not a digit reader"):
        Digits(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "digits_judge"])
def test_real_readers_believe_pictures_and_not_others(name):
    """Pictures of unseen scans score high for their own caption, low for others', nothing when
    blank."""
    load_built_in()
    reward = REWARDS.build(name)
    prompts = captions("single", 200, seed=5)
    scenes = render(prompts, Rng.of(1), "generator")
    of_their_own = reward(scenes.images, prompts)
    of_others = reward(scenes.images, prompts[1:] + prompts[:1])
    blank = reward(torch.zeros_like(scenes.images), prompts)
    assert of_their_own.mean() > 0.85 and of_others.mean() < 0.2 and blank.max() < 0.1
    several = render(captions("pairs", 100) + captions("triples", 100), Rng.of(2), "generator")
    assert reward(several.images, several.prompts).mean() > 0.75

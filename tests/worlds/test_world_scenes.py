"""The digits world: captions, splits, rendering, questions."""

import itertools

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA, load_built_in
from mmrl.worlds.render import INK, SPLITS, render, scans
from mmrl.worlds.scenes import COLORS, DIGITS, PLACES, SIZES, captions, is_held_out, questions
from samplers.noise import Rng

load_built_in()
KINDS = ("single", "sized", "pairs", "triples", "mixed")


@pytest.mark.parametrize("kind", KINDS)
def test_captions_name_their_objects_and_held_out_ones_are_nobodys_to_train_on(kind):
    found = captions(kind, 120, seed=3)
    assert found == captions(kind, 120, seed=3) != captions(kind, 120, seed=4)
    assert len({p["text"] for p in found}) == 120
    for prompt in found:
        assert prompt["count"] == len(prompt["objects"])
        for item in prompt["objects"]:
            words = [item["size"], item["color"], DIGITS[item["digit"]]]
            assert " ".join(filter(None, words)) in prompt["text"]
            assert item["place"] is None or prompt["text"].endswith(f"in the {item['place']}")
        assert (prompt["relation"] or "") in prompt["text"]
    sources = [DATA.build("digits", kind=kind, captions=n, seed=s) for n, s in ((100, 0), (300, 1))]
    held_out = {p["text"] for source in sources for p in source.held_out}
    train = {p["text"] for source in sources for p in source.train}
    assert held_out and train and not held_out & train and all(map(is_held_out, held_out))
    assert 0.1 < len(sources[1].held_out) / 300 < 0.3


def test_the_caption_space():
    assert len(captions("single", 10**6)) == 10 * len(COLORS) * (1 + len(PLACES)) == 240
    assert len(captions("sized", 10**6)) == 480
    with pytest.raises(UserError, match="at least 20"):
        DATA.build("digits", captions=3)


def test_scans_are_split_three_ways_and_rendering_is_row_keyed():
    parts = [scans(split) for split in SPLITS]
    origin = torch.cat([part.origin for part in parts])
    assert len(origin) == len(origin.unique()) == 1797
    assert all(len(part.labels.unique()) == 10 for part in parts)
    prompts = captions("mixed", 40)
    whole = render(prompts, Rng.of(1)).images
    assert torch.equal(whole[:7], render(prompts[:7], Rng.of(1)).images)
    assert not torch.equal(whole, render(prompts, Rng.of(2)).images)
    assert whole.shape == (40, 3, 32, 32) and whole.min() >= 0 and whole.max() <= 1


@pytest.mark.parametrize("wobble", [0.0, 1.0])
def test_boxes_hold_the_ink_and_hardly_overlap(wobble):
    scenes = render(captions("mixed", 200), Rng.of(5), wobble=wobble)
    for image, prompt in zip(scenes.images, scenes.prompts):
        outside = torch.ones(32, 32, dtype=torch.bool)
        for x0, y0, x1, y1 in prompt["boxes"]:
            assert 0 <= x0 < x1 <= 32 and 0 <= y0 < y1 <= 32
            outside[y0:y1, x0:x1] = False
        assert len(prompt["boxes"]) == prompt["count"]
        for (a0, b0, a1, b1), (c0, d0, c1, d1) in itertools.combinations(prompt["boxes"], 2):
            overlap = max(0, min(a1, c1) - max(a0, c0)) * max(0, min(b1, d1) - max(b0, d0))
            assert wobble or overlap <= 40  # of about 150; boxes may touch where ink does not
        # any channel of a pixel outside all boxes is fainter than the faintest ink, summed over
        # three objects
        assert image.amax(0)[outside].max() <= 3 * INK


def test_captions_are_true_of_the_picture():
    scenes = render(captions("mixed", 300), Rng.of(6))
    for image, prompt, placed in zip(scenes.images, scenes.prompts, scenes.placed):
        for k, item in enumerate(prompt["objects"]):
            x, y, side = placed[k].tolist()
            x0, y0, x1, y1 = prompt["boxes"][k]
            hue = image[:, y0:y1, x0:x1].sum((1, 2))  # of all the ink in the box
            near = {
                name: float(torch.cosine_similarity(hue, torch.tensor(rgb), dim=0))
                for name, rgb in COLORS.items()
            }
            assert max(near, key=near.get) == item["color"]
            if item["place"]:
                left, top, right, bottom = PLACES[item["place"]]
                assert left <= x <= right and top <= y <= bottom
            if item["size"]:
                assert side == SIZES[item["size"]] and y1 - y0 <= side + 2
        assert not prompt["relation"] or _holds(prompt["relation"], placed)


def _holds(relation, placed):
    (x0, y0), (x1, y1) = placed[0, :2].tolist(), placed[1, :2].tolist()
    return {"above": y0 < y1, "below": y0 > y1, "left of": x0 < x1, "right of": x0 > x1}[relation]


def test_questions_have_one_true_answer():
    scenes = render(captions("mixed", 100), Rng.of(8))
    types = set()
    for prompt in scenes.prompts:
        asked = questions(prompt)
        assert len({q["question"] for q in asked}) == len(asked)
        by_type = {q["type"]: q["answer"] for q in asked}
        types |= set(by_type)
        assert by_type["count"] == str(prompt["count"])
        assert by_type["sum"] == str(sum(item["digit"] for item in prompt["objects"]))
        for q in asked:
            if q["type"] == "box":
                assert q["answer"] in prompt["boxes"]
            if q["type"] == "color":
                digit = DIGITS.index(q["question"].split()[-1].rstrip("?"))
                colors = [o["color"] for o in prompt["objects"] if o["digit"] == digit]
                assert colors == [q["answer"]]
    assert types == {"count", "sum", "color", "digit", "place", "relation", "box"}

"""Rewards that fall back, appeal, calibrate, contrast, weigh by confidence, and move their
weights."""

from __future__ import annotations

import itertools
import json
import math
import random
import re

import pytest
import torch
from PIL import Image

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS, load_built_in
from mmrl.core.types import Completion
from mmrl.scoring import Scorer
from rewards import (
    Hierarchical,
    calibrated,
    co_reward,
    confidence_weighted,
    ensemble,
    fall_back,
    hypervolume,
    majority_vote,
    noisy_appeals,
    scheduled,
    text_contrast,
)
from rewards.card import card, card_of
from rewards.combined.appeals import lot
from rewards.combined.compose import Bounded
from rewards.combined.weights import covers
from rewards.combined.weights import hypervolume as volume
from tests.fixtures import warm
from tests.rewards.test_compose import gives

NAN = math.nan
IMAGES = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
VIDEOS = torch.rand(4, 2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
TEXTS = ["a", "bb", "ccc", "dddd"]


def size(media, prompts):
    """A number that follows from each sample, of any kind, and its text."""
    values = [float(x.mean()) if isinstance(x, torch.Tensor) else len(x) / 4 for x in media]
    return torch.tensor(
        [v + len(p.get("text", "")) / 10 for v, p in zip(values, prompts, strict=True)]
    )


def lookup(values):
    """A reward that reads its value off the prompt, so that rows may be asked in any number."""

    def reward(media, prompts):
        asked.append([prompt["id"] for prompt in prompts])
        return torch.tensor([values[prompt["id"]] for prompt in prompts])

    asked: list[list[int]] = []
    reward.asked = asked
    return reward


def numbered(count):
    return [{"text": "a", "id": i} for i in range(count)]


# products and the best


def test_products_and_the_best_are_their_formulas():
    each = torch.rand(3, 6, generator=torch.Generator().manual_seed(3))
    each[0, 2] = 0.0
    each[1, 4] = NAN
    parts = [gives(row.tolist()) for row in each]
    for how in ("best", "product", "geometric"):
        values = ensemble(parts, how=how)(torch.zeros(6, 3, 2, 2), [{}] * 6).tolist()
        for a, b, c, value in zip(*each.tolist(), values, strict=True):
            expected = {"best": max(a, b, c), "product": a * b * c}
            expected["geometric"] = (a * b * c) ** (1 / 3)
            right = NAN if math.isnan(b) else expected[how]
            assert value == pytest.approx(right, abs=1e-6, nan_ok=True)
    with pytest.raises(UserError, match="needs parts of 0 and more"):
        ensemble([gives([-1.0]), gives([1.0])], how="geometric")(torch.zeros(1, 3, 2, 2), [{}])


# falling back


def test_only_what_the_first_refuses_is_checked_again():
    first = lookup([1.0, 0.0, 0.0, NAN])
    second = lookup([0.0, 1.0, 0.0, 1.0])
    reward = fall_back(first, second)
    assert reward(VIDEOS, numbered(4)).tolist() == [1.0, 1.0, 0.0, 1.0]
    assert second.asked == [[1, 2, 3]]
    assert (reward.checked, reward.rescued) == (3, 2) and reward.rescue_rate == 2 / 3
    scorer = Scorer({"rescue": reward})
    scorer(TEXTS, numbered(4))
    assert scorer.counters() == {"rescue/checked": 6.0, "rescue/rescued": 4.0}


def test_falling_back_is_its_loop_in_any_order_and_part():
    rng = random.Random(0)
    first = [rng.choice([0.0, 0.3, 1.0]) for _ in range(12)]
    second = [rng.choice([0.0, 0.7, NAN]) for _ in range(12)]
    expected = [a if a > 0.3 else max(a, b) if b == b else NAN for a, b in zip(first, second)]
    reward = fall_back(lookup(first), lookup(second), above=0.3)
    order = list(range(12))
    rng.shuffle(order)
    prompts = numbered(12)
    whole = reward(["x"] * 12, [prompts[i] for i in order])
    parts = torch.cat([reward(["x"], [prompts[i]]) for i in order])
    torch.testing.assert_close(whole, torch.tensor([expected[i] for i in order]), equal_nan=True)
    torch.testing.assert_close(whole, parts, equal_nan=True)


def test_a_reward_of_groups_sees_whole_groups_when_asked_again():
    prompts = [{"text": "a", "group": 0}] * 3
    reward = fall_back(gives([0.0, 1.0, 0.0]), majority_vote)
    assert reward(["7", "7", "8"], prompts).tolist() == [1.0, 1.0, 0.0]
    assert card_of(reward).of == "group" and reward.checked == 2
    with pytest.raises(UserError, match="not of steps"):
        fall_back(gives([[0.0]], "step"), gives([0.0]))


# appeals


def appeals(share=1.0, **options):
    truth = [float(i % 2 == 0) for i in range(40)]
    seen = [t if i % 5 else 0.0 for i, t in enumerate(truth)]  # a fifth of the right are rejected
    return noisy_appeals(lookup(seen), lookup(truth), share=share, **options), seen, truth


def test_appeals_measure_the_rate_of_false_negatives():
    reward, seen, truth = appeals(false_positive=0.1)
    values = reward(["x"] * 40, numbered(40))
    accepted = sum(seen)
    wronged = sum(t for s, t in zip(seen, truth, strict=True) if s == 0)
    fn = wronged / (accepted + wronged)
    assert reward.false_negative() == pytest.approx(fn) and 0.1 < fn < 0.3
    expected = [(s - 0.1) / (1 - 0.1 - fn) for s in seen]
    torch.testing.assert_close(values, torch.tensor(expected))
    forward, seen, _ = appeals(forward=True)
    torch.testing.assert_close(
        forward(["x"] * 40, numbered(40)), torch.tensor([s - 1 + fn for s in seen])
    )


def test_appeals_do_not_depend_on_the_order():
    whole, _, _ = appeals(share=0.5)
    texts = [f"t{i}" for i in range(40)]
    prompts = numbered(40)
    expected = whole(texts, prompts)
    assert 0 < len(whole.judge.asked[0]) < 20
    turned, _, _ = appeals(share=0.5)
    assert torch.equal(turned(texts[::-1], prompts[::-1]).flip(0), expected)
    assert lot(IMAGES[0], {}) != lot(IMAGES[1], {})


def test_what_says_nothing_cannot_be_appealed():
    with pytest.raises(UserError, match="says nothing"):
        appeals(false_positive=0.6, false_negative=0.5)
    with pytest.raises(UserError, match="rewards of 0 and 1"):
        noisy_appeals(lookup([0.5]), lookup([1.0]))(["x"], numbered(1))


# a baseline, an opposite, a confidence


@pytest.mark.parametrize(
    ("media", "baseline"),
    [(IMAGES, torch.full((3, 4, 4), 0.25)), (VIDEOS, torch.full((2, 3, 4, 4), 0.25)), (TEXTS, "b")],
    ids=["image", "video", "text"],
)
def test_a_reward_is_measured_against_a_baseline(media, baseline):
    prompts = [{"text": "q" * i, "baseline": baseline} for i in (1, 1, 2)] + [{"baseline": 0.5}]
    reward = calibrated(size, temperature=0.5)
    values = reward(media, prompts).tolist()
    own = size(media, prompts).tolist()
    for row, prompt in enumerate(prompts):
        base = 0.5 if row == 3 else 0.25 + len(prompt["text"]) / 10
        expected = 1 / (1 + math.exp(-(own[row] - base) / 0.5))
        assert values[row] == pytest.approx(expected, abs=1e-6)
    plain = calibrated(size, sigmoid=False)(media, prompts)
    assert float(plain[3]) == pytest.approx(own[3] - 0.5, abs=1e-6)
    assert "baseline" in card_of(reward).needs and card_of(reward).high == 1


def test_a_baseline_picture_is_brought_to_the_size_of_the_samples(tmp_path):
    Image.new("RGB", (20, 10), (51, 51, 51)).save(tmp_path / "grey.png")
    reward = calibrated(lambda media, prompts: media.mean((1, 2, 3)), sigmoid=False)
    value = reward(IMAGES[:1], [{"baseline": tmp_path / "grey.png"}])
    assert float(value) == pytest.approx(float(IMAGES[0].mean()) - 0.2, abs=1e-5)
    for media, baseline, says in (
        (TEXTS, None, "'baseline'"),
        (VIDEOS, "a.png", r"tensor \[F, 3, H, W\]"),
    ):
        with pytest.raises(UserError, match=says):
            calibrated(size)(media, [{"baseline": baseline}] * 4)
    with pytest.raises(UserError, match="single samples"):
        calibrated(majority_vote)


def test_goals_are_contrasted():
    prompts = [{"text": "a" * i, "negative": "b" * (6 - 2 * i)} for i in range(4)]
    values = text_contrast(size, alpha=0.75, beta=0.25)(IMAGES, prompts).tolist()
    fixed = text_contrast(size, negative_text="bb")(IMAGES, prompts).tolist()
    for i, plain in enumerate(size(IMAGES, [{}] * 4).tolist()):
        near, far = plain + i / 10, plain + (6 - 2 * i) / 10
        assert values[i] == pytest.approx(0.75 * near - 0.25 * far, abs=1e-6)
        assert fixed[i] == pytest.approx(0.5 * (i / 10 - 0.2), abs=1e-6)
    needing = card(needs="text other")(lambda media, prompts: size(media, prompts))
    assert card_of(text_contrast(needing)).needs == ("other", "text", "negative")
    renamed = card_of(text_contrast(needing, positive="said", negative_text="x"))
    assert renamed.needs == ("other", "said")
    # options name the fields, so the class, which is looked at first, must not ask for any
    assert not card_of(text_contrast).needs and not card_of(calibrated).needs
    with pytest.raises(UserError, match="'negative'"):
        text_contrast(size)(IMAGES, [{"text": "a"}] * 4)


def test_confidence_weighs_and_is_cut_off():
    logprobs = [-0.1, -0.1, -3.0, -1.0]
    texts = [Completion("a", 3, True, value) for value in logprobs]
    right = [1.0, 0.0, 1.0, 0.5]
    values = confidence_weighted(gives(right), low=0.2, high=0.8)(texts, [{}] * 4).tolist()
    plain = confidence_weighted(gives(right), low=0.2, high=0.8, signed=False)(texts, [{}] * 4)
    for i in range(4):
        weight = min(max(math.exp(logprobs[i]), 0.2), 0.8)
        assert values[i] == pytest.approx((2 * right[i] - 1) * weight, abs=1e-6)
        assert float(plain[i]) == pytest.approx(right[i] * weight, abs=1e-6)
    assert card_of(confidence_weighted(gives(right))).media == ("text",)
    judged = confidence_weighted(gives(right), confidence=gives([0.5] * 4), scale="raw")
    assert judged(IMAGES, [{}] * 4).tolist() == [0.5, -0.5, 0.5, 0.0]
    with pytest.raises(UserError, match="low"):
        confidence_weighted(gives(right), low=1.0, high=0.5)


# weights that move


def test_weights_follow_the_schedule_and_are_resumed():
    def build():
        parts = [gives([1.0, 2.0]), gives([10.0, NAN])]
        return scheduled(parts, start=[1.0, 0.0], end=[0.2, 0.5], iterations=4)

    reward = build()
    for t in range(7):
        moved = (1 - math.cos(math.pi * min(t / 4, 1))) / 2
        weights = [1 - 0.8 * moved, 0.5 * moved]
        assert reward.weights() == pytest.approx(weights, abs=1e-9)
        values = reward(IMAGES[:2], [{}] * 2)
        assert float(values[0]) == pytest.approx(weights[0] + 10 * weights[1], abs=1e-5)
        assert bool(values[1].isnan()) == (t > 0)  # a part of weight 0 is not missed
        if t == 2:
            resumed = build()
            resumed.load_state_dict(Scorer({"s": reward}).state_dict()["s"])
            assert resumed.weights() == reward.weights()
        reward.remember()
    linear = scheduled([gives([1.0])], [0.0], [1.0], 4, shape="linear")
    linear.remember()
    assert linear.weights() == [0.25]
    with pytest.raises(UserError, match="1 rewards in `of` and 2 weights in `start`"):
        scheduled([gives([1.0])], [0.0, 1.0], [1.0], 4)


def counted_volume(points, reference, n=8):
    """The share of a grid of cells of width 1 / n that some point dominates."""
    total = 0
    for cell in itertools.product(range(n), repeat=len(reference)):
        corner = [r + (c + 1) / n for r, c in zip(reference, cell, strict=True)]
        total += any(all(p >= x - 1e-12 for p, x in zip(q, corner, strict=True)) for q in points)
    return total / n ** len(reference)


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_volumes_are_those_of_counted_cells(axes):
    rng = random.Random(axes)
    for _ in range(20):
        reference = tuple(rng.choice([0.0, -1.0]) for _ in range(axes))
        points = [
            tuple(r + rng.randrange(0, 9) / 8 for r in reference) for _ in range(rng.randrange(6))
        ]
        expected = counted_volume(points, reference)
        assert volume(points, reference) == pytest.approx(expected, abs=1e-9)
        assert volume(points[::-1] * 2, reference) == pytest.approx(expected, abs=1e-9)


def front(values, **options):
    return hypervolume([gives(row) for row in values], **options)


def test_a_larger_volume_pays_more():
    good = [[0.5, 0.7], [0.2, 0.4]]
    reward = front(good, weights=[1.0, 2.0])
    gain = 0.6 * 0.3
    factor = 0.5 + 1.5 * math.tanh(gain)
    values = reward(IMAGES[:2], [{}] * 2)
    expected = [factor * (a + 2 * b) for a, b in zip(*good, strict=True)]
    assert values.tolist() == pytest.approx(expected, abs=1e-6)
    reward.remember()
    assert reward.front == [pytest.approx((0.6, 0.3), abs=1e-6)]
    again = reward(IMAGES[:2], [{}] * 2)  # the same means push nothing out
    assert again.tolist() == pytest.approx([0.5 * (a + 2 * b) for a, b in zip(*good, strict=True)])
    reward.remember()
    assert len(reward.front) == 1
    resumed = front(good)
    resumed.load_state_dict(reward.state_dict())
    assert resumed.front == reward.front and covers((1.0, 1.0), (1.0, 0.5))


def test_missing_rewards_push_nothing():
    silent = front([[NAN, NAN], [1.0, 1.0]])
    assert silent(IMAGES[:2], [{}] * 2).isnan().all() and silent.factor() == 0.5
    silent.remember()
    assert silent.front == []
    with pytest.raises(UserError, match="one each, of at least two"):
        front([[0.5], [0.25]], weights=[1.0])


def test_what_sees_a_whole_iteration_goes_through_the_scorer_and_its_state():
    """In parts of a rollout the values are those of the whole; the state survives a resume."""

    def build():
        return Scorer(
            {
                "appeal": appeals(share=1.0)[0],
                "volume": hypervolume([lookup([i / 40 for i in range(40)]), lookup([0.5] * 40)]),
                "moving": scheduled([lookup([1.0] * 40)], [0.0], [1.0], iterations=2),
                "twins": co_reward(),
            }
        )

    prompts = [{"text": f"q{i // 4}", "twin": i // 8, "id": i} for i in range(40)]
    texts = [str(i // 4 + (i % 4 == 3)) for i in range(40)]
    whole, parts = build(), build()
    expected = whole(texts, prompts)
    stream = parts.stream(40)
    for part in (slice(0, 16), slice(16, 40)):
        stream.put(texts[part], prompts[part], list(range(40))[part])
    values = stream.result()
    for name in expected:
        assert torch.equal(values[name], expected[name]), name
    whole.remember()
    state = whole.state_dict()
    assert state["moving"] == {"iteration": 1} and len(state["volume"]["front"]) == 1
    resumed = build()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    later = [scorer(texts, prompts) for scorer in (whole, resumed)]
    for name in expected:
        assert torch.equal(later[0][name], later[1][name]), name
    for name in ("volume", "moving"):
        assert not torch.equal(later[1][name], expected[name])


# two processes


PROGRAM = """
import json, sys
import torch
from mmrl.scoring import Scorer
from rewards import co_reward, hypervolume, noisy_appeals

rank, world, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if world > 1:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=world
    )

def field(name):
    return lambda media, prompts: torch.tensor([float(prompt[name]) for prompt in prompts])

scorer = Scorer({
    "appeal": noisy_appeals(field("accepted"), field("right"), share=0.5),
    "volume": hypervolume([field("right"), field("size")]),
    "twins": co_reward(),
})
rows = [
    {
        "text": f"q{i // 4}", "twin": i // 8, "said": str(i // 4 + (i % 4 == 3)),
        "right": i % 2, "accepted": i % 2 and i % 5 > 0, "size": i / 24,
    }
    for i in range(24)
]
lists = []
for cut in (4, 0):
    part = rows if world == 1 else rows[:cut] if rank == 0 else rows[cut:]
    values = scorer([p["said"] for p in part], part)
    scorer.remember()
    lists.append({name: x.tolist() for name, x in values.items()})
print(json.dumps({"values": lists, "state": scorer.state_dict()}))
"""


def test_two_processes_pay_what_one_pays(tmp_path):
    """First each process has one half of a pair of twins, then one process has no row."""
    ranks = ((0, 1), (0, 2), (1, 2))
    words = [[rank, world, tmp_path / f"meeting{world}"] for rank, world in ranks]
    processes = [warm.start(["-c", PROGRAM, *more]) for more in words]
    for process in processes:
        assert process.wait() == 0, process.stderr
    whole, first, second = (json.loads(p.stdout.splitlines()[-1]) for p in processes)
    assert first["state"] == second["state"]
    for before, a, b in zip(whole["values"], first["values"], second["values"], strict=True):
        for name, values in before.items():
            assert a[name] + b[name] == pytest.approx(values, abs=1e-6), name
    for name in ("appeal", "twins"):
        assert first["state"][name] == whole["state"][name]
    (point,) = first["state"]["volume"]["front"]
    assert point == pytest.approx(whole["state"]["volume"]["front"][0], abs=1e-9)
    assert whole["values"][0]["volume"] != whole["values"][1]["volume"]


# steps and the whole


load_built_in()
STEPS = [
    "load the table\n\nsum it up\n \n<answer>12</answer>",
    "<step>load</step><step></step><step>plot the sum</step>",
    "",
    "\n\n",
    "one long step",
    "\n\n".join(f"step {i}" for i in range(40)),
]
QUESTIONS = [{"text": f"question {i}", "answer": 12} for i in range(len(STEPS))]


@card(media="text")
def words(texts, prompts):
    return torch.tensor([len(text.split()) / 10 for text in texts])


@card(media="text")
def letters(texts, prompts):
    return torch.tensor([len(text) / 100 for text in texts])


def by_loop(text, share, how, context, most):
    ends = [match.end() for match in re.finditer(r"\n\s*\n|</step>", text)]
    pieces = [(a, text[a:b]) for a, b in zip([0, *ends], [*ends, len(text)])]
    real = [(a, piece) for a, piece in pieces if piece.replace("</step>", "").strip()]
    size = max(1, -(-len(real) // most))
    scores = []
    for i in range(0, len(real), size):
        start, piece = real[min(i + size, len(real)) - 1]
        scores.append(len(text[0 if context else real[i][0] : start + len(piece)].split()) / 10)
    middle = min(scores, default=0.0) if how == "weakest" else sum(scores) / max(len(scores), 1)
    return share * middle + (1 - share) * len(text) / 100


@pytest.mark.parametrize("how", ["mean", "weakest"])
@pytest.mark.parametrize("context", [False, True])
def test_steps_and_whole_are_the_formula(how, context):
    reward = Hierarchical(words, letters, 0.3, how=how, context=context, most=8)
    values = reward(STEPS, QUESTIONS)
    expected = [by_loop(text, 0.3, how, context, 8) for text in STEPS]
    assert values.tolist() == pytest.approx(expected, abs=1e-6)
    alone = [reward([text], [prompt]) for text, prompt in zip(STEPS, QUESTIONS)]
    torch.testing.assert_close(torch.cat(alone), values)


def test_parts_that_do_not_fit_are_refused():
    for part in (Bounded(REWARDS.build("jpeg_compressibility"), low=0), majority_vote):
        with pytest.raises(UserError, match="rewards of texts|different media"):
            Hierarchical(words, part)
    with pytest.raises(UserError, match="not a regular expression"):
        Hierarchical(words, split="(")

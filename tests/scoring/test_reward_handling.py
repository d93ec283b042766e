"""Device, precision, batch size, offloading and cache: done once, outside the rewards, and without
another number."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from mmrl.config import build_rewards
from mmrl.core.errors import UserError
from mmrl.core.types import Completion
from mmrl.scoring import Handling, Scorer
from mmrl.scoring.cache import Cache, Store
from mmrl.scoring.handling import Handled, networks
from rewards import clip_score
from rewards.card import card
from tests.fixtures import waiting
from tests.fixtures.tiny_rewards import asked, pictures, save_tiny_clip

B = 6
MEDIA = pictures(B, 8, 8)
ASKED = [{"text": f"prompt {i}", "boxes": [[0, 0, i, 1]]} for i in range(B)]


class Net:
    """A reward with a network in a list in an attribute, which counts what it sees."""

    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.parts = [{"net": nn.Linear(192, 1)}]
        self.seen = []
        self.places = []

    def __call__(self, media, prompts):
        self.seen.append(len(prompts))
        net = self.parts[0]["net"]
        self.places.append((net.weight.device.type, media.dtype, torch.is_autocast_enabled("cpu")))
        return net(media.flatten(1))[:, 0]


def handled(reward, **options):
    return Handled(reward, Handling(**options), "mine")


def test_batches_are_cut_and_give_the_same():
    net = Net()
    cut = handled(net, batch_size=4)(MEDIA, ASKED)
    assert net.seen == [4, 2]
    torch.testing.assert_close(cut, Net()(MEDIA, ASKED).detach())


def test_groups_stay_whole_in_batches():
    sizes = []

    @card(of="group")
    def size(media, prompts):
        sizes.append([p["group"] for p in prompts])
        return torch.tensor(
            [float(sum(q["group"] == p["group"] for q in prompts)) for p in prompts]
        )

    rewards = Scorer({"size": size}, handling={"size": Handling(batch_size=4)})(
        MEDIA, ASKED, [0, 1, 1, 1, 0, 2]
    )
    assert rewards["size"].tolist() == [2, 3, 3, 3, 2, 1] and sizes == [[0, 0], [1, 1, 1, 2]]


def test_networks_are_found_wherever_a_reward_keeps_them():
    net = Net()
    inner = net.parts[0]["net"]
    assert networks(net) == networks(partial(net)) == networks(net.__call__) == [inner]
    module = nn.Sequential(inner)
    assert networks(module) == [module]  # the outermost only
    assert networks(lambda media, prompts: 0) == []


def test_device_and_offload_move_the_networks_and_the_samples():
    net = Net()
    scorer = Scorer({"mine": net}, handling={"mine": Handling(device="cpu", offload=True)})
    moves = []
    net.parts[0]["net"].to = lambda place: moves.append(str(place))
    scorer(MEDIA, ASKED)
    scorer(MEDIA, ASKED)
    assert moves == ["cpu", "cpu"] * 2  # home, away, home, away
    with pytest.raises(UserError, match="reward 'mine': device 'quantum' cannot be used"):
        handled(Net(), device="quantum")


def test_a_lower_precision_is_used_where_it_was_asked_for_only(tmp_path):
    net = Net()
    exact = handled(net)(MEDIA, ASKED)
    low = handled(net, dtype="bfloat16")(MEDIA, ASKED)
    assert [place[2] for place in net.places] == [False, True] and low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), exact, rtol=0.02, atol=0.02)
    clip = clip_score(save_tiny_clip(tmp_path / "clip"), device="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        exact = clip(pictures(5), asked())
    torch.testing.assert_close(exact, handled(clip)(pictures(5), asked()), rtol=0, atol=0)
    low = handled(clip, dtype="bfloat16")(pictures(5), asked())
    assert 0 < (low - exact).abs().max() < 0.02  # bf16 has 8 bits: measured 0.003
    # and no text of bf16 was kept
    torch.testing.assert_close(clip(pictures(5), asked()), exact, rtol=0, atol=0)


# cache


def test_what_is_known_is_not_asked_for_again():
    net = Net()
    cached = handled(net, cache="memory")
    first = cached(MEDIA, ASKED)
    again = cached(MEDIA.flip(0), ASKED[::-1])
    assert net.seen == [B] and torch.equal(first.flip(0), again)
    larger = torch.cat([MEDIA, MEDIA[:1] + 0.25])
    rewards = cached(larger, [*ASKED, ASKED[0]])
    assert net.seen == [B, 1] and torch.equal(rewards[:B], first) and rewards[B] != first[0]
    assert (cached.cache.hits, cached.cache.misses) == (2 * B, B + 1)


BLACK, BLUE = (Image.new("RGB", (2, 2), (0, 0, shade)) for shade in (0, 1))
FRAMES = np.zeros((1, 2, 2, 3), np.uint8)
CONTENT = [  # fields of two prompts, which are not the same
    ({"image": BLACK}, {"image": BLUE}),
    ({"video": FRAMES}, {"video": FRAMES + 1}),
    ({"x": np.zeros((2, 3))}, {"x": np.zeros((3, 2))}),
    ({"x": "1"}, {"x": 1}),
    ({"x": ["ab", "c"]}, {"x": ["a", "bc"]}),
    ({"x": [["a"], "b"]}, {"x": ["a", ["b"]]}),
    ({"x": 1}, {"y": 1}),
    ({"x": torch.zeros(2)}, {"x": torch.zeros(2, dtype=torch.float64)}),
]


def test_a_key_knows_every_field_of_the_prompt(subtests):
    for one, other in CONTENT:
        with subtests.test(one=one):
            prompts = [{"text": "a"} | fields for fields in (one, other, one)]
            a, b, c = (Cache(10).key(MEDIA[[0, 0, 0]], prompts, [row]) for row in range(3))
            assert a == c != b


def test_keys_of_media_files_and_texts(tmp_path):
    cache, (a, b) = Cache(10), (Completion("yes", 3, True, -0.5), Completion("yes", 9, False, -0.5))
    prompt = [{"text": "q"}] * 3
    assert len({cache.key([a, b, "yes"], prompt, [row]) for row in range(3)}) == 3
    assert cache.key(MEDIA[:1], prompt, [0]) != cache.key(MEDIA[:1].double(), prompt, [0])
    file = tmp_path / "picture.png"
    file.write_bytes(b"one")
    named = [{"image": str(file)}]
    before = cache.key(MEDIA, named, [0])
    assert before == cache.key(MEDIA, named, [0])
    file.write_bytes(b"other")
    os.utime(file, (1, 1))
    assert cache.key(MEDIA, named, [0]) != before
    assert cache.key(MEDIA, [{"x": object()}], [0]) is None


def test_what_has_no_content_is_asked_for_every_time_and_what_failed_is_not_kept():
    net = Net()
    cached = handled(net, cache="memory")
    odd = [{"x": object()}] * B
    assert torch.equal(cached(MEDIA, odd), cached(MEDIA, odd)) and net.seen == [B, B]
    answers = iter([torch.nan, 1.0])
    moody = handled(lambda media, prompts: torch.tensor([next(answers)]), cache="memory")
    assert moody(MEDIA[:1], ASKED[:1]).isnan()
    assert moody(MEDIA[:1], ASKED[:1]) == moody(MEDIA[:1], ASKED[:1]) == 1


def test_the_memory_is_bounded_and_forgets_what_was_unused_longest():
    net = Net()
    cached = handled(net, cache="memory", cache_entries=4)
    cached(MEDIA[:4], ASKED[:4])
    cached(MEDIA[:1], ASKED[:1])
    cached(MEDIA[4:5], ASKED[4:5])  # the second goes
    assert len(cached.cache.values) == 4
    net.seen.clear()
    cached(MEDIA[[0, 2, 3, 4]], [ASKED[i] for i in (0, 2, 3, 4)])
    assert net.seen == []
    cached(MEDIA[1:2], ASKED[1:2])
    assert net.seen == [1]


def test_groups_are_remembered_whole_and_without_their_number():
    calls = []

    @card(of="group")
    def centred(media, prompts):
        calls.append(len(prompts))
        return media.flatten(1).mean(1) - media.mean()

    scorer = Scorer({"c": centred}, handling={"c": Handling(cache="memory", batch_size=2)})
    first = scorer(MEDIA[:4], ASKED[:4], [0, 0, 1, 1])["c"]
    again = scorer(MEDIA[[2, 3, 0, 1]], [ASKED[i] for i in (2, 3, 0, 1)], [5, 5, 7, 7])["c"]
    assert calls == [2, 2] and torch.equal(again, first[[2, 3, 0, 1]])
    scorer(MEDIA[[0, 2]], [ASKED[0], ASKED[2]], [0, 0])  # other company, another value
    assert calls == [2, 2, 2]


def test_the_disk_remembers_between_runs_and_knows_the_reward(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path))
    (tmp_path / "mine.py").write_text(
        "calls = []\ndef bright(media, prompts, *, scale=1.0):\n"
        "    calls.append(len(prompts))\n    return scale * media.flatten(1).mean(1)\n"
    )
    name = f"{tmp_path}/mine.py:bright"

    def run(**options):
        reward = build_rewards({name: {"cache": "disk"} | options})[name].reward
        return reward(MEDIA, ASKED), reward.reward

    first, function = run()
    again, _ = run()
    calls = getattr(function, "func", function).__globals__["calls"]
    assert torch.equal(first, again) and calls == [B]
    rescaled, _ = run(scale=2.0)
    assert calls == [B, B] and torch.equal(rescaled, 2 * first)
    assert len(list((tmp_path / "scores").glob("*.db"))) == 2
    with pytest.raises(UserError, match="a cache on disk needs to know"):
        handled(Net(), cache="disk")


def test_the_file_is_bounded_and_a_broken_one_is_left_alone(tmp_path, caplog):
    store = Store(tmp_path / "a.db", 3)
    store.put({bytes([i]): torch.tensor([float(i)]) for i in range(3)})
    store.get([bytes([0])])
    store.put({bytes([9]): torch.tensor([[1.5, 2.5]])})
    left = Store(tmp_path / "a.db", 3).get([bytes([i]) for i in range(10)])
    assert set(left) == {b"\x00", b"\x02", b"\x09"}
    assert store.get([b"\x09"])[b"\x09"].tolist() == [[1.5, 2.5]]
    (tmp_path / "b.db").write_bytes(b"this is no database" * 100)
    broken = Store(tmp_path / "b.db", 3)
    broken.put({b"x": torch.ones(1)})
    assert broken.get([b"x"]) == {} and "cannot be used and is left alone" in caplog.text


# configuration


def test_every_reward_takes_these_options_and_its_own_go_first(tmp_path):
    clip = {"model": save_tiny_clip(tmp_path / "clip"), "device": "cpu"}
    options = {
        "clip_score": clip | {"batch_size": 2, "dtype": "bfloat16"},
        "jpeg_compressibility": {"batch_size": 3, "cache": "memory", "weight": 0.5},
    }
    clip, jpeg = build_rewards(options).values()
    assert clip.reward.handling == Handling(dtype="bfloat16") and clip.reward.reward.batch_size == 2
    assert jpeg.reward.handling == Handling(batch_size=3, cache="memory") and jpeg.weight == 0.5


WRONG = [
    ({"batch_size": 0}, "batch_size: .* greater than or equal to 1"),
    ({"cache": "tape"}, "cache: expected"),
    ({"offload": "much"}, "offload: expected true or false"),
]


def test_wrong_options_are_refused_with_their_place():
    for options, says in WRONG:
        with pytest.raises(UserError, match=f"reward.jpeg_compressibility.{says}"):
            build_rewards({"jpeg_compressibility": options})
    says = "reward.jpeg_compressibility: reward 'jpeg_compressibility': device 'moon' cannot"
    with pytest.raises(UserError, match=says):
        build_rewards({"jpeg_compressibility": {"device": "moon"}})


# time-outs


class Hanging:
    """Waits for ``go`` once it has seen a sample of 1."""

    def __init__(self):
        self.go = threading.Event()
        self.inside = 0
        self.most = 0

    def __call__(self, media, prompts):
        self.inside += 1
        self.most = max(self.most, self.inside)
        if (media == 1).any():
            self.go.wait(waiting.HANG)
        self.inside -= 1
        return media.flatten(1).mean(1)


def test_a_reward_that_hangs_is_named_and_left_behind(caplog):
    reward = Hanging()
    prompts = [{"text": str(i)} for i in range(4)]
    images = torch.rand(4, 3, 2, 2)
    scorer = Scorer(
        {"slow": reward, "mean": lambda media, prompts: media.flatten(1).mean(1)},
        max_failures=1,
        handling={"slow": Handling(timeout=0.5)},
    )
    within = scorer.rewards["slow"]

    def allow(seconds):  # only those that hang are to run out of time
        within.handling = replace(within.handling, timeout=seconds)

    allow(waiting.HANG)
    torch.testing.assert_close(scorer(images, prompts)["slow"], images.flatten(1).mean(1))
    allow(0.5)
    # the second time it still hangs, and is not asked beside
    for cause in ("has given", "is busy"):
        rewards = scorer(torch.ones(4, 3, 2, 2), prompts)
        assert rewards["slow"].isnan().all() and not rewards["mean"].isnan().any()
        said = scorer.failures["slow"].cause
        assert cause in said and "no answer within 0.5 s" in said
    assert scorer.failures["slow"].count == 8 and "'slow' could not score" in caplog.text
    reward.go.set()
    allow(waiting.HANG)
    torch.testing.assert_close(scorer(images, prompts)["slow"], images.flatten(1).mean(1))
    assert reward.most == 1
    strict = Scorer({"slow": Hanging()}, handling={"slow": Handling(timeout=0.2)})
    with pytest.raises(UserError, match="'slow' could not score .* no answer within 0.2 s"):
        strict(torch.ones(4, 3, 2, 2), prompts)

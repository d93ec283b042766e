"""Rewards: the contract every registered one keeps, JPEG sizes, rewards of the user's own, and what
cards declare."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

import rewards
from mmrl.apps.serve.server import load
from mmrl.cli.app import app
from mmrl.cli.reward_table import BEGIN, END, renewed, short
from mmrl.config import build_rewards
from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS, load_built_in
from mmrl.experiment import build
from rewards import jpeg_compressibility, jpeg_incompressibility
from rewards.card import Card, card_of
from rewards.images.digit_reader import Reader
from tests.fixtures.reward_servers import eighth, serving
from tests.fixtures.tiny_image_rewards import TINY_OPTIONS
from tests.fixtures.tiny_rewards import TINY, asked, pictures, save_head, save_tiny_clip
from tests.fixtures.tiny_sounds import save_clap, save_pe_av, sounding

load_built_in()
COMBINED = ("by_task", "calibrate", "compose", "appeals", "weights")  # as their parts do
OTHERS_NAN = (
    *(f"rewards.combined.{name}" for name in COMBINED),
    "rewards.images.digits",
    "rewards.servers.remote",
)
CPU = {"device": "cpu"}
ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs/rewards.md"


# The contract, for whatever is registered


def save_reader(folder: Path) -> str:
    """A reader of digits with random weights."""
    config = {"image_size": 32, "channels": [8, 8, 8], "kernel": 3, "pool": False}
    config |= {"digits": list(range(10)), "colors": ["red", "blue", "green"]}
    config |= {"places": {"left": [0, 0, 16, 32], "right": [16, 0, 32, 32]}}
    with torch.random.fork_rng():
        torch.manual_seed(2)
        Reader(config | {"sizes": ["small", "large"]}).save(folder)
    return str(folder)


def save_aesthetic(folder: Path) -> dict:
    head = save_head(folder / "head.pth", TINY["embed_dim"])
    return {"head": head, "clip": save_tiny_clip(folder / "clip"), **CPU}


def accepted(media, prompts):
    return (jpeg_incompressibility(media, prompts) > 0.9).float()


BOTH = [jpeg_incompressibility, jpeg_compressibility]
MODELS = TINY_OPTIONS | {
    "clip_score": lambda tmp: {"model": save_tiny_clip(tmp), **CPU},
    "aesthetic": save_aesthetic,
    "digits": lambda tmp: {"path": save_reader(tmp)},
    "digits_judge": lambda tmp: {"path": save_reader(tmp)},
    "clap": lambda tmp: {"model": save_clap(tmp), **CPU},
    "pe_av": lambda tmp: {"model": save_pe_av(tmp), **CPU},
}
OPTIONS = {
    "gate": {"main": BOTH[0], "extra": BOTH[1], "above": 1.0},
    "by_task": {"routes": {"draw": BOTH[0]}, "default": BOTH[1]},
    "ensemble": {"of": BOTH, "how": "mean"},
    "constrain": {"main": BOTH[0], "judges": BOTH[1:], "at_least": -1.0},
    "fall_back": {"first": BOTH[1], "second": BOTH[0]},
    "scheduled": {"of": BOTH, "start": [1.0, 0.0], "end": [0.0, 1.0], "iterations": 2},
    "calibrated": {"of": BOTH[0]},
    "text_contrast": {"of": BOTH[0], "negative_text": "noise"},
    "confidence_weighted": {"of": accepted, "confidence": BOTH[0], "scale": "raw"},
    "bounded": {"of": BOTH[0], "high": 1.0},
    "noisy": {"of": accepted},
}


def of_pictures(name: str) -> bool:
    """Texts are in test_verifiable.py, judges in test_judge.py, groups in test_compose.py."""
    card = card_of(REWARDS[name])
    return card.media != ("text",) and card.of == "sample" and not name.startswith("judge")


@pytest.fixture(scope="module", params=[name for name in sorted(REWARDS) if of_pictures(name)])
def reward(request, tmp_path_factory):
    """Every registered reward of pictures; those that need a model get a small one."""
    name = request.param
    options = OPTIONS.get(name, {})
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        if name in MODELS:
            options = MODELS[name](tmp_path_factory.mktemp(name))
        if name == "remote":
            address = stack.enter_context(serving({"jpeg": jpeg_incompressibility}))
            options = {"url": address, "batch_size": 2}
        try:
            yield REWARDS.build(name, **options)
        except UserError as error:  # any other exception fails: a user would see a traceback
            pytest.skip(f"{name} cannot be built here: {error}")


def media_for(reward) -> torch.Tensor:
    """Pictures, or videos of 4 frames for a reward that judges only those, or their sound."""
    if card_of(reward).sound:
        return sounding()
    if "image" in card_of(reward).media:
        return pictures(5)
    return torch.stack([pictures(5, seed=seed) for seed in range(4)], dim=1)


def close(values, expected):
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)


def test_a_reward_keeps_its_contract(reward):
    """One finite float a sample, which depends on that sample alone; inputs and the global
    generator are left alone, bfloat16 counts as the floats it holds, texts are refused."""
    media = media_for(reward)
    prompts = asked()
    before, texts, state = media.clone(), deepcopy(prompts), torch.get_rng_state()
    values = reward(media, prompts)
    assert torch.equal(media, before) and media._version == 0 and prompts == texts
    assert torch.equal(torch.get_rng_state(), state)
    assert values.shape == (5,) and values.dtype == torch.float32 and values.isfinite().all()
    order = [3, 0, 4, 1, 2]
    close(reward(media[order], [prompts[i] for i in order]), values[order])
    parts = [reward(media[i:j], prompts[i:j]) for i, j in ((0, 1), (1, 5))]
    close(torch.cat(parts), values)
    half = media.bfloat16()
    close(reward(half, prompts), reward(half.float(), prompts))
    with pytest.raises(UserError, match="image"):
        reward(["an answer"] * 2, asked(2))
    if {"image", "video"} <= set(card_of(reward).media):
        assert_videos_are_means_of_frames(reward, values)
    if type(reward).__module__ not in OTHERS_NAN:
        assert_broken_samples_spoil_no_other(reward, values)


def assert_videos_are_means_of_frames(reward, values):
    first, second = pictures(5), pictures(5, seed=7)
    try:
        still = reward(torch.stack([first] * 3, dim=1), asked())
    except UserError:
        return  # takes no videos
    close(still, values)
    cut = reward(torch.stack([first, second], dim=1), asked())
    close(cut, (values + reward(second, asked())) / 2)


def assert_broken_samples_spoil_no_other(reward, good):
    media = media_for(reward)
    judged = media.sound if card_of(reward).sound else media
    judged[2].flatten()[5] = torch.nan
    judged[4].flatten()[5] = torch.inf
    values = reward(media, asked())
    assert values.isnan().tolist() == [False, False, True, False, True]
    close(values[[0, 1, 3]], good[[0, 1, 3]])


# JPEG


def test_jpeg_sizes_of_a_gradient_and_of_grey():
    """Test vector 22, Pillow 13.0.0 with libjpeg-turbo 3.2.0; another encoder may differ by some
    bytes."""
    ramp = torch.linspace(0, 1, 64)
    gradient = torch.stack(
        [ramp.expand(64, 64), ramp[:, None].expand(64, 64), torch.full((64, 64), 0.5)]
    )
    media = torch.stack([gradient, torch.full((3, 64, 64), 0.5)])
    kilobytes = jpeg_incompressibility(media, asked(2))
    torch.testing.assert_close(kilobytes, torch.tensor([1.361, 0.689]), rtol=0.02, atol=0)
    assert torch.equal(jpeg_compressibility(media, asked(2)), -kilobytes)
    assert jpeg_incompressibility(media[:1], asked(1), quality=30) < kilobytes[0]
    flow_grpo = jpeg_compressibility(media, asked(2), scale=1 / 500)
    torch.testing.assert_close(flow_grpo, torch.tensor([-0.002722, -0.001378]), rtol=0.02, atol=0)


# The user's own


def test_a_reward_that_cannot_be_found_says_where_one_looked(subtests):
    for name, says in (
        ("no_such_module_xyz:f", "cannot import reward 'no_such_module_xyz:f'"),
        ("no_such_file_xyz.py:f", "no such file: no_such_file_xyz.py; relative paths start"),
        ("rewards.images.jpeg:jpeg_compresibility", "did you mean 'jpeg_compressibility'"),
        ("clip_scor", "did you mean 'clip_score'"),
    ):
        with subtests.test(name=name), pytest.raises(UserError, match=says):
            REWARDS.find(name)


def test_the_examples_of_the_documentation_give_the_same_numbers_here_and_served(
    tmp_path, monkeypatch
):
    """The reward of "Your own", and the blocks of "Serve yours from another environment"."""
    text = DOC.read_text()
    source = next(b.split("```")[0] for b in text.split("```python\n")[1:] if "def " in b)
    section = text.partition("## Serve yours from another environment")[2].partition("\n## ")[0]
    server_text = section.split("```text\n")[1].split("```")[0]
    client_yaml = section.split("```yaml\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_reward.py").write_text(source)
    (tmp_path / "rewards.yaml").write_text(server_text)
    near = REWARDS.build(f"{tmp_path}/my_reward.py:colourfulness", scale=2.0)
    media = eighth(torch.cat([torch.full((1, 3, 32, 32), 0.5), pictures(3)]))
    values = near(media, asked(4))
    assert values[0] == 0 and (values[1:] > 0).all()
    video = media[:, None].expand(-1, 4, -1, -1, -1)
    torch.testing.assert_close(near(video, asked(4)), values)
    served, options = load(tmp_path / "rewards.yaml")
    assert options.port == 8123 and "mmrl serve-reward rewards.yaml" in section
    with serving({name: weighted.reward for name, weighted in served.items()}) as address:
        spec = yaml.safe_load(client_yaml.replace("http://127.0.0.1:8123", address))["reward"]
        far = build_rewards(spec)["colourful"].reward(media, asked(4))
    assert torch.equal(far, values)
    sys.modules.pop("my_reward", None)


def test_every_registered_reward_is_documented():
    text = DOC.read_text()
    assert [name for name in REWARDS if f"`{name}`" not in text] == []


# cards: what rewards declare


OWN = sorted(name for name, entry in REWARDS.items() if entry.__module__.startswith("rewards."))


def test_a_reward_has_a_card_and_can_be_imported_by_its_name(subtests):
    for name in OWN:
        with subtests.test(name=name):
            entry = REWARDS[name]
            assert isinstance(getattr(entry, "card", None), Card), "declare it with @card"
            shown = card_of(entry)
            assert shown.media and set(shown.media) <= {"image", "video", "text"}
            assert shown.of in ("sample", "group", "step", "batch")
            assert shown.low is None or shown.high is None or shown.low < shown.high
            assert getattr(rewards, name) is getattr(rewards, entry.__name__) is entry


def test_the_package_names_every_module_that_registers_something():
    files = (ROOT / "rewards").rglob("*.py")
    found = {
        ".".join(file.relative_to(ROOT / "rewards").with_suffix("").parts)
        for file in files
        if re.search(r"^@[A-Z]+\.register\(", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert found == set(rewards.MODULES)


def test_the_table_in_the_documentation_is_up_to_date_and_the_command_prints_it():
    page = (ROOT / "docs/rewards.md").read_text()
    assert page == renewed(page, short()), "run python scripts/dev/reward_table.py"
    assert page.count(BEGIN) == page.count(END) == 1
    shown = CliRunner().invoke(app, ["list", "rewards", "--markdown"]).output
    assert shown.startswith("| name | what it says |")
    assert all(f"\n| `{name}` |" in shown for name in OWN)


NEEDY = '''
import torch
from mmrl.core.registry import DATA, POLICIES
from mmrl.policies.capabilities import Capabilities
from rewards.card import card

@card(media="text", needs="answer")
def exact(media, prompts):
    return torch.zeros(len(prompts))

@card(needs="boxes")
class Boxes:
    """Needs more when it is strict."""
    def __init__(self, lazy: bool = False):
        raise AssertionError("built although the data lacks what it needs")
    def __call__(self, media, prompts):
        return []

@POLICIES.register("must_not_be_built")
class Never:
    capabilities = Capabilities("categorical", makes="text")
    rollout = decode = None
    def __init__(self):
        raise AssertionError("the model was loaded before the data was looked at")
'''


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A function that writes a configuration beside ``mine.py`` and two kinds of data."""
    (tmp_path / "needy.py").write_text(NEEDY)
    (tmp_path / "plain.jsonl").write_text(
        '{"text": "a"}\n{"text": "b", "answer": 3}\n{"text": "c"}\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(**sections):
        whole = yaml.safe_load((ROOT / "configs/digits/flow_grpo.yaml").read_text()) | sections
        (tmp_path / "run.yaml").write_text(
            yaml.safe_dump(whole).replace(": 0.0001\n", ": 1.0e-4\n")
        )
        return tmp_path / "run.yaml"

    yield write
    build.POLICIES.pop("must_not_be_built", None)
    sys.modules.pop("needy", None)


def test_what_does_not_fit_is_refused_before_a_model_is_loaded(written):
    plain = {"prompts": {"path": "plain.jsonl", "held_out": 0.0}}
    exact = {"needy.py:exact": 1.0}
    for sections, says in (
        (
            {"reward": {"needy.py:Boxes": 1.0}},
            r"run.yaml:\d+: .*:Boxes: .* needs the field 'boxes'",
        ),
        ({"reward": exact, "data": plain}, "judges text, but the policy makes image; use a reward"),
    ):
        path = written(**sections)
        with pytest.raises(UserError, match=says):
            build.read(path, ())
    path = written(
        reward=exact, data=plain, policy="must_not_be_built", plugins=["needy.py"], evaluate={}
    )
    with pytest.raises(UserError) as caught:
        build.Session.of(build.read(path, ()))
    message = str(caught.value)
    says = "needs the field 'answer' of every prompt, but 2 of 3 prompts have none, 'a' first"
    assert says in message and "run.yaml:" in message
    assert 'in a .jsonl file: {"text": "...", "answer": ...}' in message


def test_equal_short_names_do_not_collapse():
    names = build.short_names(["a.py:f", "b.py:f", "b.py:g", "clip_score"])
    assert list(names.values()) == ["a.py:f", "b.py:f", "g", "clip_score"]

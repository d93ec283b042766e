"""What rewards declare: cards, names to import, the generated table, and refusals of data and media
that do not fit."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

import rewards
from mmrl import config
from mmrl.cli.reward_table import BEGIN, END, renewed, short, span
from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS, load_built_in
from mmrl.experiment import build
from rewards.card import Card, card, card_of

ROOT = Path(__file__).resolve().parents[2]
load_built_in()
OWN = sorted(name for name, entry in REWARDS.items() if entry.__module__.startswith("rewards."))


def test_a_reward_has_a_card_and_can_be_imported_by_its_name(subtests):
    for name in OWN:
        with subtests.test(name=name):
            entry = REWARDS[name]
            assert isinstance(vars(entry).get("card") or getattr(entry, "card", None), Card), (
                f"{name}: declare it with @card"
            )
            shown = card_of(entry)
            assert (
                set(shown.media) <= {"image", "video", "text"}
                and shown.media
                and shown.of in ("sample", "group", "step", "batch")
            )
            assert shown.low is None or shown.high is None or shown.low < shown.high
            assert (
                getattr(rewards, name) is entry
                and getattr(rewards, entry.__name__) is entry
                and callable(entry)
            )


def test_the_package_names_every_module_that_registers_something():
    files = (ROOT / "rewards").rglob("*.py")
    found = {
        ".".join(file.relative_to(ROOT / "rewards").with_suffix("").parts)
        for file in files
        if re.search(r"^@[A-Z]+\.register\(", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert found == set(rewards.MODULES)


def test_the_table_in_the_documentation_is_up_to_date():
    page = (ROOT / "docs/rewards.md").read_text()
    fresh = renewed(page, short())
    assert page == fresh, "run python scripts/dev/reward_table.py"
    assert page.count(BEGIN) == page.count(END) == 1


def test_the_command_prints_the_table_with_plug_ins():
    from typer.testing import CliRunner

    from mmrl.cli.app import app

    shown = CliRunner().invoke(app, ["list", "rewards", "--markdown"]).output
    assert shown.startswith("| name | what it says |") and all(
        f"\n| `{name}` |" in shown for name in OWN
    )


def test_cards_of_classes_functions_partials_and_objects():
    @card(media="image video", needs="text boxes", low=0)
    class Mine:
        def __init__(self, strict: bool = False):
            if strict:
                self.card = Card(media=("image",), needs=("text",))

    assert card_of(Mine).needs == card_of(Mine()).needs == ("text", "boxes")
    assert card_of(Mine(strict=True)) == Card(media=("image",), needs=("text",))
    assert card_of(lambda media, prompts: None) == Card()
    bound = REWARDS.build("jpeg_compressibility", scale=2.0)
    assert card_of(bound) is card_of(REWARDS["jpeg_compressibility"])
    assert [span(Card(low=a, high=b)) for a, b in ((0, 1), (0, None), (None, 0), (None, None))] == [
        "0..1",
        "0 and above",
        "0 and below",
        "",
    ]


MINE = '''
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
    (tmp_path / "needy.py").write_text(MINE)
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


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        build.Session.of(build.read(path, ()))
    return str(caught.value)


def test_a_field_no_prompt_can_have_is_refused_when_the_file_is_read(written):
    path = written(reward={"needy.py:Boxes": 1.0})
    with pytest.raises(
        UserError,
        match=r"run.yaml:\d+: reward.needy.py:Boxes: reward .* needs "
        r"the field 'boxes'",
    ):
        build.read(path, ())


def test_media_the_reward_does_not_judge_is_refused_when_the_file_is_read(written):
    path = written(reward={"needy.py:exact": 1.0}, data={"prompts": {"path": "plain.jsonl"}})
    with pytest.raises(
        UserError, match="judges text, but the policy makes image; use a reward of images"
    ):
        build.read(path, ())


def test_a_field_that_some_prompts_lack_is_refused_before_a_model_is_loaded(written):
    policy = "must_not_be_built"
    source = {"prompts": {"path": "plain.jsonl", "held_out": 0.0}}
    message = refusal(
        written(
            reward={"needy.py:exact": 1.0},
            policy=policy,
            data=source,
            plugins=["needy.py"],
            evaluate={},
        )
    )
    assert (
        "needs the field 'answer' of every prompt, but 2 of 3 prompts have none, 'a' first"
    ) in message
    assert 'in a .jsonl file: {"text": "...", "answer": ...}' in message and "run.yaml:" in message


# names


def test_a_wrong_name_is_refused_with_its_place(subtests):
    for spec, says in [
        ({"fast": {"use": "remot"}}, "unknown reward 'remot'; did you mean 'remote'"),
        ({"fast": {"use": 3}}, "reward.fast.use: expected the name of a reward, got 3"),
        ({"fast": {"use": "jpeg_compressibility", "sale": 1}}, "reward.fast.sale: unknown option"),
        ({3: {"use": "remote"}}, "expected the name of a reward, got 3"),
        ({"fast": 1.0}, "unknown reward 'fast'"),
    ]:
        with subtests.test(spec=spec, says=says), pytest.raises(UserError, match=says):
            config.build_rewards(spec)


def test_equal_short_names_do_not_collapse(written):
    names = build.short_names(["a.py:f", "b.py:f", "b.py:g", "clip_score"])
    assert names == {
        "a.py:f": "a.py:f",
        "b.py:f": "b.py:f",
        "b.py:g": "g",
        "clip_score": "clip_score",
    }

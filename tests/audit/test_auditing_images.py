"""`mmrl check-reward` for rewards of pictures: an honest one passes, exploitable ones are named."""

from __future__ import annotations

import json

import pytest
import torch
from torchvision.utils import save_image
from typer.testing import CliRunner

from mmrl.apps.check_reward import Subject, audit_one
from mmrl.apps.check_reward.images import real
from mmrl.cli.app import app
from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.worlds.data import Digits
from mmrl.worlds.moving import captions
from rewards.card import card
from tests.fixtures.tiny_rewards import pictures

PROMPTS = Digits(captions=40).train[:24]


@card(media="image", needs="text", low=0, high=1)
def template(media, prompts):
    """Cosine to the drawing that was asked for: an honest reward of the digits world."""
    targets = torch.stack([real([prompt], 0)[0] for prompt in prompts]).flatten(1)
    return torch.nn.functional.cosine_similarity(media.flatten(1), targets).clamp(0, 1)


def broken(reward, prompts=PROMPTS, kind="image"):
    report = audit_one(Subject("mine", reward, list(prompts)), kind)
    return report, {line.probe for line in report.lines if line.offences}


def test_an_honest_reward_passes():
    report, failed = broken(template)
    probes = "real picture; real picture, one by one; noise; blank; another prompt; duplicates"
    assert report.passed and not failed
    assert [line.probe for line in report.lines][:6] == probes.split("; ")


@card(media="image")
def brightness(media, prompts):
    return media.flatten(1).mean(1)


@card(media="image", needs="text")
def blind(media, prompts):
    return -(media - media.mean((1, 2, 3), keepdim=True)).flatten(1).std(1)


@card(media="image")
def relative(media, prompts):
    return media.flatten(1).std(1) - media.flatten(1).std(1).mean()


@card(media="image", low=0, high=1)
def beyond(media, prompts):
    return 5 * media.flatten(1).std(1)


@card(media="image")
def unsure(media, prompts):
    return torch.full((len(media),), torch.nan)


def test_what_can_be_exploited_is_named(subtests):
    for reward, failed in [
        (REWARDS["jpeg_incompressibility"], {"noise"}),
        (REWARDS["jpeg_compressibility"], {"blank"}),
        (brightness, {"noise", "blank"}),
        (blind, {"blank", "another prompt"}),
        (relative, {"real picture, one by one"}),
        (beyond, {"all of them"}),
        (unsure, {"real picture", "noise", "blank", "JPEG, quality 90"}),
    ]:
        with subtests.test(reward=reward, failed=failed):
            report, names = broken(reward)
            assert failed <= names and not report.passed
            for line in report.lines:
                assert all(offence.where for offence in line.offences)


def test_rewards_of_videos_see_moving_clips_and_groups_are_refused():
    @card(media="video", low=0)
    def jump(media, prompts):
        assert media.shape[1:] == (8, 3, 32, 32)
        return media[:, 0].flatten(1).std(1) + media.diff(dim=1).abs().flatten(1).mean(1)

    report, _ = broken(jump, PROMPTS, "video")
    rules = {line.probe: line.rule for line in report.lines}
    assert report.passed and "wants motion" in rules["noise"]
    of_groups = card(media="image", of="group")(brightness)
    with pytest.raises(UserError, match="compares whole groups"):
        audit_one(Subject("mine", of_groups, list(PROMPTS)), "image")


def test_the_command_on_pictures_of_the_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"thing {i}", "image": f"{i}.png"} for i in range(4)]
    for row, picture in zip(rows, pictures(4, 24, 24), strict=True):
        save_image(picture, row["image"])
    data = "data: {prompts: {path: things.jsonl, held_out: 0.0}}\n"
    (tmp_path / "check.yaml").write_text(data + "reward: {jpeg_incompressibility: 1.0}\n")

    def check(rows):
        (tmp_path / "things.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return CliRunner().invoke(app, ["check-reward", "check.yaml"])

    done = check(rows)
    assert done.exit_code == 1 and "FAIL" in done.output and "things.jsonl:1" in done.output
    assert "needs a real picture" in str(check([{"text": "bare"}, {"text": "bare too"}]).exception)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("motion_amount", {"noise", "frames out of order"}),
        ("motion_smoothness", {"blank", "still"}),
    ],
)
def test_rewards_of_motion_and_of_steadiness_pass_and_say_what_they_are(name, other):
    report, failed = broken(REWARDS.build(name), PROMPTS[:6], "video")
    assert not failed, report
    probes = {line.probe for line in report.lines if "not of a reward that wants" in line.rule}
    assert probes and probes <= other


def test_a_reward_of_moving_digits_sees_digits_move():
    report, failed = broken(REWARDS.build("digits_motion"), captions()[:8], "video")
    assert not failed, report
    assert report.lines[0].probe == "real picture" and min(report.lines[0].scores) > 0.9


def test_a_reward_blind_to_time_and_content_fails_both_ways():
    size = card(media="video")(lambda media, prompts: torch.full((len(media),), 1.0))
    _, failed = broken(size, PROMPTS[:6], "video")
    assert {"noise", "blank", "still", "frames out of order"} <= failed

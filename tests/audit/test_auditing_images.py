"""`mmrl check-reward` for rewards of pictures: an honest one passes, exploitable ones are named."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from mmrl.apps.check_reward import Subject, audit_one
from mmrl.apps.check_reward.images import real, recompressed
from mmrl.cli.app import app
from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.worlds.data import Digits
from rewards.card import Card, card
from tests.fixtures.tiny_rewards import pictures

PROMPTS = Digits(captions=40).train[:24]


@card(media="image", needs="text", low=0, high=1)
def template(media, prompts):
    """Cosine to the drawing that was asked for: an honest reward of the digits world."""
    targets = torch.stack([real([prompt], 0)[0] for prompt in prompts]).flatten(1)
    return torch.nn.functional.cosine_similarity(media.flatten(1), targets).clamp(0, 1)


def broken(reward, prompts=PROMPTS):
    report = audit_one(Subject("mine", reward, list(prompts)), "image")
    return report, {line.probe for line in report.lines if line.offences}


def test_an_honest_reward_passes():
    report, failed = broken(template)
    assert report.passed and not failed
    assert [line.probe for line in report.lines] == [
        "real picture",
        "real picture, one by one",
        "noise",
        "blank",
        "another prompt",
        "duplicates",
        "JPEG, quality 90",
        "all of them",
    ]


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
        return media[:, 0].flatten(1).std(1) + (media[:, 1:] - media[:, :-1]).abs().flatten(1).mean(
            1
        )

    report = audit_one(Subject("mine", jump, list(PROMPTS)), "video")
    assert report.passed and any(
        line.probe == "noise" and "wants motion" in line.rule for line in report.lines
    )
    brightness_of_groups = card(media="image", of="group")(
        lambda media, prompts: media.flatten(1).mean(1)
    )
    with pytest.raises(UserError, match="compares whole groups"):
        audit_one(Subject("mine", brightness_of_groups, list(PROMPTS)), "image")
    assert Card().of == "sample"


def test_a_jpeg_is_near_its_original():
    smooth = torch.linspace(0, 1, 32).expand(2, 3, 32, 32)
    assert (recompressed(smooth) - smooth).abs().max() < 0.05
    assert recompressed(pictures(2)[:, None].expand(-1, 3, -1, -1, -1)).shape == (2, 3, 3, 32, 32)


def test_the_command_on_pictures_of_the_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = []
    for i, picture in enumerate(pictures(4, 24, 24)):
        Image.fromarray((picture * 255).byte().permute(1, 2, 0).contiguous().numpy()).save(
            f"{i}.png"
        )
        lines.append(json.dumps({"text": f"thing {i}", "image": f"{i}.png"}))
    (tmp_path / "things.jsonl").write_text("\n".join(lines) + "\n")
    body = (
        "data: {prompts: {path: things.jsonl, held_out: 0.0}}\nreward: "
        "{jpeg_incompressibility: 1.0}\n"
    )
    (tmp_path / "check.yaml").write_text(body)
    invocation = CliRunner().invoke(app, ["check-reward", "check.yaml"])
    assert (
        invocation.exit_code == 1
        and "FAIL" in invocation.output
        and "things.jsonl:1" in invocation.output
    ), invocation.output
    (tmp_path / "things.jsonl").write_text('{"text": "bare"}\n{"text": "bare too"}\n')
    invocation = CliRunner().invoke(app, ["check-reward", "check.yaml"])
    assert invocation.exit_code != 0 and "needs a real picture" in str(invocation.exception)


@pytest.mark.parametrize("name", ["motion_amount", "motion_smoothness"])
def test_rewards_of_motion_and_of_steadiness_pass_and_say_what_they_are(name):
    report, failed = broken_video(REWARDS.build(name), PROMPTS[:6])
    assert not failed, report
    probes = {line.probe for line in report.lines if "not of a reward that wants" in line.rule}
    other = {
        "motion_amount": {"noise", "frames out of order"},
        "motion_smoothness": {"blank", "still"},
    }[name]
    assert probes and probes <= other


def test_a_reward_of_moving_digits_sees_digits_move():
    from mmrl.worlds.moving import captions

    report, failed = broken_video(REWARDS.build("digits_motion"), captions()[:8])
    assert not failed, report
    assert report.lines[0].probe == "real picture" and min(report.lines[0].scores) > 0.9


def test_a_reward_blind_to_time_and_content_fails_both_ways():
    @card(media="video")
    def size(media, prompts):
        return torch.full((len(media),), float(media.shape[1]))

    _, failed = broken_video(size, PROMPTS[:6])
    assert {"noise", "blank", "still", "frames out of order"} <= failed


def broken_video(reward, prompts):
    report = audit_one(Subject("mine", reward, list(prompts)), "video")
    return report, {line.probe for line in report.lines if line.offences}

"""`mmrl check-reward` for rewards of pictures: an honest one passes, exploitable ones are named."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from mmrl.audit import Subject, audit_one
from mmrl.audit.images import real, recompressed
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
    wanted = torch.stack([real([prompt], 0)[0] for prompt in prompts]).flatten(1)
    return torch.nn.functional.cosine_similarity(media.flatten(1), wanted).clamp(0, 1)


def broken(reward, prompts=PROMPTS):
    found = audit_one(Subject("mine", reward, list(prompts)), "image")
    return found, {line.probe for line in found.lines if line.offences}


def test_an_honest_reward_passes():
    found, failed = broken(template)
    assert found.passed and not failed
    assert [line.probe for line in found.lines] == [
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


@pytest.mark.parametrize(
    ("reward", "failed"),
    [
        (REWARDS["jpeg_incompressibility"], {"noise"}),
        (REWARDS["jpeg_compressibility"], {"blank"}),
        (brightness, {"noise", "blank"}),
        (blind, {"blank", "another prompt"}),
        (relative, {"real picture, one by one"}),
        (beyond, {"all of them"}),
        (unsure, {"real picture", "noise", "blank", "JPEG, quality 90"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_can_be_exploited_is_named(reward, failed):
    found, names = broken(reward)
    assert failed <= names and not found.passed
    for line in found.lines:
        assert all(one.where for one in line.offences)


def test_rewards_of_videos_see_moving_clips_and_groups_are_refused():
    @card(media="video", low=0)
    def jump(media, prompts):
        assert media.shape[1:] == (8, 3, 32, 32)
        return media[:, 0].flatten(1).std(1) + (media[:, 1:] - media[:, :-1]).abs().flatten(1).mean(
            1
        )

    found = audit_one(Subject("mine", jump, list(PROMPTS)), "video")
    assert found.passed and any(
        line.probe == "noise" and "wants motion" in line.rule for line in found.lines
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
    found = CliRunner().invoke(app, ["check-reward", "check.yaml"])
    assert found.exit_code == 1 and "FAIL" in found.output and "things.jsonl:1" in found.output, (
        found.output
    )
    (tmp_path / "things.jsonl").write_text('{"text": "bare"}\n{"text": "bare too"}\n')
    found = CliRunner().invoke(app, ["check-reward", "check.yaml"])
    assert found.exit_code != 0 and "needs a real picture" in str(found.exception)


@pytest.mark.parametrize("name", ["motion_amount", "motion_smoothness"])
def test_rewards_of_motion_and_of_steadiness_pass_and_say_what_they_are(name):
    found, failed = broken_video(REWARDS.build(name), PROMPTS[:6])
    assert not failed, found
    said = {line.probe for line in found.lines if "not of a reward that wants" in line.rule}
    other = {
        "motion_amount": {"noise", "frames out of order"},
        "motion_smoothness": {"blank", "still"},
    }[name]
    assert said and said <= other


def test_a_reward_of_moving_digits_sees_digits_move():
    from mmrl.worlds.moving import captions

    found, failed = broken_video(REWARDS.build("digits_motion"), captions()[:8])
    assert not failed, found
    assert found.lines[0].probe == "real picture" and min(found.lines[0].scores) > 0.9


def test_a_reward_blind_to_time_and_content_fails_both_ways():
    @card(media="video")
    def size(media, prompts):
        return torch.full((len(media),), float(media.shape[1]))

    _, failed = broken_video(size, PROMPTS[:6])
    assert {"noise", "blank", "still", "frames out of order"} <= failed


def broken_video(reward, prompts):
    found = audit_one(Subject("mine", reward, list(prompts)), "video")
    return found, {line.probe for line in found.lines if line.offences}

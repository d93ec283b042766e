"""Rewards of videos: wrapped rewards of images, consistency, optical flow, actions."""

from __future__ import annotations

import pytest
import torch
import yaml

from mmrl import config
from mmrl.core.errors import UserError
from rewards import (
    Action,
    ClipConsistency,
    ClipScore,
    DinoConsistency,
    MotionAmount,
    PerFrame,
)
from rewards import jpeg_incompressibility as jpeg
from rewards.card import card_of
from tests.fixtures.tiny_image_rewards import save_dino, save_videomae
from tests.fixtures.tiny_rewards import asked, pictures, save_tiny_clip


def videos(count: int = 5, frames: int = 6, height: int = 32, width: int = 32) -> torch.Tensor:
    return torch.stack([pictures(count, height, width, seed=seed) for seed in range(frames)], dim=1)


# Frames


def test_frames_are_reduced_as_asked():
    media = videos(3, 5)
    prompts = asked(3)
    values = torch.stack([jpeg(media[:, i], prompts) for i in range(5)], dim=1)
    for reduce, expected in (
        ("mean", values.mean(1)),
        ("worst", values.amin(1)),
        ("best", values.amax(1)),
        ("first", values[:, 0]),
        ("median", values.median(1).values),
    ):
        assert torch.equal(PerFrame(jpeg, reduce)(media, prompts), expected)
    assert torch.equal(
        PerFrame(jpeg, "worst", frames=3)(media, prompts), values[:, [0, 2, 4]].amin(1)
    )
    assert torch.equal(PerFrame(jpeg, frames=1)(media, prompts), values[:, 0])
    assert torch.equal(PerFrame(jpeg)(media[:, 0], prompts), values[:, 0])
    steady = 1 - media.diff(dim=1).abs().mean((1, 2, 3, 4))
    torch.testing.assert_close(
        PerFrame(jpeg, steady=0.3)(media, prompts), 0.7 * values.mean(1) + 0.3 * steady
    )


def test_a_wrapped_reward_is_written_in_a_configuration(tmp_path):
    clip = save_tiny_clip(tmp_path / "clip")
    spec = yaml.safe_load(f"""
        worst: {{use: per_frame, reward: {{clip_score: {{model: {clip}, device: cpu}}}},
         reduce: worst, frames: 3}}
        per_frame: {{reward: jpeg_incompressibility, weight: 0.5}}
    """)
    built = config.build_rewards(spec)
    media = videos()
    prompts = asked()
    plain = ClipScore(clip, device="cpu")
    values = torch.stack([plain(media[:, i], prompts) for i in (0, 2, 5)], dim=1)
    torch.testing.assert_close(built["worst"].reward(media, prompts), values.amin(1))
    assert built["per_frame"].weight == 0.5 and card_of(built["worst"].reward).needs == ("text",)
    with pytest.raises(UserError, match="did you mean 'clip_score'"):
        config.build_rewards({"per_frame": {"reward": "clip_scor"}})
    with pytest.raises(UserError, match="this one judges video"):
        PerFrame(MotionAmount())


# Consistency


def test_consistency_is_the_mean_cosine_of_frames(tmp_path):
    media = videos(3, 4)
    prompts = asked(3)
    for reward, embed in (
        (
            lambda against: ClipConsistency(
                save_tiny_clip(tmp_path / "clip"), against=against, device="cpu"
            ),
            lambda r, x: r.inner.clip.embed_images(x),
        ),
        (
            lambda against: DinoConsistency(
                save_dino(tmp_path / "dino"), against=against, device="cpu"
            ),
            lambda r, x: r.inner.embed(x),
        ),
    ):
        rows = [embed(reward("both"), media[:, i]) for i in range(4)]
        previous = torch.stack([torch.cosine_similarity(rows[i], rows[i - 1]) for i in (1, 2, 3)]).T
        first = torch.stack([torch.cosine_similarity(rows[i], rows[0]) for i in (1, 2, 3)]).T
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(reward("previous")(media, prompts), previous.mean(1), **close)
        torch.testing.assert_close(reward("first")(media, prompts), first.mean(1), **close)
        expected = (previous.clamp(min=0) + first.clamp(min=0)).mean(1) / 2
        torch.testing.assert_close(reward("both")(media, prompts), expected, **close)
        still = media[:, :1].expand(-1, 4, -1, -1, -1)
        torch.testing.assert_close(reward("both")(still, prompts), torch.ones(3), **close)
        with pytest.raises(UserError, match="videos of 2 frames or more, not images"):
            reward("both")(media[:, 0], prompts)
        broken = media.clone()
        broken[1, 2, 0, 0, 0] = torch.nan
        assert reward("both")(broken, prompts).isnan().tolist() == [False, True, False]


# Motion


def panned(speeds: list[float], size: int = 96, seed: int = 0) -> torch.Tensor:
    """[1, F, 3, size, size]: a smooth texture that has moved right by the sum of ``speeds`` so
    far."""
    noise = torch.rand(1, 3, 20, 40, generator=torch.Generator().manual_seed(seed))
    wide = torch.nn.functional.interpolate(
        noise, (size, 2 * size), mode="bicubic", align_corners=False
    ).clamp(0, 1)
    rows = []
    places = torch.cumsum(torch.tensor([0.0, *speeds]), 0)
    for place in places.tolist():
        x = torch.arange(size) + size / 2 - place
        low = x.floor().long()
        part = x - x.floor()
        rows.append(wide[..., low] * (1 - part) + wide[..., low + 1] * part)
    return torch.cat(rows)[None]


def test_a_pan_moves_as_far_as_it_does():
    pytest.importorskip("cv2")
    for speed in (0.0, 1.0, 3.0):
        amount = MotionAmount()(panned([speed] * 4), [{}]).item()
        assert amount == pytest.approx(speed / 96, rel=0.15, abs=1e-3)
    fast = MotionAmount(of="fastest")
    slow = MotionAmount()
    part = panned([0.0] * 2)
    part[:, :, :, 30:60] = panned([4.0] * 2)[:, :, :, 30:60]
    assert fast(part, [{}]) > 2 * slow(part, [{}])
    assert MotionAmount(most=0.01)(panned([3.0] * 2), [{}]).item() == pytest.approx(0.01)


def test_raft_is_torchvisions(tmp_path):
    from torchvision.models.optical_flow import raft_small

    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = raft_small(weights=None).eval()
    torch.save(network.state_dict(), tmp_path / "raft.pth")
    media = torch.stack([pictures(2, 130, 136, seed=s) for s in range(3)], 1)
    reward = MotionAmount("raft_small", str(tmp_path / "raft.pth"), batch_size=3, device="cpu")
    filled = torch.nn.functional.pad(media, (0, 0, 0, 6, 0, 0), mode="constant")
    filled[..., 130:, :] = media[..., 129:130, :]
    with torch.no_grad():
        flows = torch.stack(
            [network(2 * filled[:, i] - 1, 2 * filled[:, i + 1] - 1)[-1] for i in (0, 1)], 1
        )
    expected = flows[..., :130, :].norm(dim=2).mean((1, 2, 3)) / 130
    assert expected.min() > 1e-4
    torch.testing.assert_close(reward(media, [{}] * 2), expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(
        UserError,
        match="RAFT needs frames of 128 pixels a side or more, got 96 x 96; use flow: dis",
    ):
        reward(panned([1.0]), [{}])
    with pytest.raises(UserError, match="needs `weights`"):
        MotionAmount("raft_large")
    with pytest.raises(UserError, match="not a checkpoint of torchvision's raft_large"):
        MotionAmount("raft_large", str(tmp_path / "raft.pth"))


# Actions


@pytest.mark.parametrize("frames", [4, 9, 2])
def test_an_action_is_the_classifiers_probability(tmp_path, frames):
    from transformers import VideoMAEForVideoClassification, VideoMAEImageProcessorPil

    folder = save_videomae(tmp_path / "mae")
    media = (videos(3, frames, 40, 36) * 255).round() / 255
    places = {4: [0, 1, 2, 3], 9: [0, 3, 5, 8], 2: [0, 0, 1, 1]}[frames]
    model = VideoMAEForVideoClassification.from_pretrained(folder)
    processor = VideoMAEImageProcessorPil.from_pretrained(folder)
    clips = [[(frame * 255).round().byte().numpy() for frame in video[places]] for video in media]
    with torch.no_grad():
        chances = model.eval()(**processor(clips, return_tensors="pt")).logits.softmax(-1)
    prompts = [{"action": name} for name in ("jump", "Run", "sit down")]
    reward = Action(folder, batch_size=2, device="cpu")
    assert chances.std(0).max() > 1e-3
    # PIL's own resizing
    torch.testing.assert_close(reward(media, prompts), chances.diagonal(), rtol=0, atol=5e-3)
    same = (videos(3, frames, 32, 32) * 255).round() / 255  # nothing to resize: the same numbers
    clips = [[(frame * 255).round().byte().numpy() for frame in video[places]] for video in same]
    with torch.no_grad():
        chances = model(**processor(clips, return_tensors="pt")).logits.softmax(-1)
    torch.testing.assert_close(reward(same, prompts), chances.diagonal(), rtol=1e-5, atol=1e-5)
    logs = Action(folder, scale="log_probability", device="cpu")(same, prompts)
    torch.testing.assert_close(logs, chances.diagonal().log(), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="no class 'jumps'; did you mean 'jump'"):
        reward(media, [{"action": "jumps"}] * 3)

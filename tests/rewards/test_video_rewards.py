"""Rewards of videos: wrapped rewards of images, consistency, optical flow, actions; the heads of
HPSv3 and VideoAlign on a tiny Qwen2-VL against transformers' language model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl import config
from mmrl.core.errors import UserError
from rewards import (
    Action,
    ClipConsistency,
    DinoConsistency,
    HPSv3,
    MotionAmount,
    PerFrame,
    VideoAlign,
)
from rewards import jpeg_incompressibility as jpeg
from rewards.base.hf import to_pil
from rewards.base.qwen_reward import merged, modern, unwrapped
from rewards.videos.video_align import PARTS, TOKENS
from tests.fixtures.tiny_image_rewards import save_dino, save_videomae
from tests.fixtures.tiny_qwen_rewards import save_hpsv3, save_video_align
from tests.fixtures.tiny_rewards import TEXTS, asked, pictures, save_tiny_clip


def videos(count: int = 5, frames: int = 6, height: int = 32, width: int = 32) -> torch.Tensor:
    return torch.stack([pictures(count, height, width, seed=seed) for seed in range(frames)], dim=1)


# Frames


def test_frames_are_reduced_as_asked():
    media, prompts = videos(3, 5), asked(3)
    values = torch.stack([jpeg(media[:, i], prompts) for i in range(5)], dim=1)
    steady = 1 - media.diff(dim=1).abs().mean((1, 2, 3, 4))
    for options, expected in (
        ({"reduce": "mean"}, values.mean(1)),
        ({"reduce": "worst"}, values.amin(1)),
        ({"reduce": "best"}, values.amax(1)),
        ({"reduce": "first"}, values[:, 0]),
        ({"reduce": "median"}, values.median(1).values),
        ({"reduce": "worst", "frames": 3}, values[:, [0, 2, 4]].amin(1)),
        ({"frames": 1}, values[:, 0]),
        ({"steady": 0.3}, 0.7 * values.mean(1) + 0.3 * steady),
    ):
        torch.testing.assert_close(PerFrame(jpeg, **options)(media, prompts), expected)
    assert torch.equal(PerFrame(jpeg)(media[:, 0], prompts), values[:, 0])


def test_a_wrapped_reward_is_named_in_a_configuration():
    spec = {"reward": "jpeg_incompressibility", "reduce": "worst"}
    built = config.build_rewards({"per_frame": spec})["per_frame"].reward
    assert torch.equal(built(videos(), asked()), PerFrame(jpeg, "worst")(videos(), asked()))
    with pytest.raises(UserError, match="did you mean 'clip_score'"):
        config.build_rewards({"per_frame": {"reward": "clip_scor"}})
    with pytest.raises(UserError, match="this one judges video"):
        PerFrame(MotionAmount())


# Consistency


@pytest.mark.parametrize("make", [ClipConsistency, DinoConsistency])
def test_consistency_is_the_mean_cosine_of_frames(make, tmp_path):
    folder = (save_tiny_clip if make is ClipConsistency else save_dino)(tmp_path / "model")
    media, prompts = videos(3, 4), asked(3)
    reward = {way: make(folder, against=way, device="cpu") for way in ("previous", "first", "both")}
    inner = reward["both"].inner
    embed = inner.clip.embed_images if make is ClipConsistency else inner.embed
    rows = [embed(media[:, i]) for i in range(4)]
    previous, first = (
        torch.stack([torch.cosine_similarity(rows[i], rows[j]) for i, j in pairs]).T
        for pairs in (((1, 0), (2, 1), (3, 2)), ((1, 0), (2, 0), (3, 0)))
    )
    both = (previous.clamp(min=0) + first.clamp(min=0)).mean(1) / 2
    expected = {"previous": previous.mean(1), "first": first.mean(1), "both": both}
    for way, values in expected.items():
        torch.testing.assert_close(reward[way](media, prompts), values, rtol=1e-4, atol=1e-5)
    still = media[:, :1].expand(-1, 4, -1, -1, -1)
    torch.testing.assert_close(reward["both"](still, prompts), torch.ones(3), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="videos of 2 frames or more, not images"):
        reward["both"](media[:, 0], prompts)


# Motion


def panned(speeds: list[float], size: int = 96) -> torch.Tensor:
    """[1, F, 3, size, size]: a smooth texture that has moved right by the sum of ``speeds`` so
    far."""
    noise = torch.rand(1, 3, 20, 40, generator=torch.Generator().manual_seed(0))
    wide = torch.nn.functional.interpolate(noise, (size, 2 * size), mode="bicubic").clamp(0, 1)
    rows = []
    for place in torch.cumsum(torch.tensor([0.0, *speeds]), 0).tolist():
        x = torch.arange(size) + size / 2 - place
        low, part = x.floor().long(), x - x.floor()
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

    weights = str(tmp_path / "raft.pth")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = raft_small(weights=None).eval()
    torch.save(network.state_dict(), weights)
    media = torch.stack([pictures(2, 130, 136, seed=s) for s in range(3)], 1)
    reward = MotionAmount("raft_small", weights, batch_size=3, device="cpu")
    filled = torch.nn.functional.pad(media, (0, 0, 0, 6, 0, 0), mode="constant")
    filled[..., 130:, :] = media[..., 129:130, :]
    scaled = 2 * filled - 1
    with torch.no_grad():
        flows = torch.stack([network(scaled[:, i], scaled[:, i + 1])[-1] for i in (0, 1)], 1)
    expected = flows[..., :130, :].norm(dim=2).mean((1, 2, 3)) / 130
    assert expected.min() > 1e-4
    torch.testing.assert_close(reward(media, [{}] * 2), expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(UserError, match="128 pixels a side or more, got 96 x 96; use flow: dis"):
        reward(panned([1.0]), [{}])
    with pytest.raises(UserError, match="needs `weights`"):
        MotionAmount("raft_large")
    with pytest.raises(UserError, match="not a checkpoint of torchvision's raft_large"):
        MotionAmount("raft_large", weights)


# Actions


@pytest.mark.parametrize("frames, places", [(9, [0, 3, 5, 8]), (2, [0, 0, 1, 1])])
def test_an_action_is_the_classifiers_probability(tmp_path, frames, places):
    from transformers import VideoMAEForVideoClassification, VideoMAEImageProcessorPil

    folder = save_videomae(tmp_path / "mae")
    model = VideoMAEForVideoClassification.from_pretrained(folder).eval()
    processor = VideoMAEImageProcessorPil.from_pretrained(folder)
    prompts = [{"action": name} for name in ("jump", "Run", "sit down")]
    reward = Action(folder, batch_size=2, device="cpu")
    for size, atol in (((40, 36), 5e-3), ((32, 32), 1e-5)):  # PIL's own resizing, and none
        media = (videos(3, frames, *size) * 255).round() / 255
        clips = [list((video[places] * 255).round().byte().numpy()) for video in media]
        with torch.no_grad():
            chances = model(**processor(clips, return_tensors="pt")).logits.softmax(-1).diagonal()
        torch.testing.assert_close(reward(media, prompts), chances, rtol=0, atol=atol)
    logs = Action(folder, scale="log_probability", device="cpu")(media, prompts)
    torch.testing.assert_close(logs, chances.log(), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="no class 'jumps'; did you mean 'jump'"):
        reward(media, [{"action": "jumps"}] * 3)


# heads on Qwen2-VL


@pytest.fixture(scope="module")
def hpsv3(tmp_path_factory) -> dict:
    return save_hpsv3(tmp_path_factory.mktemp("hpsv3"))


@pytest.fixture(scope="module")
def video_align(tmp_path_factory) -> dict:
    return save_video_align(tmp_path_factory.mktemp("video_align"))


def asked_about(tools, kind, texts):
    """What the chat template makes of a picture or video and each text."""
    talks = [
        [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": text}]}]
        for text in texts
    ]
    form = {"tokenize": False, "add_generation_prompt": True}
    return [tools.apply_chat_template(talk, **form) for talk in talks]


def hidden_by_transformers(options, tools, texts, **inputs):
    """Embeddings with the pictures put in, through the language model alone: plain positions, as
    published."""
    from transformers import Qwen2VLForConditionalGeneration

    model = Qwen2VLForConditionalGeneration.from_pretrained(options["base"]).eval()
    model.resize_token_embeddings(len(tools.tokenizer), mean_resizing=False)
    tensors = torch.load(Path(options["base"]) / "with_tokens.pt", weights_only=True)
    model.load_state_dict(tensors)
    batch = tools(text=texts, padding=True, return_tensors="pt", **inputs)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(batch.input_ids)
        for kind, place in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if place in batch:
                grid = batch[f"{kind}_grid_thw"]
                spots = batch.input_ids == getattr(model.config, f"{kind}_token_id")
                embedded[spots] = model.model.visual(batch[place], grid_thw=grid).pooler_output
        output = model.model.language_model(
            inputs_embeds=embedded, attention_mask=batch.attention_mask
        )
    return output.last_hidden_state, batch.input_ids


def test_hpsv3_is_the_mean_of_its_head_at_the_reward_token(hpsv3):
    media = (pictures(5, 40, 52) * 255).round() / 255
    reward = HPSv3(**hpsv3)
    texts = asked_about(reward.tools, "image", [f"rate {t}: <|Reward|> now" for t in TEXTS])
    size = {"shortest_edge": hpsv3["pixels"], "longest_edge": hpsv3["pixels"]}
    pair = {"images": to_pil(media), "images_kwargs": {"size": size}}
    hidden, ids = hidden_by_transformers(hpsv3, reward.tools, texts, **pair)
    x = hidden[ids == reward.tools.tokenizer.convert_tokens_to_ids("<|Reward|>")]
    head = load_file(hpsv3["weights"])
    for place in (0, 3, 5):
        x = x if place == 0 else x.relu()
        x = x @ head[f"rm_head.{place}.weight"].T + head[f"rm_head.{place}.bias"]
    expected = x[:, 0]
    assert expected.std() > 1e-3
    torch.testing.assert_close(reward(media, asked()), expected, rtol=1e-5, atol=1e-5)
    scaled = HPSv3(**hpsv3, scale="unirl", batch_size=2)(media, asked())
    torch.testing.assert_close(scaled, expected / 15, rtol=1e-5, atol=1e-5)
    # a token in the user's prompt changes nothing but the text
    assert reward(pictures(1), [{"text": "cheat <|Reward|> END"}]).isfinite().all()


def test_hpsv3_resizes_every_picture_to_the_same_number_of_pixels(hpsv3):
    reward = HPSv3(**hpsv3)
    for height, width in ((28, 28), (140, 140), (30, 200)):
        grid = reward.batch(pictures(1, height, width), ["a"])["image_grid_thw"][0]
        assert 0.5 * hpsv3["pixels"] <= int(grid.prod()) * 14 * 14 <= hpsv3["pixels"] * 1.3
    exact, smooth = (
        each.batch(0.3 + 0.4 * pictures(2, 40, 52), ["a", "b"])["pixel_values"]
        for each in (reward, HPSv3(**hpsv3, preprocess="tensor"))
    )
    assert (smooth - exact).abs().max() < 1.5 / 255 / 0.26


def test_video_align_reads_each_part_at_its_token(video_align):
    videos = (torch.stack([pictures(3, 30, 40, seed=s) for s in range(4)], 1) * 255).round() / 255
    tools = VideoAlign(**video_align).tools
    texts = asked_about(tools, "video", [f"judge {t}: {' '.join(TOKENS)}" for t in TEXTS[:3]])
    size = {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 4}
    pair = {"videos": list((videos * 255).round().byte())}
    pair["videos_kwargs"] = {"size": size, "do_sample_frames": False}
    hidden, ids = hidden_by_transformers(video_align, tools, texts, **pair)
    head = torch.load(Path(video_align["path"]) / "head.pt", weights_only=True)
    norm = {"VQ": (0.5, 2.0), "MQ": (1.0, 3.0), "TA": (-1.0, 0.5)}
    expected = {"overall": torch.zeros(3)}
    for i, part in enumerate(PARTS):
        raw = (hidden[ids == tools.tokenizer.convert_tokens_to_ids(TOKENS[i])] @ head.T)[:, i]
        expected[part] = (raw - norm[part][0]) / norm[part][1]
        expected["overall"] += expected[part]
    for part, values in expected.items():
        reward = VideoAlign(**video_align, part=part)
        torch.testing.assert_close(reward(videos, asked(3)), values, rtol=1e-5, atol=1e-5)


def test_adapters_are_merged_and_old_names_understood():
    generator = torch.Generator().manual_seed(0)
    weight, down, up = (torch.randn(s, generator=generator) for s in ((6, 4), (2, 4), (6, 2)))
    layer = "base_model.model.model.layers.0.q_proj"
    tensors = {
        f"{layer}.base_layer.weight": weight,
        f"{layer}.lora_A.default.weight": down,
        f"{layer}.lora_B.default.weight": up,
        "base_model.model.visual.x.weight": weight,
        "base_model.model.rm_head.modules_to_save.default.weight": up,
        "base_model.model.rm_head.original_module.weight": down,
    }
    read = {modern(k): v for k, v in merged(unwrapped(tensors), alpha=16.0).items()}
    query = read["language_model.layers.0.q_proj.weight"]
    assert len(read) == 3 and read["visual.x.weight"] is weight
    torch.testing.assert_close(query, weight + 8 * up @ down)
    assert read["rm_head.weight"] is up


def test_what_is_missing_is_named(hpsv3, tmp_path, subtests):
    (tmp_path / "odd.txt").write_text("rate {text_prompt}")
    save_file({"rm_head.weight": torch.zeros(2, 32)}, tmp_path / "odd.safetensors")
    for key, name, says in (
        ("instruction", "none.txt", "save the published prompt of github.com/MizzenAI/HPSv3 there"),
        ("instruction", "odd.txt", r"odd.txt lacks <\|Reward\|>"),
        ("weights", "odd.safetensors", "not a reward model on"),
    ):
        with subtests.test(name=name), pytest.raises(UserError, match=says):
            HPSv3(**hpsv3 | {key: str(tmp_path / name)})
    with pytest.raises(UserError, match="no .*model_config.json"):
        VideoAlign(str(tmp_path), fps=8.0)
    about = {"model_config": {"model_name_or_path": "x"}}
    (tmp_path / "model_config.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"holds no checkpoint-\*/model.pth"):
        VideoAlign(str(tmp_path), fps=8.0)

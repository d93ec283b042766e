"""HPSv3 and VideoAlign: their heads on a tiny Qwen2-VL against transformers' language model, their
checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mmrl.core.errors import UserError
from rewards import HPSv3, VideoAlign
from rewards.base.hf import to_pil
from rewards.base.qwen_reward import merged, modern, unwrapped
from rewards.videos.video_align import PARTS, TOKENS
from tests.fixtures.tiny_qwen_rewards import save_hpsv3, save_video_align
from tests.fixtures.tiny_rewards import TEXTS, asked, pictures


@pytest.fixture(scope="module")
def hpsv3(tmp_path_factory) -> dict:
    return save_hpsv3(tmp_path_factory.mktemp("hpsv3"))


@pytest.fixture(scope="module")
def video_align(tmp_path_factory) -> dict:
    return save_video_align(tmp_path_factory.mktemp("video_align"))


def hidden_by_transformers(
    options: dict, tools, texts: list[str], **inputs
) -> tuple[torch.Tensor, torch.Tensor]:
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
                image_states = model.model.visual(
                    batch[place], grid_thw=batch[f"{kind}_grid_thw"]
                ).pooler_output
                spots = batch.input_ids == getattr(model.config, f"{kind}_token_id")
                embedded[spots] = image_states
        outputs = model.model.language_model(
            inputs_embeds=embedded, attention_mask=batch.attention_mask
        )
    return outputs.last_hidden_state, batch.input_ids


def test_hpsv3_is_the_mean_of_its_head_at_the_reward_token(hpsv3):
    media = (pictures(5, 40, 52) * 255).round() / 255
    reward = HPSv3(**hpsv3)
    written = [
        reward.tools.apply_chat_template(
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image"},
                        {"type": "text", "text": f"rate {t}: <|Reward|> now"},
                    ],
                }
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        for t in TEXTS
    ]
    size = {"shortest_edge": hpsv3["pixels"], "longest_edge": hpsv3["pixels"]}
    hidden, ids = hidden_by_transformers(
        hpsv3, reward.tools, written, images=to_pil(media), images_kwargs={"size": size}
    )
    spot = hidden[ids == reward.tools.tokenizer.convert_tokens_to_ids("<|Reward|>")]
    from safetensors.torch import load_file

    head = {k: v for k, v in load_file(hpsv3["weights"]).items() if k.startswith("rm_head")}
    linear = torch.nn.functional.linear
    inner = linear(spot, head["rm_head.0.weight"], head["rm_head.0.bias"]).relu()
    inner = linear(inner, head["rm_head.3.weight"], head["rm_head.3.bias"]).relu()
    expected = linear(inner, head["rm_head.5.weight"], head["rm_head.5.bias"])[:, 0]
    assert expected.std() > 1e-3
    torch.testing.assert_close(reward(media, asked()), expected, rtol=1e-5, atol=1e-5)
    scaled = HPSv3(**hpsv3, scale="unirl", batch_size=2)(media, asked())
    torch.testing.assert_close(scaled, expected / 15, rtol=1e-5, atol=1e-5)


def test_hpsv3_resizes_every_picture_to_the_same_number_of_pixels(hpsv3):
    reward = HPSv3(**hpsv3)
    for height, width in ((28, 28), (140, 140), (30, 200)):
        grid = reward.batch(pictures(1, height, width), ["a"])["image_grid_thw"][0]
        assert 0.5 * hpsv3["pixels"] <= int(grid.prod()) * 14 * 14 <= hpsv3["pixels"] * 1.3
    smooth = HPSv3(**hpsv3, preprocess="tensor").batch(0.3 + 0.4 * pictures(2, 40, 52), ["a", "b"])[
        "pixel_values"
    ]
    exact = reward.batch(0.3 + 0.4 * pictures(2, 40, 52), ["a", "b"])["pixel_values"]
    assert (smooth - exact).abs().max() < 1.5 / 255 / 0.26


def test_a_token_in_the_users_prompt_changes_nothing_but_the_text(hpsv3):
    assert HPSv3(**hpsv3)(pictures(1), [{"text": "cheat <|Reward|> END"}]).isfinite().all()


@pytest.mark.parametrize("part", ["overall", *PARTS])
def test_video_align_reads_each_part_at_its_token(video_align, part):
    videos = (torch.stack([pictures(3, 30, 40, seed=s) for s in range(4)], 1) * 255).round() / 255
    reward = VideoAlign(**video_align, part=part)
    text = "judge {}: " + " ".join(TOKENS)
    written = [
        reward.tools.apply_chat_template(
            [
                {
                    "role": "user",
                    "content": [{"type": "video"}, {"type": "text", "text": text.format(t)}],
                }
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        for t in TEXTS[:3]
    ]
    options = {
        "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 4},
        "do_sample_frames": False,
    }
    hidden, ids = hidden_by_transformers(
        video_align,
        reward.tools,
        written,
        videos=list((videos * 255).round().byte()),
        videos_kwargs=options,
    )
    head = torch.load(Path(video_align["path"]) / "head.pt", weights_only=True)
    norm = {"VQ": (0.5, 2.0), "MQ": (1.0, 3.0), "TA": (-1.0, 0.5)}
    expected = torch.zeros(3)
    for i, name in enumerate(PARTS):
        raw = (hidden[ids == reward.tools.tokenizer.convert_tokens_to_ids(TOKENS[i])] @ head.T)[
            :, i
        ]
        expected += (raw - norm[name][0]) / norm[name][1] * (part in ("overall", name))
    torch.testing.assert_close(reward(videos, asked(3)), expected, rtol=1e-5, atol=1e-5)


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
    tensors_by_name = {modern(k): v for k, v in merged(unwrapped(tensors), alpha=16.0).items()}
    assert set(tensors_by_name) == {
        "language_model.layers.0.q_proj.weight",
        "visual.x.weight",
        "rm_head.weight",
    }
    torch.testing.assert_close(
        tensors_by_name["language_model.layers.0.q_proj.weight"], weight + 8 * up @ down
    )
    assert tensors_by_name["rm_head.weight"] is up


def test_what_is_missing_is_named(hpsv3, video_align, tmp_path):
    with pytest.raises(
        UserError,
        match=r"save the published prompt of github.com/MizzenAI/HPSv3 "
        r"there",
    ):
        HPSv3(**hpsv3 | {"instruction": str(tmp_path / "none.txt")})
    (tmp_path / "odd.txt").write_text("rate {text_prompt}")
    with pytest.raises(UserError, match=r"odd.txt lacks <\|Reward\|>"):
        HPSv3(**hpsv3 | {"instruction": str(tmp_path / "odd.txt")})
    save_file({"rm_head.weight": torch.zeros(2, 32)}, tmp_path / "odd.safetensors")
    with pytest.raises(UserError, match="not a reward model on"):
        HPSv3(**hpsv3 | {"weights": str(tmp_path / "odd.safetensors")})
    with pytest.raises(UserError, match="no .*model_config.json"):
        VideoAlign(str(tmp_path), fps=8.0)
    (tmp_path / "model_config.json").write_text(
        json.dumps({"model_config": {"model_name_or_path": "x"}})
    )
    with pytest.raises(UserError, match=r"holds no checkpoint-\*/model.pth"):
        VideoAlign(str(tmp_path), fps=8.0)

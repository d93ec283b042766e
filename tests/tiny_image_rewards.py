"""Tiny random models of the real classes for the rewards on transformers, saved as their folders
and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from rewards import jpeg_incompressibility
from tests.tiny_qwen_rewards import save_hpsv3, save_video_align
from tests.tiny_rewards import save_tiny_clip
from tests.tiny_vlms import folder

WORDS = [
    "a",
    "red",
    "seven",
    "blue",
    "two",
    "above",
    "green",
    "nine",
    "nothing",
    "at",
    "all",
    "three",
]


def seeded(make: Callable, seed: int = 0, spread: float = 3.0):
    """A module with larger random weights than usual, so that its scores differ; the global RNG is
    left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = make()
        for name, value in module.named_parameters():
            if value.ndim > 1 and "logit_scale" not in name:
                value.data.mul_(spread)
    return module.eval()


def save_bert_tokenizer(folder: Path) -> str:
    from transformers import BertTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
    )
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


def save_clip_tokenizer(folder: Path) -> None:
    """A CLIP tokenizer of single letters."""
    from transformers import CLIPTokenizer

    letters = [chr(c) for c in range(97, 123)]
    names = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{c}</w>" for c in letters)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77
    ).save_pretrained(folder)


def clip_config(width: int = 32, projection: int = 24):
    from transformers import CLIPConfig

    vision = {
        "hidden_size": width,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "projection_dim": projection,
    }
    text = {
        "hidden_size": width,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 60,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "projection_dim": projection,
    }
    return CLIPConfig(vision_config=vision, text_config=text, projection_dim=projection)


def save_hf_clip(folder: Path, **sizes) -> str:
    """A CLIPModel with its tokenizer and image processor."""
    from transformers import CLIPImageProcessor, CLIPModel

    seeded(lambda: CLIPModel(clip_config(**sizes))).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(folder)
    save_clip_tokenizer(folder)
    return str(folder)


def save_dino(folder: Path) -> str:
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    seeded(lambda: Dinov2Model(config)).save_pretrained(folder)
    BitImageProcessor(size={"shortest_edge": 36}, crop_size=32).save_pretrained(folder)
    return str(folder)


def save_vit_classifier(folder: Path) -> str:
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        id2label={0: "normal", 1: "nsfw"},
        label2id={"normal": 0, "nsfw": 1},
    )
    seeded(lambda: ViTForImageClassification(config)).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return str(folder)


def save_safety_checker(folder: Path) -> str:
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPImageProcessor

    checker = seeded(lambda: StableDiffusionSafetyChecker(clip_config()))
    generator = torch.Generator().manual_seed(4)
    for name in ("concept_embeds", "special_care_embeds"):
        getattr(checker, name).data.normal_(generator=generator)
        getattr(checker, name + "_weights").data.uniform_(0.25, 0.45, generator=generator)
    checker.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(folder)
    return str(folder)


def image_reward_parts(width: int = 128, hidden: int = 64):
    """BLIP's two halves by other libraries: timm's vision transformer and a BERT with
    cross-attention, and the head."""
    from timm.models.vision_transformer import VisionTransformer
    from transformers import BertConfig

    config = BertConfig(
        vocab_size=20,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=1,
        intermediate_size=96,
        max_position_embeddings=40,
        is_decoder=True,
        add_cross_attention=True,
        type_vocab_size=1,
    )
    config.encoder_hidden_size = width
    vision = seeded(
        lambda: VisionTransformer(
            img_size=32, patch_size=16, embed_dim=width, depth=2, num_heads=2, num_classes=0
        ),
        1,
        1.5,
    )
    return (
        vision,
        config,
        seeded(
            lambda: torch.nn.Sequential(
                *(
                    torch.nn.Linear(a, b)
                    for a, b in ((hidden, 32), (32, 16), (16, 8), (8, 8), (8, 1))
                )
            ),
            3,
        ),
    )


def save_image_reward(file: Path) -> dict[str, torch.Tensor]:
    """A checkpoint with the published names; BLIP's BERT has no token types and its cross-attention
    is its own."""
    vision, config, head = image_reward_parts()
    tensors = {f"blip.visual_encoder.{name}": value for name, value in vision.state_dict().items()}
    text = image_reward_text(config, vision.embed_dim)
    tensors |= {
        f"blip.text_encoder.{name}": value
        for name, value in text.state_dict().items()
        if "token_type" not in name
    }
    for i, place in enumerate((0, 2, 4, 6, 7)):
        tensors |= {
            f"mlp.layers.{place}.{k}": getattr(head[i], k).detach() for k in ("weight", "bias")
        }
    tensors |= {"blip.vision_proj.weight": torch.zeros(4, 4)}
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, file)
    return tensors


def image_reward_text(config, width: int):
    """The BERT, whose keys and values of the cross-attention read states of another width."""
    from transformers import BertModel

    def make():
        bert = BertModel(config, add_pooling_layer=False)
        for layer in bert.encoder.layer:
            attention = layer.crossattention.self
            for name in ("key", "value"):
                setattr(attention, name, torch.nn.Linear(width, config.hidden_size))
        bert.embeddings.token_type_embeddings.weight.data.zero_()
        return bert

    return seeded(make, 2)


def save_mps(folder: Path) -> tuple[str, str]:
    """(weights, clip): a state_dict with the published names, and the CLIP folder."""
    from rewards.mps import Network

    clip = save_hf_clip(folder / "clip", projection=128)
    from transformers import CLIPConfig

    network = seeded(lambda: Network(CLIPConfig.from_pretrained(clip), 2), 5, 2.0)
    save_file(
        {k: v.contiguous() for k, v in network.state_dict().items()}, folder / "mps.safetensors"
    )
    return str(folder / "mps.safetensors"), clip


def save_yolos(folder: Path) -> str:
    """A detector without a backbone of its own."""
    from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessor

    config = YolosConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=[32, 32],
        patch_size=8,
        num_detection_tokens=12,
        id2label={0: "cat", 1: "mouse"},
        label2id={"cat": 0, "mouse": 1},
    )
    seeded(lambda: YolosForObjectDetection(config)).save_pretrained(folder)
    YolosImageProcessor(size={"shortest_edge": 32, "longest_edge": 64}).save_pretrained(folder)
    return str(folder)


def save_mask2former(folder: Path, size: int = 64) -> str:
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessor,
        SwinConfig,
    )

    swin = SwinConfig(
        image_size=size,
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(
        backbone_config=swin,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=32,
        num_queries=6,
        id2label={0: "cat", 1: "remote", 2: "dog"},
        label2id={"cat": 0, "remote": 1, "dog": 2},
    )
    seeded(lambda: Mask2FormerForUniversalSegmentation(config), spread=1.5).save_pretrained(folder)
    Mask2FormerImageProcessor(size={"height": size, "width": size}).save_pretrained(folder)
    return str(folder)


def save_videomae(folder: Path) -> str:
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification, VideoMAEImageProcessor

    names = {0: "jump", 1: "run", 2: "sit down"}
    config = VideoMAEConfig(
        image_size=32,
        patch_size=8,
        num_frames=4,
        tubelet_size=2,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        use_mean_pooling=True,
        id2label=names,
        label2id={name: i for i, name in names.items()},
    )
    seeded(lambda: VideoMAEForVideoClassification(config)).save_pretrained(folder)
    processor = VideoMAEImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    processor.save_pretrained(folder)
    return str(folder)


CPU = {"device": "cpu"}

TINY_OPTIONS: dict[str, Callable[[Path], dict]] = {
    "clip_iqa": lambda tmp: {"model": save_tiny_clip(tmp / "clip"), **CPU},
    "clip_similarity": lambda tmp: {"model": save_tiny_clip(tmp / "clip"), **CPU},
    "directional_clip": lambda tmp: {"model": save_tiny_clip(tmp / "clip"), **CPU},
    "hpsv2": lambda tmp: {"model": save_tiny_clip(tmp / "clip"), **CPU},
    "pickscore": lambda tmp: {"model": save_hf_clip(tmp / "pick"), "processor": None, **CPU},
    "dino_similarity": lambda tmp: {"model": save_dino(tmp / "dino"), **CPU},
    "nsfw_penalty": lambda tmp: {"model": save_vit_classifier(tmp / "vit"), **CPU},
    "safety_checker": lambda tmp: {
        "model": save_safety_checker(tmp / "checker"),
        "penalty": "margin",
        **CPU,
    },
    "image_reward": lambda tmp: tiny_image_reward(tmp),
    "per_frame": lambda tmp: {"reward": jpeg_incompressibility},
    "clip_consistency": lambda tmp: {"model": save_tiny_clip(tmp / "clip"), **CPU},
    "dino_consistency": lambda tmp: {"model": save_dino(tmp / "dino"), **CPU},
    "action": lambda tmp: {"model": save_videomae(tmp / "mae"), **CPU},
    "geneval": lambda tmp: {
        "detector": save_yolos(tmp / "yolos"),
        "clip": save_tiny_clip(tmp / "clip"),
        **CPU,
    },
    "ocr": lambda tmp: {"field": "word", "threads": 1, "side": 32},
    "vqa_score": lambda tmp: {"model": str(folder("qwen2_vl")), "dtype": "float32", **CPU},
    "tifa": lambda tmp: {"model": str(folder("qwen2_vl")), "dtype": "float32", **CPU},
    "hpsv3": lambda tmp: save_hpsv3(tmp),
    "video_align": lambda tmp: save_video_align(tmp),
    "mps": lambda tmp: dict(zip(("weights", "clip"), save_mps(tmp))) | CPU,
}


def tiny_image_reward(tmp: Path) -> dict:
    save_image_reward(tmp / "ImageReward.pt")
    return {
        "weights": str(tmp / "ImageReward.pt"),
        "tokenizer": save_bert_tokenizer(tmp / "bert"),
        **CPU,
    }

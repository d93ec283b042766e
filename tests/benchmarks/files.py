"""Official files in small, and tiny detectors of the real classes."""

import json
from pathlib import Path

from PIL import Image

from rewards.images.geneval import OBJECTS
from tests.fixtures.tiny_image_rewards import seeded


def picture(file, size=(40, 30), color=(200, 40, 40)):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(file)
    return file


def document(file, content):
    """A file of JSON with this content."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    return file


def lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    file.write_text(text)
    return file


def save_coco_yolos(folder: Path) -> str:
    """A detector that knows COCO's names, as torchvision and transformers spell them."""
    from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessor

    spelt = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}
    names = {i: spelt.get(name, name) for i, name in enumerate(OBJECTS)}
    config = YolosConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=[32, 32],
        patch_size=8,
        num_detection_tokens=12,
        id2label=names,
        label2id={name: i for i, name in names.items()},
    )
    seeded(lambda: YolosForObjectDetection(config)).save_pretrained(folder)
    YolosImageProcessor(size={"shortest_edge": 32, "longest_edge": 64}).save_pretrained(folder)
    return str(folder)


def save_owlvit(folder: Path) -> str:
    """An open-vocabulary detector, prompted with what to find."""
    from transformers import (
        CLIPTokenizer,
        OwlViTConfig,
        OwlViTForObjectDetection,
        OwlViTImageProcessor,
        OwlViTProcessor,
    )

    letters = "abcdefghijklmnopqrstuvwxyz"
    vocab = ["!", *letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(
        vocab={token: i for i, token in enumerate(vocab)},
        merges=[],
        pad_token="!",  # the model masks what begins with token 0
        model_max_length=40,
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2}
    config = OwlViTConfig(
        text_config={**sizes, "vocab_size": len(tokenizer), "max_position_embeddings": 40},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )
    seeded(lambda: OwlViTForObjectDetection(config), spread=1.0).save_pretrained(folder)
    eyes = OwlViTImageProcessor(size={"height": 32, "width": 32}, crop_size=None)
    OwlViTProcessor(eyes, tokenizer).save_pretrained(folder)
    return str(folder)

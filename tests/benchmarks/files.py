"""Official files in small, and a tiny detector."""

import json
from pathlib import Path

from PIL import Image

from rewards.images.geneval import OBJECTS
from tests.fixtures.tiny_image_rewards import save_yolos


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
    spelt = {"computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard"}
    return save_yolos(folder, tuple(spelt.get(name, name) for name in OBJECTS))

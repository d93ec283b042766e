"""Small local models and inputs for the tests of rewards."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from rewards.aesthetic import Head

LAION_HEAD = Path(__file__).parents[1] / "../shared/data/sac+logos+ava1-l14-linearMSE.pth"
TEXTS = ["a red seven", "a blue two above a green nine", "nothing at all", "a red seven", "three"]
TINY = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
PREPROCESS = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "interpolation": "bicubic"}


def save_tiny_clip(folder: Path, preprocess: dict = PREPROCESS, **changes) -> str:
    """A complete open_clip folder with random weights; ``changes`` go into its vision_cfg."""
    import open_clip

    model_cfg = TINY | {"vision_cfg": TINY["vision_cfg"] | changes}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = open_clip.CLIP(**model_cfg)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.contiguous() for k, v in network.state_dict().items()},
        folder / "open_clip_model.safetensors",
    )
    config = {"model_cfg": model_cfg, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return str(folder)


def save_head(path: Path, width: int) -> str:
    """A random head in LAION's layout: the names count the dropouts in between."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        head = Head(width)
    tensors = {
        f"layers.{place}.{kind}": getattr(head.layers[i], kind).detach().clone()
        for i, place in enumerate((0, 2, 4, 6, 7))
        for kind in ("weight", "bias")
    }
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)
    return str(path)


def pictures(count: int, height: int = 32, width: int = 32, seed: int = 0) -> torch.Tensor:
    """[count, 3, height, width] in 0..1, of mixed smoothness."""
    noise = torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(seed))
    amount = torch.linspace(0.1, 1, count).view(-1, 1, 1, 1)
    return (noise - 0.5) * amount + 0.5


def asked(count: int = 5) -> list[dict]:
    """Prompts with everything a registered reward may ask for; a new field of a new reward goes
    here."""
    things = [{"digit": 7, "color": "red"}, {"digit": 2, "size": "large", "place": "left"}]
    more = [
        {"objects": things, "relation": "above", "count": 2},
        {"objects": things[:1], "count": 1},
    ]
    return [{"text": TEXTS[i % len(TEXTS)], **more[i % 2], **wanted(i)} for i in range(count)]


def wanted(i: int) -> dict:
    """Reference and source pictures, as files, and what was in the source."""
    things = [{"class": "cat", "count": 1 + i % 2, "color": "red"}]
    questions = [
        {"question": "what is it?", "choices": ["seven", "two"], "answer": ("seven", "two")[i % 2]}
    ]
    more = {
        "include": things,
        "questions": questions,
        "word": "seven",
        "action": "jump",
        "motion": "left",
    }
    return more | {
        "reference": picture_file(i % 2),
        "source": picture_file(i % 2),
        "source_text": "a blue two",
    }


@cache
def picture_file(i: int) -> str:
    from torchvision.utils import save_image

    file = Path(tempfile.mkdtemp(prefix="mmrl-tests-")) / f"{i}.png"
    save_image(pictures(1, 32 + 8 * i, 40, seed=20 + i), file)
    return str(file)

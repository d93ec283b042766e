"""Rewards: the contract every registered one keeps, JPEG sizes, and rewards of the user's own."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import yaml

import rewards
from mmrl.apps.serve.server import load
from mmrl.config import build_rewards
from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS, load_built_in
from rewards import jpeg_compressibility, jpeg_incompressibility
from rewards.card import card_of
from tests.fixtures.reward_servers import eighth, serving
from tests.fixtures.tiny_image_rewards import TINY_OPTIONS
from tests.fixtures.tiny_rewards import TINY, asked, pictures, save_head, save_tiny_clip
from tests.fixtures.tiny_sounds import save_clap, save_pe_av, sounding

load_built_in()
OTHERS_NAN = (
    "rewards.combined.by_task",
    "rewards.combined.calibrate",
    "rewards.combined.compose",
    "rewards.images.digits",
    "rewards.servers.remote",
    "rewards.combined.appeals",
    "rewards.combined.weights",
)  # like their parts; they have their own tests
DOC = Path(__file__).parents[2] / "docs/rewards.md"


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory) -> str:
    return save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny")


@pytest.fixture(scope="session")
def tiny_head(tmp_path_factory) -> str:
    return save_head(tmp_path_factory.mktemp("head") / "head.pth", TINY["embed_dim"])


@pytest.fixture(scope="session")
def tiny_reader(tmp_path_factory) -> str:
    """A reader of digits with random weights."""
    from rewards.images.digit_reader import Reader

    places = {"left": [0, 0, 16, 32], "right": [16, 0, 32, 32]}
    names = {
        "digits": list(range(10)),
        "colors": ["red", "blue", "green"],
        "sizes": ["small", "large"],
    }
    folder = tmp_path_factory.mktemp("reader")
    with torch.random.fork_rng():
        torch.manual_seed(2)
        Reader(
            {"image_size": 32, "channels": [8, 8, 8], "kernel": 3, "pool": False, "places": places}
            | names
        ).save(folder)
    return str(folder)


# The contract, for whatever is registered


@pytest.fixture(scope="module")
def reward_server():
    """The address of a server of one reward."""
    with serving({"jpeg_incompressibility": jpeg_incompressibility}) as address:
        yield address


def of_pictures(name: str) -> bool:
    """Texts are in test_verifiable.py, judges, which take anything, in test_judge.py, groups in
    test_compose.py."""
    card = card_of(REWARDS[name])
    return card.media != ("text",) and card.of == "sample" and not name.startswith("judge")


@pytest.fixture(scope="module", params=[name for name in sorted(REWARDS) if of_pictures(name)])
def reward(request, tiny_clip, tiny_head, tiny_reader, reward_server, tmp_path_factory):
    """Every registered reward of images (texts: test_verifiable.py); those that need a model
    get a small one."""
    small = {
        "clip_score": {"model": tiny_clip, "device": "cpu"},
        "aesthetic": {"head": tiny_head, "clip": tiny_clip, "device": "cpu"},
        "digits": {"path": tiny_reader},
        "digits_judge": {"path": tiny_reader},
        "remote": {"url": reward_server, "batch_size": 2},
        "gate": {"main": jpeg_incompressibility, "extra": jpeg_compressibility, "above": 1.0},
        "by_task": {"routes": {"draw": jpeg_incompressibility}, "default": jpeg_compressibility},
        "ensemble": {"of": [jpeg_incompressibility, jpeg_compressibility], "how": "mean"},
        "constrain": {
            "main": jpeg_incompressibility,
            "judges": [jpeg_compressibility],
            "at_least": -1.0,
        },
        "fall_back": {"first": jpeg_compressibility, "second": jpeg_incompressibility},
        "scheduled": {
            "of": [jpeg_incompressibility, jpeg_compressibility],
            "start": [1.0, 0.0],
            "end": [0.0, 1.0],
            "iterations": 2,
        },
        "calibrated": {"of": jpeg_incompressibility},
        "text_contrast": {"of": jpeg_incompressibility, "negative_text": "noise"},
        "confidence_weighted": {
            "of": lambda media, prompts: (jpeg_incompressibility(media, prompts) > 0.9).float(),
            "confidence": jpeg_incompressibility,
            "scale": "raw",
        },
        "bounded": {"of": jpeg_incompressibility, "high": 1.0},
        "noisy": {
            "of": lambda media, prompts: (jpeg_incompressibility(media, prompts) > 0.9).float()
        },
    }
    import huggingface_hub.constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        try:
            if request.param == "clap":
                folder = tmp_path_factory.mktemp("clap")
                small["clap"] = {"model": save_clap(folder), "device": "cpu"}
            if request.param == "pe_av":
                pytest.importorskip("timm")
                folder = tmp_path_factory.mktemp("pe_av")
                small["pe_av"] = {"model": save_pe_av(folder), "device": "cpu"}
            if request.param in TINY_OPTIONS:
                small[request.param] = TINY_OPTIONS[request.param](
                    tmp_path_factory.mktemp(request.param)
                )
            return REWARDS.build(request.param, **small.get(request.param, {}))
        except UserError as error:  # any other exception fails: a user would see a traceback
            pytest.skip(f"{request.param} cannot be built here: {error}")


def media_for(reward) -> torch.Tensor:
    """Pictures, or videos of 4 frames for a reward that judges only those, or their sound."""
    if card_of(reward).sound:
        return sounding()
    if "image" in card_of(reward).media:
        return pictures(5)
    return torch.stack([pictures(5, seed=seed) for seed in range(4)], dim=1)


def close(values, expected):
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)


def test_a_reward_keeps_its_contract(reward):
    """One finite float a sample, which depends on that sample alone; inputs and the global
    generator are left alone, bfloat16 counts as the floats it holds, texts are refused."""
    media = media_for(reward)
    prompts = asked()
    before, texts, state = media.clone(), deepcopy(prompts), torch.get_rng_state()
    values = reward(media, prompts)
    assert torch.equal(media, before) and media._version == 0 and prompts == texts
    assert torch.equal(torch.get_rng_state(), state)
    assert values.shape == (5,) and values.dtype == torch.float32 and values.isfinite().all()
    order = [3, 0, 4, 1, 2]
    close(reward(media[order], [prompts[i] for i in order]), values[order])
    parts = [reward(media[i:j], prompts[i:j]) for i, j in ((0, 1), (1, 4), (4, 5))]
    close(torch.cat(parts), values)
    half = media.bfloat16()
    close(reward(half, prompts), reward(half.float(), prompts))
    with pytest.raises(UserError, match="image"):
        reward(["an answer"] * 2, asked(2))
    if {"image", "video"} <= set(card_of(reward).media):
        assert_videos_are_means_of_frames(reward, values)
    if {"image", "video"} & set(card_of(reward).media) and (
        type(reward).__module__ not in OTHERS_NAN
    ):
        assert_broken_samples_spoil_no_other(reward, values)


def assert_videos_are_means_of_frames(reward, values):
    first, second = pictures(5), pictures(5, seed=7)
    try:
        still = reward(torch.stack([first] * 3, dim=1), asked())
    except UserError:
        return  # takes no videos
    close(still, values)
    cut = reward(torch.stack([first, second], dim=1), asked())
    close(cut, (values + reward(second, asked())) / 2)


def assert_broken_samples_spoil_no_other(reward, good):
    for bad in (torch.nan, torch.inf):
        media = media_for(reward)
        (media.sound if card_of(reward).sound else media)[2].flatten()[5] = bad
        values = reward(media, asked())
        assert values.isnan().tolist() == [False, False, True, False, False]
        close(values[[0, 1, 3, 4]], good[[0, 1, 3, 4]])


# JPEG


def test_jpeg_sizes_of_a_gradient_and_of_grey():
    """Test vector 22, Pillow 13.0.0 with libjpeg-turbo 3.2.0; another encoder may differ by some
    bytes."""
    ramp = torch.linspace(0, 1, 64)
    gradient = torch.stack(
        [ramp.expand(64, 64), ramp[:, None].expand(64, 64), torch.full((64, 64), 0.5)]
    )
    media = torch.stack([gradient, torch.full((3, 64, 64), 0.5)])
    kilobytes = jpeg_incompressibility(media, asked(2))
    torch.testing.assert_close(kilobytes, torch.tensor([1.361, 0.689]), rtol=0.02, atol=0)
    assert torch.equal(jpeg_compressibility(media, asked(2)), -kilobytes)
    flow_grpo = jpeg_compressibility(media, asked(2), scale=1 / 500)
    torch.testing.assert_close(flow_grpo, torch.tensor([-0.002722, -0.001378]), rtol=0.02, atol=0)


def test_jpeg_grows_with_noise_and_quality_and_rounds_like_published():
    media = pictures(4)
    sizes = jpeg_incompressibility(media, asked(4))
    assert (sizes.diff() > 0).all()
    assert (jpeg_incompressibility(media, asked(4), quality=30) < sizes).all()
    eighth = (media * 255).round() / 255
    assert torch.equal(jpeg_incompressibility(eighth, asked(4)), sizes)
    assert torch.equal(jpeg_incompressibility(eighth + 0.4 / 255, asked(4)), sizes)
    with pytest.raises(UserError, match="quality is 1 to 100, got 0"):
        jpeg_incompressibility(media, asked(4), quality=0)


# The user's own


MINE = '''
import torch

def redness(media, prompts, *, scale=1.0):
    """Mean of the red channel."""
    return scale * media[:, 0].float().mean((1, 2))

class Constant:
    def __init__(self, value: float = 0.5):
        self.value = value

    def __call__(self, media, prompts):
        return torch.full((len(prompts),), self.value)
'''


def test_rewards_of_the_user_are_found_by_file_and_by_module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_here.py").write_text(MINE)
    media = pictures(3)
    red = REWARDS.build(f"{tmp_path}/my_rewards_here.py:redness", scale=2.0)
    torch.testing.assert_close(red(media, asked(3)), 2 * media[:, 0].mean((1, 2)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    constant = REWARDS.build("my_rewards_here:Constant", value=0.25)
    assert constant(media, asked(3)).tolist() == [0.25] * 3


@pytest.mark.parametrize(
    "name, says",
    [
        ("no_such_module_xyz:f", "cannot import reward 'no_such_module_xyz:f'"),
        ("no_such_file_xyz.py:f", "no such file: no_such_file_xyz.py; relative paths start"),
        ("rewards.images.jpeg:jpeg_compresibility", "did you mean 'jpeg_compressibility'"),
        ("clip_scor", "did you mean 'clip_score'"),
    ],
)
def test_a_reward_that_cannot_be_found_says_where_one_looked(name, says):
    with pytest.raises(UserError, match=says):
        REWARDS.find(name)


def test_the_example_of_the_documentation_works(tmp_path):
    blocks = DOC.read_text().split("```python\n")[1:]
    source = next(b.split("```")[0] for b in blocks if "def " in b)
    assert len(source.strip().splitlines()) <= 20
    (tmp_path / "my_reward.py").write_text(source)
    reward = REWARDS.build(f"{tmp_path}/my_reward.py:colourfulness", scale=2.0)
    grey = torch.full((1, 3, 8, 8), 0.5)
    mixed = pictures(1, 8, 8)
    values = reward(torch.cat([grey, mixed]), asked(2))
    assert values.shape == (2,) and values[0] == 0 and values[1] > 0
    video = torch.cat([grey, mixed])[:, None].expand(-1, 4, -1, -1, -1)
    torch.testing.assert_close(reward(video, asked(2)), values)


def test_the_example_of_serving_works_and_gives_the_same_numbers(tmp_path, monkeypatch):
    """The three blocks of "Serve yours from another environment", with the reward of "Your own"."""
    text = DOC.read_text()
    python_code = next(b.split("```")[0] for b in text.split("```python\n")[1:] if "def " in b)
    section = text.partition("## Serve yours from another environment")[2].partition("\n## ")[0]
    server_text = section.split("```text\n")[1].split("```")[0]
    client_yaml = section.split("```yaml\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_reward.py").write_text(python_code)
    (tmp_path / "rewards.yaml").write_text(server_text)
    served, options = load(tmp_path / "rewards.yaml")
    assert options.port == 8123 and "mmrl serve-reward rewards.yaml" in section
    with serving({name: weighted.reward for name, weighted in served.items()}) as address:
        spec = yaml.safe_load(client_yaml.replace("http://127.0.0.1:8123", address))["reward"]
        media = eighth(pictures(3))
        far = build_rewards(spec)["colourful"].reward(media, asked(3))
    near = REWARDS.build(f"{tmp_path}/my_reward.py:colourfulness", scale=2.0)
    assert torch.equal(far, near(media, asked(3)))
    sys.modules.pop("my_reward", None)


def test_every_registered_reward_is_documented():
    text = DOC.read_text()
    assert [name for name in REWARDS if f"`{name}`" not in text] == []


def test_importing_the_rewards_loads_no_model_library_and_names_are_callables():
    """In a fresh interpreter, where no other test has imported their modules."""
    heavy = [
        "open_clip",
        "diffusers",
        "transformers",
        "timm",
        "peft",
        "sklearn",
        "PIL",
        "mmrl.train.trainer",
    ]
    code = (
        f"import rewards, sys; print([m for m in {heavy} if m in sys.modules]); "
        "from rewards import clip_score, jpeg_compressibility, remote; "
        "print(clip_score.__name__, remote.__name__)"
    )
    root = Path(rewards.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]", "ClipScore Remote"]

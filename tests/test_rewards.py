"""Rewards: the contract every registered one keeps, and the numbers of those that have a definition."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import rewards
from mmrl.registry import REWARDS, UserError
from rewards import Aesthetic, ClipScore, _clip, jpeg_compressibility, jpeg_incompressibility
from rewards._media import resize_and_crop
from rewards.aesthetic import Head, load_head

LAION_HEAD = Path(__file__).parents[1] / "../shared/data/sac+logos+ava1-l14-linearMSE.pth"
DOC = Path(__file__).parents[1] / "docs/rewards.md"
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
    save_file({k: v.contiguous() for k, v in network.state_dict().items()}, folder / "open_clip_model.safetensors")
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


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory) -> str:
    return save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny")


@pytest.fixture(scope="session")
def tiny_head(tmp_path_factory) -> str:
    return save_head(tmp_path_factory.mktemp("head") / "head.pth", TINY["embed_dim"])


@pytest.fixture(scope="session")
def tiny_reader(tmp_path_factory) -> str:
    """A reader of digits with random weights."""
    from rewards._reader import Reader

    places = {"left": [0, 0, 16, 32], "right": [16, 0, 32, 32]}
    names = {"digits": list(range(10)), "colors": ["red", "blue", "green"], "sizes": ["small", "large"]}
    folder = tmp_path_factory.mktemp("reader")
    with torch.random.fork_rng():
        torch.manual_seed(2)
        Reader({"image_size": 32, "channels": [8, 8, 8], "kernel": 3, "pool": False, "places": places} | names).save(
            folder
        )
    return str(folder)


@pytest.fixture
def no_hub(monkeypatch):
    """Fail at once instead of retrying for half a minute where there is no network."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def pictures(count: int, height: int = 32, width: int = 32, seed: int = 0) -> torch.Tensor:
    """[count, 3, height, width] in 0..1, of mixed smoothness."""
    noise = torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(seed))
    amount = torch.linspace(0.1, 1, count).view(-1, 1, 1, 1)
    return (noise - 0.5) * amount + 0.5


# ---------------------------------------------------------------- the contract, for whatever is registered


@pytest.fixture(scope="module", params=sorted(REWARDS))
def reward(request, tiny_clip, tiny_head, tiny_reader):
    """Every registered reward; those that need a model get a small local one, the others their defaults."""
    small = {
        "clip_score": {"model": tiny_clip, "device": "cpu"},
        "aesthetic": {"head": tiny_head, "clip": tiny_clip, "device": "cpu"},
        "digits": {"path": tiny_reader},
        "digits_judge": {"path": tiny_reader},
    }
    import huggingface_hub.constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        try:
            return REWARDS.build(request.param, **small.get(request.param, {}))
        except UserError as error:  # any other exception fails: a user would see a traceback
            pytest.skip(f"{request.param} cannot be built here: {error}")


def asked(count: int = 5) -> list[dict]:
    """Prompts with everything a registered reward may ask for; a new field of a new reward goes here."""
    things = [{"digit": 7, "color": "red"}, {"digit": 2, "size": "large", "place": "left"}]
    more = [{"objects": things, "relation": "above", "count": 2}, {"objects": things[:1], "count": 1}]
    return [{"text": TEXTS[i % len(TEXTS)], **more[i % 2]} for i in range(count)]


def test_one_finite_float_per_sample(reward):
    values = reward(pictures(5), asked())
    assert values.shape == (5,) and values.dtype == torch.float32 and values.isfinite().all()


def test_permuting_the_samples_permutes_the_rewards(reward):
    media, prompts, order = pictures(5), asked(), [3, 0, 4, 1, 2]
    shuffled = reward(media[order], [prompts[i] for i in order])
    torch.testing.assert_close(shuffled, reward(media, prompts)[order], rtol=1e-5, atol=1e-5)


def test_splitting_the_batch_changes_nothing(reward):
    media, prompts = pictures(5), asked()
    parts = [reward(media[i:j], prompts[i:j]) for i, j in ((0, 1), (1, 4), (4, 5))]
    torch.testing.assert_close(torch.cat(parts), reward(media, prompts), rtol=1e-5, atol=1e-5)


def test_input_and_global_rng_are_left_alone(reward):
    media, prompts = pictures(5), asked()
    before, state, texts = media.clone(), torch.get_rng_state(), deepcopy(prompts)
    reward(media, prompts)
    assert torch.equal(media, before) and media._version == 0 and prompts == texts
    assert torch.equal(torch.get_rng_state(), state)


def test_bfloat16_counts_as_the_floats_it_holds(reward):
    media = pictures(5).bfloat16()
    torch.testing.assert_close(reward(media, asked()), reward(media.float(), asked()), rtol=1e-5, atol=1e-5)


def test_a_still_video_is_worth_its_frame_and_a_cut_one_the_mean(reward):
    first, second, prompts = pictures(5), pictures(5, seed=7), asked()
    try:
        still = reward(torch.stack([first] * 3, dim=1), prompts)
    except UserError as error:
        pytest.skip(f"takes no videos: {error}")
    torch.testing.assert_close(still, reward(first, prompts), rtol=1e-5, atol=1e-5)
    cut = reward(torch.stack([first, second], dim=1), prompts)
    torch.testing.assert_close(cut, (reward(first, prompts) + reward(second, prompts)) / 2, rtol=1e-5, atol=1e-5)


def test_texts_are_refused_in_one_sentence(reward):
    with pytest.raises(UserError, match="image"):
        reward(["an answer"] * 2, asked(2))


@pytest.mark.parametrize("name", ["jpeg_compressibility", "jpeg_incompressibility", "clip_score", "aesthetic"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_picture_is_nan_and_spoils_no_other(name, bad, tiny_clip, tiny_head):
    options = {
        "clip_score": {"model": tiny_clip, "preprocess": "pil"},
        "aesthetic": {"head": tiny_head, "clip": tiny_clip},
    }
    reward, media = REWARDS.build(name, **options.get(name, {})), pictures(5)
    good = reward(media, asked())
    media[2, 0, 0, 0] = bad
    values = reward(media, asked())
    assert values.isnan().tolist() == [False, False, True, False, False]
    torch.testing.assert_close(values[[0, 1, 3, 4]], good[[0, 1, 3, 4]])


# ---------------------------------------------------------------- JPEG


def test_jpeg_sizes_of_a_gradient_and_of_grey():
    """Test vector 22, Pillow 13.0.0 with libjpeg-turbo 3.2.0; another encoder may differ by some bytes."""
    ramp = torch.linspace(0, 1, 64)
    gradient = torch.stack([ramp.expand(64, 64), ramp[:, None].expand(64, 64), torch.full((64, 64), 0.5)])
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


# ---------------------------------------------------------------- CLIP


def directly(folder: str, media: torch.Tensor, texts: list[str]) -> torch.Tensor:
    """Cosines computed with open_clip alone, one sample at a time."""
    import open_clip
    from PIL import Image

    network, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenizer, found = open_clip.get_tokenizer(f"local-dir:{folder}"), []
    network.eval()
    with torch.no_grad():
        for picture, text in zip(media, texts, strict=True):
            image = Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy())
            pair = network.encode_image(transform(image)[None]), network.encode_text(tokenizer([text]))
            found.append(torch.cosine_similarity(*pair))
    return torch.cat(found)


@pytest.mark.parametrize("size", [(32, 32), (48, 40), (20, 61)])
def test_clip_score_is_what_open_clip_computes(tiny_clip, size):
    media = (pictures(5, *size) * 255).round() / 255
    expected = directly(tiny_clip, media, TEXTS)
    assert expected.std() > 0.01  # the tiny model tells the samples apart
    exact = ClipScore(tiny_clip, preprocess="pil", batch_size=2)(media, asked())
    torch.testing.assert_close(exact, expected, rtol=1e-5, atol=1e-5)
    tensor = ClipScore(tiny_clip, scale=100.0, batch_size=2)(media, asked())
    torch.testing.assert_close(tensor, 100 * expected, rtol=0, atol=0.2)


@pytest.mark.parametrize("size", [(32, 32), (64, 64), (45, 80), (81, 33), (16, 24)])
def test_tensor_preprocessing_is_torchvisions(size):
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

    media = 0.4 + 0.2 * pictures(2, *size)  # far from 0 and 1: no overshoot to clamp
    for name, mode in (("bicubic", InterpolationMode.BICUBIC), ("bilinear", InterpolationMode.BILINEAR)):
        expected = Compose([Resize(32, mode), CenterCrop((32, 32))])(media)
        torch.testing.assert_close(resize_and_crop(media, (32, 32), "shortest", name), expected)


@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("target", [32, (24, 40)])
def test_tensor_preprocessing_follows_the_models_own_configuration(tmp_path, mode, target):
    """Against open_clip's PIL transform, which rounds to 8 bits on the way: 1/255 off, more at a few edges."""
    preprocess = PREPROCESS | {"resize_mode": mode, "fill_color": 128}
    clip = ClipScore(save_tiny_clip(tmp_path / "clip", preprocess, image_size=target), device="cpu").clip
    media = 0.3 + 0.4 * pictures(2, 57, 36)
    ours, theirs = clip.pixels(media), clip.pixels(media, exact=True)
    assert ours.shape == theirs.shape == (2, 3, *((32, 32) if target == 32 else target))
    assert (ours - theirs).abs().max() < 1.5 / 255 / 0.2


def test_texts_are_embedded_once_and_the_cache_is_bounded(tiny_clip, monkeypatch):
    clip, seen = _clip.load_clip(tiny_clip, "", "cpu"), []
    clip.texts.clear()
    tokenizer = clip.tokenizer
    monkeypatch.setattr(clip, "tokenizer", lambda texts: seen.extend(texts) or tokenizer(texts))
    monkeypatch.setattr(_clip, "CACHED_TEXTS", 3)
    first = clip.embed_texts(TEXTS, batch_size=2)
    assert sorted(seen) == sorted(set(TEXTS)) and len(clip.texts) == 3
    torch.testing.assert_close(clip.embed_texts(TEXTS[1:]), first[1:])
    assert seen[4:] == [TEXTS[0]]  # only the one that had been dropped


def test_rewards_share_one_copy_of_a_model(tiny_clip, tiny_head):
    score, aesthetic = ClipScore(tiny_clip), Aesthetic(head=tiny_head, clip=tiny_clip)
    assert score.clip is aesthetic.clip and not any(p.requires_grad for p in score.clip.model.parameters())


def test_autocast_of_the_trainer_does_not_reach_the_model(tiny_clip):
    score, media = ClipScore(tiny_clip, device="cpu"), pictures(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        score.clip.texts.clear()
        inside = score(media, asked())
    torch.testing.assert_close(inside, score(media, asked()))


def test_loading_a_model_leaves_the_global_rng_alone(tmp_path, tmp_path_factory):
    folder, state = save_tiny_clip(tmp_path / "clip"), torch.get_rng_state()
    ClipScore(folder)
    Aesthetic(head=save_head(tmp_path / "head.safetensors", TINY["embed_dim"]), clip=folder)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("model, tag, quick", [("ViT-L-14", "openai", True), ("ViT-B-32", "laion2b_s34b_b79k", False)])
def test_openai_weights_get_the_activation_they_were_trained_with(tmp_path, monkeypatch, model, tag, quick):
    """open_clip 3 would load OpenAI's weights into a model with plain GELU and only warn."""
    import open_clip

    asked_for, tiny = {}, open_clip.create_model(f"local-dir:{save_tiny_clip(tmp_path / 'clip')}")
    monkeypatch.setattr(_clip, "_shared", {})
    monkeypatch.setattr(open_clip, "create_model", lambda *names, **options: asked_for.update(options) or tiny)
    _clip.load_clip(model, tag, "cpu")
    assert asked_for["force_quick_gelu"] is quick and asked_for["weights_only"] and asked_for["require_pretrained"]


@pytest.mark.parametrize(
    "model, pretrained, says",
    [
        ("ViT-L-14-quickglu", "openai", "unknown open_clip model .*; did you mean 'ViT-L-14-quickgelu'"),
        ("ViT-L-14", "opneai", "has no weights 'opneai'; did you mean 'openai'"),
        ("ViT-L-14", "openai", r"Download it once .*create_model\('ViT-L-14', 'openai'\)"),
        ("hf-hub:nobody/nothing", "", "open_clip_config.json and open_clip_model.safetensors"),
        ("/no/such/folder", "", "no such folder: /no/such/folder"),
    ],
)
def test_a_missing_model_is_one_sentence_with_the_remedy(no_hub, tmp_path, monkeypatch, model, pretrained, says):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=says):
        ClipScore(model, pretrained)


def test_a_damaged_folder_says_so(tmp_path):
    with pytest.raises(UserError, match="holds no open_clip_config.json"):
        ClipScore(str(tmp_path))
    folder = Path(save_tiny_clip(tmp_path / "clip"))
    (folder / "open_clip_model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match=f"cannot load the open_clip model in {folder}"):
        ClipScore(str(folder))
    (folder / "open_clip_model.safetensors").unlink()
    with pytest.raises(UserError, match="could not be loaded"):
        ClipScore(str(folder))


def test_wrong_input_is_named(tiny_clip):
    score = ClipScore(tiny_clip)
    with pytest.raises(UserError, match='needs a "text" in every prompt'):
        score(pictures(1), [{"caption": "a"}])
    with pytest.raises(UserError, match=r"got torch.uint8 \[1, 3, 8, 8\]"):
        score(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), asked(1))
    with pytest.raises(UserError, match="device 'cdua' cannot be used"):
        ClipScore(tiny_clip, device="cdua")


# ---------------------------------------------------------------- aesthetic


@pytest.mark.skipif(not LAION_HEAD.is_file(), reason="LAION's head is not on this machine")
def test_the_published_head_is_the_affine_map_its_file_says():
    """No activation between the layers: W5 (W4 (... + b1) ...) + b5, here multiplied out in float64."""
    raw = torch.load(LAION_HEAD, map_location="cpu", weights_only=True)
    weight, bias = torch.eye(768, dtype=torch.float64), torch.zeros(768, dtype=torch.float64)
    for place in (0, 2, 4, 6, 7):
        w, b = (raw[f"layers.{place}.{kind}"].double() for kind in ("weight", "bias"))
        weight, bias = w @ weight, w @ bias + b
    embeddings = torch.nn.functional.normalize(torch.randn(64, 768, generator=torch.Generator().manual_seed(0)), dim=-1)
    head = Aesthetic(head=str(LAION_HEAD), clip=None).head
    expected = (embeddings.double() @ weight.T + bias).squeeze(-1).float()
    torch.testing.assert_close(head(embeddings), expected, rtol=1e-4, atol=1e-4)
    a, b = embeddings[:32], embeddings[32:]
    torch.testing.assert_close(head(a) + head(b) - head(a + b), head(torch.zeros(32, 768)), rtol=1e-4, atol=1e-4)
    assert head.layers[0].in_features == 768 and not head.training


def test_aesthetic_is_the_head_on_unit_embeddings(tiny_clip, tiny_head, tmp_path):
    media = pictures(5, 40, 52)
    reward = Aesthetic(head=tiny_head, clip=tiny_clip, scale=0.1, preprocess="pil", batch_size=2, device="cpu")
    embeddings = reward.clip.embed_images(media, exact=True)
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(5))
    torch.testing.assert_close(reward(media, asked()), 0.1 * load_head(tiny_head)(embeddings))
    same = save_head(tmp_path / "head.safetensors", TINY["embed_dim"])
    assert torch.equal(load_head(same)(embeddings), load_head(tiny_head)(embeddings))


def test_a_wrong_head_is_one_sentence(tiny_clip, tiny_head, tmp_path):
    with pytest.raises(UserError, match="download sac.*improved-aesthetic-predictor"):
        Aesthetic(head=str(tmp_path / "none.pth"))
    (tmp_path / "torn.pth").write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match="cannot read .*torn.pth as tensors"):
        load_head(str(tmp_path / "torn.pth"))
    torch.save({"weight": torch.zeros(1, 768)}, tmp_path / "linear.pth")
    with pytest.raises(UserError, match=r"not a LAION aesthetic head: it holds weight \[1, 768\]"):
        load_head(str(tmp_path / "linear.pth"))
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    with pytest.raises(UserError, match="holds a list"):
        load_head(str(tmp_path / "list.pth"))
    tensors = torch.load(tiny_head, weights_only=True) | {"layers.2.weight": torch.zeros(100, 1024)}
    torch.save(tensors, tmp_path / "narrow.pth")
    with pytest.raises(UserError, match="widths 24-1024-128-64-16-1"):
        load_head(str(tmp_path / "narrow.pth"))
    with pytest.raises(UserError, match="have 24 numbers, the aesthetic head .* takes 768"):
        Aesthetic(head=save_head(tmp_path / "wide.pth", 768), clip=tiny_clip)
    with pytest.raises(UserError, match="can only score embeddings"):
        Aesthetic(head=tiny_head, clip=None)(pictures(1), asked(1))


def test_a_head_file_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"layers.0.weight": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(UserError, match="cannot read"):
        load_head(str(tmp_path / "evil.pth"))
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- the user's own


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
        ("no_such_file_xyz.py:f", "no such file: no_such_file_xyz.py"),
        ("rewards.jpeg:jpeg_compresibility", "did you mean 'jpeg_compressibility'"),
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
    grey, mixed = torch.full((1, 3, 8, 8), 0.5), pictures(1, 8, 8)
    values = reward(torch.cat([grey, mixed]), asked(2))
    assert values.shape == (2,) and values[0] == 0 and values[1] > 0
    video = torch.cat([grey, mixed])[:, None].expand(-1, 4, -1, -1, -1)
    torch.testing.assert_close(reward(video, asked(2)), values)


def test_every_registered_reward_is_documented():
    text = DOC.read_text()
    assert [name for name in REWARDS if f"`{name}`" not in text] == []


def test_importing_the_rewards_loads_no_model_library():
    heavy = ["open_clip", "diffusers", "transformers", "timm", "peft", "sklearn", "PIL", "mmrl.trainer"]
    code = f"import rewards, sys; print([m for m in {heavy} if m in sys.modules])"
    root = Path(rewards.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_laion_layout_of_the_saved_test_head_is_the_published_one(tiny_head, tmp_path):
    """The stand-in used above has the names of the real file, so these tests would notice a change of layout."""
    if not LAION_HEAD.is_file():
        pytest.skip("LAION's head is not on this machine")
    real = torch.load(LAION_HEAD, map_location="cpu", weights_only=True)
    wide = load_file(save_head(tmp_path / "wide.safetensors", 768))
    assert {k: v.shape for k, v in wide.items()} == {k: v.shape for k, v in real.items()}

"""Rewards on CLIP embeddings: clip_score and aesthetic against independent computations, and their
refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmrl.core.errors import UserError
from rewards import Aesthetic, ClipScore
from rewards.base import clip as networks
from rewards.base.media import resize_and_crop
from rewards.heads.aesthetic import load_head
from tests.fixtures.tiny_rewards import (
    LAION_HEAD,
    PREPROCESS,
    TEXTS,
    TINY,
    asked,
    pictures,
    save_head,
    save_tiny_clip,
)


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory) -> str:
    return save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny")


@pytest.fixture(scope="session")
def tiny_head(tmp_path_factory) -> str:
    return save_head(tmp_path_factory.mktemp("head") / "head.pth", TINY["embed_dim"])


@pytest.fixture
def no_hub(monkeypatch):
    """Fail at once instead of retrying for half a minute where there is no network."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


# CLIP


def directly(folder: str, media: torch.Tensor, texts: list[str]) -> torch.Tensor:
    """Cosines computed with open_clip alone, one sample at a time."""
    import open_clip
    from PIL import Image

    network, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    cosines = []
    network.eval()
    with torch.no_grad():
        for picture, text in zip(media, texts, strict=True):
            image = Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy())
            pair = (
                network.encode_image(transform(image)[None]),
                network.encode_text(tokenizer([text])),
            )
            cosines.append(torch.cosine_similarity(*pair))
    return torch.cat(cosines)


@pytest.mark.parametrize("size", [(32, 32), (48, 40), (20, 61)])
def test_clip_score_is_what_open_clip_computes(tiny_clip, size):
    media = (pictures(5, *size) * 255).round() / 255
    expected = directly(tiny_clip, media, TEXTS)
    assert expected.std() > 0.01  # the tiny model tells the samples apart
    exact = ClipScore(tiny_clip, preprocess="pil", batch_size=2)(media, asked())
    torch.testing.assert_close(exact, expected, rtol=1e-5, atol=1e-5)
    tensor = ClipScore(tiny_clip, scale=100.0, batch_size=2)(media, asked())
    torch.testing.assert_close(tensor, 100 * expected, rtol=0, atol=0.2)


def test_tensor_preprocessing_is_torchvisions(subtests):
    for size in [(32, 32), (64, 64), (45, 80), (81, 33), (16, 24)]:
        with subtests.test(size=size):
            from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

            media = 0.4 + 0.2 * pictures(2, *size)  # far from 0 and 1: no overshoot to clamp
            for name, mode in (
                ("bicubic", InterpolationMode.BICUBIC),
                ("bilinear", InterpolationMode.BILINEAR),
            ):
                expected = Compose([Resize(32, mode), CenterCrop((32, 32))])(media)
                torch.testing.assert_close(
                    resize_and_crop(media, (32, 32), "shortest", name), expected
                )


@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("target", [32, (24, 40)])
def test_tensor_preprocessing_follows_the_models_own_configuration(tmp_path, mode, target):
    """Against open_clip's PIL transform, which rounds to 8 bits on the way: 1/255 off, more at a
    few edges."""
    preprocess = PREPROCESS | {"resize_mode": mode, "fill_color": 128}
    clip = ClipScore(
        save_tiny_clip(tmp_path / "clip", preprocess, image_size=target), device="cpu"
    ).clip
    media = 0.3 + 0.4 * pictures(2, 57, 36)
    ours = clip.pixels(media)
    theirs = clip.pixels(media, exact=True)
    assert ours.shape == theirs.shape == (2, 3, *((32, 32) if target == 32 else target))
    assert (ours - theirs).abs().max() < 1.5 / 255 / 0.2


def test_autocast_of_the_trainer_does_not_reach_the_model(tiny_clip):
    score = ClipScore(tiny_clip, device="cpu")
    media = pictures(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        score.clip.texts.clear()
        inside = score(media, asked())
    torch.testing.assert_close(inside, score(media, asked()))


@pytest.mark.parametrize(
    "model, tag, quick", [("ViT-L-14", "openai", True), ("ViT-B-32", "laion2b_s34b_b79k", False)]
)
def test_openai_weights_get_the_activation_they_were_trained_with(
    tmp_path, monkeypatch, model, tag, quick
):
    """open_clip 3 would load OpenAI's weights into a model with plain GELU and only warn."""
    import open_clip

    asked_for = {}
    tiny = open_clip.create_model(f"local-dir:{save_tiny_clip(tmp_path / 'clip')}")
    monkeypatch.setattr(networks, "_shared", {})
    monkeypatch.setattr(networks, "check_repository", lambda _: None)  # as if the cache had it
    monkeypatch.setattr(
        open_clip, "create_model", lambda *names, **options: asked_for.update(options) or tiny
    )
    networks.load_clip(model, tag, "cpu")
    assert (
        asked_for["force_quick_gelu"] is quick
        and asked_for["weights_only"]
        and asked_for["require_pretrained"]
    )


@pytest.mark.parametrize(
    "model, pretrained, says",
    [
        (
            "ViT-L-14-quickglu",
            "openai",
            "unknown open_clip model .*; did you mean 'ViT-L-14-quickgelu'",
        ),
        ("ViT-L-14", "opneai", "has no weights 'opneai'; did you mean 'openai'"),
        ("ViT-L-14", "openai", "`hf download timm/vit_large_patch14_clip_224.openai` where"),
        (
            "hf-hub:nobody/nothing",
            "",
            "'nobody/nothing' is not in the cache .*the path of a folder",
        ),
        ("/no/such/folder", "", "no such folder: /no/such/folder"),
    ],
)
def test_a_missing_model_is_one_sentence_with_the_remedy(
    no_hub, tmp_path, monkeypatch, model, pretrained, says
):
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


# Aesthetic


@pytest.mark.skipif(not LAION_HEAD.is_file(), reason="LAION's head is not on this machine")
def test_the_published_head_is_the_affine_map_its_file_says():
    """No activation between the layers: W5 (W4 (... + b1) ...) + b5, here multiplied out in
    float64."""
    raw = torch.load(LAION_HEAD, map_location="cpu", weights_only=True)
    weight = torch.eye(768, dtype=torch.float64)
    bias = torch.zeros(768, dtype=torch.float64)
    for place in (0, 2, 4, 6, 7):
        w, b = (raw[f"layers.{place}.{kind}"].double() for kind in ("weight", "bias"))
        weight = w @ weight
        bias = w @ bias + b
    embeddings = torch.nn.functional.normalize(
        torch.randn(64, 768, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    head = Aesthetic(head=str(LAION_HEAD), clip=None).head
    expected = (embeddings.double() @ weight.T + bias).squeeze(-1).float()
    torch.testing.assert_close(head(embeddings), expected, rtol=1e-4, atol=1e-4)
    a = embeddings[:32]
    b = embeddings[32:]
    torch.testing.assert_close(
        head(a) + head(b) - head(a + b), head(torch.zeros(32, 768)), rtol=1e-4, atol=1e-4
    )
    assert head.layers[0].in_features == 768 and not head.training


def test_aesthetic_is_the_head_on_unit_embeddings(tiny_clip, tiny_head, tmp_path):
    media = pictures(5, 40, 52)
    reward = Aesthetic(
        head=tiny_head, clip=tiny_clip, scale=0.1, preprocess="pil", batch_size=2, device="cpu"
    )
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

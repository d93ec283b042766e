"""Rewards on CLIP embeddings: clip_score and aesthetic against independent computations, and their
refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmrl.core.errors import UserError
from rewards import Aesthetic, ClipScore
from rewards.base import clip as networks
from rewards.base.truncation import Beginning
from rewards.heads.aesthetic import load_head
from tests.fixtures.tiny_rewards import (
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


@pytest.mark.parametrize("size", [(48, 40), (20, 61)])
def test_clip_score_is_what_open_clip_computes(tiny_clip, size):
    media = (pictures(5, *size) * 255).round() / 255
    expected = directly(tiny_clip, media, TEXTS)
    assert expected.std() > 0.01  # the tiny model tells the samples apart
    exact = ClipScore(tiny_clip, preprocess="pil", batch_size=2)(media, asked())
    torch.testing.assert_close(exact, expected, rtol=1e-5, atol=1e-5)
    tensor = ClipScore(tiny_clip, scale=100.0, batch_size=2)(media, asked())
    torch.testing.assert_close(tensor, 100 * expected, rtol=0, atol=0.2)


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


def test_openai_weights_get_the_activation_they_were_trained_with(tiny_clip, monkeypatch):
    """open_clip 3 would load OpenAI's weights into a model with plain GELU and only warn."""
    import open_clip

    asked_for = {}
    tiny = open_clip.create_model(f"local-dir:{tiny_clip}")
    monkeypatch.setattr(networks, "_shared", {})
    monkeypatch.setattr(networks, "check_repository", lambda _: None)  # as if the cache had it
    monkeypatch.setattr(
        open_clip, "create_model", lambda *_, **more: asked_for.update(more) or tiny
    )
    for model, tag in (("ViT-L-14", "openai"), ("ViT-B-32", "laion2b_s34b_b79k")):
        networks.load_clip(model, tag, "cpu")
        assert asked_for["force_quick_gelu"] is (tag == "openai")
        assert asked_for["weights_only"] and asked_for["require_pretrained"]


def test_a_missing_or_damaged_model_is_one_sentence_with_the_remedy(
    tmp_path, monkeypatch, subtests
):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    torn, bare = (Path(save_tiny_clip(tmp_path / name)) for name in ("torn", "bare"))
    (torn / "open_clip_model.safetensors").write_bytes(b"torn")
    (bare / "open_clip_model.safetensors").unlink()
    for model, pretrained, says in (
        ("ViT-L-14-quickglu", "openai", "unknown .*; did you mean 'ViT-L-14-quickgelu'"),
        ("ViT-L-14", "opneai", "has no weights 'opneai'; did you mean 'openai'"),
        ("ViT-L-14", "openai", "`hf download timm/vit_large_patch14_clip_224.openai` where"),
        ("hf-hub:nobody/nothing", "", "is not in the cache .*the path of a folder"),
        ("/no/such/folder", "", "no such folder: /no/such/folder"),
        (str(tmp_path / "empty"), "", "holds no open_clip_config.json"),
        (str(torn), "", f"cannot load the open_clip model in {torn}"),
        (str(bare), "", "could not be loaded"),
    ):
        with subtests.test(model=model), pytest.raises(UserError, match=says):
            ClipScore(model, pretrained)


def test_the_trainers_autocast_stays_outside_and_wrong_input_is_named(tiny_clip):
    score = ClipScore(tiny_clip, device="cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = score(pictures(5), asked())
    score.clip.texts.clear()
    torch.testing.assert_close(inside, score(pictures(5), asked()))
    with pytest.raises(UserError, match='needs a "text" in every prompt'):
        score(pictures(1), [{"caption": "a"}])
    with pytest.raises(UserError, match=r"got torch.uint8 \[1, 3, 8, 8\]"):
        score(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), asked(1))
    with pytest.raises(UserError, match="device 'cdua' cannot be used"):
        ClipScore(tiny_clip, device="cdua")


def test_the_first_prompts_that_are_cut_are_named_once(caplog):
    asked = []

    def lengths(texts):
        asked.append(texts)
        return [len(text.split()) for text in texts]

    watch = Beginning("a reward", 3, lengths)
    watch.look(["a", "b"])
    assert not asked and not watch.told  # too short for three tokens, whatever they are
    watch.look(["one two three", "one two three four", "one two three four"])
    watch.look(["one two three four five"])
    assert "a reward reads the first 3 tokens of a prompt: 2 of 3 are longer" in caplog.text
    assert len(asked) == 1 and caplog.text.count("reads the first") == 1


def test_clip_score_reads_77_tokens(tiny_clip, caplog):
    reward = ClipScore(tiny_clip)
    for words, cut in ((60, False), (400, True)):
        reward(torch.rand(1, 3, 8, 8), [{"text": "red " * words}])
        assert ("reads the first 77 tokens of a prompt: 1 of 1" in caplog.text) == cut


# Aesthetic


def test_the_head_is_an_affine_map(tiny_head):
    """As published, no activation between the layers."""
    head = load_head(tiny_head)
    a, b = torch.randn(2, 32, TINY["embed_dim"], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head(a) + head(b) - head(a + b), head(torch.zeros_like(a)))
    assert head(a).std() > 1e-3 and not head.training


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


def test_a_wrong_head_is_one_sentence_and_runs_no_code(tiny_clip, tiny_head, tmp_path, subtests):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    tensors = torch.load(tiny_head, weights_only=True)
    for content, says in (
        (
            {"weight": torch.zeros(1, 768)},
            r"not a LAION aesthetic head: it holds weight \[1, 768\]",
        ),
        ([torch.zeros(1)], "holds a list"),
        (tensors | {"layers.2.weight": torch.zeros(100, 1024)}, "widths 24-1024-128-64-16-1"),
        ({"layers.0.weight": Evil()}, "cannot read .*head.pth as tensors"),
    ):
        torch.save(content, tmp_path / "head.pth")
        with subtests.test(says=says), pytest.raises(UserError, match=says):
            load_head(str(tmp_path / "head.pth"))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UserError, match="download sac.*improved-aesthetic-predictor"):
        Aesthetic(head=str(tmp_path / "none.pth"))
    with pytest.raises(UserError, match="have 24 numbers, the aesthetic head .* takes 768"):
        Aesthetic(head=save_head(tmp_path / "wide.pth", 768), clip=tiny_clip)
    with pytest.raises(UserError, match="can only score embeddings"):
        Aesthetic(head=tiny_head, clip=None)(pictures(1), asked(1))

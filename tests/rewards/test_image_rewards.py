"""Image and text-image rewards against the libraries that define them, on tiny random models of the
same classes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as nnf

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from rewards import (
    ClipIQA,
    ClipScore,
    DinoSimilarity,
    DirectionalClip,
    HPSv2,
    ImageReward,
    PickScore,
    SafetyChecker,
)
from rewards.base.hf import to_pil
from rewards.images import picture_statistics
from rewards.images.image_reward import MEAN, STD
from tests.fixtures.tiny_image_rewards import (
    TINY_OPTIONS,
    clip_config,
    image_reward_parts,
    image_reward_text,
    save_hf_clip,
    save_image_reward,
    save_mps,
)
from tests.fixtures.tiny_rewards import TEXTS, asked, pictures, save_tiny_clip

# those name their models themselves
# heads have no own model that could be missing: test_embedding.py, test_fitted_head.py
LOADED = sorted(
    set(TINY_OPTIONS) - {"ocr", "ocr_layout", "per_frame", "video_align", "fitted_head"}
)


def eighths(*size: int, count: int = 5) -> torch.Tensor:
    """Pictures that are 8-bit already, so that PIL sees the same values."""
    return (pictures(count, *size) * 255).round() / 255


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """name -> options of a reward with a tiny model."""
    paths = {}

    def options(name: str) -> dict:
        if name not in paths:
            paths[name] = TINY_OPTIONS[name](tmp_path_factory.mktemp(name))
        return paths[name]

    return options


# Parity with the defining libraries


@pytest.mark.parametrize("size", [(32, 32), (48, 40), (20, 61)])
def test_pickscore_is_clips_logit_by_its_own_processor(folders, size):
    from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    folder = folders("pickscore")["model"]
    media = eighths(*size)
    model = CLIPModel.from_pretrained(folder).eval()
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(
        images=to_pil(media), return_tensors="pt"
    ).pixel_values
    words = tokenizer(
        TEXTS, padding="max_length", truncation=True, max_length=77, return_tensors="pt"
    )
    with torch.no_grad():
        logits = model(pixel_values=pixels, **words).logits_per_image.diagonal()
    assert logits.std() > 0.1
    scores = PickScore(folder, None, scale="logit", batch_size=2, device="cpu")(media, asked())
    torch.testing.assert_close(scores, logits, rtol=1e-5, atol=1e-5)
    for scale, expected in (
        ("flow_grpo", logits / 26),
        ("mixgrpo", (logits - 18) / 8),
        (0.5, logits / 2),
    ):
        scores = PickScore(folder, None, scale=scale, device="cpu")(media, asked())
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    cosine = PickScore(folder, None, scale="cosine", device="cpu")(media, asked())
    torch.testing.assert_close(cosine, logits / model.logit_scale.exp(), rtol=1e-5, atol=1e-5)
    tensor = PickScore(folder, None, scale="cosine", preprocess="tensor", device="cpu")(
        media, asked()
    )
    torch.testing.assert_close(tensor, cosine, rtol=0, atol=0.02)


@pytest.mark.parametrize("size", [(32, 32), (48, 40), (20, 61)])
def test_hpsv2_brings_the_longer_side_to_the_model_and_fills_with_black(tmp_path, size):
    import open_clip
    from PIL import Image

    folder = save_tiny_clip(tmp_path / "clip")
    media = eighths(*size)
    network = open_clip.create_model(f"local-dir:{folder}").eval()
    words = open_clip.get_tokenizer(f"local-dir:{folder}")(TEXTS)
    squares = []
    for image in to_pil(media):
        ratio = 32 / max(image.size)
        small = image.resize([round(side * ratio) for side in image.size], Image.BICUBIC)
        square = Image.new("RGB", (32, 32))
        square.paste(small, ((32 - small.width) // 2, (32 - small.height) // 2))
        squares.append(torch.from_numpy(np.array(square)).permute(2, 0, 1) / 255)
    cfg = network.visual.preprocess_cfg
    mean, std = (torch.tensor(cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        pair = network.encode_image((torch.stack(squares) - mean) / std), network.encode_text(words)
    expected = torch.cosine_similarity(*pair)
    torch.testing.assert_close(
        HPSv2(model=folder, device="cpu")(media, asked()), expected, rtol=1e-5, atol=1e-5
    )
    percent = HPSv2(model=folder, scale="percent", preprocess="tensor", device="cpu")(
        media, asked()
    )
    torch.testing.assert_close(percent, 100 * expected, rtol=0, atol=1.0)


def test_image_reward_is_blip_by_timm_and_bert(tmp_path, folders):
    """The published names on timm's vision transformer and a BERT with cross-attention that sees
    both ways."""
    options = folders("image_reward")
    vision, config, head = image_reward_parts()
    text = image_reward_text(config, vision.embed_dim)
    reward = ImageReward(**options)
    media = eighths(32, 32)
    tokens = reward.tokenizer(TEXTS, padding="max_length", max_length=35, return_tensors="pt")
    both_ways = tokens.attention_mask[:, None, None].expand(-1, 1, 35, -1)
    with torch.no_grad():
        image_states = vision.forward_features(reward.pixels(media))
        mask = torch.zeros(both_ways.shape).masked_fill(
            both_ways == 0, torch.finfo(torch.float32).min
        )
        read = text(
            input_ids=tokens.input_ids,
            attention_mask=mask,
            encoder_hidden_states=image_states,
            use_cache=False,
        )
        expected = (head(read.last_hidden_state[:, 0]).squeeze(-1) - MEAN) / STD
    assert expected.std() > 0.1
    torch.testing.assert_close(reward(media, asked()), expected, rtol=1e-5, atol=1e-5)
    half = ImageReward(**options, scale="unirl", batch_size=2)(media, asked())
    torch.testing.assert_close(half, (expected + 2) / 4, rtol=1e-5, atol=1e-5)


def test_image_reward_preprocessing_is_torchvisions(folders):
    from torchvision.transforms import (
        CenterCrop,
        Compose,
        InterpolationMode,
        Normalize,
        Resize,
        ToTensor,
    )

    media = eighths(48, 40)
    transform = Compose(
        [
            Resize(32, InterpolationMode.BICUBIC),
            CenterCrop(32),
            ToTensor(),
            Normalize((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
        ]
    )
    expected = torch.stack([transform(image) for image in to_pil(media)])
    torch.testing.assert_close(ImageReward(**folders("image_reward")).pixels(media), expected)
    # no overshoot of the bicubic kernel, which PIL cuts off after each of its two passes
    dull = 0.3 + 0.4 * media
    exact, smooth = (
        ImageReward(**folders("image_reward"), preprocess=p).pixels(dull) for p in ("pil", "tensor")
    )
    assert (smooth - exact).abs().max() < 1.5 / 255 / 0.26


def test_a_foreign_image_reward_checkpoint_is_named(tmp_path, folders):
    torch.save({"blip.text_encoder.x": torch.zeros(1)}, tmp_path / "odd.pt")
    with pytest.raises(UserError, match="odd.pt is not an ImageReward checkpoint"):
        ImageReward(str(tmp_path / "odd.pt"), folders("image_reward")["tokenizer"])
    with pytest.raises(UserError, match="no ImageReward checkpoint at /no/such"):
        ImageReward("/no/such.pt")
    tensors = save_image_reward(tmp_path / "short.pt")
    torch.save(
        {k: v for k, v in tensors.items() if "blocks.1" not in k or "qkv" not in k},
        tmp_path / "short.pt",
    )
    with pytest.raises(UserError, match="not an ImageReward checkpoint"):
        ImageReward(str(tmp_path / "short.pt"))


def test_mps_reads_the_prompt_as_published(folders):
    """Against the layers written out head by head and pair by pair."""
    reward = REWARDS.build("mps", **folders("mps"), threshold=0.8)
    media = eighths(32, 32)
    net = reward.network
    states = reward.network.state_dict()
    tokens = reward.tokens(TEXTS)
    condition = reward.tokens([reward.condition])
    with torch.no_grad():
        image_states = net.model.visual_projection(
            net.model.vision_model(reward.eyes(media)).last_hidden_state
        )
        expected = torch.stack(
            [
                by_hand(net, states, tokens[i : i + 1], image_states[i], condition, 0.8)
                for i in range(5)
            ]
        )
    expected = net.model.logit_scale.exp() * expected
    assert expected.std() > 0.05
    torch.testing.assert_close(reward(media, asked()), expected, rtol=1e-4, atol=1e-5)


def by_hand(net, states: dict, tokens, image_states, condition, threshold: float) -> torch.Tensor:
    """Cosine of one picture's states [P, E] and one prompt, in plain einsums."""
    words, sentence = (part[0] for part in net.read(tokens))
    condition_states = net.read(condition)[0][0]
    match = torch.einsum("td,cd->tc", words, condition_states).amax(1)
    hidden = match / match.max() <= threshold
    assert 0 < hidden.sum() < len(hidden)
    rotation = torch.outer(
        torch.arange(len(image_states)).float(),
        states["cross_model.layers.0.1.fn.rotary_emb.inv_freq"],
    )
    for i in range(2):
        self_attention, cross = (
            {
                k.split(".fn.")[1]: v
                for k, v in states.items()
                if k.startswith(f"cross_model.layers.{i}.{j}.")
            }
            for j in (1, 0)
        )
        x = nnf.layer_norm(image_states, image_states.shape[-1:]) * cross["norm.weight"]
        key, value = (words @ cross["to_kv.weight"].T).split(64, -1)
        heads = [h @ key.T / 8 for h in (x @ cross["to_q.weight"].T).split(64, -1)]
        mixed = torch.cat(
            [h.masked_fill(hidden, -torch.inf).softmax(-1) @ value for h in heads], -1
        )
        a, b = (x @ cross["ff.0.weight"].T).chunk(2, -1)
        image_states = (
            image_states
            + mixed @ cross["to_out.weight"].T
            + (a * b * b.sigmoid()) @ cross["ff.2.weight"].T
        )
        x = nnf.layer_norm(image_states, image_states.shape[-1:]) * self_attention["norm.weight"]
        fused = (x @ self_attention["fused_attn_ff_proj.weight"].T).split((128, 64, 64, 1024), -1)
        key = turned(fused[1], rotation)
        heads = [
            (turned(h, rotation) @ key.T / 8).softmax(-1) @ fused[2] for h in fused[0].split(64, -1)
        ]
        a, b = fused[3].chunk(2, -1)
        image_states = (
            image_states
            + torch.cat(heads, -1) @ self_attention["attn_out.weight"].T
            + (a * b * b.sigmoid()) @ self_attention["ff_out.1.weight"].T
        )
    return torch.cosine_similarity(image_states[0], sentence, dim=-1)


def turned(vectors: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotary positions as a product of complex numbers."""
    spun = torch.complex(*vectors.chunk(2, -1)) * torch.polar(torch.ones_like(rotation), rotation)
    return torch.cat([spun.real, spun.imag], -1)


def test_mps_says_what_it_cannot_read(tmp_path, folders):
    from transformers import CLIPModel

    torch.save(CLIPModel(clip_config()), tmp_path / "whole.pth")
    with pytest.raises(UserError, match="whole pickled module is not read"):
        REWARDS.build("mps", weights=str(tmp_path / "whole.pth"), clip=folders("mps")["clip"])
    torch.save({"cross_model.layers.0.x": torch.zeros(1)}, tmp_path / "odd.pt")
    with pytest.raises(UserError, match="odd.pt is not an MPS checkpoint"):
        REWARDS.build("mps", weights=str(tmp_path / "odd.pt"), clip=folders("mps")["clip"])


def test_clip_iqa_is_the_softmax_over_both_texts(tmp_path):
    import open_clip

    folder = save_tiny_clip(tmp_path / "clip")
    media = eighths(40, 48)
    network, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    network.eval()
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(
        ["Good photo.", "Bad photo.", "new", "old"]
    )
    with torch.no_grad():
        images, words, temperature = network(
            torch.stack([transform(i) for i in to_pil(media)]), tokens
        )
    logits = temperature * images @ words.T
    expected = (logits[:, :2].softmax(-1)[:, 0] + logits[:, 2:].softmax(-1)[:, 0]) / 2
    scores = ClipIQA(
        ["quality", "new | old"], folder, preprocess="pil", batch_size=2, device="cpu"
    )(media, asked())
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="did you mean 'quality'"):
        ClipIQA(["qualitty"], folder)


def test_clip_scales_have_names(tmp_path):
    folder = save_tiny_clip(tmp_path / "clip")
    media = pictures(5)
    cosine = ClipScore(folder, scale="cosine", device="cpu")(media, asked())
    assert cosine.min() < 0 < cosine.max()
    for scale, expected in (
        (1.0, cosine),
        ("logit", 100 * cosine),
        ("flow_grpo", 100 * cosine / 30),
        ("clipscore", 2.5 * cosine.clamp(min=0)),
    ):
        torch.testing.assert_close(
            ClipScore(folder, scale=scale, device="cpu")(media, asked()), expected
        )
    with pytest.raises(UserError, match="no scale 'flowgrpo'; did you mean 'flow_grpo'"):
        ClipScore(folder, scale="flowgrpo", device="cpu")


def test_dino_similarity_is_the_cosine_of_its_first_token(folders):
    from PIL import Image
    from transformers import BitImageProcessorPil, Dinov2Model

    folder = folders("dino_similarity")["model"]
    media = eighths(40, 36)
    prompts = asked()
    model = Dinov2Model.from_pretrained(folder).eval()
    processor = BitImageProcessorPil.from_pretrained(folder)

    def embed(images):
        with torch.no_grad():
            return model(**processor(images=images, return_tensors="pt")).last_hidden_state

    pair = embed(to_pil(media)), torch.cat([embed([Image.open(p["reference"])]) for p in prompts])
    scores = DinoSimilarity(folder, preprocess="pil", batch_size=2, device="cpu")(media, prompts)
    torch.testing.assert_close(
        scores, torch.cosine_similarity(pair[0][:, 0], pair[1][:, 0]), rtol=1e-5, atol=1e-5
    )
    mean = DinoSimilarity(folder, pool="mean", preprocess="pil", device="cpu")(media, prompts)
    expected = torch.cosine_similarity(pair[0][:, 1:].mean(1), pair[1][:, 1:].mean(1))
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dino_similarity", "clip_similarity"])
def test_a_picture_is_most_like_itself(folders, name):
    media = pictures(3)
    reward = REWARDS.build(name, **folders(name), field="wanted")
    torch.testing.assert_close(
        reward(media, [{"wanted": picture} for picture in media]), torch.ones(3)
    )
    assert (
        reward(media, [{"wanted": [picture]} for picture in media.flip(0)])[[0, 2]] < 0.9999
    ).all()
    for prompt, says in (
        ({}, "found NoneType"),
        ({"wanted": "/no/such.png"}, "cannot read the picture /no/such.png"),
    ):
        with pytest.raises(UserError, match=says):
            reward(media[:1], [prompt])


def test_directional_clip_is_the_cosine_of_the_two_differences(tmp_path):
    folder = save_tiny_clip(tmp_path / "clip")
    media = pictures(5)
    reward = DirectionalClip(folder, device="cpu")
    sources = pictures(5, seed=9)
    prompts = [
        {"source": s, "source_text": TEXTS[0], "text": t}
        for s, t in zip(sources, TEXTS[1:] + ["two"])
    ]
    moved = reward.clip.embed_images(media) - reward.clip.embed_images(sources)
    words = reward.clip.embed_texts([p["text"] for p in prompts]) - reward.clip.embed_texts(
        TEXTS[:1]
    )
    torch.testing.assert_close(reward(media, prompts), torch.cosine_similarity(moved, words))
    assert reward(sources, prompts).abs().max() < 0.01  # nothing moved
    with pytest.raises(UserError, match="needs a 'source_text'"):
        reward(media, [{"source": s, "text": ""} for s in sources])


def test_safety_checker_flags_what_diffusers_flags(folders):
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
    from transformers import CLIPImageProcessorPil

    folder = folders("safety_checker")["model"]
    media = eighths(32, 40, count=24)
    checker = StableDiffusionSafetyChecker.from_pretrained(folder).eval()
    # thresholds between the pictures, so that both verdicts occur
    net = SafetyChecker(folder, device="cpu").checker
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(
        images=to_pil(media), return_tensors="pt"
    ).pixel_values
    with torch.no_grad():
        rows = nnf.normalize(checker.visual_projection(checker.vision_model(pixels)[1]))
        for name, share in (("concept_embeds", 0.97), ("special_care_embeds", 0.8)):
            cosines = rows @ nnf.normalize(getattr(checker, name)).T
            for model in (checker, net):
                getattr(model, name + "_weights").copy_(cosines.quantile(share, dim=0))
        _, flagged = checker(clip_input=pixels, images=[np.zeros((2, 2, 3)) for _ in media])
    assert 0 < sum(flagged) < 24
    reward = SafetyChecker(folder, device="cpu", batch_size=7)
    assert (reward(media, [{}] * 24) < 0).tolist() == flagged
    reward.flag = False
    assert (reward(media, [{}] * 24) < 0).tolist() == flagged


def test_nsfw_penalty_is_the_classifiers_probability(folders):
    from transformers import ViTForImageClassification, ViTImageProcessorPil

    folder = folders("nsfw_penalty")["model"]
    media = eighths(40, 36)
    model = ViTForImageClassification.from_pretrained(folder)
    processor = ViTImageProcessorPil.from_pretrained(folder)
    with torch.no_grad():
        logits = model.eval()(**processor(images=to_pil(media), return_tensors="pt")).logits
    expected = -logits.softmax(-1)[:, 1]
    scores = REWARDS.build("nsfw_penalty", model=folder, device="cpu", batch_size=2)(media, asked())
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="no label 'porn'; it has normal, nsfw"):
        REWARDS.build("nsfw_penalty", model=folder, device="cpu", labels=["porn"])


# Monitors


def test_monitors_are_what_opencv_and_numpy_compute():
    cv2 = pytest.importorskip("cv2")
    media = eighths(24, 30)
    arrays = [np.asarray(image) for image in to_pil(media)]
    greys = [a.astype(np.float64) @ [0.299, 0.587, 0.114] for a in arrays]
    sharp = torch.tensor(
        [cv2.Laplacian(grey, cv2.CV_64F).var() for grey in greys], dtype=torch.float32
    )
    torch.testing.assert_close(
        picture_statistics.sharpness(media, asked()), sharp, rtol=1e-4, atol=1e-2
    )
    spread = torch.tensor([grey.std() / 255 for grey in greys], dtype=torch.float32)
    torch.testing.assert_close(
        picture_statistics.contrast(media, asked()), spread, rtol=1e-4, atol=1e-5
    )
    colour = []
    for a in arrays:
        r, g, b = a.astype(np.float64).transpose(2, 0, 1)
        rg = r - g
        yb = 0.5 * (r + g) - b
        colour.append(np.hypot(rg.std(), yb.std()) + 0.3 * np.hypot(rg.mean(), yb.mean()))
    expected = torch.tensor(np.array(colour), dtype=torch.float32)
    torch.testing.assert_close(
        picture_statistics.colourfulness(media, asked()), expected, rtol=1e-4, atol=1e-3
    )


# All of them


def test_a_missing_model_is_one_sentence(monkeypatch, subtests):
    for name in LOADED:
        with subtests.test(name=name):
            import huggingface_hub.constants

            monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
            with pytest.raises(UserError, match="ownload|no such folder|save the published prompt"):
                REWARDS.build(name)


def test_models_are_shared_and_the_global_rng_left_alone(tmp_path):
    folder = save_hf_clip(tmp_path / "clip")
    state = torch.get_rng_state()
    first, second = (PickScore(folder, None, device="cpu") for _ in range(2))
    assert first.model is second.model and torch.equal(torch.get_rng_state(), state)
    weights, clip = save_mps(tmp_path)
    state = torch.get_rng_state()
    REWARDS.build("mps", weights=weights, clip=clip, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)


def test_iqa_asks_for_its_extra_and_negates_what_should_be_low(monkeypatch):
    """pyiqa is not installed here; a stand-in with its three calls shows what is passed on."""
    monkeypatch.setitem(sys.modules, "pyiqa", None)
    with pytest.raises(UserError, match=r"needs pyiqa: pip install 'multimodal-rl\[iqa\]'"):
        REWARDS.build("iqa")

    class Metric(torch.nn.Module):
        lower_better = True

        def forward(self, pictures):
            assert pictures.min() >= 0 and pictures.max() <= 1
            return pictures.mean((1, 2, 3))[:, None]

    fake = SimpleNamespace(
        list_models=lambda metric_mode: ["niqe"], create_metric=lambda name, device: Metric()
    )
    monkeypatch.setitem(sys.modules, "pyiqa", fake)
    media = pictures(4)
    scores = REWARDS.build("iqa", metric="niqe", scale=2.0, batch_size=3, device="cpu")(
        media, [{}] * 4
    )
    torch.testing.assert_close(scores, -2 * media.mean((1, 2, 3)))
    with pytest.raises(UserError, match="did you mean 'niqe'"):
        REWARDS.build("iqa", metric="nique")

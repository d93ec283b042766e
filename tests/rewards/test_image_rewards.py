"""Image and text-image rewards against the libraries that define them, on tiny random models of the
same classes."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as nnf

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from rewards import (
    ClipIQA,
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
    save_image_reward,
)
from tests.fixtures.tiny_rewards import TEXTS, asked, pictures, save_tiny_clip

# those name their models themselves
# heads have no own model that could be missing: test_embedding.py
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


def test_pickscore_is_clips_logit_by_its_own_processor(folders):
    from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    folder = folders("pickscore")["model"]
    media = eighths(20, 61)
    model = CLIPModel.from_pretrained(folder).eval()
    images = CLIPImageProcessorPil.from_pretrained(folder)(to_pil(media), return_tensors="pt")
    options = {"padding": "max_length", "truncation": True, "max_length": 77}
    words = CLIPTokenizer.from_pretrained(folder)(TEXTS, return_tensors="pt", **options)
    with torch.no_grad():
        logits = model(**images, **words).logits_per_image.diagonal()
    assert logits.std() > 0.1
    cosine = logits / model.logit_scale.exp()
    for scale, expected in (
        ("logit", logits),
        ("flow_grpo", logits / 26),
        ("mixgrpo", (logits - 18) / 8),
        (0.5, logits / 2),
        ("cosine", cosine),
    ):
        scores = PickScore(folder, None, scale=scale, batch_size=2, device="cpu")(media, asked())
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    tensor = PickScore(folder, None, scale="cosine", preprocess="tensor", device="cpu")
    torch.testing.assert_close(tensor(media, asked()), cosine, rtol=0, atol=0.02)


def test_hpsv2_brings_the_longer_side_to_the_model_and_fills_with_black(tmp_path):
    import open_clip

    folder = save_tiny_clip(tmp_path / "clip")
    media = eighths(20, 61)
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
    scores = HPSv2(model=folder, device="cpu")(media, asked())
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    percent = HPSv2(model=folder, scale="percent", preprocess="tensor", device="cpu")
    torch.testing.assert_close(percent(media, asked()), 100 * expected, rtol=0, atol=1.0)


def test_image_reward_is_blip_by_timm_and_bert(folders):
    """The published names on timm's vision transformer and a BERT with cross-attention that sees
    both ways."""
    options = folders("image_reward")
    vision, config, head = image_reward_parts()
    reward = ImageReward(**options)
    media = eighths(32, 32)
    tokens = reward.tokenizer(TEXTS, padding="max_length", max_length=35, return_tensors="pt")
    both_ways = tokens.attention_mask[:, None, None].expand(-1, 1, 35, -1)
    hidden = both_ways == 0
    with torch.no_grad():
        read = image_reward_text(config, vision.embed_dim)(
            input_ids=tokens.input_ids,
            attention_mask=torch.zeros(hidden.shape).masked_fill(hidden, -3e38),
            encoder_hidden_states=vision.forward_features(reward.pixels(media)),
            use_cache=False,
        )
        expected = (head(read.last_hidden_state[:, 0]).squeeze(-1) - MEAN) / STD
    assert expected.std() > 0.1
    torch.testing.assert_close(reward(media, asked()), expected, rtol=1e-5, atol=1e-5)
    half = ImageReward(**options, scale="unirl", batch_size=2)(media, asked())
    torch.testing.assert_close(half, (expected + 2) / 4, rtol=1e-5, atol=1e-5)


def test_image_reward_preprocessing_is_torchvisions(folders):
    from torchvision import transforms as of

    media = eighths(48, 40)
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    steps = [of.Resize(32, of.InterpolationMode.BICUBIC), of.CenterCrop(32)]
    transform = of.Compose([*steps, of.ToTensor(), of.Normalize(mean, std)])
    expected = torch.stack([transform(image) for image in to_pil(media)])
    exact, smooth = (
        ImageReward(**folders("image_reward"), preprocess=p).pixels for p in ("pil", "tensor")
    )
    torch.testing.assert_close(exact(media), expected)
    # no overshoot of the bicubic kernel, which PIL cuts off after each of its two passes
    dull = 0.3 + 0.4 * media
    assert (smooth(dull) - exact(dull)).abs().max() < 1.5 / 255 / 0.26


def test_a_foreign_checkpoint_is_named(tmp_path, folders, subtests):
    from transformers import CLIPModel

    def saved(name, content):
        torch.save(content, tmp_path / name)
        return str(tmp_path / name)

    tensors = save_image_reward(tmp_path / "whole.pt")
    short = {k: v for k, v in tensors.items() if "blocks.1" not in k or "qkv" not in k}
    image_reward = folders("image_reward")
    mps = folders("mps")
    for name, options, weights, says in (
        ("image_reward", image_reward, "/no/such.pt", "no ImageReward checkpoint at /no/such"),
        ("image_reward", image_reward, saved("odd.pt", {"x": torch.zeros(1)}), "is not an ImageRe"),
        ("image_reward", image_reward, saved("short.pt", short), "not an ImageReward checkpoint"),
        ("mps", mps, saved("a.pt", {"cross_model.layers.0.x": torch.zeros(1)}), "not an MPS check"),
        ("mps", mps, saved("b.pt", CLIPModel(clip_config())), "whole pickled module is not read"),
    ):
        with subtests.test(says=says), pytest.raises(UserError, match=says):
            REWARDS.build(name, **options | {"weights": weights})


def test_mps_reads_the_prompt_as_published(folders):
    """Against the layers written out head by head and pair by pair."""
    reward = REWARDS.build("mps", **folders("mps"), threshold=0.8)
    media = eighths(32, 32)
    net = reward.network
    tokens = reward.tokens(TEXTS)
    condition = reward.tokens([reward.condition])
    with torch.no_grad():
        seen = net.model.vision_model(reward.eyes(media)).last_hidden_state
        states = net.model.visual_projection(seen)
        rows = [by_hand(net, tokens[i : i + 1], states[i], condition, 0.8) for i in range(5)]
    expected = net.model.logit_scale.exp() * torch.stack(rows)
    assert expected.std() > 0.05
    torch.testing.assert_close(reward(media, asked()), expected, rtol=1e-4, atol=1e-5)


def by_hand(net, tokens, image_states, condition, threshold: float) -> torch.Tensor:
    """Cosine of one picture's states [P, E] and one prompt, in plain einsums."""
    states = net.state_dict()
    words, sentence = (part[0] for part in net.read(tokens))
    match = torch.einsum("td,cd->tc", words, net.read(condition)[0][0]).amax(1)
    hidden = match / match.max() <= threshold
    assert 0 < hidden.sum() < len(hidden)
    frequencies = states["cross_model.layers.0.1.fn.rotary_emb.inv_freq"]
    rotation = torch.outer(torch.arange(len(image_states)).float(), frequencies)

    def normed(x, weights):
        return nnf.layer_norm(x, x.shape[-1:]) * weights["norm.weight"]

    for i in range(2):
        self_attention, cross = (
            {
                k.split(".fn.")[1]: v
                for k, v in states.items()
                if k.startswith(f"cross_model.layers.{i}.{j}.")
            }
            for j in (1, 0)
        )
        x = normed(image_states, cross)
        key, value = (words @ cross["to_kv.weight"].T).split(64, -1)
        heads = [h @ key.T / 8 for h in (x @ cross["to_q.weight"].T).split(64, -1)]
        heads = [h.masked_fill(hidden, -torch.inf).softmax(-1) @ value for h in heads]
        a, b = (x @ cross["ff.0.weight"].T).chunk(2, -1)
        image_states = image_states + torch.cat(heads, -1) @ cross["to_out.weight"].T
        image_states = image_states + (a * b * b.sigmoid()) @ cross["ff.2.weight"].T
        x = normed(image_states, self_attention)
        fused = (x @ self_attention["fused_attn_ff_proj.weight"].T).split((128, 64, 64, 1024), -1)
        key = turned(fused[1], rotation)
        heads = [turned(h, rotation) @ key.T / 8 for h in fused[0].split(64, -1)]
        heads = [h.softmax(-1) @ fused[2] for h in heads]
        a, b = fused[3].chunk(2, -1)
        image_states = image_states + torch.cat(heads, -1) @ self_attention["attn_out.weight"].T
        image_states = image_states + (a * b * b.sigmoid()) @ self_attention["ff_out.1.weight"].T
    return torch.cosine_similarity(image_states[0], sentence, dim=-1)


def turned(vectors: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotary positions as a product of complex numbers."""
    spun = torch.complex(*vectors.chunk(2, -1)) * torch.polar(torch.ones_like(rotation), rotation)
    return torch.cat([spun.real, spun.imag], -1)


def test_clip_iqa_is_the_softmax_over_both_texts(tmp_path):
    import open_clip

    folder = save_tiny_clip(tmp_path / "clip")
    media = eighths(40, 48)
    network, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    texts = ["Good photo.", "Bad photo.", "new", "old"]
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(texts)
    images = torch.stack([transform(image) for image in to_pil(media)])
    with torch.no_grad():
        images, words, temperature = network.eval()(images, tokens)
    logits = temperature * images @ words.T
    expected = (logits[:, :2].softmax(-1)[:, 0] + logits[:, 2:].softmax(-1)[:, 0]) / 2
    reward = ClipIQA(["quality", "new | old"], folder, preprocess="pil", device="cpu")
    torch.testing.assert_close(reward(media, asked()), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="did you mean 'quality'"):
        ClipIQA(["qualitty"], folder)


def test_dino_similarity_is_the_cosine_of_its_first_token(folders):
    from transformers import BitImageProcessorPil, Dinov2Model

    folder = folders("dino_similarity")["model"]
    media, prompts = eighths(40, 36), asked()
    model = Dinov2Model.from_pretrained(folder).eval()
    processor = BitImageProcessorPil.from_pretrained(folder)

    def embed(images):
        with torch.no_grad():
            return model(**processor(images=images, return_tensors="pt")).last_hidden_state

    pair = embed(to_pil(media)), torch.cat([embed([Image.open(p["reference"])]) for p in prompts])
    first = torch.cosine_similarity(pair[0][:, 0], pair[1][:, 0])
    mean = torch.cosine_similarity(pair[0][:, 1:].mean(1), pair[1][:, 1:].mean(1))
    for options, expected in (({}, first), ({"pool": "mean"}, mean)):
        reward = DinoSimilarity(folder, preprocess="pil", batch_size=2, device="cpu", **options)
        torch.testing.assert_close(reward(media, prompts), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dino_similarity", "clip_similarity"])
def test_a_picture_is_most_like_itself(folders, name):
    media = pictures(3)
    reward = REWARDS.build(name, **folders(name), field="wanted")
    same = reward(media, [{"wanted": picture} for picture in media])
    torch.testing.assert_close(same, torch.ones(3))
    turned = reward(media, [{"wanted": [picture]} for picture in media.flip(0)])
    assert (turned[[0, 2]] < 0.9999).all()
    with pytest.raises(UserError, match="found NoneType"):
        reward(media[:1], [{}])
    with pytest.raises(UserError, match="cannot read the picture /no/such.png"):
        reward(media[:1], [{"wanted": "/no/such.png"}])


def test_directional_clip_is_the_cosine_of_the_two_differences(tmp_path):
    media, sources = pictures(5), pictures(5, seed=9)
    reward = DirectionalClip(save_tiny_clip(tmp_path / "clip"), device="cpu")
    texts = [*TEXTS[1:], "two"]
    fields = [{"source": source, "source_text": TEXTS[0]} for source in sources]
    prompts = [{**field, "text": text} for field, text in zip(fields, texts, strict=True)]
    moved = reward.clip.embed_images(media) - reward.clip.embed_images(sources)
    words = reward.clip.embed_texts(texts) - reward.clip.embed_texts(TEXTS[:1])
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
    reward = SafetyChecker(folder, device="cpu", batch_size=7)
    processor = CLIPImageProcessorPil.from_pretrained(folder)
    pixels = processor(images=to_pil(media), return_tensors="pt").pixel_values
    with torch.no_grad():
        rows = nnf.normalize(checker.visual_projection(checker.vision_model(pixels)[1]))
        # thresholds between the pictures, so that both verdicts occur
        for name, share in (("concept_embeds", 0.97), ("special_care_embeds", 0.8)):
            cosines = rows @ nnf.normalize(getattr(checker, name)).T
            for model in (checker, reward.checker):
                getattr(model, name + "_weights").copy_(cosines.quantile(share, dim=0))
        _, flagged = checker(clip_input=pixels, images=[np.zeros((2, 2, 3)) for _ in media])
    assert 0 < sum(flagged) < 24
    assert (reward(media, [{}] * 24) < 0).tolist() == flagged
    reward.flag = False
    assert (reward(media, [{}] * 24) < 0).tolist() == flagged


def test_nsfw_penalty_is_the_classifiers_probability(folders):
    from transformers import ViTForImageClassification, ViTImageProcessorPil

    options = folders("nsfw_penalty")
    media = eighths(40, 36)
    model = ViTForImageClassification.from_pretrained(options["model"]).eval()
    inputs = ViTImageProcessorPil.from_pretrained(options["model"])(to_pil(media))
    with torch.no_grad():
        expected = -model(torch.tensor(np.stack(inputs["pixel_values"]))).logits.softmax(-1)[:, 1]
    scores = REWARDS.build("nsfw_penalty", **options, batch_size=2)(media, asked())
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="no label 'porn'; it has normal, nsfw"):
        REWARDS.build("nsfw_penalty", **options, labels=["porn"])


# Monitors


def test_monitors_are_what_opencv_and_numpy_compute():
    cv2 = pytest.importorskip("cv2")
    media = eighths(24, 30)
    rows = []
    for image in to_pil(media):
        r, g, b = np.asarray(image).astype(np.float64).transpose(2, 0, 1)
        grey = 0.299 * r + 0.587 * g + 0.114 * b
        rg, yb = r - g, 0.5 * (r + g) - b
        colour = np.hypot(rg.std(), yb.std()) + 0.3 * np.hypot(rg.mean(), yb.mean())
        rows.append((cv2.Laplacian(grey, cv2.CV_64F).var(), grey.std() / 255, colour))
    sharp, spread, colour = torch.tensor(np.array(rows), dtype=torch.float32).T
    for reward, expected, atol in (
        (picture_statistics.sharpness, sharp, 1e-2),
        (picture_statistics.contrast, spread, 1e-5),
        (picture_statistics.colourfulness, colour, 1e-3),
    ):
        torch.testing.assert_close(reward(media, asked()), expected, rtol=1e-4, atol=atol)


# All of them


def test_a_missing_model_is_one_sentence(monkeypatch, subtests):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    says = "ownload|no such folder|save the published prompt"
    for name in LOADED:
        with subtests.test(name=name), pytest.raises(UserError, match=says):
            REWARDS.build(name)


def test_models_are_shared_and_the_global_rng_left_alone(folders):
    mps, folder = folders("mps"), folders("pickscore")["model"]
    state = torch.get_rng_state()
    first, second = (PickScore(folder, None, device="cpu") for _ in range(2))
    REWARDS.build("mps", **mps)
    assert first.model is second.model and torch.equal(torch.get_rng_state(), state)


def test_extras_are_asked_for(monkeypatch):
    for name, module, extra in (("iqa", "pyiqa", "iqa"), ("ocr", "rapidocr_onnxruntime", "ocr")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UserError, match=rf"pip install 'multimodal-rl\[{extra}\]'"):
            REWARDS.build(name)

"""Heads on frozen embeddings: any file of linear layers, ensembles, aspects, and fitting them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mmrl.core.errors import UserError
from mmrl.scoring import Scorer
from rewards import fitted_head
from rewards.base.clip import load_clip
from rewards.card import card_of
from rewards.heads.fit import Recipe, fit_preferences, fit_ratings
from rewards.heads.head import load_head
from tests.fixtures.command import mmrl, refused
from tests.fixtures.tiny_rewards import TINY, pictures, save_tiny_clip

WIDTH = TINY["embed_dim"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    return save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny")


def linear(path: Path, seed: int, inputs: int = WIDTH, outputs: int = 1) -> str:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "weight": torch.randn(outputs, inputs, generator=generator),
        "bias": torch.randn(outputs, generator=generator),
    }
    save_file(tensors, path)
    return str(path)


def test_heads_are_their_loops(clip, tmp_path):
    files = [linear(tmp_path / f"{i}.safetensors", i, outputs=2) for i in range(3)]
    images = load_clip(clip, "", "cpu").embed_images(pictures(4)).double()
    weights = [0.25, 2.0]
    scores = []
    for file in files:
        head = load_head(file)
        rows = []
        for x in images.tolist():
            total = 0.0
            for k, weight in enumerate(weights):
                row = head.layers[0].weight[k].double().tolist()
                total += weight * (
                    sum(a * b for a, b in zip(row, x, strict=True)) + float(head.layers[0].bias[k])
                )
            rows.append(total)
        scores.append(rows)
    for how in ("mean", "worst", "uncertainty"):
        reward = fitted_head(files, clip, weights=weights, how=how, penalty=0.5, device="cpu")
        values = reward(pictures(4), [{}] * 4).tolist()
        for row, value in enumerate(values):
            column = [rows[row] for rows in scores]
            mean = sum(column) / 3
            spread = sum((x - mean) ** 2 for x in column) / 3
            expected = {"mean": mean, "worst": min(column), "uncertainty": mean - 0.5 * spread}[how]
            assert value == pytest.approx(expected, abs=2e-5)


def test_pictures_and_texts_are_joined(clip, tmp_path):
    file = linear(tmp_path / "h.safetensors", 0, 3 * WIDTH)
    reward = fitted_head(file, clip, features="media_and_text", device="cpu")
    prompts = [{"text": "a red cube"}, {"text": "a dog"}]
    model = load_clip(clip, "", "cpu")
    x = model.embed_images(pictures(2))
    y = model.embed_texts([p["text"] for p in prompts])
    expected = load_head(file)(torch.cat([x, y, x * y], 1))[:, 0]
    torch.testing.assert_close(reward(pictures(2), prompts), expected)
    assert card_of(reward).needs == ("text",)


def test_any_chain_of_linear_layers_is_read(tmp_path):
    """Layers are put in order by their numbers, tenth after second."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"net.2": (4, WIDTH), "net.10": (3, 4), "net.11": (1, 3)}
    tensors = {f"{n}.weight": torch.randn(s, generator=generator) for n, s in shapes.items()}
    tensors["net.10.bias"] = torch.randn(3, generator=generator)
    torch.save({"state_dict": tensors}, tmp_path / "any.pth")
    head = load_head(str(tmp_path / "any.pth"), "relu")
    x = torch.randn(5, WIDTH, generator=generator)
    hidden = (x @ tensors["net.2.weight"].T).relu() @ tensors["net.10.weight"].T
    expected = (hidden + tensors["net.10.bias"]).relu() @ tensors["net.11.weight"].T
    torch.testing.assert_close(head(x), expected)


def test_what_is_no_head_is_refused(clip, tmp_path):
    save_file(
        {"a.weight": torch.zeros(3, 4), "b.weight": torch.zeros(1, 5)}, tmp_path / "x.safetensors"
    )
    with pytest.raises(UserError, match="no chain of linear layers"):
        load_head(str(tmp_path / "x.safetensors"))
    with pytest.raises(UserError, match=r"no head checkpoint at nowhere.pth"):
        load_head("nowhere.pth")
    narrow = linear(tmp_path / "n.safetensors", 0, 3)
    fitting = linear(tmp_path / "f.safetensors", 0)
    with pytest.raises(UserError, match="take embeddings of 3 numbers"):
        fitted_head(narrow, clip, device="cpu")
    for options, says in (
        ({"path": [fitting, narrow], "model": clip}, "the heads differ"),
        ({"path": [], "model": clip}, "is empty"),
        ({"path": fitting, "model": clip, "weights": [1.0, 2.0]}, "2 weights for heads of 1"),
        ({"path": fitting, "model": "./nowhere"}, "no such folder"),
        ({"path": fitting}, "files of heads need `model`"),
        (
            {"path": fitting, "model": "x", "kind": "text", "features": "media_and_text"},
            "needs clip",
        ),
    ):
        with pytest.raises(UserError, match=says):
            fitted_head(**options, device="cpu")


def planted(rows=400, width=8, seed=0):
    """Pairs whose order a hidden direction decides, with Bradley-Terry's noise."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(width, generator=generator) * 2
    pairs = torch.randn(2, rows, width, generator=generator)
    first = torch.rand(rows, generator=generator) < ((pairs[0] - pairs[1]) @ direction).sigmoid()
    chosen = torch.where(first[:, None], pairs[0], pairs[1])
    return chosen, torch.where(first[:, None], pairs[1], pairs[0]), direction


def test_preferences_are_learnt_and_ensembles_differ():
    chosen, rejected, direction = planted()
    recipe = Recipe(count=3, steps=150, learning_rate=0.05)
    heads = fit_preferences(chosen[:300], rejected[:300], recipe)
    gaps = torch.stack([head(chosen[300:]) - head(rejected[300:]) for head in heads]).mean(0)
    assert float((gaps > 0).double().mean()) > 0.85
    slope = heads[0].layers[0].weight[0] / heads[0].std
    assert float(torch.cosine_similarity(slope, direction, dim=0)) > 0.95
    assert not torch.equal(heads[0].layers[0].weight, heads[1].layers[0].weight)
    state = torch.get_rng_state()
    again = fit_preferences(chosen[:300], rejected[:300], recipe)
    assert torch.equal(again[1].layers[0].weight, heads[1].layers[0].weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_several_ratings_are_learnt_where_they_are_known():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=generator)
    truth = torch.stack([x[:, 0] + 1, x[:, 1] - x[:, 2]], 1)
    holes = truth.clone()
    holes[::3, 1] = math.nan
    (head,) = fit_ratings(x, holes, Recipe(steps=400, learning_rate=0.05, weight_decay=0.0))
    assert float((head(x) - truth).abs().max()) < 0.05 and head.outputs == 2


def test_the_program_fits_heads_that_the_reward_reads(clip, tmp_path):
    """Bright pictures are preferred; heads fitted to a file know it of others."""
    rows = []
    for i in range(24):
        for name, level in (("bright", 150 + 4 * i), ("dark", 4 * i)):
            Image.new("RGB", (8, 8), (level, level, level)).save(tmp_path / f"{name}{i}.png")
        rows.append({"text": f"x{i}", "chosen": f"bright{i}.png", "rejected": f"dark{i}.png"})
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    out = tmp_path / "heads"
    words = ("fit-head", data, "--clip", clip, "--device", "cpu")
    done = mmrl(*words, "--out", out, "--count", 2, "--hidden", 4, cwd=tmp_path)
    assert "accuracy on 5 held-out rows (5 groups): 1.000" in done.stdout
    reward = fitted_head(str(out), how="worst", device="cpu")
    assert len(reward.heads) == 2
    greys = torch.tensor([0.1, 0.9]).view(2, 1, 1, 1).expand(2, 3, 8, 8)
    scores = Scorer({"taste": reward})(greys, [{"text": "x"}] * 2)["taste"]
    assert scores[1] > scores[0]


def test_answers_of_several_aspects_are_fitted_and_scored(tmp_path):
    """Words of length and of number, rated; a rating may be missing."""
    from tests.fixtures.tiny_text_encoder import save_text_encoder

    model = save_text_encoder(tmp_path / "encoder")
    words = ["a", "b", "cat", "dog", "two", "dogs", "is", "it", "what", "x", "y", "z"]
    rows = [
        {"text": f"question {i}", "sample": word, "ratings": {"length": len(word), "place": i}}
        for i, word in enumerate(words)
    ]
    del rows[3]["ratings"]["place"]
    data = tmp_path / "rated.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    words = ("fit-head", data, "--text-model", model, "--device", "cpu", "--pool", "last")
    done = mmrl(*words, "--out", tmp_path / "head", cwd=tmp_path)
    assert "correlation of length" in done.stdout and "correlation of place" in done.stdout
    reward = fitted_head(str(tmp_path / "head"), weights=[1.0, 0.0], device="cpu")
    assert card_of(reward).media == ("text",) and reward.encoder.pool == "last"
    embeddings = reward.encoder(["cat"], [{"text": "q"}])
    expected = reward.heads[0](embeddings)[:, 0]
    torch.testing.assert_close(reward(["cat"], [{"text": "q"}]), expected)
    data.write_text('{"text": "x"}')
    assert "expected picture or image" in refused(*words, "--out", "new", cwd=tmp_path)


def test_answers_are_embedded_with_their_prompts(tmp_path):
    from tests.fixtures.tiny_text_encoder import save_text_encoder

    model = save_text_encoder(tmp_path / "encoder")
    file = linear(tmp_path / "h.safetensors", 0, 8)
    for pool in ("mean", "last"):
        reward = fitted_head(file, model, "text", pool=pool, device="cpu")
        texts = ["a cat", "two dogs", "a cat"]
        prompts = [{"text": "what is it"}] * 2 + [{"text": "a dog"}]
        values = reward(texts, prompts)
        assert len(set(values.tolist())) == 3  # the prompt is read too
        alone = torch.cat([reward([t], [p]) for t, p in zip(texts, prompts, strict=True)])
        torch.testing.assert_close(values, alone)
    assert card_of(reward).media == ("text",)
    with pytest.raises(UserError, match="images and videos need a head on"):
        reward(pictures(1), [{}])

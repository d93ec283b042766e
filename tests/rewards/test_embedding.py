"""Heads on frozen embeddings: files of linear layers, ensembles, aspects, and `mmrl fit-head`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from mmrl.core.errors import UserError
from rewards import fitted_head
from rewards.base.clip import load_clip
from rewards.card import card_of
from rewards.heads import fit as fitting
from rewards.heads.fit import Recipe, fit_preferences
from rewards.heads.head import load_head
from rewards.heads.ratings import connected, read_ratings
from tests.fixtures.command import mmrl, refused
from tests.fixtures.tiny_image_rewards import save_dino
from tests.fixtures.tiny_rewards import TINY, pictures, save_tiny_clip
from tests.fixtures.tiny_text_encoder import save_text_encoder

WIDTH = TINY["embed_dim"]
COUNT = 40


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    return save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny")


@pytest.fixture(scope="module")
def greys(tmp_path_factory) -> Path:
    """Flat pictures, rated by their brightness, alone and in pairs."""
    folder = tmp_path_factory.mktemp("greys")
    levels = np.random.default_rng(0).permutation(COUNT) * 6
    for i, level in enumerate(levels.tolist()):
        Image.new("RGB", (8, 8), (level, level, level)).save(folder / f"{i}.png")
    rows = [f"{i}.png,{level}" for i, level in enumerate(levels)]
    (folder / "rated.csv").write_text("picture,score\n" + "\n".join(rows) + "\n")
    order = [sorted((i, i + 1), key=lambda j: -levels[j]) for i in range(0, COUNT, 2)]
    pairs = [{"text": f"x{a}", "chosen": f"{a}.png", "rejected": f"{b}.png"} for a, b in order]
    tie = {"prompt": "", "chosen": None, "rejected": None, "tie": True}
    tie["answers"] = [{"image": f"{i}.png", "reward": 0.0} for i in (0, 1)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, [*pairs, tie])) + "\n")
    return folder


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
        (layer,) = load_head(file).layers
        outputs = images @ layer.weight.double().T + layer.bias.double()
        scores.append([sum(w * x for w, x in zip(weights, row)) for row in outputs.tolist()])
    for how in ("mean", "worst", "uncertainty"):
        reward = fitted_head(files, clip, weights=weights, how=how, penalty=0.5, device="cpu")
        values = reward(pictures(4), [{}] * 4).tolist()
        for column, value in zip(zip(*scores), values, strict=True):
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


def test_what_is_no_head_is_refused(clip, tmp_path, subtests):
    odd = {"a.weight": torch.zeros(3, 4), "b.weight": torch.zeros(1, 5)}
    save_file(odd, tmp_path / "x.safetensors")
    narrow = linear(tmp_path / "n.safetensors", 0, 3)
    file = linear(tmp_path / "f.safetensors", 0)
    both = {"kind": "text", "features": "media_and_text"}
    for path, options, says in (
        (str(tmp_path / "x.safetensors"), {"model": clip}, "no chain of linear layers"),
        ("nowhere.pth", {"model": clip}, "no head checkpoint at nowhere.pth"),
        (narrow, {"model": clip}, "take embeddings of 3 numbers"),
        ([file, narrow], {"model": clip}, "the heads differ"),
        ([], {"model": clip}, "is empty"),
        (file, {"model": clip, "weights": [1.0, 2.0]}, "2 weights for heads of 1"),
        (file, {"model": "./nowhere"}, "no such folder"),
        (file, {}, "files of heads need `model`"),
        (file, {"model": "x"} | both, "needs clip"),
    ):
        with subtests.test(says=says), pytest.raises(UserError, match=says):
            fitted_head(path, **options, device="cpu")


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
    again = fit_preferences(chosen[:300], rejected[:300], recipe)
    assert torch.equal(again[1].layers[0].weight, heads[1].layers[0].weight)


@pytest.mark.parametrize(
    ("data", "options"), [("rated.csv", ()), ("pairs.jsonl", ("--count", 2, "--hidden", 4))]
)
def test_the_program_fits_heads_that_the_reward_reads(data, options, greys, clip, tmp_path):
    words = ("fit-head", greys / data, "--clip", clip, "--out", "head", "--device", "cpu")
    done = mmrl(*words, *options, cwd=tmp_path)
    about = json.loads((tmp_path / "head" / "head.json").read_text())
    (held,) = about["held_out"]
    assert held["value"] > 0.85 and held["low"] <= held["value"] <= held["high"]
    assert f"{held['value']:.3f} [{held['low']:.3f}" in done.stdout
    assert about["fitted_to"] == data.split(".")[0].replace("rated", "ratings")
    reward = fitted_head(str(tmp_path / "head"), how="worst", device="cpu")
    assert len(reward.heads) == (2 if options else 1)
    levels = torch.tensor([0.1, 0.9]).view(2, 1, 1, 1).expand(2, 3, 32, 32)
    dark, bright = reward(levels, [{"text": "x"}] * 2)
    assert bright > dark


def test_answers_of_several_aspects_are_fitted_and_scored(tmp_path):
    """Words of length and of number, rated; a rating may be missing."""
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


def test_features_of_transformers_and_gradients(greys, tmp_path):
    model = save_dino(tmp_path / "model")
    words = ("fit-head", greys / "rated.csv", "--vision", model, "--out", "head", "--device", "cpu")
    mmrl(*words, cwd=tmp_path)
    reward = fitted_head(str(tmp_path / "head"), scale=2.0, device="cpu")
    media = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    media.requires_grad_()
    scores = reward(media, [{}] * 3)
    (gradient,) = torch.autograd.grad(scores.sum(), media)
    # a step along the gradient raises the score: it is that of the score
    step = 1e-3 * gradient / gradient.norm()
    raised = reward(media.detach() + step, [{}] * 3).sum() - scores.sum()
    assert float(raised) == pytest.approx(1e-3 * float(gradient.norm()), rel=0.1) != 0


def test_ridge_and_logistic_are_at_their_minimum():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 4, generator=generator).double()
    targets = (torch.rand(30, generator=generator) > 0.4).double()
    entropy = torch.nn.functional.binary_cross_entropy_with_logits
    losses = {
        fitting.ridge: lambda w: (rows @ w - targets).square().mean() + 0.5 * w @ w / 4,
        fitting.logistic: lambda w: entropy(rows @ w, targets) + 0.5 * w @ w / 8,
    }
    for solve, loss in losses.items():
        weights = solve(rows, targets, 0.5).requires_grad_()
        (gradient,) = torch.autograd.grad(loss(weights), weights)
        assert gradient.abs().max() < 1e-4


def test_rows_that_share_a_picture_or_a_prompt_are_held_out_together():
    keys = [["a", "b"], ["c"], ["b", "d"], ["e"], ["d", "e"], ["f"]]
    groups = connected(keys)
    assert [groups.tolist().index(g) for g in groups.tolist()] == [0, 1, 0, 0, 0, 5]
    many = torch.arange(40) // 2
    train, test = fitting.split(many, fitting.Recipe(held_out=0.25))
    assert not set(many[train].tolist()) & set(many[test].tolist()) and len(test) == 10
    with pytest.raises(UserError, match="10 groups are needed"):
        fitting.split(torch.arange(40) // 8, fitting.Recipe())


def test_mistakes_in_the_data_are_named_by_row(greys, subtests):
    both = '{"picture": "0.png", "score": 1}\n{"chosen": "0.png", "rejected": "1.png"}'
    for name, text, message in [
        ("a.csv", "picture,score\n0.png,high\n", "a.csv:2: score 'high' is no number"),
        ("a.csv", "picture,score\n0.png,nan\n", "score 'nan' is no number"),
        ("a.csv", "name,value\n0.png,1\n", "a.csv:2: expected picture or image"),
        ("a.csv", "picture,score\nmissing.png,1\n", "a.csv:2: no picture"),
        ("a.csv", "picture,score\n0.png,1\n1.png,1\n", "every picture has the score 1"),
        ("a.csv", "", "no rows"),
        ("a.jsonl", "{", "a.jsonl:1 is not JSON"),
        ("a.jsonl", "[1]", "a.jsonl:1: expected an object"),
        ("a.jsonl", '{"chosen": "a long answer", "rejected": "b"}', "no picture"),
        ("a.jsonl", '{"chosen": null, "rejected": null}', "a pair names two files"),
        ("a.jsonl", both, "a.jsonl:2: pairs and ratings in one file"),
        ("a.txt", "", "give a .csv or .jsonl file"),
    ]:
        (greys / name).write_text(text)
        with subtests.test(text=text), pytest.raises(UserError, match=message):
            read_ratings(greys / name)


def test_what_cannot_be_used_is_said_before_a_model_is_loaded(greys, tmp_path):
    few = tmp_path / "few.csv"
    few.write_text(f"picture,score\n{greys}/0.png,1\n{greys}/1.png,2\n")
    for words, says in (
        (("--clip", "no such model"), "10 groups are needed"),
        (("--clip", "a", "--vision", "b"), "--text-model: give one"),
    ):
        assert says in " ".join(refused("fit-head", few, *words, cwd=tmp_path).split())
    for content, says in (
        (None, "`mmrl fit-head DATA --out FOLDER` writes one"),
        ("{", "not JSON"),
        ('{"kind": "os"}', "names no model"),
    ):
        if content:
            (tmp_path / "head.json").write_text(content)
        with pytest.raises(UserError, match=says):
            fitted_head(str(tmp_path))

"""`mmrl fit-head` and the reward that uses it, on the digits' scans and tiny random models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from mmrl.core.errors import UserError
from rewards import fitted_head
from rewards.heads import fit as fitting
from rewards.heads.ratings import connected, load_frames, read_ratings
from tests.fixtures.command import mmrl, refused
from tests.fixtures.tiny_image_rewards import save_dino, save_hf_clip
from tests.fixtures.tiny_rewards import save_tiny_clip

COUNT = 80


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Pictures of scanned digits in inks from dark to bright: what is rated is the brightness."""
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("scans")
    rng = np.random.default_rng(0)
    inks = np.linspace(0.2, 1.0, COUNT)[rng.permutation(COUNT)]
    images = load_digits().images[:COUNT] / 16
    for i, (image, ink) in enumerate(zip(images, inks, strict=True)):
        pixels = np.uint8(255 * ink * np.kron(image, np.ones((4, 4))))
        Image.fromarray(pixels).convert("RGB").save(folder / f"{i}.png")
    rows = [f"{i}.png,{10 * ink + 0.3 * rng.normal():.3f}" for i, ink in enumerate(inks)]
    (folder / "rated.csv").write_text("picture,score\n" + "\n".join(rows) + "\n")
    pairs = []
    for i in range(0, COUNT, 2):  # each picture in one pair
        order = [i, i + 1] if inks[i] > inks[i + 1] else [i + 1, i]
        names = [f"{j}.png" for j in order]
        tie = bool(abs(inks[i] - inks[i + 1]) < 0.05)
        answers = [{"image": name, "reward": 0.0} for name in names]
        sides = [None, None] if tie else names
        pairs.append(
            {"prompt": "", "answers": answers, "chosen": sides[0], "rejected": sides[1], "tie": tie}
        )
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)) + "\n")
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny")


def brightness(reward):
    """The scores of flat pictures from dark to bright."""
    levels = torch.linspace(0.1, 0.9, 5).view(5, 1, 1, 1).expand(5, 3, 32, 32)
    return reward(levels, [{}] * 5)


@pytest.mark.parametrize("hidden", [(), ("--hidden", 16)], ids=["linear", "network"])
@pytest.mark.parametrize("data", ["rated.csv", "pairs.jsonl"])
def test_a_head_learns_what_is_rated(data, hidden, scans, clip, tmp_path):
    words = ("fit-head", scans / data, "--clip", clip, "--out", "head", "--device", "cpu", *hidden)
    done = mmrl(*words, cwd=tmp_path)
    about = json.loads((tmp_path / "head" / "head.json").read_text())
    (held,) = about["held_out"]
    assert held["value"] > 0.85 and held["low"] < held["value"] <= held["high"]
    assert held["low"] > 0.4 and f"{held['value']:.3f} [{held['low']:.3f}" in done.stdout
    assert about["fitted_to"] == ("ratings" if data == "rated.csv" else "pairs")
    assert held["rows"] + about["rows"] <= COUNT
    reward = fitted_head(str(tmp_path / "head"), device="cpu")
    scores = brightness(reward)
    assert scores[-1] > scores[0] + 0.5


def test_ratings_without_sense_are_said_to_be_not_learnt(scans, clip, tmp_path):
    rows = (scans / "rated.csv").read_text().splitlines()[1:]
    scores = [row.split(",")[1] for row in rows]
    shuffled = np.random.default_rng(1).permutation(scores)
    mixed = scans / "mixed.csv"
    pairs = zip(rows, shuffled, strict=True)
    mixed.write_text("picture,score\n" + "\n".join(f"{r.split(',')[0]},{s}" for r, s in pairs))
    words = ("fit-head", mixed, "--clip", clip, "--out", "head", "--device", "cpu")
    mmrl(*words, "--held-out", 0.5, cwd=tmp_path)
    (held,) = json.loads((tmp_path / "head" / "head.json").read_text())["held_out"]
    assert held["low"] < 0.1 or not np.isfinite(held["low"])


@pytest.mark.parametrize("kind", ["dino", "clip"])
def test_features_of_transformers_and_gradients(kind, scans, tmp_path):
    model = (save_dino if kind == "dino" else save_hf_clip)(tmp_path / "model")
    words = ("fit-head", scans / "rated.csv", "--vision", model, "--out", "head", "--device", "cpu")
    mmrl(*words, cwd=tmp_path)
    reward = fitted_head(str(tmp_path / "head"), scale=2.0, device="cpu")
    media = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    media.requires_grad_()
    scores = reward(media, [{}] * 3)
    (gradient,) = torch.autograd.grad(scores.sum(), media)
    assert gradient.abs().sum() > 0 and gradient.isfinite().all()
    # a step along the gradient raises the score: it is that of the score
    step = 1e-3 * gradient / gradient.norm()
    raised = reward(media.detach() + step, [{}] * 3).sum() - scores.sum()
    assert float(raised) == pytest.approx(1e-3 * float(gradient.norm()), rel=0.1)
    still = media.detach()[:, None].expand(-1, 2, -1, -1, -1)
    torch.testing.assert_close(reward(still, [{}] * 3), scores.detach(), atol=1e-5, rtol=1e-5)
    alone = torch.cat([reward(m[None], [{}]) for m in media.detach()])
    torch.testing.assert_close(alone, scores.detach(), atol=1e-5, rtol=1e-5)
    broken = media.detach().clone()
    broken[1, 0, 0, 0] = torch.nan
    assert reward(broken, [{}] * 3).isnan().tolist() == [False, True, False]


def test_ridge_and_logistic_are_at_their_minimum():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(30, 4, generator=generator).double()
    targets = (torch.rand(30, generator=generator) > 0.4).double()
    losses = {
        fitting.ridge: lambda w: (rows @ w - targets).square().mean() + 0.5 * w @ w / 4,
        fitting.logistic: lambda w: (
            torch.nn.functional.binary_cross_entropy_with_logits(rows @ w, targets)
            + 0.5 * w @ w / 8
        ),
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


def test_intervals():
    groups = torch.arange(20)
    low, high = fitting.resampled(groups, lambda rows: float(rows.double().mean()), 0)
    assert low < 9.5 < high and high - low == pytest.approx(2 * 1.96 * 5.77 / 20**0.5, rel=0.15)
    assert np.isnan(fitting.resampled(groups[:0], lambda rows: 0.0, 0)[0])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
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
        ("a.jsonl", '{"chosen": null, "rejected": null, "tie": true, "answers": 3}', "two files"),
        (
            "a.jsonl",
            '{"picture": "0.png", "score": 1}\n{"chosen": "0.png", "rejected": "1.png"}',
            "a.jsonl:2: pairs and ratings in one file",
        ),
        ("a.txt", "", "give a .csv or .jsonl file"),
    ],
)
def test_mistakes_in_the_data_are_named_by_row(name, text, message, scans):
    (scans / name).write_text(text)
    with pytest.raises(UserError) as error:
        read_ratings(scans / name)
    assert message in str(error.value)


def test_what_cannot_be_used_is_said_before_a_model_is_loaded(scans, clip, tmp_path):
    few = scans / "few.csv"
    few.write_text("picture,score\n0.png,1\n1.png,2\n")
    said = refused("fit-head", few, "--clip", "no such model", cwd=tmp_path)
    assert "10 groups are needed" in " ".join(said.split())
    said = refused("fit-head", few, "--clip", "a", "--vision", "b", cwd=tmp_path)
    assert "--text-model: give one" in " ".join(said.split())
    with pytest.raises(UserError, match="`mmrl fit-head DATA --out FOLDER` writes one"):
        fitted_head(str(tmp_path))
    words = ("fit-head", scans / "rated.csv", "--clip", clip, "--out", "head", "--device", "cpu")
    mmrl(*words, cwd=tmp_path)
    assert set(load_file(tmp_path / "head" / "head.safetensors")) >= {"mean", "std"}
    with pytest.raises(UserError, match="pool are of the encoder `model` of files"):
        fitted_head(str(tmp_path / "head"), pool="last", device="cpu")
    for content, message in (("{", "not JSON"), ('{"kind": "os"}', "names no model")):
        (tmp_path / "head" / "head.json").write_text(content)
        with pytest.raises(UserError, match=message):
            fitted_head(str(tmp_path / "head"))


def test_animated_pictures_are_the_mean_of_frames(tmp_path):
    frames = [Image.new("RGB", (8, 8), (10 * i, 0, 0)) for i in range(9)]
    frames[0].save(tmp_path / "a.png", save_all=True, append_images=frames[1:])
    loaded = load_frames(tmp_path / "a.png")
    assert loaded.shape == (4, 3, 8, 8) and loaded[0].sum() == 0
    assert float(loaded[-1, 0, 0, 0]) == pytest.approx(80 / 255)

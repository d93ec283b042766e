"""Builds say how far they are where no terminal shows a bar, resume where they stopped, and looking
builds nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmrl.worlds import cache
from mmrl.worlds.progress import SAVED, Progress
from mmrl.worlds.unfinished import Unfinished
from samplers.noise import Rng


def test_looking_builds_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path))

    def make():
        return cache.fetch("some/thing", "0" * 12, lambda folder: pytest.fail("built"))

    assert cache.built(make) is None and list(tmp_path.rglob("*")) == []

    def build(folder):
        (folder / "a").write_text("x")

    folder = cache.fetch("some/thing", "0" * 12, build)
    assert cache.built(make) == folder


class Interrupted(Exception):
    pass


def trained(unfinished, stop=None):
    """The weights after two parts of eight steps, each longer than the time between saves."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    now = [0.0]
    progress = Progress("digits/new", True, lambda: now[0], unfinished)
    made = []
    for part in ("vision tower", "answers"):
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        for step in progress.steps(part, 8, optimizer, schedule):
            if (part, step) == stop:
                raise Interrupted
            net(Rng.of(part).normal(torch.arange(4), (3,), step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            made.append((part, step))
            now[0] += SAVED + 1
    return torch.cat([p.detach().flatten() for p in net.parameters()]), made


@pytest.mark.parametrize("stop", [("vision tower", 5), ("answers", 0)])
def test_an_interrupted_build_resumes_to_the_same_weights(tmp_path, stop, capsys):
    expected, every = trained(None)
    with pytest.raises(Interrupted):
        trained(Unfinished(tmp_path), stop)
    weights, made = trained(Unfinished(tmp_path))
    assert torch.equal(weights, expected)
    assert made == every[every.index(stop) :]
    assert f"{stop[0]} resumes at" in capsys.readouterr().err or stop[1] == 0


def test_a_damaged_file_of_an_interrupted_build_is_not_taken_up(tmp_path):
    expected, every = trained(None)
    with pytest.raises(Interrupted):
        trained(Unfinished(tmp_path), ("vision tower", 5))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-8])
    weights, made = trained(Unfinished(tmp_path))
    assert torch.equal(weights, expected) and made == every

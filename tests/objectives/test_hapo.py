"""HAPO: advantage and clip by each token's entropy, against the formula token by token."""

import math
from dataclasses import asdict
from statistics import pstdev

import pytest
import torch

from mmrl.core import decisions
from mmrl.core.decisions import entropy_scale
from mmrl.core.errors import UserError
from mmrl.experiment.build import read
from mmrl.objectives.terms import Scored
from mmrl.zoo.models.image_tokens.llamagen import LlamaGen
from mmrl.zoo.objectives import HAPO
from samplers.noise import Rng
from samplers.warp import EntropyScale
from tests.core.test_imports import ROOT
from tests.experiment.test_resume import resumes
from tests.fixtures import image_tokens, toys
from tests.fixtures.records import make_point

SCALE = EntropyScale(median=0.1, std=0.7, highest=1.8, lowest=-2.5)


def place(entropy, scale=SCALE):
    h = (math.log(max(entropy, 1e-6)) - scale.median) / (scale.std + 1e-6)
    return max(-1.0, min(1.0, h / scale.highest if h > 0 else -h / scale.lowest))


def token_loss(logp, old, advantage, entropy, low=0.2, high=0.28, alpha=1.0, beta=1.0):
    h = place(entropy)
    if h > 0:
        high *= 1 + alpha * h
    else:
        low *= 1 - alpha * h
    ratio = math.exp(logp - old)
    near = 1 - low / 2 < ratio < 1 + high / 2
    if (h > 0 and not near) or (h <= 0 and near):
        advantage *= 1 + beta * h
    return max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 0.0), (0.0, 0.3)])
def test_the_loss_of_every_token_is_the_papers(alpha, beta):
    generator = torch.Generator().manual_seed(0)
    old, gap, advantage, entropy = (
        torch.randn(6, 9, generator=generator, dtype=torch.float64) for _ in range(4)
    )
    logp = old + 0.4 * gap
    entropy = (0.8 * entropy).exp()
    point = make_point(
        group=torch.zeros(6, dtype=torch.long),
        row_id=torch.arange(6),
        state=torch.zeros(6, 9, dtype=torch.long),
        mask=torch.ones(6, 9, dtype=torch.bool),
        logprob=old,
        advantage=advantage,
        entropy=entropy,
    )
    objective = HAPO(clip_strength=alpha, advantage_strength=beta)
    objective.scale = SCALE
    loss = objective.policy_loss(Scored(None, point, None, logp, old, old, advantage))
    for b in range(6):
        for t in range(9):
            values = (float(x[b, t]) for x in (logp, old, advantage, entropy))
            wanted = token_loss(*values, alpha=alpha, beta=beta)
            assert float(loss[b, t]) == pytest.approx(wanted, abs=1e-9)


def test_the_scale_is_that_of_the_log_entropies_of_all_tokens(monkeypatch):
    """Of all processes."""
    policy = toys.make("causal", double=True, record_entropy=True)
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(3), 5, Rng.of("scale"))
    rollout = rollout.replace(mask=rollout.mask & (torch.arange(6) < 5))
    logs = [math.log(h) for h in rollout.entropies()[rollout.mask].tolist()]
    middle = sorted(logs)[(len(logs) - 1) // 2]  # torch's median: the lower of the two
    places = [(x - middle) / (pstdev(logs) + 1e-6) for x in logs]
    spread = {"std": pstdev(logs), "highest": max(places), "lowest": min(places)}
    wanted = pytest.approx({"median": middle} | spread, abs=1e-9)
    assert asdict(entropy_scale(rollout)) == wanted
    assert asdict(entropy_scale(rollout[torch.randperm(15)])) == wanted
    assert entropy_scale(rollout.replace(mask=torch.zeros_like(rollout.mask))) is None
    halves = rollout[:5], rollout[5:]
    values = torch.cat([half.entropies()[half.mask] for half in halves])
    monkeypatch.setattr(decisions, "all_gather_rows", lambda x: values)
    for half in halves:
        assert asdict(entropy_scale(half)) == wanted


def test_micro_batches_change_nothing():
    runs = []
    for micro in (3, 8):
        policy = toys.make("masked", double=True, record_entropy=True)
        trainer = toys.trainer(policy, HAPO(), micro_batch_size=micro, epochs=2)
        trainer.iterate()
        runs.append(policy.weights.full())
    for name, value in runs[0].items():
        torch.testing.assert_close(value, runs[1][name], atol=1e-9, rtol=0)


def tiny(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        folder = image_tokens.folder("llamagen-classes")
        return LlamaGen(str(folder), guidance_scale=1.0, **options)


def adaptive(**options):
    policy = tiny(adaptive_temperature=0.3, record_entropy=True)
    prompts = [{"text": str(label), "label": label} for label in range(2)]
    return image_tokens.trainer_of(policy, prompts, HAPO(**options), lr=0.1)


def test_temperatures_follow_the_entropies_of_the_iteration_before(tmp_path):
    trainer = adaptive()
    first = trainer.iterate()
    assert trainer.policy.warp.scale is None and first["ratio/max_deviation"] < 1e-4
    (stage,) = (s for s in trainer.stages if s.saved_as == "adaptive_temperature")
    measured = stage.scale
    assert measured == trainer.objective.scale
    second = trainer.iterate()
    assert trainer.policy.warp.scale == measured and second["ratio/max_deviation"] < 1e-4
    assert stage.scale != measured
    resumes(adaptive, tmp_path)


def test_what_it_needs_is_said():
    path = ROOT / "configs" / "digits" / "ar_grpo.yaml"
    with pytest.raises(UserError, match="objective HAPO needs .* set policy.llamagen.record_e"):
        read(path, ["objective=hapo"])
    assert read(path, ["objective=hapo", "policy.record_entropy=true"])
    policy = tiny(adaptive_temperature=0.3)
    with pytest.raises(UserError, match="adaptive_temperature .* record_entropy"):
        image_tokens.trainer_of(policy, [{"text": "1", "label": 1}] * 2)

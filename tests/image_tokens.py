"""Tiny image-token policies of few sequences, and what enumerating all of them shows."""

import itertools

import torch
from torch.nn import functional as F

from mmrl.advantages import flow_grpo
from mmrl.objectives import PolicyGradient
from mmrl.options import TrainOptions
from mmrl.trainer import Trainer
from mmrl.types import Point, Rewards


def every(vocab, length):
    """[V^T, T] all sequences."""
    return torch.tensor(list(itertools.product(range(vocab), repeat=length)))


def at(policy, ids, prompt):
    """The point of given sequences [B, T] as answers to one prompt."""
    ids = ids.to(policy.device)
    group = torch.zeros(len(ids), dtype=torch.long)
    return Point(
        group=group, cond=policy.encode([prompt]), row=group, state=ids, target=ids, mask=torch.ones_like(ids).bool()
    )


def logp(policy, ids, prompt):
    """[B] of whole sequences, as the policy scores them."""
    return policy.dist(at(policy, ids, prompt)).log_prob(ids).sum(1)


def flat_grad(policy, value):
    parameters = list(policy.weights.parameters().values())
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found)])


def cosine(a, b):
    return float(F.cosine_similarity(a, b, dim=0))


def trainer_of(policy, prompts, **sizes):
    """One whose reward is the brightness of images."""

    def scorer(media, asked):
        return Rewards({"bright": media.flatten(1).mean(1)})

    options = {"prompts": 2, "copies": 4, "batch_size": 8, "iterations": 2, "micro_batch": 3} | sizes
    return Trainer(
        policy, prompts, scorer, flow_grpo, PolicyGradient(clip=0.2, kl=0.1),
        lambda p: torch.optim.SGD(p, lr=1.0), TrainOptions(max_grad_norm=None, **options),
    )  # fmt: skip


def assert_trains(policy, prompts):
    """The first ratio is one, and the second iteration starts from other weights."""
    before = policy.weights.full()
    trainer = trainer_of(policy, prompts)
    first = trainer.iterate()
    assert first["ratio/mean"] == 1 and first["clip_fraction"] == 0 and first["ratio/max_deviation"] < 1e-4
    after = policy.weights.full()
    assert sum(not torch.equal(before[n], after[n]) for n in before) > 0.9 * len(before)
    second = trainer.iterate()
    assert second["ratio/mean"] == 1 and second["kl"] > 0

"""One toy policy per family: seconds on a CPU, the same contract as the real ones."""

import math

import torch
from torch import nn

from mmrl.policies.diffusion.flow_policy import FlowPolicy
from mmrl.policies.tokens import CausalPolicy, MaskedPolicy
from samplers.windows import all_but_last


def seeded(make, seed=0):
    """A module whose initial weights depend on ``seed`` only."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def mlp(inside, outside, wide=64):
    return seeded(
        lambda: nn.Sequential(nn.Linear(inside, wide), nn.SiLU(), nn.Linear(wide, outside))
    )


class ToyFlow(FlowPolicy):
    """Points in the plane, asked for by label, with an unconditional branch."""

    shape = (2,)

    def __init__(self, steps=6, **options):
        super().__init__(mlp(4, 2), steps=steps, **options)

    def encode(self, prompts):
        label = torch.tensor([[p["label"]] for p in prompts], dtype=self.dtype)
        return {"label": label, "uncond": {"label": torch.full((1, 1), -1.0, dtype=self.dtype)}}

    def velocity(self, x, t, cond):
        return self.active()(torch.cat([x, t[:, None], cond["label"]], 1))

    def decode(self, rollout):
        return rollout.sample


def ddim(x, eps, t, s, eta):
    """DDIM-eta with noise prediction (Song et al. 2021, eq. 12) on a cosine schedule: another
    process, one contract."""
    t, s, eta = (u.view(-1, *[1] * (x.ndim - 1)) for u in (t, s, eta))
    a, b = ((0.98 * u * math.pi / 2).cos() ** 2 for u in (t, s))
    std = eta * ((1 - b) / (1 - a) * (1 - a / b)).clamp_min(0).sqrt()
    clean = (x - (1 - a).sqrt() * eps) / a.sqrt()
    return b.sqrt() * clean + (1 - b - std**2).clamp_min(0).sqrt() * eps, std


class ToyDiffusion(ToyFlow):
    """The same points by noise prediction."""

    def __init__(self, **options):
        # its last step has no noise
        super().__init__(**{"sde_type": ddim, "noise_window": all_but_last} | options)


class ToyVideo(ToyFlow):
    """Three frames of two by two pixels."""

    shape = (1, 3, 2, 2)  # C F H W

    def __init__(self, steps=6, **options):
        FlowPolicy.__init__(self, mlp(14, 12), steps=steps, **options)

    def velocity(self, x, t, cond):
        return self.active()(torch.cat([x.flatten(1), t[:, None], cond["label"]], 1)).view_as(x)


class Bag(nn.Module):
    """Position-aware logits which see the sum of the visible tokens."""

    def __init__(self, length=6, vocab=5):
        super().__init__()
        self.length = length
        self.vocab = vocab
        self.embed = nn.Embedding(vocab + 1, 16)
        self.head = nn.Linear(17, length * vocab)

    def forward(self, ids, visible, label):
        seen = torch.einsum(
            "bk,lk,bke->ble", (ids < self.vocab).to(label), visible.to(label), self.embed(ids)
        )
        seen = torch.cat([seen, label[:, None].expand(-1, self.length, -1)], -1)
        logits = self.head(seen).unflatten(-1, (self.length, self.vocab))
        return torch.einsum("bllv->blv", logits)


class ToyTokens:
    def encode(self, prompts):
        return {"label": torch.tensor([[p["label"]] for p in prompts], dtype=self.dtype)}

    def logits(self, ids, cond):
        return self.active()(ids, self.visible, cond["label"])


class ToyMasked(ToyTokens, MaskedPolicy):
    visible = torch.ones(6, 6)

    def __init__(self, **options):
        super().__init__(seeded(Bag), length=6, mask_id=5, passes=3, **options)


class ToyCausal(ToyTokens, CausalPolicy):
    visible = torch.tril(torch.ones(6, 6), -1)

    def __init__(self, **options):
        super().__init__(seeded(Bag), length=6, mask_id=5, **options)


POLICIES = {
    "flow": ToyFlow,
    "diffusion": ToyDiffusion,
    "video": ToyVideo,
    "masked": ToyMasked,
    "causal": ToyCausal,
}


def make(family, double=False, **options):
    policy = POLICIES[family](**options)
    if double:
        policy.net.double()
    return policy


def off_by(policy, network, factor):
    """The policy with a network (its method ``velocity`` or ``logits``) that is ``factor`` times
    too large wherever gradients are recorded: the update scores with another network than the one
    that sampled."""
    plain = getattr(policy, network)

    def wrong(*inputs):
        return plain(*inputs) * (factor if torch.is_grad_enabled() else 1.0)

    setattr(policy, network, wrong)
    return policy


def misremembers(policy, gap):
    """The policy with a sampler whose recorded log-probs are ``gap`` too small."""
    plain = policy.rollout

    def rollout(*inputs):
        found = plain(*inputs)
        return found.replace(logprob=found.logprob - gap)

    policy.rollout = rollout
    return policy


def prompts(n=4):
    return [{"text": f"label {i % 2}", "label": i % 2} for i in range(n)]


def reward(sample, prompts):
    """Tokens: how many are the third. Latents: close to one everywhere."""
    if sample.dtype == torch.long:
        return (sample == 3).double().mean(1)
    return -(sample - 1.0).flatten(1).square().mean(1).sqrt()


def smooth_reward(sample, prompts):
    """The same for latents, with a gradient everywhere."""
    return -(sample - 1.0).flatten(1).square().mean(1)

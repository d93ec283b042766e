"""Tiny image-token policies of few sequences, and what enumerating all of them shows."""

import itertools
import tempfile
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from mmrl.advantages import flow_grpo
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.types import Point, Rewards
from mmrl.objectives import PolicyGradient
from mmrl.policies.image_tokens import checkpoints
from mmrl.policies.image_tokens.models.llamagen_gpt import LlamaGenGPT, Shape
from mmrl.policies.image_tokens.models.llamagen_vq import LlamaGenVQ
from mmrl.policies.image_tokens.models.var_net import Shape as VARShape
from mmrl.policies.image_tokens.models.var_net import VARNet
from mmrl.policies.image_tokens.models.var_vq import VARVQ
from mmrl.train.trainer import Trainer
from samplers.noise import Rng

from . import tiny_vlms, toys
from .tiny_transformers_images import tiny_emu3, tiny_glm_image, tiny_imagegpt


def every(vocab, length):
    """[V^T, T] all sequences."""
    return torch.tensor(list(itertools.product(range(vocab), repeat=length)))


def at(policy, ids, prompt):
    """The point of given sequences [B, T] as answers to one prompt."""
    ids = ids.to(policy.device)
    group = torch.zeros(len(ids), dtype=torch.long)
    return Point(
        group=group,
        cond=policy.encode([prompt]),
        row_id=group,
        state=ids,
        target=ids,
        mask=torch.ones_like(ids).bool(),
    )


def logp(policy, ids, prompt):
    """[B] of whole sequences, as the policy scores them."""
    return policy.dist(at(policy, ids, prompt)).log_prob(ids).sum(1)


def support(policy, ids, prompt):
    """[B] bool: sequences [B, T] whose every token survives top-k and top-p."""
    dist = policy.dist(at(policy, ids, prompt))
    whole = policy.net.full(dist.hidden, policy.warp).view(*ids.shape, -1)
    return whole.gather(-1, ids[..., None])[..., 0].isfinite().all(1)


def flat_grad(policy, value):
    parameters = list(policy.weights.parameters().values())
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found)]
    )


def cosine(a, b):
    return float(F.cosine_similarity(a, b, dim=0))


def trainer_of(policy, prompts, objective=None, lr=1.0, **sizes):
    """One whose reward is the brightness of images."""

    def scorer(media, asked):
        return Rewards({"bright": media.flatten(1).mean(1)})

    options = {
        "prompts_per_iteration": 2,
        "group_size": 4,
        "train_batch_size": 8,
        "iterations": 2,
        "micro_batch_size": 3,
    } | sizes
    return Trainer(
        policy,
        prompts,
        scorer,
        flow_grpo,
        objective or PolicyGradient(clip_range=0.2, kl=0.1),
        lambda p: torch.optim.SGD(p, lr=lr),
        TrainOptions(max_grad_norm=None, **options),
    )


def assert_trains(policy, prompts):
    """First steps score what was recorded, the second iteration starts from other weights, and a
    sampler that records something else is stopped."""
    before = policy.weights.full()
    trainer = trainer_of(policy, prompts)
    first = trainer.iterate()
    assert first["clip_fraction"] == 0 and first["ratio/max_deviation"] < 1e-4
    after = policy.weights.full()
    assert sum(not torch.equal(before[n], after[n]) for n in before) > 0.9 * len(before)
    second = trainer.iterate()
    assert second["ratio/max_deviation"] < 1e-4 and second["kl"] > 0
    with pytest.raises(UserError, match="re-scored log-probs differ"):
        trainer_of(toys.misremembers(policy, 1e-2), prompts).iterate()


def assert_half_precision(policy, prompts, apart):
    """Weights in bfloat16: log-probs are recorded in float32 and found again to ``apart`` on
    average. They are not trained; in float32 and computed in bfloat16 they are: the gate of the
    first step lets pass what rounding does, and half a nat it does not."""
    policy.net.to(torch.bfloat16)
    with torch.no_grad():
        rollout = policy.rollout(prompts, 8, Rng.of("half"))
        (point,) = policy.path(rollout)
        gap = (policy.dist(point).log_prob(point.target) - rollout.logprob).abs()
    assert rollout.logprob.dtype == torch.float32 and gap.mean() < apart, float(gap.mean())
    with pytest.raises(UserError, match="rounded away"):
        trainer_of(policy, prompts, precision="bf16")
    policy.net.float()
    first = trainer_of(policy, prompts, precision="bf16").iterate()
    assert first["clip_fraction"] == 0 and first["skipped_steps"] == 0
    with pytest.raises(UserError, match="re-scored log-probs differ .* on average"):
        trainer_of(toys.misremembers(policy, 0.5), prompts, precision="bf16").iterate()


def assert_compiles(policy, prompts, monkeypatch):
    """One graph, whose shapes are those of the first token, draws the same tokens; here run without
    code generation."""
    graphs = []
    compiled = torch.compile

    def backend(module, inputs):
        graphs.append(len(module.graph.nodes))
        return module.forward

    monkeypatch.setattr(
        torch, "compile", lambda fn, mode=None, **options: compiled(fn, backend=backend, **options)
    )
    with torch.no_grad():
        plain = policy.rollout(prompts, 3, Rng.of("compiled"))
        policy.net.compile_token()
        found = policy.rollout(prompts, 3, Rng.of("compiled"))
    assert len(graphs) == 1 and torch.equal(found.sample, plain.sample)
    torch.testing.assert_close(found.logprob, plain.logprob, atol=1e-9, rtol=0)


def _random(module, seed=0):
    """Random weights, none zero, large enough that every input matters."""
    for i, (name, p) in enumerate(module.state_dict().items()):
        if p.is_floating_point():
            noise = Rng.of("weights", seed, i).normal(torch.zeros(1), (p.numel(),)).view(p.shape)
            p.copy_(
                1 + 0.1 * noise
                if "norm" in name and p.dim() == 1
                else noise * p.shape[-1] ** -0.5 * 1.5
            )
    return module


def tiny_llamagen(folder, text=False, vocab=3):
    """A folder as exported: five classes, or texts of at most forty tokens by a tiny T5; images of
    4 x 4 pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = Shape(
        16, 2, 2, vocab, 0 if text else 5, caption=12, condition=40 if text else 1, grid=2, feed=24
    )
    checkpoints.save(_random(LlamaGenGPT(shape)).state_dict(), folder / "gpt.safetensors")
    vq = LlamaGenVQ(vocab, 4, 16, 32, (1, 1), 1, used=8)
    checkpoints.save(_random(vq, seed=1).state_dict(), folder / "vq.safetensors")
    (folder / "config.json").write_text('{"size": 4, "heads": 2}')
    if text:
        tiny_t5(folder / "t5")
    return folder


def tiny_var(folder, sides=(1, 2), vocab=3):
    """A folder as exported: five classes, pixels twice as many as the last scale."""
    folder.mkdir(parents=True, exist_ok=True)
    vae = _random(VARVQ(sides, vocab, 4, 32, (1, 1), 1), seed=1)
    net = VARNet(VARShape(16, 2, 2, sides, vocab, 4, 5, 24), vae.quantize)
    level = net.lvl_1L.clone()
    bias = net.attn_bias_for_masking.clone()
    _random(net)
    net.attn_bias_for_masking.copy_(bias)
    for block in net.blocks:
        block.attn.zero_k_bias.zero_()
    assert (net.lvl_1L == level).all()
    checkpoints.save(net.state_dict(), folder / "var.safetensors")
    checkpoints.save(vae.state_dict(), folder / "vae.safetensors")
    return folder


def tiny_t5(folder):
    import transformers as hf

    tok = tiny_vlms.tokenizer([])
    config = hf.T5Config(
        vocab_size=len(tok),
        d_model=12,
        d_kv=6,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hf.T5EncoderModel(config).save_pretrained(folder)
    tok.save_pretrained(folder)


@cache
def _session():
    return tempfile.TemporaryDirectory(prefix="tiny-images-")


@cache
def folder(name):
    """The folder of a tiny model, built at the first call."""
    return BUILDERS[name](Path(_session().name) / name)


BUILDERS = {
    "llamagen": partial(tiny_llamagen, text=True, vocab=16),
    "llamagen-classes": partial(tiny_llamagen, vocab=16),
    "var": partial(tiny_var, vocab=16),
    "emu3": partial(tiny_emu3, vocab=16),
    "imagegpt": partial(tiny_imagegpt, vocab=16),
    "glm_image": partial(tiny_glm_image, vocab=16),
}

"""What does not fit the device's memory: smaller passes, paths kept elsewhere, and nothing changed
by either."""

from __future__ import annotations

from functools import partial

import diffusers
import pytest
import torch
from torch import nn

from mmrl import advantages
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.metrics import Meter
from mmrl.experiment.evaluation import sample
from mmrl.objectives import PolicyGradient
from mmrl.policies.base import RolloutContext
from mmrl.policies.diffusion.flow_plan import planned
from mmrl.policies.diffusion.flow_policy import FlowPolicy
from mmrl.rollout.collect import joined
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.objectives import D3PO, NFT, DiffusionDPO, Draft
from samplers.batching import attempts, peak_bytes
from samplers.noise import Rng
from samplers.windows import random_steps, random_window
from tests.fixtures import tiny_diffusers, toys
from tests.policies.diffusion.test_folder_families import PROMPTS, make


def test_half_and_half_again_until_it_fits():
    def tried(size, **options):
        sizes = []
        for attempt in attempts(size, **options):
            with attempt as rows:
                sizes.append(rows)
                if rows > 3:
                    raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        return sizes

    assert tried(13) == [13, 6, 3] and tried(2) == [2]
    with pytest.raises(torch.OutOfMemoryError, match="13 rows a pass, and fewer than 8 cannot be"):
        tried(13, least=8)


def trainer(rows=None, gradient=False, **options):
    """``rows``: a pass of more runs out of memory; ``gradient``: only one of training does."""
    policy = toys.make("flow", double=True, guidance_scale=2.0)
    plain = policy.velocity

    def velocity(x, t, cond):
        if rows is not None and len(x) > 2 * rows and (torch.is_grad_enabled() or not gradient):
            raise torch.OutOfMemoryError("no room")
        return plain(x, t, cond)

    policy.velocity = velocity
    return trainer_of(policy, PolicyGradient(clip_range=1e-2, kl=0.1), **options)


def trainer_of(policy, objective, **options):
    sizes = {"prompts_per_iteration": 4, "group_size": 4, "train_batch_size": 16, "iterations": 3}
    return Trainer(
        policy,
        toys.prompts(4),
        Scorer({"reward": lambda media, prompts: -media.square().mean(1)}),
        advantages.dance_grpo,
        objective,
        partial(adamw, lr=1e-2),
        TrainOptions(**sizes | options),
    )


@pytest.mark.parametrize("gradient", [False, True], ids=["sampling", "training"])
def test_a_run_out_of_memory_goes_on_in_smaller_passes_to_the_same_weights(gradient):
    whole = trainer()
    small = trainer(rows=5, gradient=gradient)
    for _ in range(2):
        wanted = whole.iterate()
        found = small.iterate()
    assert small.policy.pass_sizes.max_micro_batch == small.policy.pass_sizes.rows == 4
    (warning,) = small.policy.report.warnings
    assert "at most 4 rows; train.micro_batch_size=4" in warning
    assert found["ratio/max_deviation"] < 1e-12
    # a pass that failed has left nothing behind
    for name in ("loss", "kl", "clip_fraction", "grad_norm"):
        assert found[name] == pytest.approx(wanted[name], abs=1e-9)
    for name, value in whole.policy.weights.full().items():
        torch.testing.assert_close(small.policy.weights.full()[name], value, atol=1e-9, rtol=0)


def test_one_row_that_does_not_fit_is_the_users_to_mend():
    sentence = "out of memory: 1 rows a pass.*train.gradient_checkpointing=true.*--dry-run"
    with pytest.raises(UserError, match=sentence):
        trainer(rows=0).iterate()


def test_decoding_halves_by_itself_and_leaves_training_alone():
    policy = make("flux", fixed_batch_rows=4)
    plain, most = policy.pixels, 1

    def pixels(vae, latents):
        if len(latents) > most:
            raise torch.OutOfMemoryError("no room")
        return plain(vae, latents)

    with torch.no_grad():
        rollout = policy.rollout(PROMPTS, 2, Rng.of("same"))
        wanted = policy.decode(rollout)
        policy.pixels = pixels
        torch.testing.assert_close(policy.decode(rollout), wanted, atol=1e-5, rtol=0)
        assert policy.decoding == 1 and policy.pass_sizes.rows == 4
        assert policy.pass_sizes.max_micro_batch is None and not policy.report.warnings
        most = 0
        with pytest.raises(UserError, match="decoding a single sample of .* vae_tiling=true"):
            policy.decode(rollout)


def test_paths_are_kept_off_the_device_and_come_back_for_a_pass():
    plain = toys.make("flow")
    kept = toys.make("flow", offload_trajectory=True)
    ours, theirs = (p.rollout(toys.prompts(2), 2, Rng.of(1)) for p in (kept, plain))
    assert torch.equal(ours.latents.states, theirs.latents.states)
    plan = planned(plain, 2, Rng.of(1))
    for policy, place in ((plain, "meta"), (kept, "cpu")):
        policy.__class__ = type("Elsewhere", (toys.ToyFlow,), {"device": torch.device("meta")})
        assert policy._room(plan, 2).device.type == place
    assert make("wan").offload_trajectory and not make("flux").offload_trajectory


def test_latents_are_rounded_before_they_are_scored_and_scored_in_float32():
    policy = make("flux", dtype="bfloat16", lora=2, trajectory_dtype="float16")
    with torch.no_grad():
        rollout = policy.rollout(PROMPTS, 2, Rng.of("same"))
        states = rollout.latents.states
        assert states.dtype == torch.float16 and rollout.logprob.dtype == torch.float32
        assert rollout.sample.dtype == torch.float32
        assert torch.equal(states[:, -1].float(), rollout.sample)
        for point in policy.path(rollout):
            dist = policy.dist(point)
            assert point.state.dtype == point.target.dtype == dist.mean.dtype == torch.float32
            assert torch.equal(dist.log_prob(point.target), point.logprob)


class Wide(toys.ToyFlow):
    """Latents so large, and a network so small, that paths are nearly all of an update's memory."""

    shape = (4096,)

    def __init__(self, **options):
        FlowPolicy.__init__(self, toys.seeded(lambda: nn.Linear(1, 1)), **{"steps": 20} | options)

    def velocity(self, x, t, cond):
        return x * self.active()(t[:, None])


def wide(objective, batch_size=16, **options):
    sizes = {"train_batch_size": batch_size, "micro_batch_size": 4}
    return trainer_of(Wide(**options), objective, **sizes)


WHOLE = 16 * 21 * 4096 * 4  # bytes of the whole path of all rows


def test_a_rollout_and_an_update_hold_a_path_once():
    trainer = wide(PolicyGradient())
    found = {}
    assert peak_bytes(lambda: found.update(one=trainer.collect())) < 1.5 * WHOLE
    batch = found.pop("one")
    assert batch.rollout.latents.states.nbytes == WHOLE
    arguments = batch, batch.rollout, Rng.of("update"), True, Meter()
    assert peak_bytes(lambda: trainer.update.improve(*arguments)) < 0.5 * WHOLE


@pytest.mark.parametrize(
    ("objective", "options", "most"),
    [(PolicyGradient(), {}, 0.8), (NFT(num_noise_draws=9), {"noise_level": 0.0}, 0.6)],
)
def test_an_update_in_steps_holds_one_steps_rows_and_one_noise_at_a_time(objective, options, most):
    trainer = wide(objective, batch_size=8, **options)
    collected = trainer.collect()
    trainer.collect = lambda: collected
    assert peak_bytes(trainer.iterate) < most * WHOLE


def moving(steps, iteration, rng):
    return random_window(steps, iteration, rng, size=2)


@pytest.mark.parametrize(
    ("objective", "options", "states"),
    [
        (PolicyGradient(), {}, 21),
        (PolicyGradient(), {"noise_window": moving}, 3),
        (PolicyGradient(), {"noise_window": partial(random_steps, size=2)}, 4),
        (D3PO(), {"noise_window": moving}, 3),
        (Draft(), {"noise_window": moving}, 21),
        (NFT(), {"noise_level": 0.0}, 0),
        (DiffusionDPO(), {"noise_level": 0.0}, 0),
    ],
)
def test_only_the_states_that_are_read_are_kept(objective, options, states):
    """Flow-GRPO-Fast has two decisions: the states before and after each, of 21. Those of the
    forward process read the finished sample alone."""
    trainer = wide(objective, **options)
    rollout = trainer.collect().rollout
    assert rollout.latents.states.shape[1] <= states
    whole = Wide(**options).rollout(list(rollout.prompts), 4, trainer._rng("rollout"))
    assert torch.equal(whole.sample, rollout.sample) and whole.latents.states.shape[1] == 21
    if rollout.latents.states.shape[1]:
        wanted, found = (list(trainer.policy.path(one)) for one in (whole, rollout))
        assert len(wanted) == len(found) > 0
        for one, other in zip(wanted, found, strict=True):
            assert torch.equal(one.state, other.state) and torch.equal(one.target, other.target)


def test_groups_that_were_drawn_with_other_stochastic_steps_share_a_rollout():
    """Dynamic sampling draws from another stream, in which other steps may be stochastic, adjacent
    ones or not."""
    policy = Wide(steps=6, noise_window=partial(random_steps, size=2))
    decisions = RolloutContext(reads="decisions")
    parts = [policy.rollout(toys.prompts(2), 2, Rng.of("part", n), decisions) for n in range(6)]
    assert {part.latents.states.shape[1] for part in parts} == {3, 4}
    whole = joined(parts)
    for n, part in enumerate(parts):
        pairs = zip(policy.path(whole[whole.group // 2 == n]), policy.path(part), strict=True)
        for point, wanted in pairs:
            assert torch.equal(wanted.state, point.state)
            assert torch.equal(wanted.target, point.target)


def test_evaluating_keeps_no_paths():
    policy = Wide()
    seen = []
    plain = policy.rollout
    policy.rollout = lambda *inputs: seen.append(plain(*inputs)) or seen[-1]
    sample(policy, toys.prompts(2), 2, seed=0)
    assert seen[0].latents.states.shape[1] == 0


def test_each_expert_of_wan_has_its_own_guidance_as_in_the_pipeline():
    high, low = 1.5, 3.0
    policy = make("wan-two", guidance_scale=high, guidance_scale_2=low, fixed_batch_rows=None)
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout(PROMPTS, 1, Rng.of("same"))
    # the second expert has its turn
    assert bool((1000 * policy.times[:-1] < policy.net.boundary).any())
    pipe = diffusers.WanPipeline.from_pretrained(str(tiny_diffusers.folder("wan-two")))
    pipe.set_progress_bar_config(disable=True)
    sizes = {"num_inference_steps": 3, "height": 16, "width": 32, "num_frames": 5}
    scales = {"guidance_scale": high, "guidance_scale_2": low, "max_sequence_length": 16}
    latents, texts = rollout.latents.states[:, 0], [p["text"] for p in PROMPTS]
    wanted = pipe(texts, latents=latents, output_type="latent", **sizes, **scales)[0]
    torch.testing.assert_close(rollout.sample, wanted, atol=1e-4, rtol=0)
    with policy.evaluating(low), torch.no_grad():  # a scale that is asked for is that of both
        both = policy.rollout(PROMPTS, 1, Rng.of("same")).sample
    assert policy.guidance_scale_2 == low and (both - rollout.sample).abs().max() > 1e-4
    with pytest.raises(UserError, match="guidance_scale_2: .* has one network only"):
        make("wan", guidance_scale_2=2.0)

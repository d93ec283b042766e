"""Replayed pipelines that hold the latents of a first frame and step the others, where other parts
meet them: resume, export, half precision, checkpointing, uneven groups, failed rewards, trees.
tests/train/test_processes.py has processes; test_any_pipeline.py and test_sound.py compare them
with diffusers' own."""

from __future__ import annotations

from functools import partial

import diffusers
import pytest
import torch
from PIL import Image

from mmrl import advantages
from mmrl.config.options import TrainOptions
from mmrl.core.registry import load_built_in
from mmrl.objectives import PolicyGradient
from mmrl.policies.diffusion.trees import Tree
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.models.any_pipeline.replay_states import States
from samplers.noise import Rng
from tests.experiment.test_resume import resumes
from tests.fixtures.replay_cases import CASES
from tests.policies.diffusion.test_any_pipeline import PROMPTS, make, place_of, trainer_of

load_built_in()
RNG = Rng.of("same")
NAMES = ["hunyuan_i2v", "ltx2_i2v"]


def held(name, **options):
    together = CASES[name].together
    return make(name, **({"steps": 2, "fixed_batch_rows": 4, "together": together} | options))


def sampled(policy, copies=2):
    with torch.no_grad():
        return policy.rollout(PROMPTS, copies, RNG)


def test_a_checkpoint_resumes_to_the_bit(tmp_path):
    resumes(lambda: trainer_of(held("ltx2_i2v", lora=2, guidance_scale=2.5)), tmp_path)


@pytest.mark.parametrize(("name", "lora"), [("hunyuan_i2v", None), ("ltx2_i2v", 2)])
def test_an_export_makes_the_same_videos_in_plain_diffusers(name, lora, tmp_path):
    """Also the prompt's picture is held in the folder's own way, wherever the weights came from."""
    policy = held(name, lora=lora)
    untrained = {n: p.clone() for n, p in policy.net.named_parameters() if p.requires_grad}
    trainer_of(policy).iterate()
    assert any(
        not torch.equal(untrained[n], p) for n, p in policy.net.named_parameters() if n in untrained
    )
    policy.export(tmp_path)
    pipe = diffusers.DiffusionPipeline.from_pretrained(place_of(name) if lora else tmp_path)
    if lora:
        pipe.load_lora_weights(tmp_path)
    again = held(name, path=place_of(name) if lora else str(tmp_path))
    plain = again.replay.pipe.__dict__["transformer"].__dict__["_net"]
    plain.__dict__.update(pipe.transformer.__dict__)
    media = []
    for each in (policy, again, held(name)):
        with each.evaluating(), torch.no_grad():
            media.append(each.decode(each.rollout(PROMPTS, 1, RNG)).as_subclass(torch.Tensor))
    torch.testing.assert_close(media[1], media[0], atol=1e-4, rtol=0)
    assert (media[2] - media[0]).abs().max() > 1e-4  # the training is seen


def test_half_precision_scores_as_it_sampled():
    policy = held("ltx2_i2v", dtype="bfloat16", lora=2, check=True)
    metrics = trainer_of(policy).iterate()
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0
    rollout = sampled(policy)
    assert rollout.logprob.dtype == rollout.sample.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_that_of_its_own_picture_in_groups_of_any_size(name):
    policy = held(name)
    other = PROMPTS[1] | {"image": Image.new("RGB", (32, 32), (0, 0, 255))}
    prompts = [PROMPTS[0], other]
    with torch.no_grad():
        uneven = policy.rollout(prompts, (1, 2), RNG)
        alone = policy.rollout([other], (2,), RNG.after((1, 2), 1))
        seen = policy.decode(uneven)
    assert uneven.group.tolist() == [0, 1, 1]
    torch.testing.assert_close(alone.sample, uneven.sample[1:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone.logprob, uneven.logprob[1:], atol=1e-5, rtol=1e-5)
    colours = seen[:, 0].as_subclass(torch.Tensor).mean((2, 3))  # of the frame that is held
    assert (colours[1] - colours[2]).abs().max() < (colours[0] - colours[1]).abs().max()


def sometimes(media, prompts):
    """Fails for the first of every four videos."""
    values = media.as_subclass(torch.Tensor).flatten(1).mean(1)
    values[::4] = torch.nan
    return values


def test_a_failed_reward_and_branches_leave_the_first_ratio_at_one():
    policy = held("hunyuan_i2v", steps=3, tree=Tree(splits=[0, 1]))
    trainer = Trainer(
        policy,
        PROMPTS,
        Scorer({"sometimes": sometimes}, max_failures=1.0),
        advantages.flow_grpo,
        PolicyGradient(clip_range=1e-2),
        partial(adamw, lr=1e-3),
        TrainOptions(
            prompts_per_iteration=2,
            group_size=4,
            train_batch_size=8,
            iterations=2,
            max_reward_failure_rate=1.0,
        ),
    )
    metrics = trainer.iterate()
    # passes of three steps at once are narrower than sampling's, so the last bit may differ
    assert metrics["ratio/max_deviation"] < 1e-6 and metrics["grad_norm"] > 0
    assert metrics["samples/excluded"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_only_what_is_stepped_has_noise(name):
    """The decision is smaller than the latents by those of one frame, and the network sees the
    picture's own latents there, whatever the state is."""
    policy = held(name)
    part = policy.replay.states.parts[0]
    frames = CASES[name].call["num_frames"]
    assert len(part.places) < part.prepared.numel() and frames > 1
    frame = part.prepared.numel() - len(part.places)
    assert frame == part.prepared.numel() // (part.prepared[1] if len(part.prepared) == 4 else 2)
    seen = []
    hook = policy.net.register_forward_pre_hook(
        lambda net, args, kwargs: seen.append(kwargs["hidden_states"].detach().clone()),
        with_kwargs=True,
    )
    cond = policy.encode(PROMPTS[:1])
    t = policy.times[:1].float()
    with torch.no_grad():
        for seed in ("a", "b"):
            x = Rng.of(seed).normal(torch.arange(1), policy.shape, 0, torch.float32)
            policy.velocity(x, t, cond)
    hook.remove()
    apart = (seen[0] != seen[1]).flatten(1)[0]
    # models of tokens hold as many numbers
    assert int((~apart).sum()) == frame * (apart.numel() // part.prepared.numel())


def test_a_state_goes_in_and_comes_out_again_where_it_is_stepped():
    states = States(object())
    prepared = torch.arange(24.0).view(1, 2, 3, 4)
    states.find(0, prepared.shape[1:], prepared[:, :, 1:])
    state = torch.randn(2, 2, 2, 4)
    whole = states.widen(0, state, torch.zeros(2, 2, 3, 4))
    assert torch.equal(whole[:, :, 1:], state) and not whole[:, :, :1].any()
    assert torch.equal(states.narrow(0, whole), state)
    other = States(object())  # what is not places is not understood
    other.find(0, prepared.shape[1:], prepared[:, :, 1:] * 0)
    assert not other.parts


def test_channels_that_only_a_picture_would_fill_are_held():
    """Of Kandinsky 5 from texts; half precision has too few numbers to tell latents apart."""
    policy = make("kandinsky5_video", steps=2, dtype="bfloat16", guidance_scale=2.5, check=True)
    part = policy.replay.states.parts[0]
    assert part.prepared[-1] == 9 and policy.shape == part.shape and policy.shape[-1] == 4
    policy.prepare(PROMPTS)  # tries the replay beside the pipeline as it is
    rollout = sampled(policy)
    assert rollout.sample.shape[1:] == policy.shape

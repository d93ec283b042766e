"""The policy ``pipeline`` where other parts meet it: precision, checkpointing, trees,
demonstrations, teachers. scripts/dev/check_shards.py has processes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mmrl import advantages
from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in
from mmrl.policies.diffusion.trees import Tree
from mmrl.policies.quantization import QuantizedLinear
from mmrl.scoring import Scorer
from mmrl.zoo.models.diffusion.flux import pack
from mmrl.zoo.objectives.distillation import Distill, Teacher
from tests.policies.diffusion.test_any_pipeline import (
    PROMPTS,
    RNG,
    SIGNS,
    assert_on_policy,
    both,
    gradient,
    make,
    sampled,
    trainer_of,
)

load_built_in()


def test_half_precision_scores_as_it_sampled():
    """The first ratio is 1 exactly, of frozen weights in bfloat16, in passes as wide as sampling's;
    in others it is 1 up to rounding. Latents and log-probs stay in float32."""
    policy = make("wan-two", dtype="bfloat16", lora=2, steps=2, check=True)
    dtypes = []
    first = next(m for n, m in policy.net.named_modules() if n.endswith("to_q.base_layer"))
    first.register_forward_hook(lambda net, args, output: dtypes.append(output.dtype))
    assert_on_policy(policy)
    assert set(dtypes) == {torch.bfloat16}
    rollout = sampled(policy, 2)
    assert rollout.logprob.dtype == rollout.sample.dtype == torch.float32
    assert not torch.equal(rollout.sample, rollout.sample.bfloat16().float())
    policy.pass_sizes.rows = 3
    for point in policy.path(rollout.replace(advantage=SIGNS)):
        for part in point.split(3):
            with torch.no_grad():
                logprob = policy.dist(part).log_prob(part.target)
            torch.testing.assert_close(logprob, part.recorded, atol=1e-2, rtol=0)


def test_frozen_weights_in_few_bits_are_trained_through_under_autocast():
    pytest.importorskip("bitsandbytes")
    policy = make("flux", steps=2, quantization="nf4", lora=2, attention="sdpa")
    layers = [layer for layer in policy.net.modules() if isinstance(layer, QuantizedLinear)]
    before = [layer.weight.clone() for layer in layers]
    assert_on_policy(policy, precision="bf16")
    assert layers and all(torch.equal(x, y.weight) for x, y in zip(before, layers, strict=True))
    assert policy.attending.used == "sdpa"
    compiled = make("flux", steps=2, compile="eager")
    assert compiled.compiled and compiled.trained is compiled.net
    assert any(layer._compiled_call_impl for layer in compiled.net.modules())


def test_gradient_checkpointing_changes_no_gradient():
    policy = make("wan-two", steps=2)
    rollout = sampled(policy, 2)
    whole = gradient(policy, rollout)
    policy.enable_gradient_checkpointing()
    torch.testing.assert_close(gradient(policy, rollout), whole, atol=1e-5, rtol=1e-4)


def sometimes(media, prompts):
    """Fails for the first of every four pictures."""
    values = media.as_subclass(torch.Tensor).flatten(1).mean(1)
    values[::4] = torch.nan
    return values


def test_a_failed_reward_and_branches_leave_the_first_ratio_at_one():
    policy = make("flux", steps=3, tree=Tree(splits=[0, 1]))
    trainer = trainer_of(policy, group_size=4, train_batch_size=8, max_reward_failure_rate=1.0)
    trainer.scorer = Scorer({"sometimes": sometimes}, max_failures=1.0)
    trainer.advantage = advantages.flow_grpo
    metrics = trainer.iterate()
    # passes of three steps at once are narrower than sampling's, so the last bit may differ
    assert metrics["ratio/max_deviation"] < 1e-6 and metrics["grad_norm"] > 0
    assert metrics["samples/excluded"] > 0


def test_channels_that_only_a_picture_would_fill_are_held():
    """Of Kandinsky 5 from texts; half precision has too few numbers to tell latents apart."""
    policy = make("kandinsky5_video", steps=2, dtype="bfloat16", guidance_scale=2.5, check=True)
    part = policy.replay.states.parts[0]
    assert part.prepared[-1] == 9 and policy.shape == part.shape and policy.shape[-1] == 4
    policy.prepare(PROMPTS)  # tries the replay beside the pipeline as it is
    assert sampled(policy).sample.shape[1:] == policy.shape


def test_a_prompt_whose_call_fails_is_named():
    policy = make("flux", steps=2, together=None)
    plain = policy.replay.function

    def picky(pipe, **kwargs):
        if "blue" in str(kwargs["prompt"]):
            raise ValueError("too sad\nfor words")
        return plain(pipe, **kwargs)

    policy.replay.function = picky
    with pytest.raises(UserError, match="called for the prompt 'a blue two': too sad$"):
        sampled(policy)

    def single(pipe, **kwargs):
        if isinstance(kwargs["prompt"], list):
            raise ValueError("one at a time")
        return plain(pipe, **kwargs)

    policy.replay.function = single
    with pytest.raises(UserError, match="several prompts at once: one at a time; set"):
        sampled(policy)


def test_prompts_of_other_inputs_are_refused():
    policy = make("flux", steps=2)
    other = make("flux", steps=2, inputs={"prompt": "text", "prompt_2": "text"})
    with pytest.raises(UserError, match="reads prompt of a prompt .* of which prompt, prompt_2"):
        policy.arguments.of(other.arguments.numbers(PROMPTS).tolist(), 1.0)


def test_pictures_of_others_become_the_latents_of_the_family_written_by_hand():
    """The layout is found by asking the pipeline's own decoding."""
    family, replayed = both("flux")
    colours = torch.rand(2, 3, *family.size, generator=torch.Generator().manual_seed(0))
    media = RNG.uniform(torch.arange(2)).view(2, 1, 1, 1) * colours
    latents = pack(family.encode_media(media))
    torch.testing.assert_close(replayed.encode_media(media), latents, atol=1e-4, rtol=1e-4)
    rollout = replayed.demonstrate(PROMPTS, [media[0], None], RNG)
    torch.testing.assert_close(rollout.sample[0], latents[0], atol=1e-4, rtol=1e-4)
    assert rollout.trainable.tolist() == [True, False]
    with pytest.raises(UserError, match="height, width and num_frames of policy option call"):
        replayed.encode_media(media[..., :16])


def test_a_teacher_knows_its_students_prompts():
    """On-policy distillation: nothing to learn of oneself, and something of guidance."""
    student = make("sd", steps=2)
    point = next(iter(student.path(sampled(student, 2).replace(advantage=SIGNS))))
    gaps = []
    for scale in (1.0, 4.0):
        objective = Distill([Teacher(partial(make, "sd", steps=2, guidance_scale=scale))])
        objective.setup(student)
        gaps.append(objective.loss(student, point).mean())
    assert gaps[0].abs() < 1e-9 < gaps[1] and gaps[1].requires_grad


def test_copies_look_for_weights_that_reach_no_output():
    """DDP fails in the second step if it is not configured for it; check_shards.py runs it."""
    policy = make("qwen_image", steps=2)
    gradient(policy, sampled(policy, 2))
    trained = [p for p in policy.net.parameters() if p.requires_grad]
    assert any(p.grad is None for p in trained) and policy.find_unused_parameters

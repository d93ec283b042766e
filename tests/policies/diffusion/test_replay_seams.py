"""The policy ``pipeline`` where other parts meet it: half precision, few bits, checkpointing,
uneven groups, demonstrations, teachers, learning. tests/train/test_processes.py has processes."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mmrl.config.options import EvaluateOptions
from mmrl.core.errors import UserError
from mmrl.core.paths import find_config
from mmrl.core.registry import load_built_in
from mmrl.experiment.build import Session, read
from mmrl.experiment.evaluation import evaluate
from mmrl.policies.quantization import QuantizedLinear
from mmrl.zoo.models.diffusion.flux import pack
from mmrl.zoo.objectives.distillation import Distill, Teacher
from samplers.noise import Rng
from tests.fixtures import tiny_diffusers
from tests.fixtures.replay_cases import CASES
from tests.policies.diffusion.test_any_pipeline import PROMPTS, both, make, trainer_of

load_built_in()
RNG = Rng.of("same")
SIGNS = torch.tensor([1.0, -0.5, 2.0, -1.0])[:, None]


def sampled(policy, copies=2):
    with torch.no_grad():
        return policy.rollout(PROMPTS, copies, RNG)


def gradient(policy):
    """Of two steps at once."""
    policy.net.zero_grad()
    rollout = sampled(policy).replace(advantage=SIGNS)
    for point in list(policy.path(rollout))[-2:]:
        (policy.dist(point).log_prob(point.target) * point.advantage).sum().backward()
    return {n: p.grad.clone() for n, p in policy.net.named_parameters() if p.grad is not None}


def test_half_precision_scores_as_it_sampled():
    """The first ratio is 1 exactly, of frozen weights in bfloat16, in passes as wide as sampling's;
    in others it is 1 up to rounding. Latents and log-probs stay in float32."""
    policy = make("wan-two", dtype="bfloat16", lora=2, steps=2, check=True)
    dtypes = []
    first = next(m for n, m in policy.net.named_modules() if n.endswith("to_q.base_layer"))
    first.register_forward_hook(lambda net, args, output: dtypes.append(output.dtype))
    trainer = trainer_of(policy)
    assert trainer.iterate()["ratio/max_deviation"] == 0.0
    assert set(dtypes) == {torch.bfloat16}
    rollout = sampled(policy)
    assert rollout.logprob.dtype == rollout.sample.dtype == torch.float32
    assert not torch.equal(rollout.sample, rollout.sample.bfloat16().float())
    policy.pass_sizes.rows = 3
    for point in policy.path(rollout.replace(advantage=SIGNS)):
        for part in point.split(3):
            with torch.no_grad():
                logprob = policy.dist(part).log_prob(part.target)
            torch.testing.assert_close(logprob, part.recorded, atol=1e-2, rtol=0)


def test_frozen_weights_in_few_bits_are_trained_through():
    pytest.importorskip("bitsandbytes")
    policy = make("flux", quantization="nf4", lora=2, steps=2, check=True)
    layers = [layer for layer in policy.net.modules() if isinstance(layer, QuantizedLinear)]
    before = [layer.weight.clone() for layer in layers]
    metrics = trainer_of(policy).iterate()
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0
    assert layers and all(torch.equal(x, y.weight) for x, y in zip(before, layers, strict=True))


def test_gradient_checkpointing_changes_no_gradient():
    policy = make("wan-two", steps=2)
    whole = gradient(policy)
    policy.enable_gradient_checkpointing()
    again = gradient(policy)
    assert whole and whole.keys() == again.keys()
    for key, value in whole.items():
        torch.testing.assert_close(again[key], value, atol=1e-6, rtol=1e-4, msg=key)


def test_uneven_groups_are_those_of_the_family_written_by_hand():
    family, replayed = both("sd3", noise_level=0.5)
    state = torch.get_rng_state()
    ours, theirs = (sampled(policy, (1, 2)) for policy in (family, replayed))
    assert theirs.group.tolist() == [0, 1, 1]
    torch.testing.assert_close(theirs.sample, ours.sample, atol=1e-4, rtol=0)
    torch.testing.assert_close(theirs.logprob, ours.logprob, atol=1e-4, rtol=0)
    assert torch.equal(torch.get_rng_state(), state), "a pipeline drew from the global generator"


def test_a_prompt_whose_call_fails_is_named():
    policy = make("flux", steps=2)
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


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_pictures_of_others_become_the_latents_of_the_family_written_by_hand(name):
    """The layout is found by asking the pipeline's own decoding."""
    family, replayed = both(name)
    sides = family.size
    colours = torch.rand(2, 3, *sides, generator=torch.Generator().manual_seed(0))
    media = RNG.uniform(torch.arange(2)).view(2, 1, 1, 1) * colours
    latents = family.encode_media(media)
    latents = pack(latents) if name == "flux" else latents
    torch.testing.assert_close(replayed.encode_media(media), latents, atol=1e-4, rtol=1e-4)
    if name == "flux":
        rollout = replayed.demonstrate(PROMPTS, [media[0], None], RNG)
        torch.testing.assert_close(rollout.sample[0], latents[0], atol=1e-4, rtol=1e-4)
        assert rollout.trainable.tolist() == [True, False]
        with pytest.raises(UserError, match="height, width and num_frames of policy option call"):
            replayed.encode_media(media[..., :16])


def test_a_teacher_knows_its_students_prompts():
    """On-policy distillation: nothing to learn of oneself, and something of guidance."""
    student = make("sd", steps=2)
    point = next(iter(student.path(sampled(student).replace(advantage=SIGNS))))
    gaps = []
    for scale in (1.0, 4.0):
        objective = Distill([Teacher(partial(make, "sd", steps=2, guidance_scale=scale))])
        objective.setup(student)
        gaps.append(objective.loss(student, point).mean())
    assert gaps[0].abs() < 1e-9 < gaps[1] and gaps[1].requires_grad


BEST = """{pipeline: {path: "world:digits/sd3", steps: 4, evaluation_steps: 4, check: false,
call: {height: 32, width: 32, max_sequence_length: 16}}}"""


def test_it_learns_digits_by_the_preset_best():
    """Matching of re-noised pictures, and a guided reference, through the pipeline's own code."""
    options = [f"policy={BEST}", "train.group_size=8", "train.train_batch_size=16"]
    recipe = read(find_config("digits/best"), [*options, "optimizer.adamw.lr=1e-3"])
    session = Session.of(recipe)
    trainer = session.trainer()
    rewards = []
    for iterations in (2, 0):
        held_out = evaluate(
            session.policy, session.prompts()[:20], session.scorer, EvaluateOptions(num_samples=2)
        )
        rewards.append(held_out["digits"].mean)
        for _ in range(iterations):
            trainer.iterate()
    assert rewards[1] > rewards[0] + 0.1, rewards


def test_compiled_blocks_sample_and_train_as_plain_ones():
    make("flux")  # built now: that draws from the generator which adapters begin with
    options = {"lora": 2, "steps": 2}
    weights = []
    for more in ({}, {"compile": "eager", "attention": "sdpa"}):
        torch._dynamo.reset()
        policy = make("flux", **options, **more)
        metrics = trainer_of(policy).iterate()
        assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0
        weights.append(policy.weights.full())
    assert policy.compiled and policy.attending.used == "sdpa" and policy.trained is policy.net
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=2e-5, rtol=1e-4)


def test_attention_that_this_machine_cannot_run_is_refused_before_loading():
    with pytest.raises(UserError, match="policy option attention = (flash|xformers)"):
        make("flux", path="/nowhere", attention="flash", quantization=None)


def test_a_decoder_that_fails_on_several_videos_gets_each_alone():
    policy = make("hunyuan15", steps=2)
    rollout = policy.rollout(PROMPTS[:1], [2], Rng.of("decode"))
    media = policy.decode(rollout)
    assert len(media) == 2 and not torch.equal(media[0], media[1])
    torch.testing.assert_close(media[1:], policy.decode(rollout[slice(1, 2)]))


def test_noise_before_decoding_is_the_rows_own(tmp_path):
    """LTX-Video's later decoders see latents with noise in them."""
    pipe = tiny_diffusers.pipeline("ltx")
    options = {name: value for name, value in pipe.vae.config.items() if name[0] != "_"}
    vae = type(pipe.vae)(**(options | {"timestep_conditioning": True}))
    type(pipe)(**(pipe.components | {"vae": vae})).save_pretrained(tmp_path)
    call = CASES["ltx"].call | {"decode_timestep": 0.5}
    policy = make("ltx", call, path=str(tmp_path), check=True, fixed_batch_rows=None)
    rollout = sampled(policy)  # the check compares with the pipeline's own loop
    with torch.no_grad():
        media = policy.decode(rollout)
        alone = policy.decode(rollout[torch.tensor([2])])
        alike = rollout.replace(sample=rollout.sample[:1].expand_as(rollout.sample).clone())
        others = policy.decode(alike)
    torch.testing.assert_close(alone[0], media[2], atol=1e-5, rtol=0)
    assert (others[1] - others[0]).abs().max() > 1e-3


def test_copies_look_for_weights_that_reach_no_output():
    """DDP fails in the second step if it is not configured for it; check_shards.py runs it."""
    policy = make("qwen_image", steps=2)
    trained = {name for name, p in policy.net.named_parameters() if p.requires_grad}
    assert trained - gradient(policy).keys() and policy.find_unused_parameters


@pytest.mark.parametrize("name", ["hunyuan15", "hunyuan15_i2v"])
def test_hunyuan_video_15_reads_its_prompt_and_its_gradient_is_finite(name):
    """Of a template as long as what the pipeline cuts off: without a token of the prompt left the
    network divides 0 by 0, which reaches no output and every gradient."""
    policy = make(name, steps=2, together=CASES[name].together)
    masks = []
    policy.net.register_forward_hook(
        lambda net, args, kwargs, output: masks.append(kwargs["encoder_attention_mask"]),
        with_kwargs=True,
    )
    gradients = gradient(policy)
    assert gradients and all(value.isfinite().all() for value in gradients.values())
    assert gradients["context_embedder.proj_in.weight"].abs().max() > 0
    assert masks and all((mask.sum(1) > 0).all() for mask in masks)

"""The policy ``pipeline`` against diffusers' own pipelines and against the families written by
hand; tests/fixtures/replay_cases.py says which pipelines it trains."""

from __future__ import annotations

import inspect
import json
import runpy
import shutil
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import diffusers
import pytest
import torch
from PIL import Image

from mmrl import advantages
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.objectives import PolicyGradient
from mmrl.policies.diffusion.pipeline_folder import media_of, rounding
from mmrl.scoring import Scorer
from mmrl.train.minibatches import passes
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.models.any_pipeline.replay_check import check_replay
from mmrl.zoo.models.any_pipeline.replay_draws import Draws
from mmrl.zoo.models.any_pipeline.replay_prompts import PromptArguments
from mmrl.zoo.models.diffusion.flux import pack, unpack
from samplers.noise import Rng
from tests.experiment.test_resume import resumes
from tests.fixtures import tiny_diffusers
from tests.fixtures.replay_cases import CASES, UNGUARDED

load_built_in()
RED = Image.new("RGB", (16, 16), "red")
FILM = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "green", "red", "grey")]
PROMPTS = [
    {"text": text, "image": RED, "video": FILM, "fps": 16} for text in ("a red seven", "a blue two")
]
# name -> the family's options, the pipeline's, and what turns its states into the family's
FAMILIES = {
    "sd3": (
        {"path": "world:digits/sd3-test", "size": 32},
        {"height": 32, "width": 32, "max_sequence_length": 16},
    ),
    "flux": (
        {"size": [16, 32], "text_length": 16},
        {"height": 16, "width": 32, "max_sequence_length": 16, "guidance_scale": 3.5},
    ),
}


def place_of(name):
    return "world:digits/sd3-test" if name == "sd3" else str(tiny_diffusers.folder(name))


def make(name, call=None, **options):
    torch.manual_seed(0)
    call = CASES[name].call if call is None else call
    chosen = {"path": place_of(name), "steps": 4, "fixed_batch_rows": 4, "check": False}
    chosen |= UNGUARDED if "cosmos" in name else {}
    return POLICIES.build("pipeline", call=call, **(chosen | options))


def both(name, **options):
    """The family written by hand, and the same folder replayed."""
    own, call = FAMILIES[name]
    torch.manual_seed(0)
    chosen = {"path": place_of(name), "steps": 4, "fixed_batch_rows": 4} | options
    return POLICIES.build(name, **(chosen | own)), make(name, call, **options)


def test_sd3_samples_scores_and_learns_as_the_family_written_by_hand():
    family, replayed = both("sd3", noise_level=0.5, guidance_scale=2.5)
    torch.testing.assert_close(replayed.times, family.times, atol=1e-6, rtol=0)
    gradients = []
    rollouts = []
    for policy in (family, replayed):
        with torch.no_grad():
            rollout = policy.rollout(PROMPTS, 2, Rng.of("same"))
        signs = torch.tensor([1.0, -0.5, 2.0, -1.0])[:, None]
        objective = PolicyGradient(clip_range=1e-2)
        for point in passes(policy.path(rollout.replace(advantage=signs)), 4):
            (objective.loss(policy, point) * point.mask).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.net.parameters()]))
        rollouts.append((rollout, policy.decode(rollout)))
    (ours, picture), (theirs, other) = rollouts
    torch.testing.assert_close(theirs.sample, ours.sample, atol=1e-4, rtol=0)
    torch.testing.assert_close(theirs.logprob, ours.logprob, atol=1e-4, rtol=0)
    torch.testing.assert_close(other, picture, atol=1e-4, rtol=0)
    scale = gradients[0].abs().max()
    assert scale > 0
    torch.testing.assert_close(gradients[1] / scale, gradients[0] / scale, atol=1e-3, rtol=0)


def test_flux_without_noise_is_the_family_written_by_hand():
    family, replayed = both("flux", guidance_scale=2.5)
    with torch.no_grad(), family.evaluating(), replayed.evaluating():
        ours, theirs = (p.rollout(PROMPTS, 2, Rng.of("same")) for p in (family, replayed))
    torch.testing.assert_close(theirs.sample, pack(ours.sample), atol=1e-4, rtol=0)
    torch.testing.assert_close(replayed.decode(theirs), family.decode(ours), atol=1e-4, rtol=0)


def test_a_state_between_the_pipelines_times_is_seen_at_its_own():
    """Re-noised states have their own times, different for each row."""
    family, replayed = both("flux")
    rng = Rng.of("state")
    x = rng.normal(torch.arange(3), family.shape, 0, torch.float32)
    t = torch.tensor([0.37, 0.9, 0.37])
    with torch.no_grad():
        velocity = family.velocity(x, t, rows(family.encode(PROMPTS), [0, 1, 1]))
        other = replayed.velocity(pack(x), t, rows(replayed.encode(PROMPTS), [0, 1, 1]))
    torch.testing.assert_close(unpack(other, *family.shape[-2:]), velocity, atol=1e-5, rtol=1e-5)


def rows(cond, group):
    return {name: value[group] for name, value in cond.items() if name != "uncond"}


def noises(policy, row):
    """The noise of the first latents, and what a consistency model's sampler adds later."""
    steps = range(policy.steps + 1 if policy.renews else 1)
    return [Rng.of("same").normal(row, policy.shape, step, torch.float32) for step in steps]


def plain_pictures(name, policy, guidance, drawn, pipe=None):
    """The folder's pictures by diffusers alone, whose draws are ``drawn``: its scheduler, or DDIM
    where that has a history."""
    pipe = pipe or tiny_diffusers.pipeline(name)
    pipe.set_progress_bar_config(disable=True)
    if "pndm" in name:
        pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
    if CASES[name].options.get("vae_tiling"):
        pipe.vae.enable_tiling()
    call = dict(CASES[name].call)
    if policy.arguments.guidance:
        call[policy.arguments.guidance] = guidance
    if policy.arguments.guidance == "true_cfg_scale":
        call["negative_prompt"] = ""
    if "image" in policy.arguments.inputs:
        call["image"] = RED
    if "video" in policy.arguments.inputs:
        call["video"] = FILM
    seeded = torch.Generator().manual_seed(0)
    # the innermost answers first; of the first noise each state has its own
    first = policy.replay.states.split(drawn[0])
    if name == "hunyuan_i2v":  # the first frame's is drawn too, and not used
        first = [torch.nn.functional.pad(drawn[0], (0, 0, 0, 0, 1, 0), value=7.0)]
    answers = [*drawn[:0:-1], first]
    with ExitStack() as stack:
        for noise in answers:
            stack.enter_context(Draws(noise))
        return pipe(
            prompt=PROMPTS[0]["text"],
            num_inference_steps=policy.asked_steps[0],
            output_type="pt",
            generator=seeded,
            return_dict=False,
            **call,
        )[0]


SUITE = {name: case for name, case in CASES.items() if case.suite}


@pytest.mark.parametrize("name", [name for name, case in SUITE.items() if not case.refused])
def test_a_pipeline_without_noise_is_diffusers_own(name):
    """And passes its own check, which finds out whether prompts may share calls; and what it
    decodes can be encoded, unless that is known not to work."""
    case = CASES[name]
    steps = 3 if name == "wan-two" else 2  # both experts; discrete schedules divide 1000
    policy = make(name, check=True, fixed_batch_rows=None, steps=steps, **case.options)
    assert policy.pipeline == case.pipeline
    guidance = 2.5 if policy.arguments.guidance else 1.0
    policy.guidance_scale = guidance
    policy.prepare(PROMPTS)
    assert policy.together == case.together
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout(PROMPTS[:1], 1, Rng.of("same"))
        ours = policy.decode(rollout)
    with nullcontext() if case.demonstrations else pytest.raises(UserError, match="of others"):
        policy.encode_media(ours)
        layout = policy.encoder.layout
        again = layout.latents(layout.codes(rollout.sample), rollout.sample.shape)
        torch.testing.assert_close(again, rollout.sample, atol=1e-5, rtol=1e-5)
    if name in ("wan-unipc", "cosmos25", "sd-edm-dpm"):
        return  # whose own solvers have a history; the check compared Euler's steps on their sigmas
    if name == "kandinsky22-combined":
        return  # whose prior draws other numbers; see test_two_stages.py
    theirs = plain_pictures(name, policy, guidance, noises(policy, rollout.row_id))
    theirs = media_of(theirs, case.pipeline)
    torch.testing.assert_close(ours, theirs.float(), atol=2e-4 + rounding(ours), rtol=0)


@pytest.mark.parametrize("name", [name for name, case in SUITE.items() if case.refused])
def test_what_cannot_be_replayed_is_refused_in_one_sentence(name):
    with pytest.raises(UserError, match=CASES[name].refused) as error:
        make(name, check=True).prepare(PROMPTS)
    assert "\n" not in str(error.value)


def test_the_page_has_the_table_of_these_data():
    script = runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "dev" / "replay_table.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert script["written"](page) == page, "run python scripts/dev/replay_table.py"


def brightness(media, prompts):
    return media.flatten(1).mean(1)


def trainer_of(policy, **options):
    sizes = {"prompts_per_iteration": 2, "group_size": 2, "train_batch_size": 4, "iterations": 3}
    return Trainer(
        policy,
        PROMPTS,
        Scorer({"brightness": brightness}),
        advantages.dance_grpo,
        PolicyGradient(clip_range=1e-2),
        partial(adamw, lr=1e-2),
        TrainOptions(**(sizes | options)),
    )


@pytest.mark.parametrize("name", ["sd", "wan_i2v"])
def test_the_first_step_is_exactly_on_policy(name):
    options = {"lora": 2, "guidance_scale": 2.5} if name == "sd" else {}
    metrics = trainer_of(make(name, check=True, **options)).iterate()
    assert metrics["ratio/max_deviation"] == 0.0
    assert metrics["grad_norm"] > 0 and metrics["step"] == 1


def test_passes_that_hold_rows_of_several_steps_give_the_same_gradient():
    policy = make("flux")
    with torch.no_grad():
        rollout = policy.rollout(PROMPTS, 2, Rng.of("same"))
    rollout = rollout.replace(advantage=torch.tensor([1.0, -1.0, 0.5, -2.0])[:, None])
    gradients = []
    for size in (4, 3):
        policy.pass_sizes.rows = size
        policy.net.zero_grad()
        for point in passes(policy.path(rollout), size):
            ratio = (policy.dist(point).log_prob(point.target) - point.recorded).exp()
            torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-4, rtol=0)
            (ratio * point.advantage).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.net.parameters()]))
    scale = gradients[0].abs().max()
    torch.testing.assert_close(gradients[1] / scale, gradients[0] / scale, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "lora"), [("flux", 2), ("wan-two", 2), ("lumina2", None)])
def test_an_export_gives_the_plain_pipeline_our_pictures(name, lora, tmp_path):
    policy = make(name, lora=lora, check=True)
    metrics = trainer_of(policy).iterate()
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0
    policy.export(tmp_path)
    again = make(name, path=place_of(name) if lora else str(tmp_path), fixed_batch_rows=None)
    before = make(name, fixed_batch_rows=None)
    pipe = again.replay.pipe
    if lora:
        plain = diffusers.DiffusionPipeline.from_pretrained(place_of(name))
        folders = {"transformer": tmp_path}
        if len(policy.parts) > 1:
            folders = {part: tmp_path / part for part in policy.parts}
        for part, folder in folders.items():
            other = {"load_into_transformer_2": True} if part == "transformer_2" else {}
            plain.load_lora_weights(folder, **other)
            pipe.__dict__[part].__dict__["_net"].__dict__.update(getattr(plain, part).__dict__)
    media = []
    for one in (policy, again, before):
        with one.evaluating(), torch.no_grad():
            media.append(one.decode(one.rollout(PROMPTS, 1, Rng.of("same"))))
    torch.testing.assert_close(media[1], media[0], atol=1e-4, rtol=0)
    assert (media[2] - media[0]).abs().max() > 1e-4  # the training is seen


def test_a_checkpoint_resumes_to_the_bit(tmp_path):
    def fresh():
        return trainer_of(make("flux", lora=2, guidance_scale=2.5, steps=2))

    resumes(fresh, tmp_path)


def test_a_text_is_encoded_once_and_each_by_itself():
    policy = make("flux")
    calls = []
    encoder = policy.encoders[0]
    cache = encoder.forward
    plain = cache.plain
    cache.plain = lambda *args, **kwargs: calls.append(len(args[0])) or plain(*args, **kwargs)
    cache.results.clear()
    with torch.no_grad():
        policy.rollout(PROMPTS, 2, Rng.of("same"))
    assert calls == [1, 1]


def test_the_check_finds_a_pipeline_that_remembers_steps():
    policy = make("flux", check=False)
    plain = policy.replay.function
    steps = policy.replay.scheduler.step

    def remembering(pipe, **kwargs):
        seen = []

        def step(output, *args, **more):
            seen.append(output)
            return steps(sum(seen), *args, **more)

        policy.replay.scheduler.step = step
        return plain(pipe, **kwargs)

    policy.replay.function = remembering
    with pytest.raises(UserError, match="a step depends on more than the latents"):
        check_replay(policy, PROMPTS)


def test_the_check_finds_a_network_that_draws_numbers():
    policy = make("flux", together=True)
    forward = policy._forward

    def noisy(name, args, kwargs):
        (output,) = forward(name, args, kwargs)
        return (output + (0.1 * torch.randn_like(output) if torch.is_grad_enabled() else 0),)

    policy.replay.forward = noisy
    with pytest.raises(UserError, match="nats apart"):
        check_replay(policy, PROMPTS)


def with_index(tmp_path, **changes):
    place = tmp_path / "model"
    shutil.copytree(tiny_diffusers.folder("flux"), place)
    index = json.loads((place / "model_index.json").read_text()) | changes
    (place / "model_index.json").write_text(json.dumps(index))
    return str(place)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"_class_name": "TomorrowsPipeline"}, "has no pipeline TomorrowsPipeline"),
        ({"_class_name": "utils"}, "has no pipeline utils"),
        ({"transformer": ["my_code", "Net"]}, "code of a folder is not run"),
    ],
)
def test_only_classes_of_the_installed_libraries_are_loaded(changes, says, tmp_path):
    with pytest.raises(UserError, match=says):
        make("flux", path=with_index(tmp_path, **changes))


def test_pickled_weights_are_not_opened(tmp_path):
    place = with_index(tmp_path)
    folder = f"{place}/transformer"
    shutil.move(
        f"{folder}/diffusion_pytorch_model.safetensors", f"{folder}/diffusion_pytorch_model.bin"
    )
    with pytest.raises(UserError, match="cannot load it"):
        make("flux", path=place)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"call": {"hieght": 16}}, "hieght does not exist in a call of FluxPipeline"),
        ({"call": {"latents": 0}}, "latents is set by the policy"),
        ({"call": {"height": 16, "width": 16, "max_sequence_length": 9999}}, "cannot be called"),
        ({"logprob_guidance": "conditional"}, "guidance is the pipeline's own code"),
        ({"inputs": {"prompt": "caption"}}, "no 'caption', which FluxPipeline reads"),
    ],
)
def test_a_mistake_is_one_sentence(options, says):
    with pytest.raises(UserError, match=says):
        make("flux", **options).encode(PROMPTS)


def test_rows_without_an_input_or_with_what_is_no_text_are_one_list():
    policy = make("flux", inputs={"prompt": "text", "prompt_2": "more"})
    good = {"text": "a", "more": "b"}
    broken = [{"text": "a"}, good | {"more": ["b"]}, good | {"text": 7}]
    rows = [row | {"origin": f"d.jsonl:{i}"} for i, row in enumerate([good, *broken], start=1)]
    with pytest.raises(UserError, match="3 of 4 rows are broken") as caught:
        policy.admit(rows)
    for words in ("d.jsonl:2: it has no 'more'", "d.jsonl:3: 'more' must be", "d.jsonl:4: 'text'"):
        assert words in str(caught.value)


def test_guidance_is_refused_where_there_is_none():
    known = inspect.signature(diffusers.SanaSprintPipeline.__call__).parameters
    arguments = PromptArguments("SanaSprintPipeline", known, {}, None, None)
    assert arguments.guidance is None  # its guidance_scale is an input of the network
    arguments.check_guidance(1.0)
    with pytest.raises(UserError, match="no classifier-free guidance"):
        arguments.check_guidance(2.0)


def test_sana_samples_the_size_that_it_is_asked_for():
    """Its call would bin 32 x 32 to 1024 x 1024, and shrink the picture."""
    asked = {"height": 32, "width": 32}
    policy = make("sana", call=asked)
    assert policy.shape[-2:] == make("sana").shape[-2:]
    assert "use_resolution_binning False" in policy.report.notes[0]
    with pytest.raises(UserError, match="asked for 32 x 32 pixels and samples 1024 x 1024"):
        make("sana", call=asked | {"use_resolution_binning": True})

"""The policy ``pipeline`` against diffusers' own pipelines and against the families written by
hand; tests/fixtures/replay_cases.py says which pipelines it trains."""

from __future__ import annotations

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
from torch.nn.attention import flex_attention

from mmrl import advantages
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.objectives import PolicyGradient
from mmrl.policies.diffusion.guardrails import Passing
from mmrl.policies.diffusion.pipeline_folder import media_of, rounding
from mmrl.policies.diffusion.trees import Tree
from mmrl.scoring import Scorer
from mmrl.train.minibatches import passes
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.models.any_pipeline.replay_check import check_replay
from mmrl.zoo.models.any_pipeline.replay_draws import Draws
from mmrl.zoo.models.diffusion.flux import pack, unpack
from samplers.noise import Rng
from tests.fixtures import tiny_diffusers, tiny_modular
from tests.fixtures.replay_cases import CASES, MODULAR, UNGUARDED

load_built_in()
RNG = Rng.of("same")
RED = Image.new("RGB", (16, 16), "red")
FILM = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "green", "red", "grey")]
PROMPTS = [
    {"text": text, "image": RED, "video": FILM, "fps": 16} for text in ("a red seven", "a blue two")
]
SIGNS = torch.tensor([1.0, -0.5, 2.0, -1.0])[:, None]
# name -> the options of the family written by hand, and the call of its pipeline
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


@pytest.fixture(autouse=True)
def plain_flex_attention(monkeypatch):
    """Of LTX-2.5's decoder, through which no gradient goes: computed as written, not traced."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def place_of(name):
    if name == "sd3":
        return "world:digits/sd3-test"
    return str((tiny_modular if name in MODULAR else tiny_diffusers).folder(name))


def make(name, call=None, **options):
    torch.manual_seed(0)
    case = MODULAR.get(name) or CASES.get(name)
    chosen = {"path": place_of(name), "steps": 4, "fixed_batch_rows": 4, "check": False}
    if case is not None:
        call = case.call if call is None else call
        chosen |= {} if options.get("check") else {"together": case.together}
        chosen |= case.options if name in MODULAR else {}
    chosen |= UNGUARDED if "cosmos" in name else {}
    return POLICIES.build("pipeline", call=call, **(chosen | options))


def both(name, **options):
    """The family written by hand, and the same folder replayed."""
    own, call = FAMILIES[name]
    torch.manual_seed(0)
    chosen = {"path": place_of(name), "steps": 4, "fixed_batch_rows": 4} | options
    return POLICIES.build(name, **(chosen | own)), make(name, call, **options)


def sampled(policy, copies=1, prompts=PROMPTS):
    with torch.no_grad():
        return policy.rollout(prompts, copies, RNG)


def evaluated(policy, prompts=PROMPTS):
    """A rollout without exploration, and its media."""
    with policy.evaluating(), torch.no_grad():
        rollout = policy.rollout(prompts, 1, RNG)
        return rollout, policy.decode(rollout)


def assert_same_media(ours, theirs, atol=1e-4):
    """Of pictures or videos, and of their sounds."""
    for one, two in zip(parts_of(ours), parts_of(theirs), strict=True):
        torch.testing.assert_close(one, two, atol=atol, rtol=0)


def parts_of(media):
    sound = getattr(media, "sound", None)
    return [media.as_subclass(torch.Tensor).float(), *([] if sound is None else [sound])]


def gradient(policy, rollout, size=4):
    """That of the policy gradient, with the greatest number 1, in passes of ``size`` rows."""
    policy.net.zero_grad()
    signed = rollout.replace(advantage=SIGNS[: len(rollout)])
    for point in passes(policy.path(signed), size):
        (PolicyGradient(clip_range=1e-2).loss(policy, point) * point.mask).sum().backward()
    found = [p.grad.flatten() for p in policy.net.parameters() if p.grad is not None]
    found = torch.cat(found)
    assert found.abs().max() > 0
    return found / found.abs().max()


def assert_same_policies(one, two, copies=2, prompts=PROMPTS, atol=1e-4):
    """Samples, log-probs, media and gradients."""
    runs = [sampled(policy, copies, prompts) for policy in (one, two)]
    for field in ("sample", "logprob"):
        ours, theirs = (getattr(run, field) for run in runs)
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)
    with torch.no_grad():
        media = [policy.decode(run) for policy, run in zip((one, two), runs)]
    assert_same_media(*media, atol=atol)
    ours, theirs = (gradient(policy, run) for policy, run in zip((one, two), runs))
    torch.testing.assert_close(ours, theirs, atol=max(10 * atol, 1e-5), rtol=0)


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


def assert_on_policy(policy, **options):
    """The ratios of a first iteration are exactly 1."""
    metrics = trainer_of(policy, **options).iterate()
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0


def test_sd3_samples_scores_and_learns_as_the_family_written_by_hand():
    family, replayed = both("sd3", noise_level=0.5, guidance_scale=2.5, steps=3)
    torch.testing.assert_close(replayed.times, family.times, atol=1e-6, rtol=0)
    assert_same_policies(replayed, family)
    state = torch.get_rng_state()
    ours, theirs = (sampled(policy, (1, 2)) for policy in (family, replayed))  # uneven groups
    assert theirs.group.tolist() == [0, 1, 1]
    torch.testing.assert_close(theirs.logprob, ours.logprob, atol=1e-4, rtol=0)
    assert torch.equal(torch.get_rng_state(), state), "a pipeline drew from the global generator"


def test_a_state_between_the_pipelines_times_is_seen_at_its_own():
    """Re-noised states have their own times, different for each row."""
    family, replayed = both("flux")
    x = RNG.normal(torch.arange(3), family.shape, 0, torch.float32)
    t = torch.tensor([0.37, 0.9, 0.37])
    with torch.no_grad():
        velocity = family.velocity(x, t, rows(family.encode(PROMPTS), [0, 1, 1]))
        other = replayed.velocity(pack(x), t, rows(replayed.encode(PROMPTS), [0, 1, 1]))
    torch.testing.assert_close(unpack(other, *family.shape[-2:]), velocity, atol=1e-5, rtol=1e-5)


def rows(cond, group):
    return {name: value[group] for name, value in cond.items() if name != "uncond"}


# of the second, guidance is rescaled by the scheduler's sigma, which has to be that of the state
BETWEEN = {"cosmos2": {}, "ltx2": {"modality_scale": 2.0, "guidance_rescale": 0.7}}


@pytest.mark.parametrize("name", BETWEEN)
def test_at_one_time_two_numbers_of_steps_say_the_same(name):
    call = CASES[name].call | BETWEEN[name]
    policies = [make(name, call, guidance_scale=2.5, steps=steps) for steps in (5, 3)]
    x = RNG.normal(torch.arange(2), policies[0].shape, 0, torch.float32)
    t = policies[0].times[1:2].float().expand(2)
    assert (policies[1].times - t[0]).abs().min() > 1e-3
    with torch.no_grad():
        own, other = (policy.velocity(x, t, policy.encode(PROMPTS)) for policy in policies)
    torch.testing.assert_close(other, own, atol=1e-4, rtol=1e-4)


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


def test_passes_that_hold_rows_of_several_steps_give_the_same_gradient():
    policy = make("flux")
    rollout = sampled(policy, 2)
    gradients = []
    for size in (4, 3):
        policy.pass_sizes.rows = size
        gradients.append(gradient(policy, rollout, size))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["flux", "ltx2_i2v", "kandinsky22-combined"])
def test_a_row_is_the_same_alone_in_uneven_groups_and_in_narrow_passes(name):
    policy = make(name, steps=2, scheduler="lcm" if name == "flux" else "own")
    other = PROMPTS[1] | {"image": Image.new("RGB", (32, 32), "blue")}
    whole = sampled(policy, (1, 2), [PROMPTS[0], other])
    assert whole.group.tolist() == [0, 1, 1]
    assert (whole.sample[1] - whole.sample[2]).abs().max() > 0.1
    with torch.no_grad():
        alone = policy.rollout([other], (2,), RNG.after((1, 2), 1))
        media = policy.decode(whole)
        policy.pass_sizes.rows = 1
        narrow = sampled(policy, (1, 2), [PROMPTS[0], other])[1:]
        assert_same_media(policy.decode(whole[torch.tensor([2])]), media[2:], atol=1e-5)
    for part in (alone, narrow):
        torch.testing.assert_close(part.sample, whole.sample[1:], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(part.logprob, whole.logprob[1:], atol=1e-5, rtol=1e-5)
    if name.endswith("i2v"):  # whose first frame is the prompt's picture
        colours = parts_of(media)[0][:, 0].mean((2, 3))
        assert (colours[1] - colours[2]).abs().max() < (colours[0] - colours[1]).abs().max()


@pytest.mark.parametrize("name", ["ltx", "ltx25"])
def test_noise_that_a_decoder_draws_is_the_rows_own(name):
    timed = {"path": str(tiny_diffusers.folder("ltx-timed")), "check": True}
    call = CASES["ltx"].call | {"decode_timestep": 0.5}
    policy = make("ltx", call, **timed) if name == "ltx" else make(name, steps=2)
    rollout = sampled(policy, 2)
    with torch.no_grad():
        media = policy.decode(rollout)
        alone = policy.decode(rollout[torch.tensor([2])])
        alike = rollout.replace(sample=rollout.sample[:1].expand_as(rollout.sample).clone())
        others = policy.decode(alike)
    assert_same_media(alone, media[2:3], atol=1e-5)
    assert (others[1] - others[0]).abs().max() > 1e-3


def networks(name, parts, place, adapter=None):
    """The trained networks of a folder as diffusers alone loads them, with an adapter."""
    if name in MODULAR:
        pipe = diffusers.ModularPipeline.from_pretrained(place)
        pipe.load_components(names=list(parts))
    else:
        guardrail = {"safety_checker": Passing()} if "cosmos" in name else {}
        pipe = diffusers.DiffusionPipeline.from_pretrained(place, **guardrail)
    for part in parts if adapter else ():
        folder = adapter / part if len(parts) > 1 else adapter
        other = {"load_into_transformer_2": True} if part == "transformer_2" else {}
        if hasattr(pipe, "load_lora_weights"):
            pipe.load_lora_weights(folder, **other)
        else:
            net = getattr(pipe, part)
            net.load_lora_adapter(str(folder), prefix=None, use_safetensors=True)
    return {part: getattr(pipe, part) for part in parts}


# packed latents, two experts, all weights, sound and a picture, two stages, a modular pipeline
EXPORTED = {  # and the rank of an adapter
    "flux": 2,
    "wan-two": 2,
    "lumina2": None,
    "ltx2_i2v": 2,
    "kandinsky22-combined": 2,
    "flux3": None,
}


@pytest.mark.parametrize("name", EXPORTED)
def test_it_trains_on_policy_and_its_export_gives_plain_diffusers_our_media(name, tmp_path):
    lora = EXPORTED[name]
    steps = 3 if name == "wan-two" else 2
    policy = make(name, lora=lora, steps=steps)
    _, before = evaluated(policy, PROMPTS[:1])
    assert_on_policy(policy)
    policy.export(tmp_path / "written")
    place = shutil.move(tmp_path / "written", tmp_path / "export")  # which may be anywhere
    again = make(name, path=place_of(name) if lora else str(place), steps=steps)
    plain = networks(name, policy.parts, again.place, place if lora else None)
    for part, net in plain.items():
        replayed = again.replay.pipe.__dict__[part].__dict__["_net"]
        replayed.__dict__.update(net.__dict__)
    (_, ours), (_, theirs) = (evaluated(one, PROMPTS[:1]) for one in (policy, again))
    assert_same_media(ours, theirs)
    for one, two in zip(parts_of(before), parts_of(ours), strict=True):
        assert (one - two).abs().max() > 2e-5  # the training is seen, and heard


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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"_class_name": "TomorrowsPipeline"}, "has no pipeline TomorrowsPipeline"),
        ({"_class_name": "utils"}, "has no pipeline utils"),
        ({"transformer": ["my_code", "Net"]}, "code of a folder is not run"),
        ({}, "cannot load it"),  # weights that are a pickle
    ],
)
def test_only_safe_weights_and_classes_of_the_installed_libraries_are_loaded(
    changes, says, tmp_path
):
    place = tmp_path / "model"
    shutil.copytree(tiny_diffusers.folder("flux"), place)
    index = json.loads((place / "model_index.json").read_text()) | changes
    (place / "model_index.json").write_text(json.dumps(index))
    if not changes:
        (file,) = (place / "transformer").glob("*.safetensors")
        file.rename(file.with_suffix(".bin"))
    with pytest.raises(UserError, match=says):
        make("flux", path=str(place))


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("flux", {"call": {"hieght": 16}}, "hieght does not exist in a call of FluxPipeline"),
        ("flux", {"call": {"latents": 0}}, "latents is set by the policy"),
        ("flux", {"call": {"max_sequence_length": 9999}}, "cannot be called"),
        ("flux", {"logprob_guidance": "conditional"}, "guidance is the pipeline's own code"),
        ("flux", {"inputs": {"prompt": "caption"}}, "no 'caption', which FluxPipeline reads"),
        ("flux", {"guardrail": False}, "option guardrail: FluxPipeline has no guardrail"),
        ("flux", {"sound_share": 0.4}, "sound_share: FluxPipeline makes no sound"),
        ("ltx2", {"sound_share": 0.4, "logprob_reduction": "sum"}, "logprob_reduction sum is a d"),
        ("ltx25", {"call": {"stg_strength": 1.0}}, "stg_strength does not exist in a call of LTX"),
        ("cosmos2", {"steps": 1}, "steps: the last step of Cosmos2.* has no length, so 1"),
        ("cosmos2", {"scheduler": "lcm"}, "option scheduler: lcm is for flows, and the states of"),
        ("kandinsky22", {}, "AutoPipelineForText2Image.from_pretrained"),
        ("kandinsky22-combined", {"tree": Tree(splits=[0])}, "option tree: samples of KandinskyV2"),
        ("wan_v2v", {}, "video_frames: say how many frames .*VideoToVideoPipeline"),
        ("z_image", {"video_frames": 5}, r"video_frames: is for calls with a video \(ZImage"),
        ("sana_sprint", {"steps": 1}, "SCMScheduler adds noise .* at least 2 steps, not 1"),
        ("sana_sprint", {"steps": 2, "guidance_scale": 2.0}, "no classifier-free guidance"),
        ("cogvideox", {"scheduler": "lcm"}, "whose betas LCMScheduler knows"),
    ],
)
def test_a_mistake_is_one_sentence(name, options, says):
    with pytest.raises(UserError, match=says) as error:
        make(name, **options).encode(PROMPTS)
    assert "\n" not in str(error.value)


def test_rows_without_an_input_or_with_what_is_no_text_are_one_list():
    policy = make("flux", inputs={"prompt": "text", "prompt_2": "more"})
    good = {"text": "a", "more": "b"}
    broken = [{"text": "a"}, good | {"more": ["b"]}, good | {"text": 7}]
    rows = [row | {"origin": f"d.jsonl:{i}"} for i, row in enumerate([good, *broken], start=1)]
    with pytest.raises(UserError, match="3 of 4 rows are broken") as caught:
        policy.admit(rows)
    for words in ("d.jsonl:2: it has no 'more'", "d.jsonl:3: 'more' must be", "d.jsonl:4: 'text'"):
        assert words in str(caught.value)


def test_sana_samples_the_size_that_it_is_asked_for():
    """Its call would bin 32 x 32 to 1024 x 1024, and shrink the picture."""
    asked = {"height": 32, "width": 32}
    policy = make("sana", call=asked)
    assert policy.shape[-2:] == make("sana").shape[-2:]
    assert "use_resolution_binning False" in policy.report.notes[0]
    with pytest.raises(UserError, match="asked for 32 x 32 pixels and samples 1024 x 1024"):
        make("sana", call=asked | {"use_resolution_binning": True})

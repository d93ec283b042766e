"""What families make of ``scheduler_config.json``: the times and the process of diffusers' own
pipeline with the same file, or one sentence. And what they make of other parts' settings."""

import json
import shutil
from functools import cache, partial

import diffusers
import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in, locate
from mmrl.policies.diffusion import schedulers
from samplers.noise import Rng
from tests.fixtures import tiny_diffusers
from tests.policies.diffusion import test_folder_families as folders

load_built_in()

VIDEO = folders.CASES["wan"].own
# families of flows, whose cases say how they are made and called
FAMILIES = ["sd3", "flux", "flux2", "qwen_image", "z_image", "sana", "ltx", "wan", "hunyuan_video"]
EULER = "FlowMatchEulerDiscreteScheduler"
SOLVED = {"use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction"}
LIGHTNING = {
    "use_dynamic_shifting": True,
    "base_shift": 1.0986,
    "max_shift": 1.4,
    "max_image_seq_len": 8192,
}
TAKEN = {
    "as it is": (EULER, {}),
    "karras": (EULER, {"use_karras_sigmas": True}),
    "beta": (EULER, {"use_beta_sigmas": True}),
    "exponential": (EULER, {"use_exponential_sigmas": True}),
    "terminal": (EULER, {"shift": 3.0, "shift_terminal": 0.1}),
    "dynamic": (EULER, LIGHTNING),
    "linear": (EULER, LIGHTNING | {"time_shift_type": "linear"}),
    "unipc": ("UniPCMultistepScheduler", SOLVED),
    "dpm": ("DPMSolverMultistepScheduler", SOLVED),
}
LEFT = {  # and a word of the sentence
    "stochastic": (EULER, {"stochastic_sampling": True}, "scheduler to lcm"),
    "inverted": (EULER, {"invert_sigmas": True}, "invert_sigmas True"),
    "half": (EULER, {"num_train_timesteps": 500}, "num_train_timesteps 500"),
    "lcm": ("FlowMatchLCMScheduler", {}, "scheduler to lcm"),
    "betas": ("EulerDiscreteScheduler", {}, "no times of a flow"),
    "betas of a solver": ("UniPCMultistepScheduler", {}, "must be 'flow_prediction'"),
    "noise of a solver": (
        "UniPCMultistepScheduler",
        SOLVED | {"prediction_type": "epsilon"},
        "prediction_type 'epsilon'",
    ),
    "two orders": ("FlowMatchHeunDiscreteScheduler", {}, "no times of a flow"),
    "unknown class": ("TomorrowScheduler", {}, "TomorrowScheduler"),
    "unknown key": (EULER, {"shfit": 3.0}, "'shfit' is a key of no scheduler"),
}
# where diffusers' own pipeline fails, which hands such a scheduler what it does not take
FAILS = {("sana", "dynamic"), ("sana", "linear"), ("wan", "dynamic"), ("wan", "linear")} | {
    (family, "dpm") for family in ("flux", "flux2", "qwen_image", "z_image", "ltx", "hunyuan_video")
}
FAILS |= {("hunyuan_video", "dynamic"), ("hunyuan_video", "linear")}


@cache
def family(name):
    """A policy, and its plain pipeline."""
    if name == "sd3":
        policy = POLICIES.build(name, path=locate("world:digits/sd3-test"), steps=2, size=32)
    else:
        policy = folders.make(name)
    pipe = getattr(diffusers, policy.pipeline).from_pretrained(policy.place)
    pipe.set_progress_bar_config(disable=True)
    return policy, pipe


def written(tmp_path, kind, config):
    (tmp_path / "scheduler").mkdir(parents=True)
    file = {"_class_name": kind, "_diffusers_version": "0.42.1", **config}
    (tmp_path / "scheduler/scheduler_config.json").write_text(json.dumps(file))
    return str(tmp_path)


class Reached(Exception):
    pass


def plain_times(name, scheduler):
    """The sigmas that the pipeline's own call sets."""
    policy, pipe = family(name)

    def step(*_, **__):
        raise Reached

    scheduler.step = step
    pipe.scheduler = scheduler
    call = {} if name == "sd3" else folders.CASES[name].call
    sizes = dict(zip(("height", "width"), policy.size))
    with pytest.raises(Reached):
        pipe(prompt="a red seven", num_inference_steps=4, **sizes, **call)
    return torch.as_tensor(scheduler.sigmas).double()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_flows_times_are_those_of_its_pipeline(name, tmp_path, monkeypatch):
    policy, _ = family(name)
    for cell, (kind, config) in TAKEN.items():
        monkeypatch.setattr(policy, "place", written(tmp_path / cell, kind, config))
        if (name, cell) in FAILS:
            with pytest.raises(UserError, match="cannot set the times of this pipeline"):
                policy.own_grid()(4)
            continue
        ours = policy.own_grid()(4)
        if (name, cell) == ("z_image", "unipc"):
            continue  # its pipeline gives the scheduler a list, with which it cannot reckon
        theirs = plain_times(name, getattr(diffusers, kind).from_config(config))
        first = 1 if kind != EULER else 0  # solvers begin a little below 1
        torch.testing.assert_close(ours[first:], theirs[first:], atol=1e-7, rtol=0, msg=cell)
        assert ours[0] == 1 or not first
        words = schedulers.notes(policy.place, policy.process)
        assert bool(words) == (kind != EULER) and all("Euler's steps" in word for word in words)


def test_times_that_do_not_fall_are_refused(tmp_path):
    """Diffusers' DPM solver spaces flow times by Karras' rule up to 21."""
    place = shutil.copytree(tiny_diffusers.folder("wan"), tmp_path / "wan")
    shutil.rmtree(place / "scheduler")
    written(place, "DPMSolverMultistepScheduler", SOLVED | {"use_karras_sigmas": True})
    with pytest.raises(UserError, match="have no falling times: 1, 21"):
        POLICIES.build("wan", path=str(place), steps=4, **VIDEO)


SCALED = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}
ZERO = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
SAMPLED = {
    "ddim": ("DDIMScheduler", {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "euler": ("EulerDiscreteScheduler", {"use_karras_sigmas": True}),
    "dpm": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver++"}),
    "ddpm": ("DDPMScheduler", {"variance_type": "fixed_small"}),
    "v": ("DDIMScheduler", {"prediction_type": "v_prediction"}),
    "sample": ("DDIMScheduler", {"prediction_type": "sample"}),
    "zero": ("DDIMScheduler", ZERO | {"prediction_type": "v_prediction"}),
    "linspace": ("DDIMScheduler", {"timestep_spacing": "linspace"}),
    "offset 0": ("DDIMScheduler", {"steps_offset": 0}),
    "to one": ("DDIMScheduler", {"set_alpha_to_one": True}),
    "own betas": ("DDIMScheduler", {"trained_betas": [0.001 + 1e-5 * i for i in range(1000)]}),
    "500": ("DDIMScheduler", {"num_train_timesteps": 500}),
    "squared": ("DDIMScheduler", {"beta_schedule": "squaredcos_cap_v2"}),
}
UNKNOWN = {
    "flow": ("DPMSolverMultistepScheduler", SOLVED, "'flow_prediction'"),
    "a word": ("DDIMScheduler", {"prediction_type": "x0"}, "'x0' of DDIMScheduler"),
    "flow matching": (EULER, {"shift": 3.0}, "no discrete diffusion"),
    "edm": ("EDMDPMSolverMultistepScheduler", {"sigma_data": 0.5}, "EDM's process"),
    "lcm": ("LCMScheduler", {}, "scheduler to lcm"),
    "tcd": ("TCDScheduler", {}, "scheduler to lcm"),
    "thresholding": ("DDIMScheduler", {"thresholding": True}, "thresholding to false"),
    "zero of noise": ("DDIMScheduler", ZERO | {"prediction_type": "epsilon"}, "pure noise"),
    "continuous": ("EulerDiscreteScheduler", {"timestep_type": "continuous"}, "'continuous'"),
    "learned": ("DDPMScheduler", {"variance_type": "learned_range"}, "'learned_range'"),
}


def assert_process(policy, theirs):
    """The process and the times are those of a scheduler of diffusers."""
    ours, times = policy.trained_process(), policy.own_grid()(4)
    theirs.set_timesteps(4)
    torch.testing.assert_close(ours.alphas, theirs.alphas_cumprod.double(), atol=0, rtol=0)
    assert ours.prediction == theirs.config.prediction_type
    assert ours.timestep(times[:-1]).tolist() == theirs.timesteps.tolist()
    return ours


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_a_discrete_process_is_that_of_ddim_in_the_pipeline(name, tmp_path, monkeypatch):
    policy, pipe = family(name)
    checked = {"requires_safety_checker": False} if "safety_checker" in pipe.components else {}
    for cell, (kind, config) in SAMPLED.items():
        place = written(tmp_path / cell, kind, SCALED | config)
        monkeypatch.setattr(policy, "place", place)
        own = getattr(diffusers, kind).from_pretrained(place, subfolder="scheduler")
        remade = type(pipe)(**pipe.components | {"scheduler": own}, **checked)
        theirs = diffusers.DDIMScheduler.from_config(remade.scheduler.config)
        ours = assert_process(policy, theirs)
        assert ours.final == float(theirs.final_alpha_cumprod), cell
        words = " ".join(schedulers.notes(place, ours))
        assert (kind == "DDIMScheduler") == (not words) and ("karras" in words) == (cell == "euler")


# all that a folder may name; some are placeholders where a package is absent
CLASSES = [n for n in dir(diffusers) if n.endswith("Scheduler") and not n.startswith("Flax")]


@pytest.mark.parametrize("name", ["sd", "wan"])
def test_every_class_of_diffusers_is_held_to_the_process_or_refused(name, tmp_path, monkeypatch):
    """To DDIM, or to its own times in Wan, whose pipeline leaves them to the scheduler."""
    policy, _ = family(name)
    taken = set()
    for kind in CLASSES:
        config = SCALED if name == "sd" else {} if kind == EULER else SOLVED
        monkeypatch.setattr(policy, "place", written(tmp_path / kind, kind, config))
        try:
            ours = policy.own_grid()(4) if name == "wan" else policy.trained_process()
        except UserError as error:
            assert "scheduler_config.json: " in str(error), kind
            continue
        taken.add(kind)
        theirs = getattr(diffusers, kind).from_pretrained(tmp_path / kind, subfolder="scheduler")
        if name == "sd":
            assert_process(policy, diffusers.DDIMScheduler.from_config(theirs.config))
            continue
        theirs.set_timesteps(4)
        first = 1 if kind != EULER else 0  # solvers begin a little below 1
        wanted = torch.as_tensor(theirs.sigmas).double()
        wanted[-1] = 0  # DEIS and SA repeat the time before, which would leave the noise there
        torch.testing.assert_close(ours[first:], wanted[first:], atol=1e-7, rtol=0)
    assert taken == set(schedulers.DISCRETES if name == "sd" else schedulers.FLOWS)


# families with their own scheduler: its class, and settings of its files
OWN = {
    "lcm": ("LCMScheduler", SCALED),
    "cogvideox": (
        "CogVideoXDDIMScheduler",
        SCALED
        | {"snr_shift_scale": 3.0, "timestep_spacing": "trailing", **ZERO}
        | {"prediction_type": "v_prediction", "set_alpha_to_one": True},
    ),
}
OF_OWN = {
    "lcm": {
        "as it is": {},
        "v": {"prediction_type": "v_prediction"},
        "squared": {"beta_schedule": "squaredcos_cap_v2"},
        "fewer": {"original_inference_steps": 25},
        "to one": {"set_alpha_to_one": True},
        "scaled": {"timestep_scaling": 5.0},
    },
    "cogvideox": {
        "as it is": {},
        "shift": {"snr_shift_scale": 1.0},
        "linspace": {"timestep_spacing": "linspace"},
        "leading": {"timestep_spacing": "leading"},
        "linear": {"beta_schedule": "linear"},
    },
}


@pytest.mark.parametrize("name", OF_OWN)
def test_a_family_with_its_own_scheduler_takes_its_process_and_times(name, tmp_path, monkeypatch):
    (policy, _), (kind, config) = family(name), OWN[name]
    for cell, more in OF_OWN[name].items():
        place = written(tmp_path / cell, kind, config | more)
        monkeypatch.setattr(policy, "place", place)
        theirs = getattr(diffusers, kind).from_pretrained(place, subfolder="scheduler")
        ours = assert_process(policy, theirs)
        if name == "lcm":
            assert ours.scaling == theirs.config.timestep_scaling
        else:
            assert ours.final == float(theirs.final_alpha_cumprod)


def refused():
    """The files that families do not understand, and a word of the sentence."""
    for name in ("flux", "wan"):
        yield from ((name, *row) for row in LEFT.values())
    for kind, config, word in UNKNOWN.values():
        yield "sd", kind, config if "EDM" in kind or kind == EULER else SCALED | config, word
    for name, (kind, config) in OWN.items():
        yield name, kind, config | {"prediction_type": "x0"}, "'x0'"


def test_what_a_family_does_not_understand_is_a_sentence(tmp_path, monkeypatch):
    for i, (name, kind, config, word) in enumerate(refused()):
        policy, _ = family(name)
        monkeypatch.setattr(policy, "place", written(tmp_path / str(i), kind, config))
        ask = policy.own_grid if name in FAMILIES else policy.trained_process
        with pytest.raises(UserError, match="scheduler_config.json: ") as said:
            ask()
        assert word in str(said.value), (name, kind, config)


def edited(name, tmp_path, part, **config):
    place = shutil.copytree(tiny_diffusers.folder(name), tmp_path / name)
    file = place / part / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return place


def pictures(policy, guidance=1.0):
    with policy.evaluating(1.0), torch.no_grad():
        rollout = policy.rollout([{"text": "a red seven"}], 1, Rng.of("same"))
        ours = policy.decode(rollout)
    pipe = getattr(diffusers, policy.pipeline).from_pretrained(policy.place)
    pipe.set_progress_bar_config(disable=True)
    height, width = policy.size
    theirs = pipe(
        prompt="a red seven",
        latents=rollout.latents.states[:, 0],
        num_inference_steps=2,
        guidance_scale=guidance,
        height=height,
        width=width,
        output_type="pt",
    )[0]
    return ours, theirs


def test_latents_of_sdxl_are_standardised_where_its_autoencoder_says_so(tmp_path):
    """As Playground 2.5's are."""
    stats = {"latents_mean": [-1.6, 1.1, 3.3, -2.6], "latents_std": [8.4, 5.9, 5.1, 5.3]}
    place = edited("sdxl", tmp_path, "vae", scaling_factor=0.5, **stats)
    policy = POLICIES.build("sdxl", path=str(place), size=16, steps=2)
    torch.testing.assert_close(*pictures(policy), atol=1e-4, rtol=0)
    image = torch.rand(1, 3, 16, 16)
    latents = policy.encode_media(image)
    mode = policy.vae.encode(2 * image - 1).latent_dist.mode()
    mean, std = (torch.tensor(stats[n]).view(1, 4, 1, 1) for n in ("latents_mean", "latents_std"))
    torch.testing.assert_close(latents * std / 0.5 + mean, mode)


def test_a_network_that_takes_its_guidance_is_given_it(tmp_path):
    """As LCM-SDXL's does."""
    plain = tiny_diffusers.folder("sdxl")
    place = shutil.copytree(plain, tmp_path / "sdxl")
    torch.manual_seed(0)
    config = dict(diffusers.UNet2DConditionModel.load_config(place, subfolder="unet"))
    config["time_cond_proj_dim"] = 16
    diffusers.UNet2DConditionModel.from_config(config).save_pretrained(place / "unet")
    make = partial(POLICIES.build, "sdxl", path=str(place), size=16, steps=2)
    policy = make(embedded_guidance=6.0)
    ours, theirs = pictures(policy, guidance=6.0)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    silent = make()
    assert "embedded_guidance" in silent.report.notes[0]
    assert (pictures(silent)[0] - ours).abs().max() > 1e-4
    with pytest.raises(UserError, match="takes no guidance scale"):
        make(path=str(plain), embedded_guidance=6.0)


def test_an_autoencoder_without_a_scale_is_refused(tmp_path):
    place = edited("sd", tmp_path, "vae", scaling_factor=None)
    with pytest.raises(UserError, match="vae/config.json: scaling_factor is null"):
        POLICIES.build("sd", path=str(place), size=16, steps=2)


def test_sdxl_learns_pictures_by_their_own_size_and_cut():
    policy = POLICIES.build("sdxl", path=str(tiny_diffusers.folder("sdxl")), size=64, steps=2)
    shapes = [(64, 64), (16, 16), (64, 256), (300, 200)]
    prompts = [{"text": f"a red {i}"} for i in range(4)]
    answers = [torch.rand(3, *shape) for shape in shapes]
    told = policy.demonstrate(prompts, answers, Rng.of("a")).cond["time_ids"]
    # height and width as they came, corner of the cut at the new scale: 96 = (256 - 64) / 2
    cuts = [[64, 64, 0, 0], [16, 16, 0, 0], [64, 256, 0, 96], [300, 200, 16, 0]]
    assert told[:, :4].tolist() == cuts
    assert (told[:, 4:] == 64).all()

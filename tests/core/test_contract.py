"""What every plug-in must keep, generated from the registries: a new one is tested by being
registered.

Policies have theirs in tests/policies/test_contract_policies.py, advantages in
tests/advantages/test_advantages.py, rewards in tests/rewards/test_rewards.py; time grids and noise
windows are compared with numbers in tests/samplers/test_schedules.py.
"""

import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from mmrl.config import build
from mmrl.core import registry
from mmrl.core.errors import UserError
from mmrl.core.metrics import Meter
from mmrl.core.registry import ALL, DATA, GRIDS, KERNELS, OBJECTIVES, OPTIMIZERS, WINDOWS, describe
from mmrl.core.types import Point
from mmrl.objectives import Objective, PolicyGradient
from mmrl.objectives.contracts import CONTRACTS, HasTeacher, undeclared
from mmrl.zoo.objectives import Distill
from mmrl.zoo.objectives.distillation import Teacher
from samplers.noise import Rng
from samplers.processes import Diffusion
from tests.fixtures import toys

registry.load_built_in()

# The smallest options that build an entry: (registry, name) -> options. Not needed where the
# defaults build it.
# Strings with {} are formatted with ``tmp``, a folder that holds prompts.txt, and ``tiny:NAME``, a
# tiny model's folder.
VIDEO = {"size": 16, "frames": 3, "steps": 3, "fixed_batch_rows": 8, "text_length": 16}
SMALLEST: dict[tuple[str, str], dict[str, Any]] = {
    ("policies", "vlm"): {"path": "{tiny:qwen2_5_vl}", "max_new_tokens": 6},
    # from itself there is nothing to learn
    ("objectives", "dmd"): {"guidance_scale": 2.0},
    ("objectives", "distill"): {"teachers": [{"policy": "tests.fixtures.toys:ToyFlow"}]},
    ("policies", "sd3"): {
        "path": "world:digits/sd3-test",
        "size": 32,
        "steps": 4,
        "fixed_batch_rows": 8,
    },
    ("policies", "amused"): {"path": "{tiny:amused}", "steps": 3, "fixed_batch_rows": 8},
    ("policies", "masked_lm"): {
        "path": "{tiny:bert}",
        "max_new_tokens": 6,
        "block": 3,
        "steps": 4,
        "fixed_batch_rows": 8,
    },
    ("policies", "masked_image_lm"): {
        "path": "{tiny:bert}",
        "decoder": "{tiny:amused}/vqvae",
        "first": 4,
        "codes": 12,
        "side": 4,
        "steps": 3,
        "fixed_batch_rows": 8,
    },
    ("policies", "sd"): {"path": "{tiny:sd}", "size": 16, "steps": 3, "fixed_batch_rows": 8},
    ("policies", "sdxl"): {"path": "{tiny:sdxl}", "size": 16, "steps": 3, "fixed_batch_rows": 8},
    ("policies", "flux"): {
        "path": "{tiny:flux}",
        "size": 16,
        "steps": 3,
        "fixed_batch_rows": 8,
        "text_length": 16,
    },
    ("policies", "wan"): {
        "path": "{tiny:wan}",
        "size": 8,
        "frames": 3,
        "steps": 3,
        "fixed_batch_rows": 8,
        "text_length": 16,
    },
    ("policies", "flux2"): {
        "path": "{tiny:flux2}",
        "size": 16,
        "steps": 3,
        "fixed_batch_rows": 8,
        "text_length": 12,
        "text_layers": [1, 2, 3],
    },
    ("policies", "lcm"): {"path": "{tiny:lcm}", "size": 16, "steps": 3, "fixed_batch_rows": 8},
    ("policies", "flux_kontext"): {
        "path": "{tiny:flux_kontext}",
        "size": 16,
        "steps": 3,
        "fixed_batch_rows": 8,
        "text_length": 16,
    },
    ("policies", "qwen_edit"): {
        "path": "{tiny:qwen_edit}",
        "size": 16,
        "steps": 3,
        "fixed_batch_rows": 8,
        "text_length": 64,
    },
    ("policies", "pipeline"): {
        "path": "{tiny:sd}",
        "call": {"height": 16, "width": 16},
        "steps": 3,
        "fixed_batch_rows": 8,
    },
    ("policies", "module"): {
        "net": "{here}/tiny_module.py:Tiny",
        "shape": [3, 4, 4],
        "steps": 3,
        "fixed_batch_rows": 8,
    },
    ("policies", "qwen_image"): {
        "path": "{tiny:qwen_image}",
        "size": 16,
        "steps": 3,
        "fixed_batch_rows": 8,
        "text_length": 12,
    },
    ("policies", "sana"): {
        "path": "{tiny:sana}",
        "size": 32,
        "steps": 3,
        "fixed_batch_rows": 8,
        "text_length": 16,
    },
    ("policies", "z_image"): {
        "path": "{tiny:z_image}",
        "size": 16,
        "steps": 3,
        "fixed_batch_rows": 8,
        "text_length": 12,
    },
    ("policies", "janus"): {"path": "{tiny:janus}"},
    ("policies", "janus_unified"): {
        "path": "{tiny:janus}",
        "answer": {"max_new_tokens": 6},
        "plan": {"max_new_tokens": 5},
    },
    ("policies", "unified_flow"): {
        "code": "{local}/my_bagel.py:build",
        "remote_code": True,
        "think": 4,
        "steps": 3,
        "fixed_batch_rows": 8,
    },
    ("policies", "unified_masked"): {
        "path": "{local}/tokenizer",
        "code": "{local}/my_mmada.py:build",
        "remote_code": True,
        "max_new_tokens": 4,
        "steps": 2,
        "fixed_batch_rows": 8,
        "picture": {
            "decoder": "{local}/my_mmada.py:codec",
            "first": 19,
            "codes": 8,
            "side": 2,
            "steps": 3,
        },
    },
    ("policies", "emu3"): {"path": "{tiny:emu3}", "size": 24},
    ("policies", "glm_image"): {"path": "{tiny:glm_image}", "size": 64, "steps": 2},
    ("policies", "var"): {"path": "{tiny:var}"},
    ("policies", "llamagen"): {"path": "{tiny:llamagen}", "text_encoder": "{tiny:llamagen}/t5"},
    ("policies", "wan_i2v"): VIDEO | {"path": "{tiny:wan_i2v}", "frames": 5},
    ("policies", "skyreels_i2v"): VIDEO | {"path": "{tiny:skyreels_i2v}", "frames": 5},
    ("policies", "ltx"): VIDEO | {"path": "{tiny:ltx}", "size": 8, "frames": 5},
    ("policies", "cogvideox"): VIDEO | {"path": "{tiny:cogvideox}", "frames": 5, "steps": 4},
    ("policies", "hunyuan_video"): VIDEO
    | {"path": "{tiny:hunyuan_video}", "frames": 5, "text_length": 64},
    ("policies", "hunyuan_i2v"): VIDEO
    | {"path": "{tiny:hunyuan_i2v}", "frames": 5, "text_length": 96},
    ("data", "prompts"): {"path": "{tmp}/prompts.txt"},
    ("data", "captions"): {"path": "{tmp}"},
    ("data", "preferences"): {"path": "{tmp}/judged.jsonl", "held_out": 0.2},
    ("data", "vision"): {"path": "{tmp}/questions.jsonl"},
    ("data", "paired"): {"path": "{tmp}/pairs.jsonl"},
    ("data", "digits"): {"captions": 40},
    ("data", "mixture"): {"sources": {"one": {"digits": {"captions": 40}}, "two": "digits"}},
    ("data", "self_instruct"): {"of": {"digits": {"captions": 40}}},
    ("data", "hints"): {"of": {"digits": {"captions": 40}}, "field": "text"},
    ("data", "suggestions"): {"of": {"digits": {"captions": 40}}, "field": "text"},
    ("data", "forms"): {"of": {"digits": {"captions": 40}}, "forms": {"plain": "{text}"}},
    ("data", "difficulty"): {"of": {"digits": {"captions": 40}}, "field": "text"},
    ("data", "replay"): {"of": {"digits": {"captions": 40}}},
    ("data", "knapsack"): {"of": {"digits": {"captions": 40}}},
    ("data", "adaptive_group_size"): {"of": {"digits": {"captions": 40}}},
    ("data", "vade"): {"of": {"digits": {"captions": 40}}},
    ("data", "single_stream"): {"of": {"digits": {"captions": 40}}},
    ("data", "vas"): {"of": {"digits": {"captions": 40}}},
    ("data", "pcl"): {"of": {"digits": {"captions": 40}}},
    ("data", "sec"): {"of": {"digits": {"captions": 40}}, "field": "text"},
    ("data", "recorded"): {"of": {"digits": {"captions": 40}}, "path": "{tmp}/rewards.jsonl"},
    ("data", "limr"): {"of": {"digits": {"captions": 40}}, "path": "{tmp}/recorded.jsonl"},
    ("data", "by_variance"): {"of": {"digits": {"captions": 40}}, "path": "{tmp}/recorded.jsonl"},
    ("data", "depo"): {"of": {"digits": {"captions": 40}}},
    ("data", "digits_questions"): {"kinds": ["box", "frame"], "scenes": 8, "held_out_scenes": 4},
    ("timestep_schedules", "dynamic"): {"mu": 0.5},
    ("judges", "server"): {"url": "http://127.0.0.1:1/v1"},
}

HERE = Path(__file__).parents[1] / "fixtures"
ENTRIES = [(kind, name) for kind, known in ALL.items() for name in known]


class Tiny:
    """``{tiny:qwen2_5_vl}``: built when it is asked for."""

    def __format__(self, name: str) -> str:
        from tests.fixtures import image_tokens, tiny_diffusers, tiny_masked_lm, tiny_vlms

        if name in image_tokens.BUILDERS:
            return str(image_tokens.folder(name))
        if name == "bert":
            return str(tiny_masked_lm.folder())

        return str(
            (tiny_diffusers if name in tiny_diffusers.builders() else tiny_vlms).folder(name)
        )


class Local:
    """``{local}``: the folder with the code of docs/unified.md."""

    def __format__(self, _: str) -> str:
        from tests.fixtures import local_code

        return str(local_code.folder())


def options_for(kind: str, name: str, tmp: object = "") -> dict[str, Any]:
    names = {"tmp": tmp, "tiny": Tiny(), "here": HERE, "local": Local()}

    def filled(value: Any) -> Any:
        if isinstance(value, dict) and kind == "policies":
            return {key: filled(item) for key, item in value.items()}
        return value.format(**names) if isinstance(value, str) else value

    return {key: filled(value) for key, value in SMALLEST.get((kind, name), {}).items()}


def made(
    kind: str, name: str, tmp: object = "", extra: dict[str, Any] | None = None, **context: Any
) -> Any:
    """The entry, built as a configuration would build it."""
    try:
        return build({name: options_for(kind, name, tmp) | (extra or {})}, ALL[kind], **context)
    except UserError as error:
        pytest.fail(
            f"{kind} {name!r} cannot be built: {error}. Add its smallest options to "
            f"SMALLEST in {__file__}"
        )


# --------------------------------------------------------------------------------------------------
# every entry


def test_an_entry_says_what_it_is_in_a_line_that_fits():
    lines = {(kind, name): describe(ALL[kind][name]) for kind, name in ENTRIES}
    assert not [entry for entry, line in lines.items() if not 0 < len(line) <= 110]


def test_the_options_of_an_entry_can_be_written_and_checked():
    """Each has a type, or a default that tells it."""
    untyped = [
        f"{kind} {name}: {key}"
        for kind, name in ENTRIES
        for key, option in registry.options(ALL[kind][name]).items()
        if isinstance(option.annotation, str)
        or option.annotation is option.empty
        and not isinstance(option.default, (bool, int, float, str))
    ]
    assert not untyped


def test_an_unknown_option_is_refused_with_what_there_is():
    for kind, name in ENTRIES:
        if ALL[kind].unfit(ALL[kind][name]):
            continue  # a stage that something else asks for is not named itself
        with pytest.raises(UserError, match="no_such_option: unknown option") as error:
            build({name: {"no_such_option": 1}}, ALL[kind], kind)
        options = registry.options(ALL[kind][name])
        assert all(key in str(error.value) for key in options), (kind, name)


def test_options_of_a_function_have_defaults():
    """Positional parameters are the caller's; what the user sets must be able to stay away."""
    needed = [
        f"{kind} {name}: {key}"
        for kind, name in ENTRIES
        if not inspect.isclass(ALL[kind][name])
        for key, option in registry.options(ALL[kind][name]).items()
        if option.default is option.empty
    ]
    assert not needed


def test_a_name_that_cannot_be_built_is_told_where_to_add_its_options(monkeypatch):
    monkeypatch.setitem(DATA, "needy", type("Needy", (), {"__init__": lambda self, path: None}))
    with pytest.raises(
        pytest.fail.Exception,
        match=r"data 'needy' cannot be built: .*missing "
        r"path.* SMALLEST in ",
    ):
        made("data", "needy")


def test_the_tables_name_only_what_is_registered():
    stale = [f"{kind} {name}" for kind, name in SMALLEST if name not in ALL[kind]]
    assert not stale, stale


# --------------------------------------------------------------------------------------------------
# kernels

TIMES = [(1.0, 0.8), (0.8, 0.3), (0.3, 0.05), (0.05, 0.0)]


@pytest.fixture(params=KERNELS)
def kernel(request):
    return made("sde_types", request.param)


def latents(shape=(3, 2, 4, 4), dtype=torch.float64):
    rng = Rng.of("latents")
    rows = torch.arange(shape[0])
    return tuple(rng.normal(rows, shape[1:], step, dtype) for step in (0, 1))


def on_rows(x, *values):
    return [torch.full((len(x),), value, dtype=x.dtype) for value in values]


def test_a_kernel_returns_a_mean_and_one_std_a_row(kernel):
    for shape in [(3, 2), (3, 2, 4, 4), (3, 2, 5, 4, 4)]:
        x, v = latents(shape, torch.float32)
        for t, s in TIMES:
            mean, std = kernel(x, v, *on_rows(x, t, s, 0.4))
            assert mean.shape == x.shape and std.shape == (len(x), *[1] * (x.ndim - 1))
            assert mean.dtype == std.dtype == torch.float32 and mean.isfinite().all()
            assert std.isfinite().all() and (std >= 0).all()


def test_a_kernel_is_linear_in_state_and_velocity_and_its_std_sees_neither(kernel):
    """Scaling latents and velocity scales the mean: a step that knew the data's scale would fit one
    model only. Without noise it is the Euler step; those for models that predict noise are compared
    with diffusers in tests/samplers/test_kernels.py."""
    x, v = latents()
    for t, s in TIMES:
        mean, std = kernel(x, v, *on_rows(x, t, s, 0.4))
        doubled, same = kernel(2 * x, 2 * v, *on_rows(x, t, s, 0.4))
        torch.testing.assert_close(doubled, 2 * mean)
        assert torch.equal(std, same)
        if getattr(kernel, "process", None) is not Diffusion:
            mean, std = kernel(x, v, *on_rows(x, t, s, 0.0))
            torch.testing.assert_close(mean, x + v * (s - t), atol=1e-12, rtol=0)
            assert std.abs().max() == 0


def test_more_noise_for_a_larger_eta_and_none_without_a_step(kernel):
    x, v = latents()
    spread = [kernel(x, v, *on_rows(x, 0.6, 0.4, eta))[1].max() for eta in (0.0, 0.3, 0.6)]
    assert spread == sorted(spread)
    if kernel in (KERNELS["cps"], KERNELS["consistency"]):
        return  # their noise does not shrink with the step
    still, std = kernel(x, v, *on_rows(x, 0.6, 0.6, 0.5))
    torch.testing.assert_close(still, x)
    assert std.max() == 0


def test_a_kernel_takes_every_row_by_itself(kernel):
    x, v = latents()
    t, s, eta = (
        torch.tensor(values, dtype=x.dtype)
        for values in ([1.0, 0.6, 0.2], [0.9, 0.5, 0.0], [0.7, 0.0, 0.3])
    )
    mean, std = kernel(x, v, t, s, eta)
    for i in range(len(x)):
        alone = kernel(*(tensor[i : i + 1] for tensor in (x, v, t, s, eta)))
        assert torch.equal(alone[0], mean[i : i + 1]) and torch.equal(alone[1], std[i : i + 1])


# -------------------------------------------------------------------------------------- time grids,
# noise windows


def test_time_grids_fall_from_noise_to_data():
    for name in GRIDS:
        for steps in (1, 2, 7):
            times = made("timestep_schedules", name)(steps)
            assert times.shape == (steps + 1,) and times.dtype == torch.float64, name
            assert times[0] == 1 and times[-1] == 0 and (times.diff() < 0).all(), name


def test_noise_windows_mark_some_of_the_steps():
    for name in WINDOWS:
        for steps, iteration in [(6, 0), (7, 1), (7, 100)]:
            noisy = made("noise_windows", name)(steps, iteration, Rng.of("window", iteration))
            assert noisy.shape == (steps,) and noisy.dtype == torch.bool and noisy.any(), name


# --------------------------------------------------------------------------------------------------
# objectives


def another(family: str) -> Any:
    """A teacher: a toy of the family with other weights."""
    policy = toys.make(family, double=True)
    with torch.no_grad():
        for parameter in policy.net.parameters():
            parameter += 0.1
    return policy


def toy_points(objective: Objective, family: str) -> tuple[Any, list[Point], list[Point]]:
    """The toy policy, the points of an objective, and those of advantage 0."""
    policy = toys.make(family, double=True)
    if objective.requires.differentiates:
        objective.attach(toys.smooth_reward)
    if isinstance(objective, Distill):
        objective.teachers, objective.loaded = [Teacher(partial(another, family))], []
    if isinstance(objective, HasTeacher):
        objective.setup(policy)
    for name in {"ref", objective.behavior_policy, *objective.snapshots} - {"live"}:
        policy.weights.keep(name)
    with torch.no_grad():
        rollout = policy.rollout(toys.prompts(4), 4, Rng.of("rollout"))
    signs = torch.tensor([1.0, -1.0], dtype=rollout.logprob.dtype).repeat(8)[:, None]
    points, still = (
        list(objective.points(policy, rollout.replace(advantage=advantage), Rng.of("points")))
        for advantage in (signs, 0 * signs)
    )
    objective.loss(policy, points[0])
    return policy, points, still


def test_an_objective_has_no_method_that_nobody_calls():
    class Counting(PolicyGradient):
        def start_epoch(self, epoch):
            pass

    assert not [n for n in OBJECTIVES if undeclared(made("objectives", n)) is not None]
    assert "has start_epoch, which is never called: derive it from" in undeclared(Counting())
    kept = [kind for kind in CONTRACTS if any(issubclass(o, kind) for o in OBJECTIVES.values())]
    assert kept == list(CONTRACTS)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_loss_with_every_family_that_it_is_for(name):
    """Elementwise and finite; its gradient moves something, and nothing without an advantage where
    that is all it follows."""
    refused = {}
    for family in toys.POLICIES:
        objective = made("objectives", name)
        try:
            policy, points, still = toy_points(objective, family)
        except UserError as error:
            refused[family] = str(error)
            continue
        generator, weights = torch.get_rng_state(), policy.weights.full()
        elementwise(objective, policy, points)
        grads = gradient(policy, points, objective)
        assert grads.isfinite().all() and grads.abs().max() > 0, family
        needs = objective.requires
        if needs.compares and not needs.supervised and not needs.differentiates:
            # unless there is another reason to move: a KL, which at the reference is 0 and flat
            assert gradient(policy, still, objective).abs().max() < 1e-12, family
        assert torch.equal(torch.get_rng_state(), generator), family
        after = policy.weights.full()
        assert all(torch.equal(value, weights[key]) for key, value in after.items()), family
    # of policies that hide tokens, which tests/objectives/test_masked_objectives.py has
    assert len(refused) < len(toys.POLICIES) or name == "masked", refused


def elementwise(objective, policy, points):
    assert points and len({tuple(point.mask.shape[1:]) for point in points}) == 1
    for point in points:
        with Meter().listening():
            loss = objective.loss(policy, point)
        assert loss.shape == point.mask.shape and loss[point.mask].isfinite().all()
        assert loss.requires_grad
        some = torch.arange(3, len(point))  # not as many of each sign
        alone = objective.loss(policy, point[some])
        torch.testing.assert_close(alone, loss[some], atol=1e-10, rtol=0)


def gradient(policy, points, objective):
    policy.net.zero_grad()
    for point in points:
        (objective.loss(policy, point) * point.mask).sum().backward()
    none = {
        name: torch.zeros_like(p)
        for name, p in policy.weights.parameters().items()
        if p.grad is None
    }
    return torch.cat(
        [none.get(n, p.grad).flatten() for n, p in policy.weights.parameters().items()]
    )


# -------------------------------------------------------------------------------------------
# optimizers, data, worlds


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_downhill(name):
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = made("optimizers", name)([weight])
    assert isinstance(optimizer, torch.optim.Optimizer)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = weight.square().sum()
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] and optimizer.param_groups[0]["lr"] > 0


@pytest.mark.parametrize("name", DATA)
def test_a_data_source_has_prompts_to_train_on_and_others_to_measure(name, tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(f"picture {i}" for i in range(40)))
    pair = {"understand": {"text": "what?"}, "similarity": 0.5}
    pairs = [pair | {"generate": {"text": f"picture {i}"}} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    for letter in "ab":
        Image.new("RGB", (4, 4)).save(tmp_path / f"{letter}.png")
        (tmp_path / f"{letter}.txt").write_text(f"a picture {letter}")
    judged = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(40)]
    (tmp_path / "judged.jsonl").write_text("\n".join(map(json.dumps, judged)))
    (tmp_path / "questions.jsonl").write_text(
        "\n".join(json.dumps({"question": f"what is {i}?"}) for i in range(40))
    )
    captions = made("data", "digits").train
    visits = [
        {"entry": i, "text": prompt["text"], "iteration": n, "rewards": [0.0, n / 2]}
        for n in (1, 2)
        for i, prompt in enumerate(captions)
    ]
    (tmp_path / "recorded.jsonl").write_text("\n".join(map(json.dumps, visits)))
    source = made("data", name, tmp_path)
    again = made("data", name, tmp_path)
    assert len(source.train) > 0 and isinstance(source.held_out, list)
    for prompt in [*source.train, *source.held_out]:
        assert (
            isinstance(prompt, dict) and isinstance(prompt["text"], str) and prompt["text"].strip()
        )
    train, held_out = ([shown(p) for p in part] for part in (source.train, source.held_out))
    assert not set(train) & set(held_out)
    assert [shown(p) for p in again.train] == train and [
        shown(p) for p in again.held_out
    ] == held_out


def shown(prompt):
    """What a prompt asks and shows, to compare: the same question about another picture is another
    prompt."""
    media = (
        [bytes(memoryview(prompt["video"]))]
        if "video" in prompt
        else [i.tobytes() for i in prompt.get("images", ())]
    )
    return prompt["text"], *media

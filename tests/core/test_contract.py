"""What every plug-in must keep, generated from the registries: a new one is tested by being
registered.

Policies have theirs in tests/policies/test_contract_policies.py, advantages in
tests/advantages/test_advantages.py, rewards in tests/rewards/test_rewards.py; time grids and noise
windows are compared with numbers in tests/samplers/test_schedules.py.
"""

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mmrl.config import build
from mmrl.core import registry
from mmrl.core.errors import UserError
from mmrl.core.metrics import Meter
from mmrl.core.registry import ALL, DATA, GRIDS, KERNELS, OBJECTIVES, WINDOWS, describe
from mmrl.core.types import Point
from mmrl.objectives import Objective, PolicyGradient
from mmrl.objectives.contracts import HasTeacher, undeclared
from mmrl.zoo.objectives import Distill
from mmrl.zoo.objectives.distillation import Teacher
from samplers.noise import Rng
from samplers.processes import Diffusion
from tests.fixtures import toys

registry.load_built_in()

# The smallest options that build an entry, where the defaults do not. Strings with {} are formatted
# with ``tmp``, a folder that holds prompts.txt, and ``tiny:NAME``, a tiny model's folder.
STEPS = {"steps": 3, "fixed_batch_rows": 8}
FLOW = STEPS | {"size": 16}
VIDEO = FLOW | {"frames": 5, "text_length": 16}
MMADA = {"decoder": "{local}/my_mmada.py:codec", "first": 19, "codes": 8, "side": 2, "steps": 3}
CODES = {"decoder": "{tiny:amused}/vqvae", "first": 4, "codes": 12, "side": 4}
POLICY_OPTIONS: dict[str, dict[str, Any]] = {
    "vlm": {"path": "{tiny:qwen2_5_vl}", "max_new_tokens": 6},
    "sd3": STEPS | {"path": "world:digits/sd3-test", "size": 32, "steps": 4},
    "amused": STEPS | {"path": "{tiny:amused}"},
    "masked_lm": STEPS | {"path": "{tiny:bert}", "max_new_tokens": 6, "block": 3, "steps": 4},
    "masked_image_lm": STEPS | CODES | {"path": "{tiny:bert}"},
    "sd": FLOW | {"path": "{tiny:sd}"},
    "sdxl": FLOW | {"path": "{tiny:sdxl}"},
    "flux": FLOW | {"path": "{tiny:flux}", "text_length": 16},
    "wan": VIDEO | {"path": "{tiny:wan}", "size": 8, "frames": 3},
    "flux2": FLOW | {"path": "{tiny:flux2}", "text_length": 12, "text_layers": [1, 2, 3]},
    "lcm": FLOW | {"path": "{tiny:lcm}"},
    "flux_kontext": FLOW | {"path": "{tiny:flux_kontext}", "text_length": 16},
    "qwen_edit": FLOW | {"path": "{tiny:qwen_edit}", "text_length": 64},
    "pipeline": STEPS | {"path": "{tiny:sd}", "call": {"height": 16, "width": 16}},
    "module": STEPS | {"net": "{here}/tiny_module.py:Tiny", "shape": [3, 4, 4]},
    "qwen_image": FLOW | {"path": "{tiny:qwen_image}", "text_length": 12},
    "sana": FLOW | {"path": "{tiny:sana}", "size": 32, "text_length": 16},
    "z_image": FLOW | {"path": "{tiny:z_image}", "text_length": 12},
    "janus": {"path": "{tiny:janus}"},
    "janus_unified": {
        "path": "{tiny:janus}",
        "answer": {"max_new_tokens": 6},
        "plan": {"max_new_tokens": 5},
    },
    "unified_flow": STEPS | {"code": "{local}/my_bagel.py:build", "remote_code": True, "think": 4},
    "unified_masked": {
        "path": "{local}/tokenizer",
        "code": "{local}/my_mmada.py:build",
        "remote_code": True,
        "max_new_tokens": 4,
        "steps": 2,
        "fixed_batch_rows": 8,
        "picture": MMADA,
    },
    "emu3": {"path": "{tiny:emu3}", "size": 24},
    "glm_image": {"path": "{tiny:glm_image}", "size": 64, "steps": 2},
    "var": {"path": "{tiny:var}"},
    "llamagen": {"path": "{tiny:llamagen}", "text_encoder": "{tiny:llamagen}/t5"},
    "wan_i2v": VIDEO | {"path": "{tiny:wan_i2v}"},
    "skyreels_i2v": VIDEO | {"path": "{tiny:skyreels_i2v}"},
    "ltx": VIDEO | {"path": "{tiny:ltx}", "size": 8},
    "cogvideox": VIDEO | {"path": "{tiny:cogvideox}", "steps": 4},
    "hunyuan_video": VIDEO | {"path": "{tiny:hunyuan_video}", "text_length": 64},
    "hunyuan_i2v": VIDEO | {"path": "{tiny:hunyuan_i2v}", "text_length": 96},
}
DIGITS = {"of": {"digits": {"captions": 40}}}
OF_OTHERS = "self_instruct replay knapsack adaptive_group_size vade single_stream vas pcl depo"
DATA_OPTIONS: dict[str, dict[str, Any]] = dict.fromkeys(OF_OTHERS.split(), DIGITS) | {
    "prompts": {"path": "{tmp}/prompts.txt"},
    "captions": {"path": "{tmp}"},
    "preferences": {"path": "{tmp}/judged.jsonl", "held_out": 0.2},
    "vision": {"path": "{tmp}/questions.jsonl"},
    "paired": {"path": "{tmp}/pairs.jsonl"},
    "digits": {"captions": 40},
    "mixture": {"sources": {"one": {"digits": {"captions": 40}}, "two": "digits"}},
    "hints": DIGITS | {"field": "text"},
    "suggestions": DIGITS | {"field": "text"},
    "forms": DIGITS | {"forms": {"plain": "{text}"}},
    "difficulty": DIGITS | {"field": "text"},
    "sec": DIGITS | {"field": "text"},
    "recorded": DIGITS | {"path": "{tmp}/rewards.jsonl"},
    "limr": DIGITS | {"path": "{tmp}/recorded.jsonl"},
    "by_variance": DIGITS | {"path": "{tmp}/recorded.jsonl"},
    "geneval_prompts": {"count": 400},
    "ocr_prompts": {"count": 400, "held_out": 40},
    "mazes": {"mazes": 100, "held_out": 10},
    "digits_questions": {"kinds": ["box", "frame"], "scenes": 8, "held_out_scenes": 4},
}
SMALLEST: dict[tuple[str, str], dict[str, Any]] = {
    **{("policies", name): options for name, options in POLICY_OPTIONS.items()},
    **{("data", name): options for name, options in DATA_OPTIONS.items()},
    # from itself there is nothing to learn
    ("objectives", "dmd"): {"guidance_scale": 2.0},
    ("objectives", "distill"): {"teachers": [{"policy": "tests.fixtures.toys:ToyFlow"}]},
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
    """The entry, built as a configuration would build it, with its options in ``SMALLEST``."""
    return build({name: options_for(kind, name, tmp) | (extra or {})}, ALL[kind], **context)


def test_an_entry_says_what_it_is_in_a_line_that_fits():
    lines = {(kind, name): describe(ALL[kind][name]) for kind, name in ENTRIES}
    assert not [entry for entry, line in lines.items() if not 0 < len(line) <= 110]


def test_an_unknown_option_is_refused_with_what_there_is():
    for kind, name in ENTRIES:
        if ALL[kind].unfit(ALL[kind][name]):
            continue  # a stage that something else asks for is not named itself
        with pytest.raises(UserError, match="no_such_option: unknown option") as error:
            build({name: {"no_such_option": 1}}, ALL[kind], kind)
        options = registry.options(ALL[kind][name])
        assert all(key in str(error.value) for key in options), (kind, name)


TIMES = [(1.0, 0.8), (0.8, 0.3), (0.3, 0.05), (0.05, 0.0)]


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_steps_every_row_by_itself_and_is_linear(name):
    """Scaling latents and velocity scales the mean, and the std sees neither. Without noise it is
    the Euler step; kernels that predict noise are compared in tests/samplers/test_kernels.py."""
    kernel = made("sde_types", name)
    for shape in [(4, 2), (4, 2, 4, 4), (4, 2, 5, 4, 4)]:
        rows = torch.arange(4)
        x, v = (Rng.of("latents").normal(rows, shape[1:], step, torch.float64) for step in (0, 1))
        t, s = torch.tensor(TIMES, dtype=torch.float64).T
        eta = torch.tensor([0.4, 0.7, 0.2, 0.3], dtype=torch.float64)
        mean, std = kernel(x, v, t, s, eta)
        assert mean.shape == shape and std.shape == (4, *[1] * (len(shape) - 1))
        assert mean.isfinite().all() and std.isfinite().all() and (std >= 0).all()
        doubled, same = kernel(2 * x, 2 * v, t, s, eta)
        torch.testing.assert_close(doubled, 2 * mean)
        assert torch.equal(std, same)
        for i in range(4):
            alone = kernel(*(tensor[i : i + 1] for tensor in (x, v, t, s, eta)))
            assert torch.equal(alone[0], mean[i : i + 1]) and torch.equal(alone[1], std[i : i + 1])
        if getattr(kernel, "process", None) is not Diffusion:
            still, none = kernel(x, v, t, s, 0 * eta)
            step = (s - t).view_as(std)
            torch.testing.assert_close(still, x + v * step, atol=1e-12, rtol=0)
            assert none.abs().max() == 0 and (kernel(x, v, t, s, eta / 2)[1] <= std).all()


def test_time_grids_fall_from_noise_to_data_and_windows_mark_some_of_the_steps():
    for name, steps in product(GRIDS, (1, 2, 7)):
        times = made("timestep_schedules", name)(steps)
        assert times.shape == (steps + 1,) and times.dtype == torch.float64, name
        assert times[0] == 1 and times[-1] == 0 and (times.diff() < 0).all(), name
    for name, (steps, iteration) in product(WINDOWS, [(6, 0), (7, 1), (7, 100)]):
        noisy = made("noise_windows", name)(steps, iteration, Rng.of("window", iteration))
        assert noisy.shape == (steps,) and noisy.dtype == torch.bool and noisy.any(), name


def toy(family: str) -> Any:
    steps = {} if family in ("masked", "causal") else {"steps": 3}
    return toys.make(family, double=True, **steps)


def another(family: str) -> Any:
    """A teacher: a toy of the family with other weights."""
    policy = toy(family)
    with torch.no_grad():
        for parameter in policy.net.parameters():
            parameter += 0.1
    return policy


def toy_points(objective: Objective, family: str) -> tuple[Any, list[Point], list[Point]]:
    """The toy policy, the points of an objective, and those of advantage 0."""
    policy = toy(family)
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


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_loss_with_every_family_that_it_is_for(name):
    """Elementwise and finite; its gradient moves something, and nothing without an advantage where
    that is all it follows."""
    refused = {}
    families = [each for each in toys.POLICIES if each != "flow"]  # a video is one
    for family in families:
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
    assert len(refused) < len(families) or name == "masked", refused


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
    parameters = policy.weights.parameters().values()
    return torch.cat([(0 * p if p.grad is None else p.grad).flatten() for p in parameters])


def rows_of_every_reader(folder):
    """Files that the data sources of ``DATA_OPTIONS`` read."""
    for letter in "ab":
        Image.new("RGB", (4, 4)).save(folder / f"{letter}.png")
        (folder / f"{letter}.txt").write_text(f"a picture {letter}")
    pair = {"understand": {"text": "what?"}, "similarity": 0.5}
    visits = [
        {"entry": i, "text": prompt["text"], "iteration": n, "rewards": [0.0, n / 2]}
        for n in (1, 2)
        for i, prompt in enumerate(made("data", "digits").train)
    ]
    rows = {
        "pairs": [pair | {"generate": {"text": f"picture {i}"}} for i in range(40)],
        "judged": [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(40)],
        "questions": [{"question": f"what is {i}?"} for i in range(40)],
        "recorded": visits,
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "prompts.txt").write_text("\n".join(f"picture {i}" for i in range(40)))


def shown(prompt):
    """The question and what it is about: the same one about another picture is another prompt."""
    pictures = [picture.tobytes() for picture in prompt.get("images", ())]
    return prompt["text"], bytes(memoryview(prompt.get("video", b""))), *pictures


def test_a_data_source_has_prompts_to_train_on_and_others_to_measure(tmp_path, subtests):
    rows_of_every_reader(tmp_path)
    for name in DATA:
        with subtests.test(name):
            source, again = (made("data", name, tmp_path) for _ in range(2))
            assert len(source.train) > 0 and isinstance(source.held_out, list)
            assert all(prompt["text"].strip() for prompt in [*source.train, *source.held_out])
            train, held_out = (list(map(shown, x)) for x in (source.train, source.held_out))
            assert not set(train) & set(held_out)
            assert train == list(map(shown, again.train))
            assert held_out == list(map(shown, again.held_out))

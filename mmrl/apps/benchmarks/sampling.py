"""Samples a model on the prompts of a benchmark into a folder, one file or line at a time, so that
an interrupted run continues where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge

import mmrl.config as config
from mmrl.apps.benchmarks.items import Benchmark, Item
from mmrl.config.options import TrainOptions
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.files import write_json, write_text
from mmrl.core.paths import find_config
from mmrl.core.registry import POLICIES
from mmrl.core.types import Prompt
from mmrl.experiment import build, checkpoint, evaluation
from mmrl.train.device import Device

SETTINGS = "samples.json"
STREAM = 1_000_003  # distance of the seeds of the parts of an evaluation
KEYS = (
    "include",
    "exclude",
    "tag",
    "prompt",
)  # fields of GenEval's metadata, written next to samples


@dataclass(frozen=True)
class Run:
    """Options of a benchmark run: ``folder`` for samples and results, ``num_samples`` of each
    prompt, ``limit`` to the first prompts, ``seed`` of the noise, ``guidance_scale`` if not the
    model's own, ``batch`` prompts at a time, ``system`` the system message of questions (default:
    the one the configuration trains with, "" for none)."""

    folder: Path | None = None
    num_samples: Annotated[int, Ge(1)] | None = None
    limit: Annotated[int, Ge(1)] | None = None
    seed: Annotated[int, Ge(0)] = 1
    guidance_scale: Annotated[float, Ge(0)] | None = None
    batch: Annotated[int, Ge(1)] = 16
    system: str | None = None


def policy_of(path: Path, overrides: Sequence[str], at: str | None) -> tuple[Any, dict[str, Any]]:
    """Build the policy of a run with its trained weights, or of a configuration with its base
    model; its data and rewards are not opened. Also returns what its samples depend on.

    Raises:
        UserError: mistakes of a configuration or a checkpoint.
    """
    run = build.last_stage(path) if path.is_dir() else None
    file = build.config_of(run) if run else find_config(path)
    # its training data may no longer exist, and are not opened
    configuration = build.read(file, overrides, added={"data": "ocr_prompts"})
    system = system_of(config.load(file, overrides).plain["data"])
    options = configuration.section("train", TrainOptions)
    build.seed_everything(options.seed)
    policy = configuration.build("policy", POLICIES)
    if start := configuration.plain.get("start"):
        build.begin_with(policy, configuration, Path(start))
    Device(options).place(policy)
    build.set_width(policy, options)
    policy.weights.keep("ref")
    about = {"model": str(path), "policy": configuration.plain["policy"], "checkpoint": None}
    about["system"] = system
    if run:
        checkpoints = run / "checkpoints"
        chosen = checkpoint.named(checkpoints, at) if at else checkpoint.choose(checkpoints)[0]
        arrays, meta = checkpoint.load(chosen, checked=not at)
        try:
            policy.weights.load(arrays.get("snapshot-ema", arrays["weights"]))
        except ValueError as error:
            raise UserError(f"{chosen} does not fit {file}: {error}") from error
        build.set_width(policy, options, meta)
        about["checkpoint"] = chosen.name
    return policy, about


def makes_what_is_asked(policy: Any, benchmark: Benchmark, name: str) -> None:
    """Raise UserError if the model writes text and the benchmark needs pictures, or vice versa."""
    makes = policy.capabilities.makes
    wanted_medium = "image" if benchmark.kind == "picture" else "text"
    if makes is not None and makes != wanted_medium:
        raise UserError(
            f"--benchmark {name} judges {wanted_medium}s, but this model makes {makes}s"
        )


@torch.no_grad()
def sample(
    policy: Any, benchmark: Benchmark, items: Sequence[Item], folder: Path, run: Run, about: Any
) -> None:
    """Write ``num_samples`` samples of every item below ``folder``: pictures in GenEval's layout,
    answers as rows of answers.jsonl. Samples of an earlier call are kept.

    ``about``: what the samples depend on; a folder with samples of something else is refused.
    """
    check_pictures(items)
    copies = run.num_samples or benchmark.num_samples
    system = about["system"] if run.system is None else run.system
    chosen: dict[str, Any] = {"num_samples": copies, "seed": run.seed, "batch": run.batch}
    chosen["guidance_scale"] = run.guidance_scale
    claim(folder, {**about, "system": system, **chosen, **named(items)})
    pictures = benchmark.kind == "picture"
    finder = with_pictures if pictures else with_answers
    # one process checks, before any of them writes
    first = sorted(finder(folder, copies)) if distributed.is_main() else []
    done = set(distributed.all_gather_plain(first)[0])
    extra = {"system": system} if system and not pictures else {}
    write = write_pictures if pictures else partial(write_answers, done=done)
    for start in range(0, len(items), run.batch):
        part = items[start : start + run.batch]
        prompts = [{**item.prompt, **extra, "benchmark_index": item.index} for item in part]
        if all(item.index in done for item in part) or not (admitted := policy.admit(prompts)):
            continue
        # a part is sampled as a whole: the noise of a row depends on its index there
        seed = run.seed * STREAM + start
        media, repeated = evaluation.sample(policy, admitted, copies, seed, run.guidance_scale)
        write(folder, media, repeated)
        if distributed.is_main():
            print(f"{start + len(part)} of {len(items)} prompts", flush=True)
    distributed.all_gather_plain(0)  # all have written


def check_pictures(items: Sequence[Item]) -> None:
    """Raise UserError if a question's picture is missing, before anything is sampled."""
    for item in items:
        for source in item.prompt.get("images") or ():
            if isinstance(source, (str, Path)) and not Path(source).is_file():
                raise UserError(
                    f"{item.prompt.get('origin', f'line {item.index}')}: no picture {source}; name "
                    f"the folder in which pictures lie by benchmark.images=FOLDER"
                )


def system_of(section: Any) -> str | None:
    """Return the first system message that a data section names, at any depth."""
    if not isinstance(section, Mapping):
        return None
    if isinstance(section.get("system"), str):
        return str(section["system"])
    return next((text for part in section.values() if (text := system_of(part))), None)


def claim(folder: Path, about: Mapping[str, Any]) -> None:
    """Record what the samples of a folder depend on, or raise UserError if it holds others."""
    file = folder / SETTINGS
    plain = json.loads(json.dumps(about))
    if file.is_file() and json.loads(file.read_text(encoding="utf-8")) != plain:
        raise UserError(
            f"{folder} holds samples made otherwise ({file}); name another folder by "
            f"benchmark.folder=FOLDER, or remove this one"
        )
    if distributed.is_main():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, plain)


def with_pictures(folder: Path, copies: int) -> set[int]:
    """Return the items whose pictures all exist."""
    folders = [f for f in folder.iterdir() if f.is_dir() and f.name.isdigit()]
    return {
        int(f.name)
        for f in folders
        if all((f / "samples" / f"{i:04d}.png").is_file() for i in range(copies))
    }


def with_answers(folder: Path, copies: int) -> set[int]:
    """Return the items whose answers all exist; a line truncated by a stop is removed."""
    file = folder / "answers.jsonl"
    if not file.is_file():
        return set()
    whole = [line for line in file.read_text(encoding="utf-8").split("\n")[:-1] if line]
    indices = [int(json.loads(line)["index"]) for line in whole]
    done = {index for index, count in Counter(indices).items() if count >= copies}
    lines = [line + "\n" for line, index in zip(whole, indices, strict=True) if index in done]
    write_text(file, "".join(lines))
    return done


def write_pictures(folder: Path, media: Any, asked: Sequence[Prompt]) -> None:
    """Write each picture as 00000/samples/0000.png, with the prompt's metadata."""
    from PIL import Image

    counted: dict[int, int] = {}
    for picture, prompt in zip(media, asked, strict=True):
        index = int(prompt["benchmark_index"])
        number = counted[index] = counted.get(index, -1) + 1
        inner = folder / f"{index:05d}" / "samples"
        inner.mkdir(parents=True, exist_ok=True)
        metadata = {key: prompt[key] for key in KEYS if key in prompt}
        record = {**metadata, "prompt": prompt.get("prompt", prompt["text"])}
        (inner.parent / "metadata.jsonl").write_text(json.dumps(record), encoding="utf-8")
        pixels = (picture.float().cpu() * 255).round().clamp(0, 255).byte()
        draft = inner / f"{number:04d}.part"
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(draft, "PNG")
        draft.replace(inner / f"{number:04d}.png")


def write_answers(folder: Path, media: Any, asked: Sequence[Prompt], done: Collection[int]) -> None:
    """Append each missing answer, with the view of its coordinates."""
    local = [
        {
            "index": int(prompt["benchmark_index"]),
            "answer": str(text),
            **({"view": prompt["view"]} if "view" in prompt else {}),
        }
        for text, prompt in zip(media, asked, strict=True)
        if int(prompt["benchmark_index"]) not in done
    ]
    everything = distributed.all_gather_json(local)
    if distributed.is_main():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in everything)
        with (folder / "answers.jsonl").open("a", encoding="utf-8") as file:
            file.write(lines)


def named(items: Sequence[Item]) -> dict[str, Any]:
    """Describe which prompts are sampled."""
    texts = json.dumps([str(item.prompt["text"]) for item in items])
    return {"prompts": len(items), "sha256": hashlib.sha256(texts.encode()).hexdigest()}


def settings(run: Run) -> dict[str, Any]:
    """Return the options as JSON data."""
    values = asdict(run)
    return {key: str(v) if isinstance(v, Path) else v for key, v in values.items()}

"""Implements the commands as functions; ``mmrl.cli.app`` and the files in scripts/ only parse
arguments."""

from __future__ import annotations

import hashlib
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mmrl.config import import_plugins, load, load_stages
from mmrl.core import distributed, whole_export
from mmrl.core.errors import UserError, suggest
from mmrl.core.files import check_writable, on_disk, whole_folder, write_json
from mmrl.core.media.sample_files import write_sample
from mmrl.core.media.scan import decoding
from mmrl.core.paths import find_config
from mmrl.core.registry import ARTIFACTS, REWARDS, load_built_in, locate
from mmrl.core.types import Prompt
from mmrl.experiment import build, checkpoint, convert, evaluation
from mmrl.experiment.build import Session
from mmrl.policies.contracts import Exports, guidance_of
from mmrl.scoring import Scorer

PICTURED = {"image", "images", "video", "videos", "messages"}  # fields of a prompt with pictures
QUICKSTART = ("digits/sd3", "digits/reader", "digits/judge", "digits/clip")


def evaluate(
    path: Path,
    overrides: Sequence[str] = (),
    at: str | None = None,
    best: Selection | None = None,
    scores: Path | None = None,
) -> tuple[list[dict[str, Any]], Path]:
    """Measure held-out rewards of the base model at every requested guidance scale, and of the
    trained one if ``path`` is a run. Returns the rows and the file they were written to.

    ``best``: every sample is the best of several. ``scores``: a file for the score of every prompt.
    """
    target = (last_run(path) or Path()) / "evaluation.json"
    for file in (target, *([scores] if scores else [])):
        check_writable(file.parent)
    session, run = opened(path, overrides, at, best, judged=True)
    judges = session.judges()
    if not judges.rewards:
        raise UserError(
            f"{path}: no reward to measure; name some under evaluate.reward, such as "
            f"evaluate.reward.answer=1.0"
        )
    options = session.evaluation
    prompts = session.prompts()[: options.prompts]
    rows, models = _measured(session, prompts, judges, best, run is not None)
    if not distributed.is_main():  # the main process writes
        return rows, target
    texts = [str(prompt.get("text", "")) for prompt in prompts]
    sizes = _sizes(session, texts, best)
    with on_disk(target.parent):
        write_json(target, {**sizes, "rows": rows})
        if scores is not None:
            weights = session.scorer.weights
            about = {**sizes, "split": options.split, "prompts": texts, "weights": weights}
            write_json(scores, {**about, "models": models})
    return rows, target


def _sizes(session: Session, texts: Sequence[str], best: Selection | None) -> dict[str, Any]:
    """Return the sizes of an evaluation."""
    return {
        "prompts": len(texts),
        "num_samples": session.evaluation.num_samples,
        "held_out": bool(session.source.held_out),
        # equal if the means of prompts, in order, can be paired with those of another run
        "prompts_sha256": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
        **({"best_of": best.count, "by": best.by} if best else {}),
    }


def _measured(
    session: Session,
    prompts: Sequence[Prompt],
    judges: Scorer,
    best: Selection | None,
    is_run: bool,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure every model: the rows of ``evaluation.json``, and the score of every prompt."""
    policy_scale = guidance_of(session.policy)
    choice = _prepared(session, best, judges)
    rows: list[dict[str, Any]] = []
    models = []
    base: evaluation.Scores | None = None
    for model, snapshot, guidance in _models(session, policy_scale, is_run):
        scale = None if guidance == policy_scale else guidance  # else those of rows apply
        with in_force(session, snapshot):
            measured = evaluation.scores(
                session.policy, prompts, judges, session.evaluation, scale, choice
            )
        rows.append(evaluation.row(model, guidance, measured, base))
        models.append({"model": model, "guidance": guidance, **measured.plain()})
        base = base or measured
    return rows, models


def refuse_with_benchmark(options: Mapping[str, Any]) -> None:
    """Raise UserError for options of the command that do not apply to a benchmark."""
    for name, value in options.items():
        if value is not None:
            raise UserError(f"{name} is of rewards; leave it out with --benchmark, or the other")


def evaluate_benchmark(path: Path, name: str, overrides: Sequence[str], at: str | None) -> None:
    """Score a public benchmark, and print the totals and where they are written."""
    from mmrl.apps.benchmarks import command

    page, sentences = command.evaluate(path, name, overrides, at)
    for sentence in sentences:
        print(sentence)
    if page is not None:
        print(f"written to {page}")


def _models(
    session: Session, policy_scale: float | None, is_run: bool
) -> Iterator[tuple[str, str, float | None]]:
    yield "base", "ref", policy_scale
    for scale in session.evaluation.guidance:
        if policy_scale is not None and scale != policy_scale:
            yield f"base, guidance {scale:g}", "ref", scale
    if is_run:
        yield "trained", "live", policy_scale


@dataclass(frozen=True)
class Sampling:
    """Options of ``sample``: with ``best`` every sample is the best of several, ``at`` names a
    checkpoint, by default the newest; ``animated_png``: videos as .png, not .mp4."""

    num_samples: int = 4
    seed: int = 0
    guidance: float | None = None
    best: Selection | None = None
    at: str | None = None
    animated_png: bool = False


def sample(
    path: Path,
    prompts: Sequence[Prompt],
    folder: Path,
    sampling: Sampling = Sampling(),
    overrides: Sequence[str] = (),
) -> list[Path]:
    """Sample a run's trained model or a configuration's base model; one file per sample. Returns
    the paths. Without prompts some held-out ones are used."""
    check_writable(folder)
    best = sampling.best
    session, _ = opened(path, overrides, sampling.at, best, judged=best is not None)
    requests = list(prompts) or session.prompts()[:4]
    _tell_without_pictures(session, requests)
    choice = _prepared(session, best, session.judges()) if best else None
    known = session.policy.report.notes
    session.policy.admit(requests)
    for line in session.policy.report.notes[len(known) :]:
        print(f"note: {line}", file=sys.stderr)
    with in_force(session, "live"):
        media, repeated = evaluation.sample(
            session.policy,
            requests,
            sampling.num_samples,
            sampling.seed,
            sampling.guidance,
            choice,
        )
    with on_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        texts = [str(prompt.get("text", "")) for prompt in repeated]
        fps = session.policy.media.fps
        files = [
            write_sample(item, folder / f"{i:03d}-{_slug(text)}", fps, sampling.animated_png)
            for i, (item, text) in enumerate(zip(media, texts, strict=True))
        ]
        lines = [{"file": f.name, "prompt": text} for f, text in zip(files, texts, strict=True)]
        manifest = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / "samples.jsonl").write_text(manifest, "utf-8")  # for `mmrl view --rate`
    return files


def shown_prompts(
    prompts: Sequence[Prompt], images: Sequence[Path], videos: Sequence[Path]
) -> list[Prompt]:
    """Attach pictures and videos to prompts: all to a single prompt, or one to each of several.

    Raises UserError if the numbers do not match, or a file is missing.
    """
    shown = [dict(prompt) for prompt in prompts]
    for option, files in (("image", images), ("video", videos)):
        for file in files:
            if not file.is_file():
                raise UserError(f"--{option} {file}: no such file")
        if files and not shown:
            raise UserError(f"--{option} needs a --prompt: what is asked about it, or made of it")
        if files and len(shown) not in (1, len(files)):
            raise UserError(
                f"--{option} is given {len(files)} times and --prompt {len(shown)} times: give one "
                f"prompt with all of them, or as many prompts as files"
            )
        if len(shown) == 1 and len(files) > 1:
            shown[0][f"{option}s"] = [str(file) for file in files]
        else:
            for prompt, file in zip(shown, files):
                prompt[option] = str(file)
    return shown


def _tell_without_pictures(session: Session, requests: Sequence[Prompt]) -> None:
    """Warn of prompts without a picture if those of the data have one: a vision-language model
    answers anyway."""
    known = [*session.source.held_out, *session.source.train][:1]
    without = [prompt for prompt in requests if not PICTURED & set(prompt)]
    if without and known and PICTURED & set(known[0]):
        text = str(without[0].get("text", ""))[:60]
        print(
            f"note: {text!r} has no picture, though the prompts of the data have: the model sees "
            f"the text alone; give one by --image or --video",
            file=sys.stderr,
        )


def export(
    run: Path,
    folder: Path,
    at: str | None = None,
    form: str = "diffusers",
    dtype: str | None = None,
) -> Path:
    """Write trained weights in the format of the model's own library, or LoRA weights in the form
    of ComfyUI or kohya's sd-scripts. Full weights are stored in the base's types, or in ``dtype``.
    Returns the folder, which is written atomically."""
    chosen = convert.form_of(form)
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is not None and dtype not in kinds:
        raise UserError(f"--dtype {dtype}: {suggest(dtype, kinds)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; name a new folder")
    check_writable(folder)
    run = build.last_stage(run)
    if at is not None:
        _check_checkpoint(run, at)
    session = build.trained(run, at=at)
    with on_disk(folder), whole_folder(folder) as draft:
        policy = Exports.of(session.policy)
        policy.export(draft)
        if chosen != "diffusers":
            convert.rewrite_export(draft, policy.place, chosen)
        if dtype is not None:
            whole_export.cast(draft, kinds[dtype])
    if chosen == "diffusers":
        _show_loading(run, folder, session)
    return folder


def _show_loading(run: Path, folder: Path, session: Session) -> None:
    """Print the lines of diffusers or transformers that load an export."""
    from mmrl.apps.hub.loading import code, describe
    from mmrl.monitoring.report.runs import read_run

    policy = session.policy
    makes = policy.capabilities.makes
    about = describe(folder, read_run(run), policy.pipeline, makes, policy.auto_class)
    base = about.base_id or locate(about.base)
    if lines := code(replace(about, base_id=base), str(folder)):
        print(f"to load it:\n{textwrap.indent(lines, '    ')}", file=sys.stderr)


def show_data(
    config: Path, overrides: Sequence[str], page: Path | None, count: int, check: bool = False
) -> list[str]:
    """Inspect a configuration's data, and write a page about it if one is named. Returns lines for
    the terminal. ``check``: decode all files."""
    from mmrl.data.command import show

    load_built_in()
    configuration = load(find_config(config), overrides, required=("data",))
    import_plugins(configuration)

    def needs(source: Any) -> None:
        if configuration.plain.get("reward"):
            build.check_needs(configuration, source, {})

    def unfit(source: Any) -> list[str]:
        return build.foreseen(configuration, source) if check else []

    with decoding() if check else nullcontext():
        return show(configuration, needs, unfit, page, count)


def dry_run(
    config: Path,
    overrides: Sequence[str] = (),
    processes: int = 1,
    devices: str | None = None,
    propose: bool = False,
) -> None:
    """Print the plan of a run: shapes, batches, forward passes, memory; for named ``devices`` also
    the time of an iteration. Loads no weights."""
    from mmrl.apps.dry_run.page import pages
    from mmrl.core.cards import devices as named

    file = find_config(config)
    cards = None if devices is None else named(devices)
    if propose and cards is None:
        raise UserError("--fit needs --devices, such as --devices 8xH100")
    _, stages = load_stages(file, overrides)
    for chosen in [[f"stage={stage}"] for stage in stages] or [[]]:
        if chosen:
            print(f"stage {chosen[0].partition('=')[2]}")
        count = processes if cards is None else cards.count
        for line in pages(file, [*overrides, *chosen], count, cards, propose, config):
            print(line, flush=True)


def build_artifacts(names: Sequence[str]) -> None:
    """Build artifacts of the embedded world, unless cached, and print their folders."""
    load_built_in()
    for name in names:
        ARTIFACTS.find(name)
    for name in names:
        print(locate(f"world:{name}"), flush=True)


@dataclass(frozen=True)
class Selection:
    """Holds the reward by which the best of ``count`` samples is chosen."""

    count: int
    by: str

    @classmethod
    def of(cls, count: int | None, by: str | None) -> Selection | None:
        """Combine two options of the command line that belong together."""
        if count is None and by is None:
            return None
        if count is None or by is None:
            raise UserError("--best-of N and --by REWARD belong together; give both or neither")
        return cls(count, by)

    def overrides(self, file: Path, overrides: Sequence[str]) -> list[str]:
        """Add a reward that the configuration does not name, with its default options."""
        configuration = build.read(file, overrides)
        names = [
            name
            for section in build.rewarded(configuration)
            for name in build.classes(configuration, section)
        ]
        if self.by in {*names, *build.short_names(names).values()}:
            return list(overrides)
        REWARDS.find(self.by)
        if ":" in self.by:
            raise UserError(f"--by {self.by}: name it under evaluate.reward of the configuration")
        return [*overrides, f"evaluate.reward.{self.by}=1.0"]


def _prepared(session: Session, best: Selection | None, judges: Scorer) -> evaluation.BestOf | None:
    """Prepare the choice. From then on evaluation samples instead of decoding greedily, or all
    candidates would be equal."""
    if best is None:
        return None
    evaluation.sample_in_evaluation(session.policy)
    name = best.by if best.by in judges.rewards else build.short_names([best.by])[best.by]
    return evaluation.BestOf(best.count, Scorer({name: judges.rewards[name]}))


def last_run(path: Path) -> Path | None:
    """Return the run folder of a path, for one with stages the last; None: it is a
    configuration."""
    return build.last_stage(path) if path.is_dir() else None


def base_of(path: Path) -> str:
    """Describe the base weights of an evaluation: those that a run began with."""
    run = last_run(path)
    configuration = load(build.config_of(run) if run else find_config(path), [])
    if start := configuration.plain.get("start"):
        return f"the weights that {run or path} began with, those of {start}"
    options = configuration.plain.get("policy")
    inner = next(iter(options.values()), None) if isinstance(options, dict) else None
    model = inner.get("path") if isinstance(inner, dict) else None
    return f"the model {model or options}, as it was before any training"


def opened(
    path: Path,
    overrides: Sequence[str],
    at: str | None,
    best: Selection | None = None,
    judged: bool = False,
) -> tuple[Session, Path | None]:
    """Open a run folder with its trained weights, or a configuration with its base model;
    ``judged``: evaluation-only rewards will be needed."""
    path = last_run(path) or path
    if at is not None:
        _check_checkpoint(path, at)
    file = build.config_of(path) if path.is_dir() else find_config(path)
    overrides = best.overrides(file, overrides) if best else overrides
    if path.is_dir():
        return build.trained(path, overrides, at, judged), path
    return build.base(file, overrides, judged), None


def _check_checkpoint(path: Path, at: str) -> None:
    """Raise UserError if there is no checkpoint of that name, listing the existing ones."""
    if not path.is_dir():
        raise UserError(f"--checkpoint {at}: {path} is a configuration; only a run has checkpoints")
    names = [place.name for place in reversed(checkpoint.every(path / "checkpoints"))]
    if checkpoint.named(path / "checkpoints", at).name not in names:
        raise UserError(f"--checkpoint {at}: {path} has {', '.join(names) or 'none'}")


@contextmanager
def in_force(session: Session, snapshot: str) -> Iterator[None]:
    with session.policy.weights.using(snapshot), torch.no_grad():
        yield


def _slug(text: str) -> str:
    return (
        "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())[:60] or "sample"
    )

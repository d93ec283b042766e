"""Implements the commands as functions; ``mmrl.cli.app`` and the files in scripts/ only parse
arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmrl.config import load_stages
from mmrl.core.errors import UserError
from mmrl.core.registry import ARTIFACTS, REWARDS, load_built_in, locate
from mmrl.core.types import Prompt
from mmrl.run import build, evaluation
from mmrl.run.build import Session
from mmrl.scoring import Scorer
from mmrl.utils.files import whole_folder, write_json
from mmrl.utils.paths import find_config

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

    ``best``: every sample is the best of several. ``scores``: a file for what every prompt scored.
    """
    session, run = _open(path, overrides, at, best)
    judges = session.judges()
    if not judges.rewards:
        raise UserError(
            f"{path}: no reward to measure; name some under evaluate.reward, such as "
            f"evaluate.reward.answer=1.0"
        )
    options = session.evaluation
    prompts = session.prompts()[: options.prompts]
    policy_scale = session.policy.guidance_scale
    rows = []
    models = []
    choice = _prepared(session, best, judges)
    for model, snapshot, guidance in _models(session, policy_scale, run is not None):
        with _at(session, snapshot):
            measured = evaluation.scores(session.policy, prompts, judges, options, guidance, choice)
        rows.append(evaluation.row(model, guidance, evaluation.estimates(measured)))
        models.append({"model": model, "guidance": guidance, **measured.plain()})
    target = (run or Path()) / "evaluation.json"
    sizes: dict[str, Any] = {
        "prompts": len(prompts),
        "num_samples": options.num_samples,
        "held_out": bool(session.source.held_out),
    }
    sizes |= {"best_of": best.count, "by": best.by} if best else {}
    target.write_text(json.dumps({**sizes, "rows": rows}, indent=1))
    if scores is not None:
        texts = [str(prompt.get("text", "")) for prompt in prompts]
        about = {
            **sizes,
            "split": options.split,
            "prompts": texts,
            "weights": session.scorer.weights,
        }
        write_json(scores, {**about, "models": models})
    return rows, target


def _models(
    session: Session, policy_scale: float | None, is_run: bool
) -> Iterator[tuple[str, str, float | None]]:
    yield "base", "ref", policy_scale
    for scale in session.evaluation.guidance:
        if policy_scale is not None and scale != policy_scale:
            yield f"base, guidance {scale:g}", "ref", scale
    if is_run:
        yield "trained", "live", policy_scale


def sample(
    path: Path,
    prompts: Sequence[Prompt],
    folder: Path,
    copies: int = 4,
    seed: int = 0,
    guidance: float | None = None,
    overrides: Sequence[str] = (),
    best: Selection | None = None,
) -> list[Path]:
    """Sample a run's trained model or a configuration's base model; one file a sample. Returns the
    paths. ``best``: every sample is the best of several."""
    session, _ = _open(path, overrides, None, best)
    requests = list(prompts) or session.prompts()[:4]
    choice = _prepared(session, best, session.judges()) if best else None
    with _at(session, "live"):
        media, repeated = evaluation.sample(
            session.policy, requests, copies, seed, guidance, choice
        )
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for i, (item, prompt) in enumerate(zip(media, repeated, strict=True)):
        files.append(_write(item, folder / f"{i:03d}-{_slug(str(prompt.get('text', '')))}"))
    return files


def export(run: Path, folder: Path, at: str | None = None) -> Path:
    """Write trained weights in the format of the model's own library. Returns the folder, which is
    there once all of it is written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; name a new folder")
    session = build.trained(build.last_stage(run), at=at)
    with whole_folder(folder) as draft:
        session.policy.export(draft)
    return folder


def dry_run(config: Path, overrides: Sequence[str] = (), processes: int = 1) -> None:
    """Print what a run would be: shapes, batches, forwards, estimated memory. Loads no weights."""
    from mmrl.dry_run.dryrun import dry_run as look
    from mmrl.dry_run.page import lines

    file = find_config(config)
    _, stages = load_stages(file, overrides)
    for chosen in [[f"stage={stage}"] for stage in stages] or [[]]:
        if chosen:
            print(f"stage {chosen[0].partition('=')[2]}")
        for line in lines(look(file, [*overrides, *chosen], processes)):
            print(line)


def build_artifacts(names: Sequence[str]) -> None:
    """Build artifacts of the embedded world, or find them in the cache, and print their folders."""
    load_built_in()
    for name in names:
        ARTIFACTS.find(name)
    for name in names:
        print(locate(f"world:{name}"), flush=True)


@dataclass(frozen=True)
class Selection:
    """Says by which reward the best of ``count`` samples is chosen."""

    count: int
    by: str

    @classmethod
    def of(cls, count: int | None, by: str | None) -> Selection | None:
        """Make one of two options of the command line, which belong together."""
        if count is None and by is None:
            return None
        if count is None or by is None:
            raise UserError("--best-of N and --by REWARD belong together; give both or neither")
        return cls(count, by)

    def overrides(self, file: Path, overrides: Sequence[str]) -> list[str]:
        """Let a reward that the configuration does not name be measured too, with its default
        options."""
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
    """Prepare the choice. From then on evaluation samples where it would take the likeliest answer,
    or all candidates would be one."""
    if best is None:
        return None
    session.policy.sample_in_evaluation()
    name = best.by if best.by in judges.rewards else build.short_names([best.by])[best.by]
    return evaluation.BestOf(best.count, Scorer({name: judges.rewards[name]}))


def _open(
    path: Path, overrides: Sequence[str], at: str | None, best: Selection | None = None
) -> tuple[Session, Path | None]:
    """Open a run folder with its trained weights, or a configuration with its base model."""
    path = build.last_stage(path) if path.is_dir() else path
    file = build.config_of(path) if path.is_dir() else find_config(path)
    overrides = best.overrides(file, overrides) if best else overrides
    if path.is_dir():
        return build.trained(path, overrides, at), path
    return build.base(file, overrides), None


@contextmanager
def _at(session: Session, snapshot: str) -> Iterator[None]:
    with session.policy.weights.using(snapshot), torch.no_grad():
        yield


def _write(item: Any, path: Path) -> Path:
    """Write an image [3, H, W] as PNG, a video [F, 3, H, W] as animated PNG, anything else as
    text."""
    if not isinstance(item, torch.Tensor) or item.ndim < 3:
        path = path.with_suffix(".txt")
        path.write_text(item if isinstance(item, str) else json.dumps(item.tolist()))
        return path
    from PIL import Image

    frames = (item if item.ndim == 4 else item[None]).float().cpu()
    pixels = (frames * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    first, *later_frames = [Image.fromarray(frame) for frame in pixels]
    path = path.with_suffix(".png")
    first.save(path, save_all=bool(later_frames), append_images=later_frames, duration=80, loop=0)
    return path


def _slug(text: str) -> str:
    return (
        "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())[:60] or "sample"
    )

"""Implements the commands as functions; ``mmrl.cli.app`` and the files in scripts/ only parse
arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mmrl.core.errors import UserError
from mmrl.core.registry import ARTIFACTS, load_built_in, locate
from mmrl.core.types import Prompt
from mmrl.run import build, evaluation
from mmrl.run.build import Session
from mmrl.utils.files import whole_folder
from mmrl.utils.paths import find_config

QUICKSTART = ("digits/sd3", "digits/reader", "digits/judge", "digits/clip")


def evaluate(
    path: Path, overrides: Sequence[str] = (), at: str | None = None
) -> tuple[list[dict[str, Any]], Path]:
    """Measure held-out rewards of the base model at every requested guidance scale, and of the
    trained one if ``path`` is a run. Returns the rows and the file they were written to."""
    session, run = _open(path, overrides, at)
    judges = session.judges()
    options = session.evaluation
    policy_scale = session.policy.guidance_scale
    rows = []
    for model, snapshot, guidance in _models(session, policy_scale, run is not None):
        with _at(session, snapshot):
            estimates = evaluation.evaluate(
                session.policy, session.prompts(), judges, options, guidance
            )
        rows.append(evaluation.row(model, guidance, estimates))
    target = (run or Path()) / "evaluation.json"
    held_out = bool(session.source.held_out)
    sizes = {
        "prompts": min(options.prompts, len(session.prompts())),
        "num_samples": options.num_samples,
        "held_out": held_out,
    }
    target.write_text(json.dumps({**sizes, "rows": rows}, indent=1))
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
) -> list[Path]:
    """Sample a run's trained model or a configuration's base model; one file a sample. Returns the
    paths."""
    session, _ = _open(path, overrides, None)
    with _at(session, "live"):
        media, repeated = evaluation.sample(
            session.policy, list(prompts) or session.prompts()[:4], copies, seed, guidance
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
    session = build.trained(run, at=at)
    with whole_folder(folder) as draft:
        session.policy.export(draft)
    return folder


def dry_run(config: Path, overrides: Sequence[str] = (), processes: int = 1) -> None:
    """Print what a run would be: shapes, batches, forwards, estimated memory. Loads no weights."""
    from mmrl.dry_run.dryrun import dry_run as look
    from mmrl.dry_run.page import lines

    for line in lines(look(find_config(config), overrides, processes)):
        print(line)


def build_artifacts(names: Sequence[str]) -> None:
    """Build artifacts of the embedded world, or find them in the cache, and print their folders."""
    load_built_in()
    for name in names:
        ARTIFACTS.find(name)
    for name in names:
        print(locate(f"world:{name}"), flush=True)


def _open(path: Path, overrides: Sequence[str], at: str | None) -> tuple[Session, Path | None]:
    """Open a run folder with its trained weights, or a configuration with its base model."""
    if path.is_dir():
        return build.trained(path, overrides, at), path
    return build.base(find_config(path), overrides), None


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

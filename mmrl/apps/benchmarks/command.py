"""Implements ``mmrl evaluate PATH --benchmark NAME``: PATH is a folder of samples, a file of
answers, a run or a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import mmrl.config as config
from mmrl.apps.benchmarks import results, samples, sampling
from mmrl.apps.benchmarks.items import BENCHMARKS, Benchmark, Item, Sample
from mmrl.apps.benchmarks.sampling import Run
from mmrl.config import yamltext
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in

SECTION = "benchmark."
FILES = (".jsonl", ".ndjson", ".json")


def evaluate(
    path: Path, name: str, overrides: Sequence[str] = (), at: str | None = None
) -> tuple[Path | None, list[str]]:
    """Score samples, or sample a model and score that. Returns the page and the sentences to print;
    no page on processes that only helped to sample.

    ``overrides``: ``benchmark.KEY=VALUE`` are options of the benchmark and of ``Run``; others
    change the configuration of a model. Raises UserError for everything a user can fix.
    """
    load_built_in()
    BENCHMARKS.find(name)
    own_words = [word for word in overrides if word.startswith(SECTION)]
    rest = [word for word in overrides if not word.startswith(SECTION)]
    run, options = split(own_words)
    if is_of_samples(path):
        if at is not None:
            raise UserError(f"--checkpoint is of a run, but {path} holds samples already made")
        if rest:
            raise UserError(f"{rest[0]} changes a model, but {path} holds samples already made")
        benchmark = made(name, options, path)
        folder = run.folder or (path if path.is_dir() else path.parent)
        listed = gathered(benchmark, path, run)
    else:
        benchmark = made(name, options, None)
        policy, about = sampling.policy_of(path, rest, at)
        sampling.makes_what_is_asked(policy, benchmark, name)
        items = benchmark.items[: run.limit]
        folder = run.folder or (path if path.is_dir() else Path()) / f"benchmark-{name}"
        sampling.sample(policy, benchmark, items, folder, run, about)
        del policy  # free memory for a detector or judge
        if not distributed.is_main():
            return None, []
        listed = gathered(benchmark, folder, run)
    scores = benchmark.score(listed)
    content = {"path": str(path), "options": options | sampling.settings(run)}
    content |= results.summary(name, benchmark, listed, scores)
    return results.write(folder, content, listed, scores), results.sentences(content)


def split(words: Sequence[str]) -> tuple[Run, dict[str, Any]]:
    """Split ``benchmark.KEY=VALUE`` overrides into options of any run, and the benchmark's own."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.removeprefix(SECTION).partition("=")
        if not equals or not name:
            raise UserError(f"{word}: expected benchmark.KEY=VALUE, such as benchmark.path=FILE")
        values[name], _ = yamltext.read(text, f"command line: {word}")
    names = {entry.name for entry in fields(Run)}
    shared = {key: value for key, value in values.items() if key in names}
    run: Run = config.build_dataclass(Run, shared, "benchmark")
    return run, {key: value for key, value in values.items() if key not in names}


def made(name: str, options: Mapping[str, Any], folder: Path | None) -> Benchmark:
    """Build a benchmark. GenEval's prompts may come from the metadata next to the samples."""
    benchmark: Benchmark = config.build({name: dict(options)}, BENCHMARKS, "benchmark")
    if name == "geneval" and "path" not in options and folder is not None:
        benchmark.items = list(beside(folder))
    return benchmark


def beside(folder: Path) -> list[Item]:
    """Read GenEval's prompts from the records in the folders of the samples."""
    items = []
    numbered = [f for f in folder.iterdir() if f.is_dir() and f.name.isdigit()]
    for inner in sorted(numbered, key=lambda f: int(f.name)):
        record = samples.metadata(inner)
        if record is None or not isinstance(record.get("include"), list):
            raise UserError(
                f"{inner}: no metadata.jsonl with GenEval's record; name the prompts by "
                f"benchmark.path=evaluation_metadata.jsonl"
            )
        prompt = {"text": record.get("prompt", ""), **record}
        items.append(Item(int(inner.name), str(record.get("tag", "all")), prompt))
    if not items:
        raise UserError(
            f"{folder}: no folders 00000, 00001 ... of samples; name the prompts of a flat folder "
            f"by benchmark.path=evaluation_metadata.jsonl"
        )
    return items


def is_of_samples(path: Path) -> bool:
    """Tell samples from a run's folder and a configuration."""
    if path.is_dir():
        return not (path / "config.yaml").is_file()
    return path.suffix.lower() in FILES


def gathered(benchmark: Benchmark, path: Path, run: Run) -> list[Sample]:
    """List the samples of a folder or file, of the first ``limit`` items."""
    picture = benchmark.kind == "picture"
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if picture and not path.is_dir():
        raise UserError(f"{path}: this benchmark judges pictures; give the folder they lie in")
    finder = samples.pictures if picture else samples.answers
    listed = finder(path, benchmark.items)
    benchmark.items = benchmark.items[: run.limit]
    chosen = {item.index for item in benchmark.items}
    return [sample for sample in listed if sample.item.index in chosen]

"""Aggregates the scores of a benchmark by category, and writes them as JSON and as a page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from PIL import Image

from mmrl.apps.benchmarks.estimates import Total, mean_of_categories, total
from mmrl.apps.benchmarks.items import ALL, Benchmark, Item, Sample, Score
from mmrl.core.files import finite, write_json, write_text
from mmrl.monitoring.report.pictures import data_uri
from mmrl.monitoring.report.templates import environment

SHOWN = 24  # samples on the page
ByItem = dict[int, list[float]]


def summary(
    name: str, benchmark: Benchmark, samples: Sequence[Sample], scores: Sequence[Score]
) -> dict[str, Any]:
    """Aggregate the scores: the headline, each category, and missing samples."""
    by_category: dict[str, ByItem] = {}
    for sample, score in zip(samples, scores, strict=True):
        entries = [(sample.item.category, score.value), *score.parts]
        for category, value in entries:
            by_category.setdefault(category, {}).setdefault(sample.item.index, []).append(value)
    main = {item.category for item in benchmark.items}
    groups = {category: list(items.values()) for category, items in by_category.items()}
    of_samples: ByItem = {}
    for sample, score in zip(samples, scores, strict=True):
        of_samples.setdefault(sample.item.index, []).append(score.value)
    everything = list(of_samples.values())
    averaged = [groups[category] for category in groups if category in main]
    means = benchmark.headline == "categories" and len(averaged) > 1
    headline = mean_of_categories(averaged) if means else total(everything)
    categories = {c: total(values) for c, values in groups.items() if c != ALL}
    best = [[max(known)] for group in everything if (known := [v for v in group if v == v])]
    return {
        "benchmark": name,
        "measure": benchmark.measure,
        "source": benchmark.source,
        "headline": "mean of the categories" if means else "mean of the samples",
        "total": asdict(headline),
        "samples_mean": asdict(total(everything)),
        "best_of_prompt": asdict(total(best)) if any(len(g) > 1 for g in everything) else None,
        "categories": {category: asdict(estimate) for category, estimate in categories.items()},
        "items": len(benchmark.items),
        "items_with_samples": len(of_samples),
        "not_scored": sum(math.isnan(score.value) for score in scores),
    }


def sentences(content: Mapping[str, Any]) -> list[str]:
    """State the headline and what is missing, for the terminal and the page."""
    lines = [
        f"{content['benchmark']}: {said(Total(**content['total']))} ({content['measure']}, "
        f"{content['headline']})"
    ]
    missing = content["items"] - content["items_with_samples"]
    if missing:
        lines.append(
            f"{missing} of {content['items']} prompts have no sample; the total is over the others."
        )
    if content["not_scored"]:
        lines.append(f"{content['not_scored']} samples could not be scored and are left out.")
    return lines


def said(estimate: Total) -> str:
    """Write a mean with its interval."""
    if not math.isfinite(estimate.mean):
        return "nothing could be scored"
    if not math.isfinite(estimate.low):
        return f"{estimate.mean:.4f}"
    return f"{estimate.mean:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"


def rows(samples: Sequence[Sample], scores: Sequence[Score], folder: Path) -> list[dict[str, Any]]:
    """List the score of every sample, as JSON data."""
    listed = []
    for sample, score in zip(samples, scores, strict=True):
        listed.append(
            {
                "index": sample.item.index,
                "number": sample.number,
                "category": sample.item.category,
                "text": str(sample.item.prompt["text"]),
                "score": finite(score.value),
                **({"file": shown(sample.file, folder)} if sample.file else {}),
                **({"answer": sample.text} if sample.text else {}),
                **({"right": right(sample.item)} if not sample.file or sample.text else {}),
            }
        )
    return listed


def right(item: Item) -> Any:
    prompt = item.prompt
    keys = ("answers", "answer", "boxes")
    return next((prompt[key] for key in keys if prompt.get(key) is not None), None)


def shown(file: Path, folder: Path) -> str:
    """Return a file's path relative to the page's folder, if it is inside."""
    return str(file.relative_to(folder)) if file.is_relative_to(folder) else str(file)


def write(
    folder: Path,
    content: dict[str, Any],
    samples: Sequence[Sample],
    scores: Sequence[Score],
) -> Path:
    """Write ``benchmark-NAME.json``, ``benchmark-NAME.jsonl`` of all samples and the page; returns
    the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"benchmark-{content['benchmark']}"
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    content = {"made": when, **content}
    listed = rows(samples, scores, folder)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in listed]
    write_text(stem.with_suffix(".jsonl"), "".join(lines))
    write_json(stem.with_suffix(".json"), finite(content))
    page = stem.with_suffix(".html")
    write_text(page, render(content, examples(samples, scores)))
    return page


def examples(samples: Sequence[Sample], scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Choose samples to show: the worst and the best, in the order of the benchmark."""
    order = sorted(
        (i for i, score in enumerate(scores) if not math.isnan(score.value)),
        key=lambda i: scores[i].value,
    )
    half = SHOWN // 2
    picked = sorted(order if len(order) <= SHOWN else [*order[:half], *order[-half:]])
    return [
        {
            "picture": thumbnail(samples[i].file),
            "text": str(samples[i].item.prompt["text"]),
            "answer": samples[i].text,
            "right": right(samples[i].item),
            "category": samples[i].item.category,
            "score": scores[i].value,
        }
        for i in picked
    ]


def thumbnail(file: Path | None) -> str | None:
    """Return a picture as a data URI, at most 192 pixels; None if it is not a picture."""
    if file is None or file.suffix == ".txt":
        return None
    with Image.open(file) as picture:
        return data_uri(picture.convert("RGB"), 192)


def render(content: Mapping[str, Any], chosen: Sequence[Mapping[str, Any]]) -> str:
    """Return the page as text."""
    page = environment("mmrl.apps.benchmarks", said=said).get_template("benchmark.html")
    table = [(name, Total(**estimate)) for name, estimate in content["categories"].items()]
    return str(page.render(content, sentences=sentences(content), table=table, examples=chosen))

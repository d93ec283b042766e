"""Implements ``mmrl compare``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmrl.apps.compare import measures, page
from mmrl.apps.compare.plan import plan
from mmrl.apps.compare.runs import Workers, jobs_of
from mmrl.apps.compare.settings import budget_of, settings_of


@dataclass(frozen=True)
class Request:
    """Holds the options of the command line."""

    vary: Sequence[str] = ()
    sweep: Sequence[str] = ()
    seeds: int = 3
    budget: Sequence[str] = ()
    jobs: int = 1
    folder: Path = Path("comparison")


def compare(words: Sequence[str], request: Request) -> tuple[Path, list[str]]:
    """Train, evaluate and compare. Returns the page and the verdict.

    Runs finished by an earlier call with the same folder are reused. Raises UserError for
    everything a user can fix, mostly before the first run.
    """
    page.check_folder(request.folder)
    settings = settings_of(words, request.vary, request.sweep)
    chosen_plan = plan(settings, request.seeds, budget_of(request.budget))
    jobs = jobs_of(chosen_plan, request.folder)
    splits = ("development", "test") if request.sweep else ("test",)
    Workers(request.jobs).finish(jobs, splits)
    halves = {split: measures.read_scores(jobs, split) for split in splits}
    best = measures.chosen(chosen_plan, halves[splits[0]])
    names = measures.measures_of(chosen_plan, halves["test"])
    between = measures.pairs(chosen_plan, best)
    comparisons = measures.compare(halves["test"], names, between)
    sentences = measures.verdict(chosen_plan, comparisons)
    if request.sweep:
        labels = ", ".join(best[arm].label for arm in sorted(best))
        sentences.insert(0, f"Chosen on the development prompts: {labels}.")
    path = page.write(request.folder, chosen_plan, jobs, halves, comparisons, sentences)
    return path, sentences

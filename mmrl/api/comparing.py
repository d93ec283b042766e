"""Compares configurations from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from mmrl.api.arguments import Overrides, words_of
from mmrl.api.isolation import isolated
from mmrl.api.processes import check_alone
from mmrl.apps.compare import command


@dataclass(frozen=True)
class Comparison:
    """Holds the result of a comparison: ``sentences`` with the verdict, ``page``, an HTML file with
    curves and paired intervals, and ``folder`` with the runs. Shown as the page in notebooks."""

    page: Path
    sentences: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.page.parent

    def _repr_html_(self) -> str:
        text = escape(self.page.read_text(encoding="utf-8"))
        style = "width:100%;height:720px;border:1px solid #8884;border-radius:6px"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{text}"></iframe>'

    def __repr__(self) -> str:
        return "\n".join([*self.sentences, f"written to {self.page}"])


def compare(
    configs: str | Sequence[str],
    overrides: Overrides = None,
    *,
    vary: Sequence[str] = (),
    sweep: Sequence[str] = (),
    seeds: int = 3,
    budget: Mapping[str, float] | None = None,
    jobs: int = 1,
    folder: str | Path = "comparison",
) -> Comparison:
    """Train configurations with several seeds at one budget and say, with paired intervals, what
    differs, as ``mmrl compare`` does.

    configs: names or files, each perhaps with changes, ``"digits/nft+train.epochs=2"``; the first
    is the baseline. overrides: changes of all. vary: changes that derive a second configuration
    from a single one; sweep: ``"key=v1,v2"``, selected on development prompts. budget: of a run,
    ``{"iterations": 20}`` or cpu_seconds, samples, forwards. jobs: runs in parallel. Every run is a
    separate process; finished runs of an earlier call are reused. Raises UserError, mostly before
    the first run.
    """
    check_alone("compare")
    names = [configs] if isinstance(configs, str) else list(configs)
    limits = [f"{name}={value}" for name, value in (budget or {}).items()]
    request = command.Request(list(vary), list(sweep), seeds, limits, jobs, Path(folder))
    with isolated():
        page, sentences = command.compare([*names, *words_of(overrides)], request)
    return Comparison(Path(page), sentences)

"""Writes the model card of a run: model, data, configuration, results, and how to load it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml

from mmrl.apps.hub.loading import Export, instructions
from mmrl.core.errors import UserError
from mmrl.monitoring.progress import clock_time
from mmrl.monitoring.report.charts import number
from mmrl.monitoring.report.evidence import Estimate, Evaluation, score, verdict
from mmrl.monitoring.report.runs import Run

SECRET = re.compile(r"(api_?key|token|secret|password|credential)", re.IGNORECASE)
HIDDEN = "..."
MOST_TEXT = 600  # characters of an answer in the card
MOST_ANSWERS = 3


@dataclass(frozen=True)
class Card:
    """Holds the content of a card. ``license``: the hub's name of one, such as apache-2.0."""

    run: Run
    evaluation: Evaluation
    export: Export
    repository: str
    license: str
    has_curves: bool
    picture: str  # the before-and-after file, next to the card; empty without one

    def text(self) -> str:
        """Return README.md: the hub's metadata, then the sections."""
        sections = (
            self._title(),
            self._results(),
            self._before_after(),
            f"## How to load\n\n{instructions(self.export, self.repository)}",
            self._curves(),
            self._data(),
            self._training(),
            self._limits(),
        )
        return f"---\n{self._metadata()}\n---\n\n" + "\n".join(part for part in sections if part)

    def _metadata(self) -> str:
        from huggingface_hub import ModelCardData

        name = self.repository.rpartition("/")[2]
        method = _first_name(self.run.config.get("objective"))
        tags = ["mmrl", "reinforcement-learning", *([method.replace("_", "-")] if method else [])]
        tags += ["lora"] if self.export.kind in ("diffusers_lora", "peft") else []
        results = list(self._hub_results()) or None
        relation = "adapter" if "lora" in tags else "finetune"
        metadata = ModelCardData(
            license=self.license,
            base_model=self.export.base_id or None,
            library_name=self.export.library or None,
            pipeline_tag=self.export.task or None,
            tags=tags,
            model_name=name if results else None,
            eval_results=results,
        )
        if self.export.base_id:
            setattr(metadata, "base_model_relation", relation)  # noqa: B010 (of its free fields)
        return str(metadata.to_yaml()).strip()

    def _hub_results(self) -> Iterator[Any]:
        """Yield the trained model's rewards in the hub's results format."""
        from huggingface_hub import EvalResult

        after = self.evaluation.after()
        for name, estimate in (after.rewards if after else {}).items():
            yield EvalResult(
                task_type=self.export.task or "text-generation",
                dataset_type="held-out-prompts",
                dataset_name=f"held-out prompts of {_data_name(self.run)}",
                metric_type=name,
                metric_name=f"{name} (mean; 95 % interval {_interval(estimate)})",
                metric_value=round(estimate.mean, 4),
            )

    def _title(self) -> str:
        base = f"`{without_folders(self.export.base) or 'a base model'}`"
        linked = f"[{self.export.base_id}](https://huggingface.co/{self.export.base_id})"
        rewards = ", ".join(f"`{name}`" for name in self.run.optimised()) or "no reward"
        method = _first_name(self.run.config.get("objective")) or "reinforcement"
        sentences = "\n".join(f"> {line}" for line in self._verdict())
        return (
            f"# {self.repository.rpartition('/')[2]}\n\n"
            f"{linked if self.export.base_id else base}, fine-tuned by `{method}` on {rewards} "
            f"with [mmrl](https://pypi.org/project/multimodal-rl/).\n\n{sentences}\n"
        )

    def _verdict(self) -> list[str]:
        return [line for line in verdict(self.run, self.evaluation) if "mmrl evaluate" not in line]

    def _results(self) -> str:
        evaluation = self.evaluation
        if not evaluation.rows:
            return "## Evaluation\n\nThis model was not evaluated on held-out prompts.\n"
        names = evaluation.names()
        kinds = ["trained on" if n in evaluation.optimised else "not trained on" for n in names]
        heads = [f"{_cell(n)} ({kind})" for n, kind in zip(names, kinds)]
        lines = [["model", "guidance", *heads], ["---"] * (len(names) + 2)]
        for row in evaluation.rows:
            cells = [_estimate(row.rewards.get(name)) for name in names]
            cells = [f"**{cell}**" for cell in cells] if row.trained else cells
            lines.append([_cell(row.model), number(row.guidance), *cells])
        after = evaluation.after()
        if after is not None and after.differences:
            changes = [_signed(after.differences.get(name)) for name in names]
            lines.append(["change, paired by prompt", "", *changes])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        prompts = evaluation.prompts or "?"
        return (
            f"## Evaluation\n\n{table}\n\nMeans over {prompts} held-out prompts × "
            f"{evaluation.num_samples or '?'} samples, with 95 % confidence intervals over "
            f"prompts; same prompts and same noise for all rows.\n"
        )

    def _before_after(self) -> str:
        if self.picture:
            shown = f"![before and after]({self.picture})"
            if self.picture.endswith(".mp4"):
                shown = f'<video src="{self.picture}" controls autoplay muted loop></video>'
            return (
                f"## Before and after\n\n{shown}\n\n"
                "Above the base model, below this one: same prompts, same noise, not chosen.\n"
            )
        pairs = list(_answers(self.run))
        if not pairs:
            return ""
        return "## Before and after\n\nAnswers sampled in training.\n\n" + "\n".join(pairs)

    def _curves(self) -> str:
        return "## Curves\n\n![curves of the training](curves.png)\n" if self.has_curves else ""

    def _data(self) -> str:
        text = yaml.safe_dump(scrubbed(self.run.config.get("data")), sort_keys=False).strip()
        return f"## Data\n\n```yaml\ndata:\n{_indented(text)}\n```\n"

    def _training(self) -> str:
        machine = self.run.machine
        seconds = sum(v for v in self.run.column("seconds") if v is not None)
        devices = machine.get("gpus") or [f"{machine.get('cores', '?')} CPU cores"]
        versions = machine.get("versions") or {}
        facts = {
            "iterations": number(len(self.run.metrics)),
            "time": clock_time(seconds) if seconds else "",
            "device": ", ".join(map(str, devices)) if machine else "",
            "versions": ", ".join(f"{k} {v}" for k, v in versions.items() if v),
            "commit": str(machine.get("commit") or ""),
        }
        table = "\n".join(f"| {k} | {_cell(v)} |" for k, v in facts.items() if v)
        return (
            f"## Training\n\n| | |\n|---|---|\n{table}\n\n`config.yaml` is the whole "
            f"configuration; `mmrl train config.yaml` repeats the run.\n\n<details><summary>"
            f"Configuration</summary>\n\n{_fenced(configuration(self.run), 'yaml')}\n\n</details>\n"
        )

    def _limits(self) -> str:
        base = self.export.base_id or without_folders(self.export.base) or "the base model"
        kind = {"other": f"The licence of `{base}` applies."}.get(self.license, f"{self.license}.")
        goal = ", ".join(self.run.optimised()) or "its data"
        return (
            f"## Licence and limits\n\n{kind} What `{base}` may not be used for, this model may "
            f"not either. It was trained to score high on {goal}; "
            f"scores of rewards that were trained on say less than those that were not.\n"
        )


def configuration(run: Run) -> str:
    """Return the configuration as YAML, without secrets and names of this machine's folders.

    Also without the run folder: a repetition gets a new one.
    """
    plain = {key: value for key, value in run.config.items() if key != "run"}
    return yaml.safe_dump(scrubbed(plain), sort_keys=False, allow_unicode=True)


def scrubbed(value: Any) -> Any:
    """Replace secrets, by their keys, and the folders of absolute paths, also in keys (a reward may
    be named by its file)."""
    if isinstance(value, dict):
        return {
            without_folders(str(key)) if isinstance(key, str) else key: HIDDEN
            if SECRET.search(str(key)) and _is_secret(inner)
            else scrubbed(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [scrubbed(inner) for inner in value]
    return without_folders(value) if isinstance(value, str) else value


def without_folders(text: str) -> str:
    """Write the home folder as ``~``; of any other absolute path, return the last part. A word such
    as ``/no_think`` is not a path."""
    home = str(Path.home())
    text = text.replace(home, "~") if len(home) > 1 else text
    for kind in (PurePosixPath, PureWindowsPath):
        path = kind(text)
        if "\n" not in text and path.is_absolute() and len(path.parts) > 2:
            return path.name
    return text


def license_of(base: str, chosen: str | None) -> str:
    """Return the licence: the chosen one, else that of a base model in a folder, else "other"."""
    if chosen is not None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", chosen):
            raise UserError(
                f"--license {chosen}: give the hub's name of one, such as apache-2.0, mit, "
                f"cc-by-nc-4.0 or other"
            )
        return chosen
    readme = Path(base) / "README.md"
    try:
        head = readme.read_text(encoding="utf-8").split("---")
        declared = yaml.safe_load(head[1]).get("license")
    except (OSError, IndexError, AttributeError, yaml.YAMLError):
        return "other"
    return str(declared) if isinstance(declared, str) else "other"


def _is_secret(value: Any) -> bool:
    """Tell secrets from numbers and flags, such as max_new_tokens."""
    return isinstance(value, (str, dict, list)) and bool(value)


def _answers(run: Run) -> Iterator[str]:
    """Yield the first and the last recorded answer to the same prompts."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for line in run.rollouts:
        if isinstance(line.get("answers"), list) and line["answers"]:
            by_prompt.setdefault(str(line.get("prompt")), []).append(line)
    repeated = {prompt: lines for prompt, lines in by_prompt.items() if len(lines) > 1}
    for prompt, lines in list((repeated or by_prompt).items())[:MOST_ANSWERS]:
        yield f"Prompt:\n\n{_fenced(prompt[:MOST_TEXT])}\n"
        for line in (lines[0], lines[-1])[: len(lines)]:
            text = str(line["answers"][0].get("text"))[:MOST_TEXT]
            yield f"Iteration {line.get('iteration')}:\n\n{_fenced(text)}\n"


def _fenced(text: str, language: str = "") -> str:
    """Put a text in a code block with a longer fence than any in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None or not math.isfinite(estimate.mean):
        return "–"
    return f"{score(estimate.mean)} {_interval(estimate)}"


def _signed(change: Estimate | None) -> str:
    if change is None or not math.isfinite(change.mean):
        return "–"
    numbers = [f"{v:+.3g}".replace("-", "\u2212") for v in (change.mean, change.low, change.high)]
    interval = f"[{numbers[1]}, {numbers[2]}]" if math.isfinite(change.high - change.low) else ""
    return f"{numbers[0]} {interval}".strip()


def _interval(estimate: Estimate) -> str:
    if not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return "(no interval)"
    return f"[{score(estimate.low)}, {score(estimate.high)}]"


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.split("\n"))


def _first_name(section: Any) -> str:
    return section if isinstance(section, str) else str(next(iter(section or {}), ""))


def _data_name(run: Run) -> str:
    section = run.config.get("data")
    name = _first_name(section)
    path = section.get("path") if isinstance(section, dict) else None
    return Path(str(path)).name if path else name

"""Common code of the bench scripts: counting passes, timing, memory, and their page."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from samplers.batching import peak_bytes


def publish(out: Path, report: dict[str, Any], page: str) -> None:
    """Write a report and its page, ``out`` with .json and .md, and print the page."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    out.with_suffix(".md").write_text(page)
    print(page)


def described(machine: dict[str, Any]) -> str:
    """Write where and when something was measured."""
    versions = machine["versions"]
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "diffusers"))
    where = f"{machine['cpu']}, {machine['cores']} cores; {libraries}, transformers"
    return (
        f"Machine: {where} {versions['transformers']}; commit {machine['commit']}, "
        f"{machine['time'][:10]}."
    )


@contextmanager
def counting(net: torch.nn.Module) -> Iterator[dict[str, int]]:
    """Count forward passes of the network, and rows in them (a guided row is two)."""
    counts = {"passes": 0, "rows": 0}

    def count(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        counts["passes"] += 1
        counts["rows"] += len(args[0] if args else kwargs["hidden_states"])

    hook = net.register_forward_pre_hook(count, with_kwargs=True)
    yield counts
    hook.remove()


def cost(fn: Callable[[], Any], net: torch.nn.Module) -> dict[str, int]:
    """Measure passes, rows in them and peak bytes; calls ``fn`` twice."""
    with counting(net) as counts:
        fn()
    return counts | {"peak_bytes": peak_bytes(fn, next(net.parameters()).device)}


def seconds(fn: Callable[[], Any]) -> float:
    """Measure wall seconds, including the device's work."""
    _wait()
    start = time.perf_counter()
    fn()
    _wait()
    return time.perf_counter() - start


class Products(TorchFunctionMode):
    """Sums this process's seconds in matrix products, convolutions and attention, in place, with
    realistic cache contents."""

    KINDS = (
        *(F.linear, F.scaled_dot_product_attention),
        *(F.conv2d, torch.matmul, torch.bmm, torch.baddbmm),
    )

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in self.KINDS:
            return func(*args, **(kwargs or {}))
        start = time.process_time()
        output = func(*args, **(kwargs or {}))
        self.seconds += time.process_time() - start
        return output


def floor(fn: Callable[[], Any]) -> float:
    """Measure the time of ``fn`` in products and attention, a lower bound."""
    with Products() as counted:
        fn()
    return counted.seconds


class Apart:
    """Holds a trainer in its own process, as users run it, so that two can alternate without
    sharing process settings (such as the allocator's)."""

    def __init__(self, make: Callable[..., Any], *arguments: Any):
        """Start a process in which ``make`` builds the trainer; both are defined in a module."""
        spawn = multiprocessing.get_context("spawn")
        self._pipe, end = spawn.Pipe()
        known = (end, torch.get_num_threads(), make, arguments)
        self._process = spawn.Process(target=_serve, args=known, daemon=True)
        self._process.start()
        end.close()

    def ask(self, work: Callable[[Any], Any]) -> Any:
        """Return ``work(trainer)`` from the process. Raises EOFError if it fails there, which
        prints why."""
        self._pipe.send(work)
        return self._pipe.recv()

    def end(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Any, threads: int, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    trainer = make(*arguments)
    while (work := pipe.recv()) is not None:
        pipe.send(work(trainer))


def iteration(trainer: Any) -> tuple[float, dict[str, float]]:
    """Run one iteration; return its seconds and metrics."""
    clock = Clock()
    metrics = trainer.iterate()
    return clock.seconds(), metrics


class Clock:
    """Measures time from its construction."""

    def __init__(self) -> None:
        _wait()
        self.start = time.perf_counter()

    def seconds(self) -> float:
        _wait()
        return time.perf_counter() - self.start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def summary(times: list[float], cost: dict[str, int]) -> dict[str, Any]:
    middle = statistics.median(times)
    each = {
        "forwards_per_second": cost["passes"] / middle,
        "rows_per_second": cost["rows"] / middle,
    }
    return {"seconds": middle, "all_seconds": times, **cost, **each}


def page(report: dict[str, Any]) -> str:
    """Return the results of ``bench_iteration`` as markdown."""
    about = report["machine"]
    work = report["work"]
    versions = about["versions"]
    gpus = ", ".join(about["gpus"]) or "no GPU"
    lines = [
        f"# One iteration of {report['path']}: mmrl and a straightforward loop",
        "",
        f"Written by `{about['command']}` on {about['time']}, commit {about['commit']}.",
        "",
        f"{about['cpu']}, {about['cores']} cores, {report['threads']} threads; {gpus}; "
        f"torch {versions['torch']}, "
        f"diffusers {versions['diffusers']}. Ran on {report['device']}.",
        "",
        f"{report['path']}, {report['size']} pixels: {work['prompts']} prompts x "
        f"{work['copies']} samples, "
        f"{report['steps']} steps, all but the last trained, {work['updates']} optimizer "
        f"steps, {work['precision']}. "
        f"Median of {report['repeats']} iterations each, in turns. A pass is one call of "
        f"the network; a guided row "
        f"counts twice. Memory is the peak of tensors made in an iteration ({report['memory']}).",
    ]
    for name, case in report["cases"].items():
        apart = case["agreement"]
        lines += ["", f"## {name}: {case['ratio']:.2f} times as fast", "", *table(case["runs"]), ""]
        lines.append(
            f"In float64 on the same noise both end within {apart['weights']:.1e} of each "
            f"other in every weight (which "
            f"moved by up to {apart['weights_moved']:.1e}) and {apart['latents']:.1e} in "
            f"every latent."
        )
    return "\n".join(lines) + "\n"


def table(runs: dict[str, Any]) -> list[str]:
    head = [
        "| | seconds | (least - most) | passes | passes/s | rows/s | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    return head + [
        f"| {name} | {run['seconds']:.3f} | {min(run['all_seconds']):.3f} - "
        f"{max(run['all_seconds']):.3f} "
        f"| {run['passes']} | {run['forwards_per_second']:.1f} | {run['rows_per_second']:.0f} "
        f"| {run['peak_bytes'] / 2**20:.0f} |"
        for name, run in runs.items()
    ]


def vlm_page(report: dict[str, Any]) -> str:
    """Return the results of ``bench_vlm`` as markdown."""
    about = report["machine"]
    engine = " with vLLM" if any("vLLM" in name for name in report["curves"]) else ""
    lines = [
        f"# One GRPO iteration of a vision-language model: mmrl and TRL{engine}",
        "",
        f"Written by `{about['command']}` on {about['time']}, commit {about['commit']}.",
        "",
        f"{about['cpu']}, {about['cores']} cores, {report['threads']} threads; "
        f"{', '.join(about['gpus']) or 'no GPU'}; "
        f"torch {about['versions']['torch']}, transformers "
        f"{about['versions']['transformers']}, TRL {report['trl']}. "
        f"Ran on {report['device']}. A {report['model']} Qwen2.5-VL with random weights, "
        f"images, one optimizer step an "
        f"iteration; {report['repeats']} iterations each, in turns, each in a process of "
        f"its own, the same work for both. "
        "Seconds of a first iteration, in which passes are compiled, are not counted. "
        "Factors are medians of the ratios of neighbouring iterations, with the least and the "
        "most: others used the machine, which slows down both.",
    ]
    lines += [*_vlm_curves(report["curves"]), *_vlm_memory(report.get("memory", []))]
    earlier = report.get("earlier")
    if earlier and (earlier["curves"] or earlier.get("memory")):
        before = earlier["machine"]
        lines += [
            "",
            f"Not measured again, but on {before['time']}, commit {before['commit']}, "
            f"{earlier['threads']} threads:",
            *_vlm_curves(earlier["curves"]),
            *_vlm_memory(earlier.get("memory", [])),
        ]
    return "\n".join(lines) + "\n"


def _vlm_curves(curves: dict[str, Any]) -> list[str]:
    head = "| prompt tokens | of the image | prompts x copies | answer tokens | times as fast |"
    lines = []
    for name, cases in curves.items():
        lines += ["", f"## {name}", "", head, "|---|---|---|---|---|"]
        for case in cases:
            work = case["work"]
            tokens = str(work["tokens"])
            if work.get("ends"):
                mean = case["answer_tokens"]
                tokens = f"{mean['mmrl']:.0f} and {mean['trl']:.0f} on average, at most {tokens}"
            if work.get("compile"):
                tokens += f" (compiled in a first iteration of {case['first']:.0f} s)"
            factors = case.get("factors")
            spread = f" ({min(factors):.2f} - {max(factors):.2f})" if factors else ""
            lines.append(
                f"| {case['prompt_tokens']} | {work['image_tokens']} | {work['prompts']} "
                f"x {work['copies']} | {tokens} | {case['factor']:.2f}{spread} |"
            )
    return lines


def _vlm_memory(entries: list[dict[str, Any]]) -> list[str]:
    """Return the table of peak memory, or nothing."""
    if not entries:
        return []
    return [
        "",
        "## Peak memory against the group size, in passes of equally many rows",
        "",
        "| copies | peak MiB of an iteration |",
        "|---|---|",
        *(f"| {entry['copies']} | {entry['peak_bytes'] / 2**20:.1f} |" for entry in entries),
    ]

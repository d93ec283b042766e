"""Times a GRPO iteration of a vision-language model by mmrl and by TRL's GRPOTrainer, alternately.

    python benchmarks/bench_vlm.py  # a tiny Qwen2.5-VL with random weights, on the CPU
    # a GPU:
    python benchmarks/bench_vlm.py --model 3b --precision bf16 --prompts 4 --image-tokens 256 \\
        --tokens 256

TRL is installed in a virtual environment next to this checkout (--trl-env), on top of the packages
that run this script; both trainers then run in one process there. They do equal work: the same
model, prompts, images, group size, number of answer tokens (end tokens are forbidden for both,
except in the curve whose answers end naturally), one optimizer step per iteration, one pass over
the rows. Every iteration has different prompts, so nothing can be cached between iterations.

Against TRL with vLLM on a CPU, by the environment of scripts/vllm_env:

    ../vllm-env/bin/python benchmarks/bench_vlm.py --threads 1 --model tiny32 --trl-engine vllm \\
        --trl-env /tmp/mmrl-trl-vllm --out docs/results/vlm_speed_vllm

vLLM keeps linear weights packed for the CPU and drops the originals, so that TRL's weight update
(``load_weights``, one by one) fails there. That method of TRL is replaced: all weights go through
vLLM's ``reload_weights``, which takes the same names and packs them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
from vlm_models import SIZES, build  # noqa: E402

TRL = "1.16.0"
TARGETS = {
    "short": 3.5,
    "long": 5.0,
}  # target speed-ups at about 50 and at 200 or more prompt tokens


@dataclass(frozen=True)
class Work:
    """Describes one iteration."""

    prompts: int = 16
    copies: int = 8
    image_tokens: int = 16
    text_tokens: int = 36
    tokens: int = 10  # tokens of every answer: about those of a box in JSON
    micro_batch: int | None = None  # rows per pass of the update, for both; None: all
    lr: float = 1e-6
    precision: str = "fp32"
    ends: bool = False  # answers end naturally, at most after ``tokens``
    compile: bool = False  # passes of mmrl
    engine: str = "transformers"  # sampling engine of TRL: transformers or vllm

    @property
    def rows(self) -> int:
        return self.prompts * self.copies


# -------------------------------------------------------------------------------------------------
# one model for both


def prompts(work: Work, iterations: int) -> list[dict[str, Any]]:
    """Generate prompts with ``text`` and ``images``, each with a different image."""
    from tests.fixtures import tiny_vlms

    side = round(work.image_tokens**0.5) * 28
    words = "where is the red seven in this picture, and how large is it? "
    text = (words * (work.text_tokens // len(words) + 1))[
        : max(1, work.text_tokens - 29)
    ]  # the template takes the rest
    count = work.prompts * iterations
    return [{"text": text, "images": [tiny_vlms.image(side, side, i)]} for i in range(count)]


def share_of_a(texts: list[str]) -> list[float]:
    return [text.count("a") / max(len(text), 1) + len(set(text)) / 100 for text in texts]


# --------------------------------------------------------------------------------------------------
# the trainers


def ours(folder: Path, work: Work, rows: list[dict[str, Any]], share: str = "auto") -> Any:
    """Build mmrl's trainer."""
    import torch

    from mmrl import advantages
    from mmrl.config.options import TrainOptions
    from mmrl.objectives import PolicyGradient
    from mmrl.policies.vlm.policy import VLM
    from mmrl.scoring import Scorer
    from mmrl.train.optimizers import adamw
    from mmrl.train.trainer import Trainer

    dtype = "bfloat16" if work.precision == "bf16" else "float32"
    policy = VLM(
        str(folder),
        max_new_tokens=work.tokens,
        prefix_sharing=share,
        dtype=dtype,
        compile=work.compile,
    )
    if not work.ends:
        endless(policy)
    options = TrainOptions(
        prompts_per_iteration=work.prompts,
        group_size=work.copies,
        train_batch_size=work.rows,
        micro_batch_size=work.micro_batch,
        iterations=1,
        precision=work.precision,
        logprob_tolerance=None if work.precision == "bf16" else "auto",
    )
    scorer = Scorer({"reward": lambda media, asked: torch.tensor(share_of_a(media))})
    return Trainer(
        policy,
        rows,
        scorer,
        advantages.flow_grpo,
        PolicyGradient(clip_range=0.2),
        partial(adamw, lr=work.lr),
        options,
    )


def endless(policy: Any) -> None:
    """Forbid end tokens, so that all answers have full length."""
    ends = policy.ending.stops
    policy.ending = replace(policy.ending, stops=())
    policy.warp = replace(policy.warp, suppressed=(*policy.warp.suppressed, *ends))


def theirs(
    folder: Path, work: Work, rows: list[dict[str, Any]], callbacks: list, output: Path
) -> Any:
    """Build TRL's trainer, with options as close to mmrl's as possible."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import GRPOConfig, GRPOTrainer

    dataset = Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": row["text"]}] for row in rows],
            "image": [row["images"][0] for row in rows],
        }
    )
    bf16 = work.precision == "bf16"
    config = GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=work.micro_batch or work.rows,
        gradient_accumulation_steps=work.rows // (work.micro_batch or work.rows),
        num_generations=work.copies,
        max_completion_length=work.tokens,
        max_steps=len(rows) // work.prompts,
        learning_rate=work.lr,
        beta=0.0,
        temperature=1.0,
        shuffle_dataset=False,
        generation_kwargs=_endless_generation(work),
        **_engine(work),
        bf16=bf16,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        optim="adamw_torch",
        remove_unused_columns=False,
    )
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.bfloat16 if bf16 else torch.float32
    )

    def reward(completions: list, **_: Any) -> list[float]:
        return share_of_a([completion[0]["content"] for completion in completions])

    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=dataset,
        callbacks=callbacks,
        processing_class=AutoProcessor.from_pretrained(folder, padding_side="left"),
    )


def _endless_generation(work: Work) -> dict[str, Any]:
    """Return options of TRL's engine by which all answers have full length."""
    if work.ends:
        return {}
    if work.engine == "vllm":
        # bytes only: an image token in an answer would be matched with the image
        letters = {"allowed_token_ids": list(range(256))}
        return {"min_tokens": work.tokens, "ignore_eos": True} | letters
    return {"min_new_tokens": work.tokens}


def _engine(work: Work) -> dict[str, Any]:
    """Return the options of TRL's engine: vLLM in the same process."""
    if work.engine != "vllm":
        return {}
    from trl.generation.vllm_generation import VLLMGeneration

    VLLMGeneration.sync_weights = _reload
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.05,
        "vllm_max_model_length": 1024,
    }


def _reload(generation: Any) -> None:
    """Send the weights of TRL's model to vLLM, instead of ``VLLMGeneration.sync_weights``."""
    from mmrl.policies.vlm.engines.vllm_local import repack_tied

    named = generation._iter_named_params()
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
    repack_tied(generation.llm)
    generation.llm.reset_prefix_cache()


def lengths_of(trainer: Any, prompt: dict[str, Any]) -> tuple[int, list[int]]:
    """Return the tokens of a prompt, and of the answers of one more rollout."""
    tokens = trainer.policy.inputs.encode(prompt)["input_ids"].shape[1]
    return tokens, trainer.collect().rollout.mask.sum(1).tolist()


def interleaved(folder: Path, work: Work, repeats: int) -> dict[str, Any]:
    """Time whole iterations of both, each in its process, alternately; the first of each is a
    warm-up."""
    import measuring
    from transformers import TrainerCallback

    rows = prompts(work, repeats + 1)
    mmrl = measuring.Apart(ours, folder, work, rows)
    times: dict[str, list[float]] = {"mmrl": [], "trl": []}
    parts: list[dict[str, float]] = []

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seconds, metrics = mmrl.ask(measuring.iteration)
            times["mmrl"].append(seconds)
            clock = {k: v for k, v in metrics.items() if k.startswith("time/")}
            parts.append({name.removeprefix("time/"): value for name, value in clock.items()})
            self.clock = measuring.Clock()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times["trl"].append(self.clock.seconds())

    with tempfile.TemporaryDirectory() as output:
        trl_trainer = theirs(folder, work, rows, [Turns()], Path(output))
        generated: list[int] = []
        _watch(trl_trainer, generated)
        trl_trainer.train()
    length, lengths = mmrl.ask(partial(lengths_of, prompt=rows[0]))
    mmrl.end()
    if not work.ends:
        assert set(lengths) == {work.tokens} == set(generated), "answers of equal length"
    # of neighbours: other load slows down both
    pairs = zip(times["trl"][1:], times["mmrl"][1:], strict=True)
    factors = [slow / quick for slow, quick in pairs]
    medians = {name: statistics.median(each[1:]) for name, each in times.items()}
    return {
        "work": asdict(work),
        "prompt_tokens": length,
        "answer_tokens": {"mmrl": statistics.fmean(lengths), "trl": statistics.fmean(generated)},
        "times": {n: t[1:] for n, t in times.items()},
        "seconds": medians,
        "factor": statistics.median(factors),
        "factors": factors,
        "first": times["mmrl"][0],  # with compilation in it
        "parts": {name: statistics.median(each[name] for each in parts[1:]) for name in parts[-1]},
    }


def _watch(trainer: Any, lengths: list[int]) -> None:
    """Record the numbers of answer tokens that TRL generates."""
    generate = trainer._generate_and_score_completions

    def watched(inputs: Any) -> Any:
        batch = generate(inputs)
        lengths.extend(batch["completion_mask"].sum(1).tolist())
        return batch

    trainer._generate_and_score_completions = watched


def memory(folder: Path, work: Work, groups: list[int]) -> list[dict[str, Any]]:
    """Measure the peak bytes of one iteration of mmrl, in passes of ``micro_batch`` rows, by the
    size of the group."""
    from samplers.batching import peak_bytes

    rows_of_table = []
    for copies in groups:
        trainer = ours(folder, replace(work, copies=copies), prompts(work, 8))
        trainer.iterate()
        rows_of_table.append(
            {"group_size": copies, "peak_bytes": peak_bytes(trainer.iterate, trainer.policy.device)}
        )
    return rows_of_table


# --------------------------------------------------------------------------------------------------
# the runs


def curves(work: Work, engine: str = "transformers") -> dict[str, list[Work]]:
    """Return name of a curve -> its points; the first two have targets. With another ``engine`` of
    TRL only its own."""
    long = replace(work, image_tokens=144, text_tokens=68)
    answers = [replace(shape, tokens=256) for shape in (work, long)]
    if engine == "vllm":
        points = [replace(shape, engine=engine) for shape in answers]
        return {
            "TRL with vLLM": points,
            "TRL with vLLM, mmrl compiled": [replace(shape, compile=True) for shape in points],
        }
    return {
        "target: about 50 prompt tokens": [work],
        "target: 200 and more prompt tokens": [long],
        "group size": [
            replace(work, copies=n, prompts=max(1, work.rows // n)) for n in (2, 4, 16, 32)
        ],
        "image tokens": [replace(work, image_tokens=n) for n in (4, 64, 256)],
        "answer tokens": [replace(work, tokens=n) for n in (4, 64, 256)],
        "answer tokens, long prompt": [replace(long, tokens=n) for n in (64, 256)],
        "compiled, answer tokens": [replace(shape, compile=True) for shape in answers],
        "answers that end by themselves": [
            replace(short, tokens=512, ends=True) for short in (work, long)
        ],
    }


def environment(folder: Path) -> Path:
    """Return the python of a virtual environment with TRL on top of this one's packages; created
    once."""
    import sysconfig

    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        site_packages = subprocess.check_output(
            [str(python), "-c", "import sysconfig as s; print(s.get_path('purelib'))"], text=True
        )
        (Path(site_packages.strip()) / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if subprocess.run([str(python), "-c", "import trl"], capture_output=True).returncode:
        subprocess.run([str(python), "-m", "pip", "install", "-q", f"trl=={TRL}"], check=True)
    return python


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SIZES), default="tiny")
    for name in ("prompts", "copies", "image_tokens", "text_tokens", "tokens", "micro_batch"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Work(), name))
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--only", nargs="+", default=[], help="curves whose names contain one of these words"
    )
    parser.add_argument(
        "--trl-env", type=Path, default=Path(tempfile.gettempdir()) / f"mmrl-trl-{TRL}"
    )
    parser.add_argument("--trl-engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs/results/vlm_speed", help=".json and .md are added"
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    args = arguments(words)
    if args.trl_engine == "vllm":  # before its import: its engine runs in this process
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if not args.inside:
        python = environment(args.trl_env)
        done = subprocess.run(
            [str(python), __file__, *(words or sys.argv[1:]), "--inside"], check=False
        )
        raise SystemExit(done.returncode)
    run(args)


def run(args: argparse.Namespace) -> dict[str, Any]:
    import measuring
    import torch
    import transformers

    from mmrl.core.machine import machine

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    names = (
        "prompts",
        "copies",
        "image_tokens",
        "text_tokens",
        "tokens",
        "micro_batch",
        "precision",
    )
    work = Work(**{name: getattr(args, name) for name in names})
    report: dict[str, Any] = {
        "curves": {},
        "machine": machine(),
        "model": args.model,
        "threads": args.threads,
        "repeats": args.repeats,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "trl": TRL,
    }
    with tempfile.TemporaryDirectory() as place:
        folder = build(args.model, Path(place))
        for name, points in curves(work, args.trl_engine).items():
            if args.only and not any(word in name for word in args.only):
                continue
            report["curves"][name] = [
                _told(name, interleaved(folder, point, args.repeats)) for point in points
            ]
        if not args.only or "memory" in args.only:
            rows = replace(work, micro_batch=work.micro_batch or 8, prompts=4, tokens=16)
            report["memory"] = memory(folder, rows, [8, 16, 32])
    if args.only and args.out.with_suffix(".json").exists():
        report["earlier"] = _earlier(json.loads(args.out.with_suffix(".json").read_text()), report)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(measuring.vlm_page(report))
    return report


def _earlier(before: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Return the curves of an earlier report that this partial one lacks."""
    fields = ("machine", "threads", "repeats", "trl", "model", "device", "memory")
    chosen = {name: before[name] for name in fields if name in before}
    if "memory" in report:
        chosen.pop("memory", None)
    curves = {n: cases for n, cases in before["curves"].items() if n not in report["curves"]}
    return chosen | {"curves": curves}


def _told(name: str, case: dict[str, Any]) -> dict[str, Any]:
    work = case["work"]
    seconds = case["seconds"]
    shape = f"{work['prompts']} x {work['copies']} answers of {work['tokens']}"
    parts = ", ".join(f"{part} {value:.3f}" for part, value in case["parts"].items())
    first = f", the first {case['first']:.1f} s" if work["compile"] else ""
    print(
        f"{name}: {case['prompt_tokens']} prompt tokens, {shape}: mmrl "
        f"{seconds['mmrl']:.3f} s ({parts}{first}), "
        f"TRL {seconds['trl']:.3f} s, {case['factor']:.2f} times as fast",
        flush=True,
    )
    return case


if __name__ == "__main__":
    main()

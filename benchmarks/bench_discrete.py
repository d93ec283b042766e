"""Compares sampling of groups of image tokens by mmrl and by the libraries' generation.

    python benchmarks/bench_discrete.py  # models of several sizes with random weights, CPU
    python benchmarks/bench_discrete.py --device cuda --dtype bfloat16 --cases janus-large

Janus: JanusForConditionalGeneration.generate(generation_mode="image"). aMUSEd: AmusedPipeline.
LlamaGen and VAR are in no library: they are compared with plain loops (``plain_tokens.py``). Both
sides sample the same group of one prompt with the same weights and guidance. Their outputs are
first checked to be equal, in float64: greedy tokens and tokens from equal random numbers of Janus,
tokens and pixels from equal random numbers of aMUSEd, tokens from equal random numbers of the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import measuring  # noqa: E402
import plain_tokens  # noqa: E402
import torch  # noqa: E402

from mmrl.core.machine import machine  # noqa: E402
from samplers import unmask  # noqa: E402
from samplers.noise import Rng  # noqa: E402

TARGET = 2.0  # cases that a library has
COMPILED = "janus", "llamagen"  # cases that --compile compiles
PUBLISHED = "janus", "amused"
STREAM = Rng.of("bench")
PROMPT = {
    "text": "a red seven",
    "label": 7,
}  # a token per byte, and the template: about the length of a caption


@dataclass(frozen=True)
class Size:
    """Describes a model: Llama or U-ViT of this width, a picture of side x side tokens."""

    family: str
    width: int
    layers: int
    heads: int
    side: int
    vocab: int = 16384
    steps: int = 12  # passes, masked diffusion

    @property
    def tokens(self) -> int:
        """Count the tokens of an image, for VAR those of all scales."""
        if self.family != "var":
            return self.side**2
        return sum(side**2 for side in plain_tokens.VAR_SIDES if side <= self.side)


CASES = {
    "janus-tiny": Size("janus", 256, 6, 4, 16),
    "janus-small": Size("janus", 512, 8, 8, 16),
    "janus-576": Size("janus", 512, 8, 8, 24),
    "amused-tiny": Size("amused", 256, 6, 4, 16, 8192),
    "amused-small": Size("amused", 512, 8, 8, 16, 8192),
    "llamagen-tiny": Size("llamagen", 256, 6, 4, 16),
    "var-tiny": Size("var", 256, 6, 4, 16, 4096),
    "janus-large": Size("janus", 2048, 24, 16, 24),  # Janus-Pro 1B
    "amused-large": Size("amused", 1024, 22, 16, 16, 8192),  # amused-256
}
USUAL = (
    *("janus-tiny", "janus-small", "janus-576", "amused-tiny", "amused-small"),
    *("llamagen-tiny", "var-tiny"),
)


# --------------------------------------------------------------------------------------------------
# models


def janus(size: Size, folder: Path) -> None:
    """Build a complete folder of the real classes with random weights."""
    import transformers as hf

    from tests.fixtures import tiny_vlms

    model, processor = tiny_vlms.build("janus")
    config = model.config
    config.text_config.update(
        {
            "hidden_size": size.width,
            "intermediate_size": 8 * size.width // 3 // 64 * 64,
            "head_dim": None,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.heads,
        }
    )
    config.text_config.head_dim = size.width // size.heads
    config.vision_config.num_image_tokens = size.side**2
    config.vision_config.image_size = 14 * size.side
    config.vision_config.projection_dim = size.width
    vq = config.vq_config
    vq.num_embeddings = size.vocab
    vq.num_patches = size.side
    vq.projection_dim = size.width
    vq.image_token_embed_dim = size.width
    hf.JanusForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)


def amused(size: Size, folder: Path) -> None:
    from diffusers import AmusedPipeline, AmusedScheduler, UVit2DModel, VQModel

    from tests.fixtures import tiny_diffusers

    tokenizer = tiny_diffusers.clip_tokenizer(77)
    width = size.width
    net = UVit2DModel(
        hidden_size=width,
        cond_embed_dim=16,
        encoder_hidden_size=16,
        vocab_size=size.vocab + 1,
        codebook_size=size.vocab,
        in_channels=3 * width // 4,
        block_out_channels=3 * width // 4,
        block_num_heads=3 * size.heads // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=11 * width // 4,
        sample_size=size.side,
    )
    codec = VQModel(
        block_out_channels=(32, 32),
        latent_channels=8,
        num_vq_embeddings=size.vocab,
        norm_num_groups=8,
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        vq_embed_dim=8,
        mid_block_add_attention=False,
        lookup_from_codebook=True,
        sample_size=2 * size.side,
    )
    AmusedPipeline(
        vqvae=codec,
        tokenizer=tokenizer,
        transformer=net,
        scheduler=AmusedScheduler(mask_token_id=size.vocab),
        text_encoder=tiny_diffusers.clip_text(tokenizer, 16, 16),
    ).save_pretrained(folder)


# --------------------------------------------------------------------------------------------------
# both sides


class Janus:
    """Samples the tokens of a group of images of one prompt, by ``ours`` (mmrl) and ``theirs`` (the
    library)."""

    def __init__(self, folder: Path, args: argparse.Namespace, size: Size, dtype: torch.dtype):
        from transformers import JanusForConditionalGeneration

        from mmrl.zoo.models.image_tokens.janus import Janus as Policy

        self.copies = args.copies
        self.policy = Policy(str(folder), guidance_scale=args.guidance, compile=args.compile)
        self.prompt_tokens = self.policy.encode([PROMPT])[0]["ids"].shape[1]
        self.policy.net.to(args.device, dtype)
        self.hf = JanusForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        self.hf.to(args.device).eval()
        generation = self.hf.generation_config
        generation.bos_token_id = self.policy.bos
        generation.pad_token_id = self.policy.pad
        generation.generation_kwargs = {"boi_token_id": self.policy.start}

    @torch.no_grad()
    def ours(self, rng: Rng = STREAM) -> torch.Tensor:
        return self.policy.rollout([PROMPT], self.copies, rng).sample

    @torch.no_grad()
    def theirs(self, sample: bool = True) -> torch.Tensor:
        ids = self.policy.encode([PROMPT])[0]["ids"].expand(self.copies, -1)
        return self.hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_mode="image",
            guidance_scale=self.policy.guidance_scale,
            do_sample=sample,
            **({"top_k": 0} if sample else {}),
        )

    def agreement(self) -> str:
        """Describe what was compared; SystemExit if it differs."""
        from samplers.warp import Warp

        rng = Rng.of("equal")
        rows = torch.arange(self.copies)
        uniform = rng.uniform(rows, (len(self.policy.net.turns),))
        place = iter(range(10**6))
        with mock.patch.object(
            torch, "multinomial", lambda p, **_: inverted(p, uniform[:, next(place)].to(p.device))
        ):
            theirs = self.theirs()
        same("tokens from equal random numbers", self.ours(rng), theirs)
        warp = self.policy.warp
        self.policy.warp = Warp(temperature=0.0)
        same("greedy tokens", self.ours(), self.theirs(sample=False))
        self.policy.warp = warp
        return f"all {theirs.numel()} tokens from equal random numbers, and as many greedy ones"


class Amused:
    """Also decodes pictures, since the pipeline returns those."""

    def __init__(self, folder: Path, args: argparse.Namespace, size: Size, dtype: torch.dtype):
        from diffusers import AmusedPipeline

        from mmrl.zoo.models.masked.amused import Amused as Policy

        self.copies = args.copies
        self.steps = size.steps
        self.prompt_tokens = 77
        self.policy = Policy(
            str(folder), guidance_scale=args.guidance, steps=size.steps, sampler="maskgit"
        )
        self.policy.net.to(args.device, dtype)
        self.policy.compute = dtype
        self.pipe = AmusedPipeline.from_pretrained(folder).to(args.device, dtype)
        self.pipe.set_progress_bar_config(disable=True)
        if dtype == torch.float64:
            self.policy.vae.double()

    @torch.no_grad()
    def ours(self, rng: Rng = STREAM) -> tuple[torch.Tensor, torch.Tensor]:
        self.policy.texts.encodings.clear()  # every prompt is encoded once, as in training
        rollout = self.policy.rollout([PROMPT], self.copies, rng)
        return rollout.sample, self.policy.decode(rollout)

    @torch.no_grad()
    def theirs(self, output: str = "pt") -> torch.Tensor:
        return self.pipe(
            PROMPT["text"],
            num_images_per_prompt=self.copies,
            num_inference_steps=self.steps,
            output_type=output,
            guidance_scale=self.policy.guidance_scale,
            temperature=(2.0, 0.0),
        ).images

    def agreement(self) -> str:
        from diffusers.schedulers import scheduling_amused

        rng = Rng.of("equal")
        rows = torch.arange(self.copies)
        tokens = self.policy.length
        place = iter(range(10**6))

        def draw(p: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return inverted(p, rng.uniform(rows, (tokens,), next(place)).flatten().to(p.device))[
                :, None
            ]

        def gumbel(t: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return unmask.gumbel(rng.uniform(rows, (tokens,), next(place))).to(t.device)

        with (
            mock.patch.object(torch, "multinomial", draw),
            mock.patch.object(scheduling_amused, "gumbel_noise", gumbel),
        ):
            theirs = self.theirs("latent")
            place = iter(range(10**6))
            pixels = self.theirs()
        ids, pictures = self.ours(rng)
        same("tokens from equal random numbers", ids, theirs.flatten(1))
        gap = (pictures - pixels).abs().max().item()
        if gap > 1e-4:
            raise SystemExit(f"not the same work: pixels differ by {gap:.1e}")
        return f"all {ids.numel()} tokens from equal random numbers, and pixels to {gap:.0e}"


class Plain:
    """Samples the tokens of a group of images of one class, by ``ours`` (mmrl) and by a plain loop,
    ``theirs``."""

    prompt_tokens = 1

    def __init__(self, folder: Path, args: argparse.Namespace, size: Size, dtype: torch.dtype):
        self.copies = args.copies
        options = {"guidance_scale": args.guidance}
        self.policy: Any
        if size.family == "var":
            from mmrl.zoo.models.image_tokens.var import VAR

            self.policy = VAR(str(folder), **options)
            self.loop: Any = plain_tokens.var
        else:
            from mmrl.zoo.models.image_tokens.llamagen import LlamaGen

            self.policy = LlamaGen(str(folder), compile=args.compile, **options)
            self.loop = plain_tokens.llamagen
        self.policy.net.to(args.device, dtype)

    @torch.no_grad()
    def ours(self, rng: Rng = STREAM) -> torch.Tensor:
        return self.policy.rollout([PROMPT], self.copies, rng).sample

    def theirs(self) -> torch.Tensor:
        net, scale = self.policy.net, self.policy.guidance_scale
        return self.loop(net, PROMPT["label"], self.copies, scale)

    def agreement(self) -> str:
        """Describe what was compared; SystemExit if it differs."""
        rng = Rng.of("equal")
        turns = self.policy.net.turns
        uniform = rng.uniform(torch.arange(self.copies), (sum(turns),)).split(list(turns), 1)
        block = iter(uniform)
        with mock.patch.object(
            torch,
            "multinomial",
            lambda p, **_: inverted(p, next(block).flatten().to(p.device)),
        ):
            theirs = self.theirs()
        same("tokens from equal random numbers", self.ours(rng), theirs)
        return f"all {theirs.numel()} tokens from equal random numbers"


def inverted(p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw [n] from probabilities [n, V] with the given uniform numbers."""
    sums = p.double().cumsum(-1)
    return (sums <= uniform[:, None] * sums[:, -1:]).sum(-1)


def same(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    if not torch.equal(ours, theirs):
        raise SystemExit(
            f"not the same work: {what} differ at {int((ours != theirs).sum())} of "
            f"{ours.numel()} places"
        )


FAMILIES = {
    "janus": (janus, Janus),
    "amused": (amused, Amused),
    "llamagen": (plain_tokens.llamagen_folder, Plain),
    "var": (plain_tokens.var_folder, Plain),
}


# --------------------------------------------------------------------------------------------------
# measurement


@contextmanager
def built(size: Size, args: argparse.Namespace, dtype: torch.dtype) -> Any:
    build, side = FAMILIES[size.family]
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        torch.manual_seed(0)
        build(size, Path(folder))
        yield side(Path(folder), args, size, dtype)


def timed(fn: Callable[[], Any]) -> dict[str, float]:
    """Measure wall seconds, and CPU seconds of this process, which other programs disturb less."""
    start = time.process_time()
    wall = measuring.seconds(fn)
    return {"wall": wall, "cpu": time.process_time() - start}


def measure(size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """Measure both alternately; the speed-up is the median of the ratios of neighbours."""
    small = replace(size, side=min(size.side, args.check_side), layers=min(size.layers, 8))
    plain = argparse.Namespace(**vars(args) | {"compile": False})
    with built(small, plain, torch.float64) as pair:
        shown = f"{pair.agreement()} ({small.side} x {small.side} tokens, {small.layers} layers)"
    compiled = args.compile and size.family in COMPILED
    tokens = floor = None
    if compiled:  # their matrix products are inside a graph
        with built(size, plain, getattr(torch, args.dtype)) as pair:
            tokens = pair.ours()
            floor = statistics.median(measuring.floor(pair.ours) for _ in range(args.repeats))
    first = None
    with built(size, args if compiled else plain, getattr(torch, args.dtype)) as pair:
        if tokens is not None:
            start = time.perf_counter()
            different = int((pair.ours() != tokens).sum())
            first = time.perf_counter() - start
            shown += (
                f"; compiled in {args.dtype}, {different} of {tokens.numel()} tokens are others "
                "than not compiled"
            )
        for fn in (pair.ours, pair.theirs) if args.warm else ():
            fn()
        runs: dict[str, list[dict[str, float]]] = {"mmrl": [], "library": []}
        for _ in range(args.repeats):
            runs["mmrl"].append(timed(pair.ours))
            runs["library"].append(timed(pair.theirs))
        if floor is None:
            floor = statistics.median(measuring.floor(pair.ours) for _ in range(args.repeats))
    by = "wall" if args.device == "cuda" else "cpu"
    ratios = {
        kind: [b[kind] / a[kind] for a, b in zip(runs["mmrl"], runs["library"], strict=True)]
        for kind in ("wall", "cpu")
    }
    seconds = {name: statistics.median(run[by] for run in times) for name, times in runs.items()}
    return {
        "size": asdict(size) | {"tokens": size.tokens},
        "prompt_tokens": pair.prompt_tokens,
        "equal": shown,
        "runs": runs,
        "ratios": ratios,
        "seconds": seconds,
        "by": by,
        "products": floor,
        "first": first,
        "factor": statistics.median(ratios[by]),
        "images_per_second": args.copies / seconds["mmrl"],
    }


def bound(case: dict[str, Any]) -> str:
    """Return the speed-up if only matrix products took time; not comparable when compiled."""
    if case.get("first") is not None:
        return "-"
    return f"{case['seconds']['library'] / case['products']:.2f}"


def page(report: dict[str, Any]) -> str:
    about = report["machine"]
    options = report["options"]
    versions = about["versions"]
    lines = [
        "# Sampling images as tokens: mmrl and the libraries' own generation",
        "",
        f"Written by `{about['command']}` on {about['time']}, commit {about['commit']}.",
        "",
        f"{about['cpu']}, {about['cores']} cores, {options['threads']} threads; "
        f"{', '.join(about['gpus']) or 'no GPU'}; torch {versions['torch']}, transformers "
        f"{versions['transformers']}, "
        f"diffusers {versions['diffusers']}. Ran on {options['device']} in "
        f"{options['dtype']}: groups of "
        f"{options['copies']} images of one prompt, guidance {options['guidance']:g}, "
        f"random weights, "
        f"{options['repeats']} repeats in turns. Factors are medians of the ratios of "
        f"neighbouring repeats, in seconds "
        "of the process's own CPU time (on CUDA by the clock), and by the clock with "
        "least and most. Janus is timed "
        "without decoding, aMUSEd with text encoder and decoder.",
        "",
        "| model | width, layers | tokens | of the prompt | mmrl, s | library, s | times "
        "as fast | by the clock | products, s | at most |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, case in report["cases"].items():
        size = case["size"]
        wall = case["ratios"]["wall"]
        lines.append(
            f"| {name} | {size['width']}, {size['layers']} | "
            f"{size.get('tokens', size['side'] ** 2)} | "
            f"{case['prompt_tokens']} "
            f"| {case['seconds']['mmrl']:.2f} | {case['seconds']['library']:.2f} | "
            f"{case['factor']:.2f} "
            f"| {statistics.median(wall):.2f} ({min(wall):.2f} - {max(wall):.2f}) "
            f"| {case['products']:.2f} "
            f"| {bound(case)} |"
        )
    runs = [
        run for case in report["cases"].values() for side in case["runs"].values() for run in side
    ]
    busy = statistics.median(run["wall"] / run["cpu"] for run in runs)
    if options["device"] == "cpu" and busy > 1.5:
        lines += [
            "",
            f"The machine was busy with other work: the clock ran {busy:.0f} times as "
            f"long as the process.",
        ]
    first = [
        f"{name} {case['first']:.1f} s"
        for name, case in report["cases"].items()
        if case.get("first") is not None
    ]
    if first:
        lines += ["", BY_COMPILE.format(first=", ".join(first))]
    lines += ["", "Equal outputs, in float64:", ""]
    lines += [f"* {name}: {case['equal']}" for name, case in report["cases"].items()]
    return "\n".join([*lines, "", WHY, ""])


BY_COMPILE = """\
mmrl's side of Janus and LlamaGen is compiled (`policy.compile: true`): their first rollouts, in
which graphs are built or found in the inductor's cache, are not counted and took {first}. Their
"products" are those of rollouts that are not compiled. The library's side is not compiled:
transformers' `generate` does not do so for pictures,
and `torch.compile` of its language model by hand gave nothing (see docs/lab-notes.md)."""

WHY = """\
Janus and aMUSEd are compared with the libraries; for LlamaGen and VAR the other side is a plain
loop written from the papers (`benchmarks/plain_tokens.py`). A group's prompt is read once,
attention covers only existing tokens, and guidance is mixed before the head. aMUSEd's first pass is
one image, since all images of a group are still masked. What remains is the transformer itself, so
the factor falls as it grows. "Products" is the time of mmrl's own matrix products, convolutions and
attention: the bound on any further speed-up."""


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=USUAL)
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("--guidance", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--compile", action="store_true", help="policy.compile of Janus and LlamaGen"
    )
    parser.add_argument(
        "--check-side", type=int, default=6, help="tokens a side where equality is shown"
    )
    parser.add_argument(
        "--no-warm", dest="warm", action="store_false", help="no untimed run of both first"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "docs/results/discrete_speed",
        help=".json, .md are added",
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> dict[str, Any]:
    args = arguments(words)
    torch.set_num_threads(args.threads)
    cases = {}
    for name in args.cases:
        cases[name] = measure(CASES[name], args)
        print(f"{name}: {cases[name]['factor']:.2f} times as fast", flush=True)
    options = {key: value for key, value in vars(args).items() if key not in ("out", "cases")}
    report = {"cases": cases, "options": options, "machine": machine()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(page(report))
    slow = [
        name
        for name, case in cases.items()
        if case["size"]["family"] in PUBLISHED and case["factor"] < TARGET
    ]
    print(
        f"{'NOT reached by ' + ', '.join(slow) if slow else 'reached'}: {TARGET} times as "
        f"fast; see {args.out}.md"
    )
    return report


if __name__ == "__main__":
    main()

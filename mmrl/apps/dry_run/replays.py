"""Rehearses ``policy: pipeline`` without an equivalent family: its own code runs on real tensors,
and its networks, of true size, on fake weights.

A frozen network computes the shapes of its outputs, which become real zeros, so that the pipeline's
code can read them. Outputs of a trained one stay fake, with gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from mmrl.apps.dry_run import published
from mmrl.apps.dry_run.fakes import Fakes
from mmrl.apps.dry_run.rehearsal import Stage, autocast, cast, decision, scorer
from mmrl.apps.dry_run.tracked import tracked
from mmrl.config.options import TrainOptions
from mmrl.core import pretrained
from mmrl.core.types import Point, Prompt
from mmrl.policies.base import rows_of
from mmrl.policies.diffusion import pipeline_folder
from mmrl.policies.lora import Lora, add_lora
from mmrl.zoo.models.any_pipeline.any_pipeline import AnyPipeline
from mmrl.zoo.models.any_pipeline.replay import Reached
from mmrl.zoo.models.any_pipeline.replay_check import CALL_FAILURES
from mmrl.zoo.models.any_pipeline.replay_draws import QUIET

WORDS = 256  # words of the prompt, truncated by the pipeline to its maximum


class OnFakes(AnyPipeline):
    """Runs a pipeline from its config files, tokenizers and scheduler alone."""

    fakes: Fakes
    encoder_parameters: int  # bytes of the text and image encoders
    adapters: Lora | int | None = None

    def _refuse(self, options: dict[str, Any], *further: Any) -> None:
        super()._refuse(options, *further)
        self.adapters = options.pop("lora", None)  # added before the weights are fake

    def _open(
        self, path: str, skip_blocks: Sequence[str], guardrail: bool
    ) -> tuple[str, Any, tuple[str, ...]]:
        make = partial(made, self.fakes)
        with QUIET:  # the library warns about parts that it did not load
            place, pipe, parts = pipeline_folder.load(
                path, self.compute, skip_blocks, guardrail, make
            )
        encoders = pipeline_folder.encoders(pipe, parts)
        self.encoder_parameters = sum(map(published.parameters, encoders))
        encode_in_zeros(pipe, Path(place), self.compute)
        return place, pipe, parts

    def _load(self, *options: Any) -> Any:
        pipe = super()._load(*options)
        if self.adapters is not None:
            rank = self.adapters
            with torch.device("meta"):
                add_lora(self.net, Lora(rank) if isinstance(rank, int) else rank, self.attention)
        self.fakes.fill(self.net)
        route_evenly(self.net)
        return pipe

    def freeze_adapted(self) -> None:
        """Train only the adapters, if there are any."""
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(self.adapters is None or "lora_" in name)

    def choose_calls(self, prompts: list[Prompt], rows: int) -> None:
        """Call row by row if the pipeline does not accept several prompts. Fakes cannot tell
        whether rows depend on each other."""
        if self.together is not None or rows < 2:
            return
        numbers = self.arguments.numbers(prompts).tolist() * 2
        try:
            self.replay.conditions(self.arguments.of(numbers, None), self.asked_steps[0])
        except CALL_FAILURES:
            self.together = False


def made(fakes: Fakes, cls: Any, place: str, part: str, dtype: torch.dtype) -> nn.Module:
    """Build a part of a pipeline, of a class of diffusers or transformers, without its weights: a
    trained network on the meta device, a frozen one on fakes, returning zeros."""
    if hasattr(cls, "from_config"):
        config = pretrained.load_config(cls, place, part)
        net = published.on_meta(cls, config)
    else:
        config = pretrained.load_processor(cls.config_class, place, subfolder=part)
        with torch.device("meta"):
            net = cls(config)
    cast(net, dtype)
    if not part.startswith(pipeline_folder.DENOISERS):
        fakes.fill(net)
        answer_in_zeros(net)
    return net


def encode_in_zeros(pipe: Any, place: Path, dtype: torch.dtype) -> None:
    """Let methods of a pipeline return what the table of published models says, if its folder has
    no text encoders."""
    file = place / published.ENCODINGS
    if not file.is_file():
        return

    def encoded(returned: Any, prompt: Any = None, *_: Any, **__: Any) -> Any:
        return encoding(returned, len(prompt) if isinstance(prompt, list) else 1, dtype)

    for method, returned in json.loads(file.read_text()).items():
        pipe.__dict__[method] = partial(encoded, returned)


def encoding(returned: Any, rows: int, dtype: torch.dtype) -> Any:
    """Build a method's return value as described in ``mmrl.apps.dry_run.published``, for ``rows``
    rows."""
    again = partial(encoding, rows=rows, dtype=dtype)
    match returned:
        case {"shape": shape}:
            sizes = shape if "rows" in shape else ["rows", *shape]
            return torch.zeros([rows if n == "rows" else n for n in sizes], dtype=dtype)
        case {"mask": shape}:
            return torch.ones(rows, *shape, dtype=torch.long)
        case {"plain": shape}:
            return torch.zeros(*shape, dtype=dtype)
        case {"lengths": length}:
            return torch.arange(rows + 1, dtype=torch.int32) * length
        case {"rows": row}:
            return [encoding(row, 1, dtype)[0] for _ in range(rows)]
        case dict():
            return {name: again(value) for name, value in returned.items()}
        case list():
            return tuple(map(again, returned))
    return returned


def route_evenly(net: nn.Module) -> None:
    """Let routers choose each expert equally often, since fake values cannot choose."""

    def chosen(router: Any, _: Any, output: Any) -> Any:
        experts, *rest = output
        places = torch.arange(experts.numel()) % router.n_routed_experts
        return (places.view(experts.shape), *rest)

    for part in net.modules():
        if hasattr(part, "n_routed_experts"):
            part.register_forward_hook(chosen)


def answer_in_zeros(net: nn.Module) -> None:
    """Make outermost calls of a network on fake weights return real zeros."""
    depth = [0]

    def enter(*_: Any) -> None:
        depth[0] += 1

    def leave(_: Any, __: Any, output: Any) -> Any:
        depth[0] -= 1
        return output if depth[0] else real(output)

    for part in net.modules():
        part.register_forward_pre_hook(enter)
        part.register_forward_hook(leave, always_call=True)


def real(nest: Any) -> Any:
    """Replace fake tensors by zeros; pages of zeros take no memory until they are written."""
    return tree_map_only(FakeTensor, lambda x: torch.zeros(x.shape, dtype=x.dtype), nest)


def replayed(place: Path, options: dict[str, Any], train: TrainOptions, rows: int) -> Stage:
    """Build a replayed pipeline from the config files of a folder, on fake weights."""
    fakes = Fakes()
    cls: Any = type(AnyPipeline.__name__, (OnFakes,), {"fakes": fakes})
    chosen = {k: v for k, v in options.items() if k not in ("path", "compile", "attention")}
    with fakes.running():
        policy: OnFakes = cls(path=str(place), **chosen)
        policy.freeze_adapted()
        if train.gradient_checkpointing:
            policy.enable_gradient_checkpointing()
        prompts = [policy.arguments.blank(WORDS)]
        policy.choose_calls(prompts, rows)
        point = point_of(policy, prompts, rows, policy.steps // 2)
    wrapped = autocast(policy.net, train)
    score = scorer(policy, point, fakes, wrapped)
    rows_passed = first_rows(policy, point_of(policy, prompts, rows, 0), fakes, wrapped)
    decoder, latents = decoded(policy, point, fakes)

    def decode(count: int) -> Any:
        sizes = list(latents.shape) if latents is not None else []
        if len(sizes) == 5:  # [B, C, F, H, W]
            sizes[2] = count
        with fakes.running():
            return None if decoder is None else decoder.decode(fakes.empty(*sizes))

    return Stage(
        policy.net,
        rows,
        score,
        None if latents is None else decode,
        decoder,
        latents.shape[2] if latents is not None and latents.ndim == 5 else 1,
        policy=policy,
        network_rows=rows_passed / rows,
    )


def first_rows(
    policy: AnyPipeline,
    point: Point,
    fakes: Fakes,
    wrapped: Callable[[], AbstractContextManager[Any]],
) -> int:
    """Count the network rows of a first step, wrapped as in training. The networks' outputs at
    earlier steps are known from here on."""
    before = 0

    def first() -> None:
        nonlocal before
        before = policy.report.forwards
        with fakes.running(), wrapped(), torch.no_grad():
            policy.dist(point)

    tracked(first, [policy.net])  # in which large tensors are fake
    return policy.report.forwards - before


def point_of(policy: AnyPipeline, prompts: list[Prompt], rows: int, k: int) -> Point:
    """Build the decision of every row at step k of the sampler's path."""
    return decision(policy, rows, k, policy.encode(prompts), torch.zeros)


def decoded(policy: OnFakes, point: Point, fakes: Fakes) -> tuple[Any, Tensor | None]:
    """Return the autoencoder, and the latents of one sample with which the pipeline calls it;
    (None, None) if it decodes by other means."""
    pipe = policy.replay.pipe
    decoders = [
        part
        for name, part in pipe.components.items()
        if pipeline_folder.decodes(name) and isinstance(part, nn.Module)
    ]
    plain = {id(part): part.decode for part in decoders if hasattr(part, "decode")}

    def seen(part: Any, latents: Tensor, *_: Any, **__: Any) -> Any:
        raise Reached((part, latents))

    for part in decoders:
        part.__dict__["decode"] = partial(seen, part)
    call = policy._call(rows_of(point.cond, point.group), [0], None)
    try:
        with fakes.running(), torch.no_grad():
            reached = policy.replay.finish(call, policy.asked_steps[0], point.state[:1])
    finally:
        for part in decoders:
            part.__dict__["decode"] = plain[id(part)]
    return reached if isinstance(reached, tuple) else (None, None)

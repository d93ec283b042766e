"""Rehearses a run at true size without its weights: the real network on fake tensors makes one
pass with gradients and one without, under torch's trackers.

What is run is mmrl's own code: the family's ``dist``, guidance, chunks of logits, LoRA, autocast
and gradient checkpointing. Conditions replace the output of text encoders, in true shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmrl.apps.dry_run import architectures, published, untrained
from mmrl.apps.dry_run.conditions import conditions
from mmrl.apps.dry_run.fakes import Fakes
from mmrl.apps.dry_run.pictures import looker
from mmrl.apps.dry_run.stand_in import folder_of
from mmrl.apps.dry_run.tracked import Tracker, Work, extended, passed, tracked
from mmrl.config.options import TrainOptions
from mmrl.core.libraries import library_class, torch_dtype
from mmrl.core.types import Point, Transition
from mmrl.policies.base import turn_on_checkpointing, without_empty
from mmrl.policies.diffusion import diffusers_folder
from mmrl.policies.diffusion.flow_policy import FlowPolicy
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy
from mmrl.policies.image_tokens.network import ImageNet
from mmrl.policies.lora import Lora, add_lora, ending_like
from mmrl.policies.quantization import parameters, quantize
from mmrl.policies.vlm.families import part_of
from mmrl.policies.vlm.loading import text_adapters
from mmrl.policies.vlm.media import Budgets
from mmrl.policies.vlm.parts import everything, set_trainable
from mmrl.policies.vlm.policy import VLM
from mmrl.policies.vlm.prefix_sharing import SharedPrefix
from mmrl.train.shard_units import shard_classes
from mmrl.zoo.models.image_tokens.janus import UNDERSTANDING, JanusNet
from samplers.warp import Warp

PROMPT_TOKENS = 1024  # tokens of a question with its picture, without budgets.prompt_tokens
TEXT_TOKENS = 64  # tokens of a text-only prompt
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Stage:
    """Holds a model on fakes: ``score()`` returns the log-probs of one pass of ``rows`` rows."""

    net: nn.Module
    rows: int
    score: Callable[[], Tensor]
    # decodes one sample, for videos of a number of latent frames; None: nothing to decode
    decode: Callable[[int], Any] | None = None
    decoder: nn.Module | None = None
    frames: int = 1  # of a sample's latents
    # features of the pictures of the pass; None: it has none
    look: Callable[[], Tensor] | None = None
    prompts: int = 1  # of a pass
    # bytes of the conditions of a prompt, and of the empty one that all share
    conditions: tuple[int, int] = (0, 0)
    policy: Any = None  # policy that makes the passes, if more than its network is needed
    network_rows: float = 1  # network rows per row of the pass


@dataclass
class Rehearsed:
    """Holds what was measured: of a pass with gradients, of one without, of decoding a sample."""

    rows: int
    parameters: int
    trained: int
    bytes_parameters: int
    bytes_trained: int
    bytes_decoder: int
    # the largest layer that FSDP2 gathers one by one, and the rest, gathered for the whole pass
    largest_unit: int
    around_units: int
    update: Work
    sampling: Work
    decoding: Work | None
    looking: Work | None = None  # at the pictures of the ``prompts`` of a pass
    prompts: int = 1
    conditions: tuple[int, int] = (0, 0)  # as of ``Stage``


def flow(
    entry: type[FolderPolicy], place: Path, options: dict[str, Any], train: TrainOptions, rows: int
) -> Stage:
    """Build a family in diffusers' format, by its own constructor, on fake weights."""
    fakes = Fakes()
    rest = {k: v for k, v in options.items() if k not in ("path", "compile", "attention")}
    cls = type(entry.__name__, (_OnMeta, entry), {})
    policy = cls(path=str(place), **rest)
    fakes.fill(policy.net)
    fakes.fill(policy.vae)
    policy.net.eval()
    if train.gradient_checkpointing:
        policy.enable_gradient_checkpointing()
    k = policy.steps // 2  # in the middle of the sampler's path
    point = decision(policy, rows, k, conditions(policy, 1, fakes), fakes.empty)
    score = scorer(policy, point, fakes, autocast(policy.net, train))
    shape = list(policy.shape)
    axis = 0 if policy.pipeline.startswith("CogVideoX") else 1
    frames = shape[axis] if len(shape) == 4 else 1

    def decode(count: int) -> Any:
        sizes = [count if k == axis and len(shape) == 4 else n for k, n in enumerate(shape)]
        with fakes.running():
            return policy.pixels(policy.vae, fakes.empty(1, *sizes))

    return Stage(
        policy.net,
        rows,
        score,
        decode,
        policy.vae,
        frames,
        conditions=_condition_bytes(point.cond),
    )


def scorer(
    policy: Any, point: Point, fakes: Fakes, wrapped: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], Tensor]:
    """Return a function that scores a decision on fakes, wrapped as in training."""
    policy.trained = policy.net

    def score() -> Tensor:
        with fakes.running(), wrapped():
            logprob: Tensor = policy.dist(point).log_prob(point.target)
        return logprob

    return score


def _condition_bytes(cond: dict[str, Any]) -> tuple[int, int]:
    return _nested_bytes(without_empty(cond)), _nested_bytes(cond.get("uncond"))


def _nested_bytes(cond: Any) -> int:
    """Count the bytes of a nest of tensors."""
    return _bytes(x for x in tree_leaves(cond) if isinstance(x, Tensor))


class _OnMeta(FolderPolicy):
    """Builds the parts of a folder from their config files, on the meta device."""

    def load_part(self, name: str, subfolder: str, dtype: torch.dtype | None = None) -> Any:

        if subfolder == "scheduler":
            return super().load_part(name, subfolder, dtype)
        cls = library_class("diffusers", name)
        net = published.on_meta(
            name, dict(diffusers_folder.load_config(cls, self.place, subfolder))
        )
        return cast(net, dtype or torch.float32)


def cast(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast what a weight file holds, as loading does: parameters and saved buffers, such as Stable
    Diffusion 3's position table; not the layers that the class keeps in float32."""
    exact = getattr(net, "_keep_in_fp32_modules", None) or []
    saved = net.state_dict(keep_vars=True)
    for name, tensor in saved.items():
        if tensor.is_floating_point() and not any(part in name.split(".") for part in exact):
            tensor.data = tensor.data.to(dtype)
    return net


def decision(
    policy: FlowPolicy, rows: int, k: int, cond: dict[str, Any], empty: Callable[..., Tensor]
) -> Point:
    """Build the decision of every row at step k of the sampler's path, under the conditions of one
    prompt; ``empty(*shape)`` creates its tensors."""
    times = policy.times.float()
    return Point(
        group=torch.zeros(rows, dtype=torch.long),
        cond=cond,
        row_id=torch.arange(rows),
        num_decisions=torch.ones(rows, dtype=torch.long),
        state=empty(rows, *policy.shape),
        target=empty(rows, *policy.shape),
        step=Transition(
            time=times[k].expand(rows),
            next_time=times[k + 1].expand(rows),
            noise_level=torch.full((rows,), max(policy.noise_level, 0.1)),
        ),
        logprob=empty(rows, 1),
        mask=torch.ones(rows, 1, dtype=torch.bool),
        advantage=torch.ones(rows, 1),
    )


def autocast(net: nn.Module, train: TrainOptions) -> Callable[[], AbstractContextManager[Any]]:
    """Return accelerate's autocast for ``train.precision``."""
    half = HALF.get(train.precision)
    if half is None:
        return nullcontext
    return lambda: torch.autocast("cpu", dtype=half)


def tokens(
    path: str, entry: Any, options: dict[str, Any], train: TrainOptions, rows: int, group_size: int
) -> Stage:
    """Build a token model of known architecture on fake weights."""
    fakes = Fakes()
    net: Any = token_network(path, entry, options)
    fakes.fill(net)
    net.eval()
    if train.gradient_checkpointing and not turn_on_checkpointing(net):
        turn_on_checkpointing(net.hf if isinstance(net, (JanusNet, SharedPrefix)) else None)
    wrapped = autocast(net, train)
    prompts = max(1, -(-rows // group_size))
    question = question_tokens(entry, options)
    score = _scorer(net, entry, options, rows, prompts, question)

    def scored() -> Tensor:
        with fakes.running(), wrapped():
            return score()

    look = looker(net, prompts, question, fakes) if isinstance(net, SharedPrefix) else None

    def looked() -> Tensor:
        assert look is not None
        with fakes.running(), wrapped():
            return look()

    return Stage(
        net,
        rows,
        scored,
        look=look and looked,
        prompts=prompts,
    )


def is_known(path: str, entry: Any) -> bool:
    """Tell whether the architecture of a token model is known."""
    known = path in published.table()["texts"] or path in architectures.MODELS
    known = known or path in untrained.NETWORKS
    return known or _of_folder(path, entry) is not None


def _of_folder(path: str, entry: Any) -> nn.Module | None:
    folder = folder_of(path)
    return None if folder is None else architectures.of_folder(folder, entry)


def dtype_of(options: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a policy's frozen weights."""
    name = options.get("dtype") or "float32"
    dtype: torch.dtype = torch.float32 if name == "auto" else torch_dtype(name)
    return dtype


def token_network(path: str, entry: Any, options: Mapping[str, Any]) -> nn.Module:
    """Build the network of a token model on the meta device, with its adapters, in its dtype."""
    known = published.table()["encoders"].get(published.table()["texts"].get(path))
    net = published.encoder_on_meta(known) if known else architectures.on_meta(path)
    net = net or untrained.network(path) or _of_folder(path, entry)
    assert net is not None, f"{path} is not known"
    cast(net, dtype_of(options))
    quantize(net, options.get("quantization"))
    lora = options.get("lora")
    with torch.device("meta"):
        if isinstance(entry, type) and issubclass(entry, VLM):
            adapters = text_adapters(net, lora)
            if adapters is not None:
                add_lora(net, adapters)
            else:
                set_trainable(net, options.get("train") or everything(net))
            return SharedPrefix(net)
        if lora is None:
            _freeze_unused(net)
        else:
            chosen = Lora(lora) if isinstance(lora, int) else lora
            if isinstance(net, JanusNet):
                ends = chosen.targets or ("q_proj", "k_proj", "v_proj", "o_proj")
                chosen = Lora(chosen.rank, chosen.alpha, _language(net, ends))
            add_lora(net, chosen, entry.attention)
    return net


def _language(net: Any, ends: Any) -> list[str]:
    """Return the linear layers of Janus' language model with these suffixes."""
    layers = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    inner = [name.removeprefix("hf.") for name in layers if "language_model" in name]
    return ending_like(inner, ends, "language model")


def _freeze_unused(net: Any) -> None:
    """Freeze the parts of Janus that image tokens do not use."""
    if isinstance(net, JanusNet):
        for name, parameter in net.hf.named_parameters():
            if name.startswith(UNDERSTANDING) or "vision_model" in name:
                parameter.requires_grad_(False)


def question_tokens(entry: Any, options: dict[str, Any]) -> int:
    """Return the tokens of a prompt."""
    if not (isinstance(entry, type) and issubclass(entry, VLM)):
        return TEXT_TOKENS
    budgets: Budgets | None = options.get("budgets")
    return (budgets and budgets.prompt_tokens) or PROMPT_TOKENS


def answer_tokens(net: Any, options: Mapping[str, Any]) -> int:
    """Return the tokens of an answer: for an image those of its network, else the maximum
    allowed."""
    if isinstance(net, ImageNet):
        return sum(net.turns)
    if hasattr(getattr(net, "config", None), "sample_size"):
        return int(net.config.sample_size**2)
    return int(options.get("max_new_tokens") or 512)


def _scorer(
    net: Any, entry: Any, options: dict[str, Any], rows: int, prompts: int, question: int
) -> Callable[[], Tensor]:
    length = answer_tokens(net, options)
    ids = torch.ones(rows, length, dtype=torch.long)
    where = torch.ones(rows, length, dtype=torch.bool)
    if isinstance(net, SharedPrefix):
        inputs = _read(net, prompts, question)
        row = torch.arange(rows) % prompts
        return lambda: net.score(inputs, row, ids, where, Warp())[1].logprob
    if isinstance(net, ImageNet):
        guided = float(options.get("guidance_scale") or 4.0) != 1
        read_inputs = _image_inputs(net, rows, question)
        scale = torch.full((length,), 4.0)
        empty = read_inputs if guided else None
        return lambda: net.score(read_inputs, empty, ids, where, scale, Warp(), False)[1].logprob
    if hasattr(net.config, "sample_size"):
        return _amused(net, rows)
    whole = torch.ones(rows, question + length, dtype=torch.long)

    def masked() -> Tensor:
        logits = net(whole, attention_mask=torch.ones_like(whole), use_cache=False).logits
        scores = logits[:, -length:].float().log_softmax(-1)
        chosen: Tensor = scores.gather(-1, ids[..., None])[..., 0]
        return chosen

    return masked


def _read(net: SharedPrefix, prompts: int, question: int) -> dict[str, Tensor]:
    """Build the inputs of prompts whose pictures are already features."""
    places = torch.arange(question).expand(prompts, -1)
    axes = getattr(net.text_config, "rope_parameters", None) or {}
    if "mrope_section" in axes:
        places = places.expand(3, prompts, -1)
    return {
        "input_ids": torch.ones(prompts, question, dtype=torch.long),
        "attention_mask": torch.ones(prompts, question, dtype=torch.long),
        "position_ids": places,
    }


def _image_inputs(net: Any, rows: int, question: int) -> dict[str, Tensor]:
    if isinstance(net, JanusNet):
        ones = torch.ones(rows, question, dtype=torch.long)
        return {"ids": ones, "mask": ones}
    shape = net.shape
    if shape.classes:
        return {"label": torch.zeros(rows, dtype=torch.long)}
    return {
        "text": torch.zeros(rows, shape.condition, shape.caption),
        "mask": torch.ones(rows, shape.condition, dtype=torch.bool),
    }


def _amused(net: Any, rows: int) -> Callable[[], Tensor]:
    side = net.config.sample_size
    ids = torch.ones(rows, side, side, dtype=torch.long)
    text = torch.zeros(rows, 77, net.config.encoder_hidden_size)
    pooled = torch.zeros(rows, net.config.cond_embed_dim)
    micro = torch.zeros(rows, 5)

    def score() -> Tensor:
        logits = net(ids, encoder_hidden_states=text, pooled_text_emb=pooled, micro_conds=micro)
        scores = logits.flatten(2).transpose(1, 2).float().log_softmax(-1)
        chosen: Tensor = scores.gather(-1, ids.flatten(1)[..., None])[..., 0]
        return chosen

    return score


def rehearse(stage: Stage, decode: bool = True) -> Rehearsed:
    """Measure a stage: a pass with gradients, the vision tower and, with ``decode``, decoding one
    sample."""
    net = stage.net
    trained = [p for p in net.parameters() if p.requires_grad]
    looking = _looking(stage)

    def score(tracker: Tracker) -> None:
        logprob = stage.score().sum()
        tracker.turn()  # a sampling pass is the same without the backward
        if stage.look is not None and _sees(net):
            logprob = logprob + stage.look().sum()
        logprob.backward()

    update, forward = passed(score, [net])
    units = [_bytes(module.parameters()) for module in units_of(net)]
    return Rehearsed(
        stage.rows,
        parameters(net),
        sum(p.numel() for p in trained),
        _bytes(net.parameters()),
        _bytes(trained),
        _bytes(stage.decoder.parameters()) if stage.decoder is not None else 0,
        max(units, default=0),
        _bytes(net.parameters()) - sum(units),
        update,
        forward,
        decoding(stage) if decode else None,
        looking,
        stage.prompts,
        stage.conditions,
    )


SHORT = (3, 5)  # latent frames from which longer videos are extrapolated


def decoding(stage: Stage) -> Work | None:
    """Measure decoding one sample. Video autoencoders go frame by frame, which takes minutes on
    fakes: for long ones, two short pieces are measured and extrapolated."""
    decode = stage.decode
    if decode is None or stage.decoder is None:
        return None

    def decoded(frames: int) -> None:
        with torch.no_grad():
            decode(frames)

    few, many = SHORT
    if stage.frames <= many:
        return tracked(partial(decoded, stage.frames), [stage.decoder])
    short, longer = (tracked(partial(decoded, n), [stage.decoder]) for n in SHORT)
    return extended(short, longer, (stage.frames - few) / (many - few))


def _looking(stage: Stage) -> Work | None:
    """Measure the vision tower on the pictures of a pass, without gradients."""
    look = stage.look
    if look is None:
        return None

    def looked() -> None:
        with torch.no_grad():
            look()

    return tracked(looked, [stage.net])


def _sees(net: nn.Module) -> bool:
    """Tell whether the vision tower or the projector is trained: then every pass includes the
    pictures; else their features are computed once per rollout and cached."""
    return any(
        parameter.requires_grad and part_of(name.removeprefix("hf.")) in ("vision", "projector")
        for name, parameter in net.named_parameters()
    )


def _bytes(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def units_of(net: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP2 gathers one by one, not nested. A network without any is
    gathered whole."""
    return _outermost(net, set(shard_classes(net)))


def _outermost(net: nn.Module, names: set[str]) -> list[nn.Module]:
    return [
        unit
        for child in net.children()
        for unit in ([child] if type(child).__name__ in names else _outermost(child, names))
    ]

"""Shared by families in diffusers' folder format: parts and their classes, text encoders, export,
latent sizes.

A family is a subclass that names its classes and defines text encoding, the network call, the shape
of latents and their decoding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from mmrl.core import framing
from mmrl.core.broken_rows import BrokenRows
from mmrl.core.effects import FREE_AT_RESUME
from mmrl.core.errors import UserError
from mmrl.core.libraries import library_class, torch_dtype
from mmrl.core.registry import GRIDS
from mmrl.core.types import Copies, Prompt, Query, Rollout, Transition
from mmrl.policies.base import NO_CONTEXT, RolloutContext
from mmrl.policies.contracts import (
    Compiles,
    EncodesMedia,
    Exports,
    SplitsSequences,
    VariesSize,
)
from mmrl.policies.diffusion import (
    attention_backends,
    context_parallel,
    diffusers_folder,
    few_step,
    prompt_lengths,
    row_settings,
    schedulers,
)
from mmrl.policies.diffusion.attention_backends import Attention, AttentionChoice
from mmrl.policies.diffusion.diffusers_folder import shift_of
from mmrl.policies.diffusion.flow_policy import FlowPolicy, Grid, Storage, demonstrated
from mmrl.policies.diffusion.lora_merging import StartsFromLora
from mmrl.policies.diffusion.row_settings import (
    GUIDANCE,
    NEGATIVE,
    SEED,
    SIZE,
    TRUE_CFG,
    Seeded,
)
from mmrl.policies.diffusion.text_encoding import Placement, PromptCache, texts_of
from mmrl.policies.guidance import Overriding
from mmrl.policies.lora import adapters_of
from mmrl.policies.quantization import Quantization, check_quantization, quantize
from mmrl.policies.vlm.media import where
from samplers.batching import attempts, chunks
from samplers.noise import Rng
from samplers.processes import Flow, Process


class FolderPolicy(
    FlowPolicy, EncodesMedia, SplitsSequences, StartsFromLora, VariesSize, Compiles, Exports
):
    """Trains a model in diffusers' folder format."""

    pipeline: str  # class names in diffusers
    network: ClassVar[str]
    autoencoder: ClassVar[str] = "AutoencoderKL"
    part: ClassVar[str] = "transformer"  # of the folder that is trained
    also: ClassVar[tuple[str, ...]] = ()  # other pipelines whose folders load
    scheduler_class = "FlowMatchEulerDiscreteScheduler"  # in diffusers, for its time grid
    capabilities = replace(FlowPolicy.capabilities, makes="image")
    net: Any  # of diffusers, as its configuration
    size: tuple[int, int]  # pixels, [height, width]
    decoding: int | None = None  # samples per decoder pass last time; None: none yet

    def __init__(
        self,
        path: str,
        size: int | tuple[int, int] = 512,
        timestep_schedule: Annotated[Grid, GRIDS] | None = None,
        dtype: Storage = "float32",
        text_encoder_placement: Placement = "offload",
        text_cache: int = 20000,
        attention: Attention = "auto",
        compile: Annotated[bool | str, FREE_AT_RESUME] = False,
        vae_tiling: bool = False,
        vae_slicing: bool = False,
        quantization: Quantization | None = None,
        scheduler: Literal["own", "lcm"] = "own",
        negative_prompt: str = "",
        **options: Any,
    ):
        """Load a model folder. path: folder, hub id or world:NAME. size: pixels, one side or
        [height, width]. timestep_schedule: None is the folder's own scheduler. dtype: of the frozen
        weights. text_encoder_placement: after use; offload (to the CPU), release (drop; every
        prompt is encoded at the start) or keep; cpu: encode there, slowly. text_cache: number of
        cached prompts. attention: the network's backend; auto is xformers on CUDA where it is no
        slower, else SDPA. compile: the network's repeated blocks, by torch.compile; a string names
        its backend. vae_tiling, vae_slicing: the autoencoder processes overlapping tiles, or one
        sample at a time, as in diffusers' pipelines. quantization: the frozen weights of the
        network's blocks in 4 bits (nf4, fp4) or 8 (8bit), under adapters. scheduler: lcm samples in
        few steps as diffusers' LCMScheduler, whatever sde_type, noise_level, noise_window and
        solver say: for students of the objectives consistency and dmd; export writes that
        scheduler. negative_prompt: as the pipeline's; a row's own takes precedence."""
        self.negative_prompt = negative_prompt
        self.row_negatives = False  # whether some prompts set a negative prompt
        self.row_scales: tuple[str, ...] = ()  # guidance scales that prompts set
        attention_backends.check(attention)
        check_quantization(quantization, options.get("lora") is not None)
        self.place = diffusers_folder.resolve(path, self.pipeline, *self.also)
        self.compute = torch_dtype(dtype)
        self.renews = self.renews or scheduler == "lcm"
        if scheduler == "lcm":
            few_step.check(self.place, self.scheduler_class)
            self.scheduler_class = few_step.BY_CLASS[self.scheduler_class]
            options |= few_step.OPTIONS
        net = self.load_network()
        quantize(net, quantization)
        self.config, self.vae = (
            net.config,
            self.load_part(self.autoencoder, "vae").requires_grad_(False).eval(),
        )
        if self.vae.config.get("scaling_factor", 1) is None:
            raise UserError(
                f"{self.place}/vae/config.json: scaling_factor is null, so latents have no scale; "
                "write the number that the network was trained with"
            )
        self.decode_in_parts(vae_tiling, vae_slicing)
        self.usual_size = (size, size) if isinstance(size, int) else (size[0], size[1])
        self.size = self.usual_size
        self.media = replace(self.media, size=self.size)
        self.shape, self.process = self.latent_shape(), self.trained_process()
        self.texts = PromptCache(
            self.load_texts, self.encode_texts, text_encoder_placement, text_cache
        )
        folder_grid = self.own_grid()  # read and validated, whatever times are requested
        super().__init__(net, timestep_schedule=timestep_schedule or folder_grid, **options)
        self.report.notes = schedulers.notes(self.place, self.process)
        self.set_kernels(attention, compile)

    def set_kernels(self, attention: Attention = "auto", compile: bool | str = False) -> None:
        """Set the kernels that the network runs on, by the options ``attention`` and
        ``compile``."""
        self.attending = AttentionChoice(self.net, attention)
        self.compiled = bool(compile)
        if compile:
            attention_backends.compile_blocks(self.net, "inductor" if compile is True else compile)

    def enable_context_parallel(self, ulysses_degree: int, ring_degree: int) -> None:
        if why := context_parallel.unsupported(self) or context_parallel.unfit(
            self.attending.backend, ring_degree
        ):
            raise UserError(f"train.context_parallel: {why}")
        if self.attending.backend == "auto":  # xformers is not supported
            self.attending.backend = "sdpa"
        context_parallel.split_sequences(self.net, ulysses_degree, ring_degree)

    def decode_in_parts(self, vae_tiling: bool, vae_slicing: bool) -> None:
        """Turn on the memory-saving options of the autoencoder. UserError where it has none."""
        for name, enabled in (("tiling", vae_tiling), ("slicing", vae_slicing)):
            enable = getattr(self.vae, f"enable_{name}", None)
            if not enabled:
                continue
            if enable is None:
                raise UserError(
                    f"policy option vae_{name}: {type(self.vae).__name__} has no "
                    f"{name}; leave it false"
                )
            enable()

    def load_part(self, name: str, subfolder: str, dtype: torch.dtype | None = None) -> Any:
        """Load a part of the folder by the name of its class in diffusers, in float32 unless
        ``dtype`` says otherwise."""

        return diffusers_folder.load_part(
            library_class("diffusers", name), self.place, subfolder, dtype
        )

    def load_network(self) -> Any:
        """Load the network that is trained."""
        return self.load_part(self.network, self.part, self.compute)

    @abstractmethod
    def latent_shape(self) -> tuple[int, ...]:
        """Return the shape of one sample's latents, from ``self.size``, ``self.config`` and
        ``self.vae``."""

    @abstractmethod
    def encode_texts(self, pipe: Any, texts: list[str], device: torch.device) -> dict[str, Tensor]:
        """Encode texts to a nest of tensors [n, *] by the text pipeline."""

    def trained_process(self) -> Process:
        """Return the process the network was trained on."""
        return Flow()

    def own_grid(self) -> Grid:
        """Return the time grid that the folder's pipeline sets."""
        few = self.scheduler_class in few_step.BY_CLASS.values()
        return schedulers.flow_grid(schedulers.flow(self.place, few), self.handed)

    def handed(self, steps: int, config: Any) -> dict[str, Any]:
        """Return the pipeline's arguments to ``set_timesteps`` of a flow scheduler."""
        return {"num_inference_steps": steps}

    def tokens(self) -> int:
        """Count the tokens the network sees of one sample, by which a scheduler may shift its
        times."""
        patch: int = self.config.patch_size
        return self.shape[-2] * self.shape[-1] // patch**2

    def rollout(
        self, prompts: list[Prompt], copies: Copies, rng: Rng, context: RolloutContext = NO_CONTEXT
    ) -> Rollout:
        if SEED in self.reads:
            shared = self.same_initial_noise and self.exploring
            rng = Seeded.of_prompts(rng, prompts, copies, shared)
        return super().rollout(prompts, copies, rng, context)

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        cond = self.row_settings(prompts) | self.texts(texts_of(prompts), self.device)
        if self.row_negatives or any(NEGATIVE in prompt for prompt in prompts):
            cond |= {NEGATIVE: self.negatives(self.negatives_of(prompts))}
        return cond | {"uncond": self.negatives([self.negative_prompt])}

    def row_settings(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Set the size to that of the prompts, which is one, and return the guidance scales [P]
        that they set."""
        sizes = {self.size_of(prompt) for prompt in prompts}
        if len(sizes) > 1:
            shown = ", ".join(f"{height} x {width}" for height, width in sorted(sizes))
            raise UserError(f"prompts of one pass have several sizes: {shown}")
        self.resize(*sizes)
        return {
            name: torch.tensor(
                [row_settings.scale_of(prompt, name) for prompt in prompts],
                dtype=self.dtype,
                device=self.device,
            )
            for name in self.scales_in(prompts)
        }

    def scales_in(self, prompts: list[Prompt]) -> tuple[str, ...]:
        """Name the guidance scales that some of these or of earlier prompts set."""
        self.row_scales = tuple(
            name
            for name in (GUIDANCE, TRUE_CFG)
            if name in self.reads and (name in self.row_scales or row_settings.has(prompts, name))
        )
        return self.row_scales

    def size_of(self, prompt: Prompt) -> tuple[int, int]:
        size = row_settings.size_of(prompt) if SIZE in self.reads else None
        return size or self.usual_size

    def resize(self, size: tuple[int, int]) -> None:
        """Make samples of [height, width] pixels from now on. UserError for unsupported sizes."""
        if size == self.size:
            return
        before, self.size = self.size, size
        try:
            self.shape = self.latent_shape()
        except UserError:
            self.size = before
            self.shape = self.latent_shape()
            raise
        self.media = replace(self.media, size=size)
        self.decoding = self.pass_sizes.rows_that_fit = None  # how many fit depends on the size
        self.take_times()

    def _scales(self, point: Query) -> float | Tensor:
        scale = self._scale(point)
        by_prompt = point.cond.get(self.guided_by)
        sampled = point.guidance is None and isinstance(point.step, Transition)
        if by_prompt is None or not sampled or isinstance(self.guidance_scale, Overriding):
            return scale
        rows = by_prompt[point.group]
        scales = torch.where(rows < 0, rows.new_tensor(scale), self.scale_of(rows))
        return scales.view(-1, *[1] * len(self.shape))

    def scale_of(self, guidance: Tensor) -> Tensor:
        """Return the scale w of classifier-free guidance for the pipeline's argument, which guides
        where it is above 1."""
        return guidance.clamp_min(1)

    def embedded(self, cond: dict[str, Any], usual: float) -> Tensor | float:
        """Return the guidance scale that the network takes as an input, [B] where rows have their
        own, else ``usual``."""
        rows = cond.get(GUIDANCE)
        return usual if rows is None else torch.where(rows < 0, rows.new_tensor(usual), rows)

    def negatives(self, texts: list[str]) -> dict[str, Tensor]:
        """Encode negative prompts, a nest of tensors [P, *]."""
        return self.texts(texts, self.device)

    def negatives_of(self, prompts: list[Prompt]) -> list[str]:
        """Return the negative prompt of every prompt: its own, else the policy's."""
        return [row_settings.negative_of(prompt) or self.negative_prompt for prompt in prompts]

    def unconditional(self, row_cond: dict[str, Any], cond: dict[str, Any]) -> dict[str, Any]:
        if NEGATIVE not in row_cond:
            return super().unconditional(row_cond, cond)
        own_negatives: dict[str, Any] = row_cond[NEGATIVE]
        return row_cond | own_negatives

    def prepare(self, prompts: list[Prompt]) -> None:
        if self.texts.placement == "release":
            self.texts(list(dict.fromkeys(texts_of(prompts))), self.device)
            self.negatives(list(dict.fromkeys([self.negative_prompt, *self.negatives_of(prompts)])))

    reads: tuple[str, ...] = (NEGATIVE, GUIDANCE, SEED, SIZE)  # settings of a row
    text_length: int | None = None  # token limit of text encoders that have none

    def admit(self, prompts: list[Prompt]) -> list[Prompt]:
        """Take all prompts, and report what is not read of them."""
        self._check_settings(prompts)
        self.row_negatives |= any(NEGATIVE in prompt for prompt in prompts)
        texts = [text for prompt in prompts if isinstance(text := prompt.get("text"), str)]
        targets = [self.size_of(prompt) for prompt in prompts]
        lines = (
            *prompt_lengths.cut(self.place, texts, self.text_length),
            *prompt_lengths.unread(prompts, self.reads),
            *filter(None, [framing.sentence(framing.framed(prompts, targets))]),
        )
        self.report.notes += tuple(line for line in lines if line not in self.report.notes)
        return super().admit(prompts)

    def _check_settings(self, prompts: list[Prompt]) -> None:
        """Raise BrokenRows for rows with invalid settings."""
        fits: dict[tuple[int, int], str] = {}  # sizes, and why one is not supported
        problems: dict[int, str] = {}
        for place, prompt in enumerate(prompts):
            try:
                size = self.size_of(prompt)
                if NEGATIVE in self.reads:
                    row_settings.negative_of(prompt)
                if SEED in self.reads:
                    row_settings.seed_of(prompt)
                for name in self.scales_in([prompt]):
                    row_settings.scale_of(prompt, name)
            except UserError as error:
                problems[place] = str(error)
                continue
            if size not in fits:
                fits[size] = self._size_problem(size)
            if fits[size]:
                problems[place] = f"{where(prompt)}: {fits[size]}"
        self.resize(self.usual_size)
        if problems:
            raise BrokenRows(problems, len(prompts))

    def _size_problem(self, size: tuple[int, int]) -> str:
        """Return why a size that rows ask for is not supported; "" where it is."""
        try:
            self.resize(size)
        except UserError as error:
            return str(error).replace("policy option size", "its size")
        return ""

    def _pass(self, x: Tensor, t: Tensor, cond: dict[str, Any], passes: int = 1) -> Tensor:
        return attention_backends.computed(self, partial(super()._pass, x, t, cond, passes))

    def spaces(self) -> dict[str, Any]:
        """Add the autoencoder's properties that its configuration states."""
        latents = super().spaces()["latents"]
        scales = {n: getattr(self.vae.config, n, None) for n in ("scaling_factor", "shift_factor")}
        return {"latents": {**latents, "autoencoder": type(self.vae).__name__, **scales}}

    def cast(self, tensor: Tensor) -> Tensor:
        """Convert to the type the network computes in."""
        return tensor.to(self.dtype if self.dtype == torch.float64 else self.compute)

    def decode(self, rollout: Rollout) -> Tensor:
        vae = self.vae.to(self.device)
        rows = len(rollout)

        try:
            for attempt in attempts(min(self.pass_sizes.rows or rows, self.decoding or rows)):
                with attempt as size:
                    pixels = [
                        self.pixels(vae, rollout.sample[part].to(vae.dtype))
                        for part in chunks(rows, size)
                    ]
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of memory while decoding a single sample of {self.size[0]} x "
                f"{self.size[1]} pixels: {error}. "
                "Set policy option vae_tiling=true, or a smaller size"
            ) from error
        self.decoding = size
        return (torch.cat(pixels) / 2 + 0.5).clamp(0, 1)

    def pixels(self, vae: Any, latents: Tensor) -> Tensor:
        """Decode latents to pixels [B, 3, H, W] in -1..1."""
        pixels: Tensor = vae.decode(latents / vae.config.scaling_factor + shift_of(vae)).sample
        return pixels

    def demonstrate(
        self, prompts: list[Prompt], answers: Sequence[Any], rng: Rng, *, score: bool = True
    ) -> Rollout:
        return demonstrated(self, prompts, answers, rng)

    @torch.no_grad()
    def encode_media(self, media: Tensor) -> Tensor:
        """Encode to the autoencoder's most likely latents."""
        vae = self.vae.to(self.device)
        return self.latents_of(vae, (2 * media - 1).to(vae.dtype)).to(self.dtype)

    def latents_of(self, vae: Any, pixels: Tensor) -> Tensor:
        """Encode pixels [B, 3, H, W] in -1..1 to latents [B, *] as the network sees them: the
        inverse of ``pixels``."""
        mode: Tensor = vae.encode(pixels).latent_dist.mode()
        latents: Tensor = (mode - shift_of(vae)) * vae.config.scaling_factor
        return latents

    def load_texts(self) -> Any:
        """Load the pipeline without network and autoencoder."""

        return diffusers_folder.load_text_pipeline(
            library_class("diffusers", self.pipeline),
            self.place,
            self.compute,
            without=self.without(),
            part=self.part,
        )

    def without(self) -> tuple[str, ...]:
        """Name further parts that texts do not need."""
        return ()

    def export(self, folder: Path) -> None:
        """Write LoRA weights for ``pipe.load_lora_weights``, or the whole pipeline when all weights
        were trained."""

        pipeline = library_class("diffusers", self.pipeline)
        if adapters_of(self.net):
            diffusers_folder.save_lora(pipeline, self.net, folder, self.part)
        else:
            diffusers_folder.save_full(pipeline, self.place, self.net, folder, self.part)
        if self.scheduler_class in few_step.BY_CLASS.values():
            few_step.save(self.place, self.scheduler_class, folder)

    def latent_side(self, pixels: int, step: int, factor: int, name: str = "size") -> int:
        """Return the latents along a side; UserError where ``step`` pixels do not divide it."""
        if pixels < step or pixels % step:
            down = max(step, pixels // step * step)
            up = -(-pixels // step) * step
            raise UserError(
                f"policy option {name} {pixels} is not a multiple of {step}; the nearest "
                f"are {down} and {up}"
            )
        return pixels // factor


def vae_factor(vae: Any) -> int:
    """Return the pixels along a side for one latent of AutoencoderKL."""
    return 1 << (len(vae.config.block_out_channels) - 1)


def padded(text: Tensor, mask: Tensor | None, length: int) -> dict[str, Tensor]:
    """Pad encodings [n, L, C] and their mask [n, L] (None: no padding) to a fixed length, so that
    rows can be joined."""
    mask = torch.ones(text.shape[:2], device=text.device) if mask is None else mask
    missing = max(length - text.shape[1], 0)
    text = nn.functional.pad(text, (0, 0, 0, missing))
    mask = nn.functional.pad(mask, (0, missing))
    return {"text": text[:, :length], "mask": mask[:, :length].bool()}

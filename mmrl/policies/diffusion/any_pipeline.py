"""Trains any pipeline of the installed diffusers, also one that no family is written for, by
replaying its own code (``mmrl.policies.diffusion.replay``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Gt, Lt
from torch import Tensor, nn

from mmrl.core.distributed import process
from mmrl.core.distributions import Gaussian
from mmrl.core.errors import UserError
from mmrl.core.registry import GRIDS, KERNELS, POLICIES
from mmrl.core.sharding import shards
from mmrl.core.types import Kernel, Prompt, Query, Rollout
from mmrl.policies.base import NO_CONTEXT, RolloutContext, rows_of, without_empty
from mmrl.policies.capabilities import Medium
from mmrl.policies.diffusion import attention_backends, pipeline_folder, replay_consistency
from mmrl.policies.diffusion.attention_backends import Attention, AttentionChoice
from mmrl.policies.diffusion.flow_policy import FlowPolicy, Grid, Storage
from mmrl.policies.diffusion.frozen_cache import EncoderCache, Placement
from mmrl.policies.diffusion.modular_folder import guidance_of
from mmrl.policies.diffusion.replay import Replay, Visit
from mmrl.policies.diffusion.replay_check import check_replay
from mmrl.policies.diffusion.replay_consistency import Sampler
from mmrl.policies.diffusion.replay_encoding import MediaEncoder
from mmrl.policies.diffusion.replay_inputs import FURTHER, state_cast
from mmrl.policies.diffusion.replay_passes import Ask, Networks, asks, in_step
from mmrl.policies.diffusion.replay_prompts import PromptArguments
from mmrl.policies.diffusion.replay_scheduler import process_of, timestep_of
from mmrl.policies.prompt_states import pooled
from mmrl.policies.quantization import Quantization, check_quantization, quantize
from samplers.batching import at_width, attempts, chunks
from samplers.kernels import ddim, flow_sde
from samplers.noise import Rng
from samplers.processes import Flow

LAYERS = ("attn", "attn1", "attn2", "attention")
SOUND_LAYERS = ("audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
FAILURES = (
    ValueError,
    TypeError,
    IndexError,
    AttributeError,
    KeyError,
    NameError,
)  # of a pipeline's call
PROBE = Rng.of("latents to try an encoder with")
# decoders that fail on several videos: diffusers 0.42 masks the attention of one only
ALONE = frozenset({"AutoencoderKLHunyuanVideo15"})


@POLICIES.register("pipeline")
class AnyPipeline(FlowPolicy):
    """Trains any image or video pipeline of the installed diffusers by running its own code.

    What the pipeline hands to its scheduler is the velocity (or the prediction): its encoding of
    texts, its packing, its guidance and its choice of experts are part of it. A family of its own
    (``mmrl list policies``) is faster where there is one.
    """

    capabilities = replace(FlowPolicy.capabilities, demonstrations=True, sound=True)
    # experts that no token chose, layers for pictures that a prompt lacks, text layers that reach
    # no output: any network may leave some of its weights out of a pass
    find_unused_parameters = True
    encoder: MediaEncoder | None = None  # made for the first demonstrations
    attention = (
        *FlowPolicy.attention,
        *(f"{layer}.{name}" for layer in LAYERS + SOUND_LAYERS for name in PROJECTIONS),
    )

    def __init__(
        self,
        path: str,
        call: dict[str, Any] | None = None,
        inputs: dict[str, str] | None = None,
        guidance_argument: str | None = None,
        steps: int = 10,
        evaluation_steps: int | None = None,
        sde_type: Annotated[Kernel, KERNELS] | None = None,
        noise_level: float | None = None,
        timestep_schedule: Annotated[Grid, GRIDS] | None = None,
        dtype: Storage = "float32",
        text_encoder_placement: Placement = "offload",
        text_cache: int = 20000,
        together: bool | None = None,
        check: bool = True,
        vae_tiling: bool = False,
        vae_slicing: bool = False,
        attention: Attention = "auto",
        compile: bool | str = False,
        quantization: Quantization | None = None,
        skip_blocks: Sequence[str] = (),
        scheduler: Sampler = "own",
        video_frames: int | None = None,
        sound_share: Annotated[float, Gt(0), Lt(1)] | None = None,
        **options: Any,
    ):
        """Load a model folder. path: folder, hub id or world:NAME of any pipeline. call: further
        arguments of the pipeline's call, plain values: height, width, num_frames ... inputs:
        arguments of the call that differ by prompt, and the fields they are read from; null is
        {prompt: text}, and {image: image} or {video: video} where the call needs one.
        guidance_argument: the argument that guidance_scale is the value of; null: true_cfg_scale,
        or guidance_scale where the call knows negative prompts. sde_type, noise_level: null is
        flow_sde at 0.7 for flows, ddim at 1 for models of noise, v or the sample, and the sampler's
        own steps for consistency models (LCM, SCM). timestep_schedule: null is the pipeline's own.
        dtype: of the frozen weights. text_encoder_placement: where they go after use. text_cache:
        encoded prompts. together: prompts share calls of the pipeline; null: where the check finds
        that their rows do not depend on each other. check: try the replay before training.
        vae_tiling, vae_slicing: the autoencoder works on tiles of a sample, and on one sample after
        another. attention: its backend; auto is xformers on CUDA where it is no slower, else SDPA.
        compile: the networks' repeated blocks, by torch.compile; a text is the name of its backend.
        quantization: the frozen weights of the networks in 4 bits (nf4, fp4) or 8 (8bit), under
        adapters. skip_blocks: of a modular pipeline, blocks to leave out with the parts that only
        they need, such as prompt_upsampler. scheduler: lcm samples in few steps as diffusers'
        LCMScheduler and FlowMatchLCMScheduler, by predicting the data and adding fresh noise,
        whatever sde_type, noise_level, noise_window and solver say; export writes that scheduler.
        video_frames: taken of each prompt's video, evenly spread, where the pipeline changes
        one. sound_share: what the sound of a video counts in the mean that logprob_reduction takes,
        for log-prob, KL and entropy; null: as many numbers as it has, a few in a hundred."""
        check_quantization(quantization, options.get("lora") is not None)
        attention_backends.check(attention)
        self._refuse(options)
        self.compute = getattr(torch, dtype)
        pipe = self._load(path, quantization, skip_blocks)
        replay_consistency.by_lcm(pipe, self.place, scheduler)
        self.sampler = scheduler
        pipeline_folder.decode_in_parts(pipe, tiling=vae_tiling, slicing=vae_slicing)
        self._freeze(pipe, text_encoder_placement, text_cache)
        self._drive(pipe, call, inputs, guidance_argument, video_frames)
        self.together = together
        self.check = check
        self.asked_steps = (steps, evaluation_steps or steps)
        self.shape = self._latent_shape(steps)
        flow = isinstance(self.process, Flow)
        options |= {"sde_type": sde_type, "noise_level": noise_level}
        if self.renews:
            options = replay_consistency.options(steps, options, self.replay.scheduler, scheduler)
        else:
            options["sde_type"] = sde_type or (flow_sde if flow else ddim)
            options["noise_level"] = (0.7 if flow else 1.0) if noise_level is None else noise_level
        super().__init__(
            self.net,
            steps=steps,
            evaluation_steps=evaluation_steps,
            timestep_schedule=timestep_schedule or self._own_times,
            **options,
        )
        self.logprob_weight = self._weight(sound_share)
        self.arguments.check_guidance(self.guidance_scale)
        self.attending = AttentionChoice(self.net, attention)
        self.compiled = bool(compile)
        if compile:
            attention_backends.compile_blocks(self.net, "inductor" if compile is True else compile)

    # ----------------------------------------------------------------------------------------------
    # loading

    def _load(
        self, path: str, quantization: Quantization | None, skip_blocks: Sequence[str]
    ) -> Any:
        """Load the pipeline, and find the networks that are trained."""
        self.place, pipe, self.parts = pipeline_folder.load(path, self.compute, skip_blocks)
        self.pipeline = type(pipe).__name__
        nets = {name: getattr(pipe, name) for name in self.parts}
        for net in nets.values():
            quantize(net, quantization)
        self.net = Networks(nets) if len(nets) > 1 else nets[self.parts[0]]
        return pipe

    def _freeze(self, pipe: Any, placement: Placement, limit: int) -> None:
        """Let the encoders remember what they encode, and list what else is frozen."""
        self.encoders = pipeline_folder.encoders(pipe, self.parts)
        for module in self.encoders:
            EncoderCache(module, partial(device_of, self.net), placement, max(1, limit))
        self.others = pipeline_folder.others(pipe, self.parts, self.encoders)

    def _drive(
        self,
        pipe: Any,
        call: dict[str, Any] | None,
        inputs: dict[str, str] | None,
        guidance_argument: str | None,
        video_frames: int | None,
    ) -> None:
        """Take over the pipeline's scheduler and its networks, and read what its call takes."""
        self.replay = Replay(pipe, self.parts, self._forward, partial(device_of, self.net))
        known = self.replay.arguments
        guidance = guidance_argument or guidance_of(pipe)
        self.arguments = PromptArguments(
            self.pipeline, known, call or {}, inputs, guidance, video_frames
        )
        self.process = process_of(self.replay.scheduler)
        self.renews = self.replay.scheduler.renews
        makes: Medium = "video" if self.arguments.makes_video else "image"
        sound = self.replay.states.count > 1
        self.capabilities = replace(type(self).capabilities, makes=makes, sound=sound)
        self.media_size, self.media_frames = self.arguments.sizes()
        self.known_passes: dict[Any, tuple[str, ...]] = {}

    def _latent_shape(self, steps: int) -> tuple[int, ...]:
        latents = self._first_conditions(steps).latents
        if latents is not None and "image" in self.replay.arguments:
            self.replay.find_parts(self.arguments.example(), steps)
            latents = self._first_conditions(steps).latents
        if latents is None:
            raise UserError(
                f"{self.pipeline} cannot be replayed: it has no prepare_latents, where the state "
                "could be put in"
            )
        return tuple(latents.shape[1:])

    def _refuse(self, options: dict[str, Any]) -> None:
        """Say which options of other families mean nothing here."""
        if options.get("logprob_guidance", "guided") != "guided":
            raise UserError(
                "policy option logprob_guidance: guidance is the pipeline's own code here, which "
                "is scored as it samples; leave it guided, or use a family of its own"
            )

    def _weight(self, share: float | None) -> Tensor | None:
        """Weigh the numbers of a video and its sound. UserError where there are not two."""
        if share is None:
            return None
        if self.replay.states.count < 2:
            raise UserError(
                f"policy option sound_share: {self.pipeline} makes no sound beside its video; "
                "leave it out"
            )
        if self.logprob_reduction == "sum":
            raise UserError(
                "policy option sound_share: the log-prob of logprob_reduction sum is a density, in "
                "which nothing is weighed; set logprob_reduction to mean, or leave it out"
            )
        return self.replay.states.weights([1 - share, share])

    # ----------------------------------------------------------------------------------------------
    # times

    def _first_conditions(self, steps: int) -> Any:
        self._settle()
        try:
            return self.replay.conditions(self.arguments.example(), steps)
        except FAILURES as error:
            raise UserError(
                f"{self.pipeline} cannot be called with policy option call = "
                f"{self.arguments.call}: {_reason(error)}"
            ) from error

    def _own_times(self, steps: int) -> Tensor:
        """Return the pipeline's own times, as its call sets them."""
        times: Tensor = self._timetable(steps).times
        return times

    def _timetable(self, steps: int) -> Any:
        tables = self.__dict__.setdefault("_tables", {})
        if steps not in tables:
            tables[steps] = self._first_conditions(steps).table
        if tables[steps] is None:
            raise UserError(
                f"{self.pipeline} cannot be replayed: it calls its network before it sets its times"
            )
        return tables[steps]

    def _steps_asked(self) -> int:
        return self.asked_steps[0 if self.exploring and not self.plain else 1]

    def _asks(self, t: Tensor) -> list[Ask]:
        """Cut a pass of rows at times t [B] into calls of the pipeline."""
        steps = self._steps_asked()
        grid = self._timetable(steps).times[:-1].to(t.dtype)
        of_time = partial(timestep_of, self.replay.scheduler)
        return asks(t.detach().cpu(), grid, steps, of_time, self.together is False)

    # ----------------------------------------------------------------------------------------------
    # passes

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Number the prompts: the pipeline encodes them itself, wherever it is run."""
        return {"prompt": self.arguments.numbers(prompts)[:, None].to(self.device)}

    def prompt_states(self, prompts: list[Prompt]) -> Tensor:
        states = []
        for prompt in prompts:
            call = self.arguments.of(self.arguments.numbers([prompt]).tolist(), None)
            inputs = self.replay.conditions(call, self.asked_steps[0]).inputs
            latents = (next(iter(inputs)), *FURTHER)
            tensors = {
                name: value
                for name, value in inputs.items()
                if isinstance(value, Tensor) and value.ndim > 1 and name not in latents
            }
            states.append(pooled(tensors))
        return torch.cat(states)

    def prepare(self, prompts: list[Prompt]) -> None:
        if self.check and prompts:
            self.check = False
            check_replay(self, prompts)

    def rollout(
        self, prompts: list[Prompt], copies: Any, rng: Rng, context: RolloutContext = NO_CONTEXT
    ) -> Rollout:
        self.prepare(prompts)
        return super().rollout(prompts, copies, rng, context)

    def begin(self, noise: Tensor, cond: dict[str, Any]) -> Tensor:
        steps = self._steps_asked()

        def ask(rows: list[int]) -> Tensor:
            return self.replay.begin(self._call(cond, rows, None), steps, noise[rows])

        try:
            return self._by_prompt(ask, range(len(noise)))
        except FAILURES as error:
            raise self._failure(ask, cond, error) from error

    def _failure(self, ask: Any, cond: dict[str, Any], error: Exception) -> UserError:
        """Say for which prompt the pipeline's call fails."""
        for row, number in enumerate(cond["prompt"][:, 0].tolist()):
            try:
                ask([row])
            except FAILURES as alone:
                text = self.arguments.shown(number)
                return UserError(f"{self.pipeline} cannot be called for {text}: {_reason(alone)}")
        return UserError(
            f"{self.pipeline} cannot be called for several prompts at once: {_reason(error)}; "
            "set policy option together to false"
        )

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        return self._guided(x, t, cond, self.guidance_scale)

    def _guided(self, x: Tensor, t: Tensor, cond: dict[str, Any], scale: float) -> Tensor:
        """Compute what the pipeline hands to its scheduler, [B, *], at times t [B]."""
        x = x.contiguous()  # pipelines turn what they prepare, and kernels round by strides
        parts = self._asks(t)
        if self._waits():
            parts = in_step(parts, [self._passes(part, x, cond, scale) for part in parts])
        outputs = []
        zero_sum = x.new_zeros(())
        for part in parts:
            # a step's rows at the full width again, as sampling had them
            fill = len(x) - len(part.rows) if len(parts) < 3 and self.together is not False else 0
            rows = (part.rows + part.rows[:1] * fill) or [0]
            output = self._output(cond, rows, scale, part.visit, x)
            outputs.append(output[: len(part.rows)])
            if not part.rows:
                zero_sum = zero_sum + 0 * output.sum()
        order = torch.tensor([row for part in parts for row in part.rows]).argsort()
        joined = torch.cat(outputs)[order.to(x.device)] if len(outputs) > 1 else outputs[0]
        joined = joined + zero_sum if any(not part.rows for part in parts) else joined
        # copies wait for the gradients of all networks, whichever this pass has used
        return self.active()("", joined) if self._announces() else joined

    def _output(
        self, cond: dict[str, Any], rows: list[int], scale: float, visit: Visit, x: Tensor
    ) -> Tensor:
        """Ask the pipeline at a step. UserError where it answers for each prompt and not for all
        together, which the check would have found."""

        def ask(rows: list[int]) -> Tensor:
            return self.replay.output(self._call(cond, rows, scale), visit, x[rows])

        try:
            return ask(rows)
        except FAILURES as error:
            if self.together is not None or len(rows) < 2:
                raise
            raise self._failure(ask, cond, error) from error

    def _announces(self) -> bool:
        """Tell whether this pass goes by a wrapper that has to learn of it as a whole."""
        copies = len(self.parts) > 1 and not shards(self.net) and hasattr(self, "trained")
        return copies and self.active() is not self.net

    def _waits(self) -> bool:
        """Tell whether processes wait for each other in every pass of a network."""
        if process()[1] == 1 or self._announces():
            return False
        return shards(self.net) or self.active() is not self.net

    def _passes(self, part: Ask, x: Tensor, cond: dict[str, Any], scale: float) -> tuple[str, ...]:
        """Name the networks that a call of the pipeline passes at its step, in order."""
        steps, place, timestep = part.visit
        key = (steps, place, scale)
        if timestep is None and key in self.known_passes:
            return self.known_passes[key]
        call = self._call(cond, part.rows, scale)
        names = self.replay.passes(call, part.visit, x[part.rows])
        if timestep is None:
            self.known_passes[key] = names
        return names

    def _by_prompt(self, ask: Any, rows: Any) -> Tensor:
        """Ask for all rows together, or for one after the other where they would depend on each
        other."""
        if self.together is not False:
            outputs: Tensor = ask(list(rows))
            return outputs
        return torch.cat([ask([row]) for row in rows])

    def _call(self, cond: dict[str, Any], rows: list[int], scale: float | None) -> dict[str, Any]:
        self._settle()
        numbers = cond["prompt"][:, 0].tolist()
        return self.arguments.of([numbers[row] for row in rows], scale)

    def _settle(self) -> None:
        """Move what is not trained to the network's device."""
        place = device_of(self.net)
        for module in self.others:
            if next(iter(module.parameters())).device != place:
                module.to(place)

    def _velocities(self, point: Query, guided: bool) -> tuple[Tensor, Tensor]:
        cond = rows_of(without_empty(point.cond), point.group)
        scale = self._scale(point) if guided else 1.0
        # rows that are asked for one by one are as wide as they will ever be
        width = max(0 if self.together is False else self._filled(len(point)), len(point))
        guided_pass = partial(self._guided, scale=scale)
        v = attention_backends.computed(
            self, lambda: at_width(guided_pass, width, point.state, point.time, cond)
        )
        if v.shape != point.state.shape:
            raise UserError(
                f"{self.pipeline} cannot be replayed: it gives its scheduler "
                f"{tuple(v.shape)} for latents of shape {tuple(point.state.shape)}"
            )
        v = v.to(self.dtype)
        return v, v

    def combine(self, v: Tensor, empty: Tensor, scale: float | Tensor) -> Tensor:
        """Leave guidance to the pipeline, whose output has it."""
        return v

    def _transition(self, point: Query, v: Tensor) -> Gaussian:
        if self.logprob_weight is not None:
            self.logprob_weight = self.logprob_weight.to(v)  # where the network is, once
        return super()._transition(point, v)

    def _forward(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a pass of a network, in the type it computes in."""
        args, kwargs = state_cast(args, kwargs, self.cast)
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, (Tensor, list))), [])
        self.forwards += len(first)
        if len(self.parts) > 1:
            return self.net(name, *args, **kwargs)
        net = self.active() if hasattr(self, "trained") else self.net
        return net(*args, **kwargs)

    def cast(self, tensor: Tensor) -> Tensor:
        """Convert to the type the network computes in."""
        return tensor.to(self.dtype if self.dtype == torch.float64 else self.compute)

    # ----------------------------------------------------------------------------------------------
    # media and export

    def decode(self, rollout: Rollout) -> Tensor:
        """Decode by the pipeline's own code: images [B, 3, H, W] or videos [B, F, 3, H, W] in
        0..1, which carry their sound where the pipeline makes one (mmrl.core.sound)."""
        cond = rows_of(rollout.cond, rollout.group)
        rows = len(rollout)
        steps = self.asked_steps[0]

        def finish(part: list[int]) -> Tensor:
            return pipeline_folder.media_of(
                self.replay.finish(self._call(cond, part, None), steps, rollout.sample[part]),
                self.pipeline,
            )

        most = min(self.fixed_batch_rows or rows, rows)
        if type(getattr(self.replay.pipe, "vae", None)).__name__ in ALONE:
            most = 1
        for attempt in attempts(most):
            with attempt as size:
                media = [self._by_prompt(finish, range(rows)[part]) for part in chunks(rows, size)]
        return torch.cat(media)

    @torch.no_grad()
    def encode_media(self, media: Tensor) -> Tensor:
        """Encode to the autoencoder's most likely latents, in the pipeline's own layout."""
        if self.replay.states.count > 1:
            raise UserError(
                f"{self.pipeline} takes no videos of others: it makes a sound with each, and "
                "diffusers has nothing that makes the spectrum of a waveform which the autoencoder "
                "of sounds would encode"
            )
        if self.replay.states.parts:
            raise UserError(
                f"{self.pipeline} takes no videos of others: it holds a part of its latents as the "
                "prompt's picture says, and theirs would have to begin with the same one"
            )
        if self.encoder is None:
            call = self.arguments.example()
            latents = PROBE.normal(torch.arange(1, device=self.device), self.shape, 0, self.dtype)
            self._settle()
            finish = partial(self.replay.finish, call, self.asked_steps[0])
            self.encoder = MediaEncoder(self.replay.pipe, finish, latents)
        rows = [self.encoder.encode(row[None].to(self.device)) for row in media]
        return torch.cat(rows).to(self.dtype)

    def export(self, folder: Path) -> None:
        """Write LoRA weights for the pipeline's ``load_lora_weights`` or the network's
        ``load_lora_adapter``; the whole pipeline when all weights were trained."""
        several = len(self.parts) > 1
        nets = {name: getattr(self.net, name) if several else self.net for name in self.parts}
        pipeline_folder.export(self.pipeline, self.place, nets, folder)
        replay_consistency.save(self.replay.scheduler, self.place, folder, self.sampler)


def _reason(error: Exception) -> str:
    """Return the first line of what an error says."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def device_of(net: nn.Module) -> torch.device:
    """Return where a network is."""
    return next(net.parameters()).device

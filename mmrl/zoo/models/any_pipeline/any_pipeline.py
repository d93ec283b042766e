"""Trains any pipeline of the installed diffusers, also without a family here, by replaying its code
(``mmrl.zoo.models.any_pipeline.replay``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Gt, Lt
from torch import Tensor

from mmrl.core.effects import FREE_AT_RESUME
from mmrl.core.errors import UserError
from mmrl.core.libraries import torch_dtype
from mmrl.core.media import USUAL_RATE
from mmrl.core.registry import GRIDS, KERNELS, POLICIES
from mmrl.core.types import Kernel, Prompt, Rollout
from mmrl.policies.base import MediaFormat, rows_of
from mmrl.policies.capabilities import Medium
from mmrl.policies.contracts import Compiles, EncodesMedia, Exports
from mmrl.policies.diffusion import attention_backends, pipeline_folder, prompt_lengths
from mmrl.policies.diffusion.attention_backends import Attention, AttentionChoice
from mmrl.policies.diffusion.flow_policy import FlowPolicy, Grid, Storage, demonstrated
from mmrl.policies.diffusion.frozen_cache import EncoderCache, Placement
from mmrl.policies.diffusion.modular_folder import guidance_of, is_modular
from mmrl.policies.diffusion.two_stages import ROWS
from mmrl.policies.diffusion.video_rates import rate_of
from mmrl.policies.lora import PROJECTIONS
from mmrl.policies.quantization import Quantization, check_quantization, quantize
from mmrl.zoo.models.any_pipeline import replay_consistency
from mmrl.zoo.models.any_pipeline.replay import Replay
from mmrl.zoo.models.any_pipeline.replay_consistency import Sampler
from mmrl.zoo.models.any_pipeline.replay_encoding import MediaEncoder
from mmrl.zoo.models.any_pipeline.replay_passes import Networks
from mmrl.zoo.models.any_pipeline.replay_prompts import PromptArguments, unset
from mmrl.zoo.models.any_pipeline.replay_scheduler import process_of
from mmrl.zoo.models.any_pipeline.replay_sizes import check_size
from mmrl.zoo.models.any_pipeline.replay_times import SeveralTimes
from mmrl.zoo.models.any_pipeline.replayed_policy import ReplayedPolicy, device_of
from samplers.batching import attempts, chunks
from samplers.kernels import ddim, flow_sde
from samplers.noise import Rng
from samplers.processes import Flow

LAYERS = ("attn", "attn1", "attn2", "attention")
SOUND_LAYERS = ("audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
LISTED_LAYERS = tuple(f"attentions.{i}" for i in range(4))  # of a block of Kandinsky 2.2's UNet
KANDINSKY_LAYERS = tuple(  # of a block of Kandinsky 5
    f"{layer}.{name}"
    for layer in ("self_attention", "cross_attention")
    for name in ("to_query", "to_key", "to_value", "out_layer")
)
LENGTH = "call: {max_sequence_length: ...}"  # what sets the tokens of a prompt
PROBE = Rng.of("latents to try an encoder with")
# decoders that fail on several videos: diffusers 0.42 masks the attention of one only
ALONE = frozenset({"AutoencoderKLHunyuanVideo15"})


@POLICIES.register("pipeline")
class AnyPipeline(ReplayedPolicy, EncodesMedia, Compiles, Exports):
    """Trains any image or video pipeline of the installed diffusers by running its own code.

    The pipeline's input to its scheduler is the velocity (or the prediction), which includes its
    text encoding, packing, guidance and choice of experts. A dedicated family (``mmrl list
    policies``) is faster where there is one.
    """

    capabilities = replace(FlowPolicy.capabilities, sound=True)
    # experts that no token chose, layers for pictures that a prompt lacks, text layers that reach
    # no output: any network may leave some of its weights out of a pass
    find_unused_parameters = True
    encoder: MediaEncoder | None = None  # made for the first demonstrations
    attention = (
        *FlowPolicy.attention,
        *(
            f"{layer}.{name}"
            for layer in LAYERS + SOUND_LAYERS + LISTED_LAYERS
            for name in PROJECTIONS
        ),
        *KANDINSKY_LAYERS,
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
        compile: Annotated[bool | str, FREE_AT_RESUME] = False,
        quantization: Quantization | None = None,
        skip_blocks: Sequence[str] = (),
        scheduler: Sampler = "own",
        video_frames: int | None = None,
        sound_share: Annotated[float, Gt(0), Lt(1)] | None = None,
        guardrail: bool = True,
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
        for log-prob, KL and entropy; null: as many numbers as it has, a few in a hundred.
        guardrail: Cosmos checks prompts and pictures by the package cosmos_guardrail; false runs it
        without, which is the user's decision and duty."""
        self._refuse(options, quantization, attention)
        self.compute = torch_dtype(dtype)
        pipe = self._load(path, quantization, skip_blocks, guardrail)
        self._sample_by(pipe, scheduler)
        pipeline_folder.decode_in_parts(pipe, tiling=vae_tiling, slicing=vae_slicing)
        self._freeze(pipe, text_encoder_placement, text_cache)
        self._drive(pipe, call, inputs, guidance_argument, video_frames)
        self.together = together
        self.check = check
        self.asked_steps = (steps, evaluation_steps or steps)
        self.shape = self._latent_shape(steps)
        super().__init__(
            self.net,
            steps=steps,
            evaluation_steps=evaluation_steps,
            timestep_schedule=timestep_schedule or self._own_times,
            **self._noise(steps, sde_type, noise_level, options),
        )
        self._step_by_state()
        self.logprob_weight = self._weight(sound_share)
        self.arguments.check_guidance(self.guidance_scale)
        self._speed_up(attention, compile)
        self._refuse_trees()
        if defaults := unset(self.replay.arguments, call or {}, list(self.arguments.inputs)):
            self.report.notes += (
                f"not set in policy option call, so taken as they are: {defaults}",
            )

    # ----------------------------------------------------------------------------------------------
    # loading

    def _load(
        self,
        path: str,
        quantization: Quantization | None,
        skip_blocks: Sequence[str],
        guardrail: bool,
    ) -> Any:
        """Load the pipeline, and find the networks that are trained."""
        self.place, pipe, self.parts = self._open(path, skip_blocks, guardrail)
        self.pipeline = type(pipe).__name__
        nets = {name: getattr(pipe, name) for name in self.parts}
        for net in nets.values():
            quantize(net, quantization)
        self.net = Networks(nets) if len(nets) > 1 else nets[self.parts[0]]
        self.trained = self.net
        return pipe

    def _open(
        self, path: str, skip_blocks: Sequence[str], guardrail: bool
    ) -> tuple[str, Any, tuple[str, ...]]:
        return pipeline_folder.load(path, self.compute, skip_blocks, guardrail)

    def _sample_by(self, pipe: Any, sampler: Sampler) -> None:
        """Put the sampler that is asked for in the pipeline."""
        replay_consistency.by_lcm(pipe, self.place, sampler)
        self.sampler = sampler

    def _freeze(self, pipe: Any, placement: Placement, limit: int) -> None:
        """Let the encoders remember what they encode, and list what else is frozen."""
        self.encoders = pipeline_folder.encoders(pipe, self.parts)
        for module in self.encoders:
            EncoderCache(module, partial(device_of, self.net), placement, max(1, limit))
        self.frozen_parts = pipeline_folder.others(pipe, self.parts)

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
        rates = (rate_of(type(n).__name__, getattr(n, "config", None)) for n in self.net.modules())
        published = next(filter(None, rates), USUAL_RATE)
        self.media = MediaFormat(*self.arguments.sizes(), self.arguments.rate() or published)
        self.known_passes: dict[Any, tuple[str, ...]] = {}

    def admit(self, prompts: list[Prompt]) -> list[Prompt]:
        """Take all prompts, and say what is not read of them."""
        self.arguments.check(prompts)
        fields = [str(field) for field in self.arguments.inputs.values()]
        field = self.arguments.inputs.get("prompt", "")
        texts = [text for prompt in prompts if isinstance(text := prompt.get(field), str)]
        limit = prompt_lengths.limit_of(self.arguments.call, self.replay.arguments)
        lines = (
            *(
                ()
                if is_modular(self.place)
                else prompt_lengths.cut(self.place, texts, limit, LENGTH)
            ),
            *prompt_lengths.unread(prompts, fields),
        )
        self.report.notes += tuple(line for line in lines if line not in self.report.notes)
        return super().admit(prompts)

    def _latent_shape(self, steps: int) -> tuple[int, ...]:
        latents = self._first_conditions(steps).latents
        # Kandinsky 5 prepares a picture's channels also where there is no picture
        pictured = any(getattr(net, "visual_cond", False) for net in self.net.modules())
        if latents is not None and ("image" in self.replay.arguments or pictured):
            self.replay.find_parts(self.arguments.example(), steps)
            latents = self._first_conditions(steps).latents
        if latents is None:
            raise UserError(
                f"{self.pipeline} cannot be replayed: it has no prepare_latents, where the state "
                "could be put in"
            )
        for count in sorted(set(self.asked_steps)):
            self._check_steps(count)
        if self.media.size is not None and self.replay.states.count == 1:
            check_size(self.replay.pipe, tuple(latents.shape[1:]), self.media.size)
        return tuple(latents.shape[1:])

    def _refuse(
        self, options: dict[str, Any], quantization: Quantization | None, attention: Attention
    ) -> None:
        """Say which options mean nothing here, or not together."""
        check_quantization(quantization, options.get("lora") is not None)
        attention_backends.check(attention)
        if options.get("logprob_guidance", "guided") != "guided":
            raise UserError(
                "policy option logprob_guidance: guidance is the pipeline's own code here, which "
                "is scored as it samples; leave it guided, or use a family of its own"
            )

    def _refuse_trees(self) -> None:
        """Refuse samples that share steps where an earlier stage draws for each sample."""
        if self.tree is not None and hasattr(type(self.replay.pipe), ROWS):
            raise UserError(
                f"policy option tree: samples of {self.pipeline} have an embedding each of an "
                "earlier stage, so they share no steps; leave it null"
            )

    def _noise(
        self,
        steps: int,
        sde_type: Kernel | None,
        noise_level: float | None,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Complete the options of the flow policy by the steps of the pipeline's kind of model."""
        chosen = options | {"sde_type": sde_type, "noise_level": noise_level}
        if self.renews:
            return replay_consistency.options(steps, chosen, self.replay.scheduler, self.sampler)
        flow = isinstance(self.process, Flow)
        usual = 0.7 if flow else 1.0
        chosen["sde_type"] = sde_type or (flow_sde if flow else ddim)
        chosen["noise_level"] = usual if noise_level is None else noise_level
        return chosen

    def _step_by_state(self) -> None:
        """Step a video and its sound by times of their own, where the pipeline does."""
        by_state = self.replay.states.by_state()
        if by_state is None:
            return
        self.sde_type = by_state.kernel(self.sde_type)
        self.solver = by_state.solver(self.solver) if self.solver else None
        self.process = SeveralTimes(self.pipeline)

    def _speed_up(self, attention: Attention, compile: bool | str) -> None:
        """Choose the attention's backend, and compile the networks' blocks where asked."""
        self.attending = AttentionChoice(self.net, attention)
        self.compiled = bool(compile)
        if compile:
            attention_backends.compile_blocks(self.net, "inductor" if compile is True else compile)

    def _weight(self, share: float | None) -> Tensor | None:
        """Weigh the numbers of a video and its sound. UserError where there are not two."""
        if share is None:
            return None
        if self.replay.states.count < 2:
            raise UserError(
                f"policy option sound_share: {self.pipeline} makes no sound with its video; "
                "leave it out"
            )
        if self.logprob_reduction == "sum":
            raise UserError(
                "policy option sound_share: the log-prob of logprob_reduction sum is a density, in "
                "which nothing is weighed; set logprob_reduction to mean, or leave it out"
            )
        return self.replay.states.weights([1 - share, share])

    # ----------------------------------------------------------------------------------------------
    # media and export

    def decode(self, rollout: Rollout) -> Tensor:
        """Decode by the pipeline's own code: images [B, 3, H, W] or videos [B, F, 3, H, W] in
        0..1, which carry their sound where the pipeline makes one (mmrl.core.media.sound)."""
        cond = self._of_rows(rows_of(rollout.cond, rollout.group), rollout.row_id)
        rows = len(rollout)
        steps = self.asked_steps[0]

        def finish(part: list[int]) -> Tensor:
            call, row = self._call(cond, part, None), rollout.row_id[part]
            try:
                media = self.replay.finish(call, steps, rollout.sample[part], row)
            except RuntimeError as error:
                raise self._cut_off(error) from error
            return pipeline_folder.media_of(media, self.pipeline)

        most = min(self.pass_sizes.rows or rows, rows)
        if type(getattr(self.replay.pipe, "vae", None)).__name__ in ALONE:
            most = 1
        for attempt in attempts(most):
            with attempt as size:
                media = [self._by_prompt(finish, range(rows)[part]) for part in chunks(rows, size)]
        return torch.cat(media)

    def _cut_off(self, error: RuntimeError) -> Exception:
        """Say where a gradient of the media was asked for that the pipeline cuts off."""
        if "numpy() on Tensor that requires grad" not in str(error):
            return error
        return UserError(
            f"{self.pipeline} gives pictures through which no gradient goes, as it rounds them for "
            "its guardrail; use an objective that follows no reward's gradient"
        )

    def demonstrate(
        self, prompts: list[Prompt], answers: Sequence[Any], rng: Rng, *, score: bool = True
    ) -> Rollout:
        return demonstrated(self, prompts, answers, rng)

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

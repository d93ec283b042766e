"""Makes your own network a flow or diffusion policy: a file, the shape of a sample, the prompt's
field that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn

from mmrl.core import pretrained
from mmrl.core.contract import check_memory, returned, unpacked
from mmrl.core.effects import CHOOSES_WEIGHTS, Effects
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, import_name
from mmrl.core.types import Media, Prompt, Rollout
from mmrl.policies.base import MediaFormat
from mmrl.policies.contracts import EncodesMedia, Exports
from mmrl.policies.diffusion.diffusers_folder import shift_of
from mmrl.policies.diffusion.flow_policy import FlowPolicy, demonstrated
from mmrl.policies.lora import ATTENTION, TWO_ATTENTIONS, merged
from samplers.batching import chunks
from samplers.noise import Rng
from samplers.processes import Flow

Value = int | float | Sequence[float]


@POLICIES.register("module")
class Module(FlowPolicy, EncodesMedia, Exports):
    """Trains your own nn.Module, the velocity of samples of one shape given time and a prompt's
    field.

    It is called as ``net(x, t, cond)`` with x [B, *shape], t [B] in 0..1 (1 is noise) and the
    values of ``field`` [B] or [B, C], or as ``net(x, t)`` without a field, and returns [B, *shape],
    alone or as diffusers' networks do. Its inputs are copies. Frozen layers stay frozen. Its
    attribute ``process``, a ``samplers.processes.Process``, says what the output is; without one
    it is the velocity of a rectified flow.
    """

    not_options = ()
    attention = (
        *ATTENTION,
        *TWO_ATTENTIONS,
    )

    def __init__(
        self,
        net: Annotated[str, CHOOSES_WEIGHTS],
        shape: Annotated[Sequence[Annotated[int, Ge(1)]], CHOOSES_WEIGHTS],
        field: str | None = "label",
        empty: Value | None = None,
        vae: Annotated[str | None, Effects(chooses_weights=True)] = None,
        **options: Any,
    ):
        """Build the network. net: ``file.py:build`` or ``module:build``, a function without
        arguments. shape: of a sample, without the batch. field: of the prompt, a label or a list of
        numbers; null: none. empty: the value for no prompt, for guidance. vae: diffusers folder of
        the autoencoder that decodes samples; null: they are pixels in -1..1."""
        network = import_name(net, "network")()
        if not isinstance(network, nn.Module):
            raise UserError(
                f"policy option net {net!r} must return an nn.Module, not {type(network).__name__}"
            )
        check_memory(network, f"policy option net {net!r}")
        _check_call(network, net, field)
        # where wrappers such as DDP's look for tensors, too
        network.register_forward_hook(lambda _, inputs, output: unpacked(output))
        self.by = f"the network of policy option net ({net!r})"
        self.shape = tuple(shape)
        self.field = field
        self.empty = empty
        self.process = getattr(network, "process", Flow())
        self.vae = None if vae is None else _autoencoder(vae)
        if self.vae is not None or (len(self.shape) == 3 and self.shape[0] == 3):
            self.capabilities = replace(self.capabilities, makes="image")
            factor = 1 if self.vae is None else _factor(self.vae)
            self.media = MediaFormat((self.shape[-2] * factor, self.shape[-1] * factor))
        super().__init__(network, **options)
        if self.guidance_scale != 1 and (empty is None or field is None):
            raise UserError(
                "policy option guidance_scale needs empty, the value of field that "
                "stands for no prompt"
            )

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        if self.field is None:
            return {"rows": torch.zeros(len(prompts), device=self.device)}
        absent = next((i for i, prompt in enumerate(prompts) if self.field not in prompt), None)
        if absent is not None:
            known = ", ".join(prompts[absent])
            raise UserError(
                f"prompt {absent} has no {self.field!r} (policy option field); it has: {known}"
            )
        cond = {"cond": self._tensor([prompt[self.field] for prompt in prompts])}
        return (
            cond if self.empty is None else cond | {"uncond": {"cond": self._tensor([self.empty])}}
        )

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        try:
            rows = [torch.as_tensor(value) for value in values]
            batch = torch.stack(rows).to(self.device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"prompt field {self.field!r} must be a number, or numbers of one count: {error}"
            ) from error
        return batch.to(self.dtype) if batch.is_floating_point() else batch.long()

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        dtype = next(self.net.parameters()).dtype
        label = cond.get("cond")
        condition = (
            () if label is None else (label.to(dtype) if label.is_floating_point() else label,)
        )
        # copies: a network may work in place
        output = self.active()(x.to(dtype, copy=True), t.clone(), *condition)
        return returned(output, self.by, B_shape=tuple(x.shape))

    @torch.no_grad()
    def decode(self, rollout: Rollout) -> Media:
        """Return images [B, 3, H, W] in 0..1; samples that are no images unchanged."""
        if self.capabilities.makes is None:
            return rollout.sample
        pixels = rollout.sample
        if self.vae is not None:
            vae = self.vae.to(self.device)
            parts = chunks(len(rollout), self.pass_sizes.rows or len(rollout))
            pixels = torch.cat([_pixels(vae, rollout.sample[part]) for part in parts])
        return (pixels / 2 + 0.5).clamp(0, 1)

    def demonstrate(
        self, prompts: list[Prompt], answers: Sequence[Any], rng: Rng, *, score: bool = True
    ) -> Rollout:
        return demonstrated(self, prompts, answers, rng)

    @torch.no_grad()
    def encode_media(self, media: Tensor) -> Tensor:
        """Return the samples of pictures [B, 3, H, W]; samples that are no images unchanged."""
        if self.capabilities.makes is None:
            if tuple(media.shape[1:]) != self.shape:
                raise UserError(
                    f"an answer has the shape {tuple(media.shape[1:])}; policy option shape says "
                    f"{self.shape}"
                )
            return media.to(self.dtype)
        pixels = (2 * media - 1).to(self.dtype)
        return pixels if self.vae is None else _latents(self.vae.to(self.device), pixels)

    def export(self, folder: Path) -> None:
        """Write ``net.safetensors``: the state dict of what ``net`` builds, adapters added to its
        weights."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        state = {
            name: tensor.detach().cpu().contiguous() for name, tensor in merged(self.net).items()
        }
        save_file(state, folder / "net.safetensors")


def _check_call(network: nn.Module, net: str, field: str | None) -> None:
    call = ("x", "t") if field is None else ("x", "t", "cond")
    try:
        inspect.signature(network.forward).bind(*call)
    except TypeError as error:
        raise UserError(
            f"policy option net {net!r} is called as net({', '.join(call)}), which its forward "
            f"does not take ({error}); cond is left out by field: null"
        ) from error


def _pixels(vae: Any, latents: Tensor) -> Tensor:
    plain = latents.to(vae.dtype) / vae.config.scaling_factor + shift_of(vae)
    images: Tensor = vae.decode(plain).sample
    return images


def _factor(vae: Any) -> int:
    return 1 << (len(vae.config.block_out_channels) - 1)


def _latents(vae: Any, pixels: Tensor) -> Tensor:
    mode: Tensor = vae.encode(pixels.to(vae.dtype)).latent_dist.mode()
    latents: Tensor = (mode - shift_of(vae)) * vae.config.scaling_factor
    return latents


def _autoencoder(place: str) -> Any:
    from diffusers import AutoModel

    sub = "vae" if (Path(place) / "model_index.json").is_file() else ""
    try:
        vae = pretrained.load_model(AutoModel, place, subfolder=sub)
    except UserError as error:
        raise UserError(f"policy option vae: {error}") from error
    return vae.requires_grad_(False).eval()

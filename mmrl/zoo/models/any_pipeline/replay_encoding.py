"""Encodes pictures and videos for a replayed pipeline, by inverting what its own code does with
final latents before its autoencoder decodes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.policies.diffusion.pipeline_folder import media_of, on_white, rounding
from mmrl.zoo.models.any_pipeline.replay import Reached

DIGIT = 1 << 10  # range of the integers in a probe, exact in half precision
APART = 1e-3  # of codes and of pixels, in 0..1
Finish = Callable[[Tensor], Any]  # final latents [1, *] -> what the pipeline returns


class Layout(NamedTuple):
    """The map from latents to the autoencoder's codes [1, *]: code j is ``shift[j] + scale[j] *
    latents.flatten()[place[j]]``. Pipelines only unpack, standardise and transpose."""

    shape: torch.Size
    place: Tensor
    scale: Tensor
    shift: Tensor

    def codes(self, latents: Tensor) -> Tensor:
        """Compute the autoencoder's codes of latents [1, *]."""
        flat = latents.flatten()[self.place]
        return (self.shift + self.scale * flat).view(self.shape)

    def latents(self, codes: Tensor, shape: torch.Size) -> Tensor:
        """Compute the latents, of a shape [1, *], that have these codes."""
        flat = (codes.flatten() - self.shift) / self.scale
        return torch.empty_like(flat).scatter_(0, self.place, flat).view(shape)


class MediaEncoder:
    """Encodes media to the final latents from which a pipeline would decode them.

    The map from latents to codes is found by decoding latents whose values encode their positions,
    and tested on others. UserError where that fails.
    """

    def __init__(self, pipe: Any, finish: Finish, latents: Tensor):
        self.name = type(pipe).__name__
        self.vae: Any = getattr(pipe, "vae", None) or getattr(pipe, "movq", None)
        self.settings: dict[str, Any] = {}  # arguments of the pipeline's call of decode
        self.by_frame = False  # whether the frames of a video are decoded as pictures
        self.opacity = False  # whether its pictures have an alpha channel
        if not (hasattr(self.vae, "encode") and hasattr(self.vae, "decode")):
            raise self._unknown("it has no autoencoder called vae")
        self.finish = finish
        self.shape = latents.shape
        self.layout = self._layout(latents)
        self._try(latents)

    def encode(self, media: Tensor) -> Tensor:
        """Encode media [1, *] in 0..1 to the autoencoder's most likely latents [1, *]."""
        pixels = (2 * media - 1).to(next(self.vae.parameters()).dtype)
        if self.opacity:
            pixels = torch.cat([pixels, torch.ones_like(pixels[..., :1, :, :])], -3)
        if self.by_frame:
            pixels = pixels[0]
        elif len(self.layout.shape) == 5:  # for a video autoencoder a picture is one frame
            pixels = pixels.transpose(1, 2) if media.ndim == 5 else pixels[:, :, None]
        encoded = self.vae.encode(pixels)
        spread = getattr(encoded, "latent_dist", None)
        if spread is None:
            codes = encoded.latent if hasattr(encoded, "latent") else encoded.latents
        else:
            codes = spread.mode()
        if codes.shape != self.layout.shape:
            raise self._unknown(
                f"its autoencoder encodes {tuple(media.shape[1:])} to {tuple(codes.shape[1:])}, "
                f"and decodes {tuple(self.layout.shape[1:])}; height, width and num_frames of "
                "policy option call set the size"
            )
        return self.layout.latents(codes.to(self.layout.scale), self.shape)

    def _layout(self, latents: Tensor) -> Layout:
        """Find the layout by four runs of the pipeline's decoding."""
        count = latents.numel()
        number = torch.arange(count, device=latents.device)

        def probe(numbers: Tensor) -> Tensor:
            return self._codes_of(numbers.to(latents).view_as(latents))

        zeros = probe(torch.zeros_like(number))
        if zeros.numel() != count:
            raise self._unknown(f"it decodes {zeros.numel()} numbers of {count} latents at once")
        shift = zeros.flatten()
        scale = probe(torch.ones_like(number)).flatten() - shift
        low, high = (
            ((probe(digits).flatten() - shift) / scale).round().nan_to_num(-1).long()
            for digits in (number % DIGIT, number // DIGIT)
        )
        place = low + DIGIT * high
        if not torch.equal(place.sort().values, number):
            raise self._unknown("it does more with latents than to move and to scale them")
        return Layout(zeros.shape, place, scale, shift)

    def _try(self, latents: Tensor) -> None:
        """Compare with the pipeline on unseen latents."""
        codes = self._codes_of(latents)
        ours = self.layout.codes(latents.to(codes))
        scale = float(codes.abs().max().clamp(min=1))
        if not float((codes - ours).abs().max()) <= APART * scale:
            raise self._unknown("it does more with latents than to move and to scale them")
        codes = codes.to(next(self.vae.parameters()).dtype)
        pixels = self.vae.decode(codes, **(self.settings | {"return_dict": False}))[0]
        media = media_of(self.finish(latents), self.name)
        near = APART + rounding(media)
        for arranged in _arranged(pixels, media.ndim):
            ours = on_white((arranged / 2 + 0.5).clamp(0, 1))
            if media.shape == ours.shape and float((media - ours).abs().max()) <= near:
                self.by_frame = pixels.ndim < media.ndim
                self.opacity = arranged.shape[-3] == 4
                return
        raise self._unknown("it does more with what is decoded than to bring it to 0..1")

    def _codes_of(self, latents: Tensor) -> Tensor:
        """Return what the pipeline passes to its autoencoder's decode."""

        decoded: list[Tensor] = []

        def decode(codes: Tensor, *_: Any, **settings: Any) -> Any:
            decoded.append(codes.detach().float())
            self.settings = settings
            raise Reached(None)

        plain = self.vae.__dict__["decode"]  # of pipeline_folder
        self.vae.__dict__["decode"] = decode
        try:
            self.finish(latents)
        finally:
            self.vae.__dict__["decode"] = plain
        if not decoded:
            raise self._unknown("its autoencoder is not asked to decode")
        return decoded[0]

    def _unknown(self, why: str) -> UserError:
        return UserError(
            f"{self.name} takes no pictures or videos of others, since the way from them to its "
            f"latents is not known: {why}"
        )


def _arranged(pixels: Tensor, ndim: int) -> list[Tensor]:
    """Return the possible layouts of decoded ``pixels`` as pictures [1, C, H, W] or videos [1, F,
    C, H, W], of ``ndim`` axes: videos come as [1, C, F, H, W], as they are, or as pictures."""
    if pixels.ndim == 4:
        return [pixels if ndim == 4 else pixels[None]]
    ways = [pixels.transpose(1, 2), pixels]
    return [way[:, 0] for way in ways] if ndim == 4 else ways

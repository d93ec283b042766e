"""Trains masked language models whose vocabulary also holds image codes: MMaDA-like models as image
generators."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.core import pretrained
from mmrl.core.contract import Pictures, returned
from mmrl.core.errors import UserError
from mmrl.core.numbers import Count, Steps
from mmrl.core.registry import POLICIES, import_name, locate
from mmrl.core.types import Media, Prompt, Query, Rollout
from mmrl.policies.base import MediaFormat, Precision
from mmrl.policies.contracts import EncodesMedia
from mmrl.policies.demonstrations import encoded, placed_rows
from mmrl.policies.diffusion.text_encoding import texts_of
from mmrl.policies.masked.policy import MaskedDiffusion
from mmrl.zoo.models.masked.amused import codes_of
from mmrl.zoo.models.masked.masked_lm import MaskedLM, sizes_of
from samplers.batching import chunks

SPECIAL = re.compile(r"<\|[^<>|\s]+\|>|</?[A-Za-z_]\w*>")
Decoder = Callable[[Tensor], Tensor]  # codes [B, h, w] -> images [B, 3, H, W] in 0..1, or bytes


@POLICIES.register("masked_image_lm")
class MaskedImageLM(MaskedLM, EncodesMedia):
    """Trains masked language models that draw: text and image codes in one vocabulary (MMaDA).

    The protocol: model and tokenizer as for ``masked_lm``; codes 0 .. ``codes`` - 1 are the ids
    from ``first`` on; the input is ``prompt`` with the text in it, side x side codes row by row,
    and ``after``. ``decoder`` makes pictures of codes: a diffusers folder of a VQModel, or
    ``file.py:build``, a function without arguments that returns one.
    """

    capabilities = replace(MaskedDiffusion.capabilities, makes="image")
    not_options = (*MaskedLM.not_options, "max_new_tokens", "block", "block_causal")

    def __init__(
        self,
        path: str,
        decoder: str,
        first: Annotated[int, Ge(0)],
        codes: Count,
        side: Count = 32,
        prompt: str = "{text}",
        after: str | None = None,
        special_tokens: Mapping[str, int] | None = None,
        steps: Steps = 12,
        mask: int | None = None,
        dtype: Precision = "float32",
        remote_code: bool = False,
        **options: Any,
    ):
        """Load the model. path: folder or hub id of model and tokenizer. decoder: a diffusers
        folder of a VQModel, or ``file.py:build``, whose function makes images [B, 3, H, W] in 0..1
        of codes [B, h, w]. first: id of code 0 (MMaDA: 126349). codes: how many (MMaDA: 8192).
        side: tokens of a side. prompt: the input before an image, with {text}. after: the input
        after it. special_tokens: ids, by name, of special tokens in the two that the tokenizer does
        not know. steps: passes. mask: id of the mask token; None: the tokenizer's. dtype: of the
        frozen weights. remote_code: run the Python code of the model's own repository."""
        if "{text}" not in prompt:
            raise UserError(
                f"policy option prompt must hold {{text}}, where a prompt's text "
                f"goes; it is {prompt!r}"
            )
        super().__init__(
            path,
            side * side,
            steps=steps,
            mask=mask,
            dtype=dtype,
            remote_code=remote_code,
            **options,
        )
        # states hold codes, and one more number for hidden ones
        vocabulary = sizes_of(self.net)[1]
        if first + codes > vocabulary:
            raise UserError(
                f"policy options first and codes: the model has the ids 0 to {vocabulary - 1}, and "
                f"codes would be {first} to {first + codes - 1}"
            )
        self.mask_id = codes
        self.end = None
        self.first = first
        self.codes = codes
        self.side = side
        self.prompt = prompt
        self.special_tokens = dict(special_tokens or {})
        _check_special(f"{prompt} {after or ''}", self.special_tokens, self.tokenizer)
        beyond = [name for name, i in self.special_tokens.items() if not 0 <= i < vocabulary]
        if beyond:
            raise UserError(
                f"policy option special_tokens: {beyond[0]} has the id "
                f"{self.special_tokens[beyond[0]]}; the model has the ids 0 to {vocabulary - 1}"
            )
        self.suffix = self._tokens(after, add_special_tokens=False) if after else []
        self.codec = _decoder(decoder)
        known = isinstance(self.codec, Codec)
        self.pictures = Pictures(f"policy option decoder {decoder!r}", known)
        if isinstance(self.codec, Codec):
            self.media = MediaFormat((side * self.codec.factor, side * self.codec.factor))

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Encode the prompts, followed by the empty one, with the same padding."""
        rows = self.padded_ids([self._ids(text) for text in [*texts_of(prompts), ""]])
        last = {key: value[-1:] for key, value in rows.items()}
        return {key: value[:-1] for key, value in rows.items()} | {"uncond": last}

    def _ids(self, text: str) -> list[int]:
        return self._tokens(self.prompt.replace("{text}", text))

    def _tokens(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Where ``special_tokens`` are named they get their ids, and the
        tokenizer adds no others."""
        named = self.special_tokens
        if not named:
            ids: list[int] = self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids
            return ids
        pieces = re.split(f"({'|'.join(map(re.escape, named))})", text)
        known = ([named[piece]] if piece in named else self._plain(piece) for piece in pieces)
        return [token for ids in known for token in ids]

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids if text else []
        return ids

    def empty(self, point: Query) -> Any:
        return point.cond["uncond"]

    def written(self, ids: Tensor) -> Tensor:
        return torch.where(ids == self.mask_id, self.hole, self.first + ids)

    def logits(self, ids: Tensor, cond: dict[str, Any]) -> Tensor:
        """Return the logits of image codes, [B, L, codes]."""
        return super().logits(ids, cond)[..., self.first : self.first + self.codes]

    def _warped(self, logits: Tensor) -> Tensor:
        return MaskedDiffusion._warped(self, logits)

    def answer_ids(self, answers: Sequence[Any]) -> tuple[Tensor, Tensor]:
        samples, present = encoded(self, answers)
        blank = torch.full((len(answers), self.length), self.mask_id, device=self.device)
        return placed_rows(samples, present, blank), present

    @torch.no_grad()
    def encode_media(self, media: Tensor) -> Tensor:
        encode = getattr(self.codec, "encode", None)
        if encode is None:
            raise UserError(
                "policy option decoder: to learn from pictures it must have a method encode, "
                "images [B, 3, H, W] in 0..1 to codes [B, L]; a VQModel of diffusers has it"
            )
        codes: Tensor = encode(media.clone()).flatten(1)
        returned(codes, "the decoder's encode", B_L=(len(media), self.length))
        if int(codes.max()) >= self.codes or int(codes.min()) < 0:
            raise UserError(
                f"the decoder's encode gave codes {int(codes.min())} to {int(codes.max())}; policy "
                f"option codes says that there are {self.codes}, from 0 on"
            )
        return codes

    @torch.no_grad()
    def decode(self, rollout: Rollout) -> Media:
        """Decode to images [B, 3, H, W] in 0..1."""
        ids = rollout.sample.unflatten(1, (self.side, self.side))
        parts = chunks(len(ids), self.pass_sizes.rows or len(ids))
        return torch.cat([self.pictures(self.codec, ids[part]) for part in parts])


def _check_special(text: str, named: Mapping[str, int], tokenizer: Any) -> None:
    """Raise UserError where a text holds a special token, such as <|soi|>, that has no id."""
    known = tokenizer.get_vocab()
    for name in SPECIAL.findall(text.replace("{text}", " ")):
        if name not in named and name not in known:
            raise UserError(
                f"policy options prompt and after: the tokenizer has no token {name!r}, and would "
                f"read it as plain text; give its id by special_tokens: {{{name!r}: ID}}, as the "
                f"model's own code has it"
            )


class Codec:
    """Turns codes into pictures, and pictures into codes, by a VQModel of diffusers."""

    def __init__(self, vae: Any):
        self.vae = vae
        self.factor = 2 ** (len(vae.config.block_out_channels) - 1)  # pixels a code, along a side

    def __call__(self, ids: Tensor) -> Tensor:
        shape = (*ids.shape, self.vae.config.latent_channels)
        vae = self.vae.to(ids.device)
        images: Tensor = vae.decode(ids, force_not_quantize=True, shape=shape).sample
        return images

    def encode(self, images: Tensor) -> Tensor:
        """Encode images [B, 3, H, W] in 0..1 to codes [B, h w]."""
        return codes_of(self.vae.to(images.device), images)


def _decoder(name: str) -> Decoder:
    if ":" in name and not Path(name).exists() and not name.startswith("world:"):
        built: Decoder = import_name(name, "decoder")()
        return built
    from diffusers import VQModel

    try:
        vae = pretrained.load_model(VQModel, locate(name))
    except UserError as error:
        raise UserError(f"policy.masked_image_lm.decoder: {error}") from error
    return Codec(vae.requires_grad_(False).eval())

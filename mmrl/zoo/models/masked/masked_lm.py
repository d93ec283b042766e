"""Trains masked language models that write text by unmasking: LLaDA, LLaDA2, MMaDA's text, Dream,
BERT-like models of transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core import pretrained
from mmrl.core.broken_rows import BrokenRows
from mmrl.core.errors import UserError
from mmrl.core.host import sent
from mmrl.core.libraries import torch_dtype
from mmrl.core.numbers import Count, Steps
from mmrl.core.registry import POLICIES, locate
from mmrl.core.types import Completion, Media, Point, Prompt, Query, Rollout
from mmrl.policies.base import Precision
from mmrl.policies.contracts import Exports, WritesText
from mmrl.policies.diffusion.text_encoding import texts_of
from mmrl.policies.masked.policy import MaskedDiffusion
from mmrl.zoo.models import local_code
from mmrl.zoo.models.masked import published
from samplers.noise import Rng


@POLICIES.register("masked_lm")
class MaskedLM(MaskedDiffusion, WritesText, Exports):
    """Trains masked language models, which write text block after block (semi-autoregressive).

    LLaDA, MMaDA and Dream are read as published, without their code (``published.py``). The
    protocol for others: transformers' auto classes load a model and a tokenizer of the folder,
    and ``model(input_ids [B, L], attention_mask=[B, L]).logits`` [B, L, V] is bidirectional,
    position i for token i. With ``block_causal`` (LLaDA2, diffusers' LLaDA2Pipeline) blocks are
    counted from the prompt's first token, the model also gets ``position_ids`` [B, L], and a block
    attends to itself and to earlier ones.
    """

    capabilities = replace(MaskedDiffusion.capabilities, makes="text")
    net: Any  # of transformers
    not_options = (*MaskedDiffusion.not_options, "loaded")
    attention = (
        *("q_proj", "k_proj", "v_proj", "o_proj", "attn_out", "query", "key", "value"),
        *("query_key_value", "attention.dense"),  # LLaDA2
    )

    def __init__(
        self,
        path: str,
        max_new_tokens: Count = 256,
        block: Count | None = None,
        steps: Steps = 128,
        mask: int | None = None,
        dtype: Precision = "float32",
        remote_code: bool = False,
        block_causal: bool = False,
        code: str | None = None,
        loaded: tuple[Any, Any] | None = None,
        **options: Any,
    ):
        """Load the model. path: folder or hub id of model and tokenizer. max_new_tokens: of every
        answer. block: tokens finished before the next ones are begun; None: all at once.
        block_causal: blocks are LLaDA2's. steps: passes, the same number for each block. mask: id
        of the mask token (LLaDA: 126336); None: the tokenizer's. dtype: of the frozen weights.
        remote_code: run the Python code of the model's own repository, or ``code``. code:
        ``file.py:build``, a function of path that returns tokenizer and model, for repositories
        that transformers' auto classes do not load. loaded: both, where another policy has them."""
        self.place = locate(path)
        block = block or max_new_tokens
        blocks = max_new_tokens // block
        if max_new_tokens % block or steps % blocks:
            raise UserError(
                f"policy options: block {block} must divide max_new_tokens {max_new_tokens}, and "
                "its "
                f"{blocks} blocks {steps} steps"
            )
        if loaded is None:
            loaded = load(self.place, torch_dtype(dtype), remote_code, code)
        self.tokenizer, net = loaded
        causal = "AutoModelForCausalLM" in (
            getattr(getattr(net, "config", None), "auto_map", None) or {}
        )
        self.auto_class = "AutoModelForCausalLM" if causal else "AutoModelForMaskedLM"
        mask_id = self.tokenizer.mask_token_id if mask is None else mask
        if mask_id is None:
            raise UserError(
                f"the tokenizer of {path!r} knows no mask token: give its id as policy option mask"
            )
        self.context_length, vocabulary = sizes_of(net)
        if mask_id >= vocabulary:
            raise UserError(
                f"policy option mask: the model of {path!r} has the ids 0 to {vocabulary - 1}, not "
                f"{mask_id}"
            )
        self.end = self.tokenizer.eos_token_id
        self.hole = mask_id  # the network's input for a hidden token
        self.suffix: list[int] = []  # tokens after every answer
        super().__init__(net, max_new_tokens, mask_id, steps=steps, blocks=blocks, **options)
        self.report.code = local_code.files_of(net) if remote_code else {}
        self.report.notes = local_code.note(self.report.code)
        self.block_causal = block_causal
        if block_causal:  # the prompt ends inside a block, so an answer may touch one more
            self.passes += self.turns

    def admit(self, prompts: list[Prompt]) -> list[Prompt]:
        """Refuse prompts that are longer than the model's places hold."""
        problems = {}
        for place, prompt in enumerate(prompts if self.context_length else ()):
            try:
                self._admitted(self._ids(texts_of([prompt])[0]))
            except UserError as error:
                problems[place] = (
                    f"{prompt['origin']}: {error}" if "origin" in prompt else str(error)
                )
        if problems:
            raise BrokenRows(problems, len(prompts))
        return super().admit(prompts)

    def encode(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Return the prompts padded on the right [P, L] and their lengths [P]."""
        return self.padded_ids([self._ids(text) for text in texts_of(prompts)])

    def _admitted(self, ids: list[int]) -> list[int]:
        """Return the ids of a prompt; UserError where they and an answer are too many."""
        needed = len(ids) + self.length + len(self.suffix)
        if self.context_length and needed > self.context_length:
            raise UserError(
                f"prompt {self.tokenizer.decode(ids)[:60]!r}: its {len(ids)} tokens and the "
                f"{needed - len(ids)} behind it are more than the model's {self.context_length} "
                f"places; shorten it, or let answers be shorter"
            )
        return ids

    def padded_ids(self, ids: list[list[int]]) -> dict[str, Tensor]:
        """Return ``ids`` [P, L] and ``size`` [P]."""
        width = max(len(self._admitted(row)) for row in ids)
        padded = [row + [self.hole] * (width - len(row)) for row in ids]
        # without a token there is no number to tell the type by
        rows = torch.tensor(padded, dtype=torch.long, device=self.device)
        return {"ids": rows, "size": torch.tensor([len(row) for row in ids], device=self.device)}

    def _ids(self, text: str) -> list[int]:
        if not self.tokenizer.chat_template:
            encoding = self.tokenizer(text)
        else:
            turn = [{"role": "user", "content": text}]
            encoding = self.tokenizer.apply_chat_template(
                turn, add_generation_prompt=True, return_dict=True
            )
        ids: list[int] = encoding["input_ids"]
        return ids

    def logits(self, ids: Tensor, cond: dict[str, Any]) -> Tensor:
        """Compute the logits with each answer directly after its prompt, so that no row depends on
        the length of another's prompt."""
        prompt = cond["ids"]
        size = cond["size"][:, None]
        behind = sent(torch.tensor(self.suffix, dtype=ids.dtype), ids.device).expand(len(ids), -1)
        behind = torch.cat([self.written(ids), behind], 1)
        place = torch.arange(prompt.shape[1] + behind.shape[1], device=ids.device)[None]
        answer_ids = behind.gather(1, (place - size).clamp(0, behind.shape[1] - 1))
        padded = torch.nn.functional.pad(prompt, (0, behind.shape[1]), value=self.hole)
        visible = place < size + behind.shape[1]
        positions = {}
        if self.block_causal:
            block = self.block_of(cond, torch.arange(len(ids), device=ids.device))
            # the block of the first hidden token is being written
            last = block.masked_fill(ids != self.mask_id, self.passes).amin(1, keepdim=True)
            visible &= place // self.block <= size // self.block + last
            positions = {"position_ids": place.expand(len(ids), -1)}
        logits: Tensor = self.active()(
            torch.where(place < size, padded, answer_ids),
            attention_mask=visible.long(),
            **positions,
        ).logits
        answer = (size + torch.arange(self.length, device=ids.device))[..., None].expand(
            -1, -1, logits.shape[-1]
        )
        return logits.gather(1, answer)

    def block_of(self, cond: dict[str, Any], rows: Tensor) -> Tensor:
        """Number the blocks from the answer's first token; of LLaDA2 from the block in which the
        prompt ends."""
        if not self.block_causal:
            return super().block_of(cond, rows)
        before = cond["size"].index_select(0, rows)[:, None] % self.block
        block: Tensor = (before + torch.arange(self.length, device=rows.device)) // self.block
        return block

    def at(self, rollout: Rollout, hide: Tensor, score: Tensor | None = None) -> Point:
        if self.block_causal:
            raise UserError(
                "policy option block_causal: a pass sees one hidden block, and this objective or "
                "its estimator hides tokens of several; use objective policy_gradient, or masked "
                "with estimator: trajectory"
            )
        return super().at(rollout, hide, score)

    def written(self, ids: Tensor) -> Tensor:
        """Return ids [B, L] of the network's vocabulary, of a state [B, L]."""
        return ids

    def _warped(self, logits: Tensor) -> Tensor:
        """Exclude the mask token, which is never an answer."""
        banned = torch.arange(logits.shape[-1], device=logits.device) == self.mask_id
        return super()._warped(logits).masked_fill(banned, -torch.inf)

    def empty(self, point: Query) -> Any:
        """Mask every prompt entirely, as LLaDA guides."""
        return point.cond | {"ids": torch.full_like(point.cond["ids"], self.hole)}

    def corrupted(self, cond: dict[str, Any], share: float, rng: Rng) -> dict[str, Any]:
        ids = cond["ids"]
        draw = rng.uniform(torch.arange(len(ids), device=ids.device), (ids.shape[1],))
        return cond | {"ids": torch.where(draw < share, self.hole, ids)}

    def answer_ids(self, answers: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return token ids, the end token behind the text and in all places that are left."""
        ids = [None if text is None else self._closed(text) for text in answers]
        blank = [self.hole] * self.length
        present = torch.tensor([row is not None for row in ids], device=self.device)
        rows = [blank if row is None else row for row in ids]
        return torch.tensor(rows, device=self.device), present

    def _closed(self, text: str) -> list[int] | None:
        """Return the tokens of an answer; None if there are more than an answer may have."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ends = [] if self.end is None else [self.end]
        ids = ids + ends
        room = self.length - len(ids)
        # without an end token an answer has as many tokens as there are
        if room < 0 or self.mask_id in ids or (room and not ends):
            return None
        return ids + ends * room

    def text_of(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _rollout(self, sampled: Rollout, steps: list[tuple[Tensor, ...]]) -> Rollout:
        """Assemble the rollout; its mask leaves out blocks behind that of the end token: they are
        never read, and no block before them sees them."""
        rollout = super()._rollout(sampled, steps)
        block = self.block_of(rollout.cond, rollout.group)
        read = self.read(rollout.sample, block)
        return rollout.replace(
            mask=rollout.mask & (read.repeat(1, self.passes) if self.chooses else read)
        )

    def read(self, ids: Tensor, block: Tensor) -> Tensor:
        """Mark the tokens up to the end of the block with the end token."""
        last = block.expand_as(ids).gather(1, self._size(ids)[:, None] - 1)
        return block <= last

    def _size(self, ids: Tensor) -> Tensor:
        """Count the tokens [B] up to the first end token, inclusive."""
        if self.end is None:
            return torch.full((len(ids),), self.length, device=ids.device)
        place = torch.arange(1, self.length + 1, device=ids.device)
        return torch.where(ids == self.end, place, self.length).amin(1)

    def decode(self, rollout: Rollout) -> Media:
        """Return the B answers up to the end token."""
        sizes = self._size(rollout.sample).tolist()
        return [
            self._completion(ids[:size].tolist(), rollout[i : i + 1])
            for i, (ids, size) in enumerate(zip(rollout.sample, sizes))
        ]

    def _completion(self, ids: list[int], row: Rollout) -> Completion:
        text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
        certain = row.tokens.self_certainty
        return Completion(
            text,
            len(ids),
            ids[-1] == self.end,
            row.logprob[row.mask].mean().item(),
            None if certain is None else certain[row.mask].mean().item(),
        )

    def export(self, folder: Path) -> None:
        """Save the adapter, or the whole model, and the tokenizer, as transformers loads them; of a
        model that is none of transformers', ``model.safetensors``."""
        local_code.save(self.net, folder)
        published.keep_config(self.net, folder)
        self.tokenizer.save_pretrained(folder)


def load(
    place: str, dtype: torch.dtype, remote_code: bool, code: str | None = None
) -> tuple[Any, Any]:
    """Load tokenizer and model by transformers' auto classes, or by a user's ``code``."""
    if code is not None:
        tokenizer, net = local_code.build(code, remote_code, place)
        net.register_forward_hook(_in_the_open)
        return tokenizer, net.to(dtype)
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

    published.register()
    config = pretrained.load_processor(AutoConfig, place, remote_code=remote_code)
    auto_map = getattr(config, "auto_map", None) or {}
    autos = (AutoModelForMaskedLM, AutoModelForCausalLM, AutoModel)
    offered = [auto for auto in autos if auto.__name__ in auto_map]
    auto = offered[0] if offered and not published.is_known(config) else AutoModelForMaskedLM
    net = pretrained.load_model(auto, place, remote_code=remote_code, config=config, dtype=dtype)
    return published.load_tokenizer(place, remote_code), net


def sizes_of(net: nn.Module) -> tuple[int | None, float]:
    """Return how many places and how many ids a model has, as far as it says: None, infinity."""
    from transformers import PreTrainedModel

    if not isinstance(net, PreTrainedModel):
        return None, math.inf
    try:
        ids = net.get_input_embeddings().num_embeddings
    except NotImplementedError:  # a folder's own code need not say
        ids = math.inf
    return getattr(net.config, "max_position_embeddings", None), ids


def _in_the_open(net: nn.Module, inputs: Any, output: Any) -> Any:
    """Expose logits that a user's code returns in a custom object to DDP and FSDP2, which take
    weights that lead to no tensor they find for unused."""
    from transformers.modeling_outputs import MaskedLMOutput

    known = isinstance(output, (Tensor, tuple, dict))
    return output if known else MaskedLMOutput(logits=output.logits)

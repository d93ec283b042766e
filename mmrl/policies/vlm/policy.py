"""Vision-language models: any image-text-to-text model of transformers, by its real classes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Gt, Le
from torch import Tensor, nn

from samplers.batching import chunks
from samplers.noise import Rng
from samplers.warp import Warp

from ... import distributed
from ...options import Count
from ...registry import POLICIES, UserError, locate
from ...types import Completion, Media, Point, Prompt, Rollout, tree_map
from ..base import NetPolicy, ParameterGroup
from ..lora import Lora
from .answers import AnswerTokens
from .budgets import admit
from .engines import generate_plainly
from .families import Coords, family_of, modules_of, part_of
from .generate import Answers, Ending, generate
from .inputs import Inputs
from .media import Budgets
from .parts import Parts, beside_adapters, groups_of, merged, set_trainable, summary
from .prefix import VERIFIED, Prefix, SharedPrefix, positions, sharded, shareable
from .scores import Scored

Storage = Literal["float32", "bfloat16", "float16", "auto"]
Encoded = dict[str, Tensor]


@POLICIES.register("vlm")
class VLM(NetPolicy):
    """Vision-language models: images, several images, video or text in, text out; any folder or hub id."""

    makes = "text"
    adjacent = True
    decisions = "categorical"

    def __init__(
        self,
        path: str,
        tokens: Count = 512,
        temperature: Annotated[float, Gt(0)] = 1.0,
        top_k: Count | None = None,
        top_p: Annotated[float, Gt(0), Le(1)] = 1.0,
        stop: Sequence[str] = (),
        greedy: bool = True,
        certainty: bool = False,
        budgets: Budgets | None = None,
        coords: Coords | None = None,
        share: Literal["auto", "prefix", "none"] = "auto",
        dtype: Storage = "float32",
        attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa",
        lora: Lora | int | None = None,
        train: Parts | None = None,
        **options: Any,
    ):
        """path: folder, hub id or world:NAME. tokens: an answer's largest number. temperature, top_k, top_p: of
        sampling and of scoring. stop: strings after which an answer ends. greedy: evaluation takes the likeliest
        token. certainty: record how sure the model is of its answers, for the reward self_certainty. budgets: what
        images, videos and prompts may cost. coords: the space of the model's coordinates, where its family's is
        unknown. share: prefix reads a prompt once for its whole group, none once for every answer, auto is prefix
        where that was compared, or can be, and agrees. dtype: of the weights. attention: transformers' implementation.
        lora: adapters in the language model. train: instead, how language model, projector and vision tower are each
        trained; by default all fully."""
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.place = locate(path)
        hf = _loaded(AutoModelForImageTextToText, self.place, dtype=_dtype(dtype), attn_implementation=attention)
        processor, family = _loaded(AutoProcessor, self.place), family_of(hf.config, coords)
        self.inputs = Inputs(processor, hf.config, budgets or Budgets(), family, hf.generation_config)
        self.warp = Warp(temperature, top_k, top_p, self.inputs.suppressed)
        self.ending = Ending(tokens, self.inputs.stops, self.inputs.pad, tuple(stop), self.inputs.decode, certainty)
        self.witness: Encoded | None = None
        self.greedy, self.entropies, self.sharing = greedy, False, share
        self.truth: Callable[[Prompt], str | None] | None = None  # writes one answer of every group while it is set
        if lora is not None and train is not None:
            raise UserError("policy options lora and train exclude each other; write train: {language: lora, ...}")
        if isinstance(lora, int):
            lora = Lora(lora)
        if lora is not None and lora.targets is None:
            lora = Lora(lora.rank, lora.alpha, [n for n in modules_of(hf, "language") if not n.endswith("lm_head")])
        super().__init__(SharedPrefix(hf, share=share != "none"), lora=lora, **options)
        self.parts = train
        if lora is None:
            set_trainable(hf, train or Parts("full", "full", "full"))
        self.sees = any(p.requires_grad and part_of(n) != "language" for n, p in hf.named_parameters())
        self.notes = (*family.unverified(), summary(self.net))

    def rollout(self, prompts: list[Prompt], copies: int, rng: Rng) -> Rollout:
        taken = [self.inputs.take(prompt) for prompt in prompts]
        cond = [self._placed(encoded) for encoded, _ in taken]
        self._check_sharing(cond)
        row = rng.rows(len(prompts), copies).to(self.device)
        group = torch.arange(len(prompts), device=self.device).repeat_interleave(copies)
        size = self.chunk(len(row), lambda n: self._try(cond, group[:n]))
        parts = [self._answer(cond, group, row, rng, whole, size) for whole in self._blocks(len(prompts), copies, size)]
        answers = [answer for part in parts for answer in part]
        ids, mask, logprob = (torch.cat([getattr(a, name) for a in answers]) for name in ("ids", "mask", "logprob"))
        certainty = torch.cat([a.certainty for a in answers]) if self.ending.certain else None
        order = torch.arange(ids.shape[1], device=self.device).expand_as(ids)
        seen = tuple({**prompt, "view": view} for prompt, (_, view) in zip(prompts, taken, strict=True))
        found = Rollout(
            group=group, cond=cond, row=row, sample=ids, mask=mask, logprob=logprob, order=order, prompts=seen,
            certainty=certainty,
        )  # fmt: skip
        return found if self.truth is None else self._taught(found, copies, size)

    def parameter_groups(self) -> list[ParameterGroup]:
        return groups_of(self.net, self.parts)

    def admit(self, prompts: list[Prompt]) -> list[Prompt]:
        found = admit(prompts, self.inputs.budgets, self.inputs.measure)
        self.notes = (*self.notes, *found.notes)
        return found.prompts

    def path(self, rollout: Rollout) -> Iterator[Point]:
        yield Point(
            group=rollout.group, cond=rollout.cond, row=rollout.row, state=rollout.sample, target=rollout.sample,
            mask=rollout.mask, logprob=rollout.logprob, advantage=rollout.advantage, length=rollout.mask.sum(1),
            sampled=rollout.sampled, given=rollout.given,
        )  # fmt: skip

    def renoise(self, rollout: Rollout, rng: Rng, time: Tensor | None = None, shared: bool = False) -> Iterator[Point]:
        for point in self.path(rollout):
            yield point.replace(logprob=None)

    def dist(self, point: Point) -> AnswerTokens:
        where = point.mask
        if not where.any():  # every process makes its passes, also those that train nothing
            where = where.clone()
            where[0, 0] = True
        hidden, scored = self._score(self.active(), point.cond, point.group, point.target, where)
        return AnswerTokens(self, point, where, hidden, scored)

    def enable_gradient_checkpointing(self) -> None:
        self.net.enable_gradient_checkpointing()

    def limit(self, tokens: int) -> None:
        """From now on an answer has at most so many tokens."""
        self.ending = replace(self.ending, tokens=tokens)

    def decode(self, rollout: Rollout) -> Media:
        lengths = rollout.mask.sum(1)
        known = [rollout.logprob] + ([] if rollout.certainty is None else [rollout.certainty])
        means = torch.stack([(one * rollout.mask).sum(1) / lengths.clamp_min(1) for one in known], 1)
        begun = [prompt.get("prefill", "") for prompt in rollout.asked()]
        rows = zip(rollout.sample.tolist(), lengths.tolist(), means.tolist(), begun, strict=True)
        return [self._completion(ids[:n], mean, start) for ids, n, mean, start in rows]

    @contextmanager
    def evaluating(self, guidance: float | None = None) -> Iterator[None]:
        kept = self.warp
        if self.greedy:
            self.warp = Warp(temperature=0.0, suppressed=kept.suppressed)
        try:
            yield
        finally:
            self.warp = kept

    def export(self, folder: Path) -> None:
        """The model, or its adapter where nothing else was trained, with processor and chat template."""
        hf = self.net.hf
        if beside_adapters(hf):  # transformers saves a model with adapters as these alone
            whole = type(hf).from_pretrained(self.place, dtype=hf.dtype)
            whole.load_state_dict(merged(hf))
            hf = whole
        hf.save_pretrained(folder)
        self.inputs.save(folder)

    def _placed(self, encoded: Encoded) -> Encoded:
        """On the device, with its positions as ``places`` [1, S, axes]: they cost time and never change."""
        places = positions(self.net.hf, encoded)
        places = places[..., None] if places.ndim == 2 else places.permute(1, 2, 0)
        return tree_map(lambda tensor: tensor.to(self.device), encoded | {"places": places})

    def _batch(self, encoded: list[Encoded]) -> Encoded:
        """One left-padded batch, with ``position_ids`` [P, S] or [3, P, S].

        Of many processes all must pass something through the vision tower in every pass, or its gradients are waited
        for: where no prompt has an image, one more prompt that nobody answers brings one. On one process too, where
        the tower is trained: its gradient is then zero and not missing, which Adam does not take for the same.
        """
        needed = distributed.world()[1] > 1 or torch.is_grad_enabled() and self.sees
        if needed and not any(name.startswith("pixel_values") for one in encoded for name in one):
            self.witness = self.witness or self._placed(self.inputs.encode(blank_image()))
            encoded = [*encoded, self.witness]
        batch = self.inputs.collate([{k: v for k, v in one.items() if k != "places"} for one in encoded])
        length = batch["input_ids"].shape[1]
        places = [F.pad(one["places"], (0, 0, length - one["places"].shape[1], 0)) for one in encoded]
        found = torch.cat(places).permute(2, 0, 1)
        return batch | {"position_ids": found[0] if len(found) == 1 else found}

    def _collated(self, cond: list[Encoded], group: Tensor, each: bool) -> tuple[Encoded, Tensor]:
        """The prompts of ``group`` [B] as one batch, each once or (``each``) once a row, and where every row's is."""
        unique, rows = group.unique(return_inverse=True)
        if each:
            unique, rows = group, torch.arange(len(group), device=group.device)
        return self._batch([cond[i] for i in unique.tolist()]), rows

    def _score(
        self, net: nn.Module, cond: list[Encoded], group: Tensor, ids: Tensor, where: Tensor
    ) -> tuple[Tensor, Scored]:
        """Hidden states and log-probs of the tokens ``where`` holds."""
        inputs, rows = self._collated(cond, group, each=not self.net.share)
        return net("score", inputs, rows, ids, where, self.warp, self.entropies)

    @torch.no_grad()
    def _check_sharing(self, cond: list[Encoded]) -> None:
        """Of a family nobody has compared: whether a shared prompt gives the log-probs of separate passes."""
        if self.sharing != "auto":
            return
        self.sharing = "checked"
        if not shareable(self.net.hf):
            self.net.share = False
        elif self.net.config.model_type not in VERIFIED:
            group = torch.zeros(2, dtype=torch.long, device=self.device)
            ids = cond[0]["input_ids"][:, -5:].expand(2, -1)
            found = []
            for self.net.share in (False, True):
                found.append(self._score(self.net, cond, group, ids, torch.ones_like(ids, dtype=torch.bool))[1].logprob)
            apart = float((found[0] - found[1]).abs().max())
            self.net.share = apart < (1e-3 if self.net.hf.dtype == torch.float32 else 0.1)
        if not self.net.share:
            warnings.warn(
                f"{self.net.config.model_type}: prompts are read once for every answer, since sharing them is not "
                "exact in this family; set the policy's share to none to say so yourself",
                stacklevel=2,
            )

    def _blocks(self, prompts: int, copies: int, size: int) -> Iterator[slice]:
        """Prompts to read at once: as many as ``size`` rows answer, at least one."""
        return chunks(prompts, max(1, size // copies))

    def _answer(
        self, cond: list[Encoded], group: Tensor, row: Tensor, rng: Rng, prompts: slice, size: int
    ) -> Iterator[Answers]:
        """Answers to a block of prompts, which is read once, ``size`` rows at a time."""
        mine = ((group >= prompts.start) & (group < prompts.stop)).nonzero()[:, 0]
        busy = self._any_works if sharded(self.net) else None
        if not self.net.share:
            for part in chunks(len(mine), size):
                inputs, _ = self._collated(cond, group[mine[part]], each=True)
                yield generate_plainly(self.net, inputs, row[mine[part]], rng, self.warp, self.ending, busy)
            return
        prefix: Prefix = self.net("read", self._batch(cond[prompts]))
        for part in chunks(len(mine), size):
            at = mine[part]
            yield generate(self.net, prefix, group[at] - prompts.start, row[at], rng, self.warp, self.ending, busy)

    @torch.no_grad()
    def _taught(self, rollout: Rollout, copies: int, size: int) -> Rollout:
        """The last answer of every group gives way to the right one, with the log-probs that the policy gives it.

        Where nobody can write it, or it is longer than answers may be, the group keeps what was sampled.
        """
        last = torch.arange(copies - 1, len(rollout), copies, device=self.device)
        ids, mask, written = rollout.sample.clone(), rollout.mask.clone(), torch.zeros_like(rollout.group, dtype=bool)
        for row, prompt in zip(last.tolist(), rollout.prompts, strict=True):
            text = self.truth(prompt)
            tokens = None if text is None else self.inputs.tokens(text.removeprefix(prompt.get("prefill", "")))
            if tokens is not None and len(tokens) <= ids.shape[1]:
                ids[row], mask[row], written[row] = self.inputs.pad, False, True
                ids[row, : len(tokens)] = torch.tensor(tokens, device=self.device)
                mask[row, : len(tokens)] = True
        found, logprob = rollout.replace(sample=ids, mask=mask), rollout.logprob.clone()
        for part in chunks(len(last), size):  # every process makes equally many passes
            (point,) = self.path(found[last[part]])
            scored = self.dist(point).log_prob(point.target)
            logprob[last[part]] = torch.where(written[last[part], None], scored, logprob[last[part]])
        if found.certainty is not None:  # of what was sampled: nobody knows that of the answer in its place
            found = found.replace(certainty=found.certainty.masked_fill(written[:, None], torch.nan))
        return found.replace(logprob=logprob, given=written)

    def _any_works(self, here: bool) -> bool:
        return bool(distributed.all_max(torch.tensor(float(here), device=self.device)))

    def _try(self, cond: list[Encoded], group: Tensor) -> None:
        """What sampling these rows needs at most: no answer ends early."""
        inputs, rows = self._collated(cond, group, each=not self.net.share)
        endless = replace(self.ending, stops=(), strings=())
        if self.net.share:
            generate(self.net, self.net("read", inputs), rows, rows, Rng.of("try"), self.warp, endless)
        else:
            generate_plainly(self.net, inputs, rows, Rng.of("try"), self.warp, endless)

    def _completion(self, ids: list[int], known: list[float], begun: str = "") -> Completion:
        """The whole answer: what was written after what it ``begun`` with."""
        text, ending = self.inputs.decode(ids), self.ending
        stopped = bool(ids) and ids[-1] in ending.stops or any(s in text for s in ending.strings)
        return Completion(begun + text, len(ids), stopped, *known)


def blank_image() -> Prompt:
    from PIL import Image

    return {"text": "", "images": [Image.new("RGB", (64, 64))]}


def _loaded(auto: Any, place: str, **options: Any) -> Any:
    try:
        return auto.from_pretrained(place, **options)
    except (OSError, ValueError) as error:
        raise UserError(f"policy.vlm.path {place}: {auto.__name__} cannot load it: {error}") from error


def _dtype(name: str) -> Any:
    return name if name == "auto" else getattr(torch, name)

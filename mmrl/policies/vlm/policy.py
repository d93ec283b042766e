"""Vision-language models: any image-text-to-text model of transformers, by its real classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor

from samplers.batching import chunks
from samplers.noise import Rng
from samplers.warp import Warp

from ...options import Count
from ...registry import POLICIES, UserError, locate
from ...types import Completion, Media, Point, Prompt, Rollout
from ..base import ParameterGroup
from ..lora import Lora
from .budgets import admit
from .families import Coords, family_of, modules_of, part_of
from .generate import Ending
from .inputs import Inputs
from .media import Budgets
from .parts import Parts, beside_adapters, groups_of, merged, set_trainable, summary
from .passes import Passes, images_in
from .prefix import SharedPrefix
from .vision import quicken

Storage = Literal["float32", "bfloat16", "float16", "auto"]


@POLICIES.register("vlm")
class VLM(Passes):
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
        engine: Literal["own", "hf"] = "own",
        attention: Literal["sdpa", "eager", "flash_attention_2", "xformers"] = "sdpa",
        lora: Lora | int | None = None,
        train: Parts | None = None,
        **options: Any,
    ):
        """path: folder, hub id or world:NAME. tokens: an answer's largest number. temperature, top_k, top_p: of
        sampling and of scoring. stop: strings after which an answer ends. greedy: evaluation takes the likeliest
        token. certainty: record how sure the model is of its answers, for the reward self_certainty. budgets: what
        images, videos and prompts may cost. coords: the space of the model's coordinates, where its family's is
        unknown. share: prefix reads a prompt once for its whole group, none once for every answer, auto is prefix
        where that was compared, or can be, and agrees. dtype: of the weights. engine: what samples: own, or hf,
        transformers' generate, whose log-probs are kept beside those of the policy's own passes. attention:
        transformers' implementation; xformers: in towers of packed images, on CUDA, with sdpa elsewhere. lora:
        adapters in the language model. train: instead, how language model, projector and vision tower are each
        trained; by default all fully."""
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.place = locate(path)
        hf = _loaded(
            AutoModelForImageTextToText, self.place, dtype=_dtype(dtype), attn_implementation=_plain(attention)
        )
        if attention in ("sdpa", "xformers"):
            quicken(hf, xformers=attention == "xformers")
        processor, family = _loaded(AutoProcessor, self.place), family_of(hf.config, coords)
        self.inputs = Inputs(processor, hf.config, budgets or Budgets(), family, hf.generation_config)
        self.warp = Warp(temperature, top_k, top_p, self.inputs.suppressed)
        self.ending = Ending(tokens, self.inputs.stops, self.inputs.pad, tuple(stop), self.inputs.decode, certainty)
        self.greedy, self.sharing, self.engine = greedy, share, engine
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
        taken = [self._taken(prompt) for prompt in prompts]
        cond = [encoded for encoded, _ in taken]
        self.images += sum(map(images_in, cond))
        self._check_sharing(cond)
        row = rng.rows(len(prompts), copies).to(self.device)
        group = torch.arange(len(prompts), device=self.device).repeat_interleave(copies)
        size = self.chunk(len(row), lambda n: self._try(cond, group[:n]))
        answers = self._answers(cond, group, row, rng, size)
        order = torch.arange(answers.ids.shape[1], device=self.device).expand_as(answers.ids)
        seen = tuple({**prompt, "view": view} for prompt, (_, view) in zip(prompts, taken, strict=True))
        found = Rollout(
            group=group, cond=cond, row=row, sample=answers.ids, mask=answers.mask, logprob=answers.logprob,
            order=order, prompts=seen,
            certainty=answers.certainty,
        )  # fmt: skip
        if self.engine != "own":
            found = self._rescored(found, size)
        return found if self.truth is None else self._taught(found, copies, size)

    def measures(self) -> dict[str, float]:
        found = {"vlm/vision_passes": self.towered / self.images} if self.images else {}
        found |= {"engine/gap": sum(self.gaps) / len(self.gaps)} if self.gaps else {}
        self.images, self.towered, self.gaps = 0, 0, []
        return found

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

    @torch.no_grad()
    def _rescored(self, rollout: Rollout, size: int) -> Rollout:
        """What another engine sampled, with its log-probs as ``sampled`` and those of the policy's own passes."""
        parts = [rollout[part] for part in chunks(len(rollout), size)]
        scored = [self.dist(point).log_prob(point.target) for part in parts for point in self.path(part)]
        own = torch.cat(scored).to(rollout.logprob)
        self.gaps.append(float((own - rollout.logprob)[rollout.mask].abs().mean()))
        return rollout.replace(logprob=own, sampled=rollout.logprob)

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
        if found.sampled is not None:  # and no other engine sampled that one
            found = found.replace(sampled=torch.where(written[:, None], logprob, found.sampled))
        return found.replace(logprob=logprob, given=written)

    def _completion(self, ids: list[int], known: list[float], begun: str = "") -> Completion:
        """The whole answer: what was written after what it ``begun`` with."""
        text, ending = self.inputs.decode(ids), self.ending
        stopped = bool(ids) and ids[-1] in ending.stops or any(s in text for s in ending.strings)
        return Completion(begun + text, len(ids), stopped, *known)


def _loaded(auto: Any, place: str, **options: Any) -> Any:
    try:
        return auto.from_pretrained(place, **options)
    except (OSError, ValueError) as error:
        raise UserError(f"policy.vlm.path {place}: {auto.__name__} cannot load it: {error}") from error


def _plain(attention: str) -> str:
    """transformers' name of it, where all is as usual. Raises UserError if xformers is wanted and cannot run."""
    if attention != "xformers":
        return attention
    if not torch.cuda.is_available() or find_spec("xformers") is None:
        raise UserError(
            "policy option attention = xformers needs a CUDA device and the package xformers (pip install xformers); "
            "use sdpa"
        )
    return "sdpa"


def _dtype(name: str) -> Any:
    return name if name == "auto" else getattr(torch, name)

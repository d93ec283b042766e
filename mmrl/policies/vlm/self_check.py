"""Compares, before anything is trained, the passes of a policy with its model's own forward pass.

Some of the run's own prompts are answered with a few tokens, together and padded as in training,
and the recorded and re-scored log-probs are compared with one unpadded pass of the class over each
prompt and answer. Where they differ, simpler ways are tried, then the model is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.sharding import sharded
from mmrl.core.types import Prompt
from mmrl.policies.lora import casting_inputs
from mmrl.policies.vlm.audio import audios_of
from mmrl.policies.vlm.caches import shareable
from mmrl.policies.vlm.chat import videos_of
from mmrl.policies.vlm.engines.choice import EXTERNAL
from mmrl.policies.vlm.media import images_of
from mmrl.policies.vlm.prefix_sharing import SharedPrefix
from samplers.noise import Rng
from samplers.warp import Warp

if TYPE_CHECKING:
    from mmrl.policies.vlm.scoring import Encoded, Passes

PROMPTS = 3
LOOKED_AT = 256  # prompts of the data to choose from
TOKENS = 3  # per answer: the first from the prompt, the last two by a pass of several tokens
FAILS = (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError, AssertionError)


@dataclass(frozen=True)
class Way:
    """How passes are made: prompts ``shared`` by their answers, several ``together`` in a batch,
    ``cascade`` attention while sampling."""

    shared: bool = True
    together: bool = True
    cascade: bool = True

    def set(self, policy: Passes) -> None:
        policy.net.share = self.shared
        policy.net.cascades = self.cascade
        policy.inputs.family = replace(policy.inputs.family, alone=not self.together)

    def means(self, sharing: str) -> str:
        """Return the lines for the log, given the option ``sharing``."""
        sentences = []
        if not self.together:
            sentences.append(
                "every prompt is a batch of its own, since padding or other prompts beside it "
                "change what this class computes"
            )
        if not self.shared and sharing != "none":
            sentences.append(
                "prompts are read once for every answer, since sharing them is not exact with "
                "this class; set prefix_sharing: none to say so yourself"
            )
        return "; ".join(sentences)


USUAL = Way()
PLAINER = (
    Way(cascade=False),
    Way(together=False),
    Way(shared=False),
    Way(shared=False, together=False),
)


@dataclass(frozen=True)
class Gap:
    """Holds the maximum and mean distance, or bounds on it, of log-probs from the model's own, in
    nats."""

    largest: float = torch.inf
    mean: float = torch.inf

    @classmethod
    def of(cls, distances: Tensor) -> Gap:
        largest, mean = float(distances.max()), float(distances.mean())
        return cls() if mean != mean else cls(largest, mean)

    def within(self, bound: Gap) -> bool:
        return self.largest <= bound.largest and self.mean <= bound.mean

    def __str__(self) -> str:
        return f"{self.largest:.2g} nats (on average {self.mean:.2g})"


EXACT = Gap(1e-3, 1e-3)  # in float32


def rounded(dtype: torch.dtype) -> Gap:
    """Return the bound for passes in half precision: about four times the differences measured on
    tiny models of ten families (docs/vlm.md), in units of the precision."""
    step = torch.finfo(dtype).eps
    return Gap(32 * step, 4 * step)


@dataclass(frozen=True)
class Gaps:
    """Holds the distances of scored and recorded log-probs from the model's own, or why there are
    none."""

    scored: Gap = Gap()
    recorded: Gap = Gap()
    error: str = ""

    def within(self, bound: Gap) -> bool:
        return self.scored.within(bound) and self.recorded.within(bound)

    def __str__(self) -> str:
        return self.error or f"log-probs scored {self.scored} from it, sampled {self.recorded}"


def chosen(prompts: Sequence[Prompt], thresholds: bool = False) -> list[Prompt]:
    """Choose prompts for the comparison, deterministically: with images or clips where there are
    any, of different lengths. ``thresholds``: the class computes differently beyond some length, so
    the longest prompt of all data is included."""
    known = list(prompts if thresholds else prompts[:LOOKED_AT])
    shown = [p for p in known if _media(p)] or known
    ordered = sorted(shown, key=lambda p: len(str(p.get("messages") or p.get("text", ""))))
    places = {0, len(ordered) // 2, len(ordered) - 1}
    picked = [ordered[i] for i in sorted(places) if ordered]  # none where all rows are broken
    texts = [p for p in known if not _media(p)]
    if len(picked) == PROMPTS and texts and len(shown) < len(known):
        picked[1] = texts[0]  # include a question without an image
    return picked[:PROMPTS]


def fewest(cond: list[Encoded]) -> list[Encoded]:
    """Choose among encoded prompts: the shortest, the longest, and one between."""
    ordered = sorted(cond, key=lambda encoded: encoded["input_ids"].shape[1])
    return [ordered[i] for i in sorted({0, len(ordered) // 2, len(ordered) - 1})]


def of_first_process(cond: list[Encoded], device: torch.device) -> list[Encoded]:
    """Return the encoded prompts of the first process on all, since processes with shards of a
    network make the same passes. A collective call."""
    named = {f"{i} {name}": x for i, prompt in enumerate(cond) for name, x in prompt.items()}
    first: dict[str, Encoded] = {}
    for name, tensor in distributed.all_gather_tensors(named)[0].items():
        place, _, key = name.partition(" ")
        first.setdefault(place, {})[key] = tensor.to(device)
    return [first[place] for place in sorted(first, key=int)]


def _media(prompt: Prompt) -> int:
    return len(images_of(prompt)) + len(videos_of(prompt)) + len(audios_of(prompt))


@torch.no_grad()
def settle(policy: Passes, cond: list[Encoded]) -> None:
    """Choose how the policy makes its passes, by comparing them on encoded prompts. Raises
    UserError where no way gives the model's own log-probs."""
    net = policy.net
    sharing = policy.sharing
    bound = _bound(net)
    with _apart(policy), _exactly(policy):
        tried: dict[Way, Gaps] = {}
        for way in _ways(policy, sharing):
            way.set(policy)
            tried[way] = _compared(policy, cond)
            if distributed.largest(int(not tried[way].within(bound)), policy.device) == 0:
                _pack(policy, cond, bound)
                if means := way.means(sharing):
                    warnings.warn(f"{net.config.model_type}: {means}", stacklevel=3)
                return
        looks_ahead = _looks_ahead(policy, cond, bound)
    raise UserError(_refusal(policy, sharing, tried, bound, looks_ahead))


def _looks_ahead(policy: Passes, cond: list[Encoded], bound: Gap) -> bool:
    """Tell whether in the class's own pass a token's log-prob depends on later tokens: then no two
    passes of different lengths agree (sparse attention that selects among all columns)."""
    for prompt in cond:
        ids = prompt["input_ids"][0, -2 * TOKENS :]
        if not torch.isin(ids, ids.new_tensor(policy.warp.suppressed)).logical_not().all():
            continue  # image tokens are not answers
        whole = _own(policy, prompt, ids)
        for length in range(1, len(ids)):
            fewer = _own(policy, prompt, ids[:length])
            if float((whole[:length] - fewer).abs().max()) > bound.largest:
                return True
    return False


def _ways(policy: Passes, sharing: str) -> list[Way]:
    """List the ways that the options allow, the default first."""
    net = policy.net
    fixed = net.packed or policy.tree is not None or policy.refill != "none"
    fixed = fixed or net.compiled is not None or net.routing is not None
    ways = [USUAL, *PLAINER]
    if sharing == "none" or sharing == "auto" and not shareable(net.hf):
        return [way for way in ways if not way.shared]
    if sharing == "prefix" or fixed:
        return [way for way in ways if way.shared]
    return ways


@contextmanager
def _apart(policy: Passes) -> Iterator[None]:
    """Preserve a policy's counters within the block, and sample from the model's own distribution,
    without options."""
    changed = ("warp", "ending", "growing", "refill", "images", "towered", "prompt_routes")
    before = {name: getattr(policy, name) for name in changed}
    compiled = policy.net.compiled
    policy.warp = Warp(suppressed=policy.warp.suppressed)
    policy.ending = replace(policy.ending, tokens=TOKENS, stops=(), strings=(), quantities=())
    policy.growing = False
    policy.refill = "none"
    policy.prompt_routes = {}
    policy.net.compiled = None
    try:
        yield
    finally:
        policy.net.compiled = compiled
        for name, value in before.items():
            setattr(policy, name, value)


def _compared(policy: Passes, cond: list[Encoded]) -> Gaps:
    """Answer prompts, the first twice, and compare."""
    group = torch.tensor([0, *range(len(cond))], device=policy.device)
    names = torch.arange(len(group), device=policy.device)
    try:
        answers = policy._answers(cond, group, names, Rng.of("self-check"), len(group))
        where = torch.ones_like(answers.ids, dtype=torch.bool)
        routed = None if policy.net.routing is None else answers.routes
        if routed is not None:
            cond = [{**c, "routes": policy.prompt_routes[p]} for p, c in enumerate(cond)]
        scored = policy._score(policy.net, cond, group, answers.ids, where, routed)[1].logprob
    except torch.OutOfMemoryError:
        raise
    except FAILS as error:
        return Gaps(error=f"{type(error).__name__}: {error}")
    expected = torch.stack(
        [_own(policy, cond[p], ids) for p, ids in zip(group.tolist(), answers.ids, strict=True)]
    )
    apart = Gap.of((scored.view_as(expected) - expected).abs())
    if policy.engine in EXTERNAL or policy.engine == "hf":  # always re-scored
        return Gaps(apart, Gap(0.0, 0.0) if answers.mask.any() else Gap())
    recorded = Gap.of((answers.logprob - expected).abs()) if answers.mask.all() else Gap()
    return Gaps(apart, recorded)


def _own(policy: Passes, prompt: Encoded, ids: Tensor) -> Tensor:
    """Return the log-probs [T] of an answer ids [T] by one pass of the model's class over prompt
    and answer."""
    try:
        logits: Tensor = policy.net("own", prompt, ids[None])[0]
    except torch.OutOfMemoryError:
        raise
    except FAILS as error:
        family = policy.inputs.family
        listed = "" if family.known else " is not in mmrl's table of families, and"
        shown = any("pixel" in name for name in prompt)
        remedy = "" if shown else "if it needs a picture in every prompt, give each one; else "
        raise UserError(
            f"{policy.net.config.model_type}{listed} does not take what its processor made of a "
            f"prompt ({type(error).__name__}: {error}); {remedy}compare the processor files with "
            "the checkpoint, or use a family that docs/vlm.md names"
        ) from error
    warped = policy.warp(logits, keep=ids)
    return warped.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def _pack(policy: Passes, cond: list[Encoded], bound: Gap) -> None:
    """Allow automatic packing of scoring passes only where results are the same."""
    net = policy.net
    if net.packed or not net.packs_sparse:  # packed passes were compared already
        return
    if not net.share:
        net.packs_sparse = False
        return
    net.packed = True
    same = _compared(policy, cond).within(bound)
    net.packed = False
    net.packs_sparse = distributed.largest(int(not same), policy.device) == 0


def _bound(net: SharedPrefix) -> Gap:
    """Return the tolerance for differences from the model's own log-probs."""
    hf = net.hf
    kinds = {p.dtype for p in hf.parameters()}
    wrapped = sharded(net) and "forward" in vars(net)
    if wrapped or not all(kind.is_floating_point for kind in kinds):
        return rounded(torch.bfloat16)  # passes under accelerate's autocast, or quantized weights
    halves = [kind for kind in kinds if torch.finfo(kind).bits < 32]
    if halves:
        return rounded(max(halves, key=lambda kind: torch.finfo(kind).eps))
    tf32 = hf.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return rounded(torch.float16) if tf32 else EXACT  # the same number of mantissa bits


@contextmanager
def _exactly(policy: Passes) -> Iterator[None]:
    """Compute in the precision of the weights within the block: accelerate replaces a network's
    forward by one under autocast. Calls of sharded networks still go through it."""
    known = vars(policy.net)
    rounding = None if sharded(policy.net) else known.pop("forward", None)
    try:
        with torch.autocast(policy.device.type, enabled=False), casting_inputs(policy.net):
            yield
    finally:
        if rounding is not None:
            known["forward"] = rounding


def _refusal(
    policy: Passes, sharing: str, tried: dict[Way, Gaps], bound: Gap, looks_ahead: bool
) -> str:
    """Describe which part of the passes differs from the model's own."""
    plainest, gaps = list(tried.items())[-1]
    name = policy.net.config.model_type
    kind = policy.net.text_config.model_type
    if looks_ahead:
        return (
            f"policy.vlm.path: {name} ({kind}) gives a token another log-prob when tokens follow "
            "it (attention that sees later columns or chooses among all of them), so its answers "
            "have no log-prob of their own; use a family that docs/vlm.md names"
        )
    if sharing == "prefix":
        part = "prompts that are shared by their answers"
        remedy = "set prefix_sharing: auto"
    elif plainest.together:
        part = "prompts that are padded to one batch"
        remedy = "leave out the options that need shared prompts"
    elif gaps.scored.within(bound):
        part = "sampling, token by token"
        remedy = "use a family that docs/vlm.md names"
    else:
        part = "what a prompt's tokens are given (positions, masks), one prompt at a time,"
        remedy = "use a family that docs/vlm.md names"
    return (
        f"policy.vlm.path: {part} of {name} ({kind}) differ from the "
        f"model's own forward pass over prompt and answer: {gaps}; {remedy}"
    )

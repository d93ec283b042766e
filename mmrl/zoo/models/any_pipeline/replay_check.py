"""Tests a replay before training: scores must match the samples, and samples the pipeline's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.media.sound import SoundVideos
from mmrl.core.types import Prompt
from mmrl.policies.base import unwrapped
from mmrl.policies.diffusion import pipeline_folder
from samplers.noise import Rng

RNG = Rng.of("replay check")
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of pixels in 0..1
ROUGH = 0.1  # of pixels, in half precision
GROWN = 10  # times the rounding of velocities where they are differences of large states
# of a pipeline's call that does not fit; a replay fails in torch too
CALL_FAILURES = (
    ValueError,
    TypeError,
    IndexError,
    AttributeError,
    KeyError,
    NameError,
)
FAILURES = (RuntimeError, *CALL_FAILURES)


def check_replay(policy: Any, prompts: list[Prompt]) -> None:
    """Test the replay with two prompts of a run. UserError in one sentence where it fails.

    (a) A sampled path has the same log-probs when scored again. (b) The noiseless path gives the
    picture of the pipeline's own loop from the same noise, with the folder's scheduler if it is a
    one-step one. (c) A batch of two prompts gives what each gives alone; otherwise the policy runs
    one row at a time from then on.
    """
    try:
        _check(policy, _different(prompts))
    except (UserError, torch.OutOfMemoryError):
        raise
    except FAILURES as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise UserError(
            f"{policy.pipeline} cannot be replayed: its own code fails with {reason}"
        ) from error


def _check(policy: Any, pair: list[Prompt]) -> None:
    with torch.no_grad():
        if policy.together is None:
            policy.together = _rows_independent(policy, pair)
            if not policy.together:
                policy.report.notes = (
                    *policy.report.notes,
                    f"{policy.pipeline}: rows of a call depend on each other, so the pipeline is "
                    "called for one row at a time (policy option together: false)",
                )
        _check_path(policy, pair[:1])
    _check_scores(policy, pair)


def _different(prompts: list[Prompt]) -> list[Prompt]:
    """Choose two prompts, the longest and the shortest, since padding couples rows."""
    ranked = sorted(prompts, key=lambda prompt: len(str(prompt.get("text", ""))))
    return [ranked[-1], ranked[0]]


def _tolerance(policy: Any) -> float:
    return TOLERANCE.get(policy.compute, ROUGH)


def _rows_independent(policy: Any, pair: list[Prompt]) -> bool:
    """Tell whether a batch of two prompts has the outputs of each alone."""
    outputs = []
    for together in (True, False):
        policy.together = together
        outputs.append(_first_output(policy, pair))
    policy.together = None
    joined, alone = outputs
    if joined is None or alone is None or policy.replay.draws:
        independent = joined is not None and not policy.replay.draws
    else:
        scale = float(alone.abs().max().clamp(min=1e-6))
        precise = 1e-5 if policy.compute in TOLERANCE else 0.05
        if policy.replay.scheduler.explodes:
            precise *= GROWN
        independent = float((joined - alone).abs().max()) <= precise * scale
    return not distributed.all_max(torch.tensor(float(not independent)))


def _first_output(policy: Any, pair: list[Prompt]) -> Tensor | None:
    """Compute the first step's output of two prompts; None where the pipeline cannot."""
    cond = policy.encode(pair)
    x = RNG.normal(torch.arange(2, device=policy.device), policy.shape, 0, policy.dtype)
    t = policy.times[:1].to(policy.dtype).to(policy.device).expand(2)
    try:
        output: Tensor = policy.velocity(policy.begin(x, cond), t, cond)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        if not policy.together:
            raise
        return None  # the pipeline does not batch prompts
    return output


def _check_path(policy: Any, prompts: list[Prompt]) -> None:
    """Compare the noiseless path (for consistency models, the path with their sampler's noise) with
    the pipeline's own loop."""
    with policy.evaluating():
        rollout = policy.rollout(prompts, 1, RNG)
        ours = policy.decode(rollout)
    noise = RNG.normal(rollout.row_id, policy.shape, 0, policy.dtype)

    def renewed(step: int) -> Tensor:
        """Draw what a consistency model's sampler adds after a step."""
        return RNG.normal(rollout.row_id, policy.shape, step + 1, policy.dtype)

    cond = policy._of_rows(rollout.cond, rollout.row_id)  # of a row each
    call = policy._call(cond, list(range(len(rollout))), policy.guidance_scale)
    plain = pipeline_folder.media_of(
        policy.replay.plain(call, policy.asked_steps[1], noise, renewed, rollout.row_id),
        policy.pipeline,
    )
    own_times = len(policy.evaluation_times) == len(policy._timetable(policy.asked_steps[1]).times)
    if not own_times:
        return
    if plain.shape != ours.shape:
        raise UserError(
            f"{policy.pipeline} cannot be replayed: its own loop gives {tuple(plain.shape)}, the "
            f"replay {tuple(ours.shape)}"
        )
    apart = float((plain - ours).abs().max())
    if isinstance(plain, SoundVideos) and isinstance(ours, SoundVideos):
        apart = max(apart, float((plain.sound - ours.sound).abs().max()))
    if not apart <= _tolerance(policy) + pipeline_folder.rounding(plain):
        media = "pictures or a sound" if isinstance(plain, SoundVideos) else "pictures"
        raise UserError(
            f"{policy.pipeline} cannot be replayed: without noise its own loop gives {media} that "
            f"differ by {apart:.2g} from the replay's, so a step depends on more than the latents "
            "(or the folder's steps do not divide its training steps)"
        )


def _check_scores(policy: Any, pair: list[Prompt]) -> None:
    """Score a sampled path again."""
    with torch.no_grad():
        rollout = policy.rollout(pair, 1, RNG)
    point = next(iter(policy.path(rollout)), None)
    if point is None:
        return
    with torch.enable_grad(), unwrapped(policy):
        logprob = policy.dist(point).log_prob(point.target)
    apart = float((logprob.detach() - point.recorded).abs().max())
    limit = 1e-4 if policy.compute in TOLERANCE else 1e-2
    if not apart <= limit * policy.summed_dimensions:
        raise UserError(
            f"{policy.pipeline} cannot be replayed: a step that was just sampled is scored "
            f"{apart:.2g} nats apart, so the pipeline draws numbers of its own or remembers steps"
        )
    if not logprob.requires_grad:
        raise UserError(
            f"{policy.pipeline} cannot be replayed: no gradient reaches its network, so it turns "
            "gradients off inside"
        )

"""A flow policy whose times, conditions and velocities come from replaying a diffusers pipeline
(``mmrl.zoo.models.any_pipeline.replay``)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.distributed import process
from mmrl.core.distributions import Gaussian
from mmrl.core.errors import UserError
from mmrl.core.sharding import shards
from mmrl.core.types import Prompt, Query, Rollout
from mmrl.policies.base import NO_CONTEXT, RolloutContext, rows_of, without_empty
from mmrl.policies.diffusion import attention_backends
from mmrl.policies.diffusion.flow_policy import FlowPolicy
from mmrl.policies.diffusion.lora_merging import StartsFromLora
from mmrl.policies.diffusion.two_stages import ROWS
from mmrl.policies.prompt_states import pooled
from mmrl.zoo.models.any_pipeline.replay import Replay, Visit
from mmrl.zoo.models.any_pipeline.replay_check import CALL_FAILURES, check_replay
from mmrl.zoo.models.any_pipeline.replay_inputs import FURTHER, state_cast
from mmrl.zoo.models.any_pipeline.replay_passes import Ask, asks, in_step
from mmrl.zoo.models.any_pipeline.replay_prompts import PromptArguments
from mmrl.zoo.models.any_pipeline.replay_scheduler import timestep_of
from samplers.batching import at_width
from samplers.noise import Rng


class ReplayedPolicy(FlowPolicy, StartsFromLora):
    """Samples and scores by calls of a pipeline, whose output at a step is the velocity or the
    prediction; a subclass loads it."""

    unseen = False  # ``check_replay`` examines its rows
    net: Any
    pipeline: str  # its class
    parts: tuple[str, ...]  # names of its networks that are trained
    frozen_parts: list[nn.Module]  # its frozen networks that read no texts and pictures
    replay: Replay
    arguments: PromptArguments
    together: bool | None  # whether prompts share calls; None: not known yet
    check: bool  # whether the replay is still to be tried
    asked_steps: tuple[int, int]  # of a call, in training and in evaluation
    compute: torch.dtype  # of the frozen weights
    known_passes: dict[Any, tuple[str, ...]]

    # ----------------------------------------------------------------------------------------------
    # times

    def _first_conditions(self, steps: int) -> Any:
        self._settle()
        try:
            return self.replay.conditions(self.arguments.example(), steps)
        except CALL_FAILURES as error:
            raise UserError(
                f"{self.pipeline} cannot be called with policy option call = "
                f"{self.arguments.call}: {_reason(error)}"
            ) from error

    def _own_times(self, steps: int) -> Tensor:
        """Return the pipeline's own times, as its call sets them."""
        times: Tensor = self._timetable(steps).times
        return times

    def _check_steps(self, steps: int) -> None:
        """Refuse a number of steps that the pipeline's call does not take."""
        taken = len(self._timetable(steps).times) - 1
        if taken < 1:
            raise UserError(
                f"policy option steps: the last step of {self.pipeline} has no length, so {steps} "
                "would be none; use at least 2"
            )
        if "num_inference_steps" not in self.replay.arguments and taken != steps:
            raise UserError(
                f"policy option steps: {self.pipeline} takes {taken} steps, not {steps}, as its "
                "call has no number of them; set steps to that, or its sigmas in call"
            )

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
        except CALL_FAILURES as error:
            raise self._failure(ask, cond, error) from error

    def _failure(self, ask: Any, cond: dict[str, Any], error: Exception) -> UserError:
        """Say for which prompt the pipeline's call fails."""
        for row, number in enumerate(cond["prompt"][:, 0].tolist()):
            try:
                ask([row])
            except CALL_FAILURES as alone:
                text = self.arguments.shown(number)
                return UserError(f"{self.pipeline} cannot be called for {text}: {_reason(alone)}")
        return UserError(
            f"{self.pipeline} cannot be called for several prompts at once: {_reason(error)}; "
            "set policy option together to false"
        )

    def velocity(self, x: Tensor, t: Tensor, cond: dict[str, Any]) -> Tensor:
        return self._guided(x, t, cond, self.guidance_scale)

    def _guided(self, x: Tensor, t: Tensor, cond: dict[str, Any], scale: float) -> Tensor:
        """Compute the pipeline's input to its scheduler, [B, *], at times t [B]."""
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
        """Evaluate the pipeline at a step. UserError where it works for single prompts but not for
        a batch, which the check would have found."""

        def ask(rows: list[int]) -> Tensor:
            return self.replay.output(self._call(cond, rows, scale), visit, x[rows])

        try:
            return ask(rows)
        except CALL_FAILURES as error:
            if self.together is not None or len(rows) < 2:
                raise
            raise self._failure(ask, cond, error) from error

    def _announces(self) -> bool:
        """Tell whether this pass goes by a wrapper that has to learn of it as a whole."""
        copies = len(self.parts) > 1 and not shards(self.net)
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
        """Run all rows as a batch, or one by one where they would depend on each other."""
        if self.together is not False:
            outputs: Tensor = ask(list(rows))
            return outputs
        return torch.cat([ask([row]) for row in rows])

    def _call(self, cond: dict[str, Any], rows: list[int], scale: float | None) -> dict[str, Any]:
        self._settle()
        numbers = cond["prompt"][:, 0].tolist()
        call = self.arguments.of([numbers[row] for row in rows], scale)
        return call | ({ROWS: cond[ROWS][rows, 0].tolist()} if ROWS in cond else {})

    def _of_rows(self, cond: dict[str, Any], row: Tensor) -> dict[str, Any]:
        """Add the names [B] of rows to their conditions where the pipeline's call asks for them, as
        an earlier stage draws numbers for each."""
        asks_for_rows = hasattr(type(self.replay.pipe), ROWS)
        return cond | ({ROWS: row[:, None]} if asks_for_rows else {})

    def _settle(self) -> None:
        """Move what is not trained to the network's device."""
        place = device_of(self.net)
        for module in self.frozen_parts:
            if next(iter(module.parameters())).device != place:
                module.to(place)

    def _velocities(self, point: Query, guided: bool) -> tuple[Tensor, Tensor]:
        cond = self._of_rows(rows_of(without_empty(point.cond), point.group), point.row_id)
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
        """Leave guidance to the pipeline, whose output includes it."""
        return v

    def _transition(self, point: Query, v: Tensor) -> Gaussian:
        if self.logprob_weight is not None:
            self.logprob_weight = self.logprob_weight.to(v)  # where the network is, once
        return super()._transition(point, v)

    def _forward(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a pass of a network, in the type it computes in."""
        args, kwargs = state_cast(args, kwargs, self.cast)
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, (Tensor, list))), [])
        self.report.forwards += len(first)
        if len(self.parts) > 1:
            return self.net(name, *args, **kwargs)
        return self.active()(*args, **kwargs)

    def cast(self, tensor: Tensor) -> Tensor:
        """Convert to the type the network computes in, where it does not convert by itself."""
        if self.replay.scheduler.packed:
            return tensor.clone()  # its loop writes into the latents that it has shown
        return tensor.to(self.dtype if self.dtype == torch.float64 else self.compute)


def _reason(error: Exception) -> str:
    """Return the first line of what an error says."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def device_of(net: nn.Module) -> torch.device:
    """Return where a network is."""
    return next(net.parameters()).device

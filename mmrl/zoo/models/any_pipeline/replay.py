"""Runs a diffusers pipeline to one step of its loop, so that the input of its scheduler there
becomes a differentiable function of the latents.

The pipeline's own ``__call__`` runs, with a scheduler that takes no steps: it returns the given
state, captures the pipeline's output at the given step, and ends the run. The network runs at that
step only; at earlier ones it returns zeros of the right shapes. So text encoding, packing,
guidance, the choice between experts and decoding are the pipeline's own code. Only the state
carries over from earlier steps: a pipeline that remembers more cannot be replayed, which
``replay_check`` detects.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.policies.diffusion.library_objects import override
from mmrl.policies.diffusion.self_stepping import SOUND_SCHEDULER
from mmrl.zoo.models.any_pipeline import held_frames, replay_exploding
from mmrl.zoo.models.any_pipeline.replay_consistency import settings
from mmrl.zoo.models.any_pipeline.replay_draws import QUIET, Draws, LateDraws
from mmrl.zoo.models.any_pipeline.replay_exploding import sigma_of
from mmrl.zoo.models.any_pipeline.replay_inputs import (
    Shapes,
    named,
    noisy_input,
    plain_settings,
    row_count,
)
from mmrl.zoo.models.any_pipeline.replay_scheduler import (
    Timetable,
    drive,
    time_of,
    timestep_of,
    timetable,
)
from mmrl.zoo.models.any_pipeline.replay_starts import later, observe, once
from mmrl.zoo.models.any_pipeline.replay_states import States, heard, numbered

Goal = Literal["conditions", "parts", "begin", "output", "passes", "finish", "plain"]


class Reached(BaseException):
    """Ends a run of the pipeline with a result. Not an Exception, which a pipeline may catch."""

    def __init__(self, value: Any):
        super().__init__()
        self.value = value


class Unreplayable(UserError):
    """Says in one sentence why a pipeline cannot be replayed."""


class Visit(NamedTuple):
    """The step at which the network is evaluated."""

    steps: int  # of the call, ``num_inference_steps``
    place: int  # step of the loop, from 0
    timestep: Tensor | None = None  # replaces that step's, [] or [B]; None: its own


@dataclass
class Run:
    """Holds the goal and progress of one call of the pipeline."""

    goal: Goal
    state: Tensor | None = None  # [B, *] latents at the step, or the final ones
    noise: Tensor | None = None  # [B, *] that the first latents are made of
    draws: list[Tensor] | None = None  # what is drawn instead of it
    start: Tensor | None = None  # [B, *] first latents that replace the prepared ones
    place: int | None = None  # the step to evaluate; None: none
    time: Tensor | None = None  # [] of that step
    timestep: Tensor | None = None  # its timestep, where it is not the pipeline's own
    position: int = 0  # completed steps of the loop
    # by the number of the state, such as a video and its sound:
    first: dict[int, Tensor] = field(default_factory=dict)  # [B, *] latents that were prepared
    tables: dict[int, Timetable] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)  # [B, *] at the step evaluated
    stepped: int = 0  # steps of all states
    copies: int = 0  # of the scheduler
    passes: tuple[str, ...] = ()  # networks called at the step, in order
    renewed: Callable[[int], Tensor] | None = None  # noise [B, *] of a step, where it adds some
    row: Tensor | None = None  # [B] of what is decoded
    generator: torch.Generator | None = None  # of what the pipeline draws itself
    drawn: Tensor | None = None  # its state once the latents were prepared


class Conditions(NamedTuple):
    """Holds what a pipeline has prepared when it first calls its network."""

    latents: Tensor | None  # [B, *] that it prepared; None: it has no ``prepare_latents``
    table: Timetable | None
    inputs: dict[str, Any]  # arguments of the network


class Denoiser:
    """Proxy of a pipeline's network: calls go to ``answer``, all else to the network."""

    def __init__(self, net: nn.Module, answer: Callable[..., Any]):
        self.__dict__.update(_net=net, _answer=answer)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pipelines ask of what class it is
        return type(self.__dict__["_net"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_net"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_answer"](args, kwargs)


class Replay:
    """Evaluates a loaded pipeline at one step.

    ``forward(name, args, kwargs)`` is a pass of the trained network of that name; ``device()``
    where it is. The networks in the pipeline are replaced by proxies, its scheduler by one that
    calls ``self``.
    """

    def __init__(
        self,
        pipe: Any,
        parts: tuple[str, ...],
        forward: Callable[[str, tuple[Any, ...], dict[str, Any]], Any],
        device: Callable[[], torch.device],
    ):
        self.pipe = pipe
        self.forward = forward
        self.device = device
        self.run: Run | None = None
        self.shapes: dict[Any, Shapes] = {}  # of the networks' outputs, by their inputs
        self.times: dict[int, Tensor] = {}  # number of steps -> times [K + 1]
        self.draws = False  # whether its steps draw numbers, by a row's position in the call
        self.skipped: dict[int, int] = {}  # number of steps -> steps that a call skips
        # without the decorator that turns gradients off
        self.function = inspect.unwrap(type(pipe).__call__)
        self.arguments = inspect.signature(self.function).parameters
        self.states = States(pipe)
        self.scheduler = drive(pipe.scheduler, self)
        pipe.__dict__["scheduler"] = self.scheduler
        if getattr(pipe, SOUND_SCHEDULER, None) is not None:
            pipe.__dict__[SOUND_SCHEDULER] = drive(getattr(pipe, SOUND_SCHEDULER), self, 1)
        for name in parts:
            pipe.__dict__[name] = Denoiser(getattr(pipe, name), self._answer(name))
        partial_way = observe(pipe, self.begins)
        # from what the pipeline prepares to a first state
        self.scale: float = self.scheduler.prepared_scale
        self.prepares = bool(self.states.methods)
        for number, name in enumerate(self.states.methods):
            prepare = getattr(pipe, name)
            if partial_way:
                # a picture to change is encoded there, which a state in its place has no need of
                prepare = once(prepare, partial(self._asked_state, number))
            pipe.__dict__[name] = self._preparing(number, prepare)
        override(pipe, _execution_device=property(lambda _: device()))
        pipe.set_progress_bar_config(disable=True)

    def conditions(self, call: dict[str, Any], steps: int) -> Conditions:
        """Run the pipeline to its first pass: its latents, its times, the network's inputs."""
        reached = self._call(call, steps, Run("conditions"))
        if not isinstance(reached, Conditions):
            raise Unreplayable(
                f"{self.name} cannot be replayed: it ends without a pass of its network"
            )
        if reached.table is not None:
            self.times[steps] = reached.table.times
        return reached

    def find_parts(self, call: dict[str, Any], steps: int) -> None:
        """Find which of the latents are stepped: a pipeline that begins with a picture may hold
        those of the first frame. No network runs: it returns zeros."""
        run = Run("parts")
        try:
            with torch.no_grad():
                self._call(call, steps, run)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            return  # zeros of that shape mean nothing to it: it steps all, or is refused later
        for number, sample in run.outputs.items():
            if sample.shape != run.first[number].shape:
                self.states.find(number, run.first[number].shape[1:], sample)

    def begin(self, call: dict[str, Any], steps: int, noise: Tensor) -> Tensor:
        """Make the first latents [B, *] from noise [B, *] of as many numbers, of any shape."""
        if not self.prepares:
            return noise
        latents: Tensor
        if self.states.parts:
            # where in what it draws the part lies is not known, but that it mixes number by number
            low, high = (
                self._call(call, steps, Run("begin", draws=self.states.constants(noise, value))).to(
                    noise.dtype
                )
                for value in (0.0, 1.0)
            )
            latents = low + (high - low) * noise.view_as(low)
        else:
            latents = self._call(call, steps, Run("begin", noise=noise))
        return torch.mul(latents.to(noise.dtype), self.scale)

    def output(self, call: dict[str, Any], visit: Visit, state: Tensor) -> Tensor:
        """Compute the pipeline's input to its scheduler for latents [B, *] at a step, as the
        velocity or the prediction [B, *] of samplers.processes."""
        run = self._visiting("output", visit, state)
        output: Tensor = self._call(call, visit.steps, run)
        return -output if self.scheduler.inverted else output

    def _visiting(self, goal: Goal, visit: Visit, state: Tensor) -> Run:
        run = Run(goal, state=state, place=visit.place, timestep=visit.timestep)
        if held_frames.remembers_noise(self.pipe):
            run.time = self.times[visit.steps][visit.place]
            if run.timestep is not None:
                run.time = time_of(self.scheduler, run.timestep)
        return run

    def passes(self, call: dict[str, Any], visit: Visit, state: Tensor) -> tuple[str, ...]:
        """Name the networks, in order, that ``output`` would call, without running those whose
        outputs have been seen."""
        run = self._visiting("passes", visit, state)
        names: tuple[str, ...] = self._call(call, visit.steps, run)
        return names

    def finish(
        self, call: dict[str, Any], steps: int, state: Tensor, row: Tensor | None = None
    ) -> Any:
        """Decode final latents [B, *] of rows named ``row`` [B] as the pipeline does."""
        row = torch.arange(len(state)) if row is None else row
        return self._call(call, steps, Run("finish", state=state, row=row))

    def plain(
        self,
        call: dict[str, Any],
        steps: int,
        noise: Tensor,
        renewed: Callable[[int], Tensor] | None = None,
        row: Tensor | None = None,
    ) -> Any:
        """Let the pipeline sample rows named ``row`` [B] with its own loop from noise [B, *], with
        deterministic steps, or with the sampler noise ``renewed(step)``."""
        row = torch.arange(len(noise)) if row is None else row
        run = Run("plain", noise=noise, renewed=renewed, row=row)
        if self.states.parts:
            run.start = self.begin(call, steps, noise)
        return self._call(call, steps, run)

    @property
    def name(self) -> str:
        return type(self.pipe).__name__

    # ----------------------------------------------------------------------------------------------
    # calls from the pipeline's parts while it runs

    def copied(self) -> int:
        """Number the next copy of the scheduler, which steps another state."""
        run = self._running()
        run.copies += 1
        if run.copies >= self.states.count:
            raise Unreplayable(
                f"{self.name} cannot be replayed: it steps with a copy of its scheduler, so it has "
                "more than one state, and it does not say how the others are prepared"
            )
        return run.copies

    def timetabled(self, scheduler: Any) -> None:
        """Insert the run's timestep into the times that the scheduler has just set."""
        run = self._running()
        run.tables[scheduler.number] = timetable(scheduler)
        if 0 in run.tables:
            for number, (times, _) in run.tables.items():
                self.states.relate(number, run.tables[0].times, times)
        if run.timestep is None or run.place is None:
            return
        steps = scheduler.timesteps.clone()
        timestep = self._own_timestep(run.timestep, scheduler).to(steps)
        if timestep.ndim:
            steps = steps[:, None].repeat(1, len(timestep))
        steps[run.place + self.skipped.get(len(steps), 0)] = timestep
        scheduler.timesteps = steps
        if scheduler.is_flow and not timestep.ndim:  # guidance may compute with it
            scheduler.sigmas = torch.as_tensor(scheduler.sigmas).clone()
            place = run.place + self.skipped.get(len(steps), 0)
            scheduler.sigmas[place] = sigma_of(scheduler, timestep)

    def _own_timestep(self, timestep: Tensor, scheduler: Any) -> Tensor:
        """Return the timestep of the state of this scheduler where the first is at ``timestep``."""
        if self.states.ratio(scheduler.number) == 1:
            return timestep
        time = self.states.time(scheduler.number, time_of(scheduler, timestep))
        return timestep_of(scheduler, time)

    def begins(self, steps: int) -> None:
        """Record that the pipeline takes only the last ``steps`` steps of its times."""
        run = self._running()
        whole = len(self.scheduler.timesteps)
        self.skipped[whole] = self.scheduler.step_number = whole - steps
        run.tables = {number: later(table, whole - steps) for number, table in run.tables.items()}

    def stepped(self, output: Tensor, sample: Tensor, number: int = 0) -> Tensor | None:
        """Take the pipeline's output in a step of this state; return the next state; None: the
        scheduler computes it."""
        run = self._running()
        run.stepped += 1
        if run.goal == "plain":
            run.position = run.stepped // self.states.count
            return None
        if run.goal == "parts":
            run.outputs[number] = sample
            if len(run.outputs) == self.states.count:
                raise Reached(None)
            return sample
        assert run.state is not None
        state = self.states.split(run.state)[number]
        if state.shape != sample.shape:
            raise Unreplayable(
                f"{self.name} cannot be replayed: it steps latents of shape {tuple(sample.shape)} "
                f"where it prepared {tuple(state.shape)}"
            )
        if run.position == run.place:
            self._reached(run, self._velocity(run, output, sample), number)
        run.position = run.stepped // self.states.count
        return self._own_size(run, state)

    def fresh(self, number: int) -> AbstractContextManager[Any]:
        """Make the scheduler of this state draw the noise of this run in the current step."""
        run = self._running()
        if run.renewed is None:
            return nullcontext()
        noise = run.renewed((run.stepped - 1) // self.states.count)
        return Draws(self.states.split(noise)[number])

    def _asked_state(self, number: int) -> Tensor | None:
        """Return the run's state of this number; None where it has none."""
        run = self._running()
        return None if run.state is None else self.states.split(run.state)[number]

    def _own_size(self, run: Run, state: Tensor) -> Tensor:
        """Give a state the size that the pipeline's own has at the step asked about, at the first
        where it samples by itself, or at the end."""
        if not self.scheduler.explodes:
            return state
        return state * self._growth(run).to(state)

    def _velocity(self, run: Run, output: Tensor, sample: Tensor) -> Tensor:
        if not self.scheduler.explodes:
            return output
        return replay_exploding.velocity(output, sample, self._growth(run))

    def _growth(self, run: Run) -> Tensor:
        last = 0 if run.goal == "plain" else -1
        skipped = self.skipped.get(len(self.scheduler.timesteps), 0)
        place = last if run.place is None else run.place + skipped
        return replay_exploding.growth(self.scheduler, place)

    def _reached(self, run: Run, output: Tensor, number: int) -> None:
        """End the run if all states have been stepped at the step that it is for."""
        if number in run.outputs:
            raise Unreplayable(f"{self.name} cannot be replayed: it steps only some of its latents")
        run.outputs[number] = output
        if len(run.outputs) == self.states.count:
            raise Reached(run.passes if run.goal == "passes" else self.states.join(run.outputs))

    def _preparing(self, number: int, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Replace the latents that the pipeline prepares by the run's state."""

        def prepared(*args: Any, **kwargs: Any) -> Any:
            latents = prepare(*args, **kwargs)
            run = self._running()
            run.drawn = run.generator.get_state() if run.generator else None
            several = isinstance(latents, (tuple, list))
            whole = latents[0] if several else latents
            run.first[number] = self.states.narrow(number, whole)
            self.states.learn(number, run.first[number])
            if run.goal == "begin" and len(run.first) == self.states.count:
                raise Reached(self.states.join(run.first))
            state = run.start if run.goal == "plain" else run.state
            if run.goal == "parts":
                state = numbered(whole)
            elif state is None:
                return latents
            else:
                state = self.states.split(state)[number]
                if self.scheduler.explodes:
                    state = self._own_size(run, state)
                elif self.scale != 1:
                    state = state / self.scale
                state = self.states.widen(number, state, whole)
                if run.time is not None:
                    state = held_frames.first_noise(state, latents, run.time)
                elif run.goal == "finish" and held_frames.remembers_noise(self.pipe):
                    run.state = held_frames.put_back(state, latents)
            return (state, *latents[1:]) if several else state

        return prepared

    def _answer(self, name: str) -> Callable[..., Any]:
        def answer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            run = self.run
            if run is None:
                return self.forward(name, args, kwargs)
            if run.goal == "conditions":
                first = self.states.join(run.first) if run.first else None
                raise Reached(Conditions(first, run.tables.get(0), named(args, kwargs)))
            if run.goal == "parts":
                rows = row_count(noisy_input(args, kwargs)) or 1
                zeros = tuple(x.new_zeros(rows, *x.shape[1:]) for x in run.first.values())
                return SimpleNamespace(sample=zeros[0]) if kwargs.get("return_dict") else zeros
            at_step = run.place == run.position
            if at_step and run.generator and run.drawn is not None:
                self.draws |= not torch.equal(run.generator.get_state(), run.drawn)
            run.passes += (name,) if at_step else ()
            is_answer = run.goal == "plain" or (run.goal == "output" and at_step)
            key = (name, plain_settings(args, kwargs))
            rows = row_count(noisy_input(args, kwargs))
            if key in self.shapes and not is_answer:
                return self.shapes[key].zeros(rows)
            with torch.set_grad_enabled(torch.is_grad_enabled() and is_answer):
                output = self.forward(name, args, kwargs)
            self.shapes[key] = Shapes.of(output, rows)
            return output

        return answer

    def _has_stepped(self) -> bool:
        """Tell whether the pipeline's loop is finished."""
        steps = self.scheduler.timesteps
        whole = len(steps) - self.skipped.get(len(steps), 0)
        return self._running().stepped >= whole * self.states.count

    def _running(self) -> Run:
        if self.run is None:
            raise RuntimeError("the pipeline's parts are used outside a replay")
        return self.run

    def _call(self, call: dict[str, Any], steps: int, run: Run) -> Any:
        chosen = dict(call)
        if "num_inference_steps" in self.arguments:
            chosen["num_inference_steps"] = steps
        chosen |= settings(self.arguments, steps)
        if "generator" in self.arguments:  # the same draws in every run, none from the global one
            chosen["generator"] = run.generator = torch.Generator().manual_seed(0)
        if "return_dict" in self.arguments:
            chosen["return_dict"] = False
        if "output_type" in self.arguments:
            chosen.setdefault("output_type", "pt")
        drawn = run.noise if run.noise is not None else None if self.prepares else run.state
        # no mode without need: it would see every operation of the network
        noises = run.draws or (None if drawn is None else self.states.split(drawn))
        draws = nullcontext() if noises is None else Draws(noises)
        ends = nullcontext() if run.row is None else LateDraws(run.row, self._has_stepped)
        with self._started(run), draws, ends:
            try:
                media = self.function(self.pipe, **chosen)
            except Reached as reached:
                return reached.value
        if self.states.count > 1:
            return heard(self.pipe, media)
        return media[0] if isinstance(media, tuple) else media

    @contextmanager
    def _started(self, run: Run) -> Iterator[None]:
        if self.run is not None:
            raise RuntimeError("a replay within a replay")
        self.run = run
        try:
            with QUIET:
                yield
        finally:
            self.run = None

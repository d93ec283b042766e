"""Saves a checkpoint when an error ends a run, if the state is consistent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mmrl.core import distributed, peers
from mmrl.core.errors import UserError
from mmrl.core.peers import Peers
from mmrl.experiment import checkpoint

if TYPE_CHECKING:
    from mmrl.experiment.loop import Run


@contextmanager
def rescued(run: Run) -> Iterator[None]:
    """Save a checkpoint before an error ends the run: one shared by all processes, or any of a
    single process."""
    start = run.trainer.iteration
    try:
        yield
    except distributed.StopAll as error:
        _rescue_together(run, error, start)
    except Exception as error:  # of a policy, a reward, the data or mmrl
        if watch := peers.gone(error):
            _rescue_survivor(run, watch, error, start)
        _rescue_alone(run, error, start)
        raise


def _rescue_together(run: Run, error: distributed.StopAll, start: int) -> None:
    """Save on all processes, which share the error; a collective call. Re-raises it, with how to
    resume."""
    with suppress(UserError), run.writing():
        run.log.event("error", str(error))
    if run.trainer.iteration == start:
        raise error
    again = f"mmrl train --resume {run.folder}"
    try:
        path = run.save()
    except UserError as second:  # such as a full disk, which is the cause
        path = checkpoint.latest(run.folder / "checkpoints") or Path("nothing")
        why = "" if str(second) == str(error) else f"\n{second}"
        raise UserError(
            f"{error}{why}\nsaved before: {path}; when this is mended, go on with: {again}"
        ) from error
    raise UserError(f"{error}\nsaved {path}; when this is mended, go on with: {again}") from error


def _rescue_survivor(run: Run, watch: Peers, error: Exception, start: int) -> NoReturn:
    """Save the last complete iteration after another process has died, on the first survivor, if
    that holds all weights; raise UserError with how to resume."""
    assert watch.gone is not None
    distributed.be_alone()
    with suppress(Exception):
        run.log.event("error", watch.sentence())
    first = watch.rank == (1 if watch.gone[0] == 0 else 0)
    path = None
    if first and not run.trainer.device.sharded and _is_whole(run, start):
        with suppress(Exception):  # report the first error
            path = run.save()
    path = path or checkpoint.latest(run.folder / "checkpoints")
    advice = f"saved {path}; go on" if path else "nothing was saved; begin again"
    raise UserError(
        f"{watch.sentence()}\n{advice} with: mmrl train --resume {run.folder}"
    ) from error


def _is_whole(run: Run, start: int) -> bool:
    """Tell whether the state is at an iteration's end, not in the middle of an update."""
    trainer = run.trainer
    return trainer.iteration > start and run.whole == (trainer.iteration, trainer.update.step)


def _rescue_alone(run: Run, error: Exception, start: int) -> None:
    """Save the last complete iteration, and note in the error how to resume.

    Not if other processes would have to take part.
    """
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    with suppress(Exception):
        run.log.event("error", f"{kind}{error}")
    if distributed.process()[1] > 1 or not _is_whole(run, start):
        return
    with suppress(Exception):  # report the first error
        again = f"saved {run.save()}; when this is mended, go on with: mmrl train --resume"
        if isinstance(error, UserError):
            error.args = (f"{error}\n{again} {run.folder}",)
        else:
            error.add_note(f"{again} {run.folder}")

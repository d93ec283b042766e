"""Saves what was trained when an error ends a run, where the state is whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.run import checkpoint

if TYPE_CHECKING:
    from mmrl.run.loop import Run


@contextmanager
def rescued(run: Run) -> Iterator[None]:
    """Save what was trained before an error ends the run: one that all processes share, or any of
    a single process."""
    start = run.trainer.iteration
    try:
        yield
    except distributed.StopAll as error:
        _rescue_together(run, error, start)
    except Exception as error:  # of a policy, a reward, the data or ourselves
        _rescue_alone(run, error, start)
        raise


def _rescue_together(run: Run, error: distributed.StopAll, start: int) -> None:
    """Save on all processes, which share the error; a collective call. Raises it again with the
    way to go on."""
    with suppress(UserError), run.writing():
        run.log.event("error", str(error))
    if run.trainer.iteration == start:
        raise error
    again = f"mmrl train --resume {run.folder}"
    try:
        path = run.save()
    except UserError as second:  # such as a full disk: that is what happened
        path = checkpoint.latest(run.folder / "checkpoints") or Path("nothing")
        why = "" if str(second) == str(error) else f"\n{second}"
        raise UserError(
            f"{error}{why}\nsaved before: {path}; when this is mended, go on with: {again}"
        ) from error
    raise UserError(f"{error}\nsaved {path}; when this is mended, go on with: {again}") from error


def _rescue_alone(run: Run, error: Exception, start: int) -> None:
    """Save the last whole iteration, and note in the error how to go on.

    Not where other processes would have to take part, and not in the middle of an update, whose
    weights belong to no iteration.
    """
    trainer = run.trainer
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    with suppress(Exception):
        run.log.event("error", f"{kind}{error}")
    is_whole = run.whole == (trainer.iteration, trainer.update.step)
    if distributed.process()[1] > 1 or trainer.iteration == start or not is_whole:
        return
    with suppress(Exception):  # what happened first is what is told
        again = f"saved {run.save()}; when this is mended, go on with: mmrl train --resume"
        if isinstance(error, UserError):
            error.args = (f"{error}\n{again} {run.folder}",)
        else:
            error.add_note(f"{again} {run.folder}")

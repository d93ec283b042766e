"""Does ``mmrl convert``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmrl.core.errors import UserError
from mmrl.experiment import convert


def converted(
    adapters: Sequence[Path],
    base: str | None,
    form: str | None,
    file: Path | None,
    into: Path | None,
    weights: Sequence[float],
) -> Path:
    """Convert one adapter to a form, or merge adapters into their model; returns what was written.

    Raises UserError for options that cannot be combined.
    """
    if (form is None) == (into is None):
        raise UserError(
            "give --format FORMAT --out FILE to convert a LoRA file, or --into FOLDER to merge"
        )
    if into is not None:
        if file is not None:
            raise UserError("--out is of --format; with --into the folder is named there")
        return convert.merge(adapters, base, weights, into)
    assert form is not None
    if file is None:
        raise UserError(f"--format {form} needs --out FILE, a new .safetensors file")
    if len(adapters) > 1 or weights:
        raise UserError("--format converts one adapter as it is; several and --weight need --into")
    return convert.convert(adapters[0], base, convert.form_of(form), file)

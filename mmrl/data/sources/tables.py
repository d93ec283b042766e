"""Reads rows of parquet and arrow files. Nothing in them is unpickled."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError
from mmrl.data.sources.text_files import Row

BATCH = 256  # rows that are converted to Python objects at a time


def table(path: Path) -> Iterator[Row]:
    """Yield the rows of a parquet or arrow file."""
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(
            f"{path}: reading {path.suffix} files needs pyarrow: pip install pyarrow, or "
            f'"multimodal-rl[data]"'
        )
    name = str(path)
    for number, row in enumerate(_records(path), start=1):
        yield f"{name}: row {number}", row


def _records(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    try:
        for batch in _batches(path):
            names = batch.schema.names
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise UserError(f"{path}: two columns are called {twice!r}; rename one")
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _batches(path: Path) -> Iterator[Any]:
    import pyarrow as pa

    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=BATCH)
        return
    with pa.memory_map(str(path)) as source:
        try:
            stream: Any = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:  # the other of arrow's two formats, also called feather
            source.seek(0)
            file = pa.ipc.open_file(source)
            stream = (file.get_batch(i) for i in range(file.num_record_batches))
        for batch in stream:
            yield from (batch.slice(start, BATCH) for start in range(0, batch.num_rows, BATCH))

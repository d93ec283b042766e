"""Reads rows of data sets of the Hugging Face Hub by their id, through the library ``datasets``.

No code of a data set is run: the library no longer does, and features are read undecoded.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.hub import ask_for_data_set, is_of_the_network
from mmrl.data.sources.text_files import Row

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
UNREACHABLE = {
    "ConnectionError",
    "OfflineModeIsEnabled",
    *("ConnectError", "ConnectTimeout", "ReadTimeout", "ProxyError", "RemoteProtocolError"),
}
FOREIGN = ("datasets", "huggingface_hub")  # libraries whose errors are reworded
BATCH = 256  # rows that are converted to Python objects at a time


@dataclass(frozen=True)
class HubSet:
    """Names a data set: its ``owner/name``, or a local folder as the Hub has them; its subset (the
    library's configuration) and revision."""

    name: str
    subset: str | None = None
    revision: str | None = None
    streaming: bool = False

    def splits(self) -> list[str]:
        """List the names of its splits. Raises UserError with the remedy."""
        with self._understood():
            self._ask()
            import datasets

            names: list[str] = datasets.get_dataset_split_names(
                self.name, config_name=self.subset, revision=self.revision
            )
            return names

    def rows(self, split: str) -> Iterator[Row]:
        """Yield the rows of a split; pictures as the bytes of their files."""
        with self._understood():
            self._ask()
            import datasets

            loaded = datasets.load_dataset(
                self.name,
                name=self.subset,
                split=split,
                revision=self.revision,
                streaming=self.streaming,
            )
            for number, row in enumerate(_undecoded(loaded, self.streaming), start=1):
                yield f"{self.name} {split}: row {number}", row

    def _ask(self) -> None:
        """Find out within seconds whether the Hub has it: the library tries for half a minute."""
        if not Path(self.name).expanduser().exists() and not _has_been_read(self.name):
            ask_for_data_set(self.name, self.revision)

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Turn the library's errors into one sentence with the remedy."""
        if importlib.util.find_spec("datasets") is None:
            raise UserError(
                f"no such file or folder: {self.name}; to read it as a data set of the Hub: pip "
                f'install datasets, or "multimodal-rl[data]"'
            )
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(self._remedy(error)) from error
        except Exception as error:
            library = type(error).__module__.partition(".")[0]
            if library not in FOREIGN and not is_of_the_network(error):
                raise
            raise UserError(self._remedy(error)) from error

    def _remedy(self, error: Exception) -> str:
        text = str(error)
        causes = {type(cause).__name__ for cause in _causes(error)}
        start = f"data set {self.name!r}:"
        folder = f"--repo-type dataset --local-dir FOLDER {self.name}"
        # the Hub's client says of a missing repository that it may be gated
        says_gated = "gated" in text.lower() and "RepositoryNotFoundError" not in causes
        if says_gated or "GatedRepoError" in causes:
            return (
                f"{start} it is gated; accept its terms on https://huggingface.co/datasets/"
                f"{self.name}, then log in: hf auth login (or set HF_TOKEN)"
            )
        if "BuilderConfig" in text or "Config name is missing" in text:
            return f"{start} name one of its subsets with the option subset: {_one_line(text)}"
        if "Unknown split" in text:
            return f"{start} {_one_line(text)}; name it with the option split"
        is_absent = bool(causes & {"DatasetNotFoundError", "RepositoryNotFoundError"})
        if causes & UNREACHABLE or (is_absent and _is_offline()):
            return (
                f"{start} no file or folder of that name here ({Path.cwd()}), and the Hub cannot "
                f"be reached; load it where there is a network (hf download {folder}) and give "
                f"that folder as path"
            )
        if is_absent or "HFValidationError" in causes:
            return (
                f"{start} neither a file or folder here ({Path.cwd()}) nor a data set that the Hub "
                f"shows you; check the spelling, or log in if it is private: hf auth login (or "
                f"set HF_TOKEN)"
            )
        return f"{start} it cannot be read: {_one_line(text) or type(error).__name__}"


def is_hub_name(path: str) -> bool:
    """Tell whether a path could be the id of a data set: ``name`` or ``owner/name``."""
    return HUB_NAME.fullmatch(path) is not None


def _has_been_read(name: str) -> bool:
    """Tell whether the library has cached a data set, so that it needs no network."""
    from datasets import config

    return (Path(config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir()


def _undecoded(loaded: Any, streaming: bool) -> Iterator[dict[str, Any]]:
    """Yield rows as they are stored: a picture is {bytes, path}."""
    if streaming:
        yield from loaded.decode(False)
        return
    for table in loaded.with_format("arrow").iter(batch_size=BATCH):
        yield from table.to_pylist()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_offline() -> bool:
    return any(os.environ.get(name) == "1" for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]

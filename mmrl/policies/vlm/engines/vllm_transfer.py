"""Sends weights to a vLLM server: through a shared folder, or by vLLM's weight-transfer API over
NCCL. Neither uses pickle."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import torch
from torch import Tensor

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.policies.lora import save_adapter
from mmrl.policies.vlm.engines import vllm_weights
from mmrl.policies.vlm.engines.vllm_options import Setup

ADAPTER = "policy"  # the name under which the server has the adapter


class Server(Protocol):
    """Defines the requests to a server."""

    url: str

    def get(self, path: str) -> Any:
        """Return the response to GET, as plain data."""

    def post(self, path: str, body: Any = None) -> Any:
        """Return the response to POST."""


class Transfer(Protocol):
    """Defines how weights travel."""

    def send(self, hf: Any) -> str | None:
        """Send the weights to the server; a collective call. Returns the model name for later
        requests; None: the server's only model."""


def transfer_for(server: Server, setup: Setup) -> Transfer:
    """Return the transfer that the options choose. UserError where it cannot work."""
    options = setup.options
    if options.weight_transfer == "nccl":
        if options.sync == "lora":
            raise UserError(
                "policy options vllm.sync = lora and weight_transfer = nccl: an adapter travels "
                "through a folder; set weight_transfer: folder and shared_folder"
            )
        return Broadcast(server, setup)
    if options.shared_folder is None:
        raise UserError(
            "policy option vllm.shared_folder is missing: with weight_transfer = folder the "
            "weights travel through a folder that this machine and the server's both see"
        )
    folder = Path(options.shared_folder).absolute()
    if not folder.is_dir():
        raise UserError(f"policy option vllm.shared_folder: there is no folder {folder}")
    return ThroughFolder(server, folder, options.sync == "lora")


class ThroughFolder:
    """Writes safetensors where the server reads them. The main process writes, and removes its
    previous files."""

    def __init__(self, server: Server, folder: Path, lora: bool):
        self.server = server
        self.lora = lora
        self.folder = folder / f"mmrl-{uuid4().hex[:8]}"
        self.number = 0

    def send(self, hf: Any) -> str | None:
        with distributed.together():
            if distributed.is_main():
                self._send(hf)
        return ADAPTER if self.lora else None

    def __del__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _send(self, hf: Any) -> None:
        # once with an adapter too: an earlier run may have left other weights there
        if not self.lora or not self.number:
            self._send_weights(partial(vllm_weights.save_weights, hf, adapters=not self.lora))
        if self.lora:
            self._send_adapter(partial(save_adapter, hf))

    def _send_weights(self, save: Callable[[Path], None]) -> None:
        with self._written(save) as place:
            path = {"weights_path": str(place)}
            self.server.post("/collective_rpc", {"method": "reload_weights", "kwargs": path})

    def _send_adapter(self, save: Callable[[Path], None]) -> None:
        with self._written(save) as place:
            body = {"lora_name": ADAPTER, "lora_path": str(place), "load_inplace": True}
            self.server.post("/v1/load_lora_adapter", body)

    @contextmanager
    def _written(self, save: Callable[[Path], None]) -> Iterator[Path]:
        """Save into a new folder; the previous one is removed once the server has loaded this
        one."""
        before = self.folder / str(self.number)
        self.number += 1
        place = self.folder / str(self.number)
        try:
            save(place)
        except OSError as error:
            raise UserError(
                f"policy option vllm.shared_folder: the weights cannot be written to {place}: "
                f"{error.strerror}"
            ) from error
        yield place
        shutil.rmtree(before, ignore_errors=True)


class Broadcast:
    """Sends weights by vLLM's weight-transfer API: NCCL between this process's CUDA device and the
    server's, driven by the routes /init_weight_transfer_engine to /finish_weight_update."""

    def __init__(self, server: Server, setup: Setup):
        from mmrl.policies.vlm.engines.vllm_local import check_installed

        check_installed()  # the sending side is vLLM's too
        if not torch.cuda.is_available():
            raise UserError(
                "policy option vllm.weight_transfer = nccl needs CUDA on this side too; use "
                "weight_transfer: folder"
            )
        self.server = server
        self.options = setup.options
        self.sender: Any = None
        self.module: Any = None

    def send(self, hf: Any) -> str | None:
        self.module = hf
        if self.sender is None:
            self.sender = self._connected()
        self.sender.send_weights()
        return None

    def _connected(self) -> Any:
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        workers = self.server.get("/get_world_size")["world_size"]
        client = HTTPVLLMWeightSyncClient(self.server.url, self.options.server_timeout)
        return WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(
                master_address=self.options.master_address,
                master_port=self.options.group_port,
                world_size=1 + workers,
                rank=distributed.world()[0],
            ),
            client=client,
            source=source_of(self),
        )


def source_of(broadcast: Any) -> Any:
    """Make vLLM's WeightSource of the module that ``broadcast`` holds: names, types and shapes, and
    the weights in the same order."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):
        """Yields the current weights, under the names of a checkpoint."""

        def metadata(self) -> list[Any]:
            """List name, type and shape of each."""
            return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self._named().items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return vllm_weights.on_device(self._named())

        def _named(self) -> dict[str, Tensor]:
            return vllm_weights.checkpoint_weights(broadcast.module)

    return Source()

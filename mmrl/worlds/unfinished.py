"""Saves the training of a build now and then, so that an interrupted one resumes where it was."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.weight_files import metadata, read_tensors


class Unfinished:
    """Holds a file of tensors for each part of a build, in ``folder``: weights, AdamW's moments,
    and in its header the step and the learning rate's schedule."""

    def __init__(self, folder: Path):
        self.folder = folder

    def save(self, part: str, step: int, optimizer: Any, schedule: Any) -> None:
        """Save what ``optimizer`` trains after ``step`` steps."""
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        for number, weight in enumerate(_weights(optimizer)):
            tensors[f"{number}.weight"] = weight.detach().contiguous()
            for name, value in optimizer.state.get(weight, {}).items():
                tensors[f"{number}.{name}"] = value.contiguous()
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        header = {"step": step, "groups": groups, "schedule": schedule.state_dict()}
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self._file(part).with_suffix(".partial")
        save_file(tensors, draft, {name: json.dumps(value) for name, value in header.items()})
        os.replace(draft, self._file(part))

    def restore(self, part: str, optimizer: Any, schedule: Any) -> int:
        """Restore what was saved of a part; return its step, 0 if there is nothing usable."""
        file = self._file(part)
        try:
            tensors = read_tensors(file)
            header = {name: json.loads(text) for name, text in metadata(file).items()}
        except (UserError, ValueError):
            return 0
        weights = _weights(optimizer)
        shapes = {f"{i}.weight": weight.shape for i, weight in enumerate(weights)}
        saved = {name: value.shape for name, value in tensors.items() if name.endswith(".weight")}
        if saved != shapes or not {"step", "groups", "schedule"} <= header.keys():
            return 0
        with torch.no_grad():
            for i, weight in enumerate(weights):
                weight.copy_(tensors.pop(f"{i}.weight"))
        for name, value in tensors.items():
            number, _, key = name.partition(".")
            optimizer.state[weights[int(number)]][key] = value
        for group, options in zip(optimizer.param_groups, header["groups"]):
            group.update(options)
        schedule.load_state_dict(header["schedule"])
        return int(header["step"])

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, part: str) -> Path:
        return self.folder / f"{re.sub('[^a-z0-9]+', '-', part.lower())}.safetensors"


def _weights(optimizer: Any) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]

"""Writes the untrained policy's embeddings of a configuration's training prompts.

    python -m mmrl.apps.prepare.prompt_states CONFIG --out FILE.npy [key=value ...]

A .npy file [prompts, H] in the order of the data, which the data sources depo and pcl read as
``embeddings``: for a VLM its hidden state at the prompt's last token, with pictures; for other
families their encoder's output. If the configuration's data names the file to be written, override
that.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mmrl.core.errors import UserError
from mmrl.core.types import Prompt
from mmrl.experiment import build
from mmrl.policies.contracts import Replays


def states_of(session: build.Session, prompts: list[Prompt], batch: int) -> NDArray[np.float32]:
    """Compute the states [n, H] of prompts in passes of ``batch``."""
    policy = Replays.of(session.policy)
    policy.prepare(prompts)
    parts = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
    with torch.no_grad():
        states = [policy.prompt_states(part).float().cpu() for part in parts]
    return torch.cat(states).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value, as for mmrl train")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8, help="prompts of a pass")
    options = parser.parse_intermixed_args()
    try:
        session = build.base(options.config, options.overrides)
        states = states_of(session, list(session.source.train), options.batch)
    except UserError as error:
        sys.exit(f"error: {error}")
    with options.out.open("wb") as file:
        np.save(file, states)
    print(f"{len(states)} prompts, states of {states.shape[1]} numbers: {options.out}")


if __name__ == "__main__":
    main()

"""Trains on the pretend device of tests/sim_device.py in a process of its own, and says what was
seen there as JSON.

python -m tests.sim_worker CASE ...  A case is ``toy:FAMILY``, ``objective:NAME:FAMILY`` or
``policy:NAME``; one line of standard output for each, with the fields of ``Seen``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ["ACCELERATE_TORCH_DEVICE"] = "sim:0"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

torch.set_num_threads(1)

from mmrl import advantages, config  # noqa: E402
from mmrl.config.options import TrainOptions  # noqa: E402
from mmrl.core import registry  # noqa: E402
from mmrl.core.errors import UserError  # noqa: E402
from mmrl.core.registry import OBJECTIVES  # noqa: E402
from mmrl.core.types import tree_map  # noqa: E402
from mmrl.objectives import PolicyGradient  # noqa: E402
from mmrl.run import checkpoint, state  # noqa: E402
from mmrl.scoring import Scorer  # noqa: E402
from mmrl.train.optimizers import adamw  # noqa: E402
from mmrl.train.trainer import Trainer  # noqa: E402
from samplers.noise import Rng  # noqa: E402

from . import sim_device as sim  # noqa: E402  before what asks which accelerators there are
from . import toys  # noqa: E402
from .test_contract import made  # noqa: E402
from .test_contract_policies import prompts_for  # noqa: E402
from .test_objective_pairs import KIND, LEARNS, POLICY, close  # noqa: E402

# of networks whose passes are named: those that repeat
WORKS = ("step", "add_text", "add_image", "token")
LONGER = {
    "vlm": {"max_new_tokens": 8},
    "janus_unified": {"plan": {"max_new_tokens": 6}, "answer": {"max_new_tokens": 8}},
}


@dataclass
class Seen:
    """What one case did. Stops are (what, place, how often)."""

    case: str
    error: str = ""
    steps: list[int] = field(default_factory=list)  # stops from each pass of a rollout to the next
    rollout: int = 0  # stops of a whole rollout
    update: int = 0  # stops of one optimizer step
    passes: int = 0  # of one optimizer step
    moved: float = 0.0  # how far the weights went
    resumed: bool = False  # a saved and loaded run has the same weights
    where: dict[str, list] = field(default_factory=dict)


class Watched:
    """Counts stops between the passes of a network."""

    def __init__(self, net: torch.nn.Module):
        self.calls = 0
        self.total: list[int] = []
        self.places: list[Counter] = []
        net.register_forward_pre_hook(self.note)

    def note(self, module: Any, args: tuple) -> None:
        self.calls += 1
        if args and isinstance(args[0], str) and args[0] not in WORKS:
            return
        self.total.append(sim.STOPS.total())
        self.places.append(sim.STOPS.copy())

    def clear(self) -> None:
        self.calls = 0
        self.total.clear()
        self.places.clear()

    def between(self) -> tuple[list[int], Counter]:
        gaps = [after - before for before, after in zip(self.total, self.total[1:], strict=False)]
        return gaps, (self.places[-1] - self.places[0]) if gaps else Counter()


def listed(stops: Counter) -> list:
    return [[*key, count] for key, count in stops.most_common()]


def toy(family: str, **options: Any) -> Any:
    """A toy whose conditions follow it to the device."""
    policy = KIND[family](**options)
    encode = policy.encode

    def placed(prompts: list) -> Any:
        return tree_map(lambda tensor: tensor.to(policy.device), encode(prompts))

    policy.encode = placed
    if hasattr(policy, "visible"):

        def logits(ids: torch.Tensor, cond: dict) -> torch.Tensor:
            return policy.active()(
                ids, policy.visible.to(ids.device, non_blocking=True), cond["label"]
            )

        policy.logits = logits
    return policy


def by_length(media: Any, prompts: list) -> torch.Tensor:
    """Differs from row to row, of any media."""
    return torch.arange(len(prompts)).double().sin()


def of_toy(family: str) -> Trainer:
    return trained(
        toy(family), toys.prompts(2), toys.reward, PolicyGradient(clip_range=1e-2, kl=0.1)
    )


def of_objective(name: str, family: str) -> Trainer:
    policy = toy(family, **POLICY.get((name, family), {}))
    objective = config.build({name: LEARNS.get(name, {})}, OBJECTIVES)
    return trained(policy, toys.prompts(2), close, objective, ema=0.9)


def of_policy(name: str) -> Trainer:
    torch.manual_seed(0)
    policy = made("policies", name, extra=LONGER.get(name, {}))
    return trained(
        policy,
        prompts_for(policy)[:2],
        by_length,
        PolicyGradient(clip_range=1e-2, kl=0.1),
        micro_batch_size=4,
    )


def trained(policy: Any, prompts: list, reward: Any, objective: Any, **options: Any) -> Trainer:
    sizes = {
        "prompts_per_iteration": 2,
        "group_size": 4,
        "train_batch_size": 8,
        "iterations": 4,
        "micro_batch_size": 2,
        "logprob_tolerance": None,
    } | options
    return Trainer(
        policy,
        prompts,
        Scorer({"reward": reward}),
        advantages.flow_grpo,
        objective,
        partial(adamw, lr=1e-3),
        TrainOptions(**sizes),
    )


MAKE = {"toy": of_toy, "objective": of_objective, "policy": of_policy}


def seen(case: str) -> Seen:
    kind, *names = case.split(":")
    found = Seen(case)
    trainer = MAKE[kind](*names)
    policy = trainer.policy
    assert policy.device.type == "sim", "the policy is not on the device"
    before = policy.weights.full()
    watched = Watched(policy.net)
    trainer.iterate()  # what is made once and kept is there now
    improve = trainer.improve

    def counted(*args: Any) -> bool:
        watched.clear()
        with sim.counted() as stops:
            stepped = improve(*args)
        found.update = stops.total()
        found.passes = watched.calls
        found.where["update"] = listed(stops)
        return stepped

    trainer.improve = counted
    trainer.iterate()
    del trainer.improve
    watched.clear()
    policy.fixed_batch_rows = None  # one pass holds all rows
    with sim.counted() as stops, torch.no_grad():
        rollout = policy.rollout(trainer.prompts, 2, Rng.of("again"))
    found.rollout, (found.steps, between) = stops.total(), watched.between()
    found.where |= {"rollout": listed(stops - between), "steps": listed(between)}
    policy.decode(rollout)
    after = policy.weights.full()
    found.moved = max(float((after[name] - value).abs().max()) for name, value in before.items())
    found.resumed = resumes(trainer, after)
    return found


def resumes(trainer: Trainer, weights: dict) -> bool:
    """Whether a checkpoint brings the weights back, and the run goes on."""
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.save(Path(folder), trainer.iteration, *state.capture(trainer))
        trainer.iterate()
        state.restore(trainer, *checkpoint.load(path))
    back = trainer.policy.weights.full()
    same = all(torch.equal(back[name], value) for name, value in weights.items())
    trainer.iterate()
    return same


def main(cases: list[str]) -> None:
    registry.load_built_in()
    for case in cases:
        try:
            found = seen(case)
        except UserError as error:
            found = Seen(case, error=f"UserError: {error}")
        except Exception:
            found = Seen(case, error=traceback.format_exc())
        print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

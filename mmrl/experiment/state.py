"""Captures a trainer's whole state as tensors and plain data, and restores it: 2N iterations equal
N, stop, resume, N to the bit.

Samples, shuffles and noise are keyed by the iteration and need nothing saved. Saved are the weights
and snapshots, the optimizer, the advantage's state, the loss scale, and the global generators,
which only external code uses.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

from mmrl.advantages import memory
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.sharding import like
from mmrl.core.weights import LIVE, block, reshard
from mmrl.data.base import Curriculum
from mmrl.experiment.checkpoint import Arrays, Tensors
from mmrl.objectives.contracts import Stateful
from mmrl.policies.contracts import Stateful as LearningPolicy
from mmrl.scoring import Scorer
from mmrl.train.trainer import Trainer
from mmrl.train.update import Update


def capture(trainer: Trainer) -> tuple[Arrays, dict[str, Any]]:
    """Return the whole state without copying: save it, or copy it, before the next step. A
    collective call."""
    weights = trainer.policy.weights
    arrays = {"weights": weights.stored(LIVE)}
    arrays |= {f"snapshot-{name}": weights.stored(name) for name in trainer.snapshots()}
    arrays["optimizer"], optimizer = _flatten(_optimizer_state(trainer, trainer.update))
    meta: dict[str, Any] = {
        "iteration": trainer.iteration,
        "step": trainer.update.step,
        "optimizer": optimizer,
        "rng": _generators(),
    }
    meta["advantage"] = memory.capture(trainer.advantage)
    if (critic := trainer.critic) is not None:
        arrays["optimizer-critic"], states = _flatten(_optimizer_state(trainer, critic.inner))
        meta["critic"] = {"optimizer": states, "step": critic.inner.step}
        if critic.critic.head is not None:
            arrays["head-critic"], meta["critic"]["head"] = critic.head_state()
    if isinstance(trainer.scorer, Scorer):
        meta["rewards"] = trainer.scorer.state_dict()
    objective = trainer.objective
    meta["objective"] = objective.state_dict() if isinstance(objective, Stateful) else {}
    policy = trainer.policy
    meta["policy"] = policy.state_dict() if isinstance(policy, LearningPolicy) else {}
    if trainer.pass_rows is not None:
        meta["pass_rows"] = trainer.pass_rows
    if trainer.reward_weights is not None:
        meta["reward_weights"] = trainer.reward_weights.state_dict()
    if isinstance(trainer.prompts, Curriculum):
        meta["data"] = trainer.prompts.state_dict()
    meta["stages"] = {}
    for stage in trainer.stages:
        if name := stage.saved_as:
            arrays[f"stage-{name}"], meta["stages"][name] = stage.state_dict()
    if trainer.device.scales_loss:
        meta["scaler"] = trainer.device.accelerator.scaler.state_dict()
    return arrays, meta


def restore(trainer: Trainer, arrays: Arrays, meta: dict[str, Any]) -> None:
    """Put a captured state into a newly built trainer of the same configuration."""
    try:
        _restore_weights(trainer, arrays)
    except ValueError as error:
        raise UserError(
            f"the checkpoint does not fit this configuration's model: {error}"
        ) from error
    _restore_pass_size(trainer, meta)
    if meta["step"]:
        tensors = _optimizer_tensors(trainer, arrays["optimizer"])
        _load_optimizer(trainer, trainer.update, _unflatten(tensors, meta["optimizer"]))
    _restore_critic(trainer, arrays, meta.get("critic"))
    trainer.iteration = meta["iteration"]
    trainer.update.step = meta["step"]
    memory.restore(trainer.advantage, meta.get("advantage", {}))
    if isinstance(trainer.scorer, Scorer):
        trainer.scorer.load_state_dict(meta.get("rewards", {}))
    _restore_learnt(trainer, meta)
    if trainer.reward_weights is not None:
        trainer.reward_weights.load_state_dict(meta.get("reward_weights", {}))
    if isinstance(trainer.prompts, Curriculum):
        trainer.prompts.load_state_dict(meta.get("data", {}))
    for stage in trainer.stages:
        if name := stage.saved_as:
            if "stages" not in meta:
                raise UserError(
                    f"the checkpoint is of an earlier version, which kept the state of {name} "
                    f"under another name: export its weights and begin a new run with start: FOLDER"
                )
            stage.load_state_dict(arrays.get(f"stage-{name}", {}), meta["stages"].get(name))
    if trainer.device.scales_loss:
        trainer.device.accelerator.scaler.load_state_dict(meta["scaler"])
    _set_generators(meta["rng"])


def _restore_critic(trainer: Trainer, arrays: Arrays, meta: dict[str, Any] | None) -> None:
    """Restore the critic; its weights are a snapshot."""
    critic = trainer.critic
    if critic is None or meta is None or not meta["step"]:
        return
    tensors = _optimizer_tensors(trainer, arrays["optimizer-critic"])
    _load_optimizer(trainer, critic.inner, _unflatten(tensors, meta["optimizer"]))
    critic.inner.step = meta["step"]
    if critic.critic.head is not None and "head-critic" in arrays:
        critic.load_head_state(arrays["head-critic"], meta["head"])


def _restore_learnt(trainer: Trainer, meta: dict[str, Any]) -> None:
    """Put back what policy and objective had learnt besides the weights."""
    for name, part in (("policy", trainer.policy), ("objective", trainer.objective)):
        if name in meta and isinstance(part, (LearningPolicy, Stateful)):
            part.load_state_dict(meta[name])


def _restore_pass_size(trainer: Trainer, meta: dict[str, Any]) -> None:
    """Restore the measured batch size of passes, which affects rounding."""
    rows = meta.get("pass_rows")
    if rows and trainer.options.micro_batch_size == "auto":
        trainer.limit_passes(int(rows))


def _restore_weights(trainer: Trainer, arrays: Arrays) -> None:
    """Load the live weights and the snapshots this run keeps. Snapshots that the checkpoint lacks,
    because the configuration is new, start from the live weights; the reference stays the base
    model, as in a new trainer."""
    weights = trainer.policy.weights
    weights.load(arrays["weights"])
    for name in trainer.snapshots():
        if f"snapshot-{name}" in arrays:
            weights.load(arrays[f"snapshot-{name}"], name)
        elif name != "ref":
            weights.keep(name)


def _optimizer_state(trainer: Trainer, update: Update) -> dict[str, Any]:
    """Return the state by parameter name, under FSDP2 each process's shards."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    reshard(trainer.policy.net)
    # torch would create a state by taking a step, and the first real one would count as the second
    if update.step == 0:
        return {}
    return get_optimizer_state_dict(trainer.policy.net, _own(update.optimizer))


def _optimizer_tensors(trainer: Trainer, tensors: Tensors) -> dict[str, Tensor]:
    """Shard each tensor as its parameter if it has the parameter's size; others, such as the count
    of steps, are whole."""
    parameters = trainer.policy.weights.parameters()
    placed = {}
    for key in tensors:
        p = parameters[key.partition("/")[0]]
        try:
            placed[key] = like(p, block(tensors, key, p).to(p.device))
        except ValueError:
            placed[key] = tensors[key]
    return placed


def _load_optimizer(trainer: Trainer, update: Update, state: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    reshard(trainer.policy.net)
    lenient = StateDictOptions(strict=False)  # parameters without a gradient have no state
    inner = _own(update.optimizer)
    set_optimizer_state_dict(trainer.policy.net, inner, state, options=lenient)


def _own(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's, if that is one."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _flatten(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a state into tensors named ``parameter/slot``, or ``parameter/slot/name`` if a slot
    holds several, and everything else as JSON."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    places: set[int] = set()
    for parameter, slots in state.get("state", {}).items():
        for slot, value in slots.items():
            named = {f"/{name}": part for name, part in value.items()} if _nested(value) else None
            for name, part in (named or {"": value}).items():
                target = tensors if isinstance(part, Tensor) else values
                if named and part.data_ptr() in places:  # parameters share tables of 8-bit values
                    part = part.clone()
                target[f"{parameter}/{slot}{name}"] = part
                if named:
                    places.add(part.data_ptr())
    return tensors, {"groups": state.get("param_groups", []), "values": values}


def _nested(value: Any) -> bool:
    """Tell whether a slot holds several tensors by name, as those of 8-bit optimizers do."""
    return isinstance(value, dict) and all(isinstance(part, Tensor) for part in value.values())


def _unflatten(tensors: dict[str, Tensor], plain: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {}
    for key, value in {**tensors, **plain["values"]}.items():
        parameter, slot, *name = key.split("/")
        slots = state.setdefault(parameter, {})
        if name:
            slots.setdefault(slot, {})[name[0]] = value
        else:
            slots[slot] = value
    return {"state": state, "param_groups": plain["groups"]}


def _generators() -> list[dict[str, Any]]:
    """Gather the state of the global generators of every process, in order of rank."""
    numpy = np.random.get_state(legacy=False)
    words = numpy["state"]
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    states = {
        "python": random.getstate(),
        "numpy": [
            numpy["bit_generator"],
            words["key"].tolist(),
            words["pos"],
            numpy["has_gauss"],
            numpy["gauss"],
        ],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [cuda_state.numpy().tobytes().hex() for cuda_state in cuda],
    }
    return distributed.all_gather_plain(states)


def _set_generators(saved: list[dict[str, Any]]) -> None:
    states = saved[distributed.process()[0] % len(saved)]
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes(states["torch"]))
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_bytes(state) for state in states["cuda"]])


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).clone()

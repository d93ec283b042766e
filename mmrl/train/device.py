"""Decides where and how passes run: a thin layer over accelerate."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.config.options import TrainOptions
from mmrl.core import distributed, peers
from mmrl.core.errors import UserError
from mmrl.policies.contracts import GroupsParameters, KeepsWhole, ParameterGroup, SplitsSequences
from mmrl.policies.lora import keep_input_dtype
from mmrl.train.shard_units import shard_classes, ties_kept

MakeOptimizer = Callable[..., torch.optim.Optimizer]  # of parameters, or of groups of them
ACCELERATE_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
TRUE = ("true", "1", "yes", "y", "t", "on")  # as accelerate reads it
UNSUPPORTED = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM", "FSDP1": "FSDP version 1"}


def check_precision(options: TrainOptions) -> None:
    """Raise UserError if this machine cannot compute in the requested precision."""
    if options.precision == "fp16" and not torch.cuda.is_available():
        raise UserError("train.precision fp16 needs a CUDA device; use bf16 or fp32")


def check_launcher() -> None:
    """Raise UserError if the launcher chose a way of sharding the model that mmrl does not
    support."""
    chosen = {name for name in UNSUPPORTED if _uses(name)}
    if _uses("FSDP") and os.environ.get("FSDP_VERSION", "1") != "2":
        chosen.add("FSDP1")
    if chosen:
        raise UserError(
            f"accelerate was configured for {UNSUPPORTED[min(chosen)]}, which mmrl does "
            f"not support: launch with "
            "--multi_gpu (copies), or with --use_fsdp --fsdp_version 2 (shards)"
        )
    if _uses("FSDP") and os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() in TRUE:
        raise UserError(
            "fsdp_offload_params: true is not supported, since mmrl samples on the device that the "
            "weights lie on, which would be the CPU; set it to false, and save memory by policy "
            "options lora and quantization, optimizer adamw_8bit and train.gradient_checkpointing"
        )


def check_mesh(options: TrainOptions, processes: int) -> None:
    """Raise UserError, before anything is loaded, if processes do not divide into the requested
    groups. One process alone needs no groups."""
    if processes == 1:
        return
    split = options.context_parallel
    sizes = {"context_parallel": split.size if split else 1, "shard_size": options.shard_size or 1}
    for name, size in sizes.items():
        if processes % size:
            raise UserError(
                f"train.{name}: {processes} processes do not divide into groups of {size}; start "
                f"a multiple of {size}, or use a divisor of {processes}"
            )
    if options.shard_size is not None and not _uses("FSDP"):
        raise UserError(
            f"train.shard_size {options.shard_size}: these processes hold copies, nothing is "
            f"sharded; launch with --use_fsdp --fsdp_version 2, or leave it out"
        )


def _mesh(options: TrainOptions) -> Any:
    """Return accelerate's mesh: shards inside groups, replicas between them; None: the launcher's
    own."""
    size = started()
    shards = options.shard_size
    if size == 1 or shards is None or shards == size:
        return None
    from accelerate.parallelism_config import ParallelismConfig

    return ParallelismConfig(dp_replicate_size=size // shards, dp_shard_size=shards)


def is_fsdp() -> bool:
    """Tell whether the launcher is configured to shard."""
    return _uses("FSDP")


def started() -> int:
    """Return how many processes the launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _uses(name: str) -> bool:
    """Tell whether `accelerate launch` is configured to use it."""
    return os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"


def groups_of(policy: Any) -> list[ParameterGroup]:
    """List the trained parameters in groups that share a learning rate."""
    if not isinstance(policy, GroupsParameters):
        trained = [p for p in policy.net.parameters() if p.requires_grad]
        return [ParameterGroup(trained)] if trained else []
    return [group for group in policy.parameter_groups() if group.parameters]


def check_trained_precision(groups: list[ParameterGroup]) -> None:
    """Raise UserError if weights that are trained are stored in half precision.

    The steps of a usual learning rate are smaller than half a unit in the last place of bfloat16,
    and are rounded away.
    """
    halves = {p.dtype for group in groups for p in group.parameters if p.dtype.itemsize < 4}
    if halves:
        name = str(min(halves, key=str)).removeprefix("torch.")
        raise UserError(
            f"policy option dtype {name}: these weights are trained, and in {name} most "
            f"optimizer steps are "
            f"rounded away; set dtype=float32 with "
            f"train.precision={'fp16' if name == 'float16' else 'bf16'}, "
            "which computes in half precision and keeps float32 weights, or train adapters (lora)"
        )


class Device:
    """Runs passes on one process's share of the machine. ``accelerate launch`` or torchrun starts
    several."""

    def __init__(self, options: TrainOptions):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs

        check_precision(options)
        check_launcher()
        peers.meet()
        AcceleratorState._reset_state()  # a second trainer in one program may use another precision
        self.accelerator = Accelerator(
            mixed_precision=ACCELERATE_PRECISION[options.precision],
            cpu=_many_on_cpu(),
            # 1 whatever ACCELERATE_GRADIENT_ACCUMULATION_STEPS says: the loss is a mean over the
            # whole step already
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            parallelism_config=_mesh(options),
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=options.timeout))],
        )
        self.options = options
        # cuDNN's backward pass returns NaN for some lengths (pytorch#196678; docs/results/gpu.md),
        # and it builds a plan for each new length: 0.7 s a token on an H100
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.all_processes: int = self.accelerator.num_processes
        check_mesh(options, self.all_processes)
        distributed.share_rows(self._neighbours())
        atexit.unregister(distributed.leave)  # once, however many trainers there are
        atexit.register(distributed.leave)
        self.main: bool = self.accelerator.is_main_process
        # of those that have their own rows
        self.rank, self.processes = distributed.world()

    @property
    def scales_loss(self) -> bool:
        """Tell whether the loss is scaled, which only fp16 needs."""
        return self.accelerator.scaler is not None

    def prepare(self, policy: Any, optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        """Move the network to the device, wrap it (DDP, FSDP2), and return its prepared
        optimizer."""
        if self.options.gradient_checkpointing:
            policy.enable_gradient_checkpointing()
        self._split(policy)
        groups = groups_of(policy)
        if not groups:
            raise UserError(
                "the policy has no trainable parameters; set lora, or leave full training on"
            )
        check_trained_precision(groups)
        # needless, all have loaded the weights; and it fails on models with buffers
        if self.sharded:
            self.accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        if policy.find_unused_parameters:
            from accelerate.utils import DistributedDataParallelKwargs

            self.accelerator.ddp_handler = DistributedDataParallelKwargs(
                find_unused_parameters=True
            )
        if self.accelerator.mixed_precision != "no":
            keep_input_dtype(policy.net)
        self._name_units(policy)
        prepared: torch.optim.Optimizer
        with ties_kept(policy.net):
            policy.trained, prepared = self.accelerator.prepare(
                policy.net, _built(optimizer, groups)
            )
        return prepared

    def optimizer_of(self, policy: Any, optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        """Return a further optimizer of a prepared policy's parameters, for a snapshot of them."""
        return _built(optimizer, groups_of(policy))

    def _name_units(self, policy: Any) -> None:
        """Tell accelerate which modules to gather one by one (FSDP2), unless the user has, and
        which to keep whole."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is None or not self.sharded:
            return
        whole = policy.unsharded if isinstance(policy, KeepsWhole) else ()
        if not plugin.transformer_cls_names_to_wrap:
            plugin.transformer_cls_names_to_wrap = shard_classes(policy.net, whole) or None
        plugin.ignored_modules = list(whole) or None
        for module in whole:
            module.to(self.accelerator.device)

    def _neighbours(self) -> int:
        """Count the processes that hold the same rows."""
        split = self.options.context_parallel
        return split.size if split and self.all_processes > 1 else 1

    def _split(self, policy: Any) -> None:
        """Split the sequences of the network over the processes that hold the same rows."""
        split = self.options.context_parallel
        if split is not None and self._neighbours() > 1:
            if not isinstance(policy, SplitsSequences):
                raise UserError(
                    f"train.context_parallel: {type(policy).__name__} {SplitsSequences.lack}"
                )
            policy.enable_context_parallel(split.ulysses_degree, split.ring_degree)

    @property
    def sharded(self) -> bool:
        """Tell whether each process holds a part of the weights (FSDP2)."""
        return bool(self.accelerator.is_fsdp2)

    def place(self, policy: Any) -> None:
        """Move the network to the device for sampling only: its passes run in ``train.precision``
        as in training; everything else (encoders, decoders, rewards) stays as loaded."""
        self._split(policy)
        self._name_units(policy)
        with ties_kept(policy.net):
            policy.trained = self.accelerator.prepare_model(policy.net, evaluation_mode=True)

    def no_sync(self, trained: nn.Module) -> AbstractContextManager[None]:
        """Keep the gradients of a pass on this process unless it is the last of its step (DDP),
        which saves communication.

        FSDP2 reduces them after every pass: without, each process would keep the gradient of the
        whole model.
        """
        return nullcontext() if self.sharded else self.accelerator.no_sync(trained)

    def backward(self, loss: Tensor) -> None:
        """Compute gradients. ``loss`` is this process's share of a *sum* over processes; the
        wrappers average, hence the factor. Of those that hold the same rows each computes the whole
        loss, and a part of its gradient."""
        self.accelerator.backward(loss * self.all_processes)

    def average_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Average gradients over processes that hold replicas, if no backward pass has done so; a
        collective call. A parameter without a gradient on any process keeps none."""
        if self.all_processes == 1:
            return
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32)
        on_any = distributed.all_max(present.to(self.accelerator.device)).tolist()
        for parameter, has_gradient in zip(parameters, on_any, strict=True):
            if has_gradient:
                local = parameter.grad
                local = torch.zeros_like(parameter) if local is None else local
                parameter.grad = distributed.all_sum(local) / self.all_processes

    def clip(self, policy: Any, limit: float | None) -> Tensor:
        """Clip the gradient to the global norm ``limit``; None does not clip. Returns the norm
        before, []."""
        norm = self.accelerator.clip_grad_norm_(policy.trained.parameters(), limit or float("inf"))
        norm = norm if isinstance(norm, Tensor) else torch.tensor(float(norm))
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def any(self, flag: bool) -> bool:
        """Tell whether a flag is set on any process; a collective call."""
        return bool(distributed.all_max(torch.tensor(float(flag), device=self.accelerator.device)))

    def wait(self) -> None:
        self.accelerator.wait_for_everyone()


def _built(optimizer: MakeOptimizer, groups: list[ParameterGroup]) -> torch.optim.Optimizer:
    """Build an optimizer whose groups have their learning rates; a single plain group is passed as
    a list of parameters."""
    if len(groups) == 1:
        built = optimizer(groups[0].parameters)
    else:
        built = optimizer([{"params": group.parameters} for group in groups])
    # an optimizer may split groups, by the shapes of their parameters
    group_of = {id(p): group for group in groups for p in group.parameters}
    for settings in built.param_groups:
        group = group_of[id(settings["params"][0])]
        settings["lr"] = group.lr if group.lr is not None else settings["lr"] * group.factor
    if type(built).__name__ == "Prodigy" and len({g["lr"] for g in built.param_groups}) > 1:
        raise UserError(
            "optimizer prodigy: it finds one learning rate for all parameters; leave out lr and "
            "factor of policy.vlm.train, or use another optimizer"
        )
    return built


def _many_on_cpu() -> bool:
    """Tell whether this is one of several processes without a GPU: accelerate must be configured
    for it, else it takes each for the only one."""
    return started() > 1 and not torch.accelerator.is_available()

"""Implements ``mmrl train CONFIG --dry-run``, which reports a run without its weights: shapes,
batches, forwards, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mmrl.config as configs
from mmrl.apps.dry_run import costs, published, replays
from mmrl.apps.dry_run.hollow import Counted, Hollow, counted, hollow
from mmrl.apps.dry_run.rehearsal import Rehearsed, Stage, rehearse
from mmrl.apps.dry_run.stand_in import call_defaults, call_of, folder_at, stand_in
from mmrl.apps.dry_run.weightless import Sizes, folder_of, sizes_of
from mmrl.config.options import TrainOptions
from mmrl.config.plan import Plan, arithmetic
from mmrl.config.schema import Resolved, construct, resolve
from mmrl.core.errors import UserError
from mmrl.core.registry import OBJECTIVES, OPTIMIZERS, POLICIES
from mmrl.core.registry import options as options_of
from mmrl.data.ledger import refuse_broken
from mmrl.experiment.build import check_trackers, compares, read, read_data, supervised
from mmrl.policies.base import RolloutContext
from mmrl.policies.diffusion import prompt_lengths
from mmrl.policies.diffusion.flow_plan import planned
from mmrl.policies.diffusion.flow_policy import FlowPolicy
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy
from mmrl.policies.lora import Lora
from mmrl.policies.quantization import Blocks, blocks_of
from mmrl.train.trainer import kept_snapshots
from mmrl.zoo.models.any_pipeline.any_pipeline import LENGTH, AnyPipeline
from samplers.windows import FIXED


@dataclass(frozen=True)
class Report:
    """Holds what is known of a run. Bytes of memory are of one device; None is unknown, and
    ``unknown`` says why."""

    policy: str
    path: str
    plan: Plan
    train: TrainOptions
    shape: tuple[int, ...] | None = None  # of one sample's latents
    # of the sample and images beside it, of text in the same sequence
    tokens: tuple[int, int] | None = None
    steps: int | None = None  # of the sampler
    noisy: int | None = None  # of them, those with noise in the first iteration
    network_rows: float = 1  # rows of the network for one sample; guidance mostly takes two
    counted: Counted | None = None  # forwards of an iteration
    model: costs.Model | None = None
    # optimizer steps of a snapshot that learns, before each of the policy's; 0: none learns
    critic_steps: int = 0
    critic_beside: bool = False  # decisions are trained on as well
    stored: int | None = None  # bytes of the visited latents of one process
    offload: bool = False
    memory: dict[str, float | None] = field(default_factory=dict)
    peak: float | None = None
    # peak where weights, gradients and optimizer are shared out over the processes
    sharded: float | None = None
    unknown: tuple[str, ...] = ()
    account: tuple[str, ...] = ()  # what was read of the data
    cut_prompts: tuple[str, ...] = ()  # what text encoders do not read of the prompts
    call_defaults: str = ""  # what a replayed pipeline's call says without having been asked
    stand_in: str = ""  # the family that is looked at in place of a replayed pipeline
    stage: Stage | None = None  # of a replayed pipeline without a family: its passes
    rehearsed: Rehearsed | None = None  # what they take


def dry_run(path: Path, overrides: Sequence[str] = (), processes: int = 1) -> Report:
    """Check a configuration and report what its run needs. Raises UserError as training would."""
    configuration = read(path, overrides, processes)
    check_trackers(configuration)
    train = configuration.section("train", TrainOptions)
    problems: list[str] = []
    policy = resolve(configuration["policy"], POLICIES, configuration.place(("policy",)), problems)
    configs.raise_all(problems)
    name = (
        configuration["policy"]
        if isinstance(configuration["policy"], str)
        else next(iter(configuration["policy"]))
    )
    plan = arithmetic(train, processes, not compares(configuration))
    source, summaries = read_data(configuration)
    refuse_broken(summaries, len(source.train) + len(source.held_out))
    accounts = tuple(line for summary in summaries for line in summary.lines())
    report = Report(name, str(policy.options.get("path", "")), plan, train, account=accounts)
    report = replace(report, cut_prompts=_cut_prompts(policy, source))
    if policy.entry is AnyPipeline:
        report = replace(report, call_defaults=call_defaults(policy))
        family, policy = stand_in(policy)
        report = replace(report, stand_in=family)
    entry = policy.entry
    if isinstance(entry, type) and issubclass(entry, FolderPolicy):
        report = _of_folder(report, entry, policy, configuration)
    elif entry is AnyPipeline and (place := folder_at(report.path)) is not None:
        report = _of_pipeline(report, place, policy, configuration)
    else:
        report = _of_others(report, policy, configuration)
    return _with_memory(report, configuration, processes)


def _cut_prompts(resolved: Resolved, source: Any) -> tuple[str, ...]:
    """Say what the text encoders of a local folder do not read of the data's prompts."""
    place = folder_of(str(resolved.options.get("path", "")))
    of_diffusers = resolved.entry is AnyPipeline or (
        isinstance(resolved.entry, type) and issubclass(resolved.entry, FolderPolicy)
    )
    if place is None or not of_diffusers or not (place / "model_index.json").is_file():
        return ()
    texts = [str(p["text"]) for p in (*source.train, *source.held_out) if p.get("text")]
    if resolved.entry is not AnyPipeline:
        known = options_of(resolved.entry)
        default = known["text_length"].default if "text_length" in known else None
        length = resolved.options.get("text_length", default)
        return prompt_lengths.cut(str(place), texts, length)
    call = resolved.options.get("call") or {}
    limit = prompt_lengths.limit_of(call, call_of(resolved))
    return prompt_lengths.cut(str(place), texts, limit, LENGTH)


def _of_folder(
    report: Report, entry: type[FolderPolicy], resolved: Resolved, configuration: configs.Config
) -> Report:
    """Report on a family in diffusers' format, by the real constructor on its config files."""
    place = folder_at(report.path)
    if place is None:
        return replace(report, unknown=(_why(report.path),))
    options = construct(resolved.options)
    try:
        policy = hollow(entry, place, options)
    except (UserError, ValueError) as error:
        raise UserError(resolved.place.say(str(error))) from error
    layers = costs.layers_of(policy)
    unet = hasattr(policy.config, "block_out_channels")
    known, decoder, encoders, blocks = _parameters(report.path, policy, entry)
    lora = options.get("lora")
    trained = known[0] if lora is None else _adapted(lora, known[1])
    unknown = (
        ()
        if trained is not None
        else ("LoRA with targets of your own: their number of parameters",)
    )
    model = costs.Model(
        known[0],
        trained,
        layers,
        decoder,
        encoders,
        options.get("dtype", "float32"),
        lora is not None,
        options.get("text_encoder_placement", "offload"),
        options.get("quantization"),
        blocks,
    )
    report = replace(report, tokens=None if unet else costs.tokens_of(policy), unknown=unknown)
    report = replace(report, network_rows=2 if policy.guidance_scale != 1 else 1, model=model)
    report = _sampled(report, policy, configuration)
    return replace(report, counted=counted(policy, configuration, report.train))


def _sampled(report: Report, policy: FlowPolicy, configuration: configs.Config) -> Report:
    """Report what a sampler does in an iteration, and what of its paths is kept."""
    plan = planned(policy, report.train.group_size, FIXED)
    shape = policy.shape
    objective = configuration.build("objective", OBJECTIVES)
    context = RolloutContext(reads=objective.states_read())
    states = len(planned(policy, report.train.group_size, FIXED, context).stored)
    critic = objective.critic()
    stored = (
        report.plan.rows_per_process * states * math.prod(shape) * policy.trajectory_dtype.itemsize
    )
    return replace(
        report,
        shape=shape,
        steps=len(plan.times) - 1,
        noisy=int((plan.eta > 0).sum()),
        stored=stored,
        offload=policy.offload_trajectory,
        critic_steps=0 if critic is None else critic.steps,
        critic_beside=critic is not None and objective.sums_kinds,
    )


def _of_pipeline(
    report: Report, place: Path, resolved: Resolved, configuration: configs.Config
) -> Report:
    """Report on a pipeline that no family is written for; where its code cannot do without numbers,
    on its weights alone."""
    try:
        return _of_replay(report, place, resolved, configuration)
    except UserError:
        raise
    except Exception as error:  # its code may look at numbers in any way, and fail with anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = f"passes of the network and what activations take: on fake weights {lines[0]}"
        report = _of_others(report, resolved, configuration)
        return replace(report, unknown=(*report.unknown, why))


def _of_replay(
    report: Report, place: Path, resolved: Resolved, configuration: configs.Config
) -> Report:
    """Report on a pipeline that no family is written for, by a pass of its own code on fake
    weights."""
    options = construct(resolved.options)
    train = report.train
    try:
        stage = replays.replayed(place, options, train, report.plan.micro_batch)
        rehearsed = rehearse(stage, decode=False)
    except (UserError, ValueError) as error:
        raise UserError(resolved.place.say(str(error))) from error
    policy = stage.policy
    activations = rehearsed.update.memory
    model = costs.Model(
        rehearsed.parameters,
        rehearsed.trained,
        (),
        rehearsed.bytes_decoder // 4,
        published.encoders(report.path) or policy.sizes.encoders,
        options.get("dtype", "float32"),
        options.get("lora") is not None,
        options.get("text_encoder_placement", "offload"),
        options.get("quantization"),
        policy.sizes.blocks,
        tracked=activations["activations"] + activations["temporary"] + activations["other"],
    )
    report = _sampled(replace(report, model=model), policy, configuration)
    rows = stage.network_rows
    once = counted(policy, configuration, train)
    once = replace(
        once,
        sampling=round(once.sampling * rows),
        training=None if once.training is None else round(once.training * rows),
    )
    return replace(report, network_rows=rows, counted=once, stage=stage, rehearsed=rehearsed)


def optimizer_bytes(configuration: configs.Config, report: Report) -> float:
    """Measure the bytes that the optimizer keeps for a trained number, on a small real matrix;
    what learns beside the policy keeps as many of its own."""
    weight = nn.Parameter(torch.zeros(256, 256))
    optimizer = configuration.build("optimizer", OPTIMIZERS)([weight])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values()]
    tensors = (x for x in states if isinstance(x, torch.Tensor) and x.ndim)
    return learners(report) * sum(x.nbytes for x in tensors) / weight.numel()


def learners(report: Report) -> int:
    """Count the optimizers of a run: the policy's, and that of a snapshot that learns."""
    return 2 if report.critic_steps else 1


def _why(path: str) -> str:
    if path.startswith("world:") and folder_of(path) is None:
        return (
            f"{path} is not built yet (mmrl build {path.removeprefix('world:')}): shapes, "
            f"forwards and memory"
        )
    return (
        f"the architecture of {path}: give a local folder with its config files for shapes, "
        f"forwards and memory"
    )


def _parameters(
    path: str, policy: FolderPolicy, entry: type[FolderPolicy]
) -> tuple[tuple[int, int], int | None, int | None, Blocks]:
    """Count parameters, or read them in the table: ((of the network, of its adapters per rank), of
    the autoencoder, of the encoders, of the network's blocks)."""
    known = published.table()["models"].get(path)
    if known is not None:
        count = known["parameters"]
        networks = sum(value for part, value in count.items() if part != "vae")
        encoders = published.encoders(path)
        return (networks, known["lora"]), count["vae"], encoders, Blocks(*known["blocks"])
    hollows = [net for net in (policy.net, *policy.net.children()) if isinstance(net, Hollow)]
    nets = [published.on_meta(net.of.__name__, dict(net.config)) for net in hollows]
    suffixes = entry.attention
    sizes = (
        sum(map(published.parameters, nets)),
        sum(published.per_rank(net, suffixes) for net in nets),
    )
    blocks = [blocks_of(net) for net in nets]
    most = Blocks(sum(b.weights for b in blocks), max(b.largest for b in blocks))
    return sizes, published.parameters(policy.vae), None, most


def _adapted(lora: Lora | int, per_rank: int) -> int | None:
    if isinstance(lora, int):
        return lora * per_rank
    return None if lora.targets else lora.rank * per_rank


def _of_others(report: Report, resolved: Resolved, configuration: configs.Config) -> Report:
    """Report on models that write tokens, by what the table or their files say of them."""
    options = construct(resolved.options)
    rows = report.plan.rows
    train = report.train
    scored = rows * train.epochs
    snapshots = kept_snapshots(configuration.build("objective", OBJECTIVES), train)
    sampled = 0 if supervised(configuration) else rows
    once = Counted(sampled, scored, 0, report.plan.steps * train.epochs, snapshots)
    length = _default(resolved, "max_new_tokens")
    budgets = options.get("budgets")
    prompt = getattr(budgets, "prompt_tokens", None) or 0
    try:
        sizes = sizes_of(report.path, resolved.entry, options, (length or 0) + prompt)
    except UserError as error:
        raise UserError(resolved.place.say(str(error))) from error
    tokens = (length, 0) if length else None
    if sizes is None:
        return replace(report, unknown=(_why(report.path),), counted=once, tokens=tokens)
    model = costs.Model(
        sizes.network,
        sizes.trained,
        sizes.layers,
        sizes.decoder,
        sizes.encoders,
        _default(resolved, "dtype") or "float32",
        sizes.adapters,
        quantization=options.get("quantization"),
        blocks=sizes.blocks,
    )
    unknown = [] if sizes.trained is not None else ["how many parameters the adapters have (lora)"]
    if resolved.entry is not AnyPipeline:
        unknown.append(_about_tokens(sizes, prompt))
    return replace(
        report, model=model, counted=once, tokens=tokens, stored=0, unknown=tuple(unknown)
    )


def _about_tokens(sizes: Sizes, prompt: int) -> str:
    """Say what of a model's tokens is not counted."""
    if not sizes.layers:
        return "the layers of this network: what activations take"
    if prompt:
        return "tokens of prompts: the most that budgets.prompt_tokens allows are counted"
    return (
        "tokens of prompts and images: activations are those of the answers (with the policy's "
        "option budgets.prompt_tokens those of the longest prompts too)"
    )


def _default(resolved: Resolved, name: str) -> Any:
    """Return an option of the policy as it is set, or its default."""
    known = options_of(resolved.entry)
    default = known[name].default if name in known else None
    return resolved.options.get(name, default)


def _with_memory(report: Report, configuration: configs.Config, processes: int) -> Report:
    model = report.model
    iteration = report.counted
    if model is None or iteration is None:
        return report
    rows = report.plan.micro_batch * (2 if report.network_rows > 1 else 1)
    parts = costs.memory(
        model,
        report.train,
        rows,
        len(iteration.snapshots),
        report.stored or 0,
        optimizer_bytes(configuration, report),
        report.offload,
    )
    peak = costs.peak(parts, model)
    return replace(
        report,
        memory=parts,
        peak=peak,
        sharded=costs.peak(parts, model, processes) if processes > 1 else None,
    )

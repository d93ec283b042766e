"""Implements ``mmrl train CONFIG --dry-run``, which describes a run without its weights: shapes,
batches, forward passes. ``mmrl.apps.dry_run.estimate`` adds its memory, by a pass at true size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mmrl.config as configs
from mmrl.apps.dry_run import published, rehearsal, replays
from mmrl.apps.dry_run.hollow import Counted, counted, hollow
from mmrl.apps.dry_run.rehearsal import Rehearsed, Stage, rehearse
from mmrl.apps.dry_run.stand_in import call_defaults, call_of, folder_at, folder_of, stand_in
from mmrl.config.options import TrainOptions
from mmrl.config.plan import Plan, arithmetic
from mmrl.config.schema import Resolved, construct, resolve
from mmrl.core.errors import UserError
from mmrl.core.registry import OBJECTIVES, POLICIES
from mmrl.core.registry import options as options_of
from mmrl.data.ledger import refuse_broken
from mmrl.experiment.build import check_trackers, compares, read, read_data, supervised
from mmrl.objectives.contracts import HasCritic
from mmrl.policies.base import RolloutContext
from mmrl.policies.diffusion import prompt_lengths
from mmrl.policies.diffusion.flow_plan import planned
from mmrl.policies.diffusion.flow_policy import FlowPolicy
from mmrl.policies.diffusion.pipeline_policy import FolderPolicy
from mmrl.policies.quantization import check_frozen
from mmrl.policies.vlm.parts import adapters_only
from mmrl.train.trainer import kept_snapshots
from mmrl.zoo.models.any_pipeline.any_pipeline import LENGTH, AnyPipeline
from samplers.windows import FIXED


@dataclass(frozen=True)
class Report:
    """Holds what is known about a run without a pass of its network. None is unknown, and
    ``unknown`` says why."""

    configuration: configs.Config
    resolved: Resolved  # the policy, or the family that replaces it
    policy: str
    path: str
    plan: Plan
    train: TrainOptions
    options: dict[str, Any] = field(default_factory=dict)  # of ``resolved``, converted
    shape: tuple[int, ...] | None = None  # of one sample's latents
    tokens: int | None = None  # maximum of an answer
    steps: int | None = None  # of the sampler
    noisy: int | None = None  # of them, stochastic ones in the first iteration
    network_rows: float = 1  # rows of the network per sample; guidance mostly takes two
    counted: Counted | None = None  # forwards of an iteration
    # optimizer steps of a trained snapshot, before each of the policy's; 0: none is trained
    critic_steps: int = 0
    critic_beside: bool = False  # decisions are also trained on
    stored: int = 0  # bytes of the visited latents of one process
    offload: bool = False
    encoders: int = 0  # bytes of text and image encoders, as far as they are known
    placement: str = "offload"  # of them, kept after use
    unknown: tuple[str, ...] = ()
    account: tuple[str, ...] = ()  # statistics of the data
    cut_prompts: tuple[str, ...] = ()  # truncation of prompts by text encoders
    call_defaults: str = ""  # defaults of a replayed pipeline's call
    stand_in: str = ""  # the family measured instead of a replayed pipeline
    stage: Callable[[], Stage] | None = None  # builds the model on fake tensors; None: unknown
    # of a replayed pipeline without a family, whose passes are needed to count others
    rehearsed: Rehearsed | None = None


def dry_run(path: Path, overrides: Sequence[str] = (), processes: int = 1) -> Report:
    """Check a configuration and report what its run needs. Raises UserError as training does."""
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
    path_of_model = str(policy.options.get("path", ""))
    report = Report(configuration, policy, name, path_of_model, plan, train, account=accounts)
    report = replace(report, cut_prompts=_cut_prompts(policy, source))
    if policy.entry is AnyPipeline:
        report = replace(report, call_defaults=call_defaults(policy))
        family, policy = stand_in(policy)
        report = replace(report, stand_in=family)
    report = replace(report, resolved=policy, options=construct(policy.options))
    if isinstance(policy.entry, type) and issubclass(policy.entry, FolderPolicy):
        return _of_folder(report, policy.entry)
    if policy.entry is AnyPipeline and (place := folder_at(report.path)) is not None:
        return _of_pipeline(report, place)
    return _of_others(report)


def _cut_prompts(resolved: Resolved, source: Any) -> tuple[str, ...]:
    """Report how the text encoders of a local folder truncate the data's prompts."""
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


def _of_folder(report: Report, entry: type[FolderPolicy]) -> Report:
    """Report on a family in diffusers' format, by the real constructor on its config files."""
    place = folder_at(report.path)
    if place is None:
        return replace(report, unknown=(_why(report.path),))
    options = report.options
    try:
        policy = hollow(entry, place, options)
    except (UserError, ValueError) as error:
        raise UserError(report.resolved.place.say(str(error))) from error
    report = replace(
        report,
        network_rows=2 if policy.guidance_scale != 1 else 1,
        stage=partial(rehearsal.flow, entry, place, options, report.train, report.plan.micro_batch),
        encoders=_encoder_bytes(report, published.encoders(report.path)),
        placement=options.get("text_encoder_placement", "offload"),
    )
    return replace(
        _sampled(report, policy), counted=counted(policy, report.configuration, report.train)
    )


def _encoder_bytes(report: Report, parameters: int | None) -> int:
    return (parameters or 0) * rehearsal.dtype_of(report.options).itemsize


def _sampled(report: Report, policy: FlowPolicy) -> Report:
    """Report a sampler's work in an iteration, and which states of its paths are stored."""
    plan = planned(policy, report.train.group_size, FIXED)
    shape = policy.shape
    objective = report.configuration.build("objective", OBJECTIVES)
    context = RolloutContext(reads=objective.requires.states_read())
    states = len(planned(policy, report.train.group_size, FIXED, context).stored)
    critic = objective.critic() if isinstance(objective, HasCritic) else None
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
        critic_beside=critic is not None and objective.requires.sums_kinds,
    )


def _of_pipeline(report: Report, place: Path) -> Report:
    """Report on a pipeline without a family; only on its batches if its code needs real values."""
    try:
        return _of_replay(report, place)
    except UserError:
        raise
    except Exception as error:  # its code may use values in any way, and raise anything
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = f"passes of the network and memory: on fake weights {lines[0]}"
        return replace(_of_others(report), unknown=(why,))


def _of_replay(report: Report, place: Path) -> Report:
    """Report on a pipeline without a family, by a pass of its own code on fake weights."""
    try:
        stage = replays.replayed(place, report.options, report.train, report.plan.micro_batch)
        rehearsed = rehearse(stage, decode=False)
    except (UserError, ValueError) as error:
        raise UserError(report.resolved.place.say(str(error))) from error
    policy = stage.policy
    encoders = published.encoders(report.path) or policy.encoder_parameters
    report = replace(
        report,
        network_rows=stage.network_rows,
        stage=lambda: stage,
        rehearsed=rehearsed,
        encoders=_encoder_bytes(report, encoders),
        placement=report.options.get("text_encoder_placement", "offload"),
    )
    report = _sampled(report, policy)
    rows = stage.network_rows
    once = counted(policy, report.configuration, report.train)
    training = None if once.training is None else round(once.training * rows)
    return replace(
        report, counted=replace(once, sampling=round(once.sampling * rows), training=training)
    )


def learners(report: Report) -> int:
    """Count the optimizers of a run: the policy's, and that of a trained snapshot."""
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


def _of_others(report: Report) -> Report:
    """Report on token models, whose passes per iteration follow from its rows."""
    train, plan, options = report.train, report.plan, report.options
    entry: Any = report.resolved.entry
    snapshots = kept_snapshots(report.configuration.build("objective", OBJECTIVES), train)
    sampled = 0 if supervised(report.configuration) else plan.rows
    once = Counted(sampled, plan.rows * train.epochs, 0, plan.steps * train.epochs, snapshots)
    report = replace(report, counted=once, tokens=_default(report.resolved, "max_new_tokens"))
    try:
        only_adapters = adapters_only(options.get("lora"), options.get("train"))
        check_frozen(options.get("quantization"), only_adapters)
    except UserError as error:
        raise UserError(report.resolved.place.say(str(error))) from error
    if not rehearsal.is_known(report.path, entry):
        return replace(report, unknown=(_why(report.path),))
    rows = plan.micro_batch
    stage = partial(rehearsal.tokens, report.path, entry, options, train, rows, train.group_size)
    count = rehearsal.question_tokens(entry, options)
    known = "budgets" in options_of(entry)
    why = f"tokens of prompts: {count} are taken" + ", or budgets.prompt_tokens" * known
    return replace(report, stage=stage, unknown=(why,))


def _default(resolved: Resolved, name: str) -> Any:
    """Return an option of the policy as it is set, or its default."""
    known = options_of(resolved.entry)
    default = known[name].default if name in known else None
    return resolved.options.get(name, default)

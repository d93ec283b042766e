"""Builds live objects from a configuration, for training, sampling, evaluation and export."""

from __future__ import annotations

import random
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mmrl.config as config
from mmrl.config import Config
from mmrl.config.options import EvaluateOptions, TrainOptions
from mmrl.config.plan import arithmetic
from mmrl.config.preferences import Preferences
from mmrl.config.sections import SECTIONS, LogOptions
from mmrl.config.values import Place
from mmrl.core import pretrained
from mmrl.core.broken_rows import BrokenRows, first_of
from mmrl.core.errors import UserError
from mmrl.core.hub import check_model, check_repository
from mmrl.core.registry import (
    ADVANTAGES,
    DATA,
    OBJECTIVES,
    OPTIMIZERS,
    POLICIES,
    REWARDS,
    Plugin,
    load_built_in,
)
from mmrl.core.types import Prompt
from mmrl.data.base import Curriculum
from mmrl.data.by_size import BySize
from mmrl.data.ledger import Summary, collecting, refuse_broken
from mmrl.data.prompts import development_and_test
from mmrl.data.sources.stored import stored
from mmrl.experiment import checkpoint
from mmrl.monitoring.trackers import check_installed
from mmrl.objectives.contracts import ChecksRows
from mmrl.policies import adapter_files
from mmrl.policies.contracts import VariesSize
from mmrl.policies.diffusion import lora_merging
from mmrl.policies.diffusion.context_parallel import unsupported
from mmrl.rollout.preferences import Compared
from mmrl.scoring import Scorer
from mmrl.train.device import Device, check_launcher, check_mesh, check_precision, is_fsdp, started
from mmrl.train.optimizers import unshardable
from mmrl.train.trainer import Trainer
from rewards.base.hub_models import hub_models
from rewards.card import described

CONFIG = "config.yaml"
PART = re.compile(r"\d+-.+")  # the folder of a stage
HALVES = ("development", "test")  # of the held-out prompts, by evaluate.split


def read(
    path: Path, overrides: Sequence[str], processes: int = 1, added: Mapping[str, Any] = {}
) -> Config:
    """Read a configuration and check it as far as possible without building a model. ``added``:
    sections supplied by code."""
    load_built_in()
    problems: list[str] = []
    configuration = config.load(path, overrides, added=added, problems=problems)
    supplied = {"optimizer": ("parameters",)}
    config.check(configuration, SECTIONS, supplied, processes, problems)
    return configuration


def check_trackers(configuration: Config) -> None:
    """Raise UserError if a tracker that training would start is not installed."""
    try:
        check_installed(configuration.section("log", LogOptions).trackers())
    except UserError as error:
        raise UserError(configuration.place(("log",)).say(str(error))) from error


@dataclass
class Session:
    """Holds the parts of a run that need no optimizer."""

    config: Config
    policy: Any
    source: Any
    scorer: Scorer
    options: TrainOptions
    evaluation: EvaluateOptions
    summaries: Sequence[Summary] = ()  # of the data: counts read, left out and held out

    @classmethod
    def of(cls, configuration: Config, policy: Any = None, judged: bool = False) -> Session:
        """Build the parts that a configuration names; ``policy``: its policy, if already built.
        ``judged``: evaluation-only rewards will also be needed."""
        options = configuration.section("train", TrainOptions)
        check_precision(options)  # before loading a large model
        check_started(configuration, options)
        # new adapters are initialised from the global generator
        seed_everything(options.seed)
        if policy is None:
            check_hub(configuration)
        if judged:
            check_judges(configuration)
        source, summaries = read_data(configuration)
        if policy is None and any(summary.stops for summary in summaries):
            whole = len(source.train) + len(source.held_out)
            refuse_broken(summaries, whole, foreseen(configuration, source))
        with torch.random.fork_rng(devices=[]):  # a missing model is reported before a policy loads
            rewards = scorer(configuration, ("reward",), options)
        policy = policy or configuration.build("policy", POLICIES)
        if start := configuration.plain.get("start"):
            begin_with(policy, configuration, Path(start))
        source = admitted(policy, source, summaries)
        evaluation = configuration.section("evaluate", EvaluateOptions)
        session = cls(
            configuration,
            policy,
            source,
            rewards,
            options,
            evaluation,
            summaries,
        )
        check_needs(configuration, source, session.scorer.rewards, policy)
        return session

    def prompts(self) -> list[Prompt]:
        """Return the held-out prompts, or the training prompts if nothing is held out; of them the
        half named in ``evaluate.split``. Raises UserError if that is empty."""
        prompts = list(self.source.held_out) or list(self.source.train)
        halves = dict(zip(HALVES, development_and_test(prompts), strict=True))
        chosen = halves.get(self.evaluation.split, prompts)
        if not chosen:
            raise UserError(
                f"evaluate.split={self.evaluation.split}: {len(prompts)} held-out prompts are too "
                f"few to be halved; hold out more, or set evaluate.split=all"
            )
        return chosen

    def trainer(self) -> Trainer:
        objective = self.config.build("objective", OBJECTIVES)
        train = self.source.train
        rows = self.source.train
        if objective.requires.supervised:
            rows = [*rows, *self.source.held_out]
        if isinstance(objective, ChecksRows):
            objective.check(self.policy, rows)
        if self.options.preferences is not None:
            train = self._compared(self.options.preferences)
        return Trainer(
            self.policy,
            train,
            self.scorer,
            self.config.build("advantage", ADVANTAGES),
            objective,
            self.config.build("optimizer", OPTIMIZERS),
            self.options,
        )

    def _compared(self, preferences: Preferences) -> Sequence[Prompt]:
        """Return the training prompts that have compared answers, after checking all answers.
        Raises UserError, with file and line."""
        compared = Compared.of(preferences)
        train = compared.pairs.kept(self.source.train)
        compared.check(self.policy, [*train, *compared.pairs.kept_or_none(self.source.held_out)])
        return train

    def judges(self) -> Scorer:
        """Join the training rewards and those that are only measured."""
        extra = self.config.plain.get("evaluate") or {}
        if not extra.get("reward"):
            return self.scorer
        measured = scorer(self.config, ("evaluate", "reward"), self.options)
        # weight 0: evaluation-only rewards are not part of the trained sum
        weights = dict.fromkeys(measured.rewards, 0.0) | self.scorer.weights
        return Scorer(
            self.scorer.rewards | measured.rewards,
            weights,
            self.options.max_reward_failure_rate,
        )


def check_hub(configuration: Config) -> None:
    """Raise UserError within seconds if the model of one of mmrl's policies is a hub id that is not
    available."""
    spec = configuration["policy"]
    name, options = (spec, None) if isinstance(spec, str) else next(iter(spec.items()))
    path = (options or {}).get("path")
    if not isinstance(path, str) or not POLICIES.find(name).__module__.startswith("mmrl."):
        return
    try:
        check_model(path)
    except UserError as error:
        place = configuration.place(("policy", name, "path"))
        raise UserError(place.say(str(error))) from error


def check_judges(configuration: Config) -> None:
    """Raise UserError within seconds if a model of ``evaluate.reward`` is a hub id that is not
    available; these rewards are built when first used, perhaps hours later."""
    section = ("evaluate", "reward")
    if section not in rewarded(configuration):
        return
    for name, each in resolved(configuration, section).items():
        for repository in hub_models(each.reward.entry, each.reward.options):
            try:
                check_repository(repository)
            except UserError as error:
                place = configuration.place((*section, name))
                raise UserError(place.say(f"reward {name!r}: {error}")) from error


def check_started(configuration: Config, options: TrainOptions) -> None:
    """Raise UserError, before anything is loaded, if the processes do not divide into groups, shard
    in an unsupported way, or cannot share the policy or optimizer."""
    processes = started()
    check_launcher()
    check_mesh(options, processes)
    splits = options.context_parallel is not None and processes > 1
    if splits and (why := unsupported(_entry(configuration, "policy", POLICIES))):
        raise UserError(f"train.context_parallel: {why}")
    spec = configuration.plain.get("optimizer")
    name = spec if isinstance(spec, str) else next(iter(spec or {}), "")
    if processes > 1 and is_fsdp() and (why := unshardable(name)):
        raise UserError(f"optimizer {name}: {why}")


def _entry(configuration: Config, section: str, registry: Any) -> Any:
    spec = configuration[section]
    return registry.find(spec if isinstance(spec, str) else next(iter(spec)))


def begin_with(policy: Any, configuration: Config, start: Path) -> None:
    """Load the weights of another run (``start``) into a policy, the moving average if there is
    one, or of an adapter's folder."""
    start = start.expanduser()
    beside = Path(configuration.file).parent / start
    run = beside if (beside / CONFIG).is_file() or adapter_files.is_adapter(beside) else start
    place = configuration.place(("start",))
    if lora := lora_merging.lora_at(beside) or lora_merging.lora_at(start):
        return begin_with_lora(policy, lora, place)
    if adapter_files.is_adapter(run):
        names = policy.weights.parameters()
        try:
            policy.weights.load(adapter_files.read(run, policy.net, names))
        except ValueError as error:  # UserError is one
            raise UserError(place.say(str(error))) from error
        return
    if not (run / CONFIG).is_file():
        raise UserError(
            place.say(
                f"{start} is no run whose weights could be taken up, nor the folder of an adapter "
                "or a LoRA file (.safetensors); mmrl convert FILE --base MODEL --into FOLDER "
                "merges others"
            )
        )
    arrays, _ = checkpoint.load(checkpoint.choose(run / "checkpoints")[0], checked=True)
    try:
        policy.weights.load(arrays.get("snapshot-ema", arrays["weights"]))
    except ValueError as error:
        raise UserError(
            place.say(
                f"the weights of {run} do not fit this policy: {error}; write the same path, lora "
                f"and train as there, or export that run and give its folder as policy path"
            )
        ) from error


def begin_with_lora(policy: Any, lora: Path, place: Place) -> None:
    """Merge a LoRA file (``start``) into a policy of a diffusers model, or a folder with LoRAs of
    two experts."""
    try:
        lora_merging.start(policy, lora)
    except UserError as error:
        raise UserError(place.say(str(error))) from error


@dataclass(frozen=True)
class Admitted:
    """Holds the prompts of a data source that a policy accepts."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]


def admitted(policy: Any, source: Any, summaries: Sequence[Summary] = ()) -> Any:
    """Leave out prompts that are too long for the policy, and those that it cannot use if all
    sources skip broken rows. Otherwise raises UserError with all of these, and also if none is
    left."""
    problems: list[str] = []
    parts = [_taken(policy, list(part), problems) for part in (source.train, source.held_out)]
    fitting = Admitted(*parts)
    count = len(source.train) + len(source.held_out)
    refuse_broken(summaries, count, problems)
    if problems:
        line = f"{len(problems)} of {count} rows are left out: {first_of(problems)}"
        policy.report.notes = (*policy.report.notes, line)
    if isinstance(source.train, Curriculum) and fitting.train:
        fitting = Admitted(source.train.restricted(fitting.train), fitting.held_out)
    if not fitting.train:
        raise UserError(f"every prompt was left out: {'; '.join(policy.report.notes)}")
    if sized := _by_size(policy, fitting.train):
        return Admitted(sized, fitting.held_out)
    unchanged = (len(fitting.train), len(fitting.held_out)) == (
        len(source.train),
        len(source.held_out),
    )
    if unchanged:
        return source
    return fitting if isinstance(fitting.train, Curriculum) else Admitted(*map(stored, parts))


def foreseen(configuration: Config, source: Any) -> list[str]:
    """List the rows that the policy of a configuration cannot use, "place: why", before its weights
    are loaded."""
    problems: list[str] = []
    if "policy" not in configuration.plain:
        return problems
    try:
        with torch.random.fork_rng(devices=[]), pretrained.without_weights():
            policy = configuration.build("policy", POLICIES)
            for part in (source.train, source.held_out):
                _taken(policy, list(part), problems)
    except (
        Exception
    ) as error:  # errors here are raised again, or vanish, when the weights are loaded
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"the policy itself did not check the rows: {reason}", stacklevel=2)
    return problems


def _by_size(policy: Any, prompts: Sequence[Prompt]) -> BySize | None:
    """Draw iterations of one size if rows have several. Raises UserError if something else chooses
    the prompts of an iteration."""
    sizes = {policy.size_of(prompt) for prompt in prompts} if VariesSize.kept_by(policy) else ()
    if len(sizes) < 2:
        return None
    if isinstance(prompts, Curriculum):
        raise UserError(
            f"the rows of data have {len(sizes)} sizes, and an iteration has one: use data whose "
            "order is random (prompts, captions, preferences), or rows of one size"
        )
    return BySize(prompts, policy.size_of)


def _taken(policy: Any, prompts: list[Prompt], problems: list[str]) -> list[Prompt]:
    """Return the prompts that a policy accepts, and add the problems of others to ``problems``."""
    try:
        taken: list[Prompt] = policy.admit(prompts)
        return taken
    except BrokenRows as error:
        problems += error.problems.values()
        left = [prompt for place, prompt in enumerate(prompts) if place not in error.problems]
        return _taken(policy, left, problems)


def scorer(configuration: Config, section: tuple[str, ...], options: TrainOptions) -> Scorer:
    chosen = configuration.rewards(section)
    if not chosen and section == ("reward",) and supervised(configuration):
        return Scorer.nothing()
    names = short_names(chosen)
    functions = {names[name]: entry.reward for name, entry in chosen.items()}
    return Scorer(
        functions,
        {names[name]: entry.weight for name, entry in chosen.items()},
        options.max_reward_failure_rate,
    )


def supervised(configuration: Config) -> bool:
    """Tell whether the run learns from answers in the data, and so needs no reward."""
    spec = configuration["objective"]
    name = spec if isinstance(spec, str) else next(iter(spec), "")
    if configuration.section("train", TrainOptions).preferences is not None:
        return True
    objective: Any = OBJECTIVES.find(name)
    return bool(objective.requires.supervised)


def compares(configuration: Config) -> bool:
    """Tell whether the samples of a prompt are compared."""
    objective = configuration.build("objective", OBJECTIVES)
    return not supervised(configuration) and objective.requires.compares


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Shorten names for curves: ``my_rewards:sharpness`` is ``sharpness``; in full if two would be
    equal."""
    short = {name: name.rpartition(":")[2] for name in names}
    often = Counter(short.values())
    return {name: alias if often[alias] == 1 else name for name, alias in short.items()}


def read_data(configuration: Config) -> tuple[Any, list[Summary]]:
    """Build the data source and check that its prompts have what the rewards need. Returns it with
    its statistics."""
    with collecting() as summaries:
        source = configuration.build("data", DATA)
    if not (hasattr(source, "train") and hasattr(source, "held_out")):
        raise UserError(
            configuration.place("data").say(
                f"expected a data source, which has prompts as train and held_out; this made a "
                f"{type(source).__name__}"
            )
        )
    check_needs(configuration, source, {})
    return source, summaries


def check_needs(
    configuration: Config, source: Any, rewards: Mapping[str, Plugin], policy: Any = None
) -> None:
    """Check that every prompt has what these rewards need, and that they judge the policy's medium.
    Raises UserError with the line.

    Without ``rewards``: those of the configuration, by their classes, before any is built.
    """
    sections = (
        {("reward",): rewards}
        if rewards
        else {path: classes(configuration, path) for path in rewarded(configuration)}
    )
    prompts = [*source.train, *source.held_out]
    problems = []
    for path, chosen in sections.items():
        unfit = [*config.missing_values(chosen, prompts), *config.wrong_media(chosen, policy)]
        problems += config.refusals(configuration.place(path), unfit)
    config.raise_all(problems)


def rewarded(configuration: Config) -> list[tuple[str, ...]]:
    """List the sections that name rewards."""
    extra = (configuration.plain.get("evaluate") or {}).get("reward")
    return [("reward",), ("evaluate", "reward")] if extra else [("reward",)]


def classes(configuration: Config, path: tuple[str, ...]) -> dict[str, Plugin]:
    """Return what has the cards of a section's rewards, by name, before they are built."""
    chosen = resolved(configuration, path)
    return {n: described(each.reward.entry, each.reward.options) for n, each in chosen.items()}


def resolved(configuration: Config, path: tuple[str, ...]) -> dict[str, config.Chosen]:
    """Return the entries of a section's rewards, by name, not built."""
    spec: Any = configuration.plain
    for key in path:
        spec = spec[key]
    return config.resolve_rewards(spec, REWARDS, configuration.place(path), [])


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def trained(
    run: Path, overrides: Sequence[str] = (), at: str | None = None, judged: bool = False
) -> Session:
    """Open a finished or stopped run: live weights trained (the moving average, if there is one),
    the base as snapshot ``ref``. ``at`` names a checkpoint; by default the newest complete one."""
    checkpoints = run / "checkpoints"
    path = checkpoint.named(checkpoints, at) if at else checkpoint.choose(checkpoints)[0]
    arrays, meta = checkpoint.load(path, checked=not at)
    session = base(config_of(run), overrides, judged)
    session.scorer.load_state_dict(meta.get("rewards", {}))  # such as weights of a schedule
    weights = session.policy.weights
    try:
        if "snapshot-ref" in arrays:  # otherwise the base is the model as built
            weights.load(arrays["snapshot-ref"], "ref")
        weights.load(arrays.get("snapshot-ema", arrays["weights"]))
    except ValueError as error:
        raise UserError(f"{path} does not fit {config_of(run)}: {error}") from error
    set_width(session.policy, session.options, meta)
    return session


def base(path: Path, overrides: Sequence[str] = (), judged: bool = False) -> Session:
    """Open a configuration before any training, on the device, the base also as snapshot
    ``ref``."""
    session = Session.of(read(path, overrides), judged=judged)
    Device(session.options).place(session.policy)
    set_width(session.policy, session.options)
    session.policy.weights.keep("ref")
    return session


def set_width(policy: Any, options: TrainOptions, meta: Mapping[str, Any] = {}) -> None:
    """Set the width of a policy's forward passes as in training: from the configuration or, if
    measured, from a checkpoint (``meta``)."""
    if options.micro_batch_size == "auto" and meta.get("pass_rows"):
        policy.pass_sizes.rows = int(meta["pass_rows"])
    policy.pass_sizes.rows = policy.pass_sizes.rows or arithmetic(options).micro_batch


def last_stage(run: Path) -> Path:
    """Return the folder of the last stage that a run with stages has begun; for another run its
    own."""
    file = run / CONFIG
    if not file.is_file() or not config.load_stages(file)[1]:
        return run
    parts = [part for part in run.glob("*-*") if PART.fullmatch(part.name)]
    begun = [part for part in parts if checkpoint.latest(part / "checkpoints") is not None]
    return max(begun, key=lambda part: int(part.name.partition("-")[0]), default=run)


def config_of(run: Path) -> Path:
    if not (run / CONFIG).is_file():
        raise UserError(
            f"{run} is not a run: it has no {CONFIG}; give the folder that `mmrl train` named"
        )
    return run / CONFIG

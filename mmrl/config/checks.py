"""Checks everything about a configuration that can be known before a model is built."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mmrl.config import effects
from mmrl.config.building import raise_all, resolve_rewards, unplaceable
from mmrl.config.compatibility import (
    blocked,
    not_to_be_skipped,
    pathless,
    renamed_rows,
    unfit_for_data,
    unmeasurable,
    unsuited,
    unsupported_options,
    unweighable,
    without_average,
)
from mmrl.config.needs import (
    missing_fields,
    refusals,
    without_gradient,
    without_memory,
    wrong_media,
)
from mmrl.config.options import EvaluateOptions, TrainOptions
from mmrl.config.overrides import PLUGGED
from mmrl.config.plan import impossible
from mmrl.config.presets import unsuited_preset
from mmrl.config.schema import BAD, Resolved, construct, convert, resolve, resolve_call
from mmrl.config.sections import SECTIONS
from mmrl.config.values import Location, Place, exists, is_pattern, show
from mmrl.core.errors import UserError
from mmrl.core.registry import (
    DATA,
    OBJECTIVES,
    REWARDS,
    Plugin,
    declared,
    import_file,
    import_module,
    is_safe,
)
from mmrl.core.registry import options as options_of
from mmrl.policies.capabilities import NOISELESS

if TYPE_CHECKING:
    from mmrl.config import Config

Section = TypeVar("Section")
MOST_RANK = 2**16  # rank of an adapter: wider than any layer


def check(
    config: Config,
    dataclasses: Mapping[str, type] | None = None,
    supplied: Mapping[str, Collection[str]] = {},
    processes: int = 1,
    before: Collection[str] = (),
) -> None:
    """Check names, options, files and arithmetic before a model is built; report all problems at
    once.

    ``dataclasses`` are the types of plain sections; ``supplied`` the arguments that code gives to a
    section's object; ``before``: problems that ``load`` has seen, such as a missing section.
    """
    problems = [*before]
    _try(problems, import_plugins, config)
    if len(problems) > len(before):  # without them the names of other sections are unknown
        raise_all(problems)
    entries, objective = _resolved_plug_ins(config, supplied, before, problems)
    problems += _unsuited(entries, objective)
    if (preset := config.plain.get("preset")) and "policy" in entries:
        why = unsuited_preset(preset, entries["policy"].entry)
        problems += [config.place(("preset",)).say(why)] if why else []
    named: dict[str, Any] = {section: resolved.entry for section, resolved in entries.items()}
    named |= {} if objective is None else {"objective": objective}
    trained = _rewards(config, or_empty(config.plain.get("reward")), ("reward",), problems, named)
    sections: dict[str, Any] = {}
    for section, cls in _present(config, dataclasses or SECTIONS, before):
        built = sections[section] = options_of_section(config, section, cls, problems)
        if isinstance(built, TrainOptions):
            problems += _unfit_sizes(config, built, entries, objective, processes)
            problems += _missing_of_training(entries, built)
            unfit = _unfit_training(built, trained, named.get("objective"), objective, entries)
            problems += [f"{config.where(line.partition(':')[0])}: {line}" for line in unfit]
        if isinstance(built, EvaluateOptions) and built.reward:
            _rewards(config, built.reward, (section, "reward"), problems, named)
    problems += _unvalidated(config, sections.get("train"), sections.get("evaluate"))
    check_names(config, problems)
    raise_all(problems)


def _resolved_plug_ins(
    config: Config,
    supplied: Mapping[str, Collection[str]],
    before: Collection[str],
    problems: list[str],
) -> tuple[dict[str, Resolved], Any]:
    """Resolve the plug-ins of every section; return them with the objective, built if it consists
    of plain values."""
    entries: dict[str, Resolved] = {}
    objective = None
    for section, registry in _present(config, PLUGGED, before):
        from_code = supplied.get(section, ())
        resolved = resolve(config[section], registry, config.place((section,)), problems, from_code)
        if isinstance(resolved, Resolved):
            if registry is not DATA and _cheap(resolved.entry) and not from_code:
                # plain values: their own checks are cheap
                plug_in = _try(problems, construct, resolved)
                objective = plug_in if section == "objective" else objective
            entries[section] = resolved
        problems += missing_files(resolved)
        problems += _absent_packages(resolved)
        problems += impossible_options(resolved)
    return entries, objective


def options_of_section(config: Config, name: str, cls: type, problems: list[str]) -> Any:
    """Build the options of a plain section; None if they are wrong."""
    spec = or_empty(config.plain.get(name))
    options = resolve_call(cls, spec, config.place((name,)), problems)
    return None if options is BAD else _try(problems, construct, options)


def check_names(config: Config, problems: list[str]) -> None:
    for name in ("run", "start"):
        convert(config.plain.get(name), str | None, config.place((name,)), problems)


def _unfit_training(
    options: TrainOptions,
    trained: int,
    named: Any,
    objective: Any,
    entries: Mapping[str, Resolved],
) -> Iterator[str]:
    """List sentences about options of ``train`` that are incompatible with the number of
    ``trained`` rewards, the objective (its class ``named``, and built), or the policy."""
    policy = entries.get("policy")
    yield from unweighable(options, trained, named)
    yield from renamed_rows(options, named)
    if why := not_to_be_skipped(options, objective):
        yield why
    if _grown(policy):
        yield from effects.unsuited_to_trees(options)
    if policy is not None:
        yield from unmeasurable(options, policy.entry, policy.options)
    if _refills(policy):
        yield from effects.unsuited_to_refill(options)


def _present(
    config: Config, sections: Mapping[str, Section], before: Collection[str]
) -> Iterator[tuple[str, Section]]:
    """Yield sections, without missing ones that have already been reported."""
    for name, section in sections.items():
        if not before or config.plain.get(name) is not None:
            yield name, section


def _unfit_sizes(
    config: Config,
    built: TrainOptions,
    entries: Mapping[str, Resolved],
    objective: Any,
    processes: int,
) -> Iterator[str]:
    """Find options of ``train`` that conflict with each other, the policy or the objective."""
    if objective is not None and (why := without_average(objective.snapshots, built)):
        yield entries["objective"].place.say(why)
    yield from indivisible(config, built, processes)
    unfit = [*unsupported_options(built, entries["policy"].entry if "policy" in entries else None)]
    unfit += effects.clashing(built)
    if "objective" in entries:
        policy = entries["policy"].entry if "policy" in entries else None
        unfit += unfit_for_data(built, objective or entries["objective"].entry, policy)
    if {"objective", "policy"} <= set(entries):
        imitates = entries["objective"].options.get("sft") is not None
        why = pathless(built, entries["policy"].entry, entries["objective"].entry)
        unfit += [why] if why and not imitates else []
    for line in unfit:
        yield f"{config.where(line.partition(':')[0])}: {line}"


def indivisible(config: Config, built: TrainOptions, processes: int) -> Iterator[str]:
    """Find sizes that do not divide."""
    for line in impossible(built, processes):
        yield f"{config.where(line.partition(' ')[0])}: {line}"


def _unsuited(entries: Mapping[str, Resolved], built: Any) -> Iterator[str]:
    """Find what in the objective or the advantage does not fit the policy, such as tokens for a
    flow model."""
    if {"advantage", "policy"} <= set(entries):
        yield from _unsuited_advantages(entries["advantage"], entries["policy"])
    if {"data", "policy"} <= set(entries):
        for part in _with_nested(entries["data"]):
            yield from _unrecorded(part, entries["policy"], "data source")
    if {"objective", "policy"} <= set(entries):
        objective = entries["objective"]
        policy = entries["policy"]
        if why := unsuited(objective.entry, policy.entry):
            yield objective.place.say(why)
        elif built is not None:
            yield from _unrecorded(objective, policy, "objective")
            for option, reason in built.unfit(policy.entry):
                yield (objective.place / option).say(reason)
        yield from _blocked(objective, policy)
        follows = built is not None and built.requires.single_paths
        if follows and policy.options.get("tree") is not None:
            yield objective.place.say(
                f"the objective {objective.entry.__name__} follows single paths: remove the "
                "policy's option tree, whose samples share the steps of theirs"
            )
        kernel = policy.options.get("sde_type")
        still = policy.options.get("noise_level") == 0 or (
            isinstance(kernel, Resolved) and kernel.entry.__name__ == "ode"
        )
        known: Any = built or objective.entry
        if known.requires.visits and still:
            yield objective.place.say(f"the objective {objective.entry.__name__} {NOISELESS}")


def _blocked(objective: Resolved, policy: Resolved) -> Iterator[str]:
    """Find an objective that masks more of an answer than a policy predicts in a pass."""
    if not inspect.isclass(objective.entry):
        return
    option = objective.options.get("estimator")
    if option is None and "estimator" in (known := options_of(objective.entry)):
        option = known["estimator"].default
    estimator = option.entry if isinstance(option, Resolved) else option
    if why := blocked(objective.entry, estimator, policy.options):
        yield objective.place.say(why)


def _unsuited_advantages(advantage: Resolved, policy: Resolved) -> Iterator[str]:
    """Find what in the advantage, and in those it wraps, does not fit the policy."""
    for part in _with_nested(advantage):
        if why := unsuited(part.entry, policy.entry, "advantage"):
            yield part.place.say(why)
            continue
        yield from _unrecorded(part, policy)
        if not declared(part.entry, "needs_tree", False) or _grown(policy):
            continue
        if trees := effects.options_that(policy.entry, lambda effects: effects.branches):
            yield part.place.say(
                f"the advantage {part.entry.__name__} compares the edges of a tree; set "
                f"{policy.place / trees[0]}"
            )


def _unrecorded(part: Resolved, policy: Resolved, kind: str = "advantage") -> Iterator[str]:
    """Find what an advantage or objective needs that the policy records only on request."""
    wanted_options = declared(part.entry, "records")
    for option in wanted_options(part.options) if wanted_options else ():
        if option not in options_of(policy.entry):
            yield part.place.say(
                f"the {kind} {part.entry.__name__} needs what the policy "
                f"{policy.entry.__name__} cannot record, since it has no option {option}"
            )
        elif not policy.options.get(option):
            yield part.place.say(
                f"the {kind} {part.entry.__name__} needs what the policy records only on request; "
                f"set {policy.place / option} to true"
            )


def _missing_of_training(entries: Mapping[str, Resolved], train: TrainOptions) -> Iterator[str]:
    """Find what an advantage or a data source needs from a stage that is missing."""
    named = {effects.name_of(type(stage)) for stage in train.stages}
    for section in sorted({"advantage", "data"} & set(entries)):
        for part in _with_nested(entries[section]):
            asks = declared(part.entry, "asks_of_training")
            for stage in asks(part.options) if asks else ():
                if stage not in named:
                    yield part.place.say(
                        f"it needs what the stage {stage} measures; add {stage} to train.stages"
                    )


def _grown(policy: Resolved | None) -> bool:
    """Tell whether the samples of a policy share prefixes."""
    return policy is not None and any(
        value is not None and effects.of_policy(policy.entry, name).branches
        for name, value in policy.options.items()
    )


def _refills(policy: Resolved | None) -> bool:
    """Tell whether a policy refills finished rows with new answers."""
    return policy is not None and policy.options.get("refill", "none") != "none"


def _with_nested(resolved: Resolved) -> Iterator[Resolved]:
    """Yield a plug-in and the plug-ins among its options."""
    yield resolved
    for option in resolved.options.values():
        if isinstance(option, Resolved):
            yield from _with_nested(option)


def _cheap(entry: Plugin) -> bool:
    """Tell whether an object consists of plain values, so that building it is cheap."""
    return is_dataclass(entry) or (isinstance(entry, type) and not OBJECTIVES.unfit(entry))


def _try(problems: list[str], call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except UserError as error:
        problems.append(str(error))
        return None


def _rewards(
    config: Config,
    spec: Any,
    path: tuple[str, ...],
    problems: list[str],
    entries: Mapping[str, Plugin],
) -> int:
    """Check the rewards of a section; return how many of them have a weight."""
    place = config.place(path)
    weighted = resolve_rewards(spec, REWARDS, place, problems)
    for name, entry in weighted.items():
        problems += [*missing_files(entry.reward), *unplaceable(name, entry)]
    chosen = {name: entry.reward.entry for name, entry in weighted.items()}
    unfit = list(wrong_media(chosen, entries.get("policy")))
    if path != ("reward",):
        unfit += without_memory(chosen)
    if fields := declared(entries.get("data"), "fields", ()):
        from rewards.card import described

        cards = {n: described(e.reward.entry, e.reward.options) for n, e in weighted.items()}
        unfit += missing_fields(cards, fields)
    # those that contain others report it when built
    objective: Any = entries.get("objective")
    if path == ("reward",) and objective is not None and objective.requires.differentiates:
        plain = {
            name: entry
            for name, entry in weighted.items()
            if entry.weight and not _holds(entry.reward.options)
        }
        unfit += without_gradient({name: chosen[name] for name in plain})
    problems += refusals(place, unfit)
    return sum(bool(entry.weight) for entry in weighted.values())


def _unvalidated(config: Config, train: Any, evaluation: Any) -> Iterator[str]:
    """Find rewards that depend on evaluations which the run does not make."""
    place = config.place(("reward",))
    rewards = or_empty(config.plain.get("reward"))
    for name, weighted in resolve_rewards(rewards, REWARDS, place, []).items():
        validates = declared(weighted.reward.entry, "validates")
        if validates is None or not validates(weighted.reward.options):
            continue
        if (train is not None and not train.evaluate_every) or (
            evaluation is not None and evaluation.split != "development"
        ):
            yield (place / name).say(
                f"reward {name!r} is measured on validation prompts: set train.evaluate_every, "
                f"and evaluate.split=development, so that no number is reported of them"
            )


def _holds(value: Any) -> bool:
    """Tell whether there is a plug-in among these options."""
    if isinstance(value, Mapping):
        return any(_holds(item) for item in value.values())
    return isinstance(value, Resolved) or (
        isinstance(value, (list, tuple)) and any(_holds(item) for item in value)
    )


def import_plugins(config: Config) -> None:
    """Import the modules and files under ``plugins``, which register what the other sections
    name."""
    place = config.place(("plugins",))
    names = config.plain.get("plugins")
    names = [] if names is None else names
    if names and is_safe():
        raise UserError(
            place.say(
                f"{show(names)} is code of the configuration's author, which --safe refuses; read "
                f"it, then run without --safe (and MMRL_SAFE), or remove plugins"
            )
        )
    for i, name in enumerate(
        [names] if isinstance(names, str) else names if isinstance(names, list) else [names]
    ):
        if not isinstance(name, str) or not name:
            raise UserError(
                (place / i).say(
                    f"expected the name of a module or the path of a .py file, got {show(name)}"
                )
            )
        try:
            _import(name)
        except (Exception, SystemExit) as error:  # a user's own module can raise anything
            reason = (
                str(error) if isinstance(error, UserError) else (f"{type(error).__name__}: {error}")
            )
            raise UserError(
                (place / i).say(f"cannot import the plug-in {name!r}: {reason}")
            ) from error


def _import(name: str) -> None:
    if name.endswith(".py"):
        import_file(Path(name).expanduser())
    else:
        import_module(name)


def or_empty(section: Any) -> Any:
    """Return no options for a missing section; 0 and the like are kept, to be refused."""
    return {} if section is None else section


def _absent_packages(resolved: Any) -> Iterator[str]:
    """Find plug-ins that need a package that is not installed."""
    if not isinstance(resolved, Resolved):
        return
    package = declared(resolved.entry, "needs_package")
    if package is not None and find_spec(package) is None:
        yield resolved.place.say(
            f"needs the package {package}: pip install 'multimodal-rl[low-memory]'"
        )


def impossible_options(resolved: Any) -> Iterator[str]:
    """Find impossible values, and external code under ``--safe``."""
    if not isinstance(resolved, Resolved):
        return
    for name, option in resolved.options.items():
        place = resolved.place / name
        rank = option.options.get("rank") if isinstance(option, Resolved) else option
        if name == "lora" and isinstance(rank, int) and not 1 <= rank <= MOST_RANK:
            yield place.say(f"expected a rank between 1 and {MOST_RANK}, got {show(rank)}")
        if name == "path" and isinstance(option, str) and not option.strip():
            yield place.say("expected a folder, a name on the hub or world:NAME, got an empty text")
        if name == "remote_code" and option and is_safe():
            yield place.say("runs code of the model's author, which --safe refuses")
        yield from impossible_options(option)


def missing_files(value: Any, key: str = "", place: Place | None = None) -> Iterator[str]:
    """Find options annotated ``Path``, and local ones called ``path``, whose file does not
    exist."""
    place = place or Place()
    if isinstance(value, Resolved):
        for name, option in value.options.items():
            yield from missing_files(option, name, value.place / name)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from missing_files(item, key, place / i)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from missing_files(item, name, place / name)
    elif isinstance(value, str) and not (key == "path" and looks_local(value)):
        return
    elif isinstance(value, Location) and is_pattern(value):
        return  # reading the data reports if no file matches
    elif isinstance(value, (str, Path)) and not exists(Path(value).expanduser()):
        folders = dict.fromkeys(map(os.path.abspath, [Path.cwd(), *filter(None, [place.folder])]))
        whole = os.path.isabs(value) or str(value).startswith("~")
        places = "" if whole else f"; relative paths start at {' or '.join(folders)}"
        yield place.say(f"no such file or folder: {value}{places}")


def looks_local(path: str) -> bool:
    """Tell a local path from ``owner/name`` of a hub and ``world:...``: it starts like one, ends
    like a file, or is deep."""
    if ":" in path and not re.match(r"^[A-Za-z]:[\\/]", path):
        return False
    ends = (
        ".txt",
        ".jsonl",
        ".json",
        ".csv",
        ".tsv",
        ".gz",
        ".zst",
        ".parquet",
        ".arrow",
        ".tar",
        ".yaml",
        ".yml",
        ".pt",
        ".pth",
        ".bin",
        ".safetensors",
        ".ckpt",
    )
    return (
        path.startswith((".", "/", "~", "\\")) or path.endswith(("/", *ends)) or path.count("/") > 1
    )

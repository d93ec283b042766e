"""Derives incompatible options from the declared effects of options and stages
(``mmrl.core.effects``), as sentences that begin with the option's key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from mmrl.config.options import TrainOptions
from mmrl.core.effects import CHOOSES_WEIGHTS, Effects, Resumes
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, STAGES, Plugin, load_built_in, options

NONE = Effects()
ORDER: tuple[Resumes, ...] = ("free", "warned", "refused")


@dataclass(frozen=True)
class Asked:
    """Holds an active option of ``train``: its key, its effects, and its stage, if any, with the
    options of that."""

    key: str
    effects: Effects
    stage: Any = None
    options: Any = None


def asked(train: TrainOptions) -> Iterator[Asked]:
    """List the options of ``train`` that are not at their defaults, and its stages."""
    owners = stages_by_option()
    for field in fields(TrainOptions):
        value = getattr(train, field.name)
        if value != field.default and field.name != "stages":
            yield Asked(field.name, of_train(field.name), owners.get(field.name), value)
    for stage in train.stages:
        yield Asked(f"stages.{name_of(type(stage))}", stage.effects, type(stage), stage)


def of_train(name: str) -> Effects:
    """Look up the effects of an option of ``train``, its own or its stage's."""
    stage = stages_by_option().get(name)
    return stage.effects if stage else _declared(_annotations()[name]) or NONE


def of_policy(entry: Plugin, name: str) -> Effects:
    """Look up the effects of an option of a policy, also inherited. An option ``path`` is the model
    that the policy begins from."""
    return _declared_by(entry).get(name, CHOOSES_WEIGHTS if name == "path" else NONE)


def options_that(entry: Plugin, does: Callable[[Effects], bool]) -> list[str]:
    """List the options of a policy with an effect."""
    declared = {"path": CHOOSES_WEIGHTS, **_declared_by(entry)}
    return [name for name in options(entry) if does(declared.get(name, NONE))]


def _declared_by(entry: Plugin) -> dict[str, Effects]:
    """Return the declared effects of a policy's options; the most derived class decides."""
    declared: dict[str, Effects] = {}
    for cls in reversed(getattr(entry, "__mro__", (entry,))):
        for name, parameter in options(cls).items():
            effects = _declared(parameter.annotation)
            if effects is not None:
                declared[name] = effects
    return declared


def stages_by_option() -> Mapping[str, Any]:
    """Return the stages that options of ``train`` add, by option."""
    load_built_in()
    stages: list[Any] = [*STAGES.values()]
    return {stage.option: stage for stage in stages if stage.option}


def name_of(stage: Any) -> str:
    """Return the name under which a stage is registered, else that of its class."""
    return next((name for name, entry in STAGES.items() if entry is stage), stage.__name__)


def resumes(path: tuple[str, ...]) -> Resumes:
    """Say what a changed option means for a resumed run: ("train", option, ...) or ("policy", name,
    option, ...)."""
    if path[0] == "train":
        return of_train(path[1]).resumes
    try:
        return of_policy(POLICIES.find(path[1]), path[2]).resumes
    except UserError:  # it lives in a Python session that has ended
        return NONE.resumes


def stages_resume(before: list[Any], after: list[Any]) -> Resumes:
    """Say what changed stages, {name: options} each, mean for a resumed run: the strictest answer
    of any."""
    changed = [each for each in (*before, *after) if each not in before or each not in after]
    declared: list[Resumes] = []
    for name in {name for each in changed for name in each}:
        try:
            stage: Any = STAGES.find(name)
        except UserError:  # its file is gone, or it lives in a Python session that has ended
            continue
        declared.append(stage.effects.resumes)
    return max(declared, key=ORDER.index, default=NONE.resumes)


# incompatible options


def unsupported(train: TrainOptions, policy: Any) -> Iterator[str]:
    """List what a policy, an object or a class with ``capabilities``, does not support."""
    for each in asked(train):
        for option, why in each.stage.unfit(each.options, policy) if each.stage else ():
            yield f"train.{each.key}{option and f'.{option}'}: {why}"


def clashing(train: TrainOptions) -> Iterator[str]:
    """List stages whose states would have one place in a checkpoint."""
    parts = ((each.stage, each.options) for each in asked(train) if each.stage)
    return saved_twice(value if type(value) is kind else kind for kind, value in parts)


def saved_twice(stages: Iterable[Any]) -> Iterator[str]:
    """List names of checkpoints' parts under which several stages (classes or objects) save."""
    names = Counter(stage.saved_as for stage in stages if stage.saved_as)
    for name, count in names.items():
        if count > 1:
            yield (
                f"train.stages: {count} stages of this run keep their state in a checkpoint as "
                f"{name!r}, so that only one would be saved: name a stage once, and give one of "
                f"your own another saved_as"
            )


def idle(train: TrainOptions, why: str) -> Iterator[str]:
    """List what has no effect if answers come from the data; ``why``: what is missing."""
    for key in _that(train, lambda effects: effects.idle_without_samples):
        yield f"train.{key}: {why}, so it would do nothing: leave it out"


def renaming(train: TrainOptions) -> Iterator[str]:
    """List what renames rows, whose names are the noise key of an objective that uses the reward's
    gradient."""
    for key in _that(train, lambda effects: effects.renames_rows):
        yield (
            f"train.{key}: this objective draws the noise of every path again, by the names "
            f"that rows have now; leave it out, or choose policy_gradient"
        )


def unsuited_to_trees(train: TrainOptions) -> Iterator[str]:
    """List what is incompatible with a policy whose samples branch."""
    for key in _that(train, lambda effects: effects.exchanges_rows):
        yield (
            f"train.{key}: it exchanges single answers, and those of a tree share their "
            f"beginnings; leave it out, or the policy's tree"
        )


def unsuited_to_refill(train: TrainOptions) -> Iterator[str]:
    """List what is incompatible with a policy's ``refill``."""
    for key in _that(train, lambda effects: effects.begins_answers):
        yield (
            f"train.{key}: answers that begin with an earlier one are not refilled, so that "
            f"policy.refill would do nothing: set it to none, or leave {key} out"
        )


def writing_in_parts(train: TrainOptions) -> Iterator[str]:
    """List the keys of options by which answers are written over several iterations."""
    return _that(train, lambda effects: effects.writes_in_parts)


def unsuited_to_parts(train: TrainOptions, parts: str) -> Iterator[str]:
    """List what is incompatible with answers written over several iterations (``parts``)."""
    for each in asked(train):
        effects = each.effects
        if each.key != parts and (effects.looks_at_samples or effects.changes_sampling):
            yield (
                f"train.{each.key}: it needs all answers of an iteration, of which "
                f"train.{parts} leaves some to the next: leave one of them out"
            )


def unsuited_to_workers(train: TrainOptions, ahead: bool) -> Iterator[str]:
    """List what is incompatible with sampling on cluster workers; ``ahead``: they sample for later
    iterations."""
    for each in asked(train):
        elsewhere = each.effects.changes_sampling
        if elsewhere or (ahead and each.effects.looks_at_samples):
            where = "elsewhere" if elsewhere else "ahead (ray.staleness)"
            yield f"train.{each.key}: it does not work with sampling {where}: leave one of them out"


def unsuited_to_sizes(train: TrainOptions, sizes: int) -> Iterator[str]:
    """List what is incompatible with several sizes of rows in the data."""
    for key in _that(train, lambda effects: effects.returns_rows):
        yield (
            f"train.{key}: the rows of data have {sizes} sizes, and remembered samples of one "
            "size do not fit into batches of another; leave it out, or give rows of one size"
        )


def pathless(train: TrainOptions) -> Iterator[str]:
    """List what adds external pictures, if the objective needs the sampler's path."""
    for key in _that(train, lambda effects: effects.brings_answers):
        yield (
            f"train.{key}: the objective needs the sampler's path, which is unknown for external "
            "pictures; choose one of finished samples, such as "
            "diffusion_dpo, awm or rwr, or give policy_gradient its option sft"
        )


def in_dry_run(train: TrainOptions) -> TrainOptions:
    """Leave out what a dry run, without weights and data, does not support."""
    left_out = (field for field in fields(TrainOptions) if not of_train(field.name).in_dry_run)
    plain: dict[str, Any] = {field.name: field.default for field in left_out}
    stages = tuple(stage for stage in train.stages if stage.effects.in_dry_run)
    return replace(train, stages=stages, **plain)


def _that(train: TrainOptions, does: Callable[[Effects], bool]) -> Iterator[str]:
    """List the active keys of ``train`` that have an effect."""
    return (each.key for each in asked(train) if does(each.effects))


@cache
def _annotations() -> Mapping[str, Any]:
    return get_type_hints(TrainOptions, include_extras=True)


def _declared(annotation: Any) -> Effects | None:
    """Return the effects in an annotation."""
    metadata = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((item for item in metadata if isinstance(item, Effects)), None)

"""Trains a policy on prompts and functions of a Python program."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import mmrl.config as config
from mmrl.api.arguments import Overrides, data_section, plain, prompts_of, reader_of, words_of
from mmrl.api.callbacks import Callbacks, Watching
from mmrl.api.isolation import isolated, live_name
from mmrl.api.policies import Policy, model_of, opened, placed
from mmrl.api.processes import check_whole
from mmrl.api.rewards import NamedRewards, named
from mmrl.api.runs import Run, finished
from mmrl.config import Config
from mmrl.config.sections import SECTIONS
from mmrl.core.errors import UserError, called
from mmrl.core.registry import load_built_in
from mmrl.core.types import Prompt
from mmrl.data.prompts import SPLIT, split
from mmrl.experiment import lifecycle
from mmrl.experiment.build import Session, check_trackers
from mmrl.policies.base import Policy as Model

# sections of the policy's configuration that belong to its original training
NOT_INHERITED = ("run", "start", "stages", "stage")
AGAIN = (  # remedy for training a sharded policy again
    "it was trained, and a second training needs it again; go on in a new start of the script, "
    "mmrl.Trainer(..., run=FOLDER).train(resume=True), or load the policy again"
)
SIZES = ("iterations", "prompts_per_iteration", "group_size", "train_batch_size", "seed")
DEFAULT_SIZE = 8  # prompts of an iteration, and samples of each


class Trainer:
    """Trains a policy by reinforcement: prompts, a function as reward, and the settings of a
    configuration.

    policy: a configuration or run by name, a ``Policy`` of ``mmrl.load_policy`` (it is trained in
    place), ``{name: options}``, or a ``mmrl.policies.base.Policy``. Objective, advantage, optimizer
    and sizes default to its configuration.
    prompts: a list of texts or dicts, a pandas frame, a file, folder or data set's id, or the name
    of a data source; None: the data of the policy's configuration. held_out: prompts for
    evaluation, or the share to hold out, by default 5 %, at least one text.
    reward: a function (``mmrl.api.rewards.batch_reward``), the name of a reward, a list of these,
    with ``reward_weights``, or a dict, name -> weight, options or function; None: the rewards of
    the policy's configuration.
    objective, advantage, optimizer: a name, ``{name: options}``, or an object or function.
    learning_rate, iterations, prompts_per_iteration, group_size, train_batch_size, seed: settings;
    train_batch_size is by default as in the configuration, or all of an iteration if that does not
    divide. overrides: any other, such as ``{"train.evaluate_every": 10}``.
    run: the folder to write; None: a new one below ``runs``. callbacks: ``mmrl.Callback``s.

    Raises UserError for what the command line would refuse, before a model is built.
    """

    def __init__(
        self,
        policy: str | Path | Mapping[str, Any] | Policy | Run | Model,
        prompts: Any = None,
        reward: Any = None,
        *,
        objective: Any = None,
        advantage: Any = None,
        optimizer: Any = None,
        reward_weights: Sequence[float] | None = None,
        held_out: Any = None,
        learning_rate: float | None = None,
        iterations: int | None = None,
        prompts_per_iteration: int | None = None,
        group_size: int | None = None,
        train_batch_size: int | None = None,
        seed: int | None = None,
        run: str | Path | None = None,
        overrides: Overrides = None,
        callbacks: Callbacks = (),
    ):
        load_built_in()
        self.callbacks = callbacks
        self.watcher = Watching(callbacks)
        self.live: dict[str, dict[str, Any]] = {}
        self.folder = None if run is None else Path(run)
        self.policy: Policy | None = None
        sections = self._policy(policy)
        sections |= self._data(prompts, held_out, reader_of(sections))
        sections |= self._rewards(reward, reward_weights, prompts is not None)
        plugged = {"objective": objective, "advantage": advantage, "optimizer": optimizer}
        chosen = {name: each for name, each in plugged.items() if each is not None}
        sections |= {name: self._plugged(name, each) for name, each in chosen.items()}
        numbers = (iterations, prompts_per_iteration, group_size, train_batch_size, seed)
        sizes = dict(zip(SIZES, numbers, strict=True))
        words = [] if learning_rate is None else [f"optimizer.lr={learning_rate!r}"]
        self.config = self._checked(sections, sizes, [*words, *words_of(overrides)])

    def _checked(
        self, sections: dict[str, Any], sizes: Mapping[str, int | None], words: Sequence[str]
    ) -> Config:
        """Build the configuration, with defaults, and check it."""
        sections.setdefault("objective", "policy_gradient")
        sections.setdefault("optimizer", "adamw")
        sections["train"] = trained_sizes(sections.get("train") or {}, sizes)
        with isolated(self.live):
            known = config.from_mapping(sections, words, file="mmrl.Trainer")
            config.check(known, SECTIONS, {"optimizer": ("parameters",)})
            check_trackers(known)
        return known

    def train(
        self, *, resume: bool = False, accept_changes: bool = False, progress: bool = True
    ) -> Run:
        """Train, and return the run. Ctrl-C saves after the iteration and returns the run so far:
        ``train(resume=True)`` continues.

        resume: continue the last run, or the folder ``run``. accept_changes: even if data,
        objective or the like have changed. progress: False prints nothing. The policy is trained in
        place: ``policy.sample`` uses the new weights, the moving average if there is one.
        """
        if resume and self.folder is None:
            raise UserError("resume: there is no run yet; name its folder, mmrl.Trainer(run=...)")
        folder = self.folder if self.folder is not None else new_folder()
        with isolated(self.live, quiet=not progress), lifecycle.ending_by_errors():
            config.import_plugins(self.config)
            policy = self.policy or Policy(placed(self.config), self.config)
            model = model_of(policy)
            check_whole(model, AGAIN)
            weights = model.weights
            weights.saved.clear()  # those of a training before this
            configuration = self._in(folder)
            session = Session.of(configuration, model)
            self.policy = policy
            self.folder = folder
            ended = lifecycle.train_session(session, folder, resume, accept_changes, self.watcher)
            self.folder = ended.folder  # of several processes the main one names it
            if "ema" in weights.saved:
                weights.load(weights.stored("ema"))
        return finished(ended, self)

    def _in(self, folder: Path) -> Config:
        """Return the configuration with its run folder."""
        known = self.config
        return Config({**known.plain, "run": str(folder)}, known.file, known.marks)

    def _policy(self, handle: Any) -> dict[str, Any]:
        """Take the policy, and return the sections of its configuration."""
        if isinstance(handle, Model):
            handle = Policy(handle)
        if isinstance(handle, Run) and handle.trainer is not None:
            handle = handle.policy
        if not isinstance(handle, Policy):
            configuration, folder = opened(handle)
            if folder is not None:
                with isolated():
                    self.policy = Policy(placed(configuration, folder), configuration)
            return _inherited(configuration)
        self.policy = handle
        if handle.config is not None:
            return _inherited(handle.config)
        self._add("policies", "policy", standing_for(model_of(handle)))
        return {"policy": live_name("policy")}

    def _data(self, prompts: Any, held_out: Any, reader: str) -> dict[str, Any]:
        """Take the prompts, and return the ``data`` section that names them."""
        if prompts is None:
            return {}
        if (section := data_section(prompts, reader)) is not None:
            if held_out is not None:
                name, known = (section, {}) if isinstance(section, str) else [*section.items()][0]
                section = {name: {**known, "held_out": plain(held_out)}}
            return {"data": section}
        train = prompts_of(prompts)
        test: list[Prompt] = []
        if held_out is None or isinstance(held_out, (int, float)):
            share = SPLIT if held_out is None else float(held_out)
            if not 0 <= share < 1:
                raise UserError(f"held_out: expected a share from 0 to below 1, got {held_out}")
            train, test = split(train, share)
        else:
            test = prompts_of(held_out)
        self._add("data", "prompts", source_of(train, test))
        return {"data": {live_name("prompts"): {"sha256": digest([*train, *test])}}}

    def _rewards(
        self, reward: Any, weights: Sequence[float] | None, has_prompts: bool
    ) -> dict[str, Any]:
        """Take the rewards, and return the ``reward`` section that names them."""
        if reward is None:
            return {}
        rewards: NamedRewards = named(reward, weights)
        for name, function in rewards.live.items():
            self._add("rewards", name, function)
        # those of the configuration judge other prompts
        return {"reward": rewards.section} | ({"evaluate": {}} if has_prompts else {})

    def _plugged(self, section: str, chosen: Any) -> Any:
        """Return the section for a name, ``{name: options}``, or a Python object."""
        if isinstance(chosen, (str, Mapping)):
            return plain(chosen)
        kind = f"{section}s"
        is_plug_in = isinstance(chosen, type) or callable(chosen)
        name = called(chosen)
        name = section if name == "<lambda>" else name
        self._add(kind, name, chosen if is_plug_in else standing_for(chosen))
        return live_name(name)

    def _add(self, kind: str, name: str, entry: Any) -> None:
        self.live.setdefault(kind, {})[name] = entry

    def __repr__(self) -> str:
        return f"mmrl.Trainer({self.config['policy']!r}, run={str(self.folder)!r})"


def _inherited(configuration: Config) -> dict[str, Any]:
    """Return the sections of a policy's configuration that a new training may use."""
    folder = Path(configuration.file).parent
    sections = config.anchored(configuration.plain, folder)
    return {name: value for name, value in sections.items() if name not in NOT_INHERITED}


def trained_sizes(known: Mapping[str, Any], chosen: Mapping[str, int | None]) -> dict[str, Any]:
    """Fill in the ``train`` section: given values, the configuration's, or a small iteration; an
    optimizer step takes all of an iteration if the known batch does not divide it."""
    small = {
        "prompts_per_iteration": DEFAULT_SIZE,
        "group_size": DEFAULT_SIZE,
        "iterations": 20,
    }
    sizes = {**small, **known, **{k: plain(v) for k, v in chosen.items() if v is not None}}
    numbers = [sizes["prompts_per_iteration"], sizes["group_size"]]
    if chosen.get("train_batch_size") is None and all(isinstance(n, int) for n in numbers):
        rows = numbers[0] * numbers[1]
        step = sizes.get("train_batch_size")
        if not isinstance(step, int) or step < 1 or rows % step:
            sizes["train_batch_size"] = rows
    return sizes


def standing_for(thing: Any) -> type:
    """Create a class whose call returns the object itself, with the attributes of its class."""

    def itself(cls: type) -> Any:
        return thing

    def begin(self: Any) -> None:
        """Take no options."""

    cls = type(thing)
    return type(
        cls.__name__, (cls,), {"__new__": itself, "__init__": begin, "__doc__": cls.__doc__}
    )


def source_of(train: list[Prompt], held_out: list[Prompt]) -> type:
    """Create a data source of prompts that exist only in Python; ``sha256`` lets a resume check
    that they are the same."""

    class InPython:
        """Holds the prompts that an ``mmrl.Trainer`` was given."""

        def __init__(self, sha256: str = ""):
            self.sha256 = sha256
            self.train = train
            self.held_out = held_out

    return InPython


def digest(prompts: Sequence[Prompt]) -> str:
    """Hash the texts and plain values of prompts."""
    code = hashlib.sha256()
    for prompt in prompts:
        known = {k: v for k, v in prompt.items() if isinstance(v, (str, int, float, list, tuple))}
        code.update(repr(sorted(known.items())).encode(errors="surrogatepass"))
    return code.hexdigest()[:16]


def new_folder() -> Path:
    """Name a run folder that does not exist yet by the time."""
    stem = Path("runs", f"trainer-{datetime.now():%Y%m%d-%H%M%S}")
    names = (stem, *(Path(f"{stem}-{number}") for number in range(2, 1000)))
    return next(name for name in names if not name.exists())

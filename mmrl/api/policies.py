"""Loads policies in Python, and samples from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import mmrl.config as config
from mmrl.api.arguments import Overrides, plain, prompts_of, words_of
from mmrl.api.isolation import isolated
from mmrl.api.media import Samples, shown
from mmrl.api.processes import check_whole, whole, writes
from mmrl.api.protocols import RunLike
from mmrl.config import Config
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.files import whole_folder
from mmrl.core.paths import find_config
from mmrl.core.registry import DATA, POLICIES
from mmrl.core.types import Prompt
from mmrl.experiment import build, checkpoint, evaluation
from mmrl.policies.base import Policy as Model
from mmrl.policies.contracts import EvaluatesGreedily, Exports
from mmrl.train.device import Device

# defaults for a policy loaded without a training configuration
NO_TRAINING = TrainOptions(prompts_per_iteration=1, group_size=1, train_batch_size=1, iterations=0)
# attributes that ``sample_in_evaluation`` changes permanently
GREEDY = ("greedy_evaluation", "answer")


class Policy:
    """Holds a model that can be sampled from, and trained by ``mmrl.Trainer``.

    model: the object behind it (``mmrl.policies.base.Policy``; its network is ``model.net``).
    config: the configuration it was loaded from, whose settings are a Trainer's defaults.
    """

    def __init__(self, model: Model, configuration: Config | None = None):
        self.model = model
        self.config = configuration

    def sample(
        self,
        prompts: Any,
        num_samples: int = 4,
        *,
        seed: int = 0,
        guidance_scale: float | None = None,
        greedy: bool | None = None,
    ) -> Samples:
        """Sample answers to prompts: PIL images, ``mmrl.Video``s or texts, ``num_samples`` for each
        prompt, adjacent in the list. With several processes (torchrun) each draws its share and
        gets all.

        prompts: a text or a list of texts or dicts (``{"text": ..., "image": ...}`` for models with
        picture input), a pandas frame, or the Path of a file. seed: of the noise; the same seed
        draws the same noise before and after training. guidance_scale: of classifier-free guidance;
        None: as configured. greedy: greedy decoding of text models; None: only with one answer per
        prompt. Raises UserError for prompts that the model does not accept.
        """
        if num_samples < 1:
            raise UserError(f"num_samples: expected at least 1, got {num_samples}")
        rows = prompts_of(prompts)
        likeliest = num_samples == 1 if greedy is None else greedy
        with isolated(), torch.no_grad(), _choosing(self.model, likeliest):
            try:
                media, repeated = evaluation.sample(
                    self.model, rows, num_samples, seed, guidance_scale
                )
            except KeyError as error:
                raise UserError(
                    f"prompts have no {error}, which this model needs; its own data has it: "
                    f"policy.prompts[:4]"
                ) from error
            media, repeated = whole(media, repeated, rows, num_samples)
        return Samples(shown(media, self.model.media.fps), repeated)

    @property
    def prompts(self) -> list[Prompt]:
        """Return the held-out prompts of the configuration that it was loaded from, or the training
        prompts if none are held out."""
        if self.config is None or "data" not in self.config:
            raise UserError("this policy was loaded without data; give prompts of your own")
        with isolated():
            config.import_plugins(self.config)
            source = self.config.build("data", DATA)
        return list(source.held_out) or list(source.train)

    def export(self, folder: str | Path) -> Path:
        """Write the weights for the model's own library (diffusers, peft) into a new folder; with
        several processes, the main one does."""
        place = Path(folder)
        check_whole(self.model, "export its run in one process, mmrl export RUN")
        if not writes():
            return place
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise UserError(f"{place} exists and is not empty; name a new folder")
        with whole_folder(place) as draft:
            Exports.of(self.model).export(draft)
        return place

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.model.net.parameters())
        trained = sum(p.numel() for p in self.model.weights.parameters().values())
        return (
            f"mmrl.Policy({type(self.model).__name__}, {count:,} parameters, {trained:,} trainable)"
        )


def model_of(handle: Policy) -> Model:
    """Return the internal model of an API policy."""
    return handle.model


@contextmanager
def _choosing(model: Model, likeliest: bool) -> Iterator[None]:
    """Make a text model decode greedily, or sample, inside the block."""
    before = {name: getattr(model, name) for name in GREEDY if hasattr(model, name)}
    if not likeliest and isinstance(model, EvaluatesGreedily):
        model.sample_in_evaluation()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(model, name, value)


def load_policy(
    source: str | Path | Mapping[str, Any] | RunLike,
    overrides: Overrides = None,
    checkpoint: str | None = None,
) -> Policy:
    """Load a policy: the base model of a configuration, or the trained model of a run.

    source: a configuration (``"digits/flow_grpo"`` or a file), a run (folder or ``mmrl.Run``), or
    only a policy, ``{"sd3": {"path": "stabilityai/stable-diffusion-3.5-medium"}}``. overrides: as
    ``{"policy.guidance_scale": 3}``. checkpoint: of a run, ``"iteration-000050"`` or ``"best"``; by
    default the newest complete one, with its moving average if there is one. Raises UserError with
    the same sentence as the command line.
    """
    with isolated():
        configuration, folder = opened(source, overrides)
        return Policy(placed(configuration, folder, checkpoint), configuration)


def opened(
    source: str | Path | Mapping[str, Any] | RunLike, overrides: Overrides = None
) -> tuple[Config, Path | None]:
    """Read the configuration of a policy, and find the run folder that holds its weights, if it is
    a run."""
    words = words_of(overrides)
    if isinstance(source, Mapping):
        return config.from_mapping({"policy": plain(source)}, words, ("policy",)), None
    place = getattr(source, "folder", source)
    if not isinstance(place, (str, Path)):
        raise UserError(f"expected a configuration, a run or {{name: options}}, got {source!r}")
    folder = build.last_stage(Path(place)) if Path(place).is_dir() else None
    file = build.config_of(folder) if folder else find_config(place)
    return config.load(file, words, required=("policy",)), folder


def placed(configuration: Config, folder: Path | None = None, name: str | None = None) -> Model:
    """Build the model of a configuration on the device, with the weights of a run's checkpoint."""
    config.import_plugins(configuration)
    options = NO_TRAINING
    if "train" in configuration:
        options = configuration.section("train", TrainOptions)
    build.seed_everything(options.seed)
    model: Model = configuration.build("policy", POLICIES)
    if (start := configuration.plain.get("start")) and folder is None:
        build.begin_with(model, configuration, Path(start))
    Device(options).place(model)
    if "train" in configuration:
        build.set_width(model, options)
    if folder is not None:
        meta = load_weights(model, folder, name)
        build.set_width(model, options, meta)
    return model


def load_weights(model: Model, folder: Path, name: str | None = None) -> dict[str, Any]:
    """Load the weights of a run into a model: from the named or the newest complete checkpoint, the
    moving average if there is one. Returns the checkpoint's other plain data."""
    checkpoints = folder / "checkpoints"
    path = checkpoint.named(checkpoints, name) if name else checkpoint.choose(checkpoints)[0]
    arrays, meta = checkpoint.load(path, checked=not name)
    try:
        model.weights.load(arrays.get("snapshot-ema", arrays["weights"]))
    except ValueError as error:
        raise UserError(f"{path} does not fit {build.config_of(folder)}: {error}") from error
    return meta

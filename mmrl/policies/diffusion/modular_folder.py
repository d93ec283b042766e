"""Loads modular diffusers pipelines and adapts them to the interface of standard ones: a call with
named arguments, a step that prepares latents, differentiable blocks.

A modular pipeline is a tree of blocks that pass on a state; several models of 2026 (FLUX.3, Anima,
MiniMax H3) exist in no other form. Each block disables gradients, one draws the initial latents,
and guidance comes from a component, the guider.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from copy import deepcopy
from inspect import Parameter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core import pretrained
from mmrl.core.errors import UserError
from mmrl.core.libraries import find_class, library_class
from mmrl.core.model_folders import check_libraries
from mmrl.policies.diffusion import minimax_h3
from mmrl.policies.diffusion.library_objects import override
from mmrl.policies.diffusion.self_stepping import by_scheduler

INDEX = "modular_model_index.json"
MEDIA = ("images", "videos")  # names of decoded outputs
SOUND = "audio"
GUIDANCE = "guidance_scale"
# further options of a guider of videos with sound; the sound has a separate guider
RESCALE = "guidance_rescale"
FURTHER = ("stg_scale", "modality_scale", RESCALE)
STG_BLOCKS = "spatio_temporal_guidance_blocks"
# states that blocks compute before their loop, and the corresponding methods of standard pipelines
STATES = {"latents": "prepare_latents", "audio_latents": "prepare_audio_latents"}
# a block's descriptions of itself, which diffusers rebuilds on every access
DECLARED = ("inputs", "required_inputs", "intermediate_outputs")


def is_modular(place: str) -> bool:
    """Tell whether a folder or hub id holds only a modular pipeline."""
    folder = Path(place)
    if folder.exists():
        return (folder / INDEX).is_file() and not (folder / "model_index.json").is_file()
    from huggingface_hub import file_exists, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    known = [isinstance(try_to_load_from_cache(place, n), str) for n in ("model_index.json", INDEX)]
    if any(known):
        return not known[0]
    try:
        return file_exists(place, INDEX) and not file_exists(place, "model_index.json")
    except (HfHubHTTPError, OSError, ValueError):
        return False  # loading reports the error


def read_index(place: str) -> dict[str, Any]:
    """Read the index of a modular pipeline."""
    import diffusers

    return pretrained.load_config(diffusers.ModularPipeline, place)


def check_index(index: dict[str, Any], path: str) -> None:
    """Reject a folder whose pipeline, blocks or parts are not from the installed libraries."""
    import diffusers

    kinds = {
        "_class_name": diffusers.ModularPipeline,
        "_blocks_class_name": diffusers.ModularPipelineBlocks,
    }
    for key, base in kinds.items():
        name = str(index.get(key) or "")
        entry = find_class("diffusers", name) if name.isidentifier() else None
        if not (isinstance(entry, type) and issubclass(entry, base)):
            raise UserError(
                f"policy path {path!r}: diffusers {diffusers.__version__} has no modular pipeline "
                f"{name or 'without a name'} ({key} in {INDEX}); install a version that has it"
            )
    check_libraries(index, path)


def load(
    place: str,
    path: str,
    index: dict[str, Any],
    dtypes: dict[str, torch.dtype],
    skip_blocks: Sequence[str],
    make: Any = None,
) -> Any:
    """Load a modular pipeline in the form that a replay takes, without the named blocks and parts
    that only they need; with ``make`` (``pipeline_folder.Make``) parts that have weights are made
    by it."""

    cls = library_class("diffusers", index["_class_name"])
    blocks = _blocks(cls, library_class("diffusers", index["_blocks_class_name"]), skip_blocks)
    pipe = cls(blocks=blocks, pretrained_model_name_or_path=place)
    networks = {} if make is None else _made(pipe, dtypes, make)
    names = [name for name in pipe.pretrained_component_names if name not in networks]
    skip = (
        f"leave out blocks that you do not need by the policy option skip_blocks, of: "
        f"{', '.join(blocks.sub_blocks)}"
    )
    try:
        pretrained.load_components(pipe, names, dtypes)
    except UserError as error:
        raise UserError(f"policy path {path!r}: {error}; {skip}") from error
    pipe.update_components(**networks)
    absent = [
        name
        for name in pipe.pretrained_component_names
        if getattr(pipe, name, None) is None
        and pipe.get_component_spec(name).pretrained_model_name_or_path
    ]
    if absent:
        raise UserError(
            f"policy path {path!r}: {', '.join(absent)} of {cls.__name__} cannot be loaded from "
            f"where its index says; {skip}"
        )
    return adapted(pipe)


def _blocks(cls: Any, kind: Any, skipped: Sequence[str]) -> Any:
    """Build the tree of blocks of a pipeline, without the named ones."""

    # without block classes the pipeline was assembled by hand
    blocks = kind() if kind.block_classes else None
    blocks = blocks or library_class("diffusers", cls.default_blocks_name)()
    blocks = deepcopy(blocks)  # the inner ones belong to the library's module
    minimax_h3.without_references(list(tree(blocks)))
    for name in skipped:
        if name not in blocks.sub_blocks:
            raise UserError(
                f"policy option skip_blocks: {cls.__name__} has no block {name!r}; it has: "
                f"{', '.join(blocks.sub_blocks)}"
            )
        blocks.sub_blocks.pop(name)
    return blocks


def _made(pipe: Any, dtypes: dict[str, torch.dtype], make: Any) -> dict[str, Any]:
    """Make the parts that have weights."""
    networks = {}
    for name in pipe.pretrained_component_names:
        spec = pipe.get_component_spec(name)
        place = spec.pretrained_model_name_or_path
        is_network = isinstance(spec.type_hint, type) and issubclass(spec.type_hint, nn.Module)
        if is_network and place:
            dtype = dtypes.get(name, dtypes["default"])
            networks[name] = make(spec.type_hint, place, spec.subfolder or "", dtype)
    return networks


def save(pipeline: Any, place: str, parts: dict[str, Any], folder: Path) -> None:
    """Write a complete modular folder with these parts instead of its own."""
    pipe = pipeline(pretrained_model_name_or_path=place)
    names = [name for name in pipe.pretrained_component_names if name not in parts]
    pretrained.load_components(pipe, names)
    pipe.update_components(**parts)
    pipe.save_pretrained(str(folder), overwrite_modular_index=True)


def adapted(pipe: Any) -> Any:
    """Add to a modular pipeline a call with named arguments and ``prepare_latents``, and make its
    blocks differentiable."""
    for block in tree(pipe._blocks):
        _let_gradients_through(block)
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
    by_scheduler(pipe, list(tree(pipe._blocks)))
    if minimax_h3.is_h3(getattr(pipe, "scheduler", None)):
        minimax_h3.keep_one_layer(pipe)
    for state, method in STATES.items():
        preparing = [block for block in before_loops(pipe._blocks) if state in written(block)]
        if preparing:
            pipe.__dict__[method] = lambda latents: latents
        for block in preparing:  # of each workflow; what comes after its loop writes latents too
            _prepare_by_the_pipeline(block, state, method)

    def call(pipe: Any, **arguments: Any) -> Any:
        return _called(pipe, arguments)

    _declare_once(list(tree(pipe._blocks)))
    call.__signature__ = _signature(pipe)  # type: ignore[attr-defined]
    override(pipe, __call__=call)
    return pipe


def tree(block: Any) -> Iterator[Any]:
    """Walk over a block and all blocks inside it."""
    yield block
    for inner in block.sub_blocks.values():
        yield from tree(inner)


def before_loops(block: Any) -> Iterator[Any]:
    """Walk over the blocks that have no others inside and are no part of a loop."""
    from diffusers.modular_pipelines import LoopSequentialPipelineBlocks

    if isinstance(block, LoopSequentialPipelineBlocks):
        return
    if not block.sub_blocks:
        yield block
    for inner in block.sub_blocks.values():
        yield from before_loops(inner)


def written(block: Any) -> list[str]:
    """Name what a block adds to the state."""
    return [output.name for output in block.intermediate_outputs]


def _signature(pipe: Any) -> inspect.Signature:
    """Build the call's signature from the inputs of the blocks and the guider's scale."""
    only = Parameter.KEYWORD_ONLY
    parameters = [Parameter("self", Parameter.POSITIONAL_ONLY)]
    for entry in pipe._blocks.inputs:
        if entry.name:
            default = Parameter.empty if entry.required else entry.default
            parameters.append(Parameter(entry.name, only, default=default))
    if guidance_of(pipe):
        parameters.append(Parameter(GUIDANCE, only, default=guider_of(pipe).guidance_scale))
    if sound_guider_of(pipe) is not None:
        names = [*FURTHER, STG_BLOCKS, *(f"audio_{name}" for name in (GUIDANCE, *FURTHER))]
        parameters += [Parameter(name, only, default=None) for name in names]
    return inspect.Signature(parameters)


def guider_of(pipe: Any) -> Any:
    """Return the component that mixes outputs by a scale; None where there is none."""
    return _component(pipe, "guider", GUIDANCE)


def sound_guider_of(pipe: Any) -> Any:
    """Return the component that guides the sound of a video; None where there is none."""
    return _component(pipe, "audio_guider", GUIDANCE, *FURTHER)


def _component(pipe: Any, name: str, *settings: str) -> Any:
    """Return a component of a modular pipeline, if it has these settings."""
    guider = getattr(pipe, name, None) if hasattr(pipe, "_blocks") else None
    return guider if all(hasattr(guider, setting) for setting in settings) else None


def guidance_of(pipe: Any) -> str | None:
    """Name the argument of the call that is the guider's scale; None for other pipelines."""
    return GUIDANCE if guider_of(pipe) is not None and GUIDANCE not in _inputs(pipe) else None


def _inputs(pipe: Any) -> list[str]:
    return [entry.name for entry in pipe._blocks.inputs if entry.name]


def _called(pipe: Any, arguments: dict[str, Any]) -> Any:
    """Run the blocks and return what they decoded, as a tuple."""
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    state = PipelineState()
    chosen = dict(arguments)
    _guide(pipe, chosen)
    for entry in pipe._blocks.inputs:
        if entry.name:
            state.set(entry.name, chosen.pop(entry.name, entry.default), entry.kwargs_type)
    _, state = pipe._blocks(pipe, state)
    decoded = [state.get(name) for name in MEDIA if state.get(name) is not None]
    media = decoded[0] if decoded else state.get("latents")
    sound = state.get(SOUND)
    return (media,) if sound is None else (media, sound)


def _guide(pipe: Any, chosen: dict[str, Any]) -> None:
    """Set the guiders to a call's guidance arguments, which are removed from ``chosen``. Sound
    takes the video's guidance scale by default, but its own guider's rescaling, both as in
    LTX2Pipeline."""
    sound = sound_guider_of(pipe)
    guiders = [("", guider_of(pipe)), ("audio_", sound)] if sound is not None else []
    if sound is not None and chosen.get(STG_BLOCKS) is not None:
        setattr(guiders[0][1], STG_BLOCKS, chosen[STG_BLOCKS])
    for name in FURTHER:
        values = [chosen.pop(prefix + name, None) for prefix, _ in guiders]
        for value, (_, guider) in zip(values, guiders, strict=True):
            value = values[0] if value is None and name != RESCALE else value
            setattr(guider, name, guider.config[name] if value is None else value)
    chosen.pop(STG_BLOCKS, None)
    scales = [chosen.pop(GUIDANCE, None)] if guidance_of(pipe) else []
    scales += [chosen.pop(f"audio_{GUIDANCE}", None)] if sound is not None else []
    for scale, guider in zip(scales, (guider_of(pipe), sound), strict=False):
        scale = scales[0] if scale is None else scale
        if scale is None:
            continue
        guider.guidance_scale = scale
        if scale != 1:
            guider.enable()  # Z-Image's blocks turn it off, whatever its scale


def _let_gradients_through(block: Any) -> None:
    """Remove the decorator that disables gradients in a block's call."""
    override(block, __call__=inspect.unwrap(type(block).__call__))


def _declare_once(blocks: list[Any]) -> None:
    """Cache the inputs and outputs that blocks declare: a replay would query them in every step,
    each block recursively. The tree must not change afterwards."""
    # read all before caching any: a block changes what its inner blocks declare
    declared = [{name: getattr(block, name) for name in DECLARED} for block in blocks]
    for block, values in zip(blocks, declared, strict=True):
        override(block, **values)


def _prepare_by_the_pipeline(block: Any, name: str, method: str) -> None:
    """Let a method of the pipeline read and replace the initial latents of this name in a call."""
    cls = type(block)
    is_prepared = f"{name}_are_prepared"  # of a call's state

    def prepared(pipe: Any, latents: Tensor) -> Tensor:
        if not minimax_h3.is_h3(getattr(pipe, "scheduler", None)):
            state: Tensor = getattr(pipe, method)(latents)
            return state
        # of rows that are no samples, into which its loop writes
        rows: Tensor = getattr(pipe, method)(latents[None])[0].clone()
        return rows

    def call(block: Any, pipe: Any, state: Any) -> Any:
        pipe, state = cls.__call__(block, pipe, state)
        if not state.get(is_prepared):
            state.set(is_prepared, True)
            state.set(name, prepared(pipe, state.get(name)))
        return pipe, state

    override(block, __call__=call)

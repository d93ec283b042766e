"""The only place that loads models of other libraries: networks, tokenizers, processors,
schedulers, pipelines, configs. Nothing else in mmrl and rewards calls ``from_pretrained`` or the
like (``tests/core/test_pretrained.py``).

Checks: no Python code of a folder runs without ``remote_code``, and nothing prompts at the terminal
(``foreign_code.py``); every weight of a model was in its files, finite and of its shape
(``complete_weights.py``); folders with only an adapter, or in the authors' original layout, are
refused (``model_folders.py``); a broken file is named (``weight_files.py``). Wrapper names of FSDP,
DeepSpeed or torch.compile are removed, with a warning.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core import complete_weights, weight_files
from mmrl.core.complete_weights import Loading
from mmrl.core.errors import UserError
from mmrl.core.foreign_code import guarded, is_about_code
from mmrl.core.libraries import find_class
from mmrl.core.model_folders import (
    check_libraries,
    folder_of,
    has_part,
    is_network,
    networks_of,
    refuse_adapter,
    refuse_eight_bits,
    refuse_file,
    refuse_gguf,
    refuse_original,
)

# their loading messages are replaced by one sentence here
NOISY = ("transformers.modeling_utils", "diffusers.models.modeling_utils")
ROOT = "model."  # attributes under which trainers wrap the model
OUR_OWN = ("builtins", "mmrl", "rewards")  # other errors of these are not caused by a folder
_hollow: ContextVar[bool] = ContextVar("networks are made without weights", default=False)


@contextmanager
def without_weights() -> Iterator[None]:
    """Build networks from their configs on the meta device, instead of loading them: enough to
    check which prompts a policy accepts."""
    token = _hollow.set(True)
    try:
        yield
    finally:
        _hollow.reset(token)


def load_model(
    entry: Any,
    path: str | Path,
    *,
    subfolder: str = "",
    remote_code: bool = False,
    unread: Sequence[str] = (),
    **options: Any,
) -> Any:
    """Load a network by ``entry.from_pretrained``.

    Args:
        entry: class of transformers or diffusers, or an auto class.
        path: folder or hub id.
        subfolder: of the folder, for one part of a pipeline.
        remote_code: run code of the folder, as set by the user.
        unread: name parts of weights that the caller does not use and that may be missing.
        options: ``dtype`` and others of ``from_pretrained``.

    Raises UserError if it cannot be loaded completely.
    """
    place = _expanded(path)
    folder = folder_of(place, subfolder)
    _refuse_others(entry, place, folder, remote_code)
    what = f"{place}/{subfolder}" if subfolder else place
    entry = _class_in(entry, place, subfolder)
    if _hollow.get() and not remote_code:
        return _made_hollow(entry, place, subfolder)
    options = _named(entry, folder, subfolder, remote_code) | options
    with _explained(entry, what, folder, remote_code), guarded(remote_code), _quiet():
        net, info = entry.from_pretrained(
            place, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    loading = Loading.of(info, unread)
    if folder is not None and not loading.is_whole:
        net, loading = _without_wrappers(net, loading, folder, what)
    _check_whole(net, loading, what, folder)
    return net


def _named(entry: Any, folder: Path | None, subfolder: str, remote_code: bool) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` for the files, and for whether code may run."""
    options: dict[str, Any] = {}
    if folder is not None and (variant := weight_files.variant_of(folder)):
        options["variant"] = variant
    if str(entry.__name__).startswith("Auto") or remote_code:
        options["trust_remote_code"] = remote_code
    return options | ({"subfolder": subfolder} if subfolder else {})


def _check_whole(net: nn.Module, loading: Loading, what: str, folder: Path | None) -> None:
    """Raise UserError for a network with missing or broken weights; warn of unused tensors."""
    if complaint := complete_weights.complaint(net, loading, what):
        raise UserError((folder and weight_files.fault_in(folder)) or complaint)
    _check_finite(net, what, folder)
    if loading.unexpected:
        warnings.warn(
            f"{what}: {type(net).__name__} does not use {len(loading.unexpected)} tensors of its "
            f"files, such as {complete_weights.listed(loading.unexpected)}",
            stacklevel=3,
        )


def _refuse_others(entry: Any, place: str, folder: Path | None, remote_code: bool) -> None:
    """Raise UserError for a folder that is not a model as libraries save it."""
    refuse_adapter(place, folder)
    if not remote_code:
        refuse_original(place, folder)
    if folder is not None:
        refuse_gguf(folder)
        if _is_of_diffusers(entry):
            refuse_eight_bits(folder)


def load_processor(
    entry: Any, path: str | Path, *, subfolder: str = "", remote_code: bool = False, **options: Any
) -> Any:
    """Load something without weights by ``entry.from_pretrained``: a tokenizer, a processor, a
    config, a scheduler. UserError if it cannot be loaded."""
    place = _expanded(path)
    what = f"{place}/{subfolder}" if subfolder else place
    if not _is_of_diffusers(entry):
        options["trust_remote_code"] = remote_code
    if subfolder:
        options["subfolder"] = subfolder
    folder = folder_of(place, subfolder)
    if not remote_code:
        refuse_original(place, folder)
    with _explained(entry, what, folder, remote_code), guarded(remote_code), _quiet():
        return entry.from_pretrained(place, **options)


def load_pipeline(
    cls: Any,
    path: str | Path,
    dtype: torch.dtype | dict[str, torch.dtype] | None = None,
    parts: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Load a pipeline of diffusers, each network separately and completely.

    Args:
        cls: the class of the pipeline.
        path: folder or hub id.
        dtype: of its networks, or by their names, with a ``default``.
        parts: replacements of its parts; None: none.
        options: of ``from_pretrained``.
    """
    place = _expanded(path)
    index = load_config(cls, place)
    check_libraries(index, place)
    loaded = dict(parts or {})
    common = {key: options[key] for key in ("use_safetensors",) if key in options}
    for name, network in networks_of(index, place).items():
        if name not in loaded:
            loaded[name] = load_model(
                network, place, subfolder=name, **_typed(dtype, name), **common
            )
    if dtype is not None:
        options["dtype"] = dtype
    with _explained(cls, place, folder_of(place)), guarded(), _quiet():
        return cls.from_pretrained(place, **loaded, **options)


def load_single_file(
    entry: Any,
    file: Path,
    place: str,
    subfolder: str,
    dtype: torch.dtype,
    parts: Sequence[str] = (),
    **options: Any,
) -> Any:
    """Load a network, or the ``parts`` of a pipeline, from one safetensors file by diffusers'
    ``entry.from_single_file``.

    Args:
        file: with the original or diffusers' tensor names.
        place: local folder in diffusers' format, whose configurations are used; no downloads.
        subfolder: of a network; "" for a pipeline.
        parts: networks of a pipeline that must be complete.
        options: further parts of a pipeline, which the file lacks.

    Raises UserError if the class does not read such a file, or it is incomplete.
    """
    if not hasattr(entry, "from_single_file"):
        raise UserError(
            f"{file}: diffusers' {entry.__name__} reads no single files; take the model's folder "
            "in diffusers' format"
        )
    options |= {"config": place, "local_files_only": True, "dtype": dtype}
    options |= {"subfolder": subfolder} if subfolder else {}
    try:
        with guarded(), _quiet():
            loaded = entry.from_single_file(str(file), **options)
    except Exception as error:  # each converter of diffusers has errors of its own
        raise UserError(
            weight_files.fault(file)
            or f"{file} does not fit {place}: diffusers' {entry.__name__} cannot load it: "
            f"{_reason(error)}; give by --base a folder of the same architecture"
        ) from error
    for net in [getattr(loaded, part) for part in parts] or [loaded]:
        _check_filled(net, file, place)
    return loaded


def _check_filled(net: nn.Module, file: Path, place: str) -> None:
    """Raise UserError for a network of which a file has missing or broken weights."""
    empty = [name for name, tensor in net.state_dict().items() if tensor.is_meta]
    if empty:
        raise UserError(
            f"{file} does not fit {place}: {type(net).__name__} has {len(empty)} weights that "
            f"the file lacks, such as {empty[0]}"
        )
    _check_finite(net, str(file), None)


def load_components(
    pipe: Any, names: Sequence[str], dtypes: dict[str, torch.dtype] | None = None
) -> None:
    """Load parts of a modular pipeline of diffusers, its networks completely."""
    networks = {}
    for name in names:
        spec = pipe.get_component_spec(name)
        place, subfolder = spec.pretrained_model_name_or_path, spec.subfolder or ""
        if place and is_network(spec.type_hint) and has_part(place, subfolder):
            networks[name] = load_model(
                spec.type_hint, place, subfolder=subfolder, **_typed(dtypes, name)
            )
    rest = [name for name in names if name not in networks]
    options = {} if dtypes is None else {"dtype": dtypes}
    with guarded(), _quiet():
        pipe.load_components(names=rest, use_safetensors=True, **options)
    pipe.update_components(**networks)


def load_config(entry: Any, path: str | Path, subfolder: str = "") -> dict[str, Any]:
    """Read the config file of a part or pipeline of diffusers."""
    place = _expanded(path)
    options = {"subfolder": subfolder} if subfolder else {}
    with _explained(entry, place, folder_of(place, subfolder)), guarded(), _quiet():
        config: dict[str, Any] = entry.load_config(place, **options)
        return config


def from_config(entry: Any, config: Any, **options: Any) -> Any:
    """Build an object from its config, without weights."""
    with guarded():
        return entry.from_config(config, **options)


def from_tensors(
    entry: Any, config: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[Any, Loading]:
    """Build a model of transformers or diffusers from tensors by name, and return its loading
    info."""
    if _is_of_diffusers(entry):
        net = from_config(entry, config).to(dtype).eval()
        shapes = {name: value.shape for name, value in net.state_dict().items()}
        fitting = {n: t for n, t in tensors.items() if shapes.get(n) == t.shape}
        missing = net.load_state_dict(fitting, strict=False).missing_keys
        return net, Loading(tuple(missing), tuple(sorted(set(tensors) - set(fitting))))
    with guarded(), _quiet():
        net, info = entry.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    return net, Loading.of(info)


def load_open_clip(name: str, tag: str | None, quick_gelu: bool) -> tuple[nn.Module, Any]:
    """Load a model of open_clip and its tokenizer by the names of ``open_clip.create_model``."""
    import open_clip

    with (
        guarded(),
        _quiet(),
        torch.random.fork_rng(devices=[]),
    ):  # weights are initialised at random, then loaded
        net: nn.Module = open_clip.create_model(
            name, tag, force_quick_gelu=quick_gelu, require_pretrained=True, weights_only=True
        )
        tokenizer = open_clip.get_tokenizer(name)
    _check_finite(net, name, None)
    return net, tokenizer


def load_timm(name: str) -> nn.Module:
    """Load a model of timm with its weights."""
    import timm

    with (
        guarded(),
        _quiet(),
        torch.random.fork_rng(devices=[]),
    ):  # weights are initialised at random, then loaded
        net: nn.Module = timm.create_model(name, pretrained=True)
    _check_finite(net, name, None)
    return net


def _expanded(path: str | Path) -> str:
    text = str(path)
    text = str(Path(text).expanduser()) if text.startswith("~") else text
    refuse_file(text)
    return text


def _typed(dtype: torch.dtype | dict[str, torch.dtype] | None, part: str) -> dict[str, Any]:
    """Return the option for the dtype of a part."""
    if isinstance(dtype, dict):
        dtype = dtype.get(part, dtype.get("default"))
    return {} if dtype is None else {"dtype": dtype}


def _class_in(entry: Any, place: str, subfolder: str) -> Any:
    """Return the class named in a config if ``entry`` is diffusers' AutoModel, which gives no
    loading info; else ``entry``."""
    if entry.__name__ != "AutoModel" or not _is_of_diffusers(entry):
        return entry

    config = load_config(entry, place, subfolder)
    if "auto_map" in config:
        raise UserError(_about_code(entry, place))
    name = config.get("_class_name")
    cls = find_class("diffusers", str(name))
    if cls is None:
        raise UserError(f"{place}: its config.json names no class of diffusers ({name!r})")
    return cls


def _made_hollow(entry: Any, place: str, subfolder: str) -> nn.Module:
    """Build a network on the meta device from its config."""
    if _is_of_diffusers(entry):
        config = load_config(entry, place, subfolder)
    else:
        from transformers import AutoConfig

        config = load_processor(AutoConfig, place, subfolder=subfolder)
    make = entry._from_config if _is_of_transformers(entry) else entry.from_config
    with torch.device("meta"), guarded(), _quiet():
        net: nn.Module = make(config)
    return net


def _is_of_diffusers(entry: Any) -> bool:
    return str(entry.__module__).startswith("diffusers.") and not _is_of_transformers(entry)


def _is_of_transformers(entry: Any) -> bool:
    from transformers import PreTrainedModel

    return isinstance(entry, type) and issubclass(entry, PreTrainedModel)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the libraries' tables and progress bars while a model is loaded."""
    from transformers.utils import logging as of_transformers

    of_transformers.disable_progress_bar()  # a bar for every part of a model would hide mmrl's
    if "diffusers" in sys.modules:
        from diffusers.utils import logging as of_diffusers

        of_diffusers.disable_progress_bar()
    loggers = [logging.getLogger(name) for name in NOISY]
    for logger in loggers:  # by a filter: libraries change behaviour with the log level
        logger.addFilter(_is_error)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextmanager
def _explained(
    entry: Any, what: str, folder: Path | None, remote_code: bool = False
) -> Iterator[None]:
    """Convert libraries' errors for a folder that is broken, missing or needs remote code to one
    sentence."""
    try:
        yield
    except Exception as error:  # the hub, safetensors and tokenizers have their own exception types
        if is_about_code(error) and not remote_code:
            raise UserError(_about_code(entry, what)) from error
        if isinstance(error, (UserError, NotImplementedError, AssertionError)):
            raise
        if folder is not None and (broken := weight_files.fault_in(folder)):
            raise UserError(broken) from error
        raise UserError(
            f"{what}: {entry.__name__} cannot load it: {_reason(error)}; give a local folder, or a "
            f"hub id that this machine can download (log in with `hf auth login` for gated models)"
        ) from error


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _about_code(entry: Any, what: str) -> str:
    return (
        f"{what}: {entry.__name__} would run Python code of this folder, which is not done: take a "
        f"folder whose classes transformers or diffusers have; a policy that has the option "
        f"remote_code runs it where that is true (read the code first)"
    )


def _without_wrappers(net: Any, loading: Loading, folder: Path, what: str) -> tuple[Any, Loading]:
    """Load again without trainers' wrapper names if that completes the model; else return the first
    result."""
    files = weight_files.files_of(folder, weight_files.variant_of(folder))
    stored = {
        name: tensor
        for file in files
        if file.is_file()
        for name, tensor in weight_files.read_tensors(file).items()
    }
    plain = {name: complete_weights.unwrapped(name) for name in stored}
    rootless = {name: text.removeprefix(ROOT) for name, text in plain.items()}
    dtype = next(net.parameters()).dtype
    for renamed in (plain, rootless):
        changed = [name for name, text in renamed.items() if name != text]
        if not changed:
            continue
        tensors = {renamed[name]: tensor for name, tensor in stored.items()}
        again, retried = from_tensors(type(net), net.config, tensors, dtype)
        if retried.is_whole:
            warnings.warn(
                f"{what} was saved with a wrapper around the model: {changed[0]} and "
                f"{len(changed) - 1} others were read as {renamed[changed[0]]} and so on",
                stacklevel=3,
            )
            if _is_of_transformers(type(net)):
                again.config.name_or_path = again.name_or_path = net.config.name_or_path
                again.generation_config = getattr(net, "generation_config", None)
            return again, retried
    return net, loading


def _check_finite(net: nn.Module, what: str, folder: Path | None) -> None:
    """Raise UserError if a weight is NaN or infinite, naming file and tensor."""
    broken = list(weight_files.not_finite(net.state_dict()))
    if not broken:
        return
    place = None
    if folder is not None:
        place = weight_files.first_not_finite(folder, weight_files.variant_of(folder))
    further = f", as do {len(broken) - 1} other tensors" if len(broken) > 1 else ""
    raise UserError(
        f"{place or f'{what}: {broken[0]}'} holds NaN or infinity{further}: the weights diverged "
        f"before they were saved, or the file is damaged; take an earlier checkpoint, or download "
        f"it again"
    )

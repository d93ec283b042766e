"""Reads LoRA files of any form by diffusers' own readers, writes those of ComfyUI and kohya's
sd-scripts, and merges adapters into a model.

An adapter's change of a weight is ``scale * up @ down``. Whatever is written is read back by
diffusers before it is handed over, and must be the same change of the same weights.
"""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core import weight_files
from mmrl.core.errors import UserError
from mmrl.core.registry import locate
from mmrl.policies.diffusion import diffusers_folder
from mmrl.policies.diffusion.lora_names import FAMILIES, Format, Names, Place
from mmrl.policies.lora import ADAPTER

PROBES = 4
TOLERANCE = 1e-4  # of what diffusers reads back, relative to the largest output of a module
LOG = logging.getLogger(__name__)
METADATA = "lora_adapter_metadata"  # where diffusers keeps an adapter's configuration in a file
HARMLESS = ("experimental", "safety checker", "No LoRA keys associated to", "Already found")
PEFT_PREFIX = "base_model.model."  # of the names of an adapter as peft saves it
LISTED = 8  # tensors in a message
OF_TEXT_ENCODERS = ("lora_te", "text_encoder", "te1.", "te2.")


@dataclass(frozen=True)
class Pair:
    """Holds the adapter of one module: ``scale * up @ down`` is added to its weight."""

    down: Tensor  # [rank, in], of a convolution [rank, in, k, k]
    up: Tensor  # [out, rank], of a convolution [out, rank, 1, 1]
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    def delta(self) -> Tensor:
        """Return the change of the weight in float32, in the weight's shape."""
        change = self.up.float().flatten(1) @ self.down.float().flatten(1)
        return self.scale * change.view(self.up.shape[0], *self.down.shape[1:])

    def on_probes(self) -> Tensor:
        """Apply the change to a few fixed random inputs, without computing the change itself."""
        down = self.down.float().flatten(1)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(down.shape[1], PROBES, generator=generator)
        return self.scale * (self.up.float().flatten(1) @ (down @ inputs))


Adapter = dict[str, Pair]  # by the name of the module in diffusers' network


@dataclass(frozen=True)
class Base:
    """Knows the architecture of a model in diffusers' folder format; no weights are read."""

    place: str
    pipeline: Any  # class of diffusers
    networks: Mapping[str, Any]  # part -> class of diffusers

    @classmethod
    def of(cls, path: str) -> Base:
        """Look at a folder or hub id. UserError where it is no pipeline of diffusers'."""
        import diffusers

        place = locate(path)
        index = diffusers_folder.index(place)
        name = str(index.get("_class_name", ""))
        pipeline = getattr(diffusers, name, None)
        if not (inspect.isclass(pipeline) and issubclass(pipeline, diffusers.DiffusionPipeline)):
            raise UserError(f"{path}: diffusers has no pipeline {name or 'without a name'!r}")
        networks = {}
        for part in ("transformer", "transformer_2", "unet"):
            entry = index.get(part)
            library, kind = (
                entry if isinstance(entry, (list, tuple)) and len(entry) == 2 else ("", "")
            )
            network = getattr(diffusers, str(kind), None) if library == "diffusers" else None
            if inspect.isclass(network) and issubclass(network, diffusers.ModelMixin):
                networks[part] = network
        if not networks or not hasattr(pipeline, "load_lora_weights"):
            raise UserError(f"{path}: diffusers' {name} loads no LoRA weights")
        return cls(place, pipeline, networks)

    @property
    def part(self) -> str:
        """Name the folder of the network that adapters are for."""
        return next(iter(self.networks))

    def architecture(self) -> Any:
        """Build the network with weights of zeros that take no memory."""
        network = self.networks[self.part]
        config = diffusers_folder.load_config(network, self.place, self.part)
        with torch.device("meta"):
            net = network.from_config(config)
        for module in net.modules():  # peft moves adapters to where the weights are: not to meta
            for name, weight in list(module.named_parameters(recurse=False)):
                zeros = torch.zeros(()).expand(weight.shape)
                setattr(module, name, nn.Parameter(zeros, requires_grad=False))
        return net


def read(base: Base, file: Path) -> Adapter:
    """Read a LoRA file of any form that the pipeline itself loads, as pairs of matrices. UserError
    for others, and for changes that are more than such pairs."""
    norms = [
        key for key in _keys(file) if key.endswith(".diff") or ("norm" in key and "lora" not in key)
    ]
    if norms and not norms[0].startswith(OF_TEXT_ENCODERS):
        raise UserError(
            f"{file}: changes whole weights, mostly of norms, such as {norms[0]!r}, which only a "
            f"merged model has; use mmrl convert {file.name} --base MODEL --into FOLDER"
        )
    net = base.architecture()
    load(base, net, file)
    if further := _further(net):
        raise UserError(
            f"{file}: changes more than pairs of matrices ({further}), which only a merged model "
            f"has; use mmrl convert {file.name} --base MODEL --into FOLDER"
        )
    adapter = dict(_pairs(net))
    if not adapter:
        raise UserError(
            f"{file}: diffusers' {base.pipeline.__name__} finds no LoRA weights for its "
            f"{base.part} in it, whose first name is {_keys(file)[0]!r}"
        )
    return adapter


def load(base: Base, net: Any, file: Path) -> None:
    """Let diffusers' pipeline load a LoRA file into a network of its kind, and warn of all tensors
    that it leaves out. UserError where it cannot."""
    required = [
        name
        for name, parameter in inspect.signature(base.pipeline.__init__).parameters.items()
        if name != "self" and parameter.default is parameter.empty
    ]
    with TemporaryDirectory(prefix="mmrl-lora-") as folder, overheard() as remarks:
        source = _of_network(base, file, Path(folder))
        pipe = base.pipeline(**(dict.fromkeys(required) | {base.part: net}))
        try:
            pipe.load_lora_weights(
                str(source.parent),
                weight_name=source.name,
                use_safetensors=True,
                local_files_only=True,
            )
        except Exception as error:  # its readers fail in many ways on a file of another model
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"{file}: diffusers' {base.pipeline.__name__} cannot read this LoRA: {reason[:200]}"
            ) from error
    for remark in remarks:
        LOG.warning("%s: diffusers says of this LoRA: %s", file, remark)
    if left := _differences(net, _keys(file)):
        LOG.warning(
            "%s: leaves out %d differences of whole weights, which diffusers does not read: %s",
            file,
            len(left),
            ", ".join(left[:LISTED]) + (", ..." if len(left) > LISTED else ""),
        )


def _differences(net: nn.Module, names: Sequence[str]) -> list[str]:
    """Name the tensors of a file that are differences of weights and biases (``.diff``,
    ``.diff_b``) and that a loaded network has not taken: it takes biases beside pairs alone."""
    modules = {name.split(".lora_")[0] for name in names if ".lora_" in name}
    biases = [name for name in names if name.endswith(".diff_b")]
    beside = [name for name in biases if name.removesuffix(".diff_b") in modules]
    taken = sum(any(getattr(module, "lora_bias", {}).values()) for module in net.modules())
    rest = [name for name in biases if taken < len(beside) or name not in beside]
    return [*(name for name in names if name.endswith(".diff")), *rest]


def _of_network(base: Base, file: Path, folder: Path) -> Path:
    """Return the file, or a copy as diffusers reads it: without adapters of text encoders, and of
    the names that peft saves."""
    from safetensors.torch import save_file

    named = _keys(file)
    if all(key.startswith(PEFT_PREFIX) for key in named):
        layers = {
            f"{base.part}.{key.removeprefix(PEFT_PREFIX)}": value
            for key, value in weight_files.read_tensors(file).items()
        }
        save_file(layers, folder / file.name, metadata={"format": "pt"})
        return folder / file.name
    texts = [key for key in named if key.startswith(OF_TEXT_ENCODERS)]
    if not texts:
        return file
    if len(texts) == len(named):
        raise UserError(
            f"{file}: holds adapters of a text encoder alone, such as {texts[0]!r}; only those of "
            f"a network are converted and merged"
        )
    rest = {k: v for k, v in weight_files.read_tensors(file).items() if k not in texts}
    save_file(rest, folder / file.name, metadata=_network_metadata(file))
    LOG.warning(
        "%s: leaves out %d tensors of text encoders, such as %r", file, len(texts), texts[0]
    )
    return folder / file.name


def _network_metadata(file: Path) -> dict[str, str]:
    metadata = weight_files.metadata(file)
    config = json.loads(metadata.get(METADATA, "{}"))
    network_config = {k: v for k, v in config.items() if not k.startswith(OF_TEXT_ENCODERS)}
    return metadata | ({METADATA: json.dumps(network_config)} if METADATA in metadata else {})


@contextmanager
def overheard() -> Iterator[list[str]]:
    """Keep what diffusers and peft warn of from the terminal, and list it."""
    remarks: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = " ".join(record.getMessage().split())
            if not any(word in text for word in HARMLESS):
                remarks.append(text[:600])

    loggers = [logging.getLogger(name) for name in ("diffusers", "peft")]
    before = [(each.handlers, each.propagate, each.level) for each in loggers]
    for each in loggers:
        each.handlers, each.propagate = [Listener(logging.WARNING)], False
        each.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield remarks
        messages = {str(each.message) for each in caught}
        remarks += sorted(text for text in messages if "key" in text and "LoRA" in text)
    finally:
        for each, (handlers, propagate, level) in zip(loggers, before, strict=True):
            each.handlers, each.propagate = handlers, propagate
            each.setLevel(level)


def _further(net: nn.Module) -> str:
    """Name the changes of a loaded adapter besides pairs of matrices; empty where there are
    none."""
    names = []
    for name, module in net.named_modules():
        if any(getattr(module, "use_dora", {}).values()):
            names.append(f"DoRA's magnitude of {name}")
        if any(getattr(module, "lora_bias", {}).values()):
            names.append(f"the bias of {name}")
    return "; ".join([*names[:2], *([f"{len(names) - 2} more"] if len(names) > 2 else [])])


def _keys(file: Path) -> list[str]:
    """Return the names of the tensors in a file. UserError where it is no safetensors file."""
    if not file.is_file() or file.suffix != ".safetensors":
        raise UserError(f"{file}: give a .safetensors file; other forms of weights are not read")
    names = weight_files.names(file)
    if not names:
        raise UserError(f"{file}: holds no tensors")
    return names


def _pairs(net: nn.Module) -> Iterable[tuple[str, Pair]]:
    for name, module in net.named_modules():
        for adapter, down in getattr(module, "lora_A", {}).items():
            up: Any = module.lora_B[adapter]
            scale = float(module.scaling[adapter])
            yield name, Pair(down.weight.detach(), up.weight.detach(), scale)


def write(base: Base, adapter: Adapter, form: Format, file: Path) -> None:
    """Write an adapter in a form and read it back. UserError, and no file, where diffusers would
    not read the same: what cannot be checked is not written."""
    from safetensors.torch import save_file

    if form == "diffusers":
        layers = {}
        for name, pair in adapter.items():
            layers[f"{name}.lora_A.weight"] = pair.down.contiguous()
            layers[f"{name}.lora_B.weight"] = (pair.scale * pair.up).contiguous()
        layers = {f"{base.part}.{key}": value for key, value in layers.items()}
    else:
        layers = tensors(base, adapter, form)
    save_file(layers, file, metadata={"format": "pt"})
    try:
        _compare(base, adapter, form, file)
    except UserError:
        file.unlink()
        raise


def _compare(base: Base, adapter: Adapter, form: Format, file: Path) -> None:
    """Raise UserError unless diffusers reads from the file what was meant."""
    returned = read(base, file)
    wrong = []
    for name in {**adapter, **returned}:
        meant, got = (a[name].on_probes() if name in a else None for a in (adapter, returned))
        known = [d for d in (meant, got) if d is not None]
        largest = max(float(d.abs().max()) for d in known)
        if meant is None or got is None or meant.shape != got.shape:
            apart = largest
        else:
            apart = float((meant - got).abs().max())
        if apart > TOLERANCE * largest:
            wrong.append(name)
    if wrong:
        raise UserError(
            f"--format {form}: diffusers does not read {len(wrong)} of {len(adapter)} modules back "
            f"as they are, such as {wrong[0]}, so this is not written; use --format diffusers"
        )


def tensors(base: Base, adapter: Adapter, form: Format) -> dict[str, Tensor]:
    """Name and join an adapter's tensors as ComfyUI or sd-scripts expect them. UserError where
    diffusers has no reader to check that form against."""
    names, written = _names(base, form)
    config = diffusers_folder.load_config(base.networks[base.part], base.place, base.part)
    linears = {
        name: tuple(module.weight.shape)
        for name, module in base.architecture().named_modules()
        if isinstance(module, nn.Linear)
    }
    family = FAMILIES[base.pipeline.__name__]
    if written == "kohya" and family.whole:
        adapter = _completed(adapter, family.whole, linears)
    groups: dict[str, tuple[Place, dict[int, Pair]]] = {}
    for module, pair in adapter.items():
        place = names.place(module, config)
        if place is None:
            raise UserError(
                f"--format {form}: the name of {module} in that form is not known to diffusers; "
                f"use --format diffusers"
            )
        groups.setdefault(place.name, (place, {}))[1][place.index] = pair
    joined = {
        name: _joined([linears.get(part, (0,))[0] for part in place.parts], pairs)
        for name, (place, pairs) in groups.items()
    }
    if written == "comfyui":  # without alpha, which not all readers know
        return _layers(joined, "diffusion_model.{}", ("lora_A", "lora_B"), alphas=False)
    joined = {name.replace(".", "_"): pair for name, pair in joined.items()}
    alphas = not family.one_alpha or len({(p.scale, p.rank) for p in joined.values()}) == 1
    return _layers(joined, "lora_unet_{}", ("lora_down", "lora_up"), alphas)


def _layers(
    joined: Mapping[str, Pair], key: str, suffixes: tuple[str, str], alphas: bool
) -> dict[str, Tensor]:
    """Name the tensors of a file. Without ``alphas``, which then count as the rank, the scale is in
    the weights."""
    layers: dict[str, Tensor] = {}
    for name, pair in joined.items():
        place = key.format(name)
        if alphas:
            layers[f"{place}.alpha"] = torch.tensor(pair.scale * pair.rank)
        up = pair.up if alphas else pair.scale * pair.up
        layers[f"{place}.{suffixes[0]}.weight"] = pair.down.contiguous()
        layers[f"{place}.{suffixes[1]}.weight"] = up.contiguous()
    return layers


def _names(base: Base, form: Format) -> tuple[Names, Format]:
    """Return the names, and the form they are written in: ComfyUI also reads kohya's, which serves
    where diffusers has no reader of its own form."""
    pipeline = base.pipeline.__name__
    family = FAMILIES.get(pipeline)
    if family and form == "comfyui" and family.comfyui:
        return family.comfyui, "comfyui"
    if family and family.kohya:
        return family.kohya, "kohya"
    raise UserError(
        f"--format {form}: diffusers has no reader of that form for {pipeline} to check against, "
        f"so it is not written; use --format diffusers"
    )


def _joined(sizes: Sequence[int], pairs: Mapping[int, Pair]) -> Pair:
    """Join the adapters of parts of a module along its outputs, of ``sizes``: their ranks stand
    beside each other, and ``up`` is zero where one part knows nothing of the other."""
    if len(sizes) == 1:
        return pairs[0]
    rank = sum(pair.rank for pair in pairs.values())
    first = next(iter(pairs.values()))
    up = torch.zeros(sum(sizes), rank, dtype=first.up.dtype)
    column = 0
    for index, pair in sorted(pairs.items()):
        row = sum(sizes[:index])
        up[row : row + sizes[index], column : column + pair.rank] = pair.scale * pair.up
        column += pair.rank
    return Pair(torch.cat([pair.down for _, pair in sorted(pairs.items())]), up, 1.0)


def _completed(
    adapter: Adapter, whole: Sequence[str], linears: Mapping[str, tuple[int, ...]]
) -> Adapter:
    """Add adapters of zeros where diffusers' reader expects one in every block."""
    missing_modules = [
        name
        for name in linears
        if name.startswith("blocks.") and name.split(".", 2)[2] in whole and name not in adapter
    ]
    zeros = {
        name: Pair(torch.zeros(1, linears[name][1]), torch.zeros(linears[name][0], 1), 1.0)
        for name in missing_modules
    }
    return {**adapter, **zeros}


def stored_dtype(place: str, part: str) -> torch.dtype:
    """Return the type that most weights of a local folder's part are stored in."""
    types = weight_files.types_in(Path(place) / part)
    if not types:
        raise UserError(f"{place}: no safetensors files in {part}; other forms are not read")
    return weight_files.commonest(types)


@torch.no_grad()
def merge(base: Base, net: Any, file: Path, weight: float) -> None:
    """Add the whole change of a LoRA file, times ``weight``, to a network: matrices, biases, DoRA's
    magnitudes and norms, as diffusers loads them and peft merges them, in float32."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    known = net.state_dict(keep_vars=True)
    types = {name: (tensor.dtype, tensor.requires_grad) for name, tensor in known.items()}
    net.float()
    load(base, net, file)
    merged_any = False
    for module in net.modules():
        if isinstance(module, BaseTunerLayer):
            module.scale_layer(weight)
            module.merge()
            merged_any = True
    if not merged_any:
        raise UserError(
            f"{file}: diffusers' {base.pipeline.__name__} finds no LoRA weights for its "
            f"{base.part} in it, whose first name is {_keys(file)[0]!r}"
        )
    net.unload_lora()
    for name, tensor in net.state_dict(keep_vars=True).items():
        dtype, trained = types[name]
        tensor.data = tensor.data.to(dtype)
        tensor.requires_grad_(trained)


@torch.no_grad()
def begin(base: Base, net: Any, file: Path) -> None:
    """Begin with a LoRA file: as the adapter of a network that has one, whose ranks it fits, else
    merged into its weights. UserError where it does not fit."""
    if not getattr(net, "peft_config", None):
        return merge(base, net, file, 1.0)
    layers = {name: module for name, module in net.named_modules() if hasattr(module, "lora_A")}
    adapter = read(base, file)
    for name, pair in adapter.items():
        layer = layers.get(name)
        rank = 0 if layer is None else layer.r[ADAPTER]
        if layer is None or rank < pair.rank:
            have = f"of rank {rank}" if layer is not None else "not there"
            raise UserError(
                f"{file}: its adapter of {name} has rank {pair.rank}, and the policy's is {have}; "
                f"set lora: {{rank: {max(p.rank for p in adapter.values())}, targets: [...]}} to "
                f"its modules, or merge it first: mmrl convert {file} --base MODEL --into FOLDER"
            )
    for name, layer in layers.items():
        down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        up.zero_()
        if name in adapter:
            pair = adapter[name]
            down[: pair.rank] = pair.down.to(down)
            up[:, : pair.rank] = pair.scale / layer.scaling[ADAPTER] * pair.up.to(up)
    return None


def file_at(path: Path) -> Path | None:
    """Return the LoRA file that a path is, or that diffusers wrote into it; None: there is none."""
    inner = path / "pytorch_lora_weights.safetensors"
    if path.suffix == ".safetensors" and path.is_file():
        return path
    return inner if inner.is_file() else None

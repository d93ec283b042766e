"""Reads LoRA files of any form by diffusers' own readers, writes those of ComfyUI and kohya's
sd-scripts, and merges adapters into a model.

An adapter's change of a weight is ``scale * up @ down``. Every written file is read back by
diffusers, and must give the same change of the same weights.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core import weight_files
from mmrl.core.errors import UserError
from mmrl.core.libraries import find_class
from mmrl.core.registry import locate
from mmrl.policies.diffusion import diffusers_folder
from mmrl.policies.diffusion.lora_names import FAMILIES, Family, Format, Names, Place

PROBES = 4
TOLERANCE = 1e-4  # of what diffusers reads back, relative to the largest output of a module
LOG = logging.getLogger(__name__)
METADATA = "lora_adapter_metadata"  # where diffusers keeps an adapter's configuration in a file
HARMLESS = ("experimental", "safety checker", "No LoRA keys associated to", "Already found")
PEFT_PREFIX = "base_model.model."  # of the names of an adapter as peft saves it
LISTED = 8  # tensors in a message
OF_TEXT_ENCODERS = ("lora_te", "text_encoder", "te1.", "te2.")
# suffixes of full differences of a weight or bias: ComfyUI's, LyCORIS'
DIFFERENCES = {".diff": "weight", ".w_norm": "weight", ".diff_b": "bias", ".b_norm": "bias"}


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


# by the name of the module in diffusers' network; of a text encoder as diffusers' files name it,
# text_encoder.text_model.encoder.layers.0.self_attn.q_proj
Adapter = dict[str, Pair]


@dataclass(frozen=True)
class Base:
    """The architecture of a model in diffusers' folder format; no weights are read."""

    place: str
    pipeline: Any  # class of diffusers
    networks: Mapping[str, Any]  # part -> class of diffusers
    # part -> transformers class, for those that the pipeline loads adapters into
    text_encoders: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: str) -> Base:
        """Read a folder or hub id. UserError where it is no diffusers pipeline."""
        import diffusers
        import transformers

        place = locate(path)
        index = diffusers_folder.index(place)
        name = str(index.get("_class_name", ""))
        pipeline = find_class("diffusers", name)
        if not (inspect.isclass(pipeline) and issubclass(pipeline, diffusers.DiffusionPipeline)):
            raise UserError(f"{path}: diffusers has no pipeline {name or 'without a name'!r}")
        networks = {
            part: network
            for part in ("transformer", "transformer_2", "unet")
            if (network := _class_of(index, part, diffusers, diffusers.ModelMixin))
        }
        if not networks or not hasattr(pipeline, "load_lora_weights"):
            raise UserError(f"{path}: diffusers' {name} loads no LoRA weights")
        text_encoders = {
            part: encoder
            for part in getattr(pipeline, "_lora_loadable_modules", ())
            if part.startswith("text_encoder")
            and (encoder := _class_of(index, part, transformers, transformers.PreTrainedModel))
        }
        return cls(place, pipeline, networks, text_encoders)

    @property
    def part(self) -> str:
        """Name the folder of the network that adapters are for."""
        return next(iter(self.networks))

    def architecture(self) -> Any:
        """Build the network with zero weights that take no memory."""
        network = self.networks[self.part]
        config = diffusers_folder.load_config(network, self.place, self.part)
        with torch.device("meta"):
            net = network.from_config(config)
        return _with_zeros(net)

    def text_encoder_architectures(self) -> dict[str, Any]:
        """Build the text encoders that the pipeline loads adapters into, in the same way."""
        encoders = {}
        for part, encoder in self.text_encoders.items():
            config = diffusers_folder.load_part(encoder.config_class, self.place, part)
            with torch.device("meta"):
                net = encoder(config)
            encoders[part] = _with_zeros(net)
        return encoders


def _with_zeros(net: Any) -> Any:
    """Replace meta tensors, to which peft and transformers cannot move adapters, by zeros."""
    for module in net.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros(()).expand(weight.shape)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    return net


def _class_of(index: Mapping[str, Any], part: str, library: Any, kind: type) -> Any:
    """Return the class of a part that model_index.json names; None where it is not of ``kind``."""
    entry = index.get(part)
    if not isinstance(entry, (list, tuple)) or len(entry) != 2 or entry[0] != library.__name__:
        return None
    cls = getattr(library, str(entry[1]), None)
    return cls if inspect.isclass(cls) and issubclass(cls, kind) else None


def read(base: Base, file: Path, *, with_texts: bool = False) -> Adapter:
    """Read a LoRA file of any form that the pipeline itself loads, as pairs of matrices of the
    network and, ``with_texts``, of text encoders. UserError for other files, and for changes beyond
    such pairs."""
    with_texts = with_texts and bool(base.text_encoders)
    texts = [key for key in keys(file) if key.startswith(OF_TEXT_ENCODERS)]
    names = [key for key in keys(file) if with_texts or key not in texts]
    norms = [key for key in names if "norm" in key and "lora" not in key]
    if whole := [*differences(names), *norms]:
        raise UserError(
            f"{file}: changes whole weights, mostly of norms, such as {whole[0]!r}, which only a "
            f"merged model has; use mmrl convert {file.name} --base MODEL --into FOLDER"
        )
    net = base.architecture()
    encoders = base.text_encoder_architectures() if with_texts and texts else {}
    load(base, net, file, encoders)
    if further := _further([net, *encoders.values()]):
        raise UserError(
            f"{file}: changes more than pairs of matrices ({further}), which only a merged model "
            f"has; use mmrl convert {file.name} --base MODEL --into FOLDER"
        )
    adapter = dict(_pairs(net))
    for part, encoder in encoders.items():
        adapter |= {f"{part}.{_text_name(name)}": pair for name, pair in _pairs(encoder)}
    if not adapter:
        raise UserError(
            f"{file}: diffusers' {base.pipeline.__name__} finds no LoRA weights for its "
            f"{base.part} in it, whose first name is {keys(file)[0]!r}"
        )
    return adapter


def load(base: Base, net: Any, file: Path, text_encoders: Mapping[str, Any] | None = None) -> None:
    """Let diffusers' pipeline load a LoRA file into a network of its kind, and into text encoders
    where there are any. All skipped tensors are named in a warning; full weight differences
    (``differences``) are not read. UserError where it cannot."""
    encoders = dict(text_encoders or {})
    required = [
        name
        for name, parameter in inspect.signature(base.pipeline.__init__).parameters.items()
        if name != "self" and parameter.default is parameter.empty
    ]
    pipe = base.pipeline(**(dict.fromkeys(required) | {base.part: net} | encoders))
    with TemporaryDirectory(prefix="mmrl-lora-") as folder, overheard() as remarks:
        source = _as_diffusers_reads(base, net, file, Path(folder), bool(encoders))
        if source is None:  # differences alone
            return
        try:
            pipe.load_lora_weights(
                str(source.parent),
                weight_name=source.name,
                use_safetensors=True,
                local_files_only=True,
            )
        except Exception as error:  # its readers raise various errors on a file of another model
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"{file}: diffusers' {base.pipeline.__name__} cannot read this LoRA: {reason[:200]}"
            ) from error
    for remark in remarks:
        LOG.warning("%s: diffusers says of this LoRA: %s", file, remark)
    if encoders:  # else ``_as_diffusers_reads`` has reported that they are skipped
        _name_left_out(file, encoders)


def _name_left_out(file: Path, encoders: Mapping[str, Any]) -> None:
    """Warn of layers of text encoders in a file that were not loaded into ``encoders``."""
    layers = {
        key.split(".lora_")[0]
        for key in keys(file)
        if key.startswith(OF_TEXT_ENCODERS) and ".lora_" in key
    }
    loaded = {
        _flat(f"{part}.{name}") for part, encoder in encoders.items() for name, _ in _pairs(encoder)
    }
    if left := sorted(layer for layer in layers if _flat(layer) not in loaded):
        LOG.warning(
            "%s: leaves out %d of %d layers of text encoders, which diffusers' pipeline does not "
            "read: %s",
            file,
            len(left),
            len(layers),
            ", ".join(left[:LISTED]),
        )


def _flat(layer: str) -> str:
    """Normalise a text-encoder layer's name from those of diffusers, kohya (lora_te2_* is
    text_encoder_2), and ComfyUI's FLUX."""
    layer = layer.replace("text_encoders.clip_l.transformer.", "text_encoder.")
    layer = re.sub(r"^lora_te([2-9])", r"text_encoder_\1", layer)
    layer = re.sub(r"^lora_te1?_", "text_encoder_", layer)
    return layer.replace(".", "_").replace("text_model_", "")


def differences(names: Sequence[str]) -> list[str]:
    """Name the tensors of a file that are full differences of weights and biases. A ``.diff_b``
    along with its module's pair is read by diffusers, as the pair's bias."""
    modules = {name.split(".lora_")[0] for name in names if ".lora_" in name}
    return [
        name
        for name in names
        if name.endswith(tuple(DIFFERENCES))
        and not (name.endswith(".diff_b") and name.removesuffix(".diff_b") in modules)
    ]


def _as_diffusers_reads(
    base: Base, net: nn.Module, file: Path, folder: Path, with_texts: bool
) -> Path | None:
    """Return the file, or a copy as diffusers reads it: without differences of whole weights,
    without adapters of text encoders unless these are wanted, and in names that it knows; None
    where nothing is left."""
    from safetensors.torch import save_file

    listed = keys(file)
    if renamed := _in_known_names(base, net, listed):
        tensors = weight_files.read_tensors(file)
        layers = {renamed[key]: value for key, value in tensors.items()}
        save_file(layers, folder / file.name, metadata={"format": "pt"})
        return folder / file.name
    placed = len(base.text_encoders)
    unplaced = [key for key in listed if with_texts and _number_of_text_encoder(key) > placed]
    texts = [] if with_texts else [key for key in listed if key.startswith(OF_TEXT_ENCODERS)]
    if len(texts) == len(listed):
        raise UserError(
            f"{file}: holds adapters of a text encoder alone, such as {texts[0]!r}, and only those "
            f"of a network are read here; mmrl convert {file.name} --base MODEL --into FOLDER "
            f"merges them where the pipeline has such text encoders"
        )
    if texts:
        LOG.warning(
            "%s: leaves out %d tensors of text encoders, such as %r, which mmrl convert FILE "
            "--base MODEL --into FOLDER merges where the pipeline has such text encoders",
            file,
            len(texts),
            texts[0],
        )
    dropped = {*texts, *unplaced, *differences(listed)}
    if not dropped:
        return file
    rest = {k: v for k, v in weight_files.read_tensors(file).items() if k not in dropped}
    save_file(rest, folder / file.name, metadata=_metadata(file, with_texts))
    return folder / file.name if rest else None


def _in_known_names(base: Base, net: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Map names of peft, DiffSynth (with adapter name default) or the bare network to those that
    diffusers expects; {} for other files."""
    modules = dict(net.named_modules())
    bare = {
        name: name.removeprefix(PEFT_PREFIX).replace(".default.weight", ".weight") for name in names
    }
    pairs = all(".lora_A." in name or ".lora_B." in name for name in names)
    if pairs and all(name.split(".lora_")[0] in modules for name in bare.values()):
        return {name: f"{base.part}.{short}" for name, short in bare.items()}
    if pairs and all(name.endswith(".default.weight") for name in names):  # original names
        return {name: f"diffusion_model.{short}" for name, short in bare.items()}
    return {}


def _number_of_text_encoder(key: str) -> int:
    """Return the text encoder's number in kohya's name of a layer, 2 for lora_te2_*, which
    OneTrainer uses for FLUX's T5 and diffusers' reader fails on; 0 for other names."""
    match = re.match(r"lora_te(\d)_", key)
    return int(match.group(1)) if match else 0


def _metadata(file: Path, with_texts: bool) -> dict[str, str]:
    metadata = weight_files.metadata(file)
    if with_texts or METADATA not in metadata:
        return metadata
    config = json.loads(metadata[METADATA])
    network_config = {k: v for k, v in config.items() if not k.startswith(OF_TEXT_ENCODERS)}
    return metadata | {METADATA: json.dumps(network_config)}


@contextmanager
def overheard() -> Iterator[list[str]]:
    """Capture warnings of diffusers and peft in a list instead of the terminal."""
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


def _further(networks: Sequence[nn.Module]) -> str:
    """Name the changes of loaded adapters other than pairs of matrices; empty where there are
    none."""
    names = []
    for name, module in (each for net in networks for each in net.named_modules()):
        if any(getattr(module, "use_dora", {}).values()):
            names.append(f"DoRA's magnitude of {name}")
        if any(getattr(module, "lora_bias", {}).values()):
            names.append(f"the bias of {name}")
    return "; ".join([*names[:2], *([f"{len(names) - 2} more"] if len(names) > 2 else [])])


def keys(file: Path) -> list[str]:
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


def _text_name(module: str) -> str:
    """Name a text encoder's module as files do, with or without the text_model that its class had
    before transformers 5."""
    return module if module.startswith(("text_model.", "text_proj")) else f"text_model.{module}"


def write(base: Base, adapter: Adapter, form: Format, file: Path) -> None:
    """Write an adapter in a format and read it back. UserError, and no file, where diffusers would
    not read the same."""
    from safetensors.torch import save_file

    if form == "diffusers":
        named = {
            name if _of_text_encoder(base, name) else f"{base.part}.{name}": pair
            for name, pair in adapter.items()
        }
        layers = _layers(named, "{}", ("lora_A", "lora_B"), alphas=False)
    else:
        layers = tensors(base, adapter, form)
    save_file(layers, file, metadata={"format": "pt"})
    try:
        _compare(base, adapter, form, file)
    except UserError:
        file.unlink()
        raise


def _compare(base: Base, adapter: Adapter, form: Format, file: Path) -> None:
    """Raise UserError unless diffusers reads the intended change from the file."""
    returned = read(base, file, with_texts=True)
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
    diffusers has no reader to verify that format."""
    names, written = _names(base, form)
    layers = _of_text_encoders(base, adapter)
    adapter = {n: pair for n, pair in adapter.items() if not _of_text_encoder(base, n)}
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
    if written == "comfyui":  # without alpha, which not all readers support
        return _layers(joined, "diffusion_model.{}", ("lora_A", "lora_B"), alphas=False)
    return _kohyas_layers(joined, "lora_unet", family) | layers


def _of_text_encoder(base: Base, name: str) -> bool:
    return name.partition(".")[0] in base.text_encoders


def _of_text_encoders(base: Base, adapter: Adapter) -> dict[str, Tensor]:
    """Name the layers of text encoders as sd-scripts does. Each attention gets an output
    projection, zero where it has no adapter: diffusers recognises the format by it."""
    family = FAMILIES[base.pipeline.__name__]
    layers: dict[str, Tensor] = {}
    for part, prefix in zip(base.text_encoders, family.texts, strict=False):
        pairs = {
            name.removeprefix(f"{part}."): pair
            for name, pair in adapter.items()
            if name.startswith(f"{part}.")
        }
        for name, pair in list(pairs.items()):
            attention, _, projection = name.rpartition(".")
            if projection in ("q_proj", "k_proj", "v_proj"):
                zeros = Pair(torch.zeros_like(pair.down), torch.zeros_like(pair.up), pair.scale)
                pairs.setdefault(f"{attention}.out_proj", zeros)
        layers |= _kohyas_layers(pairs, prefix, family)
    return layers


def _kohyas_layers(pairs: Mapping[str, Pair], prefix: str, family: Family) -> dict[str, Tensor]:
    flat = {name.replace(".", "_"): pair for name, pair in pairs.items()}
    alphas = not family.one_alpha or len({(p.scale, p.rank) for p in flat.values()}) == 1
    return _layers(flat, f"{prefix}_{{}}", ("lora_down", "lora_up"), alphas)


def _layers(
    joined: Mapping[str, Pair], key: str, suffixes: tuple[str, str], alphas: bool
) -> dict[str, Tensor]:
    """Name the tensors of a file. Without ``alphas``, which default to the rank, the scale is
    folded into the weights."""
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
    """Return the names and their format: ComfyUI also reads kohya's, used where diffusers has no
    reader of ComfyUI's own."""
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
    """Join the adapters of a module's parts along its outputs, of ``sizes``: ranks are
    concatenated, and ``up`` is block-diagonal."""
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
    """Add zero adapters where diffusers' reader expects one in every block."""
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
    """Return the most common dtype of the weights of a local folder's part."""
    types = weight_files.types_in(Path(place) / part)
    if not types:
        raise UserError(f"{place}: no safetensors files in {part}; other forms are not read")
    return weight_files.commonest(types)

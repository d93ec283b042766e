"""Describes models that write tokens without their weights: their networks on the meta device, or
the sizes that the headers of their files say."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import isdir
from pathlib import Path
from typing import Any

import torch

from mmrl.apps.dry_run import architectures, published, rehearsal, untrained
from mmrl.apps.dry_run.costs import Layers
from mmrl.core.errors import UserError
from mmrl.core.registry import ARTIFACTS
from mmrl.policies.lora import add_lora
from mmrl.policies.quantization import Blocks, blocks_of, check_frozen, parameters
from mmrl.policies.vlm.loading import text_adapters
from mmrl.policies.vlm.parts import adapters_only, everything, set_trainable
from mmrl.policies.vlm.policy import VLM
from mmrl.worlds.cache import built

LONGEST = 100 * 2**20  # bytes of the header of a file
DECODERS = ("vae", "vqvae", "vq", "vqmodel")  # files and folders that hold no part of the network
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder")


@dataclass(frozen=True)
class Sizes:
    """Holds parameters by what they are for; ``trained`` None: unknown."""

    network: int
    trained: int | None
    decoder: int = 0
    encoders: int = 0
    layers: tuple[Layers, ...] = ()
    adapters: bool = False
    blocks: Blocks = Blocks()


def folder_of(path: str) -> Path | None:
    """Return the local folder of a model: given as such, or of the embedded world, if it is built
    or came with the package."""
    if path.startswith("world:"):
        entry = ARTIFACTS.get(path.removeprefix("world:"))
        return built(entry) if entry is not None else None
    folder = Path(path).expanduser()
    return folder if isdir(folder) else None  # also of a name too long for the system


def sizes_of(path: str, entry: Any, options: Mapping[str, Any], tokens: int) -> Sizes | None:
    """Describe a model by its path, its policy's class and converted options; ``tokens``: of a row.
    None if nothing is known of it. Raises UserError for adapters that fit no layer."""
    only_adapters = adapters_only(options.get("lora"), options.get("train"))
    check_frozen(options.get("quantization"), only_adapters)
    known = published.table()["encoders"].get(published.table()["texts"].get(path))
    folder = folder_of(path)
    if path in architectures.MODELS or path in untrained.NETWORKS:
        return _of_architecture(path, entry, options, tokens)
    if known is not None:
        return _of_network(published.encoder_on_meta(known), entry, options, tokens)
    if folder is None:
        return None
    net = architectures.of_folder(str(folder), entry) if issubclass(entry, VLM) else None
    return _of_files(folder, options) if net is None else _of_network(net, entry, options, tokens)


def _of_architecture(path: str, entry: Any, options: Mapping[str, Any], tokens: int) -> Sizes:
    """Count a network whose architecture is published, and what is trained of it."""
    net: Any = rehearsal.token_network(path, entry, options)
    named = [(name, p.numel(), p.requires_grad) for name, p in net.named_parameters()]
    trained = sum(size for _, size, is_trained in named if is_trained)
    length = rehearsal.answer_tokens(net, options)
    count, width = _extent(net)
    return Sizes(
        parameters(net),
        trained,
        layers=(Layers(count, max(tokens, length), width),),
        adapters=options.get("lora") is not None,
        blocks=blocks_of(net),
    )


def _extent(net: Any) -> tuple[int, int]:
    """Return (layers, width) of a transformer."""
    shape = getattr(net, "shape", None)
    if shape is not None:
        sizes = vars(shape)
        return sizes.get("layers") or sizes["depth"], sizes.get("dim") or sizes["width"]
    config = net.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return text.num_hidden_layers, text.hidden_size


def _of_network(net: Any, entry: Any, options: Mapping[str, Any], tokens: int) -> Sizes:
    """Count a network and what its policy would train of it, as the policy itself chooses it."""
    text = net.config.get_text_config()
    layers = (Layers(text.num_hidden_layers, tokens, text.hidden_size),)
    whole = published.parameters(net)
    blocks = blocks_of(net)
    lora = text_adapters(net, options.get("lora"))
    if not issubclass(entry, VLM):
        return Sizes(whole, whole if options.get("lora") is None else None, layers=layers)
    if lora is not None:
        with torch.device("meta"):  # adapters are counted, not filled
            add_lora(net, lora)
    else:
        set_trainable(net, options.get("train") or everything(net))
    trained = [(n, p.numel()) for n, p in net.named_parameters() if p.requires_grad]
    adapters = bool(trained) and all("lora_" in name for name, _ in trained)
    count = sum(size for _, size in trained)
    return Sizes(whole, count, layers=layers, adapters=adapters, blocks=blocks)


def _of_files(folder: Path, options: Mapping[str, Any]) -> Sizes | None:
    """Add up what the headers of a folder's weights say; adapters are unknown then."""
    sums = {"network": 0, "decoder": 0, "encoders": 0}
    # models keep them beside their config.json, pipelines in a folder for each part
    files = {*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")}
    for file in sorted(files):
        names = {file.stem, *file.relative_to(folder).parts}
        part = "decoder" if names & set(DECODERS) else "network"
        sums["encoders" if names & set(ENCODERS) else part] += parameters_in(file)
    if not sums["network"]:
        return None
    plain = options.get("lora") is None and options.get("train") is None
    return Sizes(
        sums["network"],
        sums["network"] if plain else None,
        sums["decoder"],
        sums["encoders"],
        adapters=options.get("lora") is not None,
    )


def parameters_in(file: Path) -> int:
    """Count the numbers in a file of safetensors by its header, without reading them."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\0"))
        header = stream.read(length) if length <= LONGEST else b""
    try:
        tensors = json.loads(header)
        shapes = [tensor["shape"] for name, tensor in tensors.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a file of safetensors, or torn: {error}") from error
    return sum(int(torch.Size(shape).numel()) for shape in shapes)

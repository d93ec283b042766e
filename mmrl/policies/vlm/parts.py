"""Chooses what is trained of a vision-language model: language model, projector and vision tower
each fully, by an adapter, or frozen, with separate learning rates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt
from torch import nn

from mmrl.core.errors import UserError
from mmrl.policies.contracts import ParameterGroup
from mmrl.policies.lora import ending_like, inject
from mmrl.policies.vlm.families import PARTS, modules_of, part_of

How = Literal["full", "lora", "frozen"]
Positive = Annotated[float, Gt(0)]
# no adapters in these: the head is tied, or not used for answers
HEADS = ("lm_head", "embed_tokens", "generation_head")
LAYER = re.compile(r"\.layers\.(\d+)\.")
# Janus and Chameleon generate images with the first of these; prompts hold no sound
NEVER_USED = (
    "vqmodel",
    "generation_embeddings",
    "generation_aligner",
    "generation_head",
    "audio_tower",
    "embed_audio",
    "audio_embed",
)
# families that build their tower's pooling head but read its input
HEADLESS = ("lfm2_vl", "cohere2_vision", "phi4_multimodal")


@dataclass(frozen=True)
class Part:
    """Options of one part.

    ``how``: it is trained full, by lora, or frozen. ``lr``: its own learning rate; null: the
    optimizer's times ``factor``. ``factor``: of the optimizer's learning rate. ``rank``: of its
    adapters. ``alpha``: its adapters count alpha / rank times; null: twice the rank. ``targets``:
    module-name suffixes for adapters; null: every linear layer of the part."""

    how: How = "full"
    lr: Positive | None = None
    factor: Positive = 1.0
    rank: Annotated[int, Ge(1)] = 16
    alpha: Positive | None = None
    targets: Sequence[str] | str | None = None

    def __post_init__(self) -> None:
        if self.lr is not None and self.factor != 1.0:
            raise ValueError("give lr or factor, not both")
        if self.how != "lora" and self.targets is not None:
            raise ValueError(f"targets are those of an adapter; this part is {self.how}")


@dataclass(frozen=True)
class Parts:
    """How each part is trained: full, lora, frozen, or a mapping with options.

    language: the language model. projector: what maps image features into it. vision: the vision
    tower."""

    language: How | Part
    projector: How | Part
    vision: How | Part

    def __post_init__(self) -> None:
        if all(part.how == "frozen" for part in self.named().values()):
            raise ValueError(
                "every part is frozen; train at least one of language, projector, vision"
            )

    def named(self) -> dict[str, Part]:
        chosen = {name: getattr(self, name) for name in PARTS}
        return {
            name: part if isinstance(part, Part) else Part(part) for name, part in chosen.items()
        }


def adapters_only(lora: object, parts: Parts | None) -> bool:
    """Tell from the options ``lora`` and ``train`` whether only adapters are trained."""
    if parts is None:
        return lora is not None
    return all(part.how != "full" for part in parts.named().values())


def everything(net: nn.Module) -> Parts:
    """Return the options that train all parts of the network fully."""
    present = {part_of(name) for name, _ in net.named_parameters()}
    return Parts(*("full" if name in present else "frozen" for name in PARTS))


def set_trainable(net: nn.Module, parts: Parts) -> None:
    """Freeze ``net`` except what ``parts`` train, and add their adapters, in float32 and initially
    zero.

    Raises UserError for a part the network does not have, and for targets that match nothing.
    """
    chosen = parts.named()
    present = {part_of(name) for name, _ in net.named_parameters()}
    for name, part in chosen.items():
        if name not in present and part.how != "frozen":
            raise UserError(
                f"policy option train.{name}: {type(net).__name__} has no such part; "
                f"write {name}: frozen"
            )
    unused = idle(net)
    full = [
        p
        for name, p in net.named_parameters()
        if chosen[part_of(name)].how == "full" and name not in unused
    ]
    net.requires_grad_(False)
    _add_adapters(net, chosen)
    for p in full:
        p.requires_grad_(True)
    for name, p in net.named_parameters():
        if "lora_" in name:
            p.requires_grad_(True)
            p.data = p.data.float()


def idle(net: nn.Module) -> set[str]:
    """Name the parameters that answers never use, so that they have no gradient: image generation,
    audio, and vision layers after the one that the language model reads."""
    names = [name for name, _ in net.named_parameters()]
    unused = {name for name in names if any(f".{part}." in f".{name}" for part in NEVER_USED)}
    config = getattr(net, "config", None)
    if getattr(config, "model_type", None) in HEADLESS:
        unused |= {name for name in names if part_of(name) == "vision" and ".head." in name}
    tower = getattr(config, "vision_config", None)
    layer = getattr(tower, "feature_layer", None)
    shown = getattr(config, "vision_feature_layer", layer)
    if shown is None:
        return unused
    layers = [
        (name, int(m[1]))
        for name in names
        if part_of(name) == "vision" and (m := LAYER.search(name))
    ]
    count = 1 + max((number for _, number in layers), default=0)
    used = max(
        index if index >= 0 else count + 1 + index
        for index in ([shown] if isinstance(shown, int) else shown)
    )
    unused |= {name for name, number in layers if number >= used}
    return unused | {
        name for name in names if part_of(name) == "vision" and ".post_layernorm." in name
    }


def groups_of(net: nn.Module, parts: Parts | None) -> list[ParameterGroup]:
    """Group the trainable parameters by part, each with its learning rate; one group if all are
    equal."""
    trainable = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    if parts is None:
        return [ParameterGroup([p for _, p in trainable])]
    groups = []
    for name, part in parts.named().items():
        parameters = [p for key, p in trainable if part_of(key) == name]
        if parameters:
            groups.append(ParameterGroup(parameters, part.factor, part.lr, name))
    return groups


def beside_adapters(net: nn.Module) -> bool:
    """Tell whether adapters are trained along with other parameters."""
    kinds = {"lora_" in name for name, p in net.named_parameters() if p.requires_grad}
    return kinds == {True, False}


def summary(net: nn.Module) -> str:
    """State the trainable and all parameters of every part, in one sentence for the log."""
    counts = {name: [0, 0] for name in PARTS}
    for name, p in net.named_parameters():
        counts[part_of(name)][0] += p.numel() * p.requires_grad
        counts[part_of(name)][1] += p.numel()
    shares = [
        f"{name} {_short(some)} of {_short(every)}"
        for name, (some, every) in counts.items()
        if every
    ]
    some, every = (sum(column) for column in zip(*counts.values()))
    return (
        f"trainable parameters: {', '.join(shares)}; together {_short(some)} of {_short(every)} "
        f"({some / every:.2%})"
    )


def _short(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _add_adapters(net: nn.Module, chosen: dict[str, Part]) -> None:
    """Add one peft adapter over all parts, saved and exported as one, with a rank per part."""
    from peft import LoraConfig

    ranks = {}
    alphas = {}
    for name, part in chosen.items():
        for module in _targets(net, name, part) if part.how == "lora" else ():
            ranks[module] = part.rank
            alphas[module] = part.alpha if part.alpha is not None else 2 * part.rank
    if not ranks:
        return
    config = LoraConfig(
        r=max(ranks.values()),
        lora_alpha=max(alphas.values()),
        init_lora_weights="gaussian",
        target_modules=list(ranks),
        rank_pattern=ranks,
        alpha_pattern=alphas,
    )
    inject(net, config)


def _targets(net: nn.Module, name: str, part: Part) -> list[str]:
    unused = {key.rpartition(".")[0] for key in idle(net)}
    linear = [m for m in modules_of(net, name) if not m.endswith(HEADS) and m not in unused]
    try:
        return ending_like(linear, part.targets, name)
    except UserError as error:
        raise UserError(f"policy option train.{name}: {error}") from error

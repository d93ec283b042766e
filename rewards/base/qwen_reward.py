"""Builds Qwen2-VL with a reward head read at special tokens: the network under HPSv3 and
VideoAlign.

The published code passes embeddings without grids to the language model, so that all tokens, also
those of pictures, get positions 0, 1, 2, ... instead of Qwen2-VL's three-dimensional ones. The
weights were trained that way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.pretrained import from_tensors
from rewards.base.clip import pick_device
from rewards.base.hf import DTYPES, Precision, load_processor

WRAPPER = "base_model.model."
LORA = re.compile(r"\.lora_([AB])\.\w+\.weight$")


class QwenReward(nn.Module):
    """Runs the backbone in its own precision, the head in float32."""

    def __init__(self, backbone: nn.Module, head: nn.Module, tokens: list[int]):
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.tokens = tokens

    @property
    def device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Map the processor's output for N prompts -> [N, S, D]: the head's D outputs at each of
        the S special tokens."""
        ids = batch["input_ids"]
        places = torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
        # [N, T, W]
        hidden = self.backbone(**batch, position_ids=places, use_cache=False).last_hidden_state
        rows = torch.arange(len(ids), device=ids.device)
        rewards = [self.head(hidden[rows, last_place(ids, token)].float()) for token in self.tokens]
        return torch.stack(rewards, dim=1)


def last_place(ids: Tensor, token: int) -> Tensor:
    """Find in [N, T] the position [N] of the last occurrence of a token, so that one in the user's
    prompt has no effect."""
    matches = ids == token
    if not matches.any(1).all():
        raise UserError(
            "the instruction lacks one of the special tokens at which this reward is read"
        )
    return ids.shape[1] - 1 - matches.flip(1).int().argmax(1)


def load_network(
    tensors: dict[str, Tensor],
    base: str,
    tokens: list[int],
    dtype: Precision,
    device: str | torch.device,
    alpha: float = 1.0,
) -> QwenReward:
    """Load the network of a checkpoint of the published code, adapters merged in; the head in
    float32.

    Args:
        tensors: by name, from any version of transformers.
        base: where the configuration of Qwen2-VL is.
        tokens: ids of the special tokens.
        dtype: of the backbone.
        device: ``auto`` is CUDA if there is one.
        alpha: the adapters' alpha, or alpha times the square root of the rank for rank-stabilised
            ones.

    Raises:
        UserError: tensors missing or of another shape.
    """
    weights = merged(unwrapped(tensors), alpha)
    named = {modern(name): value for name, value in weights.items() if "lm_head" not in name}
    head = {
        name.removeprefix("rm_head."): value
        for name, value in named.items()
        if name.startswith("rm_head.")
    }
    body = {name: value for name, value in named.items() if not name.startswith("rm_head.")}
    try:
        network = QwenReward(load_backbone(body, base, dtype), make_head(head), tokens)
    except (KeyError, RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"the checkpoint is not a reward model on {base}: {type(error).__name__}: {first}"
        ) from error
    return network.eval().requires_grad_(False).to(pick_device(device))


def load_backbone(tensors: dict[str, Tensor], base: str, dtype: Precision) -> nn.Module:
    """Build Qwen2-VL without its language head, from exactly these tensors."""
    from transformers import Qwen2VLModel

    config = load_processor("Qwen2VLConfig", base)
    config.text_config.vocab_size = tensors["language_model.embed_tokens.weight"].shape[0]
    model: nn.Module
    model, loading = from_tensors(Qwen2VLModel, config, tensors, DTYPES[dtype])
    if not loading.is_whole:
        raise KeyError((*loading.missing, *loading.misshapen)[0])
    return model


def make_head(tensors: dict[str, Tensor]) -> nn.Module:
    """Make one linear layer, or several with ReLU between them, named by their places in a
    sequence."""
    if set(tensors) == {"weight"}:
        return linear(tensors["weight"], None)
    places = sorted({int(name.split(".")[0]) for name in tensors})
    layers: list[nn.Module] = []
    for place in places:
        layers += [linear(tensors[f"{place}.weight"], tensors.get(f"{place}.bias")), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.float())
    if bias is not None:
        layer.bias = nn.Parameter(bias.float())
    return layer


def unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return names without peft's wrapper; for fully trained modules, the trained copy."""
    weights = {}
    for name, value in tensors.items():
        name = name.removeprefix(WRAPPER).replace(".base_layer.", ".")
        if ".original_module." not in name:
            weights[name.replace(".modules_to_save.default.", ".")] = value
    return weights


def merged(tensors: dict[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Merge low-rank adapters into their weights: W + alpha / rank B A."""
    plain = {name: value for name, value in tensors.items() if not LORA.search(name)}
    for name, down in tensors.items():
        match = LORA.search(name)
        if match and match[1] == "A":
            up = tensors[name.replace(".lora_A.", ".lora_B.")]
            target = LORA.sub(".weight", name)
            plain[target] = (
                plain[target].float() + alpha / len(down) * up.float() @ down.float()
            ).to(plain[target])
    return plain


def modern(name: str) -> str:
    """Translate a weight name of Qwen2-VL from any transformers version to ``Qwen2VLModel``'s
    current one."""
    if name.startswith("rm_head."):
        return name
    name = name.removeprefix("model.")
    return name if name.startswith(("visual.", "language_model.")) else f"language_model.{name}"


def read_instruction(path: str, tokens: list[str], source: str, reward: str) -> str:
    """Read the published prompt, a text file with ``{text_prompt}`` and the special tokens in
    it."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(
            f"reward {reward!r}: no instruction at {file}; save the published prompt of "
            f"{source} there, as a text file "
            f"with {{text_prompt}} where the prompt goes and {', '.join(tokens)} where "
            f"the scores are read"
        )
    text = file.read_text()
    for part in ("{text_prompt}", *tokens):
        if part not in text:
            raise UserError(f"reward {reward!r}: the instruction {file} lacks {part}")
    return text


def load_tools(base: str, tokens: list[str], exact: bool) -> tuple[Any, list[int]]:
    """Load the base model's processor, padding on the right, add the special tokens, and return
    both it and their ids."""
    tools = load_processor("AutoProcessor", base)
    tools.image_processor = load_processor(
        "AutoImageProcessor", base, backend="pil" if exact else "torchvision"
    )
    tools.tokenizer.padding_side = "right"
    tools.tokenizer.add_tokens(tokens, special_tokens=True)
    return tools, tools.tokenizer.convert_tokens_to_ids(tokens)


def chats(tools: Any, kind: str, texts: list[str]) -> list[str]:
    """Write one user message each, a picture or a video and a text, by the chat template."""
    return [
        tools.apply_chat_template(
            [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": text}]}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for text in texts
    ]

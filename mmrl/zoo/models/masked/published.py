"""Masked language models whose published code transformers 5 does not run, as classes of
transformers without it: LLaDA and MMaDA (``llada.py``), and Dream, a Qwen2 without causality whose
logits are about the next token."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core import pretrained
from mmrl.core.model_folders import folder_of
from mmrl.zoo.models.masked.llada import Network, Sizes

# the slow tokenizer of Dream's repository: Qwen2's with other special tokens
DREAM_TOKENIZER = "DreamTokenizer"
# of LLaDA's config, by the names that transformers has for them
NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_sequence_length",
}


@cache
def register() -> None:
    """Let AutoConfig and AutoModelForMaskedLM know these models, whether or not code of a folder
    may run."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    for config, model in (*_llada(), _dream()):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForMaskedLM.register(config, model, exist_ok=True)


def is_known(config: Any) -> bool:
    """Tell whether a model's config is one of these."""
    return type(config).__module__ == __name__


def load_tokenizer(place: str, remote_code: bool) -> Any:
    """Load a tokenizer; Dream's as Qwen2's, without the code of its folder."""
    from transformers import AutoTokenizer, Qwen2Tokenizer
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    name = get_tokenizer_config(place).get("tokenizer_class")
    entry = Qwen2Tokenizer if name == DREAM_TOKENIZER else AutoTokenizer
    return pretrained.load_processor(entry, place, remote_code=remote_code)


def keep_config(net: Any, folder: Path) -> None:
    """Give an export of these models the config.json of their base, whose keys the published code
    reads; transformers writes some by other names."""
    from transformers import PreTrainedModel

    if not isinstance(net, PreTrainedModel) or not is_known(net.config):
        return
    base = folder_of(str(net.config.name_or_path))
    if base is not None and (folder / "config.json").is_file():
        shutil.copy(base / "config.json", folder / "config.json")


def _llada() -> list[tuple[Any, Any]]:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import MaskedLMOutput

    class LLaDAConfig(PreTrainedConfig):
        model_type = "llada"
        attribute_map = NAMES

    class MMadaConfig(LLaDAConfig):
        model_type = "mmada"

    class LLaDAModelLM(PreTrainedModel):
        config_class = LLaDAConfig
        base_model_prefix = "model"
        supports_gradient_checkpointing = True
        _no_split_modules = ("Block",)

        def __init__(self, config: Any):
            super().__init__(config)
            self.model = Network(Sizes.of(config.to_dict(), config.name_or_path or "LLaDA"))
            self.post_init()

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
            return MaskedLMOutput(logits=self.model(input_ids, attention_mask))

        def get_input_embeddings(self) -> nn.Module:
            return self.model.transformer["wte"]

    class MMadaModelLM(LLaDAModelLM):
        config_class = MMadaConfig

    return [(LLaDAConfig, LLaDAModelLM), (MMadaConfig, MMadaModelLM)]


def _dream() -> tuple[Any, Any]:
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.masking_utils import create_bidirectional_mask

    class DreamConfig(Qwen2Config):
        model_type = "Dream"

    class DreamModel(Qwen2ForCausalLM):
        config_class = DreamConfig

        def __init__(self, config: Any):
            super().__init__(config)
            for layer in self.model.layers:
                layer.self_attn.is_causal = False

        def forward(
            self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
        ) -> Any:
            """Compute logits whose position i is about token i, as those of other masked models: of
            place i - 1, and of place 0 its own, which stands in the published code too."""
            embeddings = self.get_input_embeddings()(input_ids)
            visible = create_bidirectional_mask(
                config=self.config, inputs_embeds=embeddings, attention_mask=attention_mask
            )
            output = super().forward(
                inputs_embeds=embeddings,
                attention_mask={"full_attention": visible, "sliding_attention": visible},
                use_cache=False,
                **options,
            )
            logits = output.logits
            output.logits = torch.cat([logits[:, :1], logits[:, :-1]], 1)
            return output

    return DreamConfig, DreamModel

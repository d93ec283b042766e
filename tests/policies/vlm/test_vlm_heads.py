"""Logits are those of a model's own class, whatever it does after its head."""

import pytest
import torch
import transformers as hf

from mmrl.core.errors import UserError
from mmrl.policies.vlm.heads import Head
from tests.fixtures import tiny_configs, tiny_vlms

SIZES = tiny_vlms.TEXT | {"vocab_size": 64, "pad_token_id": 0}
CAPPED = {"head_dim": 8, "final_logit_softcapping": 2.0}
# logits of hidden states that are divided, of which the last are cut off
CUT = {"unpadded_vocab_size": 50, "logits_mup_width_multiplier": 3.0, "head_dim": 8}
CUT |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
CUT |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
# a class with its options, and whether its head is all that it applies
CLASSES = {
    "plain": (hf.LlamaForCausalLM, hf.LlamaConfig, {}, True),
    "divided": (hf.GraniteForCausalLM, hf.GraniteConfig, {"logits_scaling": 3.0}, False),
    "multiplied": (hf.CohereForCausalLM, hf.CohereConfig, {"logit_scale": 2.0}, False),
    "capped": (hf.Gemma2ForCausalLM, hf.Gemma2Config, CAPPED, False),
    "a cut vocabulary": (hf.InklingForCausalLM, hf.InklingTextConfig, CUT, False),
}


def built(name):
    if name in CLASSES:
        kind, config, options, _ = CLASSES[name]
        return kind(config(**SIZES | options))
    text = SIZES | CAPPED | {"model_type": "gemma2"}
    vision = tiny_configs.tiny(hf.LlavaConfig).vision_config
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(text_config=text, vision_config=vision))


@pytest.mark.parametrize("name", [*CLASSES, "a cap that the class around does not apply"])
def test_logits_are_those_of_the_class(name):
    torch.manual_seed(0)
    model = built(name).eval()
    tiny_vlms._wake(model)
    ids = torch.randint(3, 50, (2, 5))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        hidden = model.base_model(input_ids=ids).last_hidden_state
    head = Head(model)
    assert head.plain == (name not in CLASSES or CLASSES[name][-1])
    assert head.vocabulary == wanted.shape[-1]
    hidden.requires_grad_()
    logits = head(hidden)
    torch.testing.assert_close(logits, wanted)
    logits.sum().backward()
    assert hidden.grad.abs().sum() > 0


def test_a_head_inside_a_language_model_is_found_and_none_refused():
    """Of Nemotron's class, which names no head."""
    kind = hf.NemotronH_Omni_Reasoning_V3_Config
    torch.manual_seed(0)
    model = hf.NemotronH_Omni_Reasoning_V3(tiny_configs.tiny(kind)).eval()
    assert model.get_output_embeddings() is None
    ids = torch.randint(3, 50, (2, 5))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        hidden = model.language_model.model(input_ids=ids).last_hidden_state
        torch.testing.assert_close(Head(model)(hidden), wanted)
    with pytest.raises(UserError, match="llama has no head over a vocabulary"):
        Head(hf.LlamaModel(hf.LlamaConfig(**SIZES)))

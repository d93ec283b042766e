"""Tries every class of AutoModelForImageTextToText as a tiny model with random weights: whether its
log-probs, sampled and scored, are those of its own unpadded pass, or why it is refused.

    python scripts/vlm_classes.py [MODEL_TYPE ...]

Texts only, by a processor of LLaVA's kind: what a class does with pictures needs its own processor
and is compared when a run begins. Sizes of a class's default configuration are cut by their names.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mmrl.core.errors import UserError  # noqa: E402
from mmrl.policies.vlm.policy import VLM  # noqa: E402
from samplers.noise import Rng  # noqa: E402
from tests.fixtures import tiny_vlms  # noqa: E402

SECONDS = 90  # of a class
LARGEST = 30_000_000  # parameters of a class whose sizes could be cut
SIZES = {
    "vocab_size": 288,
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "depth": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "image_size": 56,
    "patch_size": 14,
    "out_hidden_size": 32,
    "projection_dim": 32,
    "vocab_size_per_layer_input": 288,
    "hidden_size_per_layer_input": 8,
    "text_hidden_size": 32,
    "d_model": 32,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 259,
    "image_token_id": 260,
    "image_token_index": 260,
    "video_token_id": 261,
}
DEPTHS = ("layer_types", "mlp_layer_types")  # a name for every layer
ASKED = [
    {"text": "why?"},
    {"text": "a question that is several times as long as the other, so that it is padded"},
    {"text": "hello there"},
]


def cut(config: Any) -> Any:
    """Cut the sizes of a configuration and of those inside it."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "model_type"):
            cut(value)
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, SIZES[name])
        elif name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
            setattr(config, name, value | {"mrope_section": [1, 1, 2]})
        elif name in DEPTHS and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            setattr(config, name, (kinds * 2)[:2])
    return config


def apart(vlm: VLM) -> float:
    """Return the largest distance to the model's own log-probs, in nats."""
    with torch.no_grad():
        rollout = vlm.rollout(ASKED, [2, 1, 1], Rng.of("classes"))
        (point,) = vlm.path(rollout)
        scored = vlm.dist(point).log_prob(point.target)
        worst = 0.0
        for i in range(len(rollout)):
            n = int(rollout.mask[i].sum())
            ids = rollout.sample[i, :n]
            logits = vlm.net("own", rollout.cond[int(rollout.group[i])], ids[None])[0]
            wanted = vlm.warp(logits, keep=ids).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
            for each in (scored[i, :n], rollout.logprob[i, :n]):
                worst = max(worst, float((each - wanted).abs().max()))
    return worst


def loaded(folder: str) -> VLM:
    """Load a class with attention sdpa, or eager where it has no other."""
    try:
        return VLM(folder, max_new_tokens=4)
    except UserError as error:
        if "attention implementation" not in str(error):
            raise
    return VLM(folder, max_new_tokens=4, attention="eager")


def tried(kind: type, config: type) -> tuple[str, str]:
    """Return the verdict on a class, and why."""
    _, processor = tiny_vlms.llava()
    if getattr(config(), "is_encoder_decoder", False):
        return "refused", "an encoder for the question and a decoder for the answer"
    try:
        torch.manual_seed(0)
        small = cut(config())
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(small).parameters())
        if size > LARGEST:
            return "not built", f"its sizes have other names: {size:,} parameters are left"
        model = kind(small)
        tiny_vlms._wake(model)
    except Exception as error:  # of any class
        return "not built", f"{type(error).__name__}: {error}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
            processor.save_pretrained(folder)
            vlm = loaded(folder)
            gap = apart(vlm)
        except UserError as error:
            # the class's own pass fails: the sizes that are left do not fit together
            marks = ("cannot load it", "another shape", "does not take what its processor made")
            unbuilt = any(mark in str(error) for mark in marks)
            verdict = "not built" if unbuilt else "refused"
            return verdict, str(error).replace(f"policy.vlm.path {folder}: ", "")
        except Exception as error:
            return "TRACEBACK", f"{type(error).__name__}: {error}"
    way = "" if vlm.net.config._attn_implementation == "sdpa" else "attention eager"
    way = way if vlm.net.share else "prompts are read once for every answer"
    way = way or ("every prompt a batch of its own" if vlm.inputs.family.alone else "")
    return ("equal" if gap < 1e-3 else "WRONG"), f"{gap:.0e} nats{way and ': ' + way}"


def main(names: list[str]) -> None:
    """Print a table of all classes, or of those that are named."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    mapping = transformers.AutoModelForImageTextToText._model_mapping
    print("| model type | verdict | |\n|---|---|---|")
    for config in mapping:
        name = config.model_type
        if names and name not in names:
            continue
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("too slow")))
        signal.alarm(SECONDS)
        try:
            verdict, why = tried(mapping[config], config)
        except TimeoutError as error:
            verdict, why = "not built", str(error)
        finally:
            signal.alarm(0)
        why = why.replace("|", "/").replace("\n", " ")
        print(f"| {name} | {verdict} | {why[:160]} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

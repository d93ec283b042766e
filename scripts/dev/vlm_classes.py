"""Tests every class of AutoModelForImageTextToText as a tiny model with random weights: whether its
log-probs, sampled and scored, equal those of its own unpadded pass, or why it is refused.

    python scripts/dev/vlm_classes.py [MODEL_TYPE ...]

Families listed in docs/vlm.md are tested with a picture, by their own processors. Others with text
only, by a LLaVA processor: pictures need the class's own processor and are compared when a run
begins. Configurations are shrunk by ``tests/fixtures/tiny_configs.py``.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mmrl.core.errors import UserError  # noqa: E402
from mmrl.policies.vlm.policy import VLM  # noqa: E402
from samplers.noise import Rng  # noqa: E402
from tests.fixtures import tiny_configs, tiny_vlms  # noqa: E402

SECONDS = 90  # of a class
LENGTH = 110  # of a reason
LARGEST = 30_000_000  # maximum parameters of a class whose sizes could be shrunk
# thresholds of sparse attention, for a second test with longer prompts
THRESHOLDS = {
    "index_topk": 48,
    "indexer_budget": 48,
    "index_topk_blocks": 3,
    "index_block_size": 16,
}
ASKED = [
    {"text": "why?"},
    {"text": "a question that is several times as long as the other, so that it is padded"},
    {"text": "hello there"},
]
PICTURE = tiny_vlms.image(60, 50)
SHOWN = [{**ASKED[0], "images": [PICTURE]}, *ASKED[1:]]
ALL_SHOWN = [{**prompt, "images": [PICTURE]} for prompt in ASKED]  # of families that take one each


def apart(vlm: VLM, asked: list[dict[str, Any]]) -> float:
    """Return the largest distance from the model's own log-probs, in nats."""
    with torch.no_grad():
        rollout = vlm.rollout(asked, [2, 1, 1], Rng.of("classes"))
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
    """Load a class with attention sdpa, or eager if it has no other."""
    try:
        return VLM(folder, max_new_tokens=4)
    except UserError as error:
        if "attention implementation" not in str(error):
            raise
    return VLM(folder, max_new_tokens=4, attention="eager")


def beyond(kind: type, config: type, vlm: VLM) -> str:
    """Test prompts beyond the thresholds of a class, if it has any."""
    low = {name: size for name, size in THRESHOLDS.items() if hasattr(vlm.net.text_config, name)}
    if vlm.limits.columns is None or not low or listed(config.model_type):
        return ""
    with tempfile.TemporaryDirectory() as folder:
        saved(kind, config, folder, **low)
        try:
            gap = apart(loaded(folder), ASKED)
        except UserError:
            return f"longer prompts than {vlm.limits.columns} columns are refused"
    assert gap < 1e-3, gap
    return f"beyond {vlm.limits.columns} columns too"


def listed(name: str) -> bool:
    """Tell whether the tests build a family with its own processor."""
    return name in tiny_vlms.ROWS


def saved(kind: type, config: type, folder: str, **text: Any) -> None:
    """Save a tiny model of a class with LLaVA's processor, with other values in its ``text`` part.
    Raises whatever its class raises."""
    torch.manual_seed(0)
    small = tiny_configs.tiny(config, **({"text_config": text} if text else {}))
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(small).parameters())
    if size > LARGEST:
        raise ValueError(f"its sizes have other names: {size:,} parameters are left")
    model = kind(small)
    tiny_vlms._wake(model)
    model.save_pretrained(folder)
    tiny_vlms.build("llava")[1].save_pretrained(folder)


def tried(kind: type, config: type) -> tuple[str, str]:
    """Return the verdict on a class, and why."""
    name = config.model_type
    if getattr(config(), "is_encoder_decoder", False):
        return "refused", "an encoder for the question and a decoder for the answer"
    with tempfile.TemporaryDirectory() as folder:
        place = folder
        try:
            if listed(name):
                place = str(tiny_vlms.folder(name))
            else:
                saved(kind, config, folder)
        except Exception as error:  # of any class
            return "not built", f"{type(error).__name__}: {error}"
        try:
            vlm = loaded(place)
            asked = ALL_SHOWN if name in tiny_vlms.ONE_IMAGE else SHOWN
            gap = apart(vlm, asked if listed(name) else ASKED)
        except UserError as error:
            return "refused", str(error).removeprefix(f"policy.vlm.path {place}: ").replace(
                f"{place}: ", ""
            )
        except Exception as error:
            return "TRACEBACK", f"{type(error).__name__}: {error}"
    shown = "with a picture" if listed(name) else ""
    attention = "" if vlm.net.config._attn_implementation == "sdpa" else "attention eager"
    way = "" if vlm.net.share else "prompts are read once for every answer"
    way = way or ("every prompt a batch of its own" if vlm.inputs.family.alone else "")
    notes = "; ".join(filter(None, (shown, attention, way, beyond(kind, config, vlm))))
    return ("equal" if gap < 1e-3 else "WRONG"), f"{gap:.0e} nats{notes and ': ' + notes}"


def main(names: list[str]) -> None:
    """Print the table of docs/results/vlm_classes.md, or of the named classes."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    mapping = transformers.AutoModelForImageTextToText._model_mapping
    verdicts = []
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
        verdicts.append((name, verdict, why.replace("|", "/").replace("\n", " ")))
        print(*verdicts[-1], file=sys.stderr, flush=True)
    print(table(verdicts))


def table(verdicts: list[tuple[str, str, str]]) -> str:
    """Write a row for all classes of one verdict and kind."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, verdict, why in verdicts:
        if verdict == "equal":
            kind = why.partition(": ")[2]
        else:
            kind = why.removeprefix("policy.vlm.path: ").replace(name, "it").partition(" (Ty")[0]
            kind = kind.partition(" (Value")[0]
            kind = kind if len(kind) <= LENGTH else f"{kind[:LENGTH].rsplit(' ', 1)[0]} ..."
        kinds.setdefault((verdict, kind), []).append(name)
    rows = [f"| {v} | {kind} | {', '.join(names)} |" for (v, kind), names in sorted(kinds.items())]
    return "\n".join(["| verdict | how, or why | model types |", "|---|---|---|", *rows])


if __name__ == "__main__":
    main(sys.argv[1:])

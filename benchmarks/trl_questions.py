"""Trains what ``configs/real/smollm2.yaml`` trains with TRL's GRPOTrainer, for a comparison.

    python benchmarks/trl_questions.py --out FOLDER      needs: pip install trl==1.16.0

The same weights, questions, reward, LoRA, sizes and learning rate; the order of prompts and the
random numbers differ. Writes metrics.jsonl (iteration, reward/mean, seconds, answer/tokens),
held_out.json (greedy answers, scored before and after) and the adapter.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
CONFIGURATION = ROOT / "configs/real/smollm2.yaml"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def rows(name: str) -> list[dict[str, Any]]:
    """Read questions as TRL's conversational prompts."""
    lines = (ROOT / "weights" / f"{name}.jsonl").read_text().splitlines()
    return [
        {"prompt": [{"role": "user", "content": row["text"]}], **row}
        for row in map(json.loads, lines)
    ]


def score(texts: list[str], given: list[dict[str, Any]]) -> list[float]:
    from rewards import Maths

    return [float(value) for value in Maths()(texts, given)]


@torch.no_grad()
def held_out(model: Any, tokenizer: Any, count: int, tokens: int) -> list[float]:
    """Score greedy answers to held-out questions."""
    given = rows("questions_held_out")[:count]
    tokenizer.padding_side = "left"
    chats = [row["prompt"] for row in given]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )
    answers = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    start = inputs["input_ids"].shape[1]
    return score(tokenizer.batch_decode(answers[:, start:], skip_special_tokens=True), given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--count", type=int, help="held-out questions")
    args = parser.parse_args()

    if not (ROOT / "weights/questions.jsonl").is_file() or not (ROOT / "weights/smollm2").is_dir():
        sys.exit("error: weights/ is not complete: scripts/real_weights, scripts/real_questions.py")
    if find_spec("trl") is None:
        sys.exit("error: TRL is not installed: pip install trl==1.16.0")
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    chosen = yaml.safe_load(CONFIGURATION.read_text())
    policy, train = chosen["policy"]["vlm"], chosen["train"]
    folder = str(ROOT / "weights/smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    count, tokens = args.count or chosen["evaluate"]["prompts"], policy["max_new_tokens"]
    scores = {"before": held_out(model, tokenizer, count, tokens)}
    args.out.mkdir(parents=True, exist_ok=True)
    curve = (args.out / "metrics.jsonl").open("w")
    recent: dict[str, float] = {}

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        names = ("text", "answer", "task")
        given = [dict(zip(names, row)) for row in zip(*(columns[name] for name in names))]
        values = score(texts, given)
        recent["reward/mean"] = sum(values) / len(values)
        recent["answer/tokens"] = sum(map(len, columns["completion_ids"])) / len(values)
        return values

    class Curve(TrainerCallback):
        start = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            seconds = time.perf_counter() - self.start
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            line = {"iteration": state.global_step, "seconds": seconds, "memory/peak_gib": peak}
            curve.write(json.dumps(line | recent) + "\n")
            curve.flush()

    size = train["prompts_per_iteration"] * train["group_size"]
    options = GRPOConfig(
        output_dir=str(args.out),
        per_device_train_batch_size=size,
        num_generations=train["group_size"],
        max_steps=args.iterations or train["iterations"],
        max_completion_length=tokens,
        temperature=policy["temperature"],
        learning_rate=float(chosen["optimizer"]["adamw"]["lr"]),
        weight_decay=1e-4,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        bf16=train["precision"] == "bf16",
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        logging_steps=1000,
        seed=train["seed"],
    )
    lora = LoraConfig(r=policy["lora"], lora_alpha=2 * policy["lora"], target_modules=TARGETS)
    trainer = GRPOTrainer(
        model,
        reward,
        args=options,
        train_dataset=Dataset.from_list(rows("questions")),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[Curve()],
    )
    trainer.train()
    trainer.save_model(str(args.out))
    scores["after"] = held_out(trainer.model.eval(), tokenizer, count, tokens)
    (args.out / "held_out.json").write_text(json.dumps(scores))
    for name, values in scores.items():
        print(f"{name}: {sum(values) / len(values):.3f}")


if __name__ == "__main__":
    main()

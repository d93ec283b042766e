"""Stands in for ``mmrl train`` and ``mmrl evaluate``: writes a run folder and scores at once.

What a run is worth: its lr times ten, a little more with each seed. ``broken`` in the working
folder makes the first training fail, ``slow`` makes it wait for the signal that ends it.
"""

import json
import signal
import sys
from pathlib import Path

words = sys.argv[1:]
here = Path.cwd()
with (here / "calls.txt").open("a") as calls:
    calls.write(" ".join(words) + "\n")


def value(key, default=""):
    values = [w.partition("=")[2] for w in words if w.startswith(f"{key}=")]
    return values[-1] if values else default


def train(run):
    run.mkdir(parents=True, exist_ok=True)
    checkpoint = run / "checkpoints" / "iteration-000001"
    if (here / "broken").exists():
        (here / "broken").unlink()
        sys.exit("error: the reward fell over")
    if (here / "slow").exists():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        (here / "slow").unlink()
        checkpoint.mkdir(parents=True)
        (here / "waiting").touch()
        signal.sigtimedwait([signal.SIGTERM], 60)
        return
    worth = float(value("optimizer.adamw.lr", "0.1")) * 10
    if (run / "fake.json").exists():
        worth = json.loads((run / "fake.json").read_text())["worth"]
    seed = int(value("train.seed", "0"))
    (run / "fake.json").write_text(json.dumps({"worth": worth, "seed": seed}))
    checkpoint.mkdir(parents=True, exist_ok=True)
    costs = {"samples/total": 8, "forwards": 40, "seconds": 2.0, "cpu_seconds": 1.5}
    lines = [{"iteration": i, "reward/mean": worth * i, **costs} for i in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "config.yaml").write_text("{}")
    event = {"iteration": 2, "kind": "finished", "message": "2 iterations"}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")


def evaluate(run):
    fake = json.loads((run / "fake.json").read_text())
    split = value("evaluate.split")
    prompts = [f"{split} {p}" for p in range(6)]

    def scores(worth):  # what a model is worth differs a little between prompts
        means = [worth * (0.99 + 0.02 * (p % 2)) + 0.01 * (p % 3) * fake["seed"] for p in range(6)]
        return [[mean + p + 0.1 * copy for copy in (0, 1)] for p, mean in enumerate(means)]

    models = []
    for model, worth in (("base", 0.0), ("trained", fake["worth"])):
        rewards = {"jpeg_compressibility": scores(worth), "sharpness": scores(-worth)}
        models.append({"model": model, "rewards": rewards, "diversity": [0.5] * 6})
    content = {"prompts": prompts, "held_out": True, "models": models}
    content["weights"] = {"jpeg_compressibility": 2.0}
    Path(words[words.index("--scores") + 1]).write_text(json.dumps(content))


if words[0] == "train":
    train(Path(words[words.index("--resume") + 1] if "--resume" in words else value("run")))
else:
    evaluate(Path(words[1]))

"""Runs for tests of the live view, written by the log that writes them in a training."""

import json

import torch

from mmrl.config.sections import LogOptions
from mmrl.monitoring.log import RunLog
from mmrl.monitoring.report.pictures import data_uri, sheet

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
PROMPTS = ["a red seven", HOSTILE, "a blue one"]


def pictures(seed):
    return torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def picture_run(folder, iterations=6, seed=0, finished=True):
    """A run of pictures with curves, previews and an alarm."""
    with RunLog(folder, options=LogOptions(tensorboard=False)) as log:
        log.images("before", pictures(seed), PROMPTS)
        for i in range(1, iterations + 1):
            log.metrics(i, metrics(i, seed))
            if i % 2 == 0:
                log.images(f"iter-{i:06d}", pictures(seed + i), PROMPTS)
        log.event("alarm", f"reward is exploited {HOSTILE}", about="reward")
        if finished:
            log.images("after", pictures(seed + 99), PROMPTS)
            log.event("finished", f"{iterations} iterations")
    (folder / "config.yaml").write_text("reward: {sharp: 1.0}\ntrain: {iterations: 60}\n")
    return folder


def metrics(i, seed=0):
    return {"reward/mean": i / 10 + seed, "reward/std": 0.1, "loss": 1 / i, "seconds": 2.0}


def text_run(folder):
    """A run of answers to one question about a picture."""
    with RunLog(folder, options=LogOptions(tensorboard=False)) as log:
        log.metrics(1, metrics(1))
    picture, _ = sheet(pictures(0)[:1])
    known = {"tokens": 1, "finished": True, "status": {}, "boxes": [], "advantage": 0.0}
    answers = [known | {"text": "3", "rewards": {"exact": 1.0}}]
    answers += [known | {"text": HOSTILE, "rewards": {"exact": 0.0}}]
    line = {"iteration": 1, "prompt": "how many?", "right": "3", "answers": answers}
    line |= {"picture": data_uri(picture), "size": [8, 8], "boxes": []}
    (folder / "rollouts.jsonl").write_text(json.dumps(line) + "\n")
    return folder

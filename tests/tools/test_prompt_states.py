"""States of prompts by a policy's own network, from the script to a data source that reads them."""

import sys
import warnings

import numpy as np
import torch

from mmrl.apps.prepare import prompt_states
from mmrl.experiment import build
from tests.fixtures import tiny_vlms
from tests.fixtures.mistakes import message

CONFIG = """
policy: {{vlm: {{path: "{path}", max_new_tokens: 4}}}}
data: {{prompts: {{path: {folder}/prompts.txt, held_out: 0.2}}}}
reward: {{"{folder}/mine.py:length": 1.0}}
advantage: grpo
objective: policy_gradient
optimizer: {{adamw: {{lr: 1e-3}}}}
train: {{prompts_per_iteration: 2, group_size: 4, train_batch_size: 8, iterations: 1}}
log: {{tensorboard: false}}
"""
REWARD = '''
import torch


def length(media, prompts):
    """Counts letters."""
    return torch.tensor([float(len(text)) for text in media])
'''


def test_states_of_prompts_are_the_policys_own(tmp_path, monkeypatch):
    run = tmp_path / "run.yaml"
    run.write_text(CONFIG.format(path=tiny_vlms.folder("qwen2_5_vl"), folder=tmp_path))
    (tmp_path / "mine.py").write_text(REWARD)
    texts = [f"a {color} {digit}" for color in ("red", "blue") for digit in ("one", "two", "six")]
    (tmp_path / "prompts.txt").write_text("\n".join(texts))
    out = tmp_path / "states.npy"
    words = ["prompt_states", str(run), "--out", str(out), "--batch", "4"]
    monkeypatch.setattr(sys, "argv", words)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prompt_states.main()
        session = build.base(run)
    states = np.load(out)
    prompts = list(session.source.train)
    assert len(states) == len(prompts) >= 3
    with torch.no_grad():
        expected = torch.cat([session.policy.prompt_states([prompt]) for prompt in prompts])
    np.testing.assert_allclose(states, expected.float().numpy(), atol=1e-4, rtol=1e-3)
    inner = f"{{prompts: {{path: {tmp_path}/prompts.txt, held_out: 0.2}}}}"
    data = f"data={{pcl: {{of: {inner}, value: model, embeddings: {out}}}}}"
    chosen = build.read(run, [data]).build("data", build.DATA)
    features = chosen.features(chosen.train.prompts)
    scaled = states / np.linalg.norm(states, axis=1, keepdims=True)
    np.testing.assert_allclose(features, scaled, atol=1e-6)
    drift, pvpo = "advantage={single_stream: {drift: kl}}", "advantage={pvpo: {learned: true, "
    for words, why in [
        ([f"data={{pcl: {{of: {inner}, value: network}}}}"], "add prompt_value to train.stages"),
        ([f"data={{depo: {{of: {inner}, explore: entropy}}}}"], "set policy.vlm.record_entropy to"),
        ([drift], "what the stage policy_drift measures; add policy_drift to train.stages"),
        ([pvpo + "offline: true}}", "train.stages=[prompt_value]"], "add demonstrations to train."),
    ]:
        assert why in message(build.read, run, words)
    build.read(run, [drift, "train.stages=[policy_drift]"])

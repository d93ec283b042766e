"""Golden trajectories: the first iterations of six families in float64 give the losses and
gradients that are written down in ``golden.json``. Refactoring must not move them.

``python -m tests.core.test_golden`` rewrites the file, after a change that was meant to move them.
"""

import json
from functools import partial
from pathlib import Path

import torch

from mmrl import advantages
from mmrl.config.options import TrainOptions
from mmrl.objectives import PolicyGradient
from mmrl.scoring import Scorer
from mmrl.train.optimizers import sgd
from mmrl.train.trainer import Trainer
from tests.fixtures import tiny_vlms, toys
from tests.policies.vlm.test_vlm_policy import policy_of

FILE = Path(__file__).with_name("golden.json")
FAMILIES = [*toys.POLICIES, "vlm"]
LEARNING_RATE = 0.05  # plain gradient descent: Adam would blow rounding up where a gradient is zero


def small_letters(texts, prompts):
    """Rewards the share of small letters among eight tokens."""
    return [sum("a" <= letter <= "z" for letter in text) / 8 for text in texts]


def trajectory(family: str, count: int = 6) -> list[list[float]]:
    """Train one family and return loss, gradient norm and mean reward of every iteration."""
    sizes = {"group_size": 4, "iterations": 20}
    if family == "vlm":
        policy = policy_of(max_new_tokens=8)
        policy.net.double()
        pictures = [tiny_vlms.image(56, 56, seed) for seed in range(2)]
        prompts = [{"text": "what?", "images": [picture]} for picture in pictures]
        reward = small_letters
        objective = PolicyGradient(kl=0.01)
        sizes |= {"prompts_per_iteration": 2, "train_batch_size": 4, "micro_batch_size": 2}
    else:
        policy = toys.make(family, double=True)
        prompts = toys.prompts(16)
        reward = toys.reward
        gaussian = policy.capabilities.decisions == "gaussian"
        objective = PolicyGradient(clip_range=0.2, kl=0.01) if gaussian else PolicyGradient(kl=0.01)
        sizes |= {"prompts_per_iteration": 4, "train_batch_size": 8, "micro_batch_size": 4}
    optimizer = partial(sgd, lr=LEARNING_RATE)
    scorer, options = Scorer({"reward": reward}), TrainOptions(**sizes)
    trainer = Trainer(policy, prompts, scorer, advantages.grpo, objective, optimizer, options)
    iterations = [trainer.iterate() for _ in range(count)]
    return [[m[name] for name in ("loss", "grad_norm", "reward/mean")] for m in iterations]


def arithmetic() -> str:
    """Names what decides how sums are rounded: torch's version and the CPU's instruction set."""
    return f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"


def test_trajectories_are_those_written_down(subtests):
    """Elsewhere float32 inside (rewards, log-probs of tokens, norms) rounds in another way."""
    for family in FAMILIES:
        with subtests.test(family=family):
            golden = json.loads(FILE.read_text())
            atol = 1e-12 if golden["arithmetic"] == arithmetic() else 1e-5
            count = 2 if family == "vlm" else 4
            recorded = torch.tensor(golden[family][:count], dtype=torch.float64)
            trained = torch.tensor(trajectory(family, count), dtype=torch.float64)
            torch.testing.assert_close(trained, recorded, rtol=0, atol=atol)


def write() -> None:
    """Rewrites the file."""
    torch.set_num_threads(1)
    golden = {"arithmetic": arithmetic()} | {family: trajectory(family) for family in FAMILIES}
    FILE.write_text(json.dumps(golden, indent=0) + "\n")


if __name__ == "__main__":
    write()

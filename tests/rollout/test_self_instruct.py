"""Instructions that the policy writes while it trains: asked once, filtered, alike on processes and
after a resume."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from mmrl import advantages
from mmrl.config.options import TrainOptions
from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.core.registry import DATA, REWARDS, load_built_in
from mmrl.data.base import batch
from mmrl.objectives import PolicyGradient
from mmrl.rollout.stages import Setup
from mmrl.scoring import Scorer
from mmrl.train.optimizers import sgd
from mmrl.train.trainer import Trainer
from mmrl.zoo.curricula.self_instruct import SelfInstruct
from mmrl.zoo.stages.self_instruct import SelfInstruction
from rewards.judges.instructions import new_instruction, request
from tests.fixtures import toys

load_built_in()
OPTIONS = TrainOptions(prompts_per_iteration=4, group_size=4, train_batch_size=16, iterations=9)
WORDS = ("how", "many", "cats", "sum", "two", "3")


class Writer(toys.ToyCausal):
    """Six words after any prompt."""

    capabilities = replace(toys.ToyCausal.capabilities, makes="text")
    texts: list[str] = []

    def encode(self, prompts):
        self.texts = [*self.texts, *(prompt["text"] for prompt in prompts)]
        return super().encode([{"label": len(prompt["text"]) % 7} for prompt in prompts])

    def decode(self, rollout):
        return [" ".join(WORDS[token] for token in row) for row in rollout.sample.tolist()]


class Seeds:
    def __init__(self, count=6):
        self.train = [{"text": f"what is {i} and {i}?", "system": "be short"} for i in range(count)]
        self.held_out = []


def source(**options):
    return SelfInstruct(Seeds(), **{"count": 4, "shots": 2, "similarity": 0.9} | options)


def trainer_of(corpus):
    return Trainer(
        Writer(),
        corpus.train,
        Scorer({"vote": REWARDS.build("majority_vote")}),
        advantages.grpo,
        PolicyGradient(),
        partial(sgd, lr=0.1),
        OPTIONS,
    )


def test_the_policys_own_instructions_are_asked_once_each():
    corpus = source()
    trainer = trainer_of(corpus)
    counts = Counter()
    written = set()
    for _ in range(6):
        before = [text for text, _ in corpus.train.waiting]
        prompts = batch(corpus.train, 4, trainer.iteration, 0)
        assert prompts == batch(corpus.train, 4, trainer.iteration, 0), "repeatable until learn"
        own = [prompt for prompt in prompts if prompt.get("origin") == "self_instruct"]
        assert [prompt["text"] for prompt in own] == before[:2] and len(prompts) == 4
        assert all(prompt["system"] == "be short" and "entry" not in prompt for prompt in own)
        metrics = trainer.iterate()
        counts.update(prompt["text"] for prompt in own)
        waiting = [text for text, _ in corpus.train.waiting]
        assert waiting[: len(before[2:])] == before[2:]
        new = waiting[len(before[2:]) :]
        assert len(new) == metrics["self_instruct/new"] and not written & set(new)
        assert metrics["self_instruct/waiting"] == len(waiting)
        refused = sum(n for name, n in metrics.items() if name.startswith("self_instruct/too"))
        assert len(new) + refused == 4
        written |= set(new)
    assert counts and set(counts.values()) == {1} and set(counts) <= written
    requests = [text for text in trainer.policy.texts if "Write one new instruction" in text]
    assert len(requests) == 24 and all("Instruction 2:\nwhat is" in text for text in requests)


def test_processes_write_what_one_would(monkeypatch):
    corpus = source(count=5)
    stage = SelfInstruction.build(Setup(OPTIONS, Writer(), corpus.train, {}))
    examples = corpus.train.examples(3, 0)
    whole = stage._written(examples, 3)
    monkeypatch.setattr(distributed, "all_gather_json", lambda rows, device="cpu": list(rows))
    parts = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "world", lambda rank=rank: (rank, 2))
        parts += stage._written(examples, 3)
    assert parts == whole and len(whole) == 5


def test_a_resumed_run_asks_and_writes_the_same():
    corpus = source()
    trainer = trainer_of(corpus)
    for _ in range(3):
        trainer.iterate()
    saved = json.loads(json.dumps(corpus.train.state_dict()))
    again = source()
    again.train.load_state_dict(saved)
    assert again.train.pool() == corpus.train.pool()
    assert batch(again.train, 4, 3, 0) == batch(corpus.train, 4, 3, 0)
    assert again.train.examples(3, 0) == corpus.train.examples(3, 0)


def test_what_cannot_write_or_stands_inside_is_refused():
    corpus = source()
    pictures = toys.make("flow")
    with pytest.raises(UserError, match="so it must be one that writes text"):
        SelfInstruction.build(Setup(OPTIONS, pictures, corpus.train, {}))
    wrapped = DATA.build("knapsack", of=corpus)
    with pytest.raises(UserError, match="put self_instruct around the other data sources"):
        SelfInstruction.build(Setup(OPTIONS, Writer(), wrapped.train, {}))
    assert SelfInstruction.build(Setup(OPTIONS, Writer(), Seeds().train, {})) is None


def test_what_the_policy_is_asked_and_what_of_its_answer_is_taken():
    rows = [{"text": "a?"}, {"text": "b?", "image": "b.png"}]
    assert "about the pictures" in request(rows) and "about the pictures" not in request(rows[::-1])
    assert new_instruction("<think>hm</think>Question: What now?") == "What now?"
    assert new_instruction("<think>hm") == ""

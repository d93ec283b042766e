"""Mixtures, hints and replay: shares and stages by counting, prompts by iteration and seed."""

import json
from collections import Counter
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmrl import config
from mmrl.config import build
from mmrl.core.errors import UserError
from mmrl.core.registry import DATA, load_built_in
from mmrl.data.base import Outcome, batch, pick
from mmrl.experiment import state
from mmrl.zoo.curricula.curriculum import Replay, pieces
from tests.train.test_trainer import make_trainer

load_built_in()
COUNT = 7


@pytest.fixture
def files(tmp_path):
    found = {}
    for name, size in (("words", 11), ("pictures", 5)):
        lines = [{"text": f"{name} {i}", "answer": f"{i} a b c"} for i in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        found[name] = {"prompts": {"path": f"{tmp_path}/{name}.jsonl", "held_out": 0.0}}
    return found


def made(files, **options):
    return build({"mixture": {"sources": files, **options}}, DATA)


def drawn(prompts, iterations, count=COUNT):
    return [p for i in range(iterations) for p in batch(prompts, count, i, seed=3)]


@pytest.mark.parametrize(
    "weights", [{"words": 0.75, "pictures": 0.25}, {"words": 1, "pictures": 9}, {"pictures": 2}]
)
def test_shares_are_met_after_every_iteration_and_sources_go_through_their_epochs(files, weights):
    mixed = made(files, weights=weights).train
    total = sum(weights.values())
    for iterations in (1, 3, 10):
        found = drawn(mixed, iterations)
        count = Counter(p["source"] for p in found)
        for name in files:
            assert abs(count[name] - len(found) * weights.get(name, 0) / total) <= 1
            own = Counter(p["text"] for p in found if p["source"] == name)
            assert not own or max(own.values()) - min(own[t] for t in own) <= 1
            if count[name] >= len(mixed.members[name]):
                assert len(own) == len(mixed.members[name])


def test_stages_begin_at_their_iteration_and_resume_needs_no_memory(files):
    stages = [[0, {"words": 1}], [4, {"words": 1, "pictures": 3}], [8, {"pictures": 1}]]
    one = made(files, stages=stages).train
    two = made(files, stages=stages).train
    kinds = [Counter(p["source"] for p in batch(one, 8, i, 0)) for i in range(12)]
    assert kinds[:4] == [{"words": 8}] * 4 and kinds[8:] == [{"pictures": 8}] * 4
    assert kinds[4:8] == [{"words": 2, "pictures": 6}] * 4
    assert batch(two, 8, 9, 0) == batch(one, 8, 9, 0) != batch(two, 8, 9, 1)
    picked = Counter(pick(one, u / 400, 5)["text"] for u in range(400))
    assert sum(n for text, n in picked.items() if "pictures" in text) == 300 and len(picked) == 16


def test_mistakes_are_named_before_anything_is_read_or_built(files, monkeypatch):
    """The options of a curriculum are fields; building it would read what it is wrapped around."""
    for options, sentence in (
        ({"weights": {"wrods": 1}}, "weights are given for wrods; sources: words, pictures"),
        ({"stages": [[5, {"words": 0}]]}, "from iteration 5 on no source"),
        ({"stages": [[5, {"words": 1}], [5, {"words": 1}]]}, "must rise"),
    ):
        with pytest.raises(UserError, match=sentence):
            made(files, **options)
    file = Path(__file__).resolve().parents[2] / "configs/digits/flow_grpo.yaml"
    monkeypatch.setattr(Replay, "__post_init__", lambda self, of: pytest.fail("it was built"))
    config.check(config.load(file, ["data={replay: {of: {digits: {kind: pairs}}}}"]))


@pytest.mark.parametrize(
    "value", ["one two  three", "a\nb\nc\n", "<tr><td>1 2</td></tr>", ["first", ["second", "2nd"]]]
)
def test_pieces_are_the_whole(value):
    whole = value if isinstance(value, str) else "first\nsecond\n"
    assert "".join(pieces(value)) == whole and len(pieces(value)) > 1


def test_hints_are_a_part_of_the_answer_that_fades(files):
    options = {"share": 0.5, "over": 4, "before": "<answer>"}
    source = build({"hints": {"of": files["words"], **options}}, DATA)
    for i, share in enumerate((2, 1, 1, 0, 0, 0)):  # of 4 pieces
        for prompt in batch(source.train, 3, i, 0):
            number = prompt["answer"].split()[0]
            wanted = ["", f"<answer>{number} ", f"<answer>{number} a "][share]
            assert prompt.get("prefill", "") == wanted
    assert not any("prefill" in p for p in [*source.train, *source.held_out])


def replay(files, **options):
    return build({"replay": {"of": files["words"], "share": 0.5, **options}}, DATA).train


def test_hard_prompts_come_again_once_and_solved_ones_do_not(files):
    one = replay(files)
    first = batch(one, 4, 0, 0)
    assert batch(one, 4, 0, 0) == first
    results = zip(first, ((1.0, True), (0.1, False), (0.7, True), (0.7, False)))
    one.learn([Outcome(prompt["entry"], *result) for prompt, result in results])
    _, hard, flat, _ = first
    assert one.waiting == [hard["entry"], flat["entry"]]
    two = replay(files)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    second = batch(one, 4, 1, 0)
    assert second[2:] == [hard, flat] and batch(two, 4, 1, 0) == second
    one.learn([Outcome(p["entry"], 0.2 if p == hard else float("nan"), False) for p in second])
    assert one.waiting == [hard["entry"]]


def trainer_of(reward, lr=0.0, below=0.3, **options):
    prompts = [{"text": f"{i}", "label": i % 2} for i in range(16)]
    source = Replay(SimpleNamespace(train=prompts, held_out=[]), share=0.5, below=below)
    sizes = {"prompts_per_iteration": 4, "group_size": 4, "train_batch_size": 16}
    return make_trainer("causal", reward, lr, prompts=source.train, **sizes, **options)


def test_data_hear_of_groups_that_gave_way():
    """Half of the prompts earn nothing: whoever takes their places in the update, they were hard
    and come again."""
    asked = {}

    def reward(media, prompts):
        asked.update({p["entry"]: p["label"] for p in prompts})
        return torch.tensor([p["label"] * (0.5 + 0.1 * (i % 4)) for i, p in enumerate(prompts)])

    trainer = trainer_of(reward, dynamic_sampling_rounds=2)
    for _ in range(3):
        before = {*trainer.prompts.waiting}
        asked.clear()
        trainer.iterate()
        hard = {entry for entry, good in asked.items() if not good}
        assert {*trainer.prompts.waiting} == before - {*asked} | hard
        assert trainer.prompts.waiting


def test_training_with_replay_goes_on_from_a_checkpoint_to_the_bit():
    def threes(media, prompts):
        return (media == 3).float().mean(1)

    options = {"lr": 3e-3, "below": 0.4, "dynamic_sampling_rounds": 1}
    one, two = (trainer_of(threes, **options) for _ in range(2))
    for _ in range(3):
        one.iterate()
    assert one.prompts.waiting
    arrays, meta = state.capture(one)
    state.restore(two, deepcopy(arrays), json.loads(json.dumps(meta)))
    assert two.prompts.waiting == one.prompts.waiting
    for _ in range(2):
        one.iterate()
        two.iterate()
    assert two.prompts.waiting == one.prompts.waiting
    weights = [x.policy.weights.full() for x in (one, two)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

"""Mixtures, hints and replay: shares, epochs and stages by counting; prompts by iteration and seed
alone."""

import json
from collections import Counter
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmrl import advantages, config
from mmrl.config import build
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import DATA, load_built_in
from mmrl.core.types import Rewards
from mmrl.data.base import Outcome, batch, pick
from mmrl.experiment import state
from mmrl.experiment.build import admitted
from mmrl.objectives import PolicyGradient
from mmrl.scoring import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.curricula.curriculum import Mixture, Replay, pieces
from tests.fixtures import toys
from tests.fixtures.records import make_rollout

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
    assert pick(one, 0.999, 0)["source"] == "words" and pick(one, 0.0, 9)["source"] == "pictures"
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
    found = config.load(file, ["data={mixture: {sources: {a: {prompts: {path: lost.txt}}}}}"])
    with pytest.raises(UserError, match=r"data.mixture.sources.a.prompts.path: no such file"):
        config.check(found)
    monkeypatch.setattr(Replay, "__post_init__", lambda self, of: pytest.fail("it was built"))
    config.check(config.load(file, ["data={replay: {of: {digits: {kind: pairs}}}}"]))


# hints


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


def test_what_a_policy_leaves_out_leaves_every_curriculum(files):
    class Short:
        """A policy that cannot take every other prompt."""

        def admit(self, prompts):
            return prompts[::2]

    source = build({"hints": {"of": {"replay": {"of": {"mixture": {"sources": files}}}}}}, DATA)
    left = admitted(Short(), source).train
    assert type(left) is type(source.train) and len(left) == 8
    assert {p["text"] for p in drawn(left, 8, count=8)} == {p["text"] for p in left}
    assert isinstance(left.inner.inner, Mixture)


# replay


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
    few = replay(files, size=3)
    few.learn([Outcome(entry, 0.0, True) for entry in range(5)])
    assert few.waiting == [2, 3, 4], "the oldest are forgotten"


def test_a_state_of_an_earlier_version_is_refused(files):
    """Hints had the state of what they modify as their own."""
    inner = {"replay": {"of": files["words"], "share": 0.5}}
    one = build({"hints": {"of": inner, "field": "text"}}, DATA).train
    with pytest.raises(UserError, match="earlier version, .* [(]waiting[)] .* start: FOLDER"):
        one.load_state_dict(one.state_dict()["inner"])
    one.load_state_dict({})  # of a run without hints


def test_outcomes_of_groups():
    group = torch.tensor([0, 0, 1, 1, 2, 2])
    shape = {"logprob": torch.zeros(6, 1), "mask": torch.ones(6, 1, dtype=bool)}
    prompts = [{"entry": 7}, {"entry": 8}, {"entry": 9}]
    rollout = make_rollout(group=group, row_id=group, sample=group, prompts=prompts, **shape)
    values = torch.tensor([1.0, 0.5, 0.25, 0.25, torch.nan, torch.nan])
    found = advantages.outcomes(Rewards({"r": values}, {"r": 2.0}), rollout)
    assert found[:2] == [Outcome(7, 1.5, False, (2.0, 1.0)), Outcome(8, 0.5, True, (0.5, 0.5))]
    assert found[2].entry == 9 and found[2].mean != found[2].mean and found[2].rewards == ()


def trainer_of(reward, lr=0.0, below=0.3, **options):
    prompts = [{"text": f"{i}", "label": i % 2} for i in range(16)]
    source = Replay(SimpleNamespace(train=prompts, held_out=[]), share=0.5, below=below)
    return Trainer(
        toys.ToyCausal(),
        source.train,
        Scorer({"some": reward}),
        advantages.grpo,
        PolicyGradient(),
        partial(adamw, lr=lr),
        TrainOptions(4, 4, 16, 6, **options),
    )


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
        metrics = [x.iterate() for x in (one, two)]
        for name in ("reward/mean", "loss", "resample/groups"):
            assert metrics[0][name] == metrics[1][name]
    assert two.prompts.waiting == one.prompts.waiting
    weights = [x.policy.weights.full() for x in (one, two)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

"""Single-stream SPO's drift: the answers of a prompt's last visit, scored again under the current
weights; and the prompts drawn by the tracker that forgets by it."""

import json
import math
from statistics import fmean

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in
from mmrl.data.base import Outcome, batch
from mmrl.zoo.advantages.baseline import SingleStream
from mmrl.zoo.curricula.tracked import SingleStreamData
from mmrl.zoo.stages.visits import Visits
from samplers.noise import Rng
from tests.fixtures import toys
from tests.fixtures.records import make_rollout
from tests.fixtures.stages import met
from tests.rollout.test_past import exchange, made, moved

load_built_in()
SEED = 5


@pytest.mark.parametrize("kind", ["flow", "causal", "vlm", "maskgit"])
def test_the_answers_of_then_are_scored_again_by_the_weights_of_now(kind):
    answers, policy = 2, made(kind)
    prompts = [{**prompt, "entry": 10 + i} for i, prompt in enumerate(toys.prompts(3))]
    stage = met(Visits(answers=answers), policy, prompts)
    first, known, counts = exchange(stage, prompts[:2], [0.0] * 6, 0)
    assert known.rollout.record("drift").tolist() == [0.0] * 6
    assert counts["policy_drift/prompts"] == 0
    tensors, plain = stage.state_dict()
    moved(policy, 0.02)
    again = met(Visits(answers=answers), policy, prompts)
    again.load_state_dict(tensors, json.loads(json.dumps(plain)))
    results = []
    for one in (stage, again):
        _, known, counts = exchange(one, [prompts[1], prompts[2]], [0.0] * 6, 1)
        results.append(known.rollout.record("drift"))
        assert counts["policy_drift/prompts"] == 1
    assert torch.equal(*results)
    expected = []
    for row in range(3, 3 + answers):  # of prompt 1, by itself
        old = first.rollout[row : row + 1]
        gaps = []
        for point in policy.path(old):
            gap = (policy.dist(point).log_prob(point.target) - point.recorded).abs()
            gaps += gap[point.mask].tolist()
        expected.append(fmean(gaps))
    assert results[0][3:].tolist() == [0.0] * 3
    assert results[0][:3].tolist() == pytest.approx([fmean(expected)] * 3, rel=1e-3, abs=1e-5)
    assert results[0][0] > 1e-4


def test_the_tracker_forgets_by_the_measured_drift():
    advantage = SingleStream(drift="kl")
    rollout = make_rollout(
        group=torch.tensor([0, 1]),
        row_id=torch.arange(2),
        prompts=({"text": "a"}, {"text": "b"}),
        sample=torch.zeros(2, 1),
        mask=torch.ones(2, 1).bool(),
        logprob=torch.zeros(2, 1),
    )
    with pytest.raises(UserError, match="add policy_drift to train.stages"):
        advantage(torch.tensor([1.0, 0.0]), rollout)
    drifts = [0.01, 5.0]
    drift = torch.tensor(drifts, dtype=torch.float64)
    advantage(torch.tensor([1.0, 0.0]).double(), rollout.recorded("drift", drift))
    for name, reward, drift in zip("ab", [1.0, 0.0], drifts):
        rho = min(max(2 ** (-drift / 0.06), 0.875), 0.96)
        alpha, beta = rho / 2 + reward, rho / 2 + 1 - reward
        assert advantage.trackers[name][:2] == pytest.approx([alpha, beta], abs=1e-9)


class Texts:
    held_out = []

    def __init__(self, count):
        self.train = [{"text": str(i)} for i in range(count)]


def test_prompts_are_drawn_by_the_tracker_by_loop():
    data = SingleStreamData(Texts(12), explore=0.1, low=-1.0, high=3.0).train
    alpha = dict.fromkeys(range(12), 0.5)
    beta = dict.fromkeys(range(12), 0.5)
    for iteration in range(6):
        prompts = batch(data, 4, iteration, SEED)
        u = Rng.of(SEED, "single_stream", iteration).uniform(torch.arange(12)).tolist()
        keys = {}
        for entry in range(12):
            v = alpha[entry] / (alpha[entry] + beta[entry])
            assert data.rate(entry) == pytest.approx(v, abs=1e-9)
            keys[entry] = math.log(u[entry]) / (math.sqrt(v * (1 - v)) + 0.1)
        order = sorted(keys, key=lambda entry: -keys[entry])[:4]
        assert [prompt["entry"] for prompt in prompts] == order
        assert batch(data, 4, iteration, SEED) == prompts, "repeatable until learn"
        drifts = {entry: 0.004 * entry for entry in order[:3]}
        data.see("drift", drifts)
        rewards = {entry: (3.0, 1.0 if entry % 2 else -1.0) for entry in order}
        for entry in order:
            rho = min(max(2 ** (-drifts.get(entry, 0.0) / 0.06), 0.875), 0.96)
            right = [(reward + 1) / 4 for reward in rewards[entry]]
            alpha[entry] = rho * alpha[entry] + sum(right)
            beta[entry] = rho * beta[entry] + 2 - sum(right)
        data.learn([Outcome(e, fmean(r), False, r) for e, r in rewards.items()])
    resumed = SingleStreamData(Texts(12), explore=0.1, low=-1.0, high=3.0).train
    resumed.load_state_dict(json.loads(json.dumps(data.state_dict())))
    assert batch(resumed, 4, 6, SEED) == batch(data, 4, 6, SEED)


def test_a_reference_begins_the_tracker(tmp_path):
    path = tmp_path / "reference.jsonl"
    rewards = {0: [1.0] * 8, 1: [0.0] * 8, 2: [1.0, 0.0] * 4}
    lines = [json.dumps({"text": str(i), "reward": r}) for i, r in rewards.items()]
    path.write_text("\n".join(lines))
    data = SingleStreamData(Texts(3), path=path, candidates=3.0).train
    assert data.rate(0) == pytest.approx(8.5 / 9) and data.rate(2) == pytest.approx(0.5)
    for options in ({"forget_min": 0.97}, {"low": 1.0}):
        with pytest.raises(UserError, match="single_stream: "):
            SingleStreamData(Texts(3), **options)

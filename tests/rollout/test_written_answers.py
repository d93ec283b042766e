"""Demonstrations in the groups: read, scored, with which log-probs, imitated (CHORD) and compared
in pairs."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torchvision.utils import save_image

from mmrl.advantages import dr_grpo
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.types import Provenance, Renoised, Rewards, TokenOrder
from mmrl.objectives import PolicyGradient
from mmrl.objectives.terms.imitation import Supervision
from mmrl.rollout.stages import Drawn, Setup, set_apart, stages_of
from mmrl.scoring.scorer import Scorer
from mmrl.train.optimizers import adamw
from mmrl.train.trainer import Trainer
from mmrl.zoo.objectives import DPO, IPO
from mmrl.zoo.objectives.group_loss import Groups, Samples
from mmrl.zoo.objectives.preference import DiffusionDPO
from mmrl.zoo.stages.answers import of_file
from mmrl.zoo.stages.written_answers import Demonstrated
from samplers.noise import Rng
from tests.fixtures import demonstrations, tiny_vlms, toys
from tests.fixtures.records import make_rollout
from tests.fixtures.stages import assert_recorded
from tests.policies.vlm.test_vlm_policy import policy_of, quiet  # noqa: F401
from tests.train.test_trainer import make_trainer

COPIES = 3


def asked(count=4):
    return [{"text": f"what is {i}?", "images": [tiny_vlms.image(56, 56, i)]} for i in range(count)]


class Taught(toys.ToyCausal):
    """Takes answers that are written as digits."""

    def demonstrate(self, prompts, answers, rng):
        fits = [answer is not None and len(answer) == self.length for answer in answers]
        ids = torch.tensor(
            [
                [int(c) for c in answer] if fit else [0] * self.length
                for answer, fit in zip(answers, fits)
            ]
        )
        fit = torch.tensor(fits)
        rows = make_rollout(
            group=torch.arange(len(ids)),
            cond=self.encode(prompts),
            row_id=rng.rows(len(ids), 1),
            sample=ids,
            logprob=torch.zeros(ids.shape, dtype=self.dtype),
            mask=fit[:, None].expand(ids.shape),
            trajectory=TokenOrder(commit_step=torch.arange(self.length).expand(ids.shape)),
            prompts=tuple(prompts),
            provenance=Provenance(is_ground_truth=fit),
        )
        (point,) = self.path(rows)
        with torch.no_grad():
            return rows.replace(logprob=self.dist(point).log_prob(ids))


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def stage_of(policy, prompts, **options):
    trainer = make_trainer(policy=policy)
    chosen = replace(trainer.options, stages=(Demonstrated(**options),))
    setup = Setup(chosen, policy, prompts, {}, trainer._behavior, trainer._score)
    (stage,) = stages_of(setup)
    return stage


def put(stage, prompts, rewards, iteration=0):
    policy = stage.run.policy
    with torch.no_grad():
        rollout = policy.rollout(prompts, COPIES, Rng.of("own", iteration))
    fresh = Drawn(rollout, policy.decode(rollout), Rewards({"toy": torch.tensor(rewards).float()}))
    stage.begin(iteration)
    stage.observe(prompts, fresh)
    return (fresh, *stage.groups(fresh, iteration, None))


def test_answers_of_a_file_join_their_groups(tmp_path):
    prompts = [{"text": f"p{i}", "label": i % 2} for i in range(3)]
    path = lines(
        tmp_path / "answers.jsonl",
        {"prompt": "p0", "answers": ["333333", {"text": "012340", "reward": 0.25}]},
        {"prompt": "p2", "answer": {"text": "442200", "logprobs": [-0.1 * i for i in range(6)]}},
        {"prompt": "p2", "answers": ["far too long"]},
    )
    policy = Taught()
    stage = stage_of(policy, prompts, path=path, number=2, logprob="recorded")
    fresh, mixed, counts = put(stage, prompts, [0, 1, 0, 0, 0, 0, 1, 0, 0.0])
    rollout = mixed.rollout
    assert counts == {"demonstrations/rows": 3.0}, "one does not fit"
    expert = rollout.provenance.is_ground_truth
    assert expert.tolist() == [False] * 3 + [True] * 2 + [False] * 6 + [True]
    assert rollout.group.tolist() == [0] * 5 + [1] * 3 + [2] * 4
    assert rollout.row_id.tolist() == list(range(12))
    assert mixed.rewards["toy"][expert].tolist() == [1.0, 0.25, 0.0], "scored, but for the second"
    assert rollout.sample[3].tolist() == [3] * 6
    assert torch.equal(rollout.sample[~expert], fresh.rollout.sample)
    known = rollout.provenance.is_replayed
    assert_recorded(policy, rollout[~known])
    assert known.tolist() == [False] * 11 + [True], "whose behaviour policy is known"
    expected = torch.tensor([-0.1 * i for i in range(6)])
    torch.testing.assert_close(rollout.logprob[11], expected, atol=1e-6, rtol=0)
    sampled, rewards = mixed.sampled()
    assert len(sampled) == 9 and rewards["toy"].sum() == 2, "statistics are of what was sampled"


def test_the_ratio_by_convention_and_only_groups_without_a_right_answer_get_help(tmp_path):
    """Where the behaviour policy is taken as 1, the ratio is the probability."""
    prompts = [{"text": f"p{i}", "label": 0, "expert": "333333"} for i in range(2)]
    options = {"field": "expert", "when": "all_wrong", "until": 3, "logprob": "one"}
    stage = stage_of(Taught(), prompts, place="replace", **options)
    _, mixed, _ = put(stage, prompts, [0, 1, 0, 0, 0, 0.0])
    assert mixed.rollout.provenance.is_ground_truth.tolist() == [False] * 5 + [True]
    (point,) = stage.run.policy.path(mixed.rollout)
    logp = stage.run.policy.dist(point).log_prob(point.target)
    ratio = (logp - point.replace(on_policy=True).old(logp, point.recorded)).exp()
    torch.testing.assert_close(ratio[-1], logp[-1].exp(), atol=1e-5, rtol=0)
    assert not put(stage, prompts, [0.0] * 6, 3)[1].rollout.provenance.is_ground_truth.any()


def test_what_is_wrong_with_answers_is_a_sentence(tmp_path):
    path = tmp_path / "a.jsonl"
    prompts = toys.prompts(1)
    bad = {"prompt": prompts[0]["text"], "answer": {"text": "333333", "logprobs": [0.0]}}
    stage = stage_of(Taught(), prompts, path=lines(path, bad), logprob="recorded")
    with pytest.raises(UserError, match="has 1 logprobs, but 6 tokens"):
        put(stage, prompts, [0, 0, 0.0])
    lines(path, {"prompt": "p", "answer": "x"}, {"prompt": "p"})
    for make, sentence in (
        (lambda: of_file(path), r"a.jsonl:2: expected .*answers"),
        (lambda: of_file(tmp_path / "no"), "the answers of train.stages.demonstrations.path"),
        (Demonstrated, "set either path, a .jsonl file, or field"),
        (lambda: stage_of(toys.ToyFlow(), prompts, field="expert"), "ToyFlow takes no demonstr"),
    ):
        with pytest.raises(UserError, match=sentence):
            make()
    lines(path, {"prompt": "p", "answer": "x"})
    with pytest.raises(UserError, match="has no answer to any prompt of the data"):
        stage_of(Taught(), prompts, path=path)


def test_a_vlm_scores_somebody_elses_answer_as_its_own():
    policy = policy_of(max_new_tokens=8)
    prompts = asked(3)
    with torch.no_grad():
        rows = policy.demonstrate(prompts, ["a", None, "b " * 40], Rng.of(1))
        own = policy.rollout(prompts, 1, Rng.of(1))
    assert rows.provenance.is_ground_truth.tolist() == [True, False, False]
    assert rows.mask.any(1).tolist() == [True, False, False] and rows.mask.shape == own.mask.shape
    assert policy.decode(rows)[0].startswith("a")
    assert_recorded(policy, rows)


def assert_same_slopes(loss, expected, policy):
    torch.testing.assert_close(loss, expected, atol=1e-9, rtol=0)
    weights = [p for p in policy.net.parameters() if p.requires_grad]
    slopes = (torch.autograd.grad(x, weights, retain_graph=True) for x in (loss, expected))
    for slope, of in zip(*slopes, strict=True):
        torch.testing.assert_close(slope, of, atol=1e-9, rtol=0)


@pytest.mark.parametrize("phi", [False, True])
def test_chord_by_loop(phi):
    """(1 - mu) mean of -A rho over the policy's tokens + mu mean of -phi log p over the expert's;
    in any passes."""
    policy = Taught()
    policy.net.double()
    prompts = toys.prompts(2)
    with torch.no_grad():
        rollout = policy.rollout(prompts, 4, Rng.of(5))
    expert = torch.tensor([False, False, False, True] * 2)
    mask = torch.arange(6) < torch.tensor([6, 2, 5, 3, 1, 6, 4, 6])[:, None]
    advantage = torch.linspace(-1, 1, 8).double()[:, None]
    rollout = rollout.replace(
        mask=mask, advantage=advantage, provenance=Provenance(is_ground_truth=expert)
    )
    objective = PolicyGradient(sft=Supervision(peak=0.7, valley=0.7, phi=phi))
    (point,) = policy.path(rollout)
    assert objective.couples(policy) == "rows" and not list(objective.unfit(policy))
    measured = objective.measure(policy, point)
    coupled = objective.couple(point, measured)
    logp = policy.dist(point).log_prob(point.target)
    own, written = [], []
    for row in range(8):
        for place in range(6):
            if mask[row, place]:
                value = logp[row, place]
                p = float(value.detach().exp())
                if expert[row]:
                    written.append(-value * (p * (1 - p) if phi else 1))
                else:
                    own.append(-advantage[row, 0] * (value - value.detach()).exp())
    expected = 0.3 * sum(own) / len(own) + 0.7 * sum(written) / len(written)
    for size in (8, 3):
        parts = [objective.loss(policy, part)[part.mask].sum() for part in coupled.split(size)]
        assert_same_slopes(sum(parts) / mask.sum(), expected, policy)


def test_the_weight_of_imitation_rises_and_falls():
    sft = Supervision(peak=0.9, valley=0.1, warmup_iterations=4, decay_iterations=8)
    for iteration in range(20):
        if iteration < 4:
            expected = iteration / 4 * 0.9
        elif iteration < 12:
            expected = 0.1 + 0.8 * (1 + math.cos(math.pi * (iteration - 4) / 8)) / 2
        else:
            expected = 0.1
        assert sft.mu(iteration) == pytest.approx(expected, abs=1e-12)
    flow = toys.make("flow")
    assert not list(PolicyGradient(sft=sft).unfit(flow))
    phi = PolicyGradient(sft=replace(sft, phi=True))
    assert dict(phi.unfit(flow))["sft"].startswith("phi weighs tokens")


def imitating(folder, **options):
    """A flow policy with external images, its trainer and the mixed rows of an iteration."""
    policy, rows = demonstrations.make("module", double=True)
    prompts = []
    for place, row in enumerate(rows[:2]):
        path = folder / f"{place}.png"
        save_image(demonstrations.picture(place, 8), path)
        prompts.append({"text": row["text"], "label": row["label"], "answer_path": str(path)})
    stages = (Demonstrated(field="answer_path", own_baseline=True),)
    sizes = {"prompts_per_iteration": 2, "group_size": 3, "train_batch_size": 6, "iterations": 30}
    objective = PolicyGradient(sft=Supervision(peak=0.7, valley=0.7))
    scorer = Scorer({"red": demonstrations.reddish})
    chosen = TrainOptions(**sizes, stages=stages, **options)
    return Trainer(policy, prompts, scorer, dr_grpo, objective, partial(adamw, lr=3e-3), chosen)


@pytest.mark.parametrize("micro_batch_size", [4, None])
def test_chord_of_flows_by_loop(micro_batch_size, tmp_path):
    """(1 - mu) mean of -A rho over the policy's steps + mu mean of |v - v*|^2 over external images
    at fresh noise; in any passes, of one kind each."""
    trainer = imitating(tmp_path, micro_batch_size=micro_batch_size)
    batch = trainer.collect()
    rollout = batch.rollout
    expert = rollout.provenance.is_ground_truth
    assert int(expert.sum()) == 2 and not rollout.mask[expert].any()
    passes = trainer.update.passes
    rng = Rng.of(3)
    points = passes.points(rollout, rng, on_policy=True)
    rows = passes.most_rows()
    count, cut = passes.cut(batch, points, rows, rng, couple=True)
    cut = list(cut)
    assert len(cut) == count and all(len(point) <= rows for point in cut)
    kinds = [isinstance(point.step, Renoised) for point in cut]
    assert kinds == sorted(kinds) and any(kinds) and not all(kinds)
    total = sum(point.mask.sum() for point in cut)
    loss = sum(trainer.objective.loss(trainer.policy, point)[point.mask].sum() for point in cut)
    own, others = [], []
    for point in points:
        for row in range(len(point)):
            one = point[row : row + 1]
            if not one.mask.any():
                continue
            dist = trainer.policy.dist(one)
            if isinstance(one.step, Renoised):
                others.append((dist.mean - one.target).square().mean())
            else:
                logp = dist.log_prob(one.target)
                own.append((-one.advantage * (logp - logp.detach()).exp()).sum())
    assert len(others) == 2
    expected = 0.3 * sum(own) / len(own) + 0.7 * sum(others) / len(others)
    assert_same_slopes(loss / total, expected, trainer.policy)


@pytest.mark.parametrize("kind", ["dpo", "rpo", "ipo"])
def test_pairs_of_a_file_are_compared_among_themselves(kind, tmp_path):
    """The loss of a group is that of the chosen and the rejected answer, by formula; the policy's
    own samples have no part in it."""
    prompts = toys.prompts(2)
    pair = [{"text": "333333", "reward": 1.0}, {"text": "120340", "reward": 0.0}]
    path = lines(tmp_path / "a.jsonl", *[{"prompt": p["text"], "answers": pair} for p in prompts])
    policy = Taught()
    policy.net.double()
    policy.weights.keep("ref")
    with torch.no_grad():
        for weight in policy.net.parameters():
            weight.add_(0.03)
    stage = stage_of(policy, prompts, path=path, number=2, own_baseline=True)
    _, mixed, _ = put(stage, prompts, [0.3, 0.7, 0.1, 0, 0, 0.5])
    compared = set_apart(mixed.rollout, stage.baseline_of)
    rollout = mixed.rollout.replace(advantage=dr_grpo(mixed.rewards, compared))
    own = ~rollout.provenance.is_ground_truth
    rollout = rollout.replace(advantage=rollout.advantage.double().masked_fill(own[:, None], 0.0))
    objective = {"dpo": DPO(), "rpo": DPO(sft=0.2), "ipo": IPO(tau=0.4)}[kind]
    (point,) = policy.path(rollout)
    coupled = objective.couple(point, objective.measure(policy, point))
    losses = objective.loss(policy, coupled)
    logp = policy.dist(point).log_prob(point.target).sum(1)
    with policy.weights.using("ref"), torch.no_grad():
        ratio = logp - policy.dist(point).log_prob(point.target).sum(1)
    for group in range(2):
        chosen = next(r for r in range(10) if rollout.group[r] == group and not own[r])
        margin = float(ratio[chosen] - ratio[chosen + 1])
        if kind == "ipo":
            expected = (margin - 1 / 0.8) ** 2
        else:
            expected = math.log1p(math.exp(-0.1 * margin))
            expected -= 0.2 * float(logp[chosen].detach()) if kind == "rpo" else 0.0
        rows = rollout.group == group
        found = losses[rows].detach()
        torch.testing.assert_close(found, torch.full_like(found, expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize("psi", ["sampled", "identity", "logit"])
def test_every_psi_by_loop(psi):
    """The margin of a pair is the difference of mean Psi(p(i > j)) over the group, over tau."""
    rewards = [0.3, 2.0, -1.0, 0.3, 1.5, 0.1]
    group = [0, 0, 0, 1, 1, 1]
    ratio = torch.linspace(-1, 1, 6).double()
    samples = Samples(
        ratio=ratio,
        logp=ratio,
        advantage=torch.tensor(rewards, dtype=torch.float64),
        length=torch.ones(6),
        groups=Groups(torch.tensor(group)),
    )
    loss = IPO(tau=0.5, psi=psi, temperature=0.7, pairs="all").of_group(samples)

    def standing(i):
        values = []
        for j in range(6):
            if group[j] == group[i]:
                p = 1 / (1 + math.exp(-(rewards[i] - rewards[j]) / 0.7))
                values.append(p if psi == "identity" else math.log(p / (1 - p)))
        return sum(values) / len(values)

    for name in (0, 1):
        terms = []
        for i in range(6):
            for j in range(6):
                if group[i] == group[j] == name and rewards[i] > rewards[j]:
                    margin = 1 / (2 * 0.5)
                    if psi != "sampled":
                        margin = (standing(i) - standing(j)) / 0.5
                    terms.append((float(ratio[i] - ratio[j]) - margin) ** 2)
        expected = sum(terms) / len(terms)
        assert loss[3 * name : 3 * name + 3].tolist() == pytest.approx([expected] * 3, abs=1e-9)


def test_pairs_of_pictures_of_a_file_are_learnt_by_every_family(tmp_path):
    """The preferred picture becomes likelier than the other; one a prompt is sampled besides."""
    policy, rows = demonstrations.make("module")
    prompts = [{"text": row["text"], "label": row["label"]} for row in rows[:2]]
    for place in (0, 1):
        save_image(demonstrations.picture(place, 8), tmp_path / f"{place}.png")
    pair = [{"image": "0.png", "reward": 1.0}, {"image": "1.png", "reward": 0.0}]
    path = lines(tmp_path / "a.jsonl", *[{"prompt": p["text"], "answers": pair} for p in prompts])
    stages = (Demonstrated(path=path, number=2, own_baseline=True),)
    options = TrainOptions(2, 1, 2, 12, stages=stages)
    scorer = Scorer({"red": demonstrations.reddish})
    objective, optimizer = DiffusionDPO(beta=10.0), partial(adamw, lr=3e-3)
    trainer = Trainer(policy, prompts, scorer, dr_grpo, objective, optimizer, options)
    losses = [trainer.iterate()["loss"] for _ in range(12)]
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.03

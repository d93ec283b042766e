"""``train.reuse_rollout_graph``: the first optimizer step goes back through the passes that sampled
its rows. The weights it comes to are those of passes of its own, to rounding in float64."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch

from mmrl import advantages
from mmrl.config.options import SlowFast, TrainOptions
from mmrl.config.unfit import unreusable
from mmrl.core.errors import UserError
from mmrl.core.registry import locate
from mmrl.objectives import AWM, GVPO, NFT, FlowDPPO, Guard, PolicyGradient
from mmrl.policies.diffusion.models.sd3 import SD3
from mmrl.policies.diffusion.trees import Tree
from mmrl.policies.rollout_graphs import RolloutGraphs
from mmrl.policies.vlm.policy import VLM
from mmrl.scoring import Scorer
from mmrl.train.trainer import Trainer
from samplers.windows import random_steps, random_window
from tests.fixtures import toys

SIZES = {
    "prompts_per_iteration": 4,
    "group_size": 4,
    "train_batch_size": 16,
    "iterations": 4,
    "max_grad_norm": None,
}
TWO_STEPS = {"train_batch_size": 8, "micro_batch_size": 3, "epochs": 2}


def reward(media, prompts):
    """Of some samples there is none."""
    values = -media.flatten(1).double().square().mean(1)
    return values.masked_fill(media.flatten(1)[:, 0] > 1, torch.nan)


def trainer(policy=None, objective=None, score=reward, **options):
    """Plain descent, since Adam's first step would hide a gradient that is too long."""
    return Trainer(
        policy or toys.make("flow", double=True, guidance_scale=2.0),
        toys.prompts(4),
        Scorer({"reward": score}, {"reward": 1.0}, 1.0),
        advantages.dance_grpo,
        objective or PolicyGradient(clip_range=1e-2, kl=0.1),
        partial(torch.optim.SGD, lr=1e-2),
        TrainOptions(**SIZES | options),
    )


def gap(plain, reusing):
    """The largest difference of two policies' weights."""
    weights = plain.policy.weights.full(), reusing.policy.weights.full()
    return max(float((weights[0][n] - weights[1][n]).abs().max()) for n in weights[0])


def both(make, iterations=2, **options):
    """Train with and without; returns how many passes of a row each decision saved."""
    plain, reusing = make(**options), make(**options, reuse_rollout_graph=True)
    start = {name: value.clone() for name, value in plain.policy.weights.full().items()}
    saved = []
    for _ in range(iterations):
        wanted, measured = plain.iterate(), reusing.iterate()
        assert measured["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-10)
        for name in ("loss", "kl", "clip_fraction", "reward/mean", "samples/excluded"):
            assert measured.get(name) == pytest.approx(wanted.get(name), abs=1e-10)
        saved.append((wanted["forwards"] - measured["forwards"]) / wanted["decisions"])
    assert gap(plain, reusing) < 1e-10
    moved = plain.policy.weights.full()
    assert max(float((moved[name] - start[name]).abs().max()) for name in start) > 1e-6
    return saved


def toy(objective=None, options=None, **train):
    policy = {"guidance_scale": 2.0} | (options or {})
    make = objective or (lambda: PolicyGradient(clip_range=1e-2, kl=0.1))
    return trainer(toys.make("flow", double=True, **policy), make(), **train)


# two branches of guidance make two passes; None: less, as later steps make their own
@pytest.mark.parametrize(
    ("objective", "policy", "options", "saved"),
    [
        (None, {}, {}, 2),
        (None, {}, {"micro_batch_size": 5}, 2),
        (None, {}, TWO_STEPS, None),
        (None, {"guidance_scale": 1.0}, {"reward_overlap_chunks": 2}, 1),
        (None, {"logprob_guidance": "guided_stopgrad_uncond"}, TWO_STEPS, None),
        (None, {"logprob_guidance": "conditional"}, {}, 1),
        (None, {"noise_window": partial(random_window, size=2)}, {}, 2),
        (None, {"noise_window": partial(random_steps, size=2)}, {"ema": 0.5}, 2),
        (None, {"offload_trajectory": True}, {"slow_fast": SlowFast()}, 2),
        (None, {}, {"loss_agg_mode": "seq_mean_token_mean"}, 2),
        (
            lambda: PolicyGradient(timestep_fraction=0.5),
            {},
            {"skip_zero_advantage": True},
            1,
        ),
        (lambda: Guard(kl=0.1), {}, {}, 2),
        (FlowDPPO, {}, {}, 2),
        (GVPO, {}, {"micro_batch_size": 5}, 2),
    ],
)
def test_the_gradient_is_that_of_passes_of_its_own(objective, policy, options, saved):
    passes = both(partial(toy, objective, policy), **options)
    assert passes == [saved] * 2 if saved else all(0 < number < 2 for number in passes)


def test_only_rows_of_the_first_step_and_steps_with_noise_are_recorded():
    run = trainer(
        toys.make("flow", noise_window=partial(random_window, size=2)),
        train_batch_size=8,
        micro_batch_size=3,
        reuse_rollout_graph=True,
    )
    batch = run.collect()
    first = next(
        run.update.passes.steps(batch.rollout, batch.group_sizes, run.update._rng(batch, 0))
    )
    recorded = batch.graphs.recorded
    # eight rows in passes of three, two steps
    assert [len(each.row_id) for each in recorded] == [3, 3, 3, 3, 2, 2]
    names = torch.cat([each.row_id for each in recorded]).unique()
    assert names.tolist() == first.row_id.sort().values.tolist()
    assert batch.rollout.row_id.tolist() == list(range(16))
    assert not batch.rollout.logprob.requires_grad and not batch.rollout.sample.requires_grad
    run.update.run(batch)
    assert not batch.graphs.recorded and run.policy.graphs is None


def test_adapters_and_recomputed_activations():
    """Stable Diffusion 3 itself, tiny, in float64, with adapters that have begun to learn."""
    folder = locate("world:digits/sd3-test")

    def make(**options):
        torch.manual_seed(0)
        policy = SD3(folder, size=32, steps=2, lora=2, guidance_scale=2.0)
        policy.net.double()
        for name, parameter in policy.net.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        return trainer(policy, **options)

    sizes = {"prompts_per_iteration": 2, "group_size": 2, "train_batch_size": 2}
    assert both(make, 1, **sizes, gradient_checkpointing=True)[0] > 0


def out_of_memory(policy, fails):
    """Let passes run out of memory where ``fails(recorded passes)`` says so."""
    plain = policy.velocity
    made = []

    def velocity(x, t, cond):
        if torch.is_grad_enabled() and policy.sampling:
            made.append(len(x))
            if fails(len(made)):
                raise torch.OutOfMemoryError("no room")
        return plain(x, t, cond)

    policy.velocity = velocity


def test_a_rollout_whose_graphs_do_not_fit_goes_on_without():
    plain = trainer()
    small = trainer(reuse_rollout_graph=True)
    out_of_memory(small.policy, lambda made: made > 3)
    for _ in range(2):
        wanted, measured = plain.iterate(), small.iterate()
    assert gap(plain, small) < 1e-10 and measured["forwards"] == wanted["forwards"]
    (sentence,) = small.policy.news
    assert "train.reuse_rollout_graph is off from now on" in sentence
    assert small.policy.most is None  # passes are as large as they were


def test_an_update_that_runs_out_of_memory_makes_its_own_passes():
    plain = trainer()
    small = trainer(reuse_rollout_graph=True)

    def backward(graphs):
        raise torch.OutOfMemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutGraphs, "backward", backward)
        wanted, measured = plain.iterate(), small.iterate()
    assert measured["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-10)
    assert gap(plain, small) < 1e-10
    assert not small.reuses and any("reuse_rollout_graph is off" in n for n in small.policy.news)


def test_what_was_not_sampled_so_is_computed():
    """Under other weights, with other guidance, without gradient, off the path."""
    run = trainer(reuse_rollout_graph=True)
    batch = run.collect()
    policy = run.policy
    rows = run.update.passes.points(batch.rollout, run._rng("update"), True)
    point = next(iter(rows))
    graphs = batch.graphs
    renoised = next(iter(policy.renoise(batch.rollout, run._rng("noise"))))
    with graphs.answering(policy):
        assert graphs.outputs_at(policy, point) is None  # an idle pass
        graphs.answers = True
        assert graphs.outputs_at(policy, point) is not None
        assert graphs.outputs_at(policy, point.replace(guidance=3.0)) is None
        assert graphs.outputs_at(policy, renoised) is None
        with policy.weights.using("ref"):
            assert graphs.outputs_at(policy, point) is None
        with torch.no_grad():
            assert graphs.outputs_at(policy, point) is None
    with pytest.raises(TypeError, match="graphs stay in the process"):
        pickle.dumps(graphs)


def test_a_step_without_a_lesson_frees_what_was_recorded():
    run = trainer(
        score=lambda media, prompts: torch.full((len(media),), torch.nan), reuse_rollout_graph=True
    )
    batch = run.collect()
    assert batch.graphs.recorded
    assert run.update.run(batch)["skipped_steps"] == 1 and not batch.graphs.recorded


@pytest.mark.parametrize(
    ("objective", "policy", "options", "why"),
    [
        (NFT, {"noise_level": 0.0}, {}, "NFT does not take its gradient at the decisions"),
        (AWM, {"noise_level": 0.0}, {}, "AWM does not take its gradient at the decisions"),
        (
            lambda: PolicyGradient(behavior_policy="old"),
            {},
            {},
            "the weights 'old' sample, not those that are trained",
        ),
        (PolicyGradient, {"tree": Tree(splits=(1,))}, {}, "samples of a tree share passes"),
        (PolicyGradient, {"sampling_memory_gib": 1.0}, {}, "sampling_memory_gib counts passes"),
        (
            PolicyGradient,
            {},
            {"dynamic_sampling_rounds": 2},
            "train.dynamic_sampling_rounds: rows or passes of the update are not those",
        ),
    ],
)
def test_what_would_not_be_exact_is_refused(objective, policy, options, why):
    with pytest.raises(UserError, match="train.reuse_rollout_graph: ") as error:
        toy(objective, policy, **options, reuse_rollout_graph=True)
    assert why in str(error.value)


def test_tokens_and_other_samplers_are_refused():
    options = TrainOptions(**SIZES)
    (line, *_) = unreusable(options, PolicyGradient, toys.ToyCausal)
    assert "of models that write tokens only vision-language models" in line
    assert not [*unreusable(options, PolicyGradient, VLM)]
    assert not [*unreusable(options, PolicyGradient, toys.ToyFlow)]
    run = trainer(reuse_rollout_graph=True)
    run.draw = lambda *call: None
    with pytest.raises(UserError, match="rollout workers sample in other processes"):
        run.iterate()

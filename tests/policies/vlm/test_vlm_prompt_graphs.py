"""``train.reuse_rollout_graph`` of vision-language models: the first optimizer step goes back
through the pass that read the prompts, and attends by what sampling attended to."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from mmrl.advantages import flow_grpo
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.objectives import PolicyGradient
from mmrl.policies.vlm import compiled, cpu_attention, self_check
from mmrl.policies.vlm.parts import Parts
from mmrl.policies.vlm.policy import VLM
from mmrl.scoring import Scorer
from mmrl.train.trainer import Trainer
from samplers.noise import Rng
from tests.fixtures import tiny_vlms
from tests.policies.vlm.test_vlm_policy import point_of, quiet  # noqa: F401

image = tiny_vlms.image
ASKED = [
    {"text": "what is this?", "images": [image(56, 28, 0)]},
    {"text": "hello, what is a longer question?"},
    {"text": "and?", "images": [image(28, 28, 1), image(56, 56, 2)]},
    {"text": "again?", "images": [image(28, 56, 3)]},
]
SIZES = {
    "prompts_per_iteration": 4,
    "group_size": 3,
    "train_batch_size": 12,
    "iterations": 4,
    "max_grad_norm": None,
}
TWO_STEPS = {"train_batch_size": 6, "micro_batch_size": 4, "epochs": 2}


def score(media, prompts):
    """Of some answers there is none."""
    lengths = torch.tensor([float(len(answer) + answer.count("a")) for answer in media])
    return lengths.masked_fill(lengths.remainder(5) == 1, torch.nan)


def trainer(family="qwen2_5_vl", policy=None, prompts=ASKED, double=True, prepare=None, **options):
    """Plain descent, since Adam's first step would hide a gradient that is too long."""
    torch.manual_seed(0)
    asked = {"max_new_tokens": 9, "coordinate_space": "original"} | (policy or {})
    folder = family if isinstance(family, Path) else tiny_vlms.folder(family)
    made = VLM(str(folder), **asked)
    if double:
        made.net.double()
    made.ending = replace(made.ending, stops=tuple(range(0, 256, 16)))
    if prepare is not None:
        prepare(made)
    return Trainer(
        made,
        prompts,
        Scorer({"reward": score}, {"reward": 1.0}, 1.0),
        flow_grpo,
        PolicyGradient(clip_range=1e-2, kl=0.1),
        partial(torch.optim.SGD, lr=0.1),
        TrainOptions(**SIZES | options),
    )


@pytest.fixture
def exact(quiet, monkeypatch):  # noqa: F811
    """Norms and rotations of the libraries, which turn to float32, stay in float64."""
    to, single = torch.Tensor.to, torch.Tensor.float

    def kept(x, *args, **options):
        turns = torch.float32 in (*args, options.get("dtype"))
        return x if turns and x.dtype == torch.float64 else to(x, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", kept)
    monkeypatch.setattr(
        torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else single(x)
    )


def compare(make, iterations=2, atol=1e-10, plain_make=None, **options):
    """Train with and without; returns the shares of pictures that passed the tower, of both."""
    plain, reusing = (plain_make or make)(**options), make(**options, reuse_rollout_graph=True)
    before = {name: value.clone() for name, value in plain.policy.weights.full().items()}
    towered = []
    for _ in range(iterations):
        wanted, measured = plain.iterate(), reusing.iterate()
        assert measured["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=atol)
        for name in ("loss", "kl", "clip_fraction", "reward/mean"):
            assert measured.get(name) == pytest.approx(wanted.get(name), abs=atol)
        names = "vlm/vision_passes"
        towered.append((wanted.get(names), measured.get(names)))
    weights = plain.policy.weights.full(), reusing.policy.weights.full()
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=atol, rtol=0, msg=name)
    moved = max(float((weights[0][name] - before[name]).abs().max()) for name in before)
    assert moved > 1e-4
    return towered


def half_lora(policy):
    for name, parameter in policy.net.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)


@pytest.mark.parametrize(
    ("family", "policy", "options"),
    [
        ("qwen2_5_vl", {}, {}),
        ("qwen2_5_vl", {}, {"micro_batch_size": 5}),
        ("qwen2_5_vl", {}, TWO_STEPS),
        # prompts of two passes, of unequal lengths, in one pass of the update
        ("qwen2_5_vl", {"fixed_batch_rows": 6}, {}),
        ("qwen2_5_vl", {"fixed_batch_rows": 5, "refill": "rows"}, {}),
        ("qwen2_5_vl", {}, {"gradient_checkpointing": True}),
        ("qwen2_5_vl", {"remove_padding": True}, {"micro_batch_size": 5}),
        ("qwen2_5_vl", {"lora": 2}, {"skip_zero_advantage": True}),
        ("llava", {}, {"loss_agg_mode": "seq_mean_token_mean"}),
        ("gemma3", {}, {}),
    ],
    ids=str,
)
def test_the_gradient_is_that_of_passes_of_its_own(family, policy, options, exact):
    prepare = half_lora if "lora" in policy else None
    make = partial(trainer, family, policy, prepare=prepare)
    if family == "gemma3":  # attends in windows, to all of a picture
        make = partial(make, prompts=ASKED[:1] * 4)
    for plain, reusing in compare(make, **options):
        assert reusing < plain or "lora" in policy  # a frozen tower looks once anyway


def test_a_frozen_tower_and_prompts_without_pictures(exact):
    parts = Parts(language="full", projector="frozen", vision="frozen")
    compare(partial(trainer, policy={"train": parts}), iterations=1)
    compare(partial(trainer, prompts=[{"text": "hello"}, {"text": "and?"}] * 2), iterations=1)


def collected(**options):
    run = trainer(reuse_rollout_graph=True, **options)
    return run, run.collect()


def test_other_prompts_and_passes_are_computed(quiet):  # noqa: F811
    run, batch = collected()
    policy, graphs = run.policy, batch.graphs
    point = point_of(policy, batch.rollout)
    with graphs.answering(policy):
        assert graphs.known(policy, point) is None  # an idle pass
        graphs.answers = True
        known = graphs.known(policy, point)
        assert known is not None and known.store is None  # nothing is compiled
        other = [{name: x.clone() for name, x in cond.items()} for cond in point.cond]
        assert graphs.known(policy, point.replace(cond=other)) is None
        copied = [dict(cond) for cond in point.cond]
        assert graphs.known(policy, point.replace(cond=copied)) is not None
        assert graphs.known(policy, point.replace(row_id=point.row_id + 100)) is None
        with policy.weights.using("ref"):
            assert graphs.known(policy, point) is None
        with torch.no_grad():
            assert graphs.known(policy, point) is None
    run.update.run(batch)
    assert not graphs.recorded and not graphs.places and policy.graphs is None


def test_only_prompts_of_the_first_step_are_recorded(quiet):  # noqa: F811
    run, batch = collected(policy={"fixed_batch_rows": 3}, train_batch_size=6)
    wanted = set(batch.graphs.rows.tolist())
    recorded = torch.cat([read.row_id for read in batch.graphs.recorded]).tolist()
    assert len(recorded) < len(batch.rollout) and wanted <= set(recorded)


def test_a_rollout_that_does_not_fit_goes_on_without(quiet):  # noqa: F811
    plain, small = trainer(), trainer(reuse_rollout_graph=True)
    read = small.policy.read

    def failing(cond, group):
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("no room")
        return read(cond, group)

    small.policy.read = failing
    for _ in range(2):
        assert small.iterate()["grad_norm"] == pytest.approx(plain.iterate()["grad_norm"], 1e-10)
    (sentence,) = small.policy.news
    assert "reuse_rollout_graph is off from now on" in sentence and "noise_window" not in sentence


@pytest.mark.parametrize(
    ("family", "policy", "why"),
    [
        ("qwen2_5_vl", {"engine": "hf"}, "needs the policy's own sampler"),
        ("qwen2_5_vl", {"prefix_sharing": "none"}, "prompts that are shared"),
        ("qwen3_5", {}, "keeps more of a prompt than keys and values"),
    ],
)
def test_what_is_sampled_otherwise_is_refused(family, policy, why, quiet):  # noqa: F811
    with pytest.raises(UserError, match="train.reuse_rollout_graph: ") as error:
        trainer(family, policy, double=False, reuse_rollout_graph=True)
    assert why in str(error.value)


def test_prompts_that_turn_out_not_to_be_shareable_are_read_anew(monkeypatch, quiet):  # noqa: F811
    monkeypatch.setattr(self_check, "shareable", lambda hf: False)
    run = trainer(double=False, reuse_rollout_graph=True)
    with pytest.warns(UserWarning, match="read once for every answer"):
        run.iterate()
    assert run.iterate()["grad_norm"] > 0


own_attention = pytest.mark.skipif(
    not cpu_attention.serves(16, torch.zeros(1)), reason="no AVX-512, or no C++ compiler"
)


@pytest.fixture(scope="module")
def wide(quiet, tmp_path_factory):  # noqa: F811
    return tiny_vlms.with_heads_of_16(tmp_path_factory.mktemp("vlm"))


@own_attention
@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (3, 3)], ids=str)
def test_what_steps_keep_is_what_the_pass_attends_to(heads):
    """Token by token, of rows that are at tokens of their own, among more that are kept."""
    rows, tokens, columns, size = 4, 7, 5, 16
    ops = torch.ops.mmrl_vlm
    shapes = [
        (rows, heads[0], tokens),
        *[(rows, heads[1], tokens)] * 2,
        *[(2, heads[1], columns)] * 2,
    ]
    x = [
        Rng.of(i).normal(torch.zeros(1), (torch.Size((*shape, size)).numel(),)).view(*shape, size)
        for i, shape in enumerate(shapes)
    ]
    q, k, v, pk, pv = x
    prompt_of, start = torch.tensor([0, 1, 1, 0]), torch.tensor([2, 0])
    kept = torch.full((2, tokens + 1, 6, heads[0], size), torch.nan)
    lse = torch.full(kept.shape[:-1], torch.nan)
    answers = torch.tensor([5, 0, 2, 3])
    for step in range(tokens):
        at = (step + torch.arange(rows)) % tokens  # each row at another token
        query = torch.stack([q[row, :, t] for row, t in enumerate(at)])[:, :, None]
        real = (torch.arange(tokens) <= at[:, None])[:, None, None]
        asked = (query, [k, v, pk, pv], prompt_of, start, real, 0.3)
        plain = ops.attend_step(*asked)
        assert torch.equal(ops.keep_step(*asked, kept, lse, answers, at, 1), plain)
    assert kept[0].isnan().all() and kept[1, :, 1].isnan().all() and kept[1, tokens].isnan().all()
    leaves = [tensor.requires_grad_() for tensor in x]
    wanted = ops.attend(*leaves, prompt_of, start, 0.3)
    recalled = ops.recall(*leaves, prompt_of, start, 0.3, kept[1], lse[1], answers)
    for one, other in zip(recalled, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-6)
    weights = torch.linspace(-1, 1, wanted[0].numel()).view_as(wanted[0])
    gradients = (
        torch.autograd.grad((out[0] * weights).sum(), leaves) for out in (recalled, wanted)
    )
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=5e-6, rtol=1e-5)


@own_attention
def test_a_token_that_was_not_read_has_no_gradient():
    ops = torch.ops.mmrl_vlm
    q, k, v, pk, pv = (torch.randn(1, 2, n, 16).mul(30).requires_grad_() for n in (3, 3, 3, 4, 4))
    kept, lse = torch.randn(3, 1, 2, 16), torch.full((3, 1, 2), torch.inf)
    zero = torch.zeros(1, dtype=torch.long)
    attended, _ = ops.recall(q, k, v, pk, pv, zero, zero, 1.0, kept, lse, zero)
    for gradient in torch.autograd.grad(attended.mul(0.0).sum(), (q, k, v, pk, pv)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@own_attention
@pytest.mark.parametrize(
    "rows", [{"refill": "rows", "fixed_batch_rows": 5}, {"fixed_batch_rows": 2}], ids=str
)
def test_a_compiled_update_attends_to_nothing_anew(rows, monkeypatch, wide):
    """Rows end early, leave, are filled again; answers to a prompt are written in two parts."""
    seen = []
    score_answers = compiled.Compiled.score_answers

    def scored(self, prefix, rows, ids, store=None):
        seen.append(store is not None)
        return score_answers(self, prefix, rows, ids, store)

    monkeypatch.setattr(compiled.Compiled, "score_answers", scored)

    def prepare(policy):
        policy.net.packs_sparse = False  # those passes are not compiled

    plain, make = (
        partial(trainer, wide, compiling | rows, double=False, prepare=prepare)
        for compiling in ({}, {"compile": "eager"})  # tracing is most of this test's time
    )
    sizes = {"epochs": 2} if "refill" in rows else {"group_size": 4, "train_batch_size": 16}
    compare(make, iterations=1, atol=2e-5, plain_make=plain, **sizes)
    assert any(seen) and not all(seen)


@own_attention
def test_other_tokens_are_attended_anew_and_memory_is_kept(wide):
    run = trainer(wide, {"compile": "eager"}, double=False, reuse_rollout_graph=True)
    batch = run.collect()
    policy, graphs = run.policy, batch.graphs
    point = point_of(policy, batch.rollout)
    graphs.answers = True
    known = graphs.known(policy, point)
    assert known.store.rows.tolist() == list(range(12))
    policy.room.lse[1, 0, 7] = torch.inf  # as of a row that was sampled by other code
    assert graphs.known(policy, point).store is None
    policy.room.lse[1, 0, 7] = 0.0
    assert graphs.known(policy, point).store is not None
    changed = point.target.clone()
    changed[3, 0] += 1
    assert graphs.known(policy, point.replace(target=changed)).store is None
    # what lies behind an answer counts for nothing
    lengths = batch.rollout.mask.sum(1)
    finite = known.store.lse[:, :, :, 0].isfinite().sum(1)
    assert bool((finite >= lengths - 1).all())
    room = policy.room.attended.data_ptr()
    run.update.run(batch)
    policy.room.lse.zero_()
    run.iterate()
    assert policy.room.attended.data_ptr() == room
    assert (policy.room.lse[:, -1] == torch.inf).all()  # nobody reads the last token

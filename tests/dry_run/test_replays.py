"""``--dry-run`` of replayed pipelines without a family: their own code on fake weights takes what a
real pass takes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from mmrl.apps.dry_run import published, replays
from mmrl.apps.dry_run.dryrun import dry_run
from mmrl.apps.dry_run.estimate import _passes, measure
from mmrl.apps.dry_run.fakes import Fakes
from mmrl.apps.dry_run.page import lines
from mmrl.apps.dry_run.rehearsal import flow, rehearse
from mmrl.apps.dry_run.tracked import passed, tracked
from mmrl.cli.app import app
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.experiment import build
from tests.fixtures import tiny_diffusers, tiny_modular
from tests.fixtures.replay_cases import CASES
from tests.policies.diffusion.test_modular import ALONE

load_built_in()
CONFIG = Path(__file__).parents[2] / "configs" / "digits" / "pipeline.yaml"
PLAIN = TrainOptions(2, 2, 4, 1)
WORDS = 16  # of a prompt: the tiny models have no room for more
SMALL = [
    *("train.prompts_per_iteration=2", "train.group_size=4", "train.train_batch_size=4"),
    *("train.micro_batch_size=2", "policy.pipeline.steps=4", "policy.pipeline.noise_window=all"),
]


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch):
    monkeypatch.setattr(replays, "WORDS", WORDS)


def chosen(name, **options):
    """Where a tiny pipeline lies, and what it is made with."""
    if name in ALONE:
        place, of_case = tiny_modular.folder(name), ALONE[name]
    else:
        case = CASES[name]
        alone = {} if case.together else {"together": False}
        place, of_case = tiny_diffusers.folder(name), {"call": case.call} | case.options | alone
    return place, of_case | {"steps": 4, "fixed_batch_rows": 2} | options


def real(place, options):
    """Track a pass of the real tiny model at the same decision."""
    policy = POLICIES.build("pipeline", path=str(place), check=False, **options)
    point = replays.point_of(policy, [policy.arguments.blank(WORDS)], 2, policy.steps // 2)
    with torch.no_grad():
        policy.dist(point)  # texts are encoded once
    before = policy.report.forwards
    taken = tracked(
        lambda: policy.dist(point).log_prob(point.target).sum().backward(), [policy.net]
    )
    return policy, taken, policy.report.forwards - before


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cogview4", {"guidance_scale": 2.5}),
        ("sana_sprint", {}),  # noise of the pipeline's own sampler
        ("hunyuan_i2v", {}),  # steps a part of its latents
        ("ltx2", {"lora": 2}),  # two states
        ("anima", {}),  # modular
    ],
)
def test_a_pass_on_fakes_is_a_real_one(name, options):
    """The others are tried by ``scripts/dev/replay_table.py --try``."""
    place, written = chosen(name, **options)
    stage = replays.replayed(place, written, PLAIN, 2)
    guess = rehearse(stage)
    policy, taken, rows = real(place, written)
    assert guess.update.flops == taken.flops and stage.network_rows == rows / 2
    assert guess.update.memory["total"] == pytest.approx(taken.memory["total"], rel=0.1)
    assert tuple(stage.policy.shape) == tuple(policy.shape)
    assert guess.trained == sum(p.numel() for p in policy.net.parameters() if p.requires_grad)
    assert guess.decoding is not None and guess.decoding.flops > 0
    known = {name: x.dtype for name, x in policy.net.named_buffers()}
    assert {name: x.dtype for name, x in stage.net.named_buffers()} == known


def test_a_published_model_is_what_its_family_says(tmp_path):
    """FLUX.1 dev, but for the number of its layers, by the family's own conditions and by the
    pipeline's code."""
    place = Path(shutil.copytree(published.folder("black-forest-labs/FLUX.1-dev"), tmp_path / "a"))
    config = json.loads((place / "transformer" / "config.json").read_text())
    few = config | {"num_layers": 2, "num_single_layers": 2}
    (place / "transformer" / "config.json").write_text(json.dumps(few))
    known = {"encode_prompt": [{"shape": [512, 4096]}, {"shape": [768]}, {"plain": [512, 3]}]}
    there = Path(shutil.copytree(place, tmp_path / "b"))
    (there / published.ENCODINGS).write_text(json.dumps(known))
    index = json.loads((there / "model_index.json").read_text())
    blank = dict.fromkeys(published.parts_of(index["_class_name"]), [None, None])
    (there / "model_index.json").write_text(json.dumps(blank | index))
    train = replace(PLAIN, precision="bf16", gradient_checkpointing=True)
    shared = {"steps": 4, "dtype": "bfloat16", "lora": 32}
    call = {"call": {"height": 512, "width": 512}}
    ours = rehearse(replays.replayed(there, shared | call, train, 2), decode=False)
    family = rehearse(flow(POLICIES["flux"], place, shared | {"size": 512}, train, 2), decode=False)
    assert ours.update.flops == family.update.flops and ours.trained == family.trained
    for part in ("parameters", "activations", "total"):
        assert ours.update.memory[part] == pytest.approx(family.update.memory[part], rel=1e-3), part


def changes(name, **options):
    place, written = chosen(name, lora=None, **options)
    for option in ("steps", "fixed_batch_rows"):
        written.pop(option)
    written |= {"path": str(place), "check": False}
    return [f"policy.pipeline.{key}={json.dumps(value)}" for key, value in written.items()] + SMALL


def test_forwards_are_those_of_the_run(tmp_path):
    overrides = changes("cogview4", guidance_scale=2.5)
    found = dry_run(CONFIG, overrides)
    prompts = [*overrides, "reward={jpeg_compressibility: 1.0}"]
    session = build.Session.of(build.read(CONFIG, prompts))
    trainer = session.trainer()
    metrics = trainer.iterate()
    assert found.counted.sampling + found.counted.training == metrics["forwards"]
    assert found.counted.decisions == metrics["decisions"] and found.network_rows == 2
    assert found.shape == tuple(session.policy.shape) and found.steps == 4
    assert found.rehearsed.trained == sum(p.numel() for p in session.policy.net.parameters())
    passes = _passes(measure(CONFIG, overrides, 1), 1)
    rows = trainer.options.prompts_per_iteration * trainer.options.group_size
    assert passes["sampling"] == 4 * rows / 2 and passes["trained"] == metrics["decisions"] / 2


def test_the_command_says_all_of_it():
    overrides = changes("cogview4")
    done = CliRunner().invoke(
        app, ["train", str(CONFIG), "--dry-run", "--devices", "RTX4090", "--fit", *overrides]
    )
    text = " ".join(done.output.split())
    assert done.exit_code == 0, done.output
    for words in ("latents 4 x 8 x 8; 4 steps", "rows of the network to sample", "peak", "fits"):
        assert words in text, words
    assert "estimated as if" not in text and "unknown" not in text


def test_what_training_refuses_is_refused(tmp_path):
    with pytest.raises(UserError, match="policy option call: wide does not exist"):
        dry_run(CONFIG, [*changes("cogview4"), 'policy.pipeline.call={"wide": 1}'])
    shutil.copytree(tiny_diffusers.folder("cogview4"), tmp_path / "torn")
    shutil.rmtree(tmp_path / "torn" / "tokenizer")
    with pytest.raises(UserError, match="tokenizer"):
        dry_run(CONFIG, [*changes("cogview4"), f"policy.pipeline.path={tmp_path / 'torn'}"])


def test_experts_are_chosen_evenly():
    """On fakes each of HiDream's experts works on as many tokens, as bincount cannot count them."""
    fakes = Fakes()
    with torch.device("meta"):
        layer = MOEFeedForwardSwiGLU(32, 64, 4, 2).eval()
    fakes.fill(layer)
    replays.route_evenly(layer)
    seen = []
    for expert in layer.experts:
        expert.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    with fakes.running():
        assert layer(fakes.empty(2, 50, 32)).shape == (2, 50, 32)
    assert seen == [50] * 4


def test_no_weights_are_read(tmp_path):
    """A folder of config files is enough."""
    shutil.copytree(tiny_diffusers.folder("cogview4"), tmp_path / "bare")
    for file in (tmp_path / "bare").rglob("*.safetensors"):
        file.unlink()
    bare = [f"policy.pipeline.path={tmp_path / 'bare'}"]
    found = dry_run(CONFIG, [*changes("cogview4"), *bare])
    whole = dry_run(CONFIG, changes("cogview4"))
    assert found.rehearsed == whole.rehearsed and found.counted == whole.counted
    assert "forwards" in "\n".join(lines(found)) and hasattr(diffusers, "CogView4Pipeline")


def test_a_pipeline_that_needs_numbers_is_told_in_a_sentence(monkeypatch):
    def stopped(*_):
        raise RuntimeError("aten.bincount needs numbers\nand more")

    monkeypatch.setattr(replays, "replayed", stopped)
    text = "\n".join(lines(dry_run(CONFIG, changes("cogview4"))))
    assert "forwards" not in text
    assert "unknown     passes of the network and memory: on fake weights" in text
    with pytest.raises(UserError, match="--devices: unknown: .*bincount needs numbers; or leave"):
        measure(CONFIG, changes("cogview4"), 1)


def test_large_masks_are_fake_on_the_way_back_too():
    """Where activations are computed again, as HunyuanVideo 1.5 makes masks in every block."""
    fakes = Fakes()
    with torch.device("meta"):
        net = torch.nn.Linear(4, 4)
    fakes.fill(net)
    seen = []

    def block(x):
        seen.append(torch.ones(1, 2**14, dtype=torch.bool).repeat(2**14, 1))
        return net(x)

    def work(tracker):
        checkpoint(block, fakes.empty(3, 4), use_reentrant=False).sum().backward()

    passed(work, [net])
    assert len(seen) == 2 and all(isinstance(mask, FakeTensor) for mask in seen)


def test_the_size_that_binning_would_sample_is_refused_and_defaults_are_listed():
    """With binning the pipeline itself is looked at, not the family of the same pipeline."""
    asked = {"height": 32, "width": 32}
    chosen_size = "policy.pipeline.call=" + json.dumps(asked)
    words = [*changes("sana"), chosen_size]
    shown = "\n".join(lines(dry_run(CONFIG, words)))
    assert "use_resolution_binning False" in shown and "clean_caption False" in shown
    assert "as if it were the built-in family sana" in shown
    binned = "policy.pipeline.call=" + json.dumps(asked | {"use_resolution_binning": True})
    with pytest.raises(UserError, match="samples 1024 x 1024"):
        dry_run(CONFIG, [*changes("sana"), binned])

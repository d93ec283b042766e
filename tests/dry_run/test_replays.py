"""``--dry-run`` of replayed pipelines without a family: their own code on fake weights takes what a
real pass takes."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

from mmrl.apps.dry_run import published, rehearsal, replays
from mmrl.apps.dry_run.dryrun import dry_run
from mmrl.apps.dry_run.estimate import _passes, measure, measured
from mmrl.apps.dry_run.fakes import Fakes
from mmrl.apps.dry_run.page import lines
from mmrl.apps.dry_run.rehearsal import rehearse
from mmrl.apps.dry_run.tracked import tracked
from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.experiment import build
from mmrl.policies.diffusion.pipeline_folder import class_of
from tests.fixtures import tiny_diffusers, tiny_modular
from tests.fixtures.replay_cases import CASES
from tests.policies.diffusion.test_modular import ALONE

load_built_in()
CONFIG = Path(__file__).parents[2] / "configs" / "digits" / "pipeline.yaml"
PLAIN = TrainOptions(2, 2, 4, 1)
ONE = TrainOptions(1, 2, 2, 1)
MODELS = published.table()["models"]
ENCODED = [name for name, model in MODELS.items() if "encodings" in model]
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
        ("sana_sprint", {}),  # noise of the pipeline's own sampler
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


def changes(name, **options):
    place, written = chosen(name, lora=None, **options)
    for option in ("steps", "fixed_batch_rows"):
        written.pop(option)
    written |= {"path": str(place), "check": False}
    return [f"policy.pipeline.{key}={json.dumps(value)}" for key, value in written.items()] + SMALL


@pytest.fixture(scope="module")
def guided():
    """What to change for a pipeline whose guidance takes two rows, and what is said of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replays, "WORDS", WORDS)
        overrides = changes("cogview4", guidance_scale=2.5)
        return overrides, dry_run(CONFIG, overrides)


def test_forwards_are_those_of_the_run(guided):
    overrides, found = guided
    prompts = [*overrides, "reward={jpeg_compressibility: 1.0}"]
    session = build.Session.of(build.read(CONFIG, prompts))
    trainer = session.trainer()
    metrics = trainer.iterate()
    assert found.counted.sampling + found.counted.training == metrics["forwards"]
    assert found.counted.decisions == metrics["decisions"] and found.network_rows == 2
    assert found.shape == tuple(session.policy.shape) and found.steps == 4
    assert found.rehearsed.trained == sum(p.numel() for p in session.policy.net.parameters())
    passes = _passes(measured(found, decode=False), 1)
    rows = trainer.options.prompts_per_iteration * trainer.options.group_size
    assert passes["sampling"] == 4 * rows / 2 and passes["trained"] == metrics["decisions"] / 2


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


def test_no_weights_are_read(guided, tmp_path):
    """A folder of config files is enough."""
    overrides, whole = guided
    shutil.copytree(tiny_diffusers.folder("cogview4"), tmp_path / "bare")
    for file in (tmp_path / "bare").rglob("*.safetensors"):
        file.unlink()
    bare = [f"policy.pipeline.path={tmp_path / 'bare'}"]
    found = dry_run(CONFIG, [*overrides, *bare])
    assert found.rehearsed == whole.rehearsed and found.counted == whole.counted


def test_a_pipeline_that_needs_numbers_is_a_sentence(monkeypatch):
    def stopped(*_):
        raise RuntimeError("aten.bincount needs numbers\nand more")

    monkeypatch.setattr(replays, "replayed", stopped)
    text = "\n".join(lines(dry_run(CONFIG, changes("cogview4"))))
    assert "unknown     passes of the network and memory: on fake weights" in text
    with pytest.raises(UserError, match="--devices: unknown: .*bincount needs numbers; or leave"):
        measure(CONFIG, changes("cogview4"), 1)


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


def test_what_stands_in_the_table_is_what_the_meta_device_counts():
    known = MODELS["Alpha-VLLM/Lumina-Image-2.0"]
    nets = {
        part: published.on_meta(config["_class_name"], config)
        for part, config in known["parts"].items()
        if part in known["parameters"]
    }
    assert {part: published.parameters(net) for part, net in nets.items()} == known["parameters"]


@pytest.mark.parametrize("name", ENCODED)
def test_every_entry_is_a_folder_of_its_pipeline(name):
    known = MODELS[name]
    cls = getattr(diffusers, known["pipeline"])
    taken = inspect.signature(cls.__init__).parameters
    assert set(known["parts"]) | set(known.get("index", {})) <= set(taken)
    assert all(hasattr(cls, method) for method in known["encodings"])
    index = json.loads((published.folder(name) / "model_index.json").read_text())
    for part, config in known["parts"].items():
        of_part = class_of(index[part])
        values = of_part.load_config(published.folder(name), subfolder=part)
        assert {key: values[key] for key in config} == config
        assert set(config) <= {"_class_name", *inspect.signature(of_part.__init__).parameters}


def test_encodings_are_of_as_many_rows_as_prompts():
    def made(returned):
        return replays.encoding(returned, 3, torch.bfloat16)

    text, mask, none = made([{"shape": [5, 2]}, {"mask": [5]}, None])
    assert text.shape == (3, 5, 2) and text.dtype == torch.bfloat16 and none is None
    assert mask.tolist() == [[1] * 5] * 3 and mask.dtype == torch.long
    assert made({"shape": [4, "rows", 5, 2]}).shape == (4, 3, 5, 2)
    assert made({"plain": [5, 3]}).shape == (5, 3)
    assert made({"lengths": 5}).tolist() == [0, 5, 10, 15]
    (texts,) = made([{"rows": [{"rows": {"shape": [5, 2]}}]}])
    assert [[text.shape for text in row] for row in texts] == [[(5, 2)]] * 3


def test_a_replay_on_fakes_takes_what_the_family_of_the_same_pipeline_takes(tmp_path):
    """Without encoders, and without a tokenizer: its folder says what they would return."""
    whole = tiny_diffusers.folder("flux")
    place = tmp_path / "flux"
    shutil.copytree(whole, place)
    index = json.loads((place / "model_index.json").read_text())
    for part in ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"):
        shutil.rmtree(place / part)
        index[part] = [None, None]
    (place / "model_index.json").write_text(json.dumps(index))
    config = json.loads((place / "transformer/config.json").read_text())
    widths = config["joint_attention_dim"], config["pooled_projection_dim"]
    encoded = [{"shape": [8, widths[0]]}, {"shape": [widths[1]]}, {"plain": [8, 3]}]
    (place / published.ENCODINGS).write_text(json.dumps({"encode_prompt": encoded}))
    options = {"steps": 3, "lora": 2, "fixed_batch_rows": 2}
    call = {"height": 16, "width": 16, "max_sequence_length": 8}
    stage = replays.replayed(place, options | {"call": call}, ONE, 2)
    flow = options | {"path": str(whole), "size": 16, "text_length": 8}
    family = rehearsal.flow(POLICIES["flux"], whole, flow, ONE, 2)
    once, plain = (rehearse(each, decode=False) for each in (stage, family))
    assert stage.network_rows == 1 and stage.policy.encoder_parameters == 0
    assert once.update.flops == plain.update.flops > 0
    assert once.sampling.flops == plain.sampling.flops
    for part in ("parameters", "activations"):
        assert once.update.memory[part] == pytest.approx(plain.update.memory[part], rel=0.01), part
    assert once.trained == plain.trained > 0

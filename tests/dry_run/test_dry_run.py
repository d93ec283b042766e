"""``--dry-run``: every shipped configuration, sizes that are published, forwards that are
counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmrl.apps.dry_run import published
from mmrl.apps.dry_run.dryrun import dry_run
from mmrl.apps.dry_run.estimate import _passes, measured, memory_of
from mmrl.apps.dry_run.page import lines, memory
from mmrl.apps.dry_run.stand_in import folder_of
from mmrl.apps.dry_run.tracked import tracked
from mmrl.cli.app import app
from mmrl.config.yamltext import write
from mmrl.core.errors import UserError
from mmrl.core.registry import load_built_in
from mmrl.experiment import build, state
from tests.fixtures import tiny_diffusers

load_built_in()
ROOT = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(
    # of real/ a script writes the weights
    (path for path in ROOT.rglob("*.yaml") if path.parent.name not in ("serve", "real")),
    key=lambda path: (path.parent.name == "benchmarks", path),  # thousands of prompts come last
)
FEW = ["data.digits_questions.scenes=20", "data.digits_questions.held_out_scenes=4"]


def test_every_configuration_of_the_repository_can_be_looked_at_without_weights(
    monkeypatch, subtests
):
    """One for each base model; the others are read and checked."""
    seen = set()
    for path in CONFIGS:
        name = f"{path.parent.name}/{path.stem}"
        with subtests.test(name=name), monkeypatch.context() as patch:
            text = path.read_text()
            # of a group: one picture, two answers, or samples
            size = 1 if "consistency:" in text else 2 if "preferences:" in text else 16
            prompts = 128 // size
            changes = [f"train.prompts_per_iteration={prompts}", f"train.group_size={size}"]
            changes += ["train.train_batch_size=64", "train.micro_batch_size=1"]
            changes += FEW if "digits_questions" in text else []
            policy = build.read(path, changes)["policy"]
            ((kind, options),) = policy.items() if isinstance(policy, dict) else [(policy, {})]
            base = json.dumps([kind, options.get("path"), options.get("net"), size])
            if base in seen:
                continue
            seen.add(base)
            if "world:" not in text:  # small, and not published
                patch.setattr(published, "on_meta", no_networks)
            found = dry_run(path, changes)
            shown = "\n".join(lines(found))
            assert f"batches     {prompts} prompts x {size} copies = 128 rows" in shown
            assert found.plan.steps == 2
            # a pipeline's family is known by its networks
            assert found.stage is not None or found.policy == "pipeline"
            assert "is not built yet" not in shown  # what is not built is known by its recipe
            once = found.counted
            if found.shape:
                rows = found.network_rows
                if "tree" not in text:
                    assert once.sampling == (0 if size < 16 else 128 * found.steps * rows)
                assert once.training is None or once.training > 0
                assert 0 < once.decisions <= 128 * found.noisy or not found.noisy or size == 1
                known = found.path in published.table()["models"] and not found.unknown
                assert found.path.startswith("world:") or known
            else:
                assert once.sampling == (0 if size < 16 else 128)
                assert "forwards" in shown or found.stage is None
    assert len(seen) > 40


def no_networks(name, cfg):
    """Autoencoders may be built, as their attributes are asked for; networks must come from the
    table."""
    assert name.startswith("Autoencoder"), (
        f"{name} is built for a number that the table should have"
    )
    return ON_META(name, cfg)


ON_META = published.on_meta


# of the papers, model cards and weights' files, in billions
BILLIONS = {
    "black-forest-labs/FLUX.1-dev": 12,
    "black-forest-labs/FLUX.2-dev": 32,
    "Qwen/Qwen-Image": 20,
    "hunyuanvideo-community/HunyuanVideo": 13,
    "Lightricks/LTX-2": 19,
    "Efficient-Large-Model/Sana_1600M_1024px_diffusers": 1.6,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": 14.3,
    "stabilityai/stable-diffusion-3.5-large": 8.06,
    "HiDream-ai/HiDream-I1-Full": 17,
    "Alpha-VLLM/Lumina-Image-2.0": 2.6,
    "lodestones/Chroma1-HD": 8.9,
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": 5,
}
TEXTS = {
    "Qwen/Qwen3-VL-8B-Instruct": 8.77,
    "Qwen/Qwen2.5-VL-72B-Instruct": 73.4,
}
ENCODERS = {
    "mistral3_24b": 24,
    "qwen2_5_vl_7b_text": 7.07,
    "t5_11b": 4.86,  # the half of T5 that reads
    "llama3_1_8b": 8.03,
    "siglip_so400m": 0.428,
    "clip_l": 0.12306,
}


def test_published_counts_are_those_that_are_known():
    table = published.table()
    models, encoders, texts = table["models"], table["encoders"], table["texts"]
    for name, billions in BILLIONS.items():
        count = models[name]["parameters"]["transformer"] / 1e9
        assert count == pytest.approx(billions, rel=0.05), name
    for name, billions in (ENCODERS | {texts[name]: n for name, n in TEXTS.items()}).items():
        count = encoders[name]["parameters"] / 1e9
        assert count == pytest.approx(billions, rel=0.01), name
    spec = encoders["clip_l"]
    assert published.parameters(published.encoder_on_meta(spec)) == spec["parameters"]
    used = {name for model in models.values() for name in model["encoders"]}
    assert used <= set(encoders) and set(texts.values()) <= set(encoders)


def tiny(case, tmp_path, objective="policy_gradient: {clip_range: 1e-2, kl: 0.1}", **policy):
    """A configuration of a tiny model that is there."""
    name = case.partition("-")[0]
    options = {
        "path": str(tiny_diffusers.folder(case)),
        "size": [16, 32],
        "steps": 4,
        "text_length": 16,
    }
    text = write(
        {"policy": {name: options | policy}, "data": {"prompts": {"path": str(tmp_path / "p.txt")}}}
    )
    text += "reward: {jpeg_compressibility: 1.0}\nadvantage: dance_grpo\n"
    text += f"objective: {{{objective}}}\n"
    text += "train: {prompts_per_iteration: 2, group_size: 4, train_batch_size: 4, "
    text += "micro_batch_size: 2, iterations: 1, epochs: 2}\n"
    (tmp_path / "p.txt").write_text("a red seven\na blue two\n")
    (tmp_path / "c.yaml").write_text(text)
    return tmp_path / "c.yaml"


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("flux", {"tree": {"splits": 2, "factor": 2}}),
        ("wan-two", {"frames": 5, "guidance_scale": 2.0, "guidance_scale_2": 1.5, "lora": 2}),
    ],
)
def test_counted_forwards_are_those_of_the_run(case, options, tmp_path):
    path = tiny(case, tmp_path, **options)
    found = dry_run(path)
    one = build.Session.of(build.read(path, []))
    trainer = one.trainer()
    metrics = trainer.iterate()
    assert found.counted.sampling + found.counted.training == metrics["forwards"]
    assert found.counted.decisions == metrics["decisions"]
    assert found.counted.steps == metrics["step"] == 4
    assert found.shape == one.policy.shape and found.counted.snapshots == trainer.snapshots()
    trained = sum(p.numel() for p in one.policy.net.parameters() if p.requires_grad)
    run = measured(found, decode=False)
    assert run.measured.trained == trained and memory_of(run)["optimizer"] == 8 * trained


def test_what_learns_beside_the_policy_is_counted(tmp_path):
    """Weights and optimizer state of distribution matching's fake model, as a tracked run holds
    them; its passes too."""
    student = {"scheduler": "lcm", "guidance_scale": 1.0, "steps": 2}
    path = tiny("flux", tmp_path, "dmd: {guidance_scale: 2.0, fake_steps: 3}", **student)
    sizes = ["group_size=1", "train_batch_size=1", "micro_batch_size=1", "epochs=1"]
    chosen = [f"train.{size}" for size in sizes]
    guess = measured(dry_run(path, chosen), decode=False)
    found = memory_of(guess)
    session = build.Session.of(build.read(path, chosen))
    trainer = session.trainer()
    real = tracked(trainer.iterate, [session.policy.net]).memory
    arrays, _ = state.capture(trainer)
    held = {name: sum(x.nbytes for x in tensors.values()) for name, tensors in arrays.items()}
    assert held["optimizer-critic"] == held["optimizer"] > 0
    assert found["snapshots"] == held["snapshot-fake"] + held["snapshot-ref"]
    assert found["optimizer"] == pytest.approx(real["optimizer"], rel=0.01)
    # both optimizers step the same tensors, so there is one set of gradients
    updates = trainer.update, trainer.critic.inner
    own, of_fake = ({id(p) for g in u.optimizer.param_groups for p in g["params"]} for u in updates)
    assert own == of_fake and found["gradients"] == held["weights"]
    # of every row: a pass with a gradient by the student, and one in each of three steps
    counts = _passes(guess, 1)
    assert counts["trained"] == 2 * (1 + 3)
    assert sum(counts.values()) == trainer.policy.report.forwards


def test_the_command_prints_and_refuses_as_training_does(tmp_path):
    path = tiny("flux", tmp_path)
    done = CliRunner().invoke(app, ["train", str(path), "--dry-run", "--processes", "2"])
    assert done.exit_code == 0
    assert "latents 4 x 8 x 16" in done.output and "on 2 processes" in done.output
    with pytest.raises(UserError, match="size 17 is not a multiple of 4"):
        dry_run(path, ["policy.size=17"])
    with pytest.raises(UserError, match="flux.steps: expected a value greater than or equal to 1"):
        dry_run(path, ["policy.flux.steps=0"])
    unknown = dry_run(path, ["policy.flux.path=some/model"])
    assert unknown.shape is None and "the architecture of some/model" in "\n".join(lines(unknown))


def test_supervised_fine_tuning_samples_nothing():
    sizes = ["train.group_size=1", "train.prompts_per_iteration=8", "train.train_batch_size=4"]
    report = dry_run(
        ROOT / "vlm" / "counting.yaml", [*sizes, "objective=sft", "train.micro_batch_size=2"]
    )
    assert report.counted.sampling == 0 and report.counted.training == 8
    assert report.plan.steps == 2 and not report.plan.warnings
    assert "0 answers to sample" in "\n".join(lines(report))


def questions(path, *overrides):
    words = [f"policy.vlm.path={path}", *FEW, *overrides]
    return dry_run(ROOT / "digits" / "counting.yaml", words)


def test_what_of_a_vlm_is_trained_is_counted_as_the_run_would_train_it():
    options = ["policy.vlm.train={language: lora, projector: full, vision: frozen}"]
    changes = ["policy.vlm.path=world:digits/vlm-test", *FEW, *options]
    policy = build.Session.of(build.read(ROOT / "digits" / "counting.yaml", changes)).policy
    report = questions("world:digits/vlm-test", *options)  # after the policy: the world is built
    trained = sum(p.numel() for p in policy.net.parameters() if p.requires_grad)
    base = sum(p.numel() for n, p in policy.net.named_parameters() if "lora_" not in n)
    once = measured(report).measured
    assert (once.parameters, once.trained) == (base, trained)


def test_tokens_of_prompts_and_targets_of_adapters_are_the_options():
    with pytest.raises(UserError, match="lora.targets match no module"):
        targets = "policy.vlm.lora={rank: 4, targets: [nothing]}"
        measured(questions("world:digits/vlm-test", targets))
    few, many = (
        measured(questions("world:digits/vlm-test", f"policy.vlm.budgets.prompt_tokens={n}"))
        for n in (64, 256)
    )
    assert "256 are taken" in "\n".join(lines(many.report))
    assert memory_of(many)["activations"] > 2 * memory_of(few)["activations"]


def test_a_folder_of_the_embedded_world_is_the_one_that_would_be_used(tmp_path, monkeypatch):
    """Not that of another recipe or a longer name; nothing is built by looking."""
    shipped = folder_of("world:digits/sd3")
    assert shipped is not None and shipped.name in ("sd3",) or shipped.name.startswith("sd3-")
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path))
    assert folder_of("world:digits/vlm") is None and list(tmp_path.rglob("*")) == []
    (tmp_path / "digits" / "vlm-000000000000").mkdir(parents=True)
    (tmp_path / "digits" / "vlm-test-000000000000").mkdir()
    assert folder_of("world:digits/vlm") is None
    known = questions("world:digits/vlm")  # by its recipe
    assert "0.28 million parameters" in next(memory(known, lambda: measured(known, decode=False)))
    assert folder_of("world:no/such") is None and folder_of(str(tmp_path)) == tmp_path

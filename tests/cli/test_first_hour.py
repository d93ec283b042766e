"""The first hour of a newcomer: the commands in this process, with what one types wrongly."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path

import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from mmrl.cli import app as cli
from mmrl.cli import completion, listing
from mmrl.cli.app import app
from mmrl.cli.commands import shown_prompts
from mmrl.core.errors import UserError
from mmrl.core.files import check_writable
from mmrl.core.registry import locate
from mmrl.experiment.lifecycle import trained
from mmrl.policies.vlm.policy import VLM

FLOW = {
    "policy": {"sd3": {"path": "world:digits/sd3-test", "size": 32, "steps": 2, "lora": 2}},
    "data": {"digits": {"captions": 20}},
    "reward": {"jpeg_compressibility": 1.0},
    "objective": {"policy_gradient": {"clip_range": 1.0}},
    "optimizer": {"adamw": {"lr": 0.3}},
    "train": {"prompts_per_iteration": 1, "group_size": 2, "train_batch_size": 2, "iterations": 2}
    | {"save_every": 1},
    "evaluate": {"prompts": 2, "num_samples": 1},
    "log": {"tensorboard": False},
}
JUDGE = "def broken(media, prompts):\n    raise RuntimeError('no such server')\n"
QUESTIONS = FLOW | {
    "policy": {"vlm": {"path": "world:digits/vlm-test", "max_new_tokens": 4}},
    "data": {"digits_questions": {"kinds": ["count"], "scenes": 20, "held_out_scenes": 4}},
    "reward": {"count": 1.0},
    "objective": {"policy_gradient": {"clip_range": 0.2}},
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder of one's own with a configuration, a run of it, and a picture."""
    folder = tmp_path_factory.mktemp("desk")
    locate("world:digits/sd3-test")
    (folder / "own.yaml").write_text(yaml.safe_dump(FLOW))
    (folder / "vlm.yaml").write_text(yaml.safe_dump(QUESTIONS))
    (folder / "file").write_text("")
    (folder / "judge.py").write_text(JUDGE)
    Image.new("RGB", (40, 40), (200, 30, 30)).save(folder / "red.png")
    with contextlib.chdir(folder):
        trained(Path("own.yaml"), ["run=first"])
    return folder


def run(desk, monkeypatch, *words):
    monkeypatch.chdir(desk)
    return CliRunner().invoke(app, [str(word) for word in words])


def refusal(desk, monkeypatch, *words):
    done = run(desk, monkeypatch, *words)
    assert isinstance(done.exception, UserError), (done.output, done.exception)
    return str(done.exception)


def listed(*words):
    done = CliRunner().invoke(app, ["list", *words])
    assert not done.exception, done.exception
    return done.output


def test_list_alone_is_a_summary_and_of_a_kind_has_a_line_for_every_name():
    shown = listed()
    assert len(shown.splitlines()) < 40 and "mmrl list NAME" in shown
    assert all(kind in shown for kind in listing.KINDS) and set(listing.ABOUT) == set(listing.KINDS)
    assert set(completion.KINDS) == {*listing.KINDS, *listing.GROUPS}
    lines = listed("rewards").splitlines()
    assert len(lines) == 1 + len(listing.names_of("rewards"))
    assert any(line.startswith("  aesthetic  ") for line in lines)
    for kind, name in [
        ("samplers", "flow_sde"),
        ("noise_windows", "all_but_last"),
        ("presets", "trl/grpo"),
        ("configs", "digits/flow_grpo"),
    ]:
        assert name in listed(kind)


def test_list_of_a_name_has_its_options_and_defaults():
    shown = listed("nft")
    assert all(words in shown for words in ("DiffusionNFT", "num_noise_draws", "an integer"))
    assert listed("objectives", "nft") == shown
    both = listed("digits")
    assert "reward digits (" in both and "data source digits (data)" in both
    assert "surrogate" in listed("trl/grpo")
    assert "policy:" in listed("digits/nft") and "iterations" in listed("digits/nft")


def test_search_and_what_is_not_there(tmp_path, monkeypatch):
    shown = listed("--search", "DiffusionNFT")
    assert "objectives" in shown and "  nft" in shown and "aesthetic" not in shown
    assert "configs" not in listed("rewards", "--search", "length")
    for words, sentence in [
        (["rewards", "aestetic"], "no 'aestetic' among the rewards; did you mean 'aesthetic'?"),
        (["policy_gradiant"], "did you mean 'policy_gradient'?"),
        (["qqqq"], "mmrl list --search qqqq"),
        (["--search", "qqqq"], "has 'qqqq' in its line"),
        (["nothing", "nft"], "no plug-ins called 'nothing'"),
    ]:
        assert sentence in refusal(tmp_path, monkeypatch, "list", *words)


def test_version_and_completion(desk, monkeypatch):
    from mmrl import __version__

    assert run(desk, monkeypatch, "--version").output == f"mmrl {__version__}\n"
    assert run(desk, monkeypatch, "-V").exit_code == 0
    assert "--install-completion" in run(desk, monkeypatch, "--help").output
    words = {"_MMRL_COMPLETE": "complete_bash", "COMP_WORDS": "mmrl train ow", "COMP_CWORD": "2"}
    shown = CliRunner().invoke(app, [], prog_name="mmrl", env=words).output
    assert shown.split() == ["own.yaml"]
    assert "digits/flow_grpo" in completion.of_configs("digits/flow_g")
    assert "first/" in completion.of_runs("fi") and completion.of_runs("nowhere/x") == []
    assert completion.of_list("rew") == ["rewards"]


def test_a_missing_configuration_is_said_in_a_line(desk, monkeypatch):
    said = [refusal(desk, monkeypatch, "train", name) for name in ("zzz", "flow", "digits")]
    assert "are shipped, such as" in said[0]
    assert "with such a name: digits/" in said[1] and "in it: digits/" in said[2]
    assert all(len(sentence) < 400 and "mmrl list configs" in sentence for sentence in said[::2])
    near = refusal(desk, monkeypatch, "train", "digits/flow_grop")
    assert near.endswith("did you mean 'digits/flow_grpo'?")


def test_a_folder_that_cannot_be_written_is_a_sentence_before_any_work(desk, monkeypatch):
    built = "mmrl.experiment.build.Session.of"
    monkeypatch.setattr(built, lambda configuration: pytest.fail("built"))
    for words in [
        "train own.yaml run=file/run",
        "sample first -p x --out file/x",
        "export first --out file/x",
        "evaluate first --scores file/x/y.json",
        "compare own.yaml --vary train.seed=1 --out file/x",
        "train own.yaml run=/proc/run",
    ]:
        assert "cannot write to" in refusal(desk, monkeypatch, *words.split()), words


def test_what_a_disk_refuses_later_is_a_sentence_too(desk, monkeypatch, capsys):
    def refuses():
        raise PermissionError(13, "Permission denied", "/somewhere")

    monkeypatch.setattr(cli, "app", refuses)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "error: /somewhere: Permission denied; check the permissions" in capsys.readouterr().err
    monkeypatch.setattr(cli, "app", lambda: (_ for _ in ()).throw(OSError("a bug")))
    with pytest.raises(OSError, match="a bug"):
        cli.main()
    check_writable(desk)


NEVER = "train own.yaml run=never "
REFUSED = {
    NEVER + "objective.policy_gradient.clip_rang=1": "did you mean 'clip_range'?",
    NEVER + "policy.sd3.path=.": "model_index.json",
    NEVER + "policy.sd3.path=./own.yaml": "own.yaml is a file",
    NEVER + "'policy.sd3.noise_window={window: {start: 5}}'": "window",
    NEVER + "'policy.sd3.lora={rank: 2, targets: [no]}'": "lora.targets match no module",
    NEVER + "reward=judge.py:broken": "no such server",  # fails too often
    "train own.yaml run=first": "already holds a run",
    "train first": "mmrl train --resume",
    "train --resume .": "has no config.yaml",
    "report .": "no run",
    "list reward": "did you mean 'rewards'?",
    "train own.yaml data.path=prompts.csv": "data={prompts: {path: prompts.csv}}",
}


def test_a_mistake_is_one_sentence(desk, monkeypatch, subtests):
    for words, sentence in REFUSED.items():
        with subtests.test(words):
            assert sentence in refusal(desk, monkeypatch, *shlex.split(words))


def test_a_run_leaves_everything_behind(desk):
    lines = (desk / "first" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2]
    for name in (
        *("config.yaml", "machine.json", "events.jsonl", "samples/before.png", "samples/after.png"),
        "checkpoints/iteration-000002/weights.safetensors",
    ):
        assert (desk / "first" / name).is_file()


def test_an_evaluation_says_the_paired_difference(desk, monkeypatch):
    shown = run(desk, monkeypatch, "evaluate", "first").output
    assert "trained against base, jpeg_compressibility: " in shown
    assert "paired over 2 prompts" in " ".join(shown.split())
    text = (desk / "first" / "evaluation.json").read_text()
    trained_row = json.loads(text, parse_constant=pytest.fail)["rows"][-1]
    assert len(trained_row["prompt_means"]["jpeg_compressibility"]) == 2
    assert run(desk, monkeypatch, "evaluate", "first", "evaluate.prompts=1").exit_code == 0
    text = (desk / "first" / "evaluation.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["rows"][-1]["rewards"]


def test_sample_takes_a_checkpoint(desk, monkeypatch):
    words = ("sample", "first", "-p", "x", "--num-samples", 1, "--out")
    old = run(desk, monkeypatch, *words, "old", "--checkpoint", "iteration-000001").output
    new = run(desk, monkeypatch, *words, "new").output
    assert (desk / old.strip()).read_bytes() != (desk / new.strip()).read_bytes()
    said = refusal(desk, monkeypatch, *words, "no", "--checkpoint", "iteration-000009")
    assert said.endswith("first has iteration-000001, iteration-000002")
    words = ("sample", "own.yaml", "-p", "x", "--checkpoint", "iteration-000001")
    assert "only a run has checkpoints" in refusal(desk, monkeypatch, *words)


def test_a_vlm_is_shown_a_picture_or_it_is_said_that_there_is_none(desk, monkeypatch):
    seen = []
    rollout = VLM.rollout

    def watched(self, prompts, *args, **options):
        seen.extend(prompts)
        return rollout(self, prompts, *args, **options)

    monkeypatch.setattr(VLM, "rollout", watched)
    words = ("sample", "vlm.yaml", "-p", "how many digits?", "--num-samples", 1)
    done = run(desk, monkeypatch, *words, "--image", "red.png", "--out", "seen")
    assert done.exit_code == 0 and seen[-1]["image"] == "red.png" and "note" not in done.stderr
    done = run(desk, monkeypatch, *words, "--out", "blind")
    assert "image" not in seen[-1] and "'how many digits?' has no picture" in done.stderr


def test_pictures_belong_to_one_prompt_or_one_to_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = [Path(name) for name in ("a.png", "b.png")]
    for file in files:
        file.write_bytes(b"")
    one, two = [{"text": "x"}], [{"text": "x"}, {"text": "y"}]
    assert shown_prompts(one, files[:1], []) == [{"text": "x", "image": "a.png"}]
    assert shown_prompts(one, files, []) == [{"text": "x", "images": ["a.png", "b.png"]}]
    assert [p["video"] for p in shown_prompts(two, [], files)] == ["a.png", "b.png"]
    assert shown_prompts(two, [], []) == two
    for prompts, images, sentence in [
        (two, files[:1], "--image is given 1 times and --prompt 2 times"),
        ([], files, "--image needs a --prompt"),
        (one, [Path("c.png")], "--image c.png: no such file"),
    ]:
        with pytest.raises(UserError, match=sentence):
            shown_prompts(prompts, images, [])

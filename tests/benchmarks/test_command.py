"""``mmrl evaluate PATH --benchmark NAME`` as a user meets it, on samples, answers and models."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from mmrl.apps.benchmarks import sampling
from mmrl.cli.app import app
from mmrl.core.errors import UserError
from mmrl.core.registry import locate
from mmrl.experiment.lifecycle import trained
from tests.benchmarks.files import document, lines, picture, save_coco_yolos
from tests.benchmarks.test_pictures import METADATA
from tests.fixtures import tiny_vlms
from tests.fixtures.tiny_rewards import save_tiny_clip

IMAGES = """
policy:
  sd3: {path: "world:digits/sd3-test", size: 32, steps: 2, noise_window: all_but_last, lora: 2}
data: {prompts: {path: prompts.txt, held_out: 0.3}}
reward: {jpeg_compressibility: 1.0}
advantage: dance_grpo
objective: {policy_gradient: {clip_range: 1e-3}}
optimizer: {adamw: {lr: 1e-3}}
train: {prompts_per_iteration: 2, group_size: 2, train_batch_size: 4, iterations: 1}
"""
TEXTS = """
policy: {{vlm: {{path: {path}, max_new_tokens: 6, dtype: float32, budgets: {{max_pixels: 3136}}}}}}
data: {{vision: {{path: nowhere.jsonl, system: "Answer with a box."}}}}
reward: {{referring: 1.0}}
advantage: group
objective: {{policy_gradient: {{clip_range: 0.2}}}}
optimizer: {{adamw: {{lr: 1e-5}}}}
train: {{prompts_per_iteration: 2, group_size: 2, train_batch_size: 4, iterations: 1}}
"""


def evaluate(*words):
    """Run the command; an error of a user is raised."""
    run = CliRunner().invoke(app, ["evaluate", *map(str, words)])
    if run.exception is not None and not isinstance(run.exception, SystemExit):
        raise run.exception
    return run.stdout


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with a configuration, one finished run, GenEval's metadata and tiny judges."""
    locate("world:digits/sd3-test")
    folder = tmp_path_factory.mktemp("desk")
    (folder / "mine.yaml").write_text(IMAGES)
    (folder / "prompts.txt").write_text("a red two\na blue six\na red six\n")
    lines(folder / "metadata.jsonl", METADATA[:2])
    save_coco_yolos(folder / "yolos")
    save_tiny_clip(folder / "clip")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trained(folder / "mine.yaml", [f"run={folder}/first"], False, False)
    return folder


JUDGES = ("benchmark.path=metadata.jsonl", "benchmark.detector=yolos", "benchmark.clip=clip")


def test_a_configuration_and_a_run_are_sampled_and_scored(desk, monkeypatch):
    monkeypatch.chdir(desk)
    (desk / "prompts.txt").rename(desk / "away.txt")  # data of the configuration are not opened
    few = (*JUDGES, "benchmark.num_samples=2")
    text = evaluate("mine.yaml", "--benchmark", "geneval", *few, "policy.steps=3")
    assert (
        "2 of 2 prompts" in text and "written to benchmark-geneval/benchmark-geneval.html" in text
    )
    base = desk / "benchmark-geneval"
    assert len(list(base.glob("0000?/samples/000?.png"))) == 4
    record = json.loads((base / "00001/metadata.jsonl").read_text())
    assert record == METADATA[1]  # what the official evaluation reads
    content = json.loads((base / "benchmark-geneval.json").read_text())
    assert content["samples_mean"]["samples"] == 4 and content["not_scored"] == 0
    text = evaluate("first", "--benchmark", "geneval", *few)
    assert (desk / "first/benchmark-geneval/00000/samples/0001.png").is_file()
    (desk / "away.txt").rename(desk / "prompts.txt")


def test_what_was_sampled_is_not_sampled_again(desk, monkeypatch):
    monkeypatch.chdir(desk)
    words = ("mine.yaml", "--benchmark", "geneval", *JUDGES, "benchmark.num_samples=1")
    evaluate(*words, "benchmark.folder=again", "benchmark.batch=1")
    files = sorted((desk / "again").glob("0000?/samples/*.png"))
    before = [file.read_bytes() for file in files]
    files[1].unlink()
    times = files[0].stat().st_mtime_ns
    text = evaluate(*words, "benchmark.folder=again", "benchmark.batch=1")
    assert (
        "2 of 2 prompts" in text and "1 of 2" not in text and files[0].stat().st_mtime_ns == times
    )
    # the same noise, whatever was already there
    assert [file.read_bytes() for file in files] == before and before[0] != before[1]
    with pytest.raises(UserError, match="holds samples made otherwise"):
        evaluate(*words, "benchmark.folder=again", "benchmark.seed=2")


def test_a_vision_language_model_answers_and_is_scored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(TEXTS.format(path=tiny_vlms.folder("qwen2_5_vl")))
    rows = [
        {"image": "a.png", "normal_caption": f"cup {i}", "solution": [0, 0, 20, 15]}
        for i in range(3)
    ]
    document(tmp_path / "refcoco_val.json", rows)
    with pytest.raises(UserError, match=r"refcoco_val.json:1: no picture a.png; name the folder"):
        evaluate("mine.yaml", "--benchmark", "refcoco", "benchmark.path=refcoco_val.json")
    picture(tmp_path / "a.png", (40, 30))
    words = ("--benchmark", "refcoco", "benchmark.path=refcoco_val.json", "benchmark.batch=2")
    evaluate("mine.yaml", *words)
    folder = tmp_path / "benchmark-refcoco"
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [row["index"] for row in answers] == [0, 1, 2]
    assert answers[0]["view"]["sizes"] == [[40, 30]]  # for its coordinates
    settings = json.loads((folder / "samples.json").read_text())
    assert settings["system"] == "Answer with a box."  # asked as it was trained
    evaluate("mine.yaml", *words, 'benchmark.system=""', "benchmark.folder=none")
    assert json.loads((tmp_path / "none/samples.json").read_text())["system"] == ""
    # a line that was cut off is answered again; the others are kept
    kept = (folder / "answers.jsonl").read_text().splitlines(keepends=True)
    (folder / "answers.jsonl").write_text(kept[0] + kept[1] + kept[2][:20])
    assert "3 of 3 prompts" in evaluate("mine.yaml", *words)
    assert (folder / "answers.jsonl").read_text() == "".join(kept)
    # the answers alone score the same as the model
    scores = json.loads((folder / "benchmark-refcoco.json").read_text())["total"]
    evaluate(folder / "answers.jsonl", *words[:3], "benchmark.folder=other")
    assert json.loads((tmp_path / "other/benchmark-refcoco.json").read_text())["total"] == scores


def test_answers_of_a_file_are_totalled_by_category(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"imgname": "1.png", "query": f"q{i}", "label": "10"} for i in range(20)]
    for part in ("human", "augmented"):
        file = tmp_path / f"test/test_{part}.json"
        file.parent.mkdir(exist_ok=True)
        document(file, rows)
    answers = [{"index": i, "answer": "10" if i % 4 else "20"} for i in range(39)]
    lines(tmp_path / "answers.jsonl", answers)
    text = evaluate("answers.jsonl", "--benchmark", "chartqa", "benchmark.path=test")
    content = json.loads((tmp_path / "benchmark-chartqa.json").read_text())
    assert content["categories"]["augmented"]["mean"] == 0.75
    assert content["categories"]["augmented"]["interval"] == "Gaffke"
    assert content["total"]["samples"] == 39 and "1 of 40 prompts have no sample" in text
    page = (tmp_path / "benchmark-chartqa.html").read_text()
    assert "relaxed accuracy" in page and "<script" not in page
    rows = (tmp_path / "benchmark-chartqa.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["right"] == "10" and len(rows) == 39


def test_the_page_escapes_what_a_model_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "val.json").write_text(
        json.dumps({"data": [{"question": "<b>who?</b>", "answers": ["x"]}]})
    )
    lines(tmp_path / "a.jsonl", [{"index": 0, "answer": "<script>alert(1)</script>"}])
    evaluate("a.jsonl", "--benchmark", "docvqa", "benchmark.path=val.json")
    page = (tmp_path / "benchmark-docvqa.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page and "<b>who" not in page


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["a", "--benchmark", "orc"], "unknown benchmark 'orc'; did you mean 'ocr'"),
        (["a", "--benchmark", "ocr"], "add benchmark.path=FILE_OR_FOLDER"),
        (["a", "--benchmark", "ocr", "benchmark.path=no.txt"], "benchmark.path=no.txt: no such"),
        (["a", "--benchmark", "ocr", "benchmark.sied=1"], "did you mean 'side'"),
        (["a", "--benchmark", "ocr", "benchmark.path"], "expected benchmark.KEY=VALUE"),
        (["a", "--benchmark", "ocr", "benchmark.limit=0"], "benchmark.limit"),
        (["a", "--benchmark", "geneval", "policy.steps=3"], "holds samples already made"),
        (["a", "--benchmark", "ocr", "--by", "ocr"], "--by is of rewards"),
        (
            ["p.jsonl", "--benchmark", "docvqa", "--checkpoint", "x", "benchmark.path=val.json"],
            "--checkpoint is of a run",
        ),
        (["a", "--benchmark", "geneval"], "name the prompts of a flat folder"),
        (["nowhere.yaml", "--benchmark", "geneval"], "no configuration"),
        (["no.jsonl", "--benchmark", "docvqa", "benchmark.path=val.json"], "no such file"),
        (["p.jsonl", "--benchmark", "ocr", "benchmark.path=p.jsonl"], "give the folder they lie"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, words, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "val.json").write_text('{"data": [{"question": "q", "answers": ["x"]}]}')
    lines(tmp_path / "p.jsonl", [{"text": 'a "sign"'}])
    with pytest.raises(UserError) as error:
        evaluate(*words)
    assert why in str(error.value)


def test_a_model_must_make_what_the_benchmark_judges(desk, monkeypatch):
    monkeypatch.chdir(desk)
    (desk / "val.json").write_text('{"data": [{"question": "q", "answers": ["x"]}]}')
    with pytest.raises(UserError, match="judges texts, but this model makes images"):
        evaluate("mine.yaml", "--benchmark", "docvqa", "benchmark.path=val.json")


def test_a_checkpoint_of_another_model_is_refused(desk, monkeypatch):
    monkeypatch.chdir(desk)
    with pytest.raises(UserError, match="does not fit"):
        sampling.policy_of(desk / "first", ["policy.lora=3"], None)
    assert yaml.safe_load((desk / "first/config.yaml").read_text())["policy"]["sd3"]["lora"] == 2

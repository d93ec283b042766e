"""``mmrl evaluate PATH --benchmark NAME`` as a user meets it, on samples, answers and models."""

import json

import pytest
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
    words = ("--benchmark", "geneval", *JUDGES, "benchmark.num_samples=2", "benchmark.batch=1")
    text = evaluate("mine.yaml", *words)
    assert "2 of 2 prompts" in text
    assert "written to benchmark-geneval/benchmark-geneval.html" in text
    base = desk / "benchmark-geneval"
    files = sorted(base.glob("0000?/samples/000?.png"))
    record = json.loads((base / "00001/metadata.jsonl").read_text())
    assert len(files) == 4 and record == METADATA[1]  # what the official evaluation reads
    content = json.loads((base / "benchmark-geneval.json").read_text())
    assert content["samples_mean"]["samples"] == 4 and content["not_scored"] == 0
    # what was sampled is not sampled again, and the rest has the noise that it would have had
    before = [file.read_bytes() for file in files]
    files[3].unlink()
    times = files[0].stat().st_mtime_ns
    evaluate("mine.yaml", *words)
    assert files[0].stat().st_mtime_ns == times and before[0] != before[1]
    assert [file.read_bytes() for file in files] == before
    with pytest.raises(UserError, match="holds samples made otherwise"):
        evaluate("mine.yaml", *words, "benchmark.seed=2")
    evaluate("first", *words)
    assert (desk / "first/benchmark-geneval/00000/samples/0001.png").is_file()
    (desk / "away.txt").rename(desk / "prompts.txt")
    (desk / "val.json").write_text('{"data": [{"question": "q", "answers": ["x"]}]}')
    with pytest.raises(UserError, match="judges texts, but this model makes images"):
        evaluate("mine.yaml", "--benchmark", "docvqa", "benchmark.path=val.json")
    with pytest.raises(UserError, match="does not fit"):
        sampling.policy_of(desk / "first", ["policy.lora=3"], None)


def test_a_vision_language_model_answers_and_is_scored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(TEXTS.format(path=tiny_vlms.folder("qwen2_5_vl")))
    row = {"image": "a.png", "solution": [0, 0, 20, 15]}
    rows = [row | {"normal_caption": f"cup {i}"} for i in range(3)]
    document(tmp_path / "refcoco_val.json", rows)
    words = ("--benchmark", "refcoco", "benchmark.path=refcoco_val.json")
    with pytest.raises(UserError, match=r"refcoco_val.json:1: no picture a.png; name the folder"):
        evaluate("mine.yaml", *words)
    picture(tmp_path / "a.png", (40, 30))
    evaluate("mine.yaml", *words, "benchmark.batch=2")
    folder = tmp_path / "benchmark-refcoco"
    kept = (folder / "answers.jsonl").read_text().splitlines(keepends=True)
    answers = [json.loads(line) for line in kept]
    assert [row["index"] for row in answers] == [0, 1, 2]
    assert answers[0]["view"]["sizes"] == [[40, 30]]  # for its coordinates
    settings = json.loads((folder / "samples.json").read_text())
    assert settings["system"] == "Answer with a box."  # asked as it was trained
    # a line that was cut off is answered again; the others are kept
    (folder / "answers.jsonl").write_text(kept[0] + kept[1] + kept[2][:20])
    assert "3 of 3 prompts" in evaluate("mine.yaml", *words, "benchmark.batch=2")
    assert (folder / "answers.jsonl").read_text() == "".join(kept)
    # the answers alone score the same as the model
    scores = json.loads((folder / "benchmark-refcoco.json").read_text())["total"]
    evaluate(folder / "answers.jsonl", *words, "benchmark.folder=other")
    assert json.loads((tmp_path / "other/benchmark-refcoco.json").read_text())["total"] == scores


def test_answers_of_a_file_are_totalled_by_category_on_a_page_that_escapes_them(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    rows = [{"imgname": "1.png", "query": f"<b>q{i}", "label": "10"} for i in range(20)]
    for part in ("human", "augmented"):
        document(tmp_path / f"test/test_{part}.json", rows)
    answers = [{"index": i, "answer": "10" if i % 4 else "<script>2"} for i in range(39)]
    lines(tmp_path / "answers.jsonl", answers)
    text = evaluate("answers.jsonl", "--benchmark", "chartqa", "benchmark.path=test")
    content = json.loads((tmp_path / "benchmark-chartqa.json").read_text())
    assert content["categories"]["augmented"]["mean"] == 0.75
    assert content["categories"]["augmented"]["interval"] == "Gaffke"
    assert content["total"]["samples"] == 39 and "1 of 40 prompts have no sample" in text
    page = (tmp_path / "benchmark-chartqa.html").read_text()
    assert "relaxed accuracy" in page and "<script" not in page and "<b>q" not in page
    assert "&lt;script&gt;" in page
    rows = (tmp_path / "benchmark-chartqa.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["right"] == "10" and len(rows) == 39


def test_mistakes_are_one_sentence(tmp_path, monkeypatch, subtests):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "val.json").write_text('{"data": [{"question": "q", "answers": ["x"]}]}')
    lines(tmp_path / "p.jsonl", [{"text": 'a "sign"'}])
    val = "docvqa benchmark.path=val.json"
    for words, why in (
        ("a orc", "unknown benchmark 'orc'; did you mean 'ocr'"),
        ("a ocr benchmark.path=no.txt", "benchmark.path=no.txt: no such"),
        ("a ocr benchmark.sied=1", "did you mean 'side'"),
        ("a ocr benchmark.path", "expected benchmark.KEY=VALUE"),
        ("a geneval policy.steps=3", "holds samples already made"),
        ("a ocr --by ocr", "--by is of rewards"),
        (f"p.jsonl {val} --checkpoint x", "--checkpoint is of a run"),
        ("a geneval", "name the prompts of a flat folder"),
        ("p.jsonl ocr benchmark.path=p.jsonl", "give the folder they lie"),
    ):
        path, name, *rest = words.split()
        with subtests.test(words=words), pytest.raises(UserError, match=why):
            evaluate(path, "--benchmark", name, *rest)

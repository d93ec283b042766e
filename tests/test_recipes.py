"""The shipped recipes of papers: each is checked as a whole, and learns for two iterations on a tiny model."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from mmrl import config
from mmrl.options import TrainOptions
from mmrl.registry import DATA
from mmrl.session import SECTIONS, Session, check_needs, read, scorer

from . import tiny_vlms

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(path.stem for path in (ROOT / "configs/vlm").glob("*.yaml"))
MOST = 34  # values in a configuration; in a mixture each source has two more

BOX, TABLE = [[10, 12, 40, 44]], "<table><tr><td>a</td><td>1</td></tr><tr><td>b</td><td>2</td></tr></table>"
CHOICES = {"choices": ["a cat", "a dog", "a bird"], "answer": "A, C"}
STEPS = {"answer": "12", "key_steps": ["3 boxes", ["4 each", "four each"]]}
TASKS = {
    "boxes": [{"boxes": BOX, "labels": ["dog"]}],
    "counts": [{"answer": 7}],
    "referring": [{"boxes": BOX}],
    "questions": [{"boxes": BOX, "labels": ["dog"]}],
    "videos": [{**CHOICES, "spans": [[0.5, 1.5]]}],
    "videochat_r1": [
        {"task": "ground", "spans": [[0.5, 1.5]]}, {"task": "track", "tracks": BOX * 3}, {"task": "qa", **CHOICES}
    ],
    "steps": [STEPS],
    "mixed": [
        {"task": "match", "answer": "red"}, {"task": "choice", **CHOICES}, {"task": "chart", "answer": "[1, 2]"},
        {"task": "box", "boxes": BOX}, {"task": "open", "answer": "a long sentence about a dog"},
    ],
    "mixed_vlaa": [
        {"task": "digit", "answer": 4}, {"task": "choice", **CHOICES}, {"task": "maths", "answer": "1/2"},
        {"task": "box", "boxes": BOX}, {"task": "open", "answer": "a dog"},
    ],
    "screens": [{"action": "click", "boxes": BOX}, {"action": {"type": "type", "text": "hello"}}],
    "tables": [{"answer": TABLE}],
    "table_questions": [STEPS],
    "diagnoses": [{"labels": ["asthma", "gout"]}],
    "unlabelled": [{}],
    "science": [CHOICES],
    "drawings": [{}],
}  # fmt: skip
SIZES = [
    "policy.tokens=8", "policy.dtype=float32", "policy.lora=4", "train.prompts=2", "train.copies=4",
    "train.batch_size=8", "train.micro_batch=null", "train.iterations=2", "train.precision=fp32",
    "train.gradient_checkpointing=false", "reward.mean_logprob=0.01",  # tells random answers apart, which all earn 0
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quiet():
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """A picture and a video of two seconds."""
    import av

    folder = tmp_path_factory.mktemp("media")
    tiny_vlms.image(70, 60).save(folder / "picture.png")
    with av.open(str(folder / "clip.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width = stream.height = 64
        for array in tiny_vlms.video(8, 64, 64):
            for packet in stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return folder


@pytest.fixture
def recipe(request, tmp_path, media, monkeypatch):
    """A recipe's file and the folder it is run in, which holds rows as the file describes them."""
    name = request.param
    path = ROOT / "configs/vlm" / f"{name}.yaml"
    for file in files(yaml.safe_load(path.read_text())["data"]):
        kind = Path(file).stem
        rows = TASKS.get(name) or TASKS.get(kind) or [{"answer": "12"}]
        seen = {"video": str(media / "clip.mp4")} if "video" in kind else {"image": str(media / "picture.png")}
        seen = {} if kind == "text_maths" else seen
        lines = [{"text": f"question {i}?", **seen, **rows[i % len(rows)]} for i in range(2 * len(rows) + 2)]
        (tmp_path / file).write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.chdir(tmp_path)
    return path


def files(data):
    """Every path in a data section."""
    if isinstance(data, dict):
        return [f for key, value in data.items() for f in ([value] if key == "path" else files(value))]
    return []


def values(section):
    if isinstance(section, dict):
        return sum(map(values, section.values()))
    return 1


@pytest.mark.parametrize("recipe", RECIPES, indirect=True)
def test_a_recipe_is_whole_small_and_valid(recipe):
    found = read(recipe, [])
    assert not config.check(found, SECTIONS, {"optimizer": ("parameters",)})
    assert values(yaml.safe_load(recipe.read_text())) <= MOST
    assert max(map(len, recipe.read_text().splitlines())) <= 120


@pytest.mark.parametrize("name", RECIPES)
def test_the_rows_shipped_beside_a_recipe_show_the_form_it_reads(name):
    found = read(ROOT / f"configs/vlm/{name}.yaml", [])
    data = found.build("data", DATA)
    assert len(data.train)
    check_needs(found, data, {})  # before a reward is built: what their classes say
    check_needs(found, data, scorer(found, ("reward",), found.section("train", TrainOptions)).rewards)


@pytest.mark.parametrize("recipe", RECIPES, indirect=True)
def test_a_recipe_learns_for_two_iterations(recipe, caplog):
    torch.manual_seed(0)
    more = ["train.lengths=[[0,6],[1,8]]"] if "lengths" in recipe.read_text() else []
    tokens = ["policy.tokens=64"] if "truth:" in recipe.read_text() else []
    tiny = "internvl" if "InternVL" in recipe.read_text() else "qwen2_5_vl"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", module="torch|transformers")
        session = Session.of(read(recipe, [*SIZES, *more, *tokens, f"policy.path={tiny_vlms.folder(tiny)}"]))
        trainer = session.trainer()
        for _ in range(2):
            metrics = trainer.iterate()
            assert metrics["loss"] == metrics["loss"] and 0 < metrics["grad_norm"] < float("inf")
            assert metrics["samples/excluded"] == 0 and metrics["skipped_steps"] == 0
            assert all(f"reward/{name}/mean" in metrics for name in session.scorer.rewards)
    ours = [line.getMessage() for line in caplog.records if line.name.startswith(("mmrl", "rewards"))]
    assert not session.scorer.failures and not ours, ours
    assert trainer.iteration == trainer.step == 2


def test_every_recipe_has_its_section_on_the_page():
    page = (ROOT / "docs/recipes.md").read_text()
    missing = [name for name in RECIPES if f"`configs/vlm/{name}.yaml`" not in page]
    assert not missing, missing

"""docs/api.md is what scripts/dev/api.py writes; its examples run, and those of the README."""

import re
import sys
from pathlib import Path

import pytest
from PIL import Image

import mmrl
from tests.api.worlds import TEXTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
README = ROOT / "README.md"


def test_the_page_is_fresh_and_complete():
    sys.path.insert(0, str(ROOT / "scripts" / "dev"))
    try:
        import api
    finally:
        sys.path.remove(str(ROOT / "scripts" / "dev"))
    assert set(api.NAMES) == set(dir(mmrl)) - {"UserError", "__version__"}
    assert PAGE.read_text(encoding="utf-8") == api.page(), "run: python scripts/dev/api.py"


def shortened(name: str, changes: dict[str, str]) -> str:
    small = (ROOT / "configs" / "digits" / f"{name}.yaml").read_text()
    for before, after in changes.items():
        assert before in small
        small = small.replace(before, after)
    return small


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder of a reader, where the shipped configurations are of the smallest models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.csv").write_text("text\n" + "\n".join(TEXTS))
    (tmp_path / "pictures").mkdir()
    rows = ["image,text,answer"]
    for number in range(4):
        Image.new("RGB", (48, 48), (60 * number, 0, 0)).save(tmp_path / f"pictures/{number}.png")
        rows.append(f"{number}.png,how many digits are there?,{number}")
    (tmp_path / "questions.csv").write_text("\n".join(rows))
    folder = tmp_path / "configs" / "digits"
    folder.mkdir(parents=True)
    generator = {
        "world:digits/sd3 ": "world:digits/sd3-test ",
        "prompts_per_iteration: 15": "prompts_per_iteration: 2",
        "group_size: 16": "group_size: 2",
        "train_batch_size: 80": "train_batch_size: 4",
        "prompts: 60": "prompts: 2",
        "reward: {digits_judge: 1.0, clip_score": "reward: {}  # clip_score",
        "guidance: [2.0, 3.0, 4.0]": "guidance: []",
        "reward: {digits: 1.0}": "reward: {jpeg_compressibility: 1.0}",
    }
    answers = {
        "world:digits/vlm ": "world:digits/vlm-test ",
        "prompts_per_iteration: 24": "prompts_per_iteration: 2",
        "group_size: 8": "group_size: 2",
        "train_batch_size: 192": "train_batch_size: 4",
        "prompts: 300": "prompts: 2",
    }
    (folder / "flow_grpo.yaml").write_text(shortened("flow_grpo", generator))
    (folder / "counting.yaml").write_text(shortened("counting", answers))


@pytest.mark.parametrize(
    ("page", "number"), [(PAGE, 0), (PAGE, 1), (README, 0), (README, 1), (README, 2)]
)
def test_an_example_of_a_page_runs(page, number, desk):
    """With the smallest base model and one iteration instead of twenty."""
    pytest.importorskip("pandas")
    code = re.findall(r"```python\n(import mmrl\n.*?)```", page.read_text(), flags=re.S)[number]
    code = code.replace("iterations=20", "iterations=1").replace(
        'iterations": 20', 'iterations": 1'
    )
    code = code.replace("world:digits/clip", "world:digits/clip-test")
    names: dict = {}
    exec(compile(code, page.name, "exec"), names)
    assert names["result"].finished and len(names["result"].metrics) == 1

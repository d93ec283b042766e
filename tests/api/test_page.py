"""docs/api.md is what scripts/dev/api.py writes; its examples run, and those of the README."""

import re
from pathlib import Path

import pytest
import yaml
from PIL import Image

import mmrl
from tests.api.worlds import SETTINGS, TEXTS
from tests.fixtures.programs import load

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
README = ROOT / "README.md"


def test_the_page_is_fresh_and_complete():
    api = load("api")
    assert set(api.NAMES) == set(dir(mmrl)) - {"UserError", "__version__"}
    assert PAGE.read_text(encoding="utf-8") == api.page(), "run: python scripts/dev/api.py"


QUESTIONS = SETTINGS | {
    "policy": {"vlm": {"path": "world:digits/vlm-test", "max_new_tokens": 4}},
    "data": {"digits_questions": {"kinds": ["count"], "scenes": 20, "held_out_scenes": 4}},
    "reward": {"count": 1.0},
}


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder of a reader, where the shipped configurations are of the smallest models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.csv").write_text("text\n" + "\n".join(TEXTS))
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    (tmp_path / "pictures").mkdir()
    rows = ["image,text,answer"]
    for number in range(4):
        Image.new("RGB", (48, 48), (60 * number, 0, 0)).save(tmp_path / f"pictures/{number}.png")
        rows.append(f"{number}.png,how many digits are there?,{number}")
    (tmp_path / "questions.csv").write_text("\n".join(rows))
    folder = tmp_path / "configs" / "digits"
    folder.mkdir(parents=True)
    for name, settings in (("flow_grpo", SETTINGS), ("counting", QUESTIONS)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.parametrize(
    ("page", "number"), [(PAGE, 0), (PAGE, 1), (README, 0), (README, 1), (README, 2)]
)
def test_an_example_of_a_page_runs(page, number, desk):
    """With the smallest base model and one iteration instead of twenty."""
    pytest.importorskip("pandas")
    code = re.findall(r"```python\n(import mmrl\n.*?)```", page.read_text(), flags=re.S)[number]
    code = re.sub(r'(iterations(=|": ))20', r"\g<1>1", code)
    code = code.replace("world:digits/clip", "world:digits/clip-test")
    names: dict = {}
    exec(compile(code, page.name, "exec"), names)
    assert names["result"].finished and len(names["result"].metrics) == 1

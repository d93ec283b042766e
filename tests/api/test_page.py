"""docs/api.md is what scripts/dev/api.py writes, and its examples run."""

import re
import sys
from pathlib import Path

import pytest

import mmrl
from tests.api.worlds import TEXTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"


def test_the_page_is_fresh_and_complete():
    sys.path.insert(0, str(ROOT / "scripts" / "dev"))
    try:
        import api
    finally:
        sys.path.remove(str(ROOT / "scripts" / "dev"))
    assert set(api.NAMES) == set(dir(mmrl)) - {"UserError", "__version__"}
    assert PAGE.read_text(encoding="utf-8") == api.page(), "run: python scripts/dev/api.py"


@pytest.mark.parametrize("number", [0, 1])
def test_an_example_of_the_page_runs(number, tmp_path, monkeypatch):
    """With the smallest base model and one iteration in the place of twenty."""
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.csv").write_text("text\n" + "\n".join(TEXTS))
    (tmp_path / "tiny").mkdir()
    small = (ROOT / "configs" / "digits" / "flow_grpo.yaml").read_text()
    changes = {
        "world:digits/sd3 ": "world:digits/sd3-test ",
        "prompts_per_iteration: 15": "prompts_per_iteration: 2",
        "group_size: 16": "group_size: 2",
        "train_batch_size: 80": "train_batch_size: 4",
        "prompts: 60": "prompts: 2",
        "reward: {digits_judge: 1.0, clip_score": "reward: {}  # clip_score",
        "guidance: [2.0, 3.0, 4.0]": "guidance: []",
        "reward: {digits: 1.0}": "reward: {jpeg_compressibility: 1.0}",
    }
    for before, after in changes.items():
        assert before in small
        small = small.replace(before, after)
    (tmp_path / "configs" / "digits").mkdir(parents=True)
    (tmp_path / "configs" / "digits" / "flow_grpo.yaml").write_text(small)
    code = re.findall(r"```python\n(import mmrl\n.*?)```", PAGE.read_text(), flags=re.S)[number]
    code = code.replace("iterations=20", "iterations=1").replace(
        'iterations": 20', 'iterations": 1'
    )
    names: dict = {}
    exec(compile(code, "docs/api.md", "exec"), names)
    assert names["result"].finished and len(names["result"].metrics) == 1

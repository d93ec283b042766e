"""Data sets of the Hub through the real library, from a server that speaks its protocol."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.core.errors import UserError
from mmrl.data.sources.hub import HubSet, is_hub_name
from tests.fixtures import tiny_vlms

datasets = pytest.importorskip("datasets")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A data set as the Hub stores it, me/mine: four rows to train on, two to test on."""
    datasets.disable_progress_bars()
    stored = tmp_path / "hub" / "me" / "mine" / "data"
    stored.mkdir(parents=True)
    rows = []
    for i in range(6):
        tiny_vlms.image(40, 30, i).save(tmp_path / "picture.png")
        content = (tmp_path / "picture.png").read_bytes()
        rows.append({"problem": f"what is {i}?", "image": {"bytes": content, "path": None}})
    kinds = datasets.Features(problem=datasets.Value("string"), image=datasets.Image())
    whole = datasets.Dataset.from_list(rows, features=kinds)
    whole.select(range(4)).to_parquet(stored / "train-00000-of-00001.parquet")
    whole.select(range(4, 6)).to_parquet(stored / "test-00000-of-00001.parquet")
    return tmp_path


@pytest.mark.slow
def test_a_data_set_is_read_by_its_id_or_as_a_stream_and_refused_in_one_sentence(folder):
    words = [sys.executable, "-m", "tests.fixtures.hub_server", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    whole, streamed = outcomes["whole"], outcomes["streamed"]
    assert whole["train"] == [f"what is {i}?" for i in range(4)]
    assert whole["held_out"] == outcomes["split"]["train"] == ["what is 4?", "what is 5?"]
    assert whole["sizes"] == [[40, 30]] * 4, "pictures are in memory"
    assert whole["lines"][0].endswith("4 to train on, 2 held out (its own split test)")
    assert streamed["train"] == ["what is 0?", "what is 1?"]
    assert "up to the limit" in streamed["lines"][0] and streamed["sizes"] == [[40, 30]] * 2
    for name, words in (
        ("no split", ["no split 'nowhere'", "name one of train, test", "option split"]),
        ("gated", ["it is gated; accept its terms", "hf auth login"]),
        ("absent", ["neither a file or folder here", "check the spelling", "hf auth login"]),
    ):
        error = outcomes[name]["error"]
        assert "\n" not in error and all(word in error for word in words)


@pytest.mark.parametrize(
    "error, words",
    [
        (datasets.exceptions.DatasetNotFoundError("it doesn't exist"), "check the spelling"),
        (datasets.exceptions.DatasetNotFoundError("a gated dataset"), "it is gated"),
        (ConnectionError("Couldn't reach 'a/b' on the Hub"), "the Hub cannot be reached"),
        (ValueError("Config name is missing. Pick one: a, b"), "option subset"),
        (ValueError('Unknown split "x"'), "option split"),
        (RuntimeError("Dataset scripts are no longer supported\n"), "it cannot be read: Dataset"),
    ],
)
def test_errors_of_the_library_become_a_sentence_with_the_remedy(monkeypatch, error, words):
    def refuse(*arguments, **options):
        raise error

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(datasets, "get_dataset_split_names", refuse)
    monkeypatch.setattr("mmrl.data.sources.hub.ask_for_data_set", lambda *_: None)
    with pytest.raises(UserError) as raised:
        HubSet("a/b").splits()
    assert words in str(raised.value) and "\n" not in str(raised.value)
    assert str(raised.value).startswith("data set 'a/b': ")


def test_names_and_the_remedy_without_the_library(monkeypatch):
    assert all(map(is_hub_name, ["squad", "a/b", "HuggingFaceM4/ChartQA", "a-b/c_d.v2"]))
    assert not any(map(is_hub_name, ["a/b/c", "../a", "~/a", "/a", "a b", ".hidden/x", "a/"]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install datasets, or "multimodal-rl\[data\]"'):
        HubSet("a/b").splits()

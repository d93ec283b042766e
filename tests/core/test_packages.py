"""Our packages are found by place; a user's ``rewards.py`` and ``samplers/`` stay theirs."""

import importlib
import pickle
import sys

import pytest

import rewards
import samplers
from mmrl.core import packages
from mmrl.core.errors import UserError
from mmrl.core.registry import import_name

OWN = "def redness(media, prompts):\n    return media[:, 0]\n"


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """An empty folder to work in; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_name_of_the_users_file_is_the_users_and_other_names_are_ours(desk):
    (desk / "rewards.py").write_text(OWN)
    assert import_name("rewards:redness").__module__ == "users_rewards"
    assert import_name("rewards.py:redness") is import_name("rewards:redness")
    assert import_name("rewards.images.jpeg:jpeg_compressibility", "reward") is not None
    assert importlib.import_module("rewards") is rewards and packages.is_ours(rewards)
    with pytest.raises(UserError, match="'rewards' has no 'rednes'"):
        import_name("rewards:rednes")


@pytest.mark.parametrize("init", [True, False], ids=["package", "namespace"])
def test_a_package_of_the_user_may_import_itself_by_its_name(desk, init):
    folder = desk / "samplers"
    folder.mkdir()
    if init:
        (folder / "__init__.py").write_text("")
    (folder / "colour.py").write_text("from samplers.shade import dark\nfrom .shade import light\n")
    (folder / "shade.py").write_text("def dark(): pass\ndef light(): pass\n")
    dark = import_name("samplers.colour:dark")
    from samplers import shade  # the local one has none

    assert shade.dark is dark and dark.__module__ == "users_samplers.shade"
    assert samplers.noise.Rng and "shade" not in str(samplers.__path__)


def test_other_code_of_the_user_finds_what_ours_lacks(desk):
    (desk / "rewards.py").write_text(OWN)
    (desk / "entry.py").write_text("from rewards import ClipScore, redness\n")
    entry = importlib.import_module("entry")
    assert entry.redness is import_name("rewards:redness")
    assert entry.ClipScore is rewards.ClipScore
    assert pickle.loads(pickle.dumps(entry.redness)) is entry.redness
    with pytest.raises(ImportError, match="cannot import name 'blueness'"):
        from rewards import blueness  # noqa: F401

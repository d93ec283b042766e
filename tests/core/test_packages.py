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


def test_without_a_file_of_the_user_the_name_is_ours(desk):
    assert import_name("rewards:ClipScore") is rewards.ClipScore
    with pytest.raises(UserError, match="'rewards' has no 'redness'"):
        import_name("rewards:redness")
    with pytest.raises(UserError, match="cannot import .*'rewards.nothing:redness'"):
        import_name("rewards.nothing:redness")


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


def test_what_the_users_module_lacks_itself_is_said(desk):
    (desk / "rewards.py").write_text("import nothing_of_the_kind\n")
    with pytest.raises(UserError, match="No module named 'nothing_of_the_kind'"):
        import_name("rewards:redness")


def test_the_public_names_are_the_same_modules():
    from mmrl.rewards import ClipScore, clip_score
    from mmrl.rewards.answers import maths
    from mmrl.samplers import noise

    assert clip_score is ClipScore is rewards.ClipScore
    assert maths is importlib.import_module("rewards.answers.maths") and noise is samplers.noise
    importlib.import_module("mmrl.rewards.images.clip_score")
    assert rewards.clip_score is ClipScore, "the module has taken the class's place"
    assert importlib.util.find_spec("mmrl.rewards.nothing") is None


def test_a_module_imported_before_mmrl_gives_way(desk, monkeypatch):
    (desk / "rewards.py").write_text(OWN)
    for name in [x for x in sys.modules if x.partition(".")[0] == "rewards"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(
        sys, "meta_path", [x for x in sys.meta_path if not isinstance(x, packages.OurPackages)]
    )
    theirs = importlib.import_module("rewards")
    assert not packages.is_ours(theirs)
    packages.install()
    assert "rewards" not in sys.modules and sys.modules["users_rewards"] is theirs
    packages.install()
    assert sum(isinstance(finder, packages.OurPackages) for finder in sys.meta_path) == 1

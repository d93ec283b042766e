"""What ``import mmrl`` offers, and that it stays light."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mmrl
from tests.core.test_imports import loaded_by


def test_dir_shows_the_api_and_every_name_is_there():
    assert {"train", "Trainer", "load_policy", "load_run", "evaluate", "check_reward"} <= set(
        dir(mmrl)
    )
    for name in dir(mmrl):
        assert getattr(mmrl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = mmrl.trian


def test_importing_and_listing_names_loads_no_torch():
    assert "torch" not in loaded_by("import mmrl\ndir(mmrl)\nmmrl.UserError")


def test_a_users_error_is_a_value_error():
    assert issubclass(mmrl.UserError, ValueError)
    with pytest.raises(ValueError, match="did you mean 'rewards'"):
        mmrl.list("rewrads")


@pytest.mark.parametrize("name", ["train", "compare"])
def test_packages_that_are_called_stay_packages(name):
    """``mmrl.train`` is a room and a function, whichever is imported first."""
    module = __import__(f"mmrl.{name}", fromlist=[name])
    assert getattr(mmrl, name) is module and callable(module)
    assert "overrides" in inspect.signature(module).parameters


def test_the_package_is_typed():
    """mypy checks typed_use.py with the package."""
    assert (Path(mmrl.__file__).parent / "py.typed").is_file()
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"tests/api/typed_use.py"' in pyproject


def test_names_are_listed_with_a_sentence():
    rewards = mmrl.list("rewards")
    assert "CLIP" in rewards["clip_score"] and "<table>" in rewards._repr_html_()
    assert "digits/flow_grpo" in mmrl.list("configs") and "rewards" in mmrl.list()


def test_importing_sets_how_threads_wait_before_torch_is_loaded():
    """Else two threads of a program on a busy machine spin for each other; what is set stays."""
    code = "import mmrl, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    plain = {name: value for name, value in os.environ.items() if name not in names}
    for added, expected in (({}, True), ({"OMP_WAIT_POLICY": "passive"}, False)):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=plain | added
        )
        assert (done.stdout.strip() != "None") is expected, done.stderr

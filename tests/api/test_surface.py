"""What ``import mmrl`` offers, and that it stays light."""

import importlib
import inspect

import pytest

import mmrl


def test_dir_shows_the_api_and_every_name_is_there():
    assert {"train", "Trainer", "load_policy", "load_run", "evaluate", "check_reward"} <= set(
        dir(mmrl)
    )
    for name in dir(mmrl):
        assert getattr(mmrl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = mmrl.trian


def test_a_package_that_is_called_stays_a_package():
    """``mmrl.train`` is a room and a function, whichever is imported first."""
    module = importlib.import_module("mmrl.train")
    assert mmrl.train is module and callable(module)
    assert "overrides" in inspect.signature(module).parameters

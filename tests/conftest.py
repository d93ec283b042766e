"""Every test: one thread (``MMRL_TEST_THREADS``), no network, one cache of built artifacts for all
workers."""

import atexit
import gc
import logging
import os
import signal
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from mmrl.core import rounding

# Imports and collection make millions of objects that stay. They are set aside once they are there
# (pytest_collection_finish), or the garbage collector would walk through them again and again.
gc.disable()
atexit.register(gc.unfreeze)

# A shell starts a background job with these ignored, nohup the last one, and their children too.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# as the command does, before torch: on Intel's CPUs resuming to the bit depends on it
rounding.prepare()

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from mmrl.core.paths import cache_dir  # noqa: E402
from rewards.answers import maths  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
# fixed now: a test that changes HOME still finds it
os.environ.setdefault("MMRL_CACHE", str(cache_dir()))
torch.set_num_threads(int(os.environ.get("MMRL_TEST_THREADS", "1")))
maths.WORKERS.patience(120)  # math-verify's limit for one formula, on a busy machine
hypothesis.settings.register_profile(
    "mmrl", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("mmrl")


def pytest_collection_modifyitems(config, items):
    """Tests marked gpu need a CUDA device. Rooms with long tests come first,
    so that an idle worker still finds some to take over from the other."""
    items.sort(key=lambda item: item.path.parent.name not in ("train", "scripts", "notebooks"))
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip)


def pytest_collection_finish():
    # pytest adds its handlers to every logger that does not propagate, and torch has eighty of them
    for name, logger in logging.getLogger().manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data beside the checkout; tests that need it are skipped where it is
    not."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no shared folder beside the checkout")
    return folder

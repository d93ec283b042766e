"""The stop button of a notebook: the run is saved and returned, the kernel lives, the bar moves."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BEGIN = """
import mmrl
from tests.api.worlds import SETTINGS
run = mmrl.train(
    SETTINGS | {"data": {"prompts": {"path": "prompts.txt"}}, "run": "stopped"},
    {"train.iterations": 100000},
    callbacks=mmrl.Callback(on_iteration=lambda i, metrics: print("done", i) if i == 1 else None),
)
"""
AFTER = """
assert "SIGINT" in run.stopped, run.stopped
assert len(run.metrics) >= 1 and (run.folder / "checkpoints").is_dir()
more = run.resume({"train.iterations": len(run.metrics) + 1})
assert more.finished
"lives"
"""


@pytest.mark.slow
def test_the_stop_button_saves_and_the_kernel_lives(tmp_path):
    manager = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    pytest.importorskip("pandas")
    (tmp_path / "prompts.txt").write_text("a red one\na blue two\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    kernel, client = manager.start_new_kernel(cwd=str(tmp_path), env=environment)
    try:
        outputs = []

        def hook(message):
            outputs.append(message)
            if message["msg_type"] == "stream" and "done 1" in message["content"]["text"]:
                kernel.interrupt_kernel()

        reply = client.execute_interactive(BEGIN, output_hook=hook, timeout=600)
        assert reply["content"]["status"] == "ok", reply
        kinds = [message["msg_type"] for message in outputs]
        assert "display_data" in kinds and "update_display_data" in kinds  # the bar
        outputs.clear()
        reply = client.execute_interactive(AFTER, output_hook=outputs.append, timeout=600)
        assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)

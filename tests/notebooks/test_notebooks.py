"""Every notebook runs from top to bottom in a kernel, at the suite's sizes (``MMRL_NOTEBOOKS``).
The stop button: the run is saved and returned, the kernel lives, the bar moves."""

import json
import os
from pathlib import Path

import pytest

from tests.fixtures import warm

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
nbformat = pytest.importorskip("nbformat")


def test_there_are_six_and_the_table_names_them():
    table = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) == 6 and all(path.name in table for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path):
    """It says first what it shows and how long it took, and has its form for real weights."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert "Took" in notebook.cells[0].source and 'WEIGHTS = "tiny"' in code[0].source
    assert "multimodal-rl[notebook]" in code[0].source and path.stat().st_size < 20_000


@pytest.fixture(scope="module")
def kernel():
    """One for all of them, emptied in between: the import of torch is most of a small notebook."""
    manager = pytest.importorskip("jupyter_client.manager")
    for name in ("nbclient", "ipykernel", "matplotlib", "pandas"):
        pytest.importorskip(name)
    added = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    started = manager.KernelManager(kernel_name="python3")
    started.start_kernel(
        env=os.environ | added | {"MMRL_NOTEBOOKS": "quick", "OMP_NUM_THREADS": "1"}
    )
    yield started
    started.shutdown_kernel(now=True)


def emptied(place):
    """The cell before a notebook: its folder, no name of the one before, and a comparison's
    processes are forked."""
    return nbformat.v4.new_code_cell(f"""
%reset -f
import os, matplotlib.pyplot
from mmrl.apps.compare import runs
os.chdir({str(place)!r})
matplotlib.pyplot.close("all")
runs.COMMAND = {(*warm.command(), "-m", "mmrl")!r}
del os, matplotlib, runs
""")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, kernel):
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, emptied(tmp_path))
    NotebookClient(notebook, km=kernel, timeout=1800).execute()
    shown = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    assert "text/html" in shown
    if "compare" not in path.name:
        assert "training" in shown  # the bar


BEGIN = """
import os
import mmrl
from tests.api.worlds import SETTINGS
os.chdir({folder!r})
run = mmrl.train(
    SETTINGS | {{"data": {{"prompts": {{"path": "prompts.txt"}}}}, "run": "stopped"}},
    {{"train.iterations": 100000}},
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
def test_the_stop_button_saves_and_the_kernel_lives(tmp_path, kernel):
    (tmp_path / "prompts.txt").write_text("a red one\na blue two\n")
    client = kernel.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=600)
    outputs = []

    def hook(message):
        outputs.append(message)
        if message["msg_type"] == "stream" and "done 1" in message["content"]["text"]:
            kernel.interrupt_kernel()

    try:
        begin = BEGIN.format(folder=str(tmp_path))
        reply = client.execute_interactive(begin, output_hook=hook, timeout=600)
        assert reply["content"]["status"] == "ok", reply
        kinds = [message["msg_type"] for message in outputs]
        assert "display_data" in kinds and "update_display_data" in kinds  # the bar
        outputs.clear()
        reply = client.execute_interactive(AFTER, output_hook=outputs.append, timeout=600)
        assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()

"""Every notebook runs from top to bottom in a kernel, at the suite's sizes (``MMRL_NOTEBOOKS``)."""

import json
from pathlib import Path

import pytest

from tests.fixtures import warm

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
nbformat = pytest.importorskip("nbformat")


def test_six_notebooks_are_in_the_table_and_committed_without_outputs(subtests):
    """They say first what they show and how long it took, and have a form for real weights."""
    table = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) == 6 and all(path.name in table for path in NOTEBOOKS)
    for path in NOTEBOOKS:
        with subtests.test(path.stem):
            notebook = nbformat.read(path, as_version=4)
            nbformat.validate(notebook)
            code = [cell for cell in notebook.cells if cell.cell_type == "code"]
            assert not any(cell.outputs or cell.execution_count for cell in code)
            assert "Took" in notebook.cells[0].source and 'WEIGHTS = "tiny"' in code[0].source
            assert "multimodal-rl[notebook]" in code[0].source and path.stat().st_size < 20_000


@pytest.fixture(scope="module")
def kernel():
    """One for all of them, emptied in between, and forked: the import of torch and diffusers would
    be most of a small notebook."""
    manager = pytest.importorskip("jupyter_client.manager")
    for name in ("nbclient", "ipykernel", "matplotlib", "pandas"):
        pytest.importorskip(name)
    started = manager.KernelManager(kernel_name="python3")
    launcher = ("-m", "ipykernel_launcher", "-f", "{connection_file}")
    started.kernel_spec.argv = [*warm.command(), *launcher]
    started.start_kernel(env=warm.environment({"MMRL_NOTEBOOKS": "quick"}))
    yield started
    started.shutdown_kernel(now=True)


CLEAN = """
%reset -f
import os, matplotlib.pyplot
from mmrl.apps.compare import runs
os.chdir({place!r})
matplotlib.pyplot.close("all")
runs.COMMAND = {command!r}
del os, matplotlib, runs
"""


def emptied(place):
    """The cell before a notebook: its folder, no name of the one before, and a comparison's
    processes are forked."""
    command = (*warm.command(), "-m", "mmrl")
    return nbformat.v4.new_code_cell(CLEAN.format(place=str(place), command=command))


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

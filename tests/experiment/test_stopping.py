"""What ends a run, what it leaves, and what the command's exit status says."""

import json
import subprocess
import sys

import pytest

from mmrl.core.output import Lasting, lasting_output
from tests.fixtures import warm


@pytest.mark.slow
def test_what_ends_a_run_and_what_it_leaves(tmp_path, subtests):
    """One test, so that the runs are made once for all workers."""
    done = warm.run(["-m", "tests.fixtures.stopping_worker", tmp_path])
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    with subtests.test("signals"):
        for name, status in {"SIGINT": 130, "SIGHUP": 75, "SIGQUIT": 75}.items():
            known = outcomes[name]
            assert known["statuses"] == [status], known["said"]
            assert known["checkpoint"] == f"iteration-{known['iterations'][-1]:06d}"
            assert "mmrl train --resume" in known["said"] and "Traceback" not in known["said"]
            assert known["events"][-1] == "stopped" and "finished" not in known["events"]
        known = outcomes["of two"]  # only one of them heard of it
        assert known["statuses"] == [75, 75], known["said"]
        assert "interrupted by SIGTERM" in known["said"] and known["events"][-1] == "stopped"
    with subtests.test("limits, and what is ignored or closed"):
        known = outcomes["time limit"]
        assert known["statuses"] == [75] and "time limit of 0.001 s reached" in known["said"]
        known = outcomes["deaf"]
        assert known["statuses"] == [0] and known["iterations"] == [1, 2, 3, 4]
        assert known["events"][-1] == "finished"
    with subtests.test("code that ends the program is a sentence"):
        for name in ("reward", "data"):
            known = outcomes[name]
            assert known["statuses"] == [2] and "Traceback" not in known["said"]
        said = outcomes["reward"]["said"]
        assert "could not score" in said and "SystemExit: 5" in said
        assert "leaving_data.py:14 ended the program" in outcomes["data"]["said"]
    with subtests.test("a second training is refused, and a dead one's folder goes on"):
        known = outcomes["second"]
        assert known["statuses"] == [2] and known["page"], "readers need no lock"
        assert f"in use by process {known['first']}" in known["said"]
        taken = outcomes["taken over"]
        assert taken["statuses"] == [75]
        assert taken["iterations"] == list(range(1, len(taken["iterations"]) + 1))
    with subtests.test("a full disk is a sentence, and the run goes on later"):
        for size in (1500, 20_000):
            known = outcomes[f"full {size}"]
            assert known["statuses"] == [2] and "Traceback" not in known["said"], known["said"]
            assert "cannot write to" in known["said"] and "free space" in known["said"]
            mended = outcomes[f"mended {size}"]
            assert mended["statuses"] == [0] and mended["iterations"] == [1, 2, 3, 4]


class Broken:
    encoding = "ascii"

    def __init__(self, error):
        self.error = error
        self.written = []

    def write(self, text):
        if self.error:
            raise self.error
        self.written.append(text.encode(self.encoding))

    flush = write


def test_printing_goes_on_whatever_becomes_of_stdout(monkeypatch):
    for error in (BrokenPipeError(), OSError(28, "full"), ValueError("closed")):
        stream = Lasting(Broken(error))
        print("text", file=stream)
        stream.flush()
        assert stream.broken
    monkeypatch.setattr(sys, "stdout", None)  # mmrl train ... >&-
    with lasting_output():
        print("text", flush=True)
        assert sys.stdout.isatty() is False
    assert sys.stdout is None


def test_no_file_takes_the_place_of_a_closed_stdout(tmp_path):
    """Or what libraries print would be written into it, a checkpoint say."""
    code = (
        "import os, sys\nfrom mmrl.core.output import lasting_output\n"
        "with lasting_output():\n"
        "    number = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
        "    os.write(number, b'%d' % number)"
    )
    command = 'exec "$0" -c "$1" "$2" <&- >&- 2>&-'
    arguments = [sys.executable, code, str(tmp_path / "file")]
    subprocess.run(["sh", "-c", command, *arguments], check=True)
    assert int((tmp_path / "file").read_text()) > 2


def test_what_a_terminal_cannot_show_is_replaced(monkeypatch):
    broken = Broken(None)
    monkeypatch.setattr(sys, "stdout", broken)
    broken.flush = lambda: None
    with lasting_output():
        print("7 × 8 → grün")
    assert b"".join(broken.written) == b"7 ? 8 ? gr?n\n" and sys.stdout is broken

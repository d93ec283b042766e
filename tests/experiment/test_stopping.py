"""What ends a run, what it leaves, and what the command's exit status says."""

import json
import subprocess
import sys

import pytest

from mmrl.core.output import Lasting, lasting_output
from tests.fixtures import warm


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopping")
    done = warm.run(["-m", "tests.fixtures.stopping_worker", folder])
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGHUP", 75), ("SIGQUIT", 75)]
)
def test_a_signal_saves_and_the_status_says_that_it_can_be_resumed(outcomes, name, status):
    known = outcomes[name]
    assert known["statuses"] == [status], known["said"]
    assert known["checkpoint"] == f"iteration-{known['iterations'][-1]:06d}"
    assert "mmrl train --resume" in known["said"] and "Traceback" not in known["said"]
    assert known["events"][-1] == "stopped" and "finished" not in known["events"]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_with_one_status(outcomes):
    known = outcomes["of two"]
    assert known["statuses"] == [75, 75], known["said"]
    assert "interrupted by SIGTERM" in known["said"] and known["events"][-1] == "stopped"


@pytest.mark.slow
def test_a_time_limit_can_be_resumed(outcomes):
    known = outcomes["time limit"]
    assert known["statuses"] == [75] and "time limit of 0.001 s reached" in known["said"]


@pytest.mark.slow
def test_an_ignored_signal_stays_ignored(outcomes):
    assert outcomes["nohup"]["statuses"] == [0]
    assert outcomes["nohup"]["iterations"] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_closed_stdout_does_not_end_the_run(outcomes):
    known = outcomes["closed stdout"]
    assert known["statuses"] == [0] and known["iterations"] == [1, 2, 3, 4]
    assert known["events"][-1] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reward", "reward, later", "data"])
def test_code_that_ends_the_program_is_a_sentence(outcomes, name):
    known = outcomes[name]
    assert known["statuses"] == ([0] if name == "reward, later" else [2]), known["said"]
    assert "Traceback" not in known["said"]
    if name == "reward":
        assert "could not score" in known["said"] and "SystemExit: 5" in known["said"]
    if name == "data":
        assert "leaving_data.py:14 ended the program" in known["said"]


@pytest.mark.slow
def test_a_second_training_is_refused_and_a_dead_ones_folder_goes_on(outcomes):
    known = outcomes["second"]
    assert known["statuses"] == [2] and f"in use by process {known['first']}" in known["said"]
    assert known["page"], "readers need no lock"
    taken = outcomes["taken over"]
    assert taken["statuses"] == [75]
    assert taken["iterations"] == list(range(1, len(taken["iterations"]) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1500, 20_000])
def test_a_full_disk_is_a_sentence_and_the_run_goes_on_later(outcomes, size):
    known = outcomes[f"full {size}"]
    assert known["statuses"] == [2] and "Traceback" not in known["said"], known["said"]
    assert "cannot write to" in known["said"] and "free space" in known["said"]
    mended = outcomes[f"mended {size}"]
    assert mended["statuses"] == [0] and mended["iterations"] == [1, 2, 3, 4], mended["said"]


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


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "full"), ValueError("closed")])
def test_whatever_becomes_of_stdout_printing_goes_on(error):
    stream = Lasting(Broken(error))
    print("text", file=stream)
    stream.flush()
    assert stream.broken


def test_a_stdout_that_was_closed_before_is_nowhere(monkeypatch):
    """``mmrl train ... >&-``: Python then has no sys.stdout."""
    monkeypatch.setattr(sys, "stdout", None)
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

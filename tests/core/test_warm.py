"""Processes that are forked are to a test what those are that Python starts."""

import os
import signal
import subprocess
from pathlib import Path

from tests.fixtures import waiting, warm

SHOWN = "import os, sys; print(sys.argv, os.getcwd(), os.environ['A']); sys.exit(3)"
WAITS = "import time; print('begun', flush=True); time.sleep(600)"

FAILS = "import os, time; time.sleep(600 * int(os.environ['RANK'])); 1 / 0"


def test_words_folder_environment_streams_and_status(tmp_path):
    done = warm.run(["-c", SHOWN, "x", 1], tmp_path, A="b")
    assert (done.stdout, done.stderr) == (f"['-c', 'x', '1'] {tmp_path} b\n", "")
    assert done.returncode == 3
    failed = warm.run(["-m", "no_such_module"])
    assert failed.returncode == 1 and "No module named no_such_module" in failed.stderr
    (tmp_path / "beside.py").write_text("VALUE = 7")
    (tmp_path / "main.py").write_text("import beside; print(beside.VALUE, __name__)")
    assert warm.run([tmp_path / "main.py"]).stdout == "7 __main__\n"


def test_a_signal_ends_it():
    process = warm.start(["-c", WAITS])
    waiting.until(lambda: "begun" in process.stdout)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_ranks_find_each_other_and_one_that_fails_ends_all(tmp_path):
    meet = (
        "from accelerate import PartialState; p = PartialState(cpu=True); p.wait_for_everyone()\n"
    )
    write = f"open(r'{tmp_path}/' + str(p.process_index), 'w').write(str(p.num_processes))\n"
    done = warm.ranks(["-c", meet + write + "p.destroy_process_group()"])
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / name).read_text() for name in "01"] == ["2", "2"]
    failed = warm.ranks(["-c", FAILS])
    assert failed.returncode == 1 and "ZeroDivisionError" in failed.stderr


def test_a_client_stands_for_it(tmp_path):
    words = [*warm.command(), "-c", SHOWN]
    done = subprocess.run(words, cwd=tmp_path, env={"A": "c"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, f"['-c'] {Path(os.path.realpath(tmp_path))} c\n")
    process = subprocess.Popen([*warm.command(), "-c", WAITS], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    process.terminate()
    assert process.wait(waiting.HANG) == -signal.SIGTERM

"""A run that is killed at a write and resumed ends as an undisturbed one."""

import json

import pytest

from tests.fixtures import warm

PROGRAM = """
import json, sys
from pathlib import Path
from scripts.dev.soak_parts import killing

killing.warm()
folder = Path(sys.argv[1])
config = killing.configuration(folder, "ToyCausal", 3, log__rollouts=1)
points = lambda count: sorted({*range(1, count + 1, 13), count})
print(json.dumps(list(killing.at_every_write(folder, config, points))))
"""


@pytest.mark.slow
def test_a_kill_at_any_write_loses_nothing_and_repeats_nothing(tmp_path):
    done = warm.run(["-c", PROGRAM, tmp_path])
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert len(outcomes) > 5
    assert [(write, problem) for write, problem in outcomes if problem] == []

"""`scripts/test --quick` runs what tests/quick.txt lists: something of every room with tests."""

from tests.core.test_imports import ROOT

# what only serves others, needs a device, or imports model libraries when it is collected
NO_ROOM = {"fixtures", "gpu", "dry_run", "__pycache__"}


def listed() -> list[str]:
    lines = (ROOT / "tests" / "quick.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_line_is_a_test_that_exists():
    for line in listed():
        file, _, test = line.partition("::")
        assert (ROOT / file).is_file(), f"tests/quick.txt names {file}, which is not there"
        name = test.partition("[")[0]
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), line
    assert len(set(listed())) == len(listed())


def test_no_room_is_left_out():
    rooms = {
        path.parent.relative_to(ROOT / "tests").parts[0]
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    quick = {line.split("/")[1] for line in listed()}
    assert rooms - NO_ROOM <= quick, f"nothing of {sorted(rooms - NO_ROOM - quick)}"

"""The walls between rooms: which package may import which, read from all imports, lazy ones too."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.core.test_imports import FILES, ROOT, absolute
from tests.fixtures import sources

TOP = ("mmrl", "rewards", "samplers")
MODELS = {"core", "config", "samplers", "utils"}
TRAINING = MODELS | {"data", "policies", "objectives", "advantages", "rollout", "train", "scoring"}
# room -> rooms it may import; what stands at the left of a wall never sees what stands at its
# right:
# core <- config, samplers, data <- policies <- objectives, advantages <- rollout <- train <- run <-
# cli
MAY_IMPORT = {
    "samplers": set(),
    "core": {"samplers"},
    "rewards": {"core"},
    "utils": {"core"},
    "cluster": {"core", "rewards", "scoring", "utils"},
    "config": {"cluster", "core", "rewards", "scoring", "monitoring", "objectives", "policies"},
    "data": {"core", "config", "samplers", "utils"},
    "policies": MODELS,
    "objectives": MODELS | {"policies", "rewards"},
    "advantages": {"core", "data", "samplers"},
    "scoring": {"core", "utils", "rewards"},
    "rollout": MODELS | {"data", "policies", "advantages", "rewards"},
    "monitoring": {"core", "data", "rewards", "advantages", "utils"},
    "train": TRAINING | {"monitoring"},
    "run": TRAINING | {"cluster", "monitoring", "rewards"},
    "launch": TRAINING | {"cluster", "monitoring", "run"},
    "worlds": {"core", "policies", "samplers", "utils", "rewards"},
    "remote": {"core", "config", "policies", "run", "scoring", "rewards"},
    "audit": {"core", "config", "data", "run", "scoring", "worlds", "rewards", "samplers"},
    "dry_run": TRAINING | {"run", "worlds"},
    "tools": {"config", "core", "data", "policies", "run", "samplers"},
    "compare": {"config", "core", "data", "monitoring", "run", "utils"},
    "view": {"core", "monitoring", "run"},
    "hub": {"core", "monitoring", "run", "utils"},
    "benchmarks": {"config", "core", "data", "monitoring", "rewards", "run", "samplers", "train"}
    | {"utils"},
    "api": TRAINING | {"audit", "cli", "compare", "monitoring", "rewards", "run"},
    "cli": {
        "audit",
        "benchmarks",
        "launch",
        "compare",
        "config",
        "core",
        "data",
        "dry_run",
        "hub",
        "monitoring",
        "remote",
        "run",
        "scoring",
        "utils",
        "rewards",
        "view",
    },
}
CHECKING = "TYPE_CHECKING"
LOOSE = {"__init__", "__main__"}  # modules at the top of mmrl


def room_of(module: str) -> str:
    """Name the room of a module: the package below ``mmrl``, or ``rewards`` or ``samplers``."""
    parts = module.split(".")
    return parts[0] if parts[0] != "mmrl" else parts[1] if len(parts) > 1 else ""


@cache
def imports(path: Path) -> list[tuple[str, str]]:
    """List (module, name) of every import of ours in a file, at any depth."""
    pairs = []
    for node in sources.nodes(path):
        if isinstance(node, ast.Import):
            pairs += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node.module, node.level, path)
            pairs += [(module, alias.name) for alias in node.names]
    return [(module, name) for module, name in pairs if module.partition(".")[0] in TOP]


def targets(path: Path) -> set[str]:
    """Rooms that a file imports; ``from mmrl import x`` counts as the room x."""
    rooms = {
        room_of(module if module != "mmrl" else f"mmrl.{name}") for module, name in imports(path)
    }
    return rooms - {"", "__version__"}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_every_room_is_in_the_table_and_nothing_lies_loose():
    rooms = {room_of(module_of(path)) for path in FILES} - {""}
    assert rooms - LOOSE == set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_its_walls_allow(room):
    files = [path for path in FILES if room_of(module_of(path)) == room]
    crossed = {
        f"{path.relative_to(ROOT)} imports {target}"
        for path in files
        for target in targets(path) - MAY_IMPORT[room] - {room}
    }
    assert not crossed


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_nobody_imports_what_another_room_keeps_private(room):
    private = {
        f"{path.relative_to(ROOT)} imports {module}.{name}"
        for path in FILES
        if room_of(module_of(path)) == room
        for module, name in imports(path)
        if room_of(module) not in (room, "")
        and any(p.startswith("_") and not p.startswith("__") for p in [*module.split("."), name])
    }
    assert not private


def test_reports_are_written_without_torch():
    """A name in an annotation is no import: what stands under ``if TYPE_CHECKING`` never runs."""
    folder = ROOT / "mmrl" / "monitoring" / "report"
    names = set()
    for path in folder.rglob("*.py"):
        nodes = sources.nodes(path)
        guards = [x for x in nodes if isinstance(x, ast.If) and ast.unparse(x.test) == CHECKING]
        unread = {inner for guard in guards for inner in ast.walk(guard)}
        for node in nodes:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node not in unread:
                names.add(node.module or "")
    assert not {name for name in names if name.partition(".")[0] == "torch"}


def test_the_architecture_page_draws_the_same_walls():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| `")]
    table = {folder.strip(" `/").removeprefix("mmrl/"): text.strip() for folder, _, text in cells}
    for room, allowed in MAY_IMPORT.items():
        folder = room if room in TOP else f"mmrl/{room}"
        assert f"| `{folder}/` |" in page, f"docs/architecture.md has no row for {folder}/"
        assert table[room] == (", ".join(sorted(allowed)) or "none of ours")

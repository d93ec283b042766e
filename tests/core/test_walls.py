"""The walls between rooms: which package may import which, read from all imports, lazy ones too."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.core.test_imports import FILES, ROOT, absolute
from tests.fixtures import sources

TOP = ("mmrl", "rewards", "samplers")
# a room imports only rooms before it, so that nothing of the kernel imports what may be left out:
# zoo, worlds, apps, cli and api
ORDER = (
    "samplers core rewards scoring policies config data advantages objectives rollout monitoring "
    "train experiment zoo worlds apps cli api"
).split()
LOOSE = {"__init__", "__main__"}  # modules at the top of mmrl


def room_of(module: str) -> str:
    """Name the room of a module: the package below ``mmrl``, or ``rewards`` or ``samplers``."""
    parts = module.split(".")
    return parts[0] if parts[0] != "mmrl" else parts[1] if len(parts) > 1 else ""


@cache
def imports(path: Path) -> list[tuple[str, str]]:
    """List (module, name) of every import of mmrl or samplers in a file, at any depth."""
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


def test_a_room_imports_only_rooms_before_it():
    rooms = {room_of(module_of(path)) for path in FILES} - {""}
    assert rooms - LOOSE == set(ORDER), "every room has a place, and nothing lies loose"
    crossed = set()
    for path in FILES:
        room = room_of(module_of(path))
        if room in ORDER:
            may = {*ORDER[: ORDER.index(room) + 1]}
            crossed |= {f"{path.relative_to(ROOT)} imports {r}" for r in targets(path) - may}
    assert not crossed


def test_no_files_import_each_other():
    """At any depth: an import inside a function counts."""
    modules = {module_of(path): path for path in FILES}
    graph = {}
    for module, path in modules.items():
        names = {name for pair in imports(path) for name in (pair[0], ".".join(pair))}
        graph[module] = names & modules.keys() - {module}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_the_architecture_page_lists_the_rooms_in_this_order():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = [line.split("`")[1].strip("/") for line in page.splitlines() if line.startswith("| `")]
    rooms = [folder.removeprefix("mmrl/") for folder in listed]
    assert [room for room in rooms if room in ORDER] == ORDER

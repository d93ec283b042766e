"""Who may import whom, and what must stay light."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.fixtures import sources

ROOT = Path(__file__).resolve().parents[2]
LIGHT = {"diffusers", "transformers", "open_clip", "peft", "timm", "sklearn", "scipy", "xformers"}
# the trainer may see accelerate: `import mmrl` does not load it
HEAVY = LIGHT | {"accelerate", "torchvision"}
FILES = sorted(
    path for room in ("mmrl", "rewards", "samplers") for path in (ROOT / room).rglob("*.py")
)

STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def absolute(module: str | None, level: int, path: Path) -> str:
    """The full name of a possibly relative import."""
    if not level:
        return module or ""
    package = path.relative_to(ROOT).parent.parts
    return ".".join([*package[: len(package) - level + 1], *([module] if module else [])])


def names(node: ast.AST, path: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = absolute(node.module, node.level, path)
        return [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return []


@cache
def imported(path: Path, eager: bool = False) -> set[str]:
    """Full names a file imports; ``eager``: only those that run when it is imported."""
    modules: set[str] = set()

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, STATEMENTS):
                continue  # an expression imports nothing
            lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if eager and (lazy or typing):
                continue
            modules.update(names(child, path))
            walk(child)

    walk(sources.tree(path))
    return modules


def below(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def files_in(folders: list[str]) -> list[Path]:
    return [path for path in FILES if any(path.is_relative_to(ROOT / f) for f in folders)]


CORE = "registry errors types media hub thoughts pretrained weight_files statistics"
OPEN = "base capabilities contracts teaching"
CLIENT = "pool tokens tries wire"  # a teacher elsewhere is asked as a reward is, and is none
FAMILIES = ("mmrl.policies", "mmrl.zoo.models")
ROOMS = ("policies", "objectives", "advantages", "worlds")
LEARNING = ("mmrl.objectives", "mmrl.advantages", "mmrl.zoo.objectives", "mmrl.zoo.advantages")
RUNNING = ("mmrl.train.trainer", "mmrl.worlds")
# rooms, what they must not import, and what of that they may: more than test_walls.py demands
RULES = [
    (["rewards"], ("mmrl", "samplers"), [f"mmrl.core.{part}" for part in CORE.split()]),
    (["mmrl/policies", "mmrl/zoo/models"], (*LEARNING, "mmrl.train.trainer", "rewards"), []),
    (
        ["mmrl/objectives", "mmrl/zoo/objectives"],
        (*FAMILIES, *RUNNING, "rewards"),
        [
            *(f"mmrl.policies.{part}" for part in OPEN.split()),
            *(f"rewards.servers.{part}" for part in CLIENT.split()),
        ],
    ),
    (
        ["mmrl/advantages", "mmrl/zoo/advantages"],
        (*FAMILIES, *LEARNING[::2], *RUNNING, "rewards", "samplers"),
        ["samplers.noise"],  # lots are drawn with the keyed generator, which knows of no sampler
    ),
    (
        ["mmrl/train/trainer.py"],
        (*FAMILIES, *LEARNING, "mmrl.worlds", "mmrl.zoo", "rewards"),
        [f"mmrl.{room}.{part}" for room in ROOMS for part in ("base", "contracts")],
    ),
]


def test_rooms_import_only_what_they_may_know(subtests):
    own = {"torch", "samplers", "xformers", *sys.stdlib_module_names}
    seen = {name for path in files_in(["samplers"]) for name in imported(path)}
    assert {name.partition(".")[0] for name in seen} <= own
    packages = {f"mmrl.{room}" for room in ROOMS}  # what is taken from them has a longer name
    for folders, forbidden, known in RULES:
        with subtests.test(folders=folders):
            wrong = [
                f"{path.relative_to(ROOT)} imports {name}"
                for path in files_in(folders)
                for name in imported(path) - packages
                if below(name, *forbidden) and not below(name, *known)
            ]
            assert not wrong


def test_heavy_libraries_are_imported_inside_functions():
    heavy = [
        f"{path.relative_to(ROOT)} imports {name} when it is imported"
        for path in FILES
        for name in sorted(imported(path, eager=True))
        if name.partition(".")[0] in LIGHT
    ]
    assert not heavy


# what is done, one after the other -> modules that must not be loaded then
LOADS = {
    "import mmrl; dir(mmrl); mmrl.UserError": HEAVY | {"torch"},
    "import mmrl.monitoring.report.page, mmrl.cli.doctor, mmrl.monitoring.log": {"torch"},
    "import mmrl, rewards, samplers": HEAVY,
    # listing what can be configured needs no model library, a refusal no FSDP2
    "from mmrl.core import registry; registry.load_built_in(); import mmrl.experiment.lifecycle": (
        LIGHT | {"torch.distributed.tensor"}
    ),
}


def test_what_must_stay_quick_loads_nothing_heavy(subtests):
    script = "import sys\n" + "\n".join(f"{code}; print(*sys.modules)" for code in LOADS)
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    for (code, heavy), loaded in zip(LOADS.items(), done.stdout.splitlines(), strict=True):
        with subtests.test(code=code):
            assert not heavy & set(loaded.split())

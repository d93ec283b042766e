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
            lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if eager and (lazy or typing):
                continue
            modules.update(names(child, path))
            walk(child)

    walk(sources.tree(path))
    return modules


def below(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def room(*parts: str) -> list[Path]:
    return [path for path in FILES if path.is_relative_to(ROOT.joinpath(*parts))]


def offenders(files: list[Path], bad) -> list[str]:
    imports = [
        (path.relative_to(ROOT), name)
        for path in files
        for name in sorted(imported(path))
        if bad(name)
    ]
    return [f"{path} imports {name}" for path, name in imports]


def test_samplers_import_torch_only():
    def bad(name):
        top = name.partition(".")[0]
        return top not in {"torch", "samplers", "xformers", *sys.stdlib_module_names}

    assert not offenders(room("samplers"), bad)


def test_rewards_know_little_of_ours():
    parts = ("registry", "errors", "types", "media", "hub", "thoughts")
    parts += ("pretrained", "weight_files")  # what loads models and tensors
    parts += ("statistics",)  # the one rule of intervals
    known = [f"mmrl.core.{part}" for part in parts]
    assert not offenders(
        room("rewards"),
        lambda name: below(name, "mmrl", "samplers") and not below(name, *known),
    )


def test_policies_never_see_objectives_rewards_or_the_trainer():
    forbidden = ("mmrl.objectives", "mmrl.advantages", "mmrl.train.trainer", "rewards")
    policies = room("mmrl", "policies") + room("mmrl", "zoo", "models")
    assert not offenders(policies, lambda name: below(name, *forbidden))


# what objectives may see of policies
OPEN = ("base", "capabilities", "contracts", "teaching")
CLIENT = (
    "rewards.servers.pool",
    "rewards.servers.tokens",
    "rewards.servers.tries",
    "rewards.servers.wire",
)


def test_objectives_never_see_a_family():
    def bad(name):
        family = (
            below(name, "mmrl.policies", "mmrl.zoo.models")
            and not below(name, *(f"mmrl.policies.{x}" for x in OPEN))
            and name != "mmrl.policies"
        )
        # a teacher elsewhere is asked as a reward is, and is none
        reward = below(name, "rewards") and not below(name, *CLIENT)
        return family or reward or below(name, "mmrl.train.trainer", "mmrl.worlds")

    assert not offenders(room("mmrl", "objectives") + room("mmrl", "zoo", "objectives"), bad)


def test_advantages_see_no_model():
    forbidden = (
        "mmrl.policies",
        "mmrl.objectives",
        "mmrl.train.trainer",
        "mmrl.worlds",
        "mmrl.zoo.objectives",
        "mmrl.zoo.models",
        "rewards",
        "samplers",
    )

    def bad(name):
        # lots are drawn with the keyed generator, which knows of no sampler
        return below(name, *forbidden) and not below(name, "samplers.noise")

    assert not offenders(room("mmrl", "advantages") + room("mmrl", "zoo", "advantages"), bad)


def test_the_trainer_names_no_concrete_class():
    def bad(name):
        concrete = any(
            name.startswith(f"mmrl.{kind}.")
            for kind in ("policies", "objectives", "advantages", "worlds", "zoo")
        )
        protocol = name.split(".")[2:3] in (["base"], ["contracts"])
        return concrete and not protocol or below(name, "rewards")

    assert not offenders(
        [path for path in FILES if path == ROOT / "mmrl" / "train" / "trainer.py"], bad
    )


def test_heavy_libraries_are_imported_inside_functions():
    heavy = [
        f"{path.relative_to(ROOT)} imports {name} when it is imported"
        for path in FILES
        for name in sorted(imported(path, eager=True))
        if name.partition(".")[0] in LIGHT
    ]
    assert not heavy


def loaded_by(code: str) -> set[str]:
    script = (
        f"import sys\n{code}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_packages_is_light():
    assert not loaded_by("import mmrl, rewards, samplers") & HEAVY


def test_knowing_every_name_is_light():
    """Listing what can be configured needs no model library and a refusal no FSDP2: both stay
    quick."""
    code = (
        "from mmrl.core.registry import load_built_in\n"
        "load_built_in()\nimport mmrl.experiment.lifecycle\n"
    )
    assert (
        not loaded_by(
            code + "assert 'torch.distributed.tensor' not in sys.modules, 'it takes a second'"
        )
        & LIGHT
    )


def test_reading_a_run_needs_no_torch():
    assert "torch" not in loaded_by(
        "import mmrl.monitoring.report.page, mmrl.cli.doctor, mmrl.monitoring.log, "
        "mmrl.core.paths, mmrl.core.machine"
    )

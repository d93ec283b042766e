"""The documentation is run and compared with the code: what it shows works, what it lists is
complete."""

import dataclasses
import importlib.util
import io
import os
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from mmrl import config
from mmrl.cli.app import app
from mmrl.config.options import (
    TrainOptions,
)
from mmrl.config.overrides import SECTIONS
from mmrl.config.plan import arithmetic
from mmrl.core.registry import (
    ALL,
    load_built_in,
)
from mmrl.core.types import Point, Rollout
from mmrl.monitoring.report.runs import read_run

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("options/*.md")])
COMMAND_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
# third-party programs, which are not run here
FOREIGN = {"docker", "pip", "source", "git", "ray"}

load_built_in()


@dataclass(frozen=True)
class Block:
    """A fenced block; ``name`` is the file that its first line names, ``# my_reward.py``."""

    kind: str
    text: str
    line: int
    heading: str

    @property
    def name(self) -> str | None:
        match = re.match(r"# (\S+\.(py|yaml|toml))$", self.text.partition("\n")[0])
        return match and match[1]

    def lines(self) -> int:
        """Without blank ones."""
        return sum(bool(line.strip()) for line in self.text.splitlines())


def blocks(page: Path) -> list[Block]:
    fenced = []
    heading = ""
    inside = None
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if inside is None and line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("```") and inside is None:
            kind = line.removeprefix("```")
            inside = []
            start = number
        elif line.startswith("```"):
            fenced.append(Block(kind, "\n".join(inside) + "\n", start, heading))
            inside = None
        elif inside is not None:
            inside.append(line)
    assert inside is None, f"{page}: a block is not closed"
    return fenced


# docs/extending.md

GUIDE = blocks(DOCS / "extending.md")
PROMISED = {
    block.name: int(n[1])
    for block in GUIDE
    if block.name and (n := re.search(r"in (\d+) lines", block.heading))
}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """An empty folder to work in; registries and imported modules are as before afterwards."""
    entries = {kind: dict(known) for kind, known in ALL.items()}
    modules = set(sys.modules)
    path = list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for kind, known in ALL.items():
        known.clear()
        known.update(entries[kind])
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
    sys.path[:] = path


def test_a_plug_in_is_as_short_as_promised(subtests):
    for name, promised in PROMISED.items():
        with subtests.test(name=name, promised=promised):
            (block,) = [block for block in GUIDE if block.name == name]
            count = block.lines() - 1
            assert count <= promised, (
                f"{name} at line {block.line}: {count} lines besides that of its name"
            )


def test_what_is_promised_is_what_was_asked():
    kinds = {"my_reward.py": 20, "my_flow.py": 40, "my_surrogate.py": 10, "my_data.py": 10}
    kinds["my_filter.py"] = 20
    assert {name: PROMISED.get(name) for name in kinds} == kinds


@pytest.mark.slow
def test_the_guide_works_from_top_to_bottom(bench):
    ran = []
    for block in GUIDE:
        if block.kind == "sh":
            for command in block.text.splitlines():
                run(command, f"extending.md:{block.line}: {command}")
                ran.append(command)
        else:
            assert block.name, f"extending.md:{block.line}: a block without a name"
            save(block, bench)
    assert len(ran) == 11 and (bench / "better" / "velocity.safetensors").is_file()
    for folder in ("first", "parabola", "weighted", "rank"):
        rewards = [line["reward/mean"] for line in read_run(bench / "runs" / folder).metrics]
        start = sum(rewards[:3]) / 3
        end = sum(rewards[-3:]) / 3
        assert end > start + 0.1 and end > 0.9, f"{folder} went from {start:.3f} to {end:.3f}"


def save(block: Block, folder: Path) -> None:
    (folder / block.name).write_text(block.text)
    if block.name == "pyproject.toml":
        pretend_installed(tomllib.loads(block.text)["project"]["entry-points"], folder)


def pretend_installed(groups: dict[str, dict[str, str]], folder: Path) -> None:
    """What an installer writes, without one."""
    sys.path.insert(0, str(folder))
    info = folder / "guide-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guide\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items())
        for group, names in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


def run(command: str, where: str) -> None:
    program, *words = shlex.split(command)
    if program == "python":
        sys.path.insert(0, os.getcwd())  # as python does for a script
        runpy.run_path(words[0], run_name="__main__")
        sys.path.remove(os.getcwd())
        return
    assert program == "mmrl", where
    if "run=runs/package" in words:  # what it learns has been seen four times by then
        words.append("train.iterations=2")
    try:
        with redirect_stdout(io.StringIO()):
            app(words, standalone_mode=False)
    except Exception as error:
        raise AssertionError(f"{where}: {error}") from error


# docs/configuration.md


def rows(page: Path, heading: str) -> dict[str, list[str]]:
    """The table under a heading: first cell, without backquotes -> the other cells."""
    section = re.search(
        rf"^#+ {re.escape(heading)}$(.*?)(?=^#+ "
        rf"|\Z)",
        page.read_text(),
        re.S | re.M,
    )
    assert section, f"{page.name} has no section {heading!r}"
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in section[1].splitlines()
    ]
    return {row[0].strip("`"): row[1:] for row in cells if row and row[0].startswith("`")}


def test_every_section_is_documented():
    assert set(rows(DOCS / "configuration.md", "Sections")) == set(SECTIONS)


def test_the_example_of_batch_arithmetic_is_right():
    text = (DOCS / "configuration.md").read_text()
    section = re.search(r"^## Batch arithmetic$(.*?)^## ", text, re.S | re.M)[1]
    spec = yaml.safe_load(re.search(r"```yaml\n(.*?)```", section, re.S)[1])["train"]
    plan = arithmetic(TrainOptions(**spec), processes=4)
    names = "rows steps prompts_per_process rows_per_process rows_per_step accumulation"
    table = rows(DOCS / "configuration.md", "Batch arithmetic")
    for name in names.split():
        assert table[name][0] == str(getattr(plan, name)), name


# every page

CONFIGS = [(page, block) for page in PAGES if page.name != "extending.md" for block in blocks(page)]
COMMANDS = [
    (page, line)
    for page in COMMAND_PAGES
    if page.name != "extending.md"
    for block in blocks(page)
    if block.kind in ("sh", "bash")
    for line in block.text.replace("\\\n", "").splitlines()
]


def test_a_command_on_a_page_parses_and_its_overrides_are_valid(subtests):
    for page, line in COMMANDS:
        with subtests.test(page.name, line=line):
            assert_valid(page, line)


def assert_valid(page, line):
    """`mmrl train NAME a.b=c` on a shipped configuration must check; other programs and files must
    exist."""
    words = shlex.split(line, comments=True)
    if "-m" in words[1:] and words[0] in ("accelerate", "torchrun", "python"):
        module, *words = words[words.index("-m") + 1 :]
        assert module.startswith("mmrl"), f"{page.name}: {module} is not what the wheel holds"
        assert importlib.util.find_spec(module), f"{page.name}: there is no {module}"
        words = ["mmrl", *words] if module == "mmrl" else []
    while words and "=" in words[0]:  # OMP_NUM_THREADS=1 mmrl ...
        words = words[1:]
    if not words or words[0] in FOREIGN or words[1:] == ["--install-completion"]:
        return
    if words[0] != "mmrl":
        assert (ROOT / words[0]).exists() or shutil.which(words[0]), (
            f"{page.name}: {words[0]} is not there"
        )
        return
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert words[1] in names, f"{page.name}: mmrl has no command {words[1]!r}"
    if words[1] == "compare":
        return check_comparison([word for word in words if word != "data.path=prompts.txt"])
    configs = [
        w
        for w in words[2:]
        if (ROOT / "configs" / w).with_suffix(".yaml").is_file() or w.startswith("configs/")
    ]
    if configs and "--resume" not in words:
        path = ROOT / "configs" / configs[0].removeprefix("configs/").removesuffix(".yaml")
        overrides = [
            word
            for word in words
            if re.match(r"[a-z_.0-9]+=", word)
            and not word.startswith(("data.path=", "benchmark."))
            and "my_" not in word  # a file of the reader's own
        ]
        config.check(config.load(path.with_suffix(".yaml"), overrides))


class Checked(Exception):
    """All was checked that is checked before a run."""


def check_comparison(words: list[str]) -> None:
    """Everything that `mmrl compare` checks before its first run."""

    def checked(*_):
        raise Checked

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Checked):
        patch.setattr("mmrl.apps.compare.command.jobs_of", checked)
        app(words[1:], standalone_mode=False)


YAMLS = [(page, block) for page, block in CONFIGS if block.kind == "yaml"]


def test_a_piece_of_configuration_on_a_page_is_valid(tmp_path, monkeypatch, subtests):
    """Laid over the shipped quickstart, whose sections it replaces."""
    shipped = yaml.safe_load((ROOT / "configs/digits/flow_grpo.yaml").read_text())
    monkeypatch.chdir(ROOT)
    file = tmp_path / "piece.yaml"
    for page, block in YAMLS:
        if "my_" in block.text:
            continue  # names a file of the reader's own
        with subtests.test(page.name, line=block.line):
            if "place: ray" in block.text:
                pytest.importorskip("ray")
            whole = yaml.safe_dump(shipped | yaml.safe_load(block.text), sort_keys=False)
            file.write_text(whole.replace(": 0.0001\n", ": 1e-4\n"))
            config.check(config.load(file))


def on_pages(pattern):
    """What the pages say by this pattern, with the page."""
    return [(page, text) for page in PAGES for text in re.findall(pattern, page.read_text())]


def test_links_lead_somewhere():
    missing = [
        f"{page.name}: {target}"
        for page, target in on_pages(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
        if not target.startswith(("http://", "https://")) and not (page.parent / target).exists()
    ]
    assert not missing


def test_files_named_on_a_page_exist():
    named = on_pages(r"`((?:mmrl|samplers|rewards|tests|scripts|configs|docs)/[\w./-]+)`")
    assert not [f"{page.name}: {name}" for page, name in named if not (ROOT / name).exists()]


def test_dotted_names_on_a_page_exist():
    named = on_pages(r"`((?:mmrl|samplers)(?:\.\w+)+)")
    wrong = [f"{page.name}: {x}" for page, x in named if x not in GROUPS and not resolve(x)]
    assert not wrong


GROUPS = {known.group for known in ALL.values()}


def resolve(dotted: str) -> bool:
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            attribute = __import__(".".join(parts[:cut]), fromlist=["_"])
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            if not hasattr(attribute, name):
                return False
            attribute = getattr(attribute, name)
        return True
    return False


def test_docs_are_part_of_a_source_distribution():
    assert (
        os.fspath("/docs")
        in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"][
            "targets"
        ]["sdist"]["include"]
    )


def test_fields_of_rollouts_and_points_that_pages_name_exist():
    fields = {
        kind.__name__.lower(): {field.name for field in dataclasses.fields(kind)} | set(dir(kind))
        for kind in (Rollout, Point)
    }
    wrong = {
        f"{page.name}: {kind}.{name}"
        for page in [*PAGES, ROOT / "README.md"]
        for kind, name in re.findall(
            r"`(rollout|point)\.(\w+)", page.read_text(encoding="utf-8"), re.IGNORECASE
        )
        if name not in fields[kind.lower()]
    }
    assert not wrong

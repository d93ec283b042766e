"""The documentation is run and compared with the code: what it shows works, what it lists is
complete."""

import configparser
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
from functools import cache
from pathlib import Path

import pytest
import yaml

from mmrl import config
from mmrl.cli.app import app
from mmrl.config.options import TrainOptions
from mmrl.config.overrides import SECTIONS
from mmrl.config.plan import arithmetic
from mmrl.core.registry import ALL, load_built_in
from mmrl.core.types import Point, Rollout
from mmrl.monitoring.report.runs import read_run
from tests.fixtures.command import unchanged

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


def test_a_plug_in_is_as_short_as_promised():
    counts = {block.name: block.lines() - 1 for block in GUIDE}
    assert not {name for name, promised in PROMISED.items() if counts[name] > promised}
    asked = {"my_reward.py": 20, "my_flow.py": 40, "my_surrogate.py": 10, "my_data.py": 10}
    assert PROMISED.items() >= (asked | {"my_filter.py": 20}).items()


@pytest.mark.slow
def test_the_guide_works_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with unchanged(tmp_path):
        follow_the_guide(tmp_path)


def follow_the_guide(bench):
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
    rewards = [line["reward/mean"] for line in read_run(bench / "runs" / "first").metrics]
    start, end = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert end > start + 0.1 and end > 0.9, f"from {start:.3f} to {end:.3f}"


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
    points = configparser.ConfigParser()
    points.read_dict(groups)
    with (info / "entry_points.txt").open("w") as file:
        points.write(file)


def run(command: str, where: str) -> None:
    program, *words = shlex.split(command)
    if program == "python":
        sys.path.insert(0, os.getcwd())  # as python does for a script
        runpy.run_path(words[0], run_name="__main__")
        sys.path.remove(os.getcwd())
        return
    assert program == "mmrl", where
    if words[0] == "train" and "run=runs/first" not in words:  # one of them shall learn
        words.append("train.iterations=2")
    try:
        with redirect_stdout(io.StringIO()):
            app(words, standalone_mode=False)
    except Exception as error:
        raise AssertionError(f"{where}: {error}") from error


# docs/configuration.md


def rows(page: Path, heading: str) -> dict[str, list[str]]:
    """The table under a heading: first cell, without backquotes -> the other cells."""
    pattern = rf"^#+ {re.escape(heading)}$(.*?)(?=^#+ |\Z)"
    section = re.search(pattern, page.read_text(), re.S | re.M)
    assert section, f"{page.name} has no section {heading!r}"
    lines = [line for line in section[1].splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells}


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

BLOCKS = [(page, block) for page in PAGES if page.name != "extending.md" for block in blocks(page)]
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
    places = [ROOT / "configs" / word.removeprefix("configs/") for word in words[2:]]
    files = [place.with_suffix(".yaml") for place in places]
    configs = [f for f, w in zip(files, words[2:]) if f.is_file() or w.startswith("configs/")]
    configs = [f for f in configs if f.parent.name != "real"]  # a script writes their rows
    if configs and "--resume" not in words:
        overrides = [
            word
            for word in words
            if re.match(r"[a-z_.0-9]+=", word)
            and not word.startswith(("data.path=", "benchmark."))
            and "my_" not in word  # a file of the reader's own
        ]
        checked(configs[0], *overrides)


@cache
def checked(file: Path, *overrides: str) -> None:
    config.check(config.load(file, overrides))


class Checked(Exception):
    """All was checked that is checked before a run."""


def check_comparison(words: list[str]) -> None:
    """Everything that `mmrl compare` checks before its first run."""

    def done(*_):
        raise Checked

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Checked):
        patch.setattr("mmrl.apps.compare.command.jobs_of", done)
        app(words[1:], standalone_mode=False)


def test_a_piece_of_configuration_on_a_page_is_valid(tmp_path, monkeypatch, subtests):
    """Laid over the shipped quickstart, whose sections it replaces."""
    shipped = yaml.safe_load((ROOT / "configs/digits/flow_grpo.yaml").read_text())
    monkeypatch.chdir(ROOT)
    file = tmp_path / "piece.yaml"
    for page, block in BLOCKS:
        if block.kind != "yaml" or "my_" in block.text:
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
    named = on_pages(r"\]\((?!https?://)([^)#\s]+)(?:#[^)]*)?\)")
    assert not [f"{page.name}: {file}" for page, file in named if not (page.parent / file).exists()]


def test_files_named_on_a_page_exist():
    named = on_pages(r"`((?:mmrl|samplers|rewards|tests|scripts|configs|docs)/[\w./-]+)`")
    assert not [f"{page.name}: {name}" for page, name in named if not (ROOT / name).exists()]


def test_dotted_names_on_a_page_exist():
    named = on_pages(r"`((?:mmrl|samplers)(?:\.\w+)+)")
    wrong = [f"{page.name}: {x}" for page, x in named if x not in GROUPS and not resolve(x)]
    assert not wrong


GROUPS = {known.group for known in ALL.values()}


def test_every_file_and_name_of_the_reading_guide_exists():
    named = re.findall(r"`([\w/]+)\.py: ([\w.]+)`", (DOCS / "reading.md").read_text())
    dotted = [f"{file.replace('/', '.')}.{name}" for file, name in named]
    assert not [name for name in dotted if not resolve(name)] and len(named) > 30


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


def test_fields_of_rollouts_and_points_that_pages_name_exist():
    kinds = {"rollout": Rollout, "point": Point}
    fields = {k: {f.name for f in dataclasses.fields(v)} | set(dir(v)) for k, v in kinds.items()}
    named = on_pages(r"`((?:[Rr]ollout|[Pp]oint)\.\w+)")
    pairs = [(page, *name.split(".")) for page, name in named]
    assert not [f"{p.name}: {kind}.{x}" for p, kind, x in pairs if x not in fields[kind.lower()]]

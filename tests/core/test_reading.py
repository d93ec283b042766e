"""docs/reading.md leads to code that exists."""

import ast
import re

from tests.core.test_imports import ROOT

PAGE = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([\w/]+\.py): ([\w.]+)`", PAGE)


def names_of(path):
    """Names bound at the top of a file, and Class.name for what its classes hold."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
    return names


def test_every_file_and_name_of_the_reading_guide_exists():
    wrong = {
        f"{file}: {name}"
        for file, name in NAMED
        if not (ROOT / file).is_file() or name not in names_of(ROOT / file)
    }
    assert not wrong and len(NAMED) > 30

"""Rules of language that a machine can check: names that say something, and functions of a size."""

import ast
from collections.abc import Iterable, Iterator

from mmrl.core import registry
from tests.core.test_imports import FILES, ROOT
from tests.fixtures import sources

# they say that there is something, not what it is
VAGUE = set(
    "found one own mine given kept told seen more both there here said asked made wanted taught "
    "spare others other out result res data tmp ret obj".split()
)
MOST_ARGUMENTS = 8  # of what is no plug-in and no command: those have as many as they have options
registry.load_built_in()
PLUG_INS = {"__init__"} | {
    getattr(entry, "__name__", "")
    for entries in registry.ALL.values()
    for entry in entries.values()
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def bound(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of what assignments, loops, comprehensions and ``with`` bind."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.lineno, node.name


def options_of_a_plug_in(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether a configuration or a command line fills the arguments."""
    commands = any("app.command" in ast.unparse(text) for text in node.decorator_list)
    return node.name in PLUG_INS or commands


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in parameters)


def test_the_words_and_counts_are_noticed():
    tree = ast.parse("found = [one for one in x]\nwith y as (a, own):\n    b = given = 1")
    assert {name for _, name in bound(ast.walk(tree))} & VAGUE == {"found", "one", "own", "given"}
    (function,) = ast.parse("def f(a, /, b, c, *, d): pass").body
    assert arguments(function) == 4 and not options_of_a_plug_in(function)


def test_a_name_says_what_the_thing_is():
    vague = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in FILES
        for line, name in sorted(set(bound(sources.nodes(path))))
        if name in VAGUE
    ]
    assert not vague


def test_only_plug_ins_and_commands_take_many_arguments():
    many = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in FILES
        for node in sources.nodes(path)
        if isinstance(node, FUNCTIONS)
        and arguments(node) > MOST_ARGUMENTS
        and not options_of_a_plug_in(node)
    ]
    assert not many

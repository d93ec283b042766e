"""A rule of language that a machine can check: names say something."""

import ast
from collections.abc import Iterable, Iterator

from tests.core.test_imports import FILES, ROOT
from tests.fixtures import sources

# they say that there is something, not what it is
VAGUE = set(
    "found one own mine given kept told seen more both there here said asked made wanted taught "
    "spare others other out result res data tmp ret obj".split()
)


def bound(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of what assignments, loops, comprehensions and ``with`` bind."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.lineno, node.name


def test_a_name_says_what_the_thing_is():
    vague = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in FILES
        for line, name in sorted(set(bound(sources.nodes(path))))
        if name in VAGUE
    ]
    assert not vague

"""Creates small changes of source code (mutants) and applies one to already imported modules.

A mutant is one change in the syntax tree of one file: another comparison or operator, another
constant, a negated condition, a removed statement or keyword argument, ``min`` for ``max``.
Docstrings, annotations, decorators, messages and ``raise`` expressions are not changed.
"""

from __future__ import annotations

import ast
import copy
import functools
import gc
import hashlib
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
PAIRS = (
    ("min", "max"),
    ("amin", "amax"),
    ("clamp_min", "clamp_max"),
    ("argmin", "argmax"),
    ("minimum", "maximum"),
    ("sum", "mean"),
    ("any", "all"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("new_zeros", "new_ones"),
    ("floor", "ceil"),
    ("log", "log1p"),
    ("exp", "expm1"),
    ("sin", "cos"),
    ("group", "global"),
    ("add", "floor"),
)
SWAPS = dict(PAIRS) | {b: a for a, b in PAIRS}
UNWRAPPED = {
    "abs",
    "clamp",
    "clamp_max",
    "clamp_min",
    "cumsum",
    "detach",
    "exp",
    "flip",
    "log",
    "masked_fill",
    "nan_to_num",
    "neg",
    "rsqrt",
    "sqrt",
    "square",
}
# not observable on one CPU, or a check that never fails
KEPT_KEYWORDS = {"device", "strict", "stable"}
MESSAGES = {"warn", "warning", "info", "debug", "print", "UserError", "ValueError", "TypeError"}


@dataclass
class Mutant:
    """Describes one change. ``edit`` applies it to the tree that the mutant was found in."""

    file: str  # below the root
    scope: str  # qualified name of the function or class, "" for the module
    where: str  # "body", "default", "class" or "module"
    lines: tuple[int, int]  # lines of the statement: tests that execute one of them may notice
    line: int
    before: str
    after: str
    number: int  # index among equal changes of one scope
    edit: Callable[[], None] = field(repr=False)
    owner: tuple[ast.AST, ...] = field(repr=False)  # enclosing definitions, outermost first
    statement: ast.stmt = field(repr=False)

    @property
    def name(self) -> str:
        """Name the change, independent of line numbers."""
        return (
            f"{self.file}::{self.scope}::{self.before} => {self.after}"
        ) + f" #{self.number}" * (self.number > 0)

    @property
    def source(self) -> str:
        """Hash the enclosing definition before the change."""
        shown = ast.dump(self.owner[-1] if self.owner else self.statement)
        return hashlib.sha256(shown.encode()).hexdigest()[:12]


def mutants(file: str) -> list[Mutant]:
    """List every mutant of a file, in source order."""
    return _Finder(file, ast.parse((ROOT / file).read_text())).all()


def mutated(file: str, index: int) -> tuple[ast.Module, Mutant]:
    """Return the tree of a file with one change made."""
    tree = ast.parse((ROOT / file).read_text())
    mutant = _Finder(file, tree).all()[index]
    mutant.edit()
    return ast.fix_missing_locations(tree), mutant


class _Finder:
    """Walks a tree and lists its mutants."""

    def __init__(self, file: str, tree: ast.Module):
        self.file = file
        self.tree = tree
        self.owners: list[ast.AST] = []
        self.listed: list[Mutant] = []
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.where = "module"
        self.statement = None

    def all(self) -> list[Mutant]:
        self._statements(self.tree.body)
        return self.listed

    def _scope(self) -> str:
        names = []
        for outer, inner in zip(self.owners, [*self.owners[1:], None]):
            names.append(outer.name)
            if inner is not None and not isinstance(outer, ast.ClassDef):
                names.append("<locals>")
        return ".".join(names)

    def _add(self, node: ast.AST, before: str, after: str, edit: Callable[[], None]) -> None:
        statement = self.statement
        scope = self._scope()
        last = statement.end_lineno
        if inner := getattr(statement, "body", None):
            last = max(statement.lineno, inner[0].lineno - 1)
        if self.where == "default":
            last = self.owners[-1].end_lineno
        number = self.counts[scope, before, after]
        self.counts[scope, before, after] += 1
        self.listed.append(
            Mutant(
                self.file,
                scope,
                self.where,
                (statement.lineno, last),
                node.lineno,
                before,
                after,
                number,
                edit,
                tuple(self.owners),
                statement,
            )
        )

    def _replace(
        self, parent: ast.AST, name: str, index: int | None, node: ast.AST, new: ast.AST
    ) -> None:
        ast.copy_location(new, node)

        def edit() -> None:
            if index is None:
                setattr(parent, name, new)
            else:
                getattr(parent, name)[index] = new

        before = ast.unparse(node)
        after = ast.unparse(new)
        if before != after:
            self._add(node, before, after, edit)

    def _statements(self, body: list[ast.stmt]) -> None:
        bound: set[str] = set()
        for index, statement in enumerate(body):
            if _is_text(statement):
                continue
            self.statement = statement
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                self._definition(statement)
                continue
            if self.where == "body":
                self._removal(body, index, statement, bound)
            if isinstance(statement, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert):
                continue
            if self.where == "module" and _is_alias(statement):
                continue
            self._inside(statement)
            bound |= {
                name.id
                for name in ast.walk(statement)
                if isinstance(name, ast.Name) and _stored(name)
            }

    def _definition(self, statement: ast.FunctionDef | ast.ClassDef) -> None:
        where = self.where
        self.owners.append(statement)
        if isinstance(statement, ast.FunctionDef):
            self.where = "default"
            self._fields(statement.args, ("defaults", "kw_defaults"))
        self.where = "class" if isinstance(statement, ast.ClassDef) else "body"
        self._statements(statement.body)
        self.owners.pop()
        self.where = where

    def _removal(self, body: list, index: int, statement: ast.stmt, bound: set[str]) -> None:
        """Remove a statement, unless that merely leaves a name undefined."""
        targets = getattr(statement, "targets", [])
        again = any(
            isinstance(t, ast.Attribute | ast.Subscript) or _names(t) & bound for t in targets
        )
        parameters = {arg.arg for arg in ast.walk(self.owners[-1].args) if isinstance(arg, ast.arg)}
        again = again or any(_names(t) & parameters for t in targets)
        flow = isinstance(
            statement, ast.Expr | ast.AugAssign | ast.Raise | ast.Continue | ast.Break
        )
        if (
            _is_message(statement)
            or not (flow or again)
            or isinstance(getattr(statement, "value", 0), ast.Yield)
        ):
            return
        new = ast.copy_location(ast.Pass(), statement)

        def edit() -> None:
            body[index] = new

        self._add(statement, ast.unparse(statement).partition("\n")[0][:100], "pass", edit)

    def _inside(self, node: ast.AST) -> None:
        names = [
            name
            for name in node._fields
            if name not in ("annotation", "returns", "decorator_list", "keywords")
        ]
        if isinstance(node, ast.Call):
            if _called(node) in MESSAGES:
                return
            self._keywords(node)
        self._fields(node, names)

    def _fields(self, node: ast.AST, names: list[str] | tuple[str, ...]) -> None:
        for name in names:
            value = getattr(node, name, None)
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                outer = self.statement
                self._statements(value)
                self.statement = outer
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, ast.AST):
                        self._child(node, name, index, item)
            elif isinstance(value, ast.AST):
                self._child(node, name, None, value)

    def _child(self, parent: ast.AST, name: str, index: int | None, node: ast.AST) -> None:
        if isinstance(
            node,
            ast.JoinedStr | ast.operator | ast.cmpop | ast.boolop | ast.unaryop | ast.expr_context,
        ):
            return
        if isinstance(node, ast.expr):
            decides = (
                isinstance(parent, ast.If | ast.While | ast.IfExp) and name == "test"
            ) or name == "ifs"
            decides = decides or isinstance(parent, ast.BoolOp)
            if decides and not isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp):
                self._replace(parent, name, index, node, ast.UnaryOp(ast.Not(), node))
            for new in variants(node):
                self._replace(parent, name, index, node, new)
            if _negative(node):
                return
        if isinstance(node, ast.Lambda):
            self._fields(node, ("body",))
            return
        self._inside(node)

    def _keywords(self, call: ast.Call) -> None:
        for keyword in list(call.keywords):
            if keyword.arg is None or keyword.arg in KEPT_KEYWORDS:
                continue

            def edit(keyword: ast.keyword = keyword) -> None:
                call.keywords.remove(keyword)

            self._add(
                keyword.value,
                f"{_called(call)}(..., {ast.unparse(keyword)})",
                f"{_called(call)}(...)",
                edit,
            )
            # the other value is usually the default
            if not isinstance(getattr(keyword.value, "value", None), bool):
                self._child(keyword, "value", None, keyword.value)


def variants(node: ast.expr) -> Iterator[ast.expr]:
    """Return the mutations of an expression."""
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for replacement in COMPARISONS[type(operator)]:
                operators = [*node.ops[:index], replacement(), *node.ops[index + 1 :]]
                yield ast.Compare(node.left, operators, node.comparators)
    elif (
        isinstance(node, ast.BinOp)
        and type(node.op) in OPERATORS
        and not (_text(node.left) or _text(node.right))
    ):
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield node.operand
        if _negative(node):
            yield ast.UnaryOp(ast.USub(), ast.Constant(node.operand.value + 1))
    elif isinstance(node, ast.Constant):
        yield from (ast.Constant(value) for value in _constants(node.value))
    elif isinstance(node, ast.Call):
        yield from _calls(node)


def _negative(node: ast.expr) -> bool:
    """Tell whether it is a number below 0."""
    return (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
    )


def _constants(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
        if value == 1:
            yield value - 1
    elif isinstance(value, str) and value in SWAPS:
        yield SWAPS[value]


def _calls(node: ast.Call) -> Iterator[ast.expr]:
    name = _called(node)
    if name in SWAPS:
        new = copy.copy(node)
        if isinstance(node.func, ast.Attribute):
            new.func = ast.copy_location(
                ast.Attribute(node.func.value, SWAPS[name], ast.Load()), node.func
            )
            yield new
        elif name in ("min", "max", "any", "all"):
            new.func = ast.copy_location(ast.Name(SWAPS[name], ast.Load()), node.func)
            yield new
    if name in UNWRAPPED and isinstance(node.func, ast.Attribute):
        whole = node.func.value
        if not (isinstance(whole, ast.Name) and whole.id in ("torch", "math", "F")):
            yield whole
        elif name in ("exp", "log", "sqrt", "abs") and node.args:
            yield node.args[0]


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and _text(statement.value)


def _is_message(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and _called(statement.value) in MESSAGES
    )


def _is_alias(statement: ast.stmt) -> bool:
    """Tell whether a statement of the module names a type, or lists what is exported."""
    value = getattr(statement, "value", None)
    exported = any(
        isinstance(t, ast.Name) and t.id == "__all__" for t in getattr(statement, "targets", [])
    )
    return (
        exported
        or isinstance(value, ast.Subscript | ast.BinOp)
        and "BLOCK" not in ast.dump(value)
        and any(
            isinstance(part, ast.Name)
            and part.id in ("Literal", "Annotated", "Callable", "Mapping", "Tensor", "Sequence")
            for part in ast.walk(value)
        )
    )


def _stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _names(target: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(target) if isinstance(name, ast.Name) and _stored(name)}


# -- a mutant in a running process ---------------------------------------------------------------


class Unplaceable(Exception):
    """Signals a change that cannot be applied to a running process."""


def functions(files: list[str]) -> dict[str, list[types.FunctionType]]:
    """Return all functions of these files in this process, including closures and wrapped ones."""
    paths = {str(ROOT / file): file for file in files}
    alive: dict[str, list[types.FunctionType]] = defaultdict(list)
    for thing in gc.get_objects():
        if type(thing) is types.FunctionType and thing.__code__.co_filename in paths:
            alive[paths[thing.__code__.co_filename]].append(thing)
    return alive


def place(file: str, index: int, alive: list[types.FunctionType]) -> None:
    """Apply a change in this process. Raises Unplaceable."""
    tree, mutant = mutated(file, index)
    path = str(ROOT / file)
    if mutant.where == "body":
        _place_code(path, tree, alive)
    elif mutant.where == "default":
        _place_default(mutant, alive)
    else:
        _place_value(path, mutant)


def _codes(code: types.CodeType) -> dict[tuple[str, int], list[types.CodeType]]:
    """Return the code objects of all nested functions, by name and first line."""
    listed: dict[tuple[str, int], list[types.CodeType]] = defaultdict(list)
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            listed[part.co_qualname, part.co_firstlineno].append(part)
            for key, parts in _codes(part).items():
                listed[key] += parts
    return listed


@functools.cache
def _original(path: str) -> dict[tuple[str, int], list[types.CodeType]]:
    return _codes(compile(Path(path).read_text(), path, "exec", dont_inherit=True))


def _place_code(path: str, tree: ast.Module, alive: list[types.FunctionType]) -> None:
    old = _original(path)
    new = _codes(compile(tree, path, "exec", dont_inherit=True))
    placed = 0
    for function in alive:
        key = function.__code__.co_qualname, function.__code__.co_firstlineno
        before = old.get(key, [])
        after = new.get(key, [])
        if function.__code__ not in before or len(before) != len(after):
            continue
        code = after[before.index(function.__code__)]
        if code == function.__code__:
            continue
        try:
            function.__code__ = code
        except ValueError as error:  # another number of variables of the enclosing function
            raise Unplaceable(str(error)) from error
        placed += 1
    if not placed:
        raise Unplaceable("no such function is alive")


def _place_default(mutant: Mutant, alive: list[types.FunctionType]) -> None:
    node = mutant.owner[-1]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    chosen = [
        f
        for f in alive
        if (f.__code__.co_qualname, f.__code__.co_firstlineno) == (mutant.scope, first)
    ]
    if not chosen:
        raise Unplaceable("no such function is alive")
    for function in chosen:
        space = function.__globals__
        if node.args.defaults:
            function.__defaults__ = tuple(
                _value(new, space) if _value_differs(new, old) else old
                for new, old in zip(node.args.defaults, function.__defaults__)
            )
        for arg, new in zip(node.args.kwonlyargs, node.args.kw_defaults):
            if new is not None and _value_differs(new, function.__kwdefaults__[arg.arg]):
                function.__kwdefaults__[arg.arg] = _value(new, space)


def _value_differs(node: ast.expr, old: Any) -> bool:
    """Tell whether a default is a plain number or text other than the old one; names and calls are
    not changed."""
    try:
        return ast.literal_eval(node) != old
    except ValueError:
        return False


def _value(node: ast.expr, space: dict[str, Any]) -> Any:
    expression = ast.fix_missing_locations(ast.Expression(node))
    return eval(compile(expression, "<mutant>", "eval"), space)


def _place_value(path: str, mutant: Mutant) -> None:
    """Set a constant of a module, or an attribute of a class."""
    module = next(
        (m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == path), None
    )
    statement = mutant.statement
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    if module is None or not all(isinstance(target, ast.Name) for target in targets):
        raise Unplaceable("not one name")
    space = dict(vars(module))
    if mutant.where == "class":
        holder = functools.reduce(getattr, mutant.scope.split("."), module)
        value = _value(statement.value, space | dict(vars(holder)))
        for target in targets:
            _set_attribute(holder, target.id, value)
        return
    value = _value(statement.value, space)
    for target in targets:
        old = getattr(module, target.id)
        for user in list(sys.modules.values()):
            if vars(user).get(target.id) is old and getattr(user, "__file__", None):
                setattr(user, target.id, value)


def _set_attribute(holder: type, name: str, value: Any) -> None:
    """Set an attribute with the default of a dataclass, which its subclasses repeat."""
    setattr(holder, name, value)
    fields = getattr(holder, "__dataclass_fields__", {})
    if name in fields:
        with_default = [
            key for key, each in fields.items() if each.default is not each.default_factory
        ]
        for each in [holder, *holder.__subclasses__()]:
            defaults = list(each.__init__.__defaults__ or ())
            defaults[with_default.index(name) - len(with_default)] = value
            each.__init__.__defaults__ = tuple(defaults)

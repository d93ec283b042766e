"""Shows what a configuration can name: a summary of the kinds, one kind, one name with its options,
or a search."""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_origin

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmrl.config.presets import described, presets
from mmrl.config.schema import kind_of
from mmrl.config.values import expected, show
from mmrl.core.errors import UserError, called, suggest
from mmrl.core.paths import config_names, find_config
from mmrl.core.registry import (
    ALL,
    Plugin,
    Registry,
    describe,
    documentation,
    load_built_in,
    options,
)

GROUPS = {"samplers": ("sde_types", "timestep_schedules", "noise_windows")}
CONFIGS = "configs"
PRESET = "presets"
# descriptions of the kinds, and their place in a configuration
ABOUT = {
    "policies": ("models that are trained", "policy"),
    "objectives": ("losses, and the states they evaluate", "objective"),
    "advantages": ("how samples of a prompt are compared", "advantage"),
    "rewards": ("what a good sample is", "reward, evaluate.reward"),
    "data": ("where prompts come from", "data"),
    "optimizers": ("optimizers", "optimizer"),
    "sde_types": ("stochastic steps of a sampler", "policy.NAME.sde_type"),
    "timestep_schedules": ("times of a sampler's steps", "policy.NAME.timestep_schedule"),
    "noise_windows": ("which steps have noise", "policy.NAME.noise_window"),
    "solvers": ("deterministic steps", "policy.NAME.solver"),
    "surrogates": ("losses of ratio and advantage", "objective.policy_gradient.surrogate"),
    "timestep_samplers": ("which timesteps are drawn to re-noise a sample", "objective.NAME"),
    "estimators": ("which masked states are evaluated", "objective.masked"),
    "stages": ("what changes an iteration's rows", "options of train"),
    "monitors": ("metrics of every iteration's samples", "always on"),
    "judges": ("VLMs that rewards ask", "reward.judge.model"),
    "benchmarks": ("published measurements of models", "mmrl evaluate --benchmark"),
    "artifacts": ("the embedded world's models, data", "path: world:NAME"),
    PRESET: ("methods of papers and libraries", "preset"),
    CONFIGS: ("configurations that are shipped", "mmrl train NAME"),
}
KINDS = (*ALL, PRESET, CONFIGS)
UNNAMED = ("stages", "monitors")  # their options belong under `train:`, not under their name


def show_list(words: Sequence[str], search: str | None = None) -> None:
    """Print the answer to ``mmrl list``; through the pager if it does not fit on the terminal.

    No word: a summary. A kind: its names. A name, or a kind and a name: details. Raises UserError
    with the nearest names if there is none.
    """
    load_built_in()
    console = Console(
        file=io.StringIO(),
        force_terminal=sys.stdout.isatty() and "NO_COLOR" not in os.environ,
        width=shutil.get_terminal_size((100, 24)).columns,
        highlight=False,
    )
    if search is not None:
        _search(console, search, words[0] if words else None)
    elif not words:
        _summary(console)
    elif len(words) == 1 and words[0] in (*GROUPS, *KINDS):
        for kind in GROUPS.get(words[0], (words[0],)):
            _kind(console, kind)
    else:
        _name(console, words)
    _page(console.file.getvalue())  # type: ignore[attr-defined]


def _page(text: str) -> None:
    if sys.stdout.isatty() and text.count("\n") >= shutil.get_terminal_size().lines:
        import pydoc

        os.environ.setdefault("LESS", "-RFX")  # with colours
        pydoc.pager(text)
    else:
        print(text, end="")


def names_of(kind: str) -> list[str]:
    """List the names of a kind, sorted."""
    if kind == CONFIGS:
        return config_names()
    return sorted(presets() if kind == PRESET else ALL[kind])


def _line(kind: str, name: str) -> str:
    """Describe a name in one line."""
    if kind == PRESET:
        return f"for {described(name)[0]}"
    return _headline(name) if kind == CONFIGS else describe(ALL[kind][name])


def _headline(name: str) -> str:
    """Return the comment at the beginning of a shipped configuration."""
    with find_config(name).open(encoding="utf-8") as file:
        first = file.readline()
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def _summary(console: Console) -> None:
    table = Table("kind", "names", "what they are", "where they stand", box=None, pad_edge=False)
    for kind in KINDS:
        about, place = ABOUT.get(kind, ("", ""))
        table.add_row(kind, str(len(names_of(kind))), about, Text(place))
    console.print(table)
    console.print(
        "\nmmrl list KIND          its names, such as: mmrl list rewards"
        "\nmmrl list NAME          all about a name, with its options: mmrl list policy_gradient"
        "\nmmrl list --search WORD all names and first lines with that word"
    )


def _kind(console: Console, kind: str) -> None:
    about, place = ABOUT.get(kind, ("", ""))
    console.print(Text(f"{kind}: {about} ({place})", style="bold"))
    _rows(console, [(name, _line(kind, name)) for name in names_of(kind)])


def _rows(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Print names and lines; one line each if not on a terminal, for grep."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, line in rows:
        if console.is_terminal:
            room = max(console.width - width - 4, 30)
            parts = textwrap.wrap(line, room) or [""]
            console.print(Text(f"  {name:<{width}}", style="cyan"), Text(parts[0]))
            for part in parts[1:]:
                console.print(Text(" " * (width + 3) + part))
        else:
            console.print(Text(f"  {name:<{width}}  {line}"), soft_wrap=True)


def _name(console: Console, words: Sequence[str]) -> None:
    """Print all about a name, in every kind that has it."""
    *before, name = words
    kinds = before or list(KINDS)
    for kind in before:
        if kind not in KINDS:
            raise _unknown_kind(kind)
    having = [kind for kind in kinds if name in names_of(kind)]
    if not having:
        raise _unknown_kind(name) if not before else _unknown_name(kinds[0], name)
    for number, kind in enumerate(having):
        if number:
            console.print()
        if kind == CONFIGS:
            text = find_config(name).read_text(encoding="utf-8")
            console.print(Text(f"{name}: {find_config(name)}", style="bold"), soft_wrap=True)
            console.print(Text(text), soft_wrap=True)
        elif kind == PRESET:
            models, sets = described(name)
            console.print(Text(f"preset {name}, for {models}", style="bold"))
            console.print(Text(textwrap.indent(sets, "  ")), soft_wrap=True)
        else:
            _plug_in(console, kind, name, ALL[kind])


def _plug_in(console: Console, kind: str, name: str, registry: Registry) -> None:
    entry = registry[name]
    console.print(Text(f"{registry.kind} {name} ({ABOUT.get(kind, ('', kind))[1]})", style="bold"))
    console.print(Text(textwrap.indent(documentation(entry), "  ")))
    rows = list(_options(entry)) if kind not in UNNAMED else []
    if rows:
        console.print()
        table = Table("  option", "what to write", "default", box=None, pad_edge=False)
        for option, what, default in rows:
            table.add_row(Text(f"  {option}"), Text(what), Text(default))
        console.print(table)


def _options(entry: Plugin) -> Iterator[tuple[str, str, str]]:
    """Yield (option, what to write, default) of a plug-in."""
    for name, parameter in options(entry).items():
        default = parameter.default
        if default is parameter.empty:
            shown = "required"
        elif callable(default):
            shown = called(default)
        elif isinstance(default, (bool, int, float, str, tuple, list, dict, type(None))):
            shown = show(list(default) if isinstance(default, tuple) else default)
        else:
            shown = "{}"  # a record of options, all at their defaults
        yield name, _in_words(kind_of(parameter)), shown


def _in_words(kind: Any) -> str:
    if kind is Any:
        return ""
    words = expected(kind)
    if get_origin(kind) in (list, tuple) and get_args(kind):
        inner = [item for item in get_args(kind) if item is not ...]
        return f"{words} of {', '.join(dict.fromkeys(map(expected, inner)))}"
    return words


def _search(console: Console, word: str, kind: str | None) -> None:
    """Print the names whose name or first line has the word, or all of several words."""
    if kind is not None and kind not in KINDS:
        raise _unknown_kind(kind)
    parts = word.lower().split()
    count = 0
    for place in [kind] if kind else KINDS:
        rows = [(name, _line(place, name)) for name in names_of(place)]
        rows = [(n, line) for n, line in rows if all(p in f"{n} {line}".lower() for p in parts)]
        count += len(rows)
        if rows:
            console.print(Text(place, style="bold"))
            _rows(console, rows)
    if not count:
        names = [name for place in KINDS for name in names_of(place)]
        close = suggest(word, names)
        hint = f"; {close}" if close.startswith("did") else ""
        raise UserError(f"nothing that a configuration can name has {word!r} in its line{hint}")


def _unknown_kind(kind: str) -> UserError:
    """Report that there is no such kind or name."""
    kinds = [*KINDS, *GROUPS]
    close = suggest(kind, kinds)
    if not close.startswith("did"):
        names = [name for place in KINDS for name in names_of(place)]
        close = suggest(kind, names)
    if not close.startswith("did"):
        close = f"known: {', '.join(kinds)}; or look for a word: mmrl list --search {kind}"
    return UserError(f"no plug-ins called {kind!r}; {close}")


def _unknown_name(kind: str, name: str) -> UserError:
    close = suggest(name, names_of(kind))
    hint = close if close.startswith("did") else f"mmrl list {kind} shows all"
    return UserError(f"no {name!r} among the {kind}; {hint}")

"""Lists what a configuration can name, from Python."""

from __future__ import annotations

from html import escape

from mmrl.config.presets import presets
from mmrl.core.errors import UserError, suggest
from mmrl.core.paths import config_names
from mmrl.core.registry import ALL, describe, load_built_in


class Names(dict[str, str]):
    """Maps names to a one-sentence description. Shown as a table in notebooks."""

    def _repr_html_(self) -> str:
        rows = [
            f"<tr><td><code>{escape(name)}</code></td><td>{escape(text)}</td></tr>"
            for name, text in self.items()
        ]
        return f"<table><tbody>{''.join(rows)}</tbody></table>"

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {text}" if text else name for name, text in self.items())


def list_names(kind: str | None = None) -> Names:
    """List what can be named in a configuration, as ``mmrl list`` does: name -> a sentence.

    kind: "rewards", "policies", "objectives", "advantages", "presets", "configs" ...; None: the
    kinds. Raises UserError for an unknown kind, with the nearest.
    """
    load_built_in()
    tables = {name: {n: describe(entry) for n, entry in ALL[name].items()} for name in ALL}
    tables["presets"] = dict.fromkeys(presets(), "")
    tables["configs"] = dict.fromkeys(config_names(), "")
    if kind is None:
        return Names({name: f"{len(table)} names" for name, table in tables.items()})
    if kind not in tables:
        raise UserError(f"nothing is called {kind!r}; {suggest(kind, tables)}")
    return Names(dict(sorted(tables[kind].items())))

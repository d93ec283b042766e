"""Writes docs/methods/, a page for each family of methods, from the registry: run this after adding
a method or changing its docstring.

    python scripts/dev/methods.py

For each method: its docstring, one line of configuration, models, presets, a shipped configuration,
links to committed comparisons, and its options as a table; a figure of all comparisons.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "dev")]

import measured  # noqa: E402
import yaml  # noqa: E402
from option_docs import beside, markdown, shortened, summary, table  # noqa: E402

from mmrl.config.compatibility import KINDS  # noqa: E402
from mmrl.config.presets import presets  # noqa: E402
from mmrl.config.yamltext import read  # noqa: E402
from mmrl.core.registry import (  # noqa: E402
    ADVANTAGES,
    ALL,
    Plugin,
    describe,
    load_built_in,
    options,
)
from mmrl.objectives.kl import KL  # noqa: E402
from mmrl.objectives.terms.entropy import Entropy  # noqa: E402
from mmrl.objectives.terms.imitation import Supervision  # noqa: E402
from mmrl.objectives.terms.importance_sampling import Importance  # noqa: E402
from mmrl.zoo.curricula.drawing import Around  # noqa: E402
from mmrl.zoo.objectives.group_loss import GroupLoss  # noqa: E402
from mmrl.zoo.objectives.group_preference import _Pairwise  # noqa: E402

FOLDER = ROOT / "docs" / "methods"
ANY = "every kind of model"
MANY = 3  # presets that are listed


@dataclass(frozen=True)
class Family:
    """Describes one page. ``registry``: a name of ``ALL``; ``modules``: prefixes of the entries'
    modules, empty: all; ``line``: a configuration with {name} in it; ``key``: the configuration key
    of the method."""

    slug: str
    title: str
    about: str
    registry: str
    key: str
    line: str
    models: str
    modules: tuple[str, ...] = ()

    @property
    def choose(self) -> str:
        """When to choose which method of the page."""
        return CHOOSE[self.slug]

    def holds(self, entry: Plugin) -> bool:
        return not self.modules or entry.__module__.startswith(self.modules)


NAMED = "objective: {name}"
FAMILIES = (
    Family(
        "surrogates",
        "Surrogates",
        "Losses of the ratio and the advantage, `(logp, old, advantage, mask) -> loss`: the option "
        "`surrogate` of `policy_gradient`, `masked`, `unified` and `clip_cov`.",
        "surrogates",
        "surrogate",
        "objective: {{policy_gradient: {{surrogate: {name}}}}}",
        "what the objective that takes it is for; those of whole sequences need log-probs of a row "
        "in one pass",
    ),
    Family(
        "advantages",
        "Advantages",
        "What the samples of a group are worth beside each other, `(rewards, rollout) -> [B, 1]` "
        "or `[B, K]`.",
        "advantages",
        "advantage",
        "advantage: {name}",
        ANY,
    ),
    Family(
        "forward_process",
        "Forward-process objectives",
        "Losses at states that are re-noised from finished samples: no log-probs of a path, any "
        "sampler.",
        "objectives",
        "objective",
        NAMED,
        ANY,
        ("mmrl.zoo.objectives.forward_process",),
    ),
    Family(
        "group_losses",
        "Group losses, preferences and covariance",
        "Losses that compare the samples of a group with each other, in place of a surrogate of "
        "single ones.",
        "objectives",
        "objective",
        NAMED,
        ANY,
        (
            "mmrl.zoo.objectives.group",
            "mmrl.zoo.objectives.preference",
            "mmrl.zoo.objectives.covariance",
        ),
    ),
    Family(
        "policy_gradients",
        "Policy gradients and gradients of the reward",
        "Losses on the path that was sampled, trust regions around it, and rewards that are "
        "differentiated.",
        "objectives",
        "objective",
        NAMED,
        ANY,
    ),
    Family(
        "data",
        "Data, curricula and budgets",
        "Which prompts an iteration sees, how often each is sampled, and what is written beside "
        "them; most take another data section, `of`.",
        "data",
        "data",
        "data: {name}",
        ANY,
    ),
    Family(
        "mask_estimators",
        "Mask estimators",
        "At which masked states the objective `masked` scores a finished sample.",
        "estimators",
        "estimator",
        "objective: {{masked: {{estimator: {name}}}}}",
        KINDS["masked"],
    ),
    Family(
        "sde_types",
        "Stochastic sampler steps",
        "The steps of a flow or diffusion sampler that are random: its decisions.",
        "sde_types",
        "sde_type",
        "policy: {{sd3: {{sde_type: {name}}}}}",
        KINDS["gaussian"],
    ),
    Family(
        "noise_windows",
        "Noise windows",
        "Which sampler steps of an iteration are random, and so are trained.",
        "noise_windows",
        "noise_window",
        "policy: {{sd3: {{noise_window: {name}}}}}",
        KINDS["gaussian"],
    ),
    Family(
        "timestep_samplers",
        "Timestep samplers",
        "At which times forward-process objectives evaluate a finished sample.",
        "timestep_samplers",
        "timestep_sampler",
        "objective: {{nft: {{timestep_sampler: {name}}}}}",
        KINDS["gaussian"],
    ),
)
CHOOSE = {
    "surrogates": "With one optimizer step an iteration the ratio is 1 and all of them are "
    "the same: leave `ppo`. With several, `ppo` and `gspo` are not shown to "
    "be behind in what was measured; `gspo` and `gmpo` where whole answers "
    "are rewarded and some are long; `cispo` keeps the gradient of every "
    "token and needs a cap that fits (a wide one lost most on the VLM).",
    "advantages": "`group` (GRPO) first. `rloo`, `dr_grpo` or `opo` where groups are small "
    "or stds differ much between prompts (on flows they are one and the "
    "same); `flow_grpo`'s std of all groups where rewards are continuous; "
    "`branch`, `tree_mean`, `tree_grpo` for trees; `edge_grpo`, `hapo` and "
    "others by entropy where answers are long; `riskpo`, `copo`, `filtered` "
    "where most groups are flat.",
    "forward_process": "Where samples are drawn without noise, or no log-prob of a path exists: "
    "they learn more from a picture and cost more for one. `awm` and `crd` "
    "reached most at equal samples; `rwr` where only good samples shall be "
    "followed.",
    "group_losses": "Where preferences or regressions are wanted in place of a clip: `rebel` "
    "and `gvpo` regress differences of rewards and need no clip range, but a "
    "scale that fits the reward (with default options they were behind GRPO); "
    "`dpo` and `ipo` learn from pairs, also of a file.",
    "policy_gradients": "`policy_gradient` for everything with decisions on its path; "
    "`grpo_guard` and `flow_dppo` for flows whose early steps run away; "
    "`draft` and `adjoint_matching` where the reward can be differentiated; "
    "`sft` before reinforcement.",
    "data": "A curriculum saves samples where rewards are flat on many prompts and "
    "sampling is what costs. On the tiny VLM, whose updates cost more, none "
    "beat plain prompts at equal seconds.",
    "mask_estimators": "`trajectory` scores the path that was sampled and costs a pass a step; "
    "`mask_grpo` and `d1` remask finished samples and cost less; `sepo` "
    "for score entropy.",
    "sde_types": "`flow_sde` for flows as Flow-GRPO has them, `dance_sde` for DanceGRPO's "
    "constant noise, `cps` where noise must not show, `ode` for objectives of "
    "finished samples, `memoryless` for Adjoint Matching.",
    "noise_windows": "Noise in few early steps (`window`) trains the steps that decide and "
    "costs less: the first half for short samplers, `progressive` or `random_window` (MixGRPO) "
    "for long ones.",
    "timestep_samplers": "`steps` keeps to the times that the sampler visits and is right for few "
    "steps; `uniform` and `logit_normal` for models that will be sampled with "
    "other steps.",
}
FIGURE = (
    "Differences of held-out reward with 95 % intervals, three seeds, of a tiny model; blue: not "
    "shown to differ from 0 after correction for several comparisons."
)
# slug of a page -> classes of no name whose options several of its methods have
BASES: dict[str, dict[str, type]] = {
    "group_losses": {"Every group loss": GroupLoss, "Every loss of pairs": _Pairwise},
    "data": {"Around another source": Around},
}
SECTIONS = {  # of policy_gradient
    "kl": KL,
    "entropy": Entropy,
    "importance_sampling": Importance,
    "sft": Supervision,
}


def pages() -> dict[str, str]:
    """Return the text of every page by its file name."""
    load_built_in()
    texts = {f"{family.slug}.md": page(family) for family in FAMILIES}
    texts["regularisers.md"] = regularisers()
    texts["README.md"] = index()
    for family in FAMILIES:
        if rows := [row for name in entries(family) for row in compared(family.key, name)]:
            texts[f"{family.slug}.svg"] = measured.figure(list(dict.fromkeys(rows)))
    return texts


def compared(key: str, name: str) -> list[measured.Measured]:
    """Return the comparisons about a method: of a configuration that names it with one that does
    not, of the same objective unless the method is one."""
    return [
        row
        for row in measured.comparisons()
        if name in _named(row.plain, key) and name not in _named(row.other, key)
        if key == "objective" or _named(row.plain, "objective") == _named(row.other, "objective")
    ]


def entries(family: Family) -> dict[str, Plugin]:
    """Return the methods of a family; an objective is on the first page that matches."""
    earlier = FAMILIES[: FAMILIES.index(family)]
    return {
        name: entry
        for name, entry in sorted(ALL[family.registry].items())
        if family.holds(entry) and not _outside(entry)
        if not any(f.registry == family.registry and f.holds(entry) for f in earlier)
    }


def _outside(entry: Plugin) -> bool:
    """Tell whether another package, or a test, has registered it."""
    return entry.__module__.partition(".")[0] not in ("mmrl", "samplers", "rewards")


def page(family: Family) -> str:
    parts = [
        f"# {family.title}\n\n{_note()}\n\n{family.about}\n",
        f"**When to choose which.** {family.choose} See also [which method](../which-method.md).\n",
    ]
    if any(compared(family.key, name) for name in entries(family)):
        parts.append(f"![what was measured]({family.slug}.svg)\n\n{FIGURE}\n")
    for title, base in BASES.get(family.slug, {}).items():
        parents = [other for other in BASES[family.slug].values() if other in base.__mro__[1:]]
        parts.append(f"## {title}\n\n{table(shortened(beside(base, parents)[0]))}")
    for name, entry in entries(family).items():
        parts.append(f"## `{name}`\n\n{text_of(entry)}\n\n{facts(family, name, entry)}\n")
        parts.append(options_of(family, entry))
    return "\n".join(filter(None, parts))


def facts(family: Family, name: str, entry: Plugin) -> str:
    """Write in one paragraph how a method is configured, for what, and where it was measured."""
    filling = [p for p in presets() if name in _named(presets()[p], family.key)]
    shipped = [c for c, plain in shipped_configs().items() if name in _named(plain, family.key)]
    models = KINDS.get(decisions_of(entry), family.models)
    links = dict.fromkeys(row.link() for row in compared(family.key, name))
    return " ".join(
        [
            f"`{family.line.format(name=name)}`",
            *([f"For {models}."] if models not in (ANY, family.models) else []),
            *_listed("Presets", filling),
            *([f"Shipped: `{min(shipped, key=_is_large)}`."] if shipped else []),
            *([f"Measured: {', '.join(links)}."] if links else []),
        ]
    )


def _is_large(configuration: str) -> bool:
    """Tell whether a configuration is none of the small ones, which train in minutes."""
    return not configuration.startswith("digits/")


def options_of(family: Family, entry: Plugin) -> str:
    """Write the options of a method as a table, without those of what it extends."""
    known: dict[Plugin, str] = {}
    for name, other in ALL[family.registry].items():
        if _extends(entry, other):
            (home,) = [f for f in FAMILIES if f.registry == family.registry and name in entries(f)]
            known[other] = f"[{name}]({'' if home is family else f'{home.slug}.md'}#{name})"
    for title, base in BASES.get(family.slug, {}).items():
        if inspect.isclass(entry) and base in entry.__mro__:
            known[base] = f"[{title.lower()}](#{title.lower().replace(' ', '-')})"
    rows, changed = beside(entry, known)
    lines = [table(shortened(rows))] if rows else []
    here = f" Here {', '.join(f'`{n}` is {d}' for n, d in changed.items())}." if changed else ""
    if known:
        lines.append(f"Also: {', '.join(known.values())}.{here}\n")
    return "\n".join(lines)


def _extends(entry: Plugin, other: Plugin) -> bool:
    """Tell whether a method is another with changed defaults, or a class on it."""
    if entry is other:
        return False
    if inspect.isclass(entry):
        return other in entry.__mro__
    return other is ADVANTAGES["group"] and set(options(other)) <= set(options(entry))


def decisions_of(entry: object) -> str:
    """Return the kind of decisions that a method needs; "": any."""
    requires = getattr(entry, "requires", None)
    return "" if requires is None else str(requires.decisions)


def regularisers() -> str:
    """Write the page of the terms that ``policy_gradient`` adds to any surrogate."""
    parts = [
        f"# KL, entropy and importance sampling\n\n{_note()}\n\nTerms and corrections beside the "
        "surrogate, options of `policy_gradient`; other objectives that have them say so.\n"
    ]
    for key, section in SECTIONS.items():
        filling = [p for p in presets() if list(_values(presets()[p], key))]
        line = f"`objective: {{policy_gradient: {{{key}: {{...}}}}}}`"
        parts.append(f"## `{key}`\n\n{text_of(section)}\n")
        parts.append(" ".join([line, *_listed("Presets", filling)]) + "\n")
        parts.append(table(shortened(beside(section, [])[0])))
    return "\n".join(parts)


def index() -> str:
    rows = [
        f"| [{family.title}]({family.slug}.md) | {', '.join(f'`{n}`' for n in entries(family))} |"
        for family in FAMILIES
    ]
    sections = ", ".join(f"`{key}`" for key in SECTIONS)
    rows.append(f"| [KL, entropy and importance sampling](regularisers.md) | {sections} |")
    head = f"# Methods by family\n\n{_note()}\n\n| family | methods |\n|---|---|\n"
    return head + "\n".join(rows) + "\n"


def _note() -> str:
    return (
        "Written by `scripts/dev/methods.py` from the registry, shortened; `mmrl list NAME` prints "
        "the rest."
    )


def _listed(what: str, names: list[str]) -> list[str]:
    """List names, the first few of many."""
    if not names:
        return []
    more = f" and {len(names) - MANY} more" if len(names) > MANY else ""
    return [f"{what}: {', '.join(f'`{name}`' for name in names[:MANY])}{more}."]


def text_of(entry: Plugin) -> str:
    """Summarise the docstring as Markdown; of a class without one, the first line of its parent."""
    return markdown(summary(entry) or describe(entry))


@cache
def shipped_configs() -> dict[str, Any]:
    """Read every shipped configuration, by the name that commands take."""
    folder = ROOT / "configs"
    return {
        path.relative_to(folder).with_suffix("").as_posix(): read(path.read_text(), str(path))[0]
        for path in sorted(folder.rglob("*.yaml"))
    }


def _values(plain: Any, key: str) -> Iterator[Any]:
    """Find the values of a key anywhere in a configuration."""
    if isinstance(plain, Mapping):
        for name, value in plain.items():
            if name == key:
                yield value
            yield from _values(value, key)


_found: dict[tuple[int, str], set[str]] = {}


def _named(plain: Any, key: str) -> set[str]:
    """Name the plug-ins that a key chooses: ``name`` or ``{name: {options}}``. Configurations stay,
    so that each is looked through once for a key."""
    if (id(plain), key) in _found:
        return _found[id(plain), key]
    names = _found[id(plain), key] = set()
    for value in _values(plain, key):
        names |= (
            {value}
            if isinstance(value, str)
            else set(value)
            if isinstance(value, Mapping)
            else set()
        )
    return names


def example(family: Family, name: str) -> dict[str, Any]:
    """Return the line of configuration of a method, parsed."""
    plain: dict[str, Any] = yaml.safe_load(family.line.format(name=name))
    return plain


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    for path in [*FOLDER.glob("*.md"), *FOLDER.glob("*.svg")]:
        if path.name not in pages():
            path.unlink()

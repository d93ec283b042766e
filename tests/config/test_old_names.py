"""No page and no comment of a configuration uses a name that mmrl/config/renamed.py calls old."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmrl.config import renamed
from mmrl.core.types import Point, Rollout

ROOT = Path(__file__).resolve().parents[2]
# the overrides of coverage.md are checked whole, by tests/scripts/test_coverage.py
CHECKED = ROOT / "docs" / "coverage.md"
PAGES = [*sorted({*(ROOT / "docs").glob("*.md")} - {CHECKED}), ROOT / "README.md"]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))

OPTIONS = {name for names in renamed.OPTIONS.values() for name in names}
PLUG_INS = {name for names in renamed.PLUG_INS.values() for name in names}
VALUES = {value for values in renamed.VALUES.values() for value in values}
OLD = OPTIONS | PLUG_INS | set(renamed.KINDS) | VALUES

REWARDS = "an option of rewards"
LOOK = "an option of a timestep sampler"
ESTIMATORS = "an option of estimators"
GROUP_LOSSES = "an option of group losses"
CURRENT = {  # word -> page -> what else is called so today
    "batch_size": {"rewards.md": REWARDS, "remote-rewards.md": "an option of remote rewards"}
    | {"ray.md": REWARDS},
    "behaviour": dict.fromkeys(
        ("configuration.md", "text_objectives.md"), "an option of the advantage gcpo"
    ),
    "clip": {"rewards.md": REWARDS, "world.md": "a reward of the digits world"}
    | {"text_objectives.md": GROUP_LOSSES},
    "constant": {"configuration.md": "a schedule of the learning rate"},
    "draws": {"masked.md": ESTIMATORS},
    "eta": {"extending.md": "an argument of an SDE's step", "text_objectives.md": GROUP_LOSSES},
    "flash": {"speed.md": "a kind of attention"},
    "gate": {"rewards.md": "a reward"},
    "grpo": {"configuration.md": "an advantage"} | {"stages.md": "the name of a stage"},
    "guidance": {"configuration.md": "an option of evaluate"},
    "high": {"dgpo.md": LOOK, "masked.md": ESTIMATORS, "rewards.md": REWARDS}
    | {"configuration.md": "an option of entropy"},
    "keep": {"configuration.md": "an option of the advantage branch"},
    "kernel": {"lab-notes.md": "what was found when it was renamed"},
    "low": {"dgpo.md": LOOK, "masked.md": ESTIMATORS, "rewards.md": REWARDS}
    | {"configuration.md": "an option of entropy"},
    "mask": {
        "architecture.md": "a field of Rollout and Point",
        "rewards.md": "a field of a prompt",
        "verifiable-rewards.md": "a field of a prompt",
        "configuration.md": "a field of a prompt",
        "unified.md": "an argument of a user's own code",
        "masked.md": "an option of masked_lm",
    },
    "memory": {"rewards.md": "a value of the rewards' cache"}
    | {"configuration.md": "an option of the advantage filtered"},
    "of": {"rewards.md": REWARDS, "configuration.md": "an option of data sources"},
    "offload": {
        "ray.md": REWARDS,
        "rewards.md": REWARDS,
        "configuration.md": "a value of text_encoder_placement",
    },
    "coords": {"verifiable-rewards.md": "an attribute of Molmo's points"},
    "fields": dict.fromkeys(("remote-rewards.md", "rewards.md"), "an option of remote"),
    "overlap": {"rewards.md": REWARDS},
    "prompts": {
        "api.md": "an argument of rewards",
        "stages.md": "a data source",
        "architecture.md": "a field of Rollout",
        "configuration.md": "an option of evaluate and a data source",
        "extending.md": "an argument of rewards",
        "models.md": "a data source",
        "rewards.md": "an argument of rewards",
        "start.md": "a data source",
    },
    "schedule": dict.fromkeys(("configuration.md", "masked.md"), "an option of masked policies")
    | dict.fromkeys(("flow_objectives.md", "text_objectives.md"), "an option of kl"),
    "score": {
        "judge.md": "a field of a judge's answer",
        "rewards.md": "a field of what a reward returns",
        "text_objectives.md": GROUP_LOSSES,
    },
    "share": {
        "awm.md": LOOK,
        "configuration.md": "an option of replay_buffer and of data sources",
        "dgpo.md": LOOK,
        "nft.md": LOOK,
        "rewards.md": REWARDS,
        "text_objectives.md": "an option of clip_cov and kl_cov",
    },
    "sum": {"world.md": "a kind of question"},
    "text": dict.fromkeys(
        (
            "api.md",
            "architecture.md",
            "autoregressive.md",
            "configuration.md",
            "data.md",
            "extending.md",
            "models.md",
            "rewards.md",
            "vlm-data.md",
            "world.md",
        ),
        "a field of a prompt",
    ),
    "times": {"configuration.md": "an option of replay_buffer"},
    "tokens": {
        "configuration.md": "an option of the schedule dynamic",
        "remote-rewards.md": "a field of an answer",
        "rewards.md": REWARDS,
    },
    "weigh": {
        "architecture.md": "a method of objectives",
        "configuration.md": "an option of janus_unified and of reinforce_pp",
        "unified.md": "an option of janus_unified",
    },
    "width": {
        "configuration.md": "an option of the advantage copo",
        "text_objectives.md": "an option of the surrogate spo",
        "verifiable-rewards.md": "a key of a box",
    },
    "zero": {"verifiable-rewards.md": "an answer"},
}

WORD = r"[A-Za-z_]\w*"
PATH = rf"{WORD}(?:\.{WORD})*"


def inline_code(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, code) of what stands between backticks outside fenced blocks."""
    plain = re.sub(
        r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S
    )
    begin = 0
    # backticks pair inside a paragraph, a row of a table or a point of a list
    for end in [match.start() for match in re.finditer(r"\n\s*\n|\n(?=\||#|\* |\d+\. )|\Z", plain)]:
        for match in re.finditer(r"`([^`]+)`", plain[begin:end]):
            line = plain.count("\n", 0, begin + match.start()) + 1
            yield line, " ".join(match[1].split())
        begin = end


def keys(code: str) -> set[str]:
    """Names before a colon or an equals sign, ``a.b.c: 1`` all three."""
    paths = re.findall(rf"(?<![\w./:])({PATH}) ?[:=](?=[ =\S])(?!//)", code)
    return {name for path in paths for name in path.split(".")}


def names(code: str) -> set[str]:
    """Names of options in inline code: those that stand alone or in a list, and keys."""
    alone = re.sub(r" ?\[.*?\]", "", code)  # a shape
    listed = re.split(r", | or ", alone)
    return keys(code) | {name for name in listed if re.fullmatch(WORD, name)}


def surely_old(code: str) -> set[str]:
    """Old names that their place tells from any other meaning: ``section.name``, a plug-in of a
    kind, the value of an option."""
    wrong = set()
    for section, options in renamed.OPTIONS.items():
        for path in re.findall(rf"(?<![\w./]){section}((?:\.{WORD})+)(?![/\w(])", code):
            wrong |= set(path.strip(".").split(".")) & set(options)
    for option, values in (renamed.PLUG_INS | renamed.VALUES).items():
        wrong |= set(re.findall(rf"\b{option}[:=] ?\{{?({WORD})", code)) & set(values)
    return wrong


def complaints(page: str, text: str) -> list[str]:
    return [
        f"{page}:{line}: `{code}` says {name}"
        for line, code in inline_code(text)
        for name in sorted(
            surely_old(code)
            | {name for name in names(code) & OLD if page not in CURRENT.get(name, {})}
        )
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_inline_code_of_a_page_uses_no_old_name(page):
    assert not complaints(page.name, page.read_text(encoding="utf-8"))


def test_every_exception_is_needed():
    used = {
        (name, page.name)
        for page in PAGES
        for _, code in inline_code(page.read_text(encoding="utf-8"))
        for name in names(code)
    }
    listed = {(name, page) for name, pages in CURRENT.items() for page in pages}
    assert listed <= used, listed - used


@pytest.mark.parametrize(
    "text",
    [
        "`eta: 0.7`",
        "`kernel: ode`",
        "| a | `draws: 6, times: {steps: {skip: 1}}` |",
        "`dgpo: {beta: 10, clip: 5e-2}`",
        "with\n`train.loss_agg_mode:\nrow`",
        "`clip, advantage_clip, kl`",
        "`answer.max_new_tokens` and `logp_dist`",
        "`policy.share=false`",
        "`objective: grpo`",
        "`objective={text: {kl: 0}}`",
        "`guard: {clip_range: 1}`",
        "`every_row`",
        "`row [B]`",
        "`points` or `kernels`",
    ],
)
def test_old_names_are_noticed(text):
    assert complaints("page.md", text)


def test_only_inline_code_is_read():
    text = (
        "eta `configs/guard.yaml`\n```\nkernel: ode\n```\n`world:digits/clip` `clip/high` `a.row`"
    )
    assert not complaints("page.md", text)
    assert list(inline_code("x\n```\n`a`\n```\n`b` and `c\nd`")) == [(5, "b"), (5, "c d")]


# what means nothing else in a comment's plain English
JARGON = {name for name in OPTIONS if "_" in name} | {"copies", "eta", "every_row", "sde"}
PLAIN = {"of", "text"}  # a preposition, and a field of every prompt


def of_comment(comment: str) -> set[str]:
    """Old names in a comment: jargon, keys, and what a value follows."""
    valued = set(re.findall(rf"({WORD}) (?=[\d{{])", comment))
    words = set(re.findall(rf"(?<![\w./])({WORD})(?![\w/])", comment))
    return (
        (words & JARGON)
        | ((keys(comment) | valued) & (OPTIONS | PLUG_INS) - PLAIN)
        | surely_old(comment)
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_comments_of_a_configuration_use_no_old_name(path):
    wrong = {
        f"line {line}: {name}"
        for line, row in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for name in of_comment(row.partition("#")[2])
    }
    assert not wrong


def test_old_names_in_comments_are_noticed():
    for comment in ("kernel: cps", "eta t", "sde\n{", "clip 1e-5", "18 copies", "flash: 0.4"):
        assert of_comment(comment), comment
    assert not of_comment("the score, its tokens and a share of them; images: 2 draws two, a grid")


def test_fields_of_rollouts_and_points_that_pages_name_exist():
    fields = {
        kind.__name__.lower(): {field.name for field in dataclasses.fields(kind)} | set(dir(kind))
        for kind in (Rollout, Point)
    }
    wrong = {
        f"{page.name}: {kind}.{name}"
        for page in PAGES
        for kind, name in re.findall(
            r"`(rollout|point)\.(\w+)", page.read_text(encoding="utf-8"), re.IGNORECASE
        )
        if name not in fields[kind.lower()]
    }
    assert not wrong

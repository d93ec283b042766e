"""The constructor's signature is the schema: conversions, mistakes and their places, overrides,
arithmetic."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from mmrl.config import anchors, build, build_dataclass, build_rewards, check, dump, load
from mmrl.config.options import EvaluateOptions, TrainOptions
from mmrl.config.plan import arithmetic
from mmrl.config.schema import convert
from mmrl.config.values import Place
from mmrl.config.yamltext import read, write
from mmrl.core.errors import UserError
from mmrl.core.registry import (
    ADVANTAGES,
    DATA,
    OBJECTIVES,
    OPTIMIZERS,
    POLICIES,
    REWARDS,
    Registry,
)
from mmrl.objectives import Objective
from tests.fixtures.mistakes import message

KERNEL = Registry("kernel")
THING = Registry("thing")


@KERNEL.register("plain")
def plain(x):
    """A function without options."""
    return x


@KERNEL.register("scaled")
def scaled(x, *, by: float = 2.0, deep: Annotated[Any, KERNEL] = plain):
    """A function with an option that is itself a plug-in."""
    return by * deep(x)


@dataclass
class Inner:
    rank: int
    names: list[str] | None = None
    again: Inner | None = None


class Colour(enum.Enum):
    red = "red"
    blue = "blue"


class Base:
    def __init__(self, net: str = "", width: int | None = None):
        self.net = net
        self.width = width


@THING.register("box")
class Box(Base):
    not_options = ("net",)

    def __init__(
        self,
        size: int,
        eta: float = 0.5,
        name: str = "x",
        open: bool = False,
        mode: Literal["a", "bee", 3] = "a",
        clip: float | tuple[float, float] = 1.0,
        inner: Inner | int | None = None,
        kernel: Annotated[Any, KERNEL] = plain,
        table: dict[str, list[int]] | None = None,
        colour: Colour = Colour.red,
        where: Path | float | None = None,
        guess=3,
        **options: Any,
    ):
        super().__init__("net", **options)
        if eta < 0:
            raise UserError("eta must not be negative")
        if name == "value":
            raise ValueError("this name is taken")
        self.__dict__.update(
            {k: v for k, v in locals().items() if k not in ("self", "options", "__class__")}
        )


def box(**options: Any) -> Box:
    return build({"box": {"size": 1, **options}}, THING, "things")


# Conversions


def test_an_option_gets_the_type_of_its_annotation(subtests):
    for option, written, expected in [
        ("size", 1e3, 1000),
        ("eta", 3, 3.0),
        ("name", "8", "8"),
        ("open", True, True),
        ("open", "yes", True),
        ("open", "off", False),
        ("mode", "bee", "bee"),
        ("mode", 3, 3),
        ("clip", 2, 2.0),
        ("clip", [1, 2.5], (1.0, 2.5)),
        ("inner", None, None),
        ("inner", 4, 4),
        ("inner", {"rank": 2}, Inner(2)),
        ("width", 7, 7),
        ("width", None, None),
        (
            "inner",
            {"rank": 2, "again": {"rank": 3, "names": ["a"]}},
            Inner(2, None, Inner(3, ["a"])),
        ),
        ("kernel", "plain", plain),
        ("table", {"a": [1, 2]}, {"a": [1, 2]}),
        ("colour", "blue", Colour.blue),
        ("where", 0.05, 0.05),
        ("where", "a/b.txt", Path("a/b.txt")),
        ("guess", 2.5, 2.5),
        ("guess", 2, 2),
    ]:
        with subtests.test(option=option, written=written):
            converted = vars(box(**{option: written}))[option]
            assert converted == expected and type(converted) is type(expected)


def test_a_wrong_option_names_its_place_and_what_was_expected(subtests):
    for option, written, complaint in [
        ("size", "eight", "things.box.size: expected an integer, got 'eight'"),
        ("size", 4.5, "things.box.size: expected an integer, got 4.5"),
        ("size", True, "things.box.size: expected an integer, got true"),
        ("size", None, "things.box.size: expected an integer, got null"),
        ("size", 2**70, "expected an integer below 2^63"),
        ("eta", "0.5", "things.box.eta: expected a number, got '0.5'"),
        ("eta", float("nan"), "things.box.eta: expected a finite number, got nan"),
        ("eta", float("inf"), "expected a finite number, got inf"),
        ("eta", 10**400, "expected a finite number, got an integer of more than 20 digits"),
        ("eta", -1, "things.box: eta must not be negative"),
        ("name", 8, "things.box.name: expected text, got 8; write it in quotes: '8'"),
        ("name", "value", "things.box: this name is taken"),
        ("open", "maybe", "things.box.open: expected true or false, got 'maybe'"),
        ("open", 1, "expected true or false, got 1"),
        ("mode", "be", "expected one of 'a', 'bee', 3, got 'be'; did you mean 'bee'?"),
        ("mode", True, "expected one of 'a', 'bee', 3, got true"),
        ("clip", [1, 2, 3], "things.box.clip: expected 2 values, got 3: [1, 2, 3]"),
        ("clip", [1, "x"], "things.box.clip.1: expected a number, got 'x'"),
        ("clip", "wide", "things.box.clip: expected a number or a list, got 'wide'"),
        (
            "inner",
            "many",
            "expected a mapping of rank, names, again, an integer or null, got 'many'",
        ),
        (
            "inner",
            {"rnk": 2, "rank": 1},
            "things.box.inner.rnk: unknown option; did you mean 'rank'? (inner takes: rank",
        ),
        (
            "inner",
            {"r": 2, "rank": 1},
            "things.box.inner.r: unknown option; it is called 'rank' here (inner takes: rank",
        ),
        ("inner", {}, "things.box.inner: missing rank, which inner needs"),
        (
            "inner",
            {"rank": 1, "again": {"rank": "x"}},
            "things.box.inner.again.rank: expected an integer, got 'x'",
        ),
        ("kernel", "scald", "things.box.kernel: unknown kernel 'scald'; did you mean 'scaled'?"),
        (
            "kernel",
            {"scaled": {"by": "x"}},
            "things.box.kernel.scaled.by: expected a number, got 'x'",
        ),
        (
            "kernel",
            {"scaled": 3},
            "kernel.scaled: expected options, {option: value}, got 3 (scaled takes: by, deep)",
        ),
        ("kernel", {"scaled": {}, "plain": {}}, "expected one kernel, got 2: scaled, plain"),
        ("kernel", 3, "expected a kernel, name or {name: {options}}, got 3"),
        ("kernel", {}, "expected a kernel, name or {name: {options}}, got {}"),
        ("kernel", {3: {}}, "expected the name of a kernel, got 3"),
        ("table", {"a": 1}, "things.box.table.a: expected a list, got 1"),
        ("table", {1: [1]}, "expected text, got 1"),
        ("colour", "green", "things.box.colour: expected a value 'red' or 'blue', got 'green'"),
        ("guess", "x", "things.box.guess: expected an integer or a number, got 'x'"),
        ("net", "x", "things.box.net: unknown option"),
        (
            "siez",
            3,
            "things.box.siez: unknown option; did you mean 'size'? (box takes: size, eta, name",
        ),
        ("widht", 3, "did you mean 'width'?"),
    ]:
        with subtests.test(option=option, written=written):
            assert complaint in message(box, **{option: written})


def test_all_problems_are_reported_together():
    complaint = message(build, {"box": {"eta": "x", "sise": 1}}, THING, "things")
    assert complaint.startswith("3 problems:")
    assert all(part in complaint for part in ("things.box.eta", "things.box.sise", "missing size"))


def test_nested_plug_ins_are_built_innermost_first():
    built = box(kernel={"scaled": {"by": 3, "deep": {"scaled": {"by": 5}}}})
    assert built.kernel(2.0) == 30.0


def test_a_plug_in_may_be_one_of_several_alternatives():
    kinds = Annotated[Any, KERNEL] | None, list[Annotated[Any, KERNEL]]
    problems: list[str] = []
    assert convert(None, kinds[0], Place(), problems) is None
    assert [
        resolved.entry
        for resolved in convert(["plain", {"scaled": {}}], kinds[1], Place(), problems)
    ] == [plain, scaled]
    convert("plian", kinds[0], Place(("kernel",)), problems)
    assert problems == ["kernel: unknown kernel 'plian'; did you mean 'plain'?"]


def test_names_of_modules_and_context():
    assert build("collections:OrderedDict", THING) == {}
    assert build("box", Registry("thing", {"box": Base}), net="given").net == "given"
    assert build({"scaled": {}}, KERNEL)(2.0) == 4.0
    complaint = message(
        build, {"box": {"net": 1}}, Registry("thing", {"box": Base}), "t", net="given"
    )
    assert "t.box.net: unknown option" in complaint  # what code supplies is not the user's to set


def test_an_unknown_name_is_a_user_error(subtests):
    for spec in [
        "nomodule:x",
        "json:nothing",
        "os:sep",
        ":",
        "no_module_a:",
        "..:x",
        "nofile.py:x",
        "gpro",
    ]:
        with subtests.test(spec=spec):
            assert "thing" in message(build, spec, THING, "thing") or "nofile.py" in message(
                build, spec, THING, "thing"
            )


def test_a_broken_module_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("broken_plug.py").write_text("def f(:\n")
    assert "SyntaxError" in message(build, "broken_plug.py:f", THING, "thing")


def test_dataclass_sections():
    options = build_dataclass(
        TrainOptions,
        {
            "prompts_per_iteration": 2,
            "group_size": 3,
            "train_batch_size": 6,
            "iterations": 1,
            "ema": 0.9,
        },
    )
    assert options.ema == 0.9 and options.logprob_tolerance == "auto"
    assert message(build_dataclass, TrainOptions, {"prompts_per_iteration": 2}, "train").startswith(
        "train: missing group_size, train_batch_size, iterations, which train needs"
    )
    complaint = message(
        build_dataclass, EvaluateOptions, {"guidance": [1, -2], "seed": -1}, "evaluate"
    )
    assert "evaluate.guidance.1: expected a value greater than or equal to 0, got -2.0" in complaint
    assert "evaluate.seed: expected a value greater than or equal to 0, got -1" in complaint
    assert "expected a mapping" in message(build_dataclass, TrainOptions, [1], "train")


def judged(media, prompts, *, by: int | float = 2):
    return by


def test_rewards_have_weights_and_options():
    registry = Registry("reward", {"plain": plain, "scaled": scaled, "box": Box})
    rewards = build_rewards(
        {"plain": 0.5, "scaled": {"weight": -1, "by": 3}, "box": {"size": 1}}, registry
    )
    assert {name: item.weight for name, item in rewards.items()} == {
        "plain": 0.5,
        "scaled": -1.0,
        "box": 1.0,
    }
    assert rewards["scaled"].reward(2.0) == 6.0 and rewards["plain"].reward is plain
    assert build_rewards("plain", registry)["plain"].weight == 1.0
    assert list(build_rewards(["plain", "scaled"], registry)) == ["plain", "scaled"]
    complaint = message(
        build_rewards, {"plian": 1, "scaled": "much", "box": {"weight": 1}}, registry
    )
    assert "reward.plian: unknown reward 'plian'; did you mean 'plain'?" in complaint
    assert "reward.scaled.weight: expected a number, got 'much'" in complaint
    assert "reward.box: missing size" in complaint
    assert "expected rewards" in message(build_rewards, 3, registry)


# Files


def write_config(folder: Path, text: str) -> Path:
    path = folder / "x.yaml"
    path.write_text(text)
    return path


GOOD = """\
policy:
  toy: {size: 8, inner: {rank: 2}}
data: {lines: {path: here.txt}}
reward: {toy: 1.0}
objective:
  toy:
    clip: 1e-4
train:
  {prompts_per_iteration: 4, group_size: 2, train_batch_size: 8, iterations: 3}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a prompt file, and registries in which every section knows ``toy``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").write_text("a\n")

    class Lines:
        def __init__(self, path: Path, held_out: Path | float = 0.1):
            self.path = path

    @dataclass
    class Toy(Objective):
        clip: float = 1.0
        kl: float = 0.0
        path: str = "owner/name"
        kernel: Annotated[Any, KERNEL] = field(default=plain)
        points = loss = None

        def __post_init__(self):
            if self.clip <= 0:
                raise UserError("clip must be positive")

    class Policy(Box):
        rollout = decode = None

    def centred(rewards, rollout):
        return rewards

    for registry, entry in (
        (POLICIES, Policy),
        (DATA, Box),
        (REWARDS, judged),
        (OBJECTIVES, Toy),
        (ADVANTAGES, centred),
    ):
        monkeypatch.setitem(registry, "toy", entry)
    monkeypatch.setitem(DATA, "lines", Lines)
    monkeypatch.setitem(OPTIMIZERS, "adamw", plain)
    monkeypatch.setitem(ADVANTAGES, "flow_grpo", centred)
    for entry in (Toy, Lines):  # local classes: their annotations cannot be looked up by name
        entry.__init__.__globals__.setdefault("KERNEL", KERNEL)
    return tmp_path


def problems_of(folder: Path, text: str, *overrides: str) -> str:
    return message(lambda: check(load(write_config(folder, text), overrides))).replace(
        f"{folder}/", ""
    )


def test_a_good_config_is_checked_and_built(folder):
    config = load(write_config(folder, GOOD))
    check(config)
    assert config["objective"] == {"toy": {"clip": 1e-4}} and config["advantage"] == "flow_grpo"
    assert config.build("policy", POLICIES).inner == Inner(2)
    assert config.section("train", TrainOptions).train_batch_size == 8
    assert config.section("evaluate", EvaluateOptions) == EvaluateOptions()
    assert config.rewards()["toy"].weight == 1.0
    assert config.where("objective.toy.clip") == f"{folder}/x.yaml:7"
    assert "objective" in config and "log" not in config


def test_a_mistake_in_the_file_is_said_with_its_line(folder, subtests):
    end = "iterations: 3}"
    for old, new, complaint in [
        (
            "clip: 1e-4",
            "clp: 1e-4",
            "7: objective.toy.clp: unknown option; did you mean 'clip'? (toy takes: clip, kl",
        ),
        ("clip: 1e-4", "clip: 1e-4x", "7: objective.toy.clip: expected a number, got '1e-4x'"),
        ("clip: 1e-4", "clip: -1", "6: objective.toy: clip must be positive"),
        ("  toy:\n", "  tyo:\n", "6: objective.tyo: unknown objective 'tyo'; did you mean 'toy'?"),
        (
            "reward: {toy: 1.0}",
            "reward: {toi: 1.0}",
            "4: reward.toi: unknown reward 'toi'; did you mean 'toy'?",
        ),
        ("reward:", "rewards:", "4: rewards: unknown section; did you mean 'reward'?"),
        (
            "reward: {toy: 1.0}\n",
            "",
            " the section 'reward' is missing; for instance\n    reward: {digits: 1.0}",
        ),
        ("size: 8", "size: eight", "2: policy.toy.size: expected an integer, got 'eight'"),
        ("size: 8, ", "", "2: policy.toy: missing size, which toy needs"),
        ("rank: 2", "rank: [2]", "2: policy.toy.inner.rank: expected an integer, got [2]"),
        (
            "here.txt",
            "gone.txt",
            "3: data.lines.path: no such file or folder: gone.txt; relative paths start at",
        ),
        ("clip: 1e-4", "path: ./gone", "7: objective.toy.path: no such file or folder: ./gone"),
        (
            "batch_size: 8",
            "batch_size: 3",
            "9: train.train_batch_size 3 does not divide the 8 samples",
        ),
        ("group_size: 2, ", "", "8: train: missing group_size"),
        (end, end + "\nevaluate: {reward: {tyo: 1}}", "10: evaluate.reward.tyo: unknown reward"),
        (end, end + "\nrun: 3", "10: run: expected text or null, got 3"),
        (end, end + "\nplugins: [no_such_module]", "10: plugins.0: cannot import the plug-in"),
        (end, end + "\nlog: {tensorbaord: true}", "10: log.tensorbaord: unknown option; did"),
        (end, end + "\nlog: 3", "10: log: expected options, {option: value}, got 3"),
        (end, end + "\ntrain: {}", "10: the key 'train' is given twice, first in line 8; keep"),
        (
            "clip: 1e-4",
            "clip: 1, clip: 2",
            "7: column 18: broken YAML: mapping values are not allowed here",
        ),
        ("reward: {toy: 1.0}", "reward: {toy: 1.0", "5: column 10: broken YAML"),
        ("    clip", "\tclip", "7: column 1: broken YAML"),
        (
            "clip: 1e-4",
            "clip: !!python/name:os.system x",
            "7: the tag tag:yaml.org,2002:python/name:os.system is not",
        ),
        ("clip: 1e-4", "clip: !!float x", "7: 'x' is not a float"),
        ("clip: 1e-4", "? [a]\n    : 3", "7: a key must be a word"),
        ("clip: 1e-4", "clip: &a [*a]", "7: an alias that contains itself"),
        ("clip: 1e-4", f"clip: {'[' * 3000}", "nested too deeply"),
        ("clip: 1e-4", "clip: \x07", "7: character '\\x07'"),
    ]:
        with subtests.test(new=new):
            assert old in GOOD
            assert complaint in problems_of(folder, GOOD.replace(old, new, 1))


def test_a_file_that_is_nowhere_is_said_with_both_places(folder, monkeypatch):
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    complaint = problems_of(folder, GOOD.replace("here.txt", "gone.txt"))
    assert f"relative paths start at elsewhere or {folder}" in complaint


def test_files_that_are_no_configuration(folder):
    assert "the file is empty" in problems_of(folder, "")
    assert "the file is empty" in problems_of(folder, "# nothing\n")
    assert "expected sections" in problems_of(folder, "- a\n")
    # with an example of what it should look like
    assert "policy: {sd3" in problems_of(folder, "hello")
    assert "no such configuration file" in message(load, folder / "gone.yaml")
    assert "is a folder" in message(load, folder)
    (folder / "latin.yaml").write_bytes("policy: caf\xe9\n".encode("latin1"))
    assert "latin.yaml:1: byte 0xe9 is not UTF-8" in message(load, folder / "latin.yaml")
    assert "more than" in problems_of(
        folder,
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(
            f"{y}: &{y} [{', '.join([f'*{x}'] * 8)}]\n" for x, y in zip("abcdefgh", "bcdefghi")
        ),
    )


def test_plug_ins_are_imported_first(folder):
    (folder / "my_rewards.py").write_text(
        "from mmrl.core.registry import REWARDS\n@REWARDS.register('mine')\ndef mine(media, "
        "prompts, *, by: int = 1): return by\n"
    )
    text = GOOD.replace("{toy: 1.0}", "{mine: {by: 3}}") + "plugins: [my_rewards.py]\n"
    config = load(write_config(folder, text))
    try:
        check(config)
        assert config.rewards()["mine"].reward(None, None) == 3
    finally:
        REWARDS.pop("mine", None)
    (folder / "bad_plug.py").write_text("1 / 0\n")
    assert "ZeroDivisionError" in problems_of(folder, GOOD + "plugins: [bad_plug.py]\n")


def test_a_file_beside_the_configuration_is_found_from_anywhere(folder, monkeypatch):
    path = write_config(folder, GOOD)
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    config = load(path)
    check(config)
    assert config.build("data", DATA).path == folder / "here.txt"
    copied = folder / "elsewhere" / "config.yaml"  # what a run keeps must still find it
    copied.write_text(dump(config))
    assert load(copied).build("data", DATA).path == folder / "here.txt"


# YAML


def test_scalars_are_what_they_look_like(subtests):
    for text, value in [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("1_000", 1000),
        ("0x10", 16),
        ("012", "012"),
        ("no", "no"),
        ("yes", "yes"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("'1'", "1"),
        ("e4", "e4"),
        ("1e", "1e"),
        ("-", None),
        ("[1, a]", [1, "a"]),
        ("{a: 1e3}", {"a": 1e3}),
        (".inf", float("inf")),
        ("inf", "inf"),
        ("0", 0),
        ("-0.0", -0.0),
        ("world:digits/sd3", "world:digits/sd3"),
    ]:
        with subtests.test(text=text, value=value):
            scalar, _ = read(text if text != "-" else "null", "text")
            assert scalar == value and type(scalar) is type(value)
            again, _ = read(write({"a": scalar}), "text")
            assert again == {"a": scalar}


def test_text_stays_text_when_written_and_read(subtests):
    for text in [
        "1e-4",
        "no",
        "true",
        "null",
        "",
        "12",
        "\u00e9\n\u2028\t'\"",
        "2024-01-01",
        "1e",
        "- a",
        "#",
    ]:
        with subtests.test(text=text):
            assert read(write({"a": text, text: [text]}), "text")[0] == {"a": text, text: [text]}


def test_dump_loads_back_to_the_same(folder):
    config = load(
        write_config(folder, GOOD),
        ["objective.clip=1e-5", "run=runs/é", "reward.scaled={weight: 2}"],
    )
    again = load(write_config(folder, dump(config)))
    whole = {"lines": {"path": str(folder / "here.txt")}}
    assert again.plain == config.plain | {"data": whole}
    assert dump(again) == dump(config)


# Overrides


def test_overrides(folder, subtests):
    for override, section, expected in [
        (
            "train.iterations=5",
            "train",
            {"prompts_per_iteration": 4, "group_size": 2, "train_batch_size": 8, "iterations": 5},
        ),
        ("objective.toy.clip=1e-3", "objective", {"toy": {"clip": 1e-3}}),
        ("objective.clip=1e-3", "objective", {"toy": {"clip": 1e-3}}),
        ("objective.kl=1", "objective", {"toy": {"clip": 1e-4, "kl": 1}}),
        ("objective=dgpo", "objective", "dgpo"),
        ("objective={toy: {kl: 2}}", "objective", {"toy": {"kl": 2}}),
        (
            "objective.kernel.scaled.by=3",
            "objective",
            {"toy": {"clip": 1e-4, "kernel": {"scaled": {"by": 3}}}},
        ),
        ("data.path=new.txt", "data", {"lines": {"path": "new.txt"}}),
        ("data=toy", "data", "toy"),
        ("policy.inner.rank=5", "policy", {"toy": {"size": 8, "inner": {"rank": 5}}}),
        ("policy.inner=null", "policy", {"toy": {"size": 8, "inner": None}}),
        (
            "policy.clip=[1, 2]",
            "policy",
            {"toy": {"size": 8, "inner": {"rank": 2}, "clip": [1, 2]}},
        ),
        ("reward.toy=2", "reward", {"toy": 2}),
        ("reward.toy.by=2", "reward", {"toy": {"weight": 1.0, "by": 2}}),
        ("reward.other=0.5", "reward", {"toy": 1.0, "other": 0.5}),
        ("reward.my.module:fn=0.5", "reward", {"toy": 1.0, "my.module:fn": 0.5}),
        ("advantage.std=group", "advantage", {"flow_grpo": {"std": "group"}}),
        ("evaluate.prompts=3", "evaluate", {"prompts": 3}),
        ("run=a=b", "run", "a=b"),
        ("plugins=[a]", "plugins", ["a"]),
    ]:
        with subtests.test(override=override, section=section):
            text = GOOD + "advantage: flow_grpo\n"
            before = load(write_config(folder, text))
            config = load(write_config(folder, text), [override])
            assert config.plain == {**before.plain, section: expected}


def test_later_overrides_win_and_build_on_earlier_ones(folder):
    config = load(write_config(folder, GOOD), ["objective=toy", "objective.kl=1", "objective.kl=2"])
    assert config["objective"] == {"toy": {"kl": 2}}
    assert config.where("objective.toy.kl") == "command line: objective.kl=2"


def test_a_wrong_override_is_quoted(folder, subtests):
    for override, complaint in [
        ("train.iteratons=3", "train.iteratons: unknown option; did you mean 'iterations'?"),
        ("trian.iterations=3", "unknown section 'trian'; did you mean 'train'?"),
        ("objective.clp=3", "objective.toy.clp: unknown option; did you mean 'clip'?"),
        ("objective.clip=x", "objective.toy.clip: expected a number, got 'x'"),
        ("objective.clip=-1", "objective.toy: clip must be positive"),
        ("objective=tyo", "objective: unknown objective 'tyo'; did you mean 'toy'?"),
        ("objective={toy: {clip: x}}", "objective.toy.clip: expected a number"),
        ("reward.tyo=1", "reward.tyo: unknown reward 'tyo'; did you mean 'toy'?"),
        ("data.path=gone.txt", "data.lines.path: no such file or folder: gone.txt"),
        ("train.train_batch_size=3", "train.train_batch_size 3 does not divide"),
        ("train.prompts_per_iteration.x=3", "train.prompts_per_iteration is 4, which has no 'x'"),
        ("train.seed=[1", "cannot read the value"),
        ("train.seed", "expected key=value"),
        ("=3", "expected key=value"),
        ("train=3", "train: expected options"),
        ("train.=3", "train.: unknown option"),
    ]:
        with subtests.test(override=override):
            said = problems_of(folder, GOOD, override)
            assert f"command line: {override}: {complaint}" in said
    assert "the section 'policy' is missing" in problems_of(folder, GOOD, "policy=null")


# Arithmetic


def train(**changes: Any) -> TrainOptions:
    return TrainOptions(
        **{
            "prompts_per_iteration": 12,
            "group_size": 4,
            "train_batch_size": 24,
            "iterations": 5,
            **changes,
        }
    )


def test_the_plan_of_an_iteration():
    plan = arithmetic(train(micro_batch_size=5, epochs=2), processes=2)
    assert (plan.rows, plan.steps, plan.total_steps) == (48, 2, 20)
    assert (plan.prompts_per_process, plan.rows_per_process, plan.rows_per_step) == (6, 24, 12)
    assert (plan.micro_batch, plan.accumulation) == (5, 3)
    assert arithmetic(train()).micro_batch == 24 and not arithmetic(train()).warnings
    assert "group_size" in arithmetic(train(group_size=1, train_batch_size=12)).warnings[0]


def test_impossible_arithmetic_names_the_key_and_what_would_work(subtests):
    for changes, processes, complaint in [
        (
            {"prompts_per_iteration": 7},
            3,
            "train.prompts_per_iteration 7 cannot be shared by 3 processes: use 6 or 9",
        ),
        (
            {"train_batch_size": 20},
            1,
            "train.train_batch_size 20 does not divide the 48 samples "
            "(train.prompts_per_iteration 12 x "
            "train.group_size 4)",
        ),
        ({"train_batch_size": 20}, 1, "use 16 or 24"),
        ({"train_batch_size": 100}, 1, "use 48"),
        (
            {"train_batch_size": 3},
            2,
            "train.train_batch_size 3 cannot be shared by 2 processes: use 2 or 4",
        ),
        ({"micro_batch_size": 25}, 1, "train.micro_batch_size 25 is more than the 24 rows"),
        ({"micro_batch_size": 13}, 2, "at most 12"),
        (
            {"prompts_per_iteration": 0, "group_size": -1},
            1,
            "train.prompts_per_iteration is 0: at least 1\ntrain.group_size is -1: at least 1",
        ),
    ]:
        with subtests.test(changes=changes, processes=processes):
            assert complaint in message(arithmetic, train(**changes), processes)


@pytest.mark.parametrize("named", ["aesthetic", "[aesthetic]", "{aesthetic: 1.0}"])
def test_rewards_may_only_be_named_in_training_and_in_evaluation(tmp_path, named):
    file = tmp_path / "mine.yaml"
    file.write_text(f"reward: digits\nevaluate: {{reward: {named}}}\n")
    config = load(file, required=())
    assert config.plain["evaluate"]["reward"] == {"aesthetic": 1.0}
    config = load(file, [f"evaluate.reward={named}"], required=())
    assert config.section("evaluate", EvaluateOptions).reward == {"aesthetic": 1.0}


def test_a_run_on_preferences_may_leave_the_rewards_of_its_configuration_out():
    with_none = load("configs/digits/dpo_pairs.yaml", ["reward=null"])
    assert with_none.plain["reward"] == {}
    with pytest.raises(UserError, match="section 'reward' is missing"):
        load("configs/digits/flow_grpo.yaml", ["reward=null"])


def test_a_reward_inside_another_keeps_its_form_where_paths_are_anchored(tmp_path):
    spec = {"reward": {"identity": {"use": "per_frame", "reward": "digits"}}}
    assert anchors.code_beside(spec, tmp_path) == spec
    assert anchors.anchored(spec, tmp_path) == spec

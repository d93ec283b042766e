"""The constructor's signature is the schema: conversions, mistakes and their places, overrides,
arithmetic."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from mmrl.config import anchors, build, build_dataclass, build_rewards, check, dump, load
from mmrl.config.options import EvaluateOptions, TrainOptions
from mmrl.config.plan import _warnings, arithmetic
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
from mmrl.zoo.stages.written_answers import Demonstrated
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


CONVERTED = [
    ("size", 1e3, 1000),
    ("eta", 3, 3.0),
    ("name", "8", "8"),
    ("open", "yes", True),
    ("mode", "bee", "bee"),
    ("clip", 2, 2.0),
    ("clip", [1, 2.5], (1.0, 2.5)),
    ("inner", {"rank": 2, "again": {"rank": 3, "names": ["a"]}}, Inner(2, None, Inner(3, ["a"]))),
    ("kernel", "plain", plain),
    ("colour", "blue", Colour.blue),
    ("where", 0.05, 0.05),
    ("where", "a/b.txt", Path("a/b.txt")),
    ("guess", 2.5, 2.5),
]


def test_an_option_gets_the_type_of_its_annotation(subtests):
    for option, written, expected in CONVERTED:
        with subtests.test(option=option, written=written):
            converted = vars(box(**{option: written}))[option]
            assert converted == expected and type(converted) is type(expected)


WRONG = [
    ("size", "eight", "things.box.size: expected an integer, got 'eight'"),
    ("size", True, "expected an integer, got true"),
    ("size", 2**70, "expected an integer below 2^63"),
    ("eta", "0.5", "expected a number, got '0.5'"),
    ("eta", float("nan"), "expected a finite number, got nan"),
    ("eta", 10**400, "expected a finite number, got an integer of more than 20 digits"),
    ("eta", -1, "things.box: eta must not be negative"),
    ("name", 8, "expected text, got 8; write it in quotes: '8'"),
    ("name", "value", "things.box: this name is taken"),
    ("open", "maybe", "expected true or false, got 'maybe'"),
    ("mode", "be", "expected one of 'a', 'bee', 3, got 'be'; did you mean 'bee'?"),
    ("clip", [1, 2, 3], "things.box.clip: expected 2 values, got 3: [1, 2, 3]"),
    ("clip", [1, "x"], "things.box.clip.1: expected a number, got 'x'"),
    ("clip", "wide", "expected a number or a list, got 'wide'"),
    ("inner", "many", "expected a mapping of rank, names, again, an integer or null, got 'many'"),
    ("inner", {"rnk": 2, "rank": 1}, "inner.rnk: unknown option; did you mean 'rank'? (inner"),
    ("inner", {}, "things.box.inner: missing rank, which inner needs"),
    ("inner", {"rank": 1, "again": {"rank": "x"}}, "things.box.inner.again.rank: expected an int"),
    ("kernel", "scald", "things.box.kernel: unknown kernel 'scald'; did you mean 'scaled'?"),
    ("kernel", {"scaled": {"by": "x"}}, "things.box.kernel.scaled.by: expected a number, got 'x'"),
    ("kernel", {"scaled": {}, "plain": {}}, "expected one kernel, got 2: scaled, plain"),
    ("table", {"a": 1}, "things.box.table.a: expected a list, got 1"),
    ("colour", "green", "expected a value 'red' or 'blue', got 'green'"),
    ("guess", "x", "expected an integer or a number, got 'x'"),
    ("net", "x", "things.box.net: unknown option"),
    ("siez", 3, "siez: unknown option; did you mean 'size'? (box takes: size, eta, name"),
]


def test_a_wrong_option_names_its_place_and_what_was_expected(subtests):
    for option, written, complaint in WRONG:
        with subtests.test(option=option, written=written):
            assert complaint in message(box, **{option: written})


def test_all_problems_are_reported_together():
    complaint = message(build, {"box": {"eta": "x", "sise": 1}}, THING, "things")
    assert complaint.startswith("3 problems:")
    assert all(part in complaint for part in ("things.box.eta", "things.box.sise", "missing size"))


def test_a_plug_in_may_be_one_of_several_alternatives():
    problems: list[str] = []
    maybe, several = Annotated[Any, KERNEL] | None, list[Annotated[Any, KERNEL]]
    assert convert(None, maybe, Place(), problems) is None
    chosen = convert(["plain", {"scaled": {}}], several, Place(), problems)
    assert [resolved.entry for resolved in chosen] == [plain, scaled]
    convert("plian", maybe, Place(("kernel",)), problems)
    assert problems == ["kernel: unknown kernel 'plian'; did you mean 'plain'?"]


def test_names_of_modules_and_context():
    named = Registry("thing", {"box": Base})
    assert build("collections:OrderedDict", THING) == {}
    assert build("box", named, net="given").net == "given"
    # what code supplies is not the user's to set
    assert "t.box.net: unknown" in message(build, {"box": {"net": 1}}, named, "t", net="given")


def test_an_unknown_name_is_a_user_error(subtests, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("broken_plug.py").write_text("def f(:\n")
    for spec in ["nomodule:x", "json:nothing", "os:sep", ":", "no_module_a:", "..:x", "gpro"]:
        with subtests.test(spec=spec):
            assert "thing" in message(build, spec, THING, "thing")
    assert "nofile.py" in message(build, "nofile.py:x", THING, "thing")
    assert "SyntaxError" in message(build, "broken_plug.py:f", THING, "thing")


def test_dataclass_sections():
    sizes = {"prompts_per_iteration": 2, "group_size": 3, "train_batch_size": 6, "iterations": 1}
    options = build_dataclass(TrainOptions, sizes | {"ema": 0.9})
    assert options.ema == 0.9 and options.logprob_tolerance == "auto"
    said = message(build_dataclass, TrainOptions, {"prompts_per_iteration": 2}, "train")
    assert said.startswith("train: missing group_size, train_batch_size, iterations, which train")
    wrong = {"guidance": [1, -2], "seed": -1}
    said = message(build_dataclass, EvaluateOptions, wrong, "evaluate")
    assert "evaluate.guidance.1: expected a value greater than or equal to 0, got -2.0" in said
    assert "evaluate.seed: expected a value greater than or equal to 0, got -1" in said
    assert "expected a mapping" in message(build_dataclass, TrainOptions, [1], "train")


def judged(media, prompts, *, by: int | float = 2):
    return by


def test_rewards_have_weights_and_options():
    registry = Registry("reward", {"plain": plain, "scaled": scaled, "box": Box})
    spec = {"plain": 0.5, "scaled": {"weight": -1, "by": 3}, "box": {"size": 1}}
    rewards = build_rewards(spec, registry)
    assert [item.weight for item in rewards.values()] == [0.5, -1.0, 1.0]
    assert rewards["scaled"].reward(2.0) == 6.0 and rewards["plain"].reward is plain
    assert build_rewards("plain", registry)["plain"].weight == 1.0
    assert list(build_rewards(["plain", "scaled"], registry)) == ["plain", "scaled"]
    wrong = {"plian": 1, "scaled": "much", "box": {"weight": 1}}
    complaint = message(build_rewards, wrong, registry)
    assert "reward.plian: unknown reward 'plian'; did you mean 'plain'?" in complaint
    assert "reward.scaled.weight: expected a number, got 'much'" in complaint
    assert "reward.box: missing size" in complaint
    assert "expected rewards" in message(build_rewards, 3, registry)


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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a prompt file, and registries in which every section knows ``toy``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").write_text("a\n")
    sections = POLICIES, DATA, REWARDS, OBJECTIVES, ADVANTAGES
    for registry, entry in zip(sections, (Policy, Box, judged, Toy, centred), strict=True):
        monkeypatch.setitem(registry, "toy", entry)
    monkeypatch.setitem(DATA, "lines", Lines)
    monkeypatch.setitem(OPTIMIZERS, "adamw", plain)
    monkeypatch.setitem(ADVANTAGES, "flow_grpo", centred)
    return tmp_path


def problems_of(folder: Path, text: str, *overrides: str) -> str:
    said = message(lambda: check(load(write_config(folder, text), overrides)))
    return said.replace(f"{folder}/", "")


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


BROKEN = [
    ("clip: 1e-4", "clp: 1e-4", "7: objective.toy.clp: unknown option; did you mean 'clip'? (toy"),
    ("clip: 1e-4", "clip: -1", "6: objective.toy: clip must be positive"),
    ("  toy:\n", "  tyo:\n", "6: objective.tyo: unknown objective 'tyo'; did you mean 'toy'?"),
    ("reward:", "rewards:", "4: rewards: unknown section; did you mean 'reward'?"),
    ("reward: {toy: 1.0}\n", "", "the section 'reward' is missing; for instance\n    reward: {dig"),
    ("size: 8, ", "", "2: policy.toy: missing size, which toy needs"),
    ("here.txt", "gone.txt", "3: data.lines.path: no such file or folder: gone.txt; relative"),
    ("batch_size: 8", "batch_size: 3", "9: train.train_batch_size 3 does not divide the 8 samples"),
    ("3}", "3}\nevaluate: {reward: {tyo: 1}}", "10: evaluate.reward.tyo: unknown reward"),
    ("3}", "3}\nplugins: [no_such_module]", "10: plugins.0: cannot import the plug-in"),
    ("3}", "3}\ntrain: {}", "10: the key 'train' is given twice, first in line 8; keep"),
    ("clip: 1e-4", "clip: 1, clip: 2", "7: column 18: broken YAML: mapping values are"),
    ("    clip", "\tclip", "7: column 1: broken YAML"),
    ("clip: 1e-4", "clip: !!python/name:os.system x", "7: the tag tag:yaml.org,2002:python/name"),
    ("clip: 1e-4", "clip: &a [*a]", "7: an alias that contains itself"),
    ("clip: 1e-4", f"clip: {'[' * 3000}", "nested too deeply"),
    ("clip: 1e-4", "clip: \x07", "7: character '\\x07'"),
]


def test_a_mistake_in_the_file_is_said_with_its_line(folder, subtests):
    for old, new, complaint in BROKEN:
        with subtests.test(new=new):
            assert old in GOOD
            assert complaint in problems_of(folder, GOOD.replace(old, new, 1))


def test_files_that_are_no_configuration(folder):
    words = "abcdefghi"
    bomb = "a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n"
    bomb += "".join(f"{y}: &{y} [{', '.join([f'*{x}'] * 8)}]\n" for x, y in zip(words, words[1:]))
    for text, complaint in [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- a\n", "expected sections"),
        ("hello", "policy: {sd3"),  # with an example of what it should look like
        (bomb, "more than"),
    ]:
        assert complaint in problems_of(folder, text)
    assert "no such configuration file" in message(load, folder / "gone.yaml")
    assert "is a folder" in message(load, folder)
    (folder / "latin.yaml").write_bytes("policy: caf\xe9\n".encode("latin1"))
    assert "latin.yaml:1: byte 0xe9 is not UTF-8" in message(load, folder / "latin.yaml")


def test_plug_ins_are_imported_first(folder):
    (folder / "my_rewards.py").write_text(
        "from mmrl.core.registry import REWARDS\n"
        "@REWARDS.register('mine')\n"
        "def mine(media, prompts, *, by: int = 1): return by\n"
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


SCALARS = {
    "1e-4": 1e-4,
    ".5": 0.5,
    "012": "012",
    "no": "no",
    "true": True,
    "null": None,
    "": None,
    "2024-01-01": "2024-01-01",
    "'1'": "1",
    "[1, a]": [1, "a"],
    "{a: 1e3}": {"a": 1e3},
    ".inf": float("inf"),
    "-0.0": -0.0,
    "world:digits/sd3": "world:digits/sd3",
}


def test_scalars_are_what_they_look_like_and_texts_stay_texts(subtests):
    for text, value in SCALARS.items():
        with subtests.test(text=text, value=value):
            scalar, _ = read(text, "text")
            assert scalar == value and type(scalar) is type(value)
            assert read(write({"a": scalar}), "text")[0] == {"a": scalar}
    for text in ("1e-4", "no", "null", "", "\u00e9\n\u2028\t'\"", "2024-01-01", "- a", "#"):
        assert read(write({"a": text, text: [text]}), "text")[0] == {"a": text, text: [text]}


def test_dump_loads_back_to_the_same(folder):
    words = ["objective.clip=1e-5", "run=runs/é", "reward.scaled={weight: 2}"]
    config = load(write_config(folder, GOOD), words)
    again = load(write_config(folder, dump(config)))
    whole = {"lines": {"path": str(folder / "here.txt")}}
    assert again.plain == config.plain | {"data": whole} and dump(again) == dump(config)


SIZES = {"prompts_per_iteration": 4, "group_size": 2, "train_batch_size": 8}
BY_3 = {"scaled": {"by": 3}}
INNER = {"size": 8, "inner": {"rank": 2}}
OVERRIDES = [
    ("train.iterations=5", "train", SIZES | {"iterations": 5}),
    ("objective.toy.clip=1e-3", "objective", {"toy": {"clip": 1e-3}}),
    ("objective.kl=1", "objective", {"toy": {"clip": 1e-4, "kl": 1}}),
    ("objective=dgpo", "objective", "dgpo"),
    ("objective.kernel.scaled.by=3", "objective", {"toy": {"clip": 1e-4, "kernel": BY_3}}),
    ("data.path=new.txt", "data", {"lines": {"path": "new.txt"}}),
    ("policy.inner.rank=5", "policy", {"toy": {"size": 8, "inner": {"rank": 5}}}),
    ("policy.clip=[1, 2]", "policy", {"toy": INNER | {"clip": [1, 2]}}),
    ("reward.toy.by=2", "reward", {"toy": {"weight": 1.0, "by": 2}}),
    ("reward.my.module:fn=0.5", "reward", {"toy": 1.0, "my.module:fn": 0.5}),
    ("advantage.std=group", "advantage", {"flow_grpo": {"std": "group"}}),
    ("run=a=b", "run", "a=b"),
]


def test_overrides(folder, subtests):
    text = GOOD + "advantage: flow_grpo\n"
    before = load(write_config(folder, text))
    for override, section, expected in OVERRIDES:
        with subtests.test(override=override, section=section):
            config = load(write_config(folder, text), [override])
            assert config.plain == {**before.plain, section: expected}


def train(**changes: Any) -> TrainOptions:
    sizes = {"prompts_per_iteration": 12, "group_size": 4, "train_batch_size": 24, "iterations": 5}
    return TrainOptions(**(sizes | changes))


def test_the_plan_of_an_iteration():
    plan = arithmetic(train(micro_batch_size=5, epochs=2), processes=2)
    assert (plan.rows, plan.steps, plan.total_steps) == (48, 2, 20)
    assert (plan.prompts_per_process, plan.rows_per_process, plan.rows_per_step) == (6, 24, 12)
    assert (plan.micro_batch, plan.accumulation) == (5, 3)
    assert arithmetic(train()).micro_batch == 24 and not arithmetic(train()).warnings
    single = train(group_size=1, train_batch_size=12)
    assert "group_size" in arithmetic(single).warnings[0]
    apart = replace(single, stages=(Demonstrated(path="a", own_baseline=True),))
    assert not any("nothing would be learned" in text for text in _warnings(apart, False))
    assert any("nothing would be learned" in text for text in _warnings(single, False))


IMPOSSIBLE = [
    ({"prompts_per_iteration": 7}, 3, "7 cannot be shared by 3 processes: use 6 or 9"),
    ({"train_batch_size": 20}, 1, "20 does not divide the 48 samples (train.prompts_per_iteration"),
    ({"train_batch_size": 100}, 1, "use 48"),
    ({"train_batch_size": 3}, 2, "3 cannot be shared by 2 processes: use 2 or 4"),
    ({"micro_batch_size": 25}, 1, "train.micro_batch_size 25 is more than the 24 rows"),
    ({"group_size": -1}, 1, "train.group_size is -1: at least 1"),
]


def test_impossible_arithmetic_names_the_key_and_what_would_work(subtests):
    for changes, processes, complaint in IMPOSSIBLE:
        with subtests.test(changes=changes, processes=processes):
            assert complaint in message(arithmetic, train(**changes), processes)


def test_rewards_may_only_be_named_in_training_and_in_evaluation(tmp_path):
    file = tmp_path / "mine.yaml"
    for named in ("aesthetic", "[aesthetic]", "{aesthetic: 1.0}"):
        file.write_text(f"reward: digits\nevaluate: {{reward: {named}}}\n")
        assert load(file, required=()).plain["evaluate"]["reward"] == {"aesthetic": 1.0}
        config = load(file, [f"evaluate.reward={named}"], required=())
        assert config.section("evaluate", EvaluateOptions).reward == {"aesthetic": 1.0}


def test_a_run_on_preferences_may_leave_the_rewards_of_its_configuration_out():
    assert load("configs/digits/dpo_pairs.yaml", ["reward=null"]).plain["reward"] == {}
    said = message(load, "configs/digits/flow_grpo.yaml", ["reward=null"])
    assert "section 'reward' is missing" in said


def test_a_reward_inside_another_keeps_its_form_where_paths_are_anchored(tmp_path):
    spec = {"reward": {"identity": {"use": "per_frame", "reward": "digits"}}}
    assert anchors.code_beside(spec, tmp_path) == spec == anchors.anchored(spec, tmp_path)

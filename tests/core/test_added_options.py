"""Fields of a subclass are options beside those of its base: with @dataclass and without, in Python
and in a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import pytest
from annotated_types import Gt

from mmrl.core.registry import make, options
from mmrl.objectives.policy_gradient import PolicyGradient


class Plain(PolicyGradient):
    """Adds two options; tells the type of an attribute, and holds a constant."""

    extra: Annotated[float, Gt(0)] = 1.0
    side: Literal["left", "right"] = "left"
    COUNT: ClassVar[int] = 3
    remembered: dict[str, float]


@dataclass
class Decorated(PolicyGradient):
    """Adds two options, and works one out."""

    extra: float = 1.0
    names: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.names.append(f"{self.extra} of {len(self.names)}")


@dataclass
class Further(Decorated):
    """Adds one more."""

    third: int = 3


@dataclass
class Needing(PolicyGradient):
    """Needs an option."""

    needed: float


def test_a_field_is_an_option_and_the_base_is_set_up(subtests):
    for cls in [Plain, Decorated, Further]:
        for build in [lambda cls, **chosen: cls(**chosen), lambda c, **o: make(c, o)]:
            with subtests.test(cls=cls, build=build):
                mine = build(cls, extra=2.0, clip_range=0.1)
                assert mine.extra == 2.0 and mine.clip_range == 0.1
                assert mine.sft is None and mine.snapshots == (), "the base's constructor has run"
                assert build(cls).extra == 1.0


def test_what_is_worked_out_is_so_once_and_for_every_object_anew():
    assert Decorated().names == ["1.0 of 0"] == Decorated().names
    further = Further(extra=2.0, third=4)
    assert further.names == ["2.0 of 0"] and further.third == 4


def test_options_are_known_with_their_types():
    known = options(Plain)
    assert list(known)[:3] == ["extra", "side", "surrogate"]
    assert known["extra"].annotation == Annotated[float, Gt(0)]
    assert "COUNT" not in known and "remembered" not in known
    assert {"third", "extra", "names", "clip_range"} <= set(options(Further))
    assert options(PolicyGradient).keys() == known.keys() - {"extra", "side"}


def test_mistakes_are_those_of_any_constructor():
    assert Needing(0.5, clip_range=0.2).needed == 0.5
    for build, words in [
        (Needing, "misses the option 'needed'"),
        (lambda: Plain(nothing=1), "unexpected keyword argument 'nothing'"),
        (lambda: Plain(1.0, "left", 3), "takes 2 positional arguments"),
    ]:
        with pytest.raises(TypeError, match=words):
            build()

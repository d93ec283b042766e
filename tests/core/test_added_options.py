"""Fields of a subclass are options beside those of its base: with @dataclass and without, in Python
and in a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import pytest
from annotated_types import Gt

from mmrl.core.registry import make, options
from mmrl.objectives.policy_gradient import PolicyGradient


class Plain(PolicyGradient):
    """Adds an option; tells the type of an attribute, and holds a constant."""

    extra: Annotated[float, Gt(0)] = 1.0
    COUNT: ClassVar[int] = 3
    remembered: dict[str, float]


@dataclass
class Decorated(PolicyGradient):
    """Adds two options, and works one out."""

    extra: float = 1.0
    names: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.names.append(f"{self.extra} of {len(self.names)}")


@pytest.mark.parametrize("cls", [Plain, Decorated])
def test_a_field_is_an_option_and_the_base_is_set_up(cls):
    for build in [cls, lambda **chosen: make(cls, chosen)]:
        mine = build(extra=2.0, clip_range=0.1)
        assert mine.extra == 2.0 and mine.clip_range == 0.1
        assert mine.sft is None and mine.snapshots == (), "the base's constructor has run"
        assert build().extra == 1.0
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        cls(nothing=1)
    assert Decorated().names == ["1.0 of 0"] == Decorated().names
    known = options(Plain)
    assert list(known)[:2] == ["extra", "surrogate"]
    assert known["extra"].annotation == Annotated[float, Gt(0)]

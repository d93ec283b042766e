"""Annotated numbers, whose bounds the schema of a configuration checks."""

from typing import Annotated

from annotated_types import Ge, Gt, Le

Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Steps = Annotated[int, Ge(1), Le(10_000)]  # of a sampler: every one of them is laid out before
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0)]
Draws = Annotated[int, Ge(1), Le(10_000)]  # looks at one sample, all in memory at once

"""Number types with bounds that the configuration schema checks."""

from typing import Annotated

from annotated_types import Ge, Gt, Le

Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Steps = Annotated[int, Ge(1), Le(10_000)]  # steps of a sampler: all are allocated in advance
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0)]
Draws = Annotated[int, Ge(1), Le(10_000)]  # passes over one sample, all in memory at once

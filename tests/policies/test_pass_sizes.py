"""The sizes of a policy's passes: configured, measured, and what is left after an error."""

import pytest
import torch
from torch import nn

from mmrl.core.errors import UserError
from mmrl.policies.pass_sizes import PassSizes


def sizes(**options):
    return PassSizes(nn.Linear(1, 1), [], **options)


def kibibytes(rows):
    """A pass that allocates one KiB a row."""
    return torch.zeros(rows, 1024, dtype=torch.uint8)


def test_a_pass_has_the_fewest_rows_of_any_limit():
    each = sizes(rows=6)
    assert sizes().most(9) == 9 and each.most(9) == 6 and each.width() == 6
    each.max_micro_batch = 4
    assert each.most(9) == each.to_sample(9, kibibytes) == 4 and each.width() == 6
    each.fix(8)
    assert each.most(9) == each.width() == 8


def test_sampling_has_as_many_rows_as_the_memory_budget_allows():
    calls = []
    each = sizes(rows=2, memory_gib=10.5 / 2**20)
    assert each.to_sample(50, lambda rows: calls.append(rows) or kibibytes(rows)) == 10
    assert each.to_sample(7, kibibytes) == 7 and calls == [1, 2] and each.width() == 0
    each.multiple = 4  # rows that are drawn as one tree
    assert each.to_sample(50, kibibytes) == 8 and each.to_sample(3, kibibytes) == 4
    with pytest.raises(UserError, match="sampling_memory_gib"):
        sizes(memory_gib=0.5 / 2**20).to_sample(50, kibibytes)


def test_passes_stay_as_small_as_those_that_fitted():
    def work(rows):
        if rows > 3:
            raise torch.OutOfMemoryError("full")

    each = sizes(rows=6)
    tried = []
    for attempt in each.attempts(12):
        with attempt as rows:
            tried.append(rows)
            work(rows)
    assert tried == [12, 6, 3] and each.most(12) == each.width() == 3
    assert each.warnings[0].startswith("out of memory: passes now have at most 3 rows;")
    with pytest.raises(UserError, match="gradient_checkpointing"):
        for attempt in each.attempts(12, least=4):
            with attempt as rows:
                work(rows)

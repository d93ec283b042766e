"""Optimizer steps, passes and the mean of the loss, each against the loop that its docstring
describes."""

import pytest
import torch

from mmrl.train.minibatches import batches, loss_total, loss_weights, passes
from samplers.noise import Rng
from tests.fixtures.records import make_point, make_rollout

REDUCTIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_mean_all",
    "seq_mean_token_sum_norm",
    "token_sum",
)
MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)


def points():
    """The five rows of MASK in two points: the first two decisions, then the last and one that is
    none."""
    row = torch.arange(5)
    last = torch.stack([MASK[:, 2], torch.zeros(5, dtype=torch.bool)], 1)
    length = MASK.sum(1)
    each = {"group": torch.tensor([1, 0, 1, 0, 1]), "row_id": row, "num_decisions": length}
    return [
        make_point(state=row + 10, mask=MASK[:, :2], **each),
        make_point(state=row + 20, mask=last, **each),
    ]


def rows(sizes):
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    name = torch.arange(len(group))
    empty = torch.zeros(len(group), 1)
    return make_rollout(group=group, row_id=name, sample=empty, logprob=empty, mask=empty == 0)


def test_every_copy_of_a_prompt_comes_first_equally_often_and_so_does_every_prompt():
    count = 300
    first = torch.zeros(3)
    prompt = torch.zeros(2)
    for epoch in range(count):
        row = next(batches(rows([3, 3]), [3, 3], 6, Rng.of("order", epoch))).row_id
        first[row % 3] += 1
        prompt[row // 3] += 1
    assert (first / count - 1 / 3).abs().max() < 0.1 and (prompt / count - 1 / 2).abs().max() < 0.1


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ([8] * 6, 4),
        ([2, 12, 4, 6], 3),
        ([9] + [8] * 7, 16),  # with rows that were appended to groups
        ([5, 4, 4, 4, 4], 8),
    ],
)
def test_groups_are_spread_over_steps_of_equal_length(sizes, steps):
    """Every step has its share of every group, to less than two rows; every row is in one."""
    for epoch in range(10):
        parts = list(batches(rows(sizes), sizes, steps, Rng.of("order", epoch)))
        lengths = [len(part) for part in parts]
        assert len(parts) == steps and max(lengths) - min(lengths) <= bool(sum(sizes) % steps)
        names = torch.cat([part.row_id for part in parts]).sort().values
        assert names.tolist() == list(range(sum(sizes)))
        for part in parts:
            counts = part.group.bincount(minlength=len(sizes)).tolist()
            assert all(abs(c - n / steps) < 2 for c, n in zip(counts, sizes, strict=True))
            assert len(set(sizes)) > 1 or set(counts) == {sizes[0] // steps}


def test_whole_groups_of_different_sizes_fill_the_steps_evenly():
    sizes = [6, 2, 2, 2, 4, 8]
    parts = list(batches(rows(sizes), sizes, 2, Rng.of(0), whole_groups=True))
    assert [part.group.unique().tolist() for part in parts] == [[0, 4], [1, 2, 3, 5]]


def test_a_process_takes_its_own_rows_of_the_same_steps():
    sizes = [2, 12, 4, 6]
    whole = rows(sizes)
    for groups in (True, False):
        together = batches(whole, sizes, 3, Rng.of(1), groups)
        halves = [
            batches(whole[rows], sizes, 3, Rng.of(1), groups)
            for rows in (whole.group < 2, whole.group > 1)
        ]
        for part, *others in zip(together, *halves, strict=True):
            names = torch.cat([half.row_id for half in others])
            assert torch.equal(names.sort().values, part.row_id)


def test_passes_hold_the_rows_with_decisions_in_order():
    for size, wanted in {
        1: [[10], [12], [13], [22], [23]],
        2: [[10, 12], [13, 22], [23]],
        4: [[10, 12, 13, 22], [23]],
        None: [[10, 12, 13, 22, 23]],
    }.items():
        assert [part.state.tolist() for part in passes(points(), size)] == wanted
    assert list(passes([point.replace(mask=point.mask & False) for point in points()], 2)) == []


def test_adjacent_rows_come_by_prompt_and_long_ones_first():
    """What counts is where the last decision stands, not how many there are; equal ones keep their
    order."""
    group = torch.tensor([1, 0, 1, 0, 1, 0])
    mask = torch.tensor(
        [[1, 1, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 0], [1, 0, 1]], dtype=torch.bool
    )
    point = make_point(group=group, row_id=torch.arange(6), state=torch.arange(6), mask=mask)
    (whole,) = passes([point], None, adjacent=True)
    assert whole.row_id.tolist() == [5, 1, 3, 2, 0, 4]
    assert list(passes([point], None))[0].row_id.tolist() == list(range(6))


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_of_decisions_are_those_of_the_definition(reduction, weighed):
    for point, columns in zip(points(), ([0, 1], [2]), strict=True):
        if weighed:
            point = point.replace(
                weight=torch.tensor([0.5, 2.0, 3.0, 0.25, 1.0])[:, None].expand(5, 2)
            )
        computed = loss_weights(point, reduction, 7)
        for b in range(5):
            length = max(int(MASK[b].sum()), 1)
            share = {
                "token_mean": 1.0,
                "seq_mean_token_mean": 1 / length,
                "seq_mean_token_mean_all": 1 / length,
                "seq_mean_token_sum_norm": 1 / 7,
                "token_sum": 1 / 7,
            }
            for k, column in enumerate(columns):
                weight = float(point.weight[b, k]) if weighed else 1.0
                assert float(computed[b, k]) == pytest.approx(
                    MASK[b, column] * weight * share[reduction]
                )


def test_totals_count_decisions_or_rows():
    """Seven decisions; three rows of five have one; with ``trainable`` four rows stay in
    training."""
    whole = rows([5])
    part = whole.replace(trainable=torch.tensor([True, True, True, True, False]))
    for reduction, wanted in zip(REDUCTIONS, (7, 3, 5, 5, 5), strict=True):
        assert loss_total(points(), whole, reduction).tolist() == pytest.approx([3, wanted])
        fewer = 4 if wanted == 5 else wanted
        assert loss_total(points(), part, reduction).tolist() == pytest.approx([3, fewer])
        assert loss_total([], part, reduction).tolist() == [0, 4 if wanted == 5 else 0]

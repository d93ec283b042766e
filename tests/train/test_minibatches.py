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


def rows(prompts=6, copies=8):
    row = torch.arange(prompts * copies)
    empty = torch.zeros(len(row), 1)
    return make_rollout(
        group=row // copies, row_id=row, sample=empty, logprob=empty, mask=empty == 0
    )


def test_every_step_has_equally_many_rows_of_every_prompt():
    for epoch, size in enumerate((6, 12, 24)):
        for part in batches(rows(), [8] * 6, 48 // size, Rng.of("order", epoch)):
            assert part.group.bincount(minlength=6).tolist() == [size // 6] * 6


def test_every_copy_of_a_prompt_comes_first_equally_often_and_so_does_every_prompt():
    count = 300
    first = torch.zeros(3)
    prompt = torch.zeros(2)
    for epoch in range(count):
        row = next(batches(rows(2, 3), [3, 3], 6, Rng.of("order", epoch))).row_id
        first[row % 3] += 1
        prompt[row // 3] += 1
    assert (first / count - 1 / 3).abs().max() < 0.1 and (prompt / count - 1 / 2).abs().max() < 0.1


def uneven(sizes):
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    name = torch.arange(len(group))
    empty = torch.zeros(len(group), 1)
    return make_rollout(group=group, row_id=name, sample=empty, logprob=empty, mask=empty == 0)


def test_groups_of_different_sizes_are_spread_over_the_steps():
    """Every step has its share of every group, to less than two rows; every row is in one."""
    sizes = [2, 12, 4, 6]
    for epoch in range(20):
        parts = list(batches(uneven(sizes), sizes, 3, Rng.of("order", epoch)))
        assert [len(part) for part in parts] == [8, 8, 8]
        assert torch.cat([part.row_id for part in parts]).sort().values.tolist() == list(range(24))
        for part in parts:
            counts = part.group.bincount(minlength=4)
            assert all(abs(c - n / 3) < 2 for c, n in zip(counts.tolist(), sizes, strict=True))


@pytest.mark.parametrize(
    ("sizes", "steps"), [([9] + [8] * 7, 16), ([9] * 2 + [8] * 6, 16), ([5, 4, 4, 4, 4], 8)]
)
def test_rows_appended_to_groups_leave_no_step_empty(sizes, steps):
    parts = [len(part) for part in batches(uneven(sizes), sizes, steps, Rng.of("more"))]
    assert sum(parts) == sum(sizes) and len(parts) == steps
    assert max(parts) - min(parts) == 1 and min(parts) == sum(sizes) // steps


def test_whole_groups_of_different_sizes_fill_the_steps_evenly():
    sizes = [6, 2, 2, 2, 4, 8]
    parts = list(batches(uneven(sizes), sizes, 2, Rng.of(0), whole_groups=True))
    assert [part.group.unique().tolist() for part in parts] == [[0, 4], [1, 2, 3, 5]]


def test_a_process_takes_its_own_rows_of_the_same_steps():
    sizes = [2, 12, 4, 6]
    whole = uneven(sizes)
    for groups in (True, False):
        together = batches(whole, sizes, 3, Rng.of(1), groups)
        halves = [
            batches(whole[rows], sizes, 3, Rng.of(1), groups)
            for rows in (whole.group < 2, whole.group > 1)
        ]
        for part, *others in zip(together, *halves, strict=True):
            names = torch.cat([half.row_id for half in others])
            assert torch.equal(names.sort().values, part.row_id)


def test_whole_groups_are_dealt_in_turn():
    """Six prompts, two to a step: step k has prompts k and k + 3, with all their copies."""
    computed = [
        part.row_id.tolist() for part in batches(rows(), [8] * 6, 3, Rng.of(0), whole_groups=True)
    ]
    assert computed == [
        [*range(8 * k, 8 * k + 8), *range(8 * k + 24, 8 * k + 32)] for k in range(3)
    ]


def test_passes_hold_the_rows_with_decisions_in_order():
    for size, wanted in {
        1: [[10], [12], [13], [22], [23]],
        2: [[10, 12], [13, 22], [23]],
        4: [[10, 12, 13, 22], [23]],
        None: [[10, 12, 13, 22, 23]],
    }.items():
        assert [part.state.tolist() for part in passes(points(), size)] == wanted


def test_nothing_to_train_on_makes_no_pass():
    assert list(passes([point.replace(mask=point.mask & False) for point in points()], 2)) == []
    assert list(passes([], 2)) == []


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


def test_weights_of_decisions_are_those_of_the_definition():
    for reduction in REDUCTIONS:
        weights_by_loop(reduction, False)
        weights_by_loop(reduction, True)


def weights_by_loop(reduction, weighed):
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
    whole = rows(1, 5)
    part = whole.replace(trainable=torch.tensor([True, True, True, True, False]))
    for reduction, wanted in zip(REDUCTIONS, (7, 3, 5, 5, 5), strict=True):
        assert loss_total(points(), whole, reduction).tolist() == pytest.approx([3, wanted])
        fewer = 4 if wanted == 5 else wanted
        assert loss_total(points(), part, reduction).tolist() == pytest.approx([3, fewer])
        assert loss_total([], part, reduction).tolist() == [0, 4 if wanted == 5 else 0]

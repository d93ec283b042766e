"""Chunks, memory, constant width."""

import pytest
import torch

from samplers.batching import at_width, chunks, peak_bytes, rows_that_fit

WEIGHT = torch.ones(100, 100)


def test_chunks_cover_everything_once():
    for count, size in [(0, 3), (1, 3), (3, 3), (7, 3), (7, 1), (7, 100)]:
        parts = [list(range(count))[part] for part in chunks(count, size)]
        assert sum(parts, []) == list(range(count))
        assert all(1 <= len(part) <= size for part in parts) and len(parts) == -(-count // size)
    with pytest.raises(ValueError, match="at least 1 row"):
        chunks(5, 0)


# Peak of live bytes, computed by hand


def two_at_a_time(rows):
    x = torch.zeros(rows, 100)  # 400 bytes a row
    y = x @ WEIGHT.T  # another 400; the transposed view allocates no memory
    del x
    return y + 1  # two alive again


def chain():
    x = torch.zeros(1000)
    for _ in range(5):
        x = x + 1


def views_and_in_place():
    x = torch.zeros(1000)
    x.view(10, 100).t()[3:].add_(1)
    torch.sum(WEIGHT[3:], 0, out=x[:100])


def saved_for_the_backward_pass():
    return torch.zeros(1000, requires_grad=True).tanh().tanh().tanh()


@pytest.mark.parametrize(
    ("fn", "wanted"),
    [
        (lambda: two_at_a_time(8), 6400),
        (chain, 8000),
        (views_and_in_place, 4000),
        (lambda: [torch.zeros(250) for _ in range(4)], 4000),
        (saved_for_the_backward_pass, 4 * 4000),
        (torch.no_grad()(saved_for_the_backward_pass), 2 * 4000),
        (lambda: None, 0),
        (lambda: WEIGHT.t()[2:], 0),
    ],
)
def test_peak_bytes_by_hand(fn, wanted):
    assert peak_bytes(fn) == wanted
    assert peak_bytes(fn) == wanted  # what the first run left behind does not count


def test_peak_bytes_counts_the_backward_pass_and_an_error_leaves_nothing_behind():
    layer = torch.nn.Linear(100, 100, bias=False)

    def backward():
        layer.weight.grad = None
        layer(torch.zeros(2, 100)).sum().backward()

    assert peak_bytes(backward) >= 100 * 100 * 4  # the gradient of the weight
    with pytest.raises(ZeroDivisionError):
        peak_bytes(lambda: 1 / 0)
    assert peak_bytes(chain) == 8000


def test_rows_that_fit_by_hand():
    def forward(rows):
        fixed = torch.zeros(1000)  # 4000 bytes
        return torch.zeros(rows, 25), fixed  # 100 bytes a row

    for rows in (1, 2, 3, 7, 10):
        assert rows_that_fit(forward, 4000 + 100 * rows, 100) == rows
        assert rows_that_fit(forward, 4000 + 100 * rows + 99, 100) == rows
    assert rows_that_fit(forward, 10**9, 37) == 37
    assert rows_that_fit(forward, 4100, 1) == 1
    assert rows_that_fit(lambda rows: torch.zeros(10), 40, 12) == 12  # rows cost nothing
    with pytest.raises(ValueError, match="one row needs 4,100 bytes, the budget is 4,099"):
        rows_that_fit(forward, 4099, 100)
    with pytest.raises(ValueError, match="at least 1"):
        rows_that_fit(forward, 5000, 0)


# Constant width


def test_the_rows_left_in_a_chunk_do_not_change_a_bit():
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
    )
    x = torch.randn(16, 64)
    with torch.no_grad():
        whole = network(x)
        for rows in range(1, 17):
            assert torch.equal(at_width(network, 16, x[:rows]), whole[:rows])
    assert at_width(lambda y: y, 16, x) is x


def test_the_function_sees_the_width_and_nests_survive():
    widths = []

    def fn(tree, pair):
        widths.append((len(tree["a"]), len(tree["b"][0]), len(pair[1])))
        assert torch.equal(tree["a"][2:], tree["a"][:1].expand(3, 4))
        return {"sum": tree["a"] + pair[0], "parts": (tree["b"][0], None)}

    a = torch.arange(8.0).view(2, 4)
    b = torch.arange(2)
    nest = at_width(fn, 5, {"a": a, "b": [b], "scale": 2.0, "none": None}, (a, b.bool()))
    assert widths == [(5, 5, 5)] and torch.equal(nest["sum"], 2 * a)
    assert torch.equal(nest["parts"][0], b) and nest["parts"][1] is None


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_gradients_are_those_of_the_real_rows(rows):
    x = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    padded = at_width(lambda y: (y @ weight).tanh(), 5, x)
    expected = torch.autograd.grad((x @ weight).tanh().square().sum(), [x, weight])
    gradients = torch.autograd.grad(padded.square().sum(), [x, weight])
    torch.testing.assert_close(gradients, expected, atol=1e-12, rtol=1e-12)


def test_at_width_refuses():
    with pytest.raises(ValueError, match="do not fit a width of 2"):
        at_width(lambda x: x, 2, torch.zeros(3))
    with pytest.raises(ValueError, match="one number of rows"):
        at_width(lambda x, y: x, 5, torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="need 1 to 2"):
        at_width(lambda x: x, 2, torch.zeros(0))

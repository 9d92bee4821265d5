import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toploc.field import P, evaluate, interpolate, inverse_table


def horner(coefficients: list[int], x: int) -> int:
    value = 0
    for c in reversed(coefficients):
        value = (value * x + c) % P
    return value


def test_every_inverse() -> None:
    table = inverse_table()
    a = np.arange(1, P, dtype=np.int64)
    assert (a * table[1:] % P == 1).all() and table[0] == 0


@given(st.data())
def test_interpolation_passes_through_its_points(data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 9))
    element = st.integers(0, P - 1)
    x = data.draw(st.lists(element, min_size=k, max_size=k, unique=True))
    y = data.draw(st.lists(element, min_size=k, max_size=k))
    coefficients = interpolate(np.array([x]), np.array([y]))[0].tolist()
    assert all(0 <= c < P for c in coefficients)
    assert [horner(coefficients, v) for v in x] == y


@pytest.mark.parametrize("k", [1, 2, 3, 16, 127, 128, 130])
def test_batched_evaluation_agrees_with_horner(k: int) -> None:
    rng = np.random.default_rng(k)
    coefficients, x = rng.integers(0, P, (3, k)), rng.integers(0, P, (3, 5))
    coefficients[0], x[0] = P - 1, P - 1  # the largest sums
    expected = [[horner(c, v) for v in xs] for c, xs in zip(coefficients.tolist(), x.tolist(), strict=True)]
    assert evaluate(coefficients, x).tolist() == expected


def test_interpolation_inverts_evaluation_across_blocks() -> None:
    rng = np.random.default_rng(7)
    coefficients = rng.integers(0, P, (150, 20))
    x = np.stack([rng.permutation(P)[:20] for _ in range(150)])
    assert (interpolate(x, evaluate(coefficients, x)) == coefficients).all()


@pytest.mark.parametrize(
    ("x", "y"),
    [([[1, 1]], [[2, 3]]), ([[1, P]], [[2, 3]]), ([[1, 2]], [[-1, 3]]), ([[1, 2]], [[1]]), ([1, 2], [1, 2])],
)
def test_unusable_points_are_refused(x: list[object], y: list[object]) -> None:
    with pytest.raises(ValueError):
        interpolate(np.array(x), np.array(y))


def test_shapes_of_evaluation_must_fit() -> None:
    with pytest.raises(ValueError):
        evaluate(np.zeros((2, 3), np.int64), np.zeros((3, 3), np.int64))

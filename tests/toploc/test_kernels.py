"""The compiled loops against the plain definitions, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from toploc import sampling
from toploc.field import P, evaluate, interpolate
from toploc.selection import _kth_largest, _top_k_numpy, _top_k_torch

INF = float("inf")


def both(logits: torch.Tensor, claimed: torch.Tensor, temperature: float, seed: int = 5) -> None:
    """The compiled search and torch's agree in every bit of every output."""
    n = len(logits)
    generator = torch.Generator().manual_seed(seed)
    low, high, position = (torch.randint(0, 2**32, (n,), generator=generator) for _ in range(3))
    arguments = (torch.tensor(temperature), low, high, position, claimed)
    ours = sampling._best_compiled(logits, *arguments)
    theirs = sampling._best_torch(logits, *arguments)
    for mine, other in zip(ours, theirs, strict=True):
        assert np.array_equal(mine.numpy(), other.numpy(), equal_nan=mine.is_floating_point())


@pytest.mark.parametrize("vocab", [1, 2, 3, 4, 5, 7, 320, 1021, 32_000])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0, 40.0])
def test_the_search_without_logarithms_finds_the_same(vocab: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = spread * torch.randn(12, vocab, generator=generator)
    for temperature in (0.3, 1.0, 1.7):
        both(logits, torch.full((12,), -1), temperature)
        both(logits, torch.randint(0, vocab, (12,), generator=generator), temperature)


def test_forbidden_and_senseless_logits() -> None:
    logits = torch.randn(6, 37, generator=torch.Generator().manual_seed(1))
    logits[0, ::2] = -INF
    logits[1, :] = -INF
    logits[1, 36] = 0.0
    logits[2, 7] = INF
    logits[3, 9] = 3e38
    logits[4, :-1] = -3e38
    for claimed in (-1, 0, 7, 36):
        both(logits[:3], torch.full((3,), claimed), 0.9)
        both(logits[3:], torch.full((3,), claimed), 0.9)
    with pytest.raises(ValueError, match="finite"):
        sampling.sample(torch.full((1, 5), -INF), [1], [1], 1.0)


@pytest.mark.parametrize("place", [0, 3, 36])
@pytest.mark.parametrize("claimed", [0, 3, 36])
def test_nan_is_never_a_margin(place: int, claimed: int) -> None:
    logits = torch.zeros(2, 37)
    logits[1, place] = float("nan")
    found = sampling.margins(logits, [claimed, claimed], [1, 2], [0, 0], 1.0)
    assert found[0].isfinite() and found[1].isnan()
    with pytest.raises(ValueError, match="NaN"):
        sampling.sample(logits, [1, 2], [0, 0], 1.0)


def test_equal_scores_go_to_the_first_entry() -> None:
    """So large a logit swallows the noise in float32."""
    logits = torch.full((3, 50), -INF)
    logits[:, 10:40:3] = 1e12
    assert sampling.sample(logits, [1, 2, 3], [0, 0, 0], 1.0).tolist() == [10, 10, 10]
    assert sampling.margins(logits, [10, 25, 37], [1, 2, 3], [0, 0, 0], 1.0).tolist() == [0.0, 0.0, 0.0]


def test_polynomials_against_big_integers() -> None:
    generator = np.random.default_rng(3)
    for k in (1, 2, 3, 17, 128):
        x = np.stack([generator.permutation(P)[:k] for _ in range(5)])
        y = generator.integers(0, P, (5, k))
        x[0, 0], y[1] = P - 1, P - 1
        x[0, 1:] = np.arange(k - 1)
        coefficients = interpolate(x, y)
        for row in range(5):
            for point, value in zip(x[row].tolist(), y[row].tolist(), strict=True):
                assert sum(c * pow(point, i, P) for i, c in enumerate(coefficients[row].tolist())) % P == value
        assert np.array_equal(evaluate(coefficients, x), y)


@pytest.mark.parametrize("size", [1, 127, 128, 1023, 1024, 1025, 5000, 70_001])
@pytest.mark.parametrize("k", [1, 64, 128, 2000])
def test_selection_by_block_maxima(size: int, k: int) -> None:
    k = min(k, size)
    generator = torch.Generator().manual_seed(size + k)
    plain = torch.randn(size, generator=generator)
    outliers = plain.clone()
    outliers[:: max(1, size // 100)] += 50
    few = torch.randint(-2, 3, (size,), generator=generator).float()  # ties everywhere
    rising = torch.arange(size).float()
    chunks = [t.to(torch.bfloat16).view(torch.int16) for t in (plain, outliers, few, rising, torch.zeros(size))]
    ours, theirs = _top_k_numpy(chunks, k), _top_k_torch(chunks, k)
    assert np.array_equal(ours[0], theirs[0]) and np.array_equal(ours[1], theirs[1])


def test_kth_largest() -> None:
    values = np.array([3, 9, 1, 9, 7], dtype=np.int16)
    assert [int(_kth_largest(values, k)) for k in range(1, 6)] == [9, 9, 7, 3, 1]


def test_chunks_of_many_sizes_make_one_copy_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    chunks = [
        torch.randn(size, generator=generator).to(torch.bfloat16).view(torch.int16)
        for size in (512, 40, 512, 7, 40, 512, 130)
    ]
    copies = []
    copy = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: (copies.append(self.shape), copy(self))[1])
    theirs = _top_k_torch(chunks, 128)
    assert copies == [(2, 7, 128)]
    ours = _top_k_numpy(chunks, 128)
    assert np.array_equal(ours[0], theirs[0]) and np.array_equal(ours[1], theirs[1])

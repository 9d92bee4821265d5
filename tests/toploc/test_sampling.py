import numpy as np
import pytest
import torch

from toploc import logprobs, margins, noise, sample, sampling
from toploc.sampling import philox4x32

M = 0xFFFFFFFF
SEEDS = [0, 5, 2**64 - 1, 0x123456789ABCDEF0]
POSITIONS = [0, 3, 2**32 - 1, 70000]

# Random123, kat_vectors: counter, key, result
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((M, M, M, M), (M, M), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_integers(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """The paper's rounds on Python integers: nothing wraps by accident."""
    x, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(b >> 32) ^ x[1] ^ k[0], b & M, (a >> 32) ^ x[3] ^ k[1], a & M]
        k = [(k[0] + 0x9E3779B9) & M, (k[1] + 0xBB67AE85) & M]
    return x


def noise_numpy(seed: int, position: int, vocab_size: int) -> np.ndarray:
    key = (seed & M, seed >> 32)
    words = [w for j in range(-(-vocab_size // 4)) for w in philox_integers((j, position, 0, 0), key)]
    uniform = (
        np.array(words[:vocab_size], dtype=np.uint32).astype(np.float32) + np.float32(0.5)
    ) * np.float32(2**-32)
    wide = np.minimum(uniform, np.float32(1 - 2**-24)).astype(np.float64)
    return (-np.log(-np.log1p(-wide))).astype(np.float32)


@pytest.mark.parametrize(("counter", "key", "result"), PUBLISHED)
def test_published_philox_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]
) -> None:
    c, k = ([torch.tensor([v], dtype=torch.int64) for v in values] for values in (counter, key))
    assert tuple(int(w) for w in philox4x32((c[0], c[1], c[2], c[3]), (k[0], k[1]))) == result
    assert tuple(philox_integers(counter, key)) == result


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 321])
def test_noise_equals_an_independent_implementation(vocab_size: int) -> None:
    ours = noise(SEEDS, POSITIONS, vocab_size)
    assert ours.shape == (4, vocab_size) and ours.dtype == torch.float32
    for row, seed, position in zip(ours.numpy(), SEEDS, POSITIONS, strict=True):
        theirs = noise_numpy(seed, position, vocab_size)
        # Bit-equal but for a value or so in 10^8 whose two float64 logarithms straddle a float32 boundary.
        np.testing.assert_array_max_ulp(row, theirs, maxulp=1)
        assert (row == theirs).mean() > 0.99


def test_noise_at_the_ends_of_its_range() -> None:
    low, high = sampling._gumbel(torch.tensor([M, 0])).tolist()
    assert low == pytest.approx(-2.8115, abs=1e-3) and high == pytest.approx(22.8739, abs=1e-3)


def test_a_row_of_noise_does_not_depend_on_its_company(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = noise(SEEDS, POSITIONS, 101)
    for i in range(4):
        assert torch.equal(noise(SEEDS[i : i + 1], POSITIONS[i : i + 1], 101)[0], whole[i])
    assert torch.equal(noise(SEEDS, POSITIONS, 60), whole[:, :60])
    monkeypatch.setattr(sampling, "_BLOCK_CPU", 150)  # one row at a time
    assert torch.equal(noise(SEEDS, POSITIONS, 101), whole)


def test_blocks_do_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 33, generator=torch.Generator().manual_seed(0))
    keys = (list(range(9)), list(range(9)))
    tokens = [i % 33 for i in range(9)]

    def everything() -> list[torch.Tensor]:
        return [
            sample(logits, *keys, 0.7),
            margins(logits, tokens, *keys, 0.7),
            logprobs(logits, tokens, 0.7),
        ]

    whole = everything()
    monkeypatch.setattr(sampling, "_BLOCK_CPU", 70)  # two rows at a time
    assert all(torch.equal(a, b) for a, b in zip(whole, everything(), strict=True))


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_samples_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([1.5, 0.0, -0.5, 1.0, -2.0])
    n = 20000
    tokens = sample(logits.expand(n, -1), [42] * n, range(n), temperature)
    expected = torch.softmax(logits / temperature, 0) * n
    chi_square = float(((torch.bincount(tokens, minlength=5) - expected) ** 2 / expected).sum())
    assert chi_square < 18.47  # 99.9 % quantile, 4 degrees of freedom


def test_seeds_are_as_independent_as_positions() -> None:
    logits = torch.zeros(20000, 8)
    tokens = sample(logits, range(20000), [7] * 20000, 1.0)
    counts = torch.bincount(tokens, minlength=8).double()
    assert float(((counts - 2500) ** 2 / 2500).sum()) < 24.32  # 99.9 %, 7 degrees of freedom


def test_margins_are_zero_for_the_sampled_token_and_only_there() -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
    keys = ([2**63 + 1] * 50, list(range(50)))
    tokens = sample(logits, *keys, 0.8)
    assert tokens.dtype == torch.int64
    assert bool((margins(logits, tokens, *keys, 0.8) == 0).all())
    others = (tokens + 1) % 40
    assert bool((margins(logits, others, *keys, 0.8) > 0).all())
    scores = logits / torch.tensor(0.8) + noise(*keys, 40)
    expected = scores.amax(1) - scores.gather(1, others[:, None])[:, 0]
    assert torch.equal(margins(logits, others.tolist(), *keys, 0.8), expected)


def test_a_margin_is_at_most_twice_the_deviation_of_the_logits() -> None:
    generator = torch.Generator().manual_seed(4)
    engine = torch.randn(400, 30, generator=generator)
    verifier = engine + (torch.rand(400, 30, generator=generator) * 2 - 1) * 0.05
    keys = ([9] * 400, list(range(400)))
    found = margins(verifier, sample(engine, *keys, 1.0), *keys, 1.0)
    assert 0.0 < float(found.max()) <= 2 * 0.05 + 1e-5


def test_other_dtypes_are_taken_as_float32() -> None:
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(2)).bfloat16()
    keys = (list(range(6)), [0] * 6)
    assert torch.equal(sample(logits, *keys, 1.0), sample(logits.float(), *keys, 1.0))


def test_logprobs() -> None:
    logits = torch.randn(7, 20, generator=torch.Generator().manual_seed(3))
    tokens = [0, 3, 19, 4, 4, 7, 2]
    expected = torch.log_softmax(logits.double() / 0.7, -1)[torch.arange(7), torch.tensor(tokens)]
    ours = logprobs(logits, torch.tensor(tokens), 0.7)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5)


def test_no_rows() -> None:
    none = torch.zeros(0, 5)
    assert sample(none, [], [], 1.0).shape == margins(none, [], [], [], 1.0).shape == (0,)
    assert logprobs(none, [], 1.0).shape == (0,) and noise([], [], 5).shape == (0, 5)


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, float("nan"), float("inf"), 1e-60, 1e60, "1", None])
def test_unusable_temperatures(temperature: float) -> None:
    logits = torch.zeros(1, 4)
    for call in (
        lambda: sample(logits, [1], [1], temperature),
        lambda: margins(logits, [1], [1], [1], temperature),
        lambda: logprobs(logits, [1], temperature),
    ):
        with pytest.raises(ValueError, match="temperature"):
            call()


@pytest.mark.parametrize("token", [-1, 4, 2**40])
def test_tokens_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        margins(torch.zeros(1, 4), [token], [1], [1], 1.0)
    with pytest.raises(ValueError, match="vocabulary"):
        logprobs(torch.zeros(1, 4), [token], 1.0)


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [([-1], [0]), ([2**64], [0]), ([0], [-1]), ([0], [2**32]), ([0, 1], [0]), ([0.5], [0]), (["a"], [0])],
)
def test_unusable_keys(seeds: list[int], positions: list[int]) -> None:
    with pytest.raises(ValueError):
        noise(seeds, positions, 4)


def test_counts_must_match_the_logits() -> None:
    logits = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="rows of logits"):
        sample(logits, [1], [1], 1.0)
    with pytest.raises(ValueError, match="rows of logits"):
        logprobs(logits, [1], 1.0)
    for bad in (torch.zeros(4), torch.zeros(2, 0), torch.zeros(2, 4, dtype=torch.int64)):
        with pytest.raises(ValueError, match="logits"):
            sample(bad, [1, 1], [1, 1], 1.0)
    with pytest.raises(ValueError, match="vocab_size"):
        noise([1], [1], 0)


def test_logits_that_are_not_numbers() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        sample(logits, [1] * 3, [0, 1, 2], 1.0)
    found = margins(logits, [0] * 3, [1] * 3, [0, 1, 2], 1.0).isnan().tolist()
    assert found == [False, True, False]


def test_forbidden_entries_are_never_drawn() -> None:
    logits = torch.zeros(200, 4)
    logits[:, 1] = -float("inf")
    keys = ([3] * 200, list(range(200)))
    assert 1 not in sample(logits, *keys, 1.0).tolist()
    assert bool(margins(logits, [1] * 200, *keys, 1.0).isinf().all())
    with pytest.raises(ValueError, match="finite"):
        sample(torch.full((1, 4), -float("inf")), [1], [1], 1.0)

import numpy as np
import pytest
import torch
from vectors import TENSORS, VECTORS, raw, tensor

from toploc import (
    ChunkDistance,
    MalformedProof,
    Proof,
    commit,
    decode,
    distances,
    distances_many,
    encode_points,
)
from toploc.distance import NOTHING_MATCHES
from toploc.field import P


def hidden(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed, as the output of a final norm is."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, size, generator=generator) * torch.randn(rows, size, generator=generator).exp()


def exact(chunk: ChunkDistance) -> bool:
    figures = (chunk.exponent_mismatches, chunk.mantissa_mean, chunk.mantissa_median, chunk.sign_mismatches)
    return figures == (0, 0.0, 0.0, 0) and chunk.relative_error == 0.0


@pytest.mark.parametrize("name", TENSORS)
def test_reference_proofs_score_zero_where_no_tie_leaves_a_choice(name: str) -> None:
    vector, rows = VECTORS[name], tensor(name)
    shape = {"chunk_rows": vector["decode_batching_size"], "top_k": vector["topk"]}
    scores = distances(bytes.fromhex("".join(vector["proofs_hex"])), rows, **shape)
    assert len(scores) == len(vector["proofs_hex"])
    for score, tie, expected in zip(scores, vector["topk_boundary_tie"], vector["verify_same"], strict=True):
        if not tie:
            assert exact(score)
            assert [score.exponent_mismatches, score.mantissa_mean, score.mantissa_median] == expected
    assert all(exact(score) for score in distances(commit(rows, **shape), rows, **shape))


@pytest.mark.parametrize("name", [name for name in TENSORS if "verify_x1_01_cpp" in VECTORS[name]])
def test_reference_distances_of_scaled_activations(name: str) -> None:
    vector = VECTORS[name]
    shape = {"chunk_rows": vector["decode_batching_size"], "top_k": vector["topk"]}
    scaled = raw(name) * 1.01  # scaled before it is rounded
    scores = distances(bytes.fromhex("".join(vector["proofs_hex"])), scaled, **shape)
    for i, (score, expected) in enumerate(zip(scores, vector["verify_x1_01_cpp"], strict=True)):
        rows = slice(i * shape["chunk_rows"], (i + 1) * shape["chunk_rows"])
        size = scaled[rows].bfloat16().float().abs().reshape(-1).sort(descending=True).values
        if size[shape["top_k"] - 1] != size[shape["top_k"]]:
            assert [score.exponent_mismatches, score.mantissa_mean, score.mantissa_median] == expected
        else:  # a tie: the reference may have looked at another entry
            assert abs(score.exponent_mismatches - expected[0]) <= 1
            assert score.mantissa_mean == pytest.approx(expected[1], abs=0.02)
            assert score.mantissa_median == expected[2]


def test_a_modulus_below_the_field_is_used() -> None:
    rows = tensor("t4_modulus_not_p")
    proof = commit(rows)
    assert decode(proof, rows=32)[0].modulus < P
    assert exact(distances(proof, rows)[0])


def from_values(claimed: list[float], own: list[float]) -> ChunkDistance:
    bits = (torch.tensor(claimed).bfloat16().view(torch.int16).long() & 0xFFFF).tolist()
    proof = encode_points(range(len(bits)), bits)
    return distances(proof, torch.tensor([own]), top_k=len(bits))[0]


def test_figures_by_hand() -> None:
    score = from_values([1.0, 1.5, -2.0, 8.0], [1.0, 1.25, 2.0, 4.0])
    # mantissas: 0, |64 - 32|, 0; the last exponent differs, the third sign differs
    assert (score.rows, score.points, score.exponent_mismatches, score.sign_mismatches) == (1, 4, 1, 1)
    assert score.mantissa_mean == pytest.approx(32 / 3) and score.mantissa_median == 0.0
    assert score.relative_error == pytest.approx((0 + 0.25 + 2.0 + 4.0) / 8.25)


def test_the_median_is_the_upper_one() -> None:
    assert from_values([1.0, 1.0 + 2**-7], [1.0, 1.0]).mantissa_median == 1.0


def test_nothing_matches() -> None:
    score = from_values([1.0, 1.0], [2.0, -4.0])
    assert score.exponent_mismatches == 2 and score.sign_mismatches == 0
    assert score.mantissa_mean == score.mantissa_median == NOTHING_MATCHES


def test_zeros() -> None:
    assert exact(from_values([-0.0, 0.0], [0.0, 0.0]))
    assert from_values([1.0, 0.0], [0.0, 0.0]).relative_error == 1.0


def test_patterns_of_nan_and_infinity_count_as_wholly_wrong() -> None:
    proof = encode_points([0, 1, 2], [0x7F80, 0x7FC0, 0x7F81])
    assert distances(proof, torch.tensor([[1.0, 2.0, 3.0]]), top_k=3)[0].relative_error == 1.0


@pytest.mark.parametrize(("rows", "size"), [(1, 128), (7, 128), (32, 640), (3, 20)])
def test_negated_scaled_and_constant_proofs(rows: int, size: int) -> None:
    own = hidden(rows, size)
    points = min(128, rows * size)
    negated = distances(commit(-own), own)[0]
    assert negated.exponent_mismatches == 0 and negated.mantissa_mean == 0.0
    assert negated.sign_mismatches == points and negated.relative_error == 1.0
    for scale in (0.5, 0.97, 0.995, 1.005, 1.03, 2.0):
        assert distances(commit(own * scale), own)[0].relative_error == pytest.approx(
            min(abs(scale - 1), 1), rel=0.5
        )
    size_of_entries = own.abs().reshape(-1).topk(points).values.median().item()
    for constant in (size_of_entries, -size_of_entries, 1.0):
        bits = torch.tensor([constant]).bfloat16().view(torch.int16).item() & 0xFFFF
        forged = [Proof(P, (bits,) + (0,) * 127)]
        assert distances(forged, own)[0].relative_error > 0.2
    assert distances([Proof(P, (0,) * 128)], own)[0].relative_error == 1.0


def test_tiny_entries_do_not_move_the_relative_error() -> None:
    own = hidden(1, 128)
    own[0, ::2] *= 1e-6
    noise = torch.randn(1, 128, generator=torch.Generator().manual_seed(5)) * 1e-6
    score = distances(commit(own + noise), own)[0]
    assert score.exponent_mismatches > 20 and score.relative_error < 1e-4


def test_a_swap_at_the_rank_boundary_is_trimmed() -> None:
    own = torch.arange(200, 0, -1, dtype=torch.float32)[None]  # 128 entries: 200 down to 73
    other = own.clone()
    other[0, 127], other[0, 128] = own[0, 128], own[0, 127]
    score = distances(commit(other), own)[0]
    assert score.exponent_mismatches <= 1 and score.relative_error == 0.0


def test_noise_grows_the_distance() -> None:
    own = hidden(32, 256)
    noise = torch.randn(32, 256, generator=torch.Generator().manual_seed(2))
    errors = [distances(commit(own * (1 + s * noise)), own)[0].relative_error for s in (1e-3, 1e-2, 1e-1)]
    assert errors == sorted(errors) and errors[0] < 0.003 < errors[1] < 0.03 < errors[2]


def test_many_completions_score_as_each_alone() -> None:
    own = [hidden(n, 96, seed=n) for n in (1, 5, 40, 64, 2)]
    proofs = [commit(h * 1.01) for h in own]
    assert distances_many(proofs, own) == [distances(p, h) for p, h in zip(proofs, own, strict=True)]
    assert [[c.rows for c in chunks] for chunks in distances_many(proofs, own)] == [
        [1],
        [5],
        [32, 8],
        [32, 32],
        [2],
    ]
    assert distances_many([], []) == []


def test_proofs_that_do_not_fit_the_rows() -> None:
    own = hidden(40, 16)
    good = decode(commit(own), rows=40)
    for proof in (
        good[:1],
        good * 2,
        [],
        [good[0], "x"],
        [good[0], Proof(P, (1,))],
        commit(own)[:-1],
        7,
        None,
    ):
        with pytest.raises(MalformedProof):
            distances(proof, own)  # type: ignore[arg-type]
    with pytest.raises(MalformedProof, match="modulus"):
        distances([good[0], Proof(P - 1, good[1].coefficients)], own)
    with pytest.raises(ValueError, match="completions"):
        distances_many([commit(own)], [own, own])
    with pytest.raises(ValueError, match="finite"):
        distances(commit(own), own * np.nan)

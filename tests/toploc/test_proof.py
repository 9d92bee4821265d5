from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vectors import POINTS, TENSORS, VECTORS, patterns, tensor

import toploc
from toploc import MalformedProof, Proof, commit, commit_many, decode, encode_points
from toploc.field import P
from toploc.proof import injective_modulus
from toploc.selection import _top_k_numpy, _top_k_torch, round_to_bf16, select

DECODE = {"rows": 40, "chunk_rows": 32, "top_k": 4}
ONE = Proof(P, (1, 2, 3, 4)).to_bytes()


@pytest.mark.parametrize("name", TENSORS)
def test_reference_proofs_from_the_reference_indices(name: str) -> None:
    vector, rows = VECTORS[name], tensor(name)
    size = vector["decode_batching_size"]
    for i, proof in enumerate(vector["proofs_hex"]):
        chunk = patterns(rows[i * size : (i + 1) * size])
        indices = vector["topk_indices"][i]
        assert encode_points(indices, [chunk[j] for j in indices]).hex() == proof
        assert int(proof[:4], 16) == vector["moduli"][i]


@pytest.mark.parametrize("name", TENSORS)
def test_commitments_equal_the_reference_where_no_tie_leaves_a_choice(name: str) -> None:
    vector = VECTORS[name]
    shape = {"chunk_rows": vector["decode_batching_size"], "top_k": vector["topk"]}
    ours = commit(tensor(name), **shape)
    length = 2 + 2 * vector["topk"]
    assert len(ours) == length * len(vector["proofs_hex"])
    for i, proof in enumerate(vector["proofs_hex"]):
        if not vector["topk_boundary_tie"][i]:
            assert ours[i * length : (i + 1) * length].hex() == proof


def test_the_vectors_hold_tie_free_chunks() -> None:
    assert sum(not tie for name in TENSORS for tie in VECTORS[name]["topk_boundary_tie"]) >= 5


def test_prefill_and_decode_chunks_of_the_reference() -> None:
    """The vector does not say which of the tied entries were taken: one choice must give its bytes."""
    vector, rows = VECTORS["v7_prefill_plus_decode"], tensor("v7_prefill_plus_decode")
    parts = [rows[:9], rows[9:13], rows[13:17], rows[17:20]]
    choices = []
    for part, proof in zip(parts, vector["proofs_hex"], strict=True):
        bits = patterns(part)
        size = [pattern & 0x7FFF for pattern in bits]
        smallest = sorted(size)[-vector["topk"]]
        above = [i for i, s in enumerate(size) if s > smallest]
        ties = combinations([i for i, s in enumerate(size) if s == smallest], vector["topk"] - len(above))
        possible = {encode_points(x, [bits[i] for i in x]).hex() for x in (above + list(tie) for tie in ties)}
        assert proof in possible
        choices.append(len(possible))
    assert choices == [3, 1, 1, 1]


@pytest.mark.parametrize("name", POINTS)
def test_points(name: str) -> None:
    vector = VECTORS[name]
    encoded = encode_points(vector["input"]["x"], vector["input"]["y"])
    assert encoded.hex() == vector["proof_hex"]
    (proof,) = decode(encoded, rows=1, top_k=len(vector["coeffs"]))
    assert (proof.modulus, list(proof.coefficients)) == (vector["modulus"], vector["coeffs"])


def test_the_null_proof_is_refused() -> None:
    null = bytes.fromhex(VECTORS["null"]["proof_hex"])
    with pytest.raises(MalformedProof, match="null"):
        decode(null, rows=1, top_k=4)


@pytest.mark.parametrize("name", TENSORS)
def test_parser_round_trip(name: str) -> None:
    vector = VECTORS[name]
    data = bytes.fromhex("".join(vector["proofs_hex"]))
    rows, hidden_size = vector["input"]["shape"]
    shape = {"rows": rows, "chunk_rows": vector["decode_batching_size"], "top_k": vector["topk"]}
    proofs = decode(data, **shape, hidden_size=hidden_size)
    assert [p.modulus for p in proofs] == vector["moduli"]
    assert b"".join(p.to_bytes() for p in proofs) == data
    assert decode(bytearray(data), **shape) == decode(memoryview(data), **shape) == proofs


def test_a_full_chunk_costs_258_bytes() -> None:
    hidden = torch.randn(33, 64, generator=torch.Generator().manual_seed(0))
    assert len(commit(hidden)) == len(commit(hidden[:, :1])) == 2 * 258


def test_a_chunk_with_fewer_values_than_coefficients() -> None:
    hidden = torch.tensor([[1.0, -2.0, 0.5]])
    (proof,) = decode(commit(hidden, top_k=8), rows=1, top_k=8, hidden_size=3)
    assert proof.coefficients[3:] == (0,) * 5 and any(proof.coefficients[:3])
    assert encode_points([0, 1, 2], patterns(hidden.bfloat16())) == proof.to_bytes()[:8]


def test_ties_go_to_the_lowest_index_and_signs_do_not_matter() -> None:
    hidden = torch.tensor([[1.0, -3.0, 3.0, 0.0, -0.0, 3.0, -1.0]])
    assert select([hidden], 1, 2).indices.tolist() == [[1, 2]]
    assert select([hidden], 1, 4).indices.tolist() == [[0, 1, 2, 5]]
    assert select([hidden], 1, 6).indices.tolist() == [[0, 1, 2, 3, 5, 6]]


@pytest.mark.parametrize("k", [1, 5, 64])
def test_both_selections_agree_and_follow_the_total_order(k: int) -> None:
    rng = np.random.default_rng(k)
    values = torch.from_numpy(rng.integers(-4, 5, (6, 64)).astype(np.float32)).to(torch.bfloat16)
    chunks = list(values.view(torch.int16))
    for ours, other in zip(_top_k_numpy(chunks, k), _top_k_torch(chunks, k), strict=True):
        assert (ours == other).all()
    for row, chosen in zip(values.float().tolist(), _top_k_numpy(chunks, k)[0].tolist(), strict=True):
        assert chosen == sorted(sorted(range(64), key=lambda i: (-abs(row[i]), i))[:k])


def test_many_completions_give_the_bytes_of_each_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    hiddens = [torch.randn(n, 70, generator=generator) for n in (1, 2, 33, 64, 1, 7)]
    assert commit_many(hiddens) == [commit(h) for h in hiddens]
    assert commit_many([]) == []


def test_rounding_is_nearest_even_once() -> None:
    half_even, half_odd = 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8
    wide = torch.tensor(
        [half_even, half_odd, half_even + 2.0**-40, -half_even - 2.0**-40], dtype=torch.float64
    )
    expected = [1.0, 1.0 + 2.0**-6, 1.0 + 2.0**-7, -1.0 - 2.0**-7]
    assert round_to_bf16(wide).double().tolist() == expected
    assert round_to_bf16(wide[:2].float()).double().tolist() == expected[:2]
    assert round_to_bf16(torch.tensor([65504.0], dtype=torch.float16)).item() == 65536.0


def test_dtype_of_the_engine_does_not_matter_after_rounding() -> None:
    hidden = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert commit(hidden) == commit(hidden.float()) == commit(hidden.double())
    assert commit(hidden.t().contiguous().t()) == commit(hidden)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_values_that_are_not_finite_in_bf16_are_refused(value: float) -> None:
    hidden = torch.zeros(2, 3)
    hidden[1, 2] = value
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(ValueError, match="finite"):
            commit(hidden.to(dtype))
    if value == value and abs(value) == float("inf"):
        with pytest.raises(ValueError, match="finite"):
            commit(hidden.half())


@pytest.mark.parametrize(
    "hidden",
    [torch.zeros(3), torch.zeros(0, 3), torch.zeros(3, 0), torch.zeros(2, 2, dtype=torch.int64), None],
)
def test_unusable_hidden_states_are_refused(hidden: torch.Tensor) -> None:
    with pytest.raises(ValueError):
        commit(hidden)


@pytest.mark.parametrize("shape", [{"chunk_rows": 0}, {"top_k": 0}, {"top_k": True}, {"chunk_rows": 1.5}])
def test_senseless_shapes_are_refused(shape: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="positive int"):
        commit(torch.zeros(1, 1), **shape)
    with pytest.raises(ValueError, match="positive int"):
        decode(b"", rows=1, **shape)


@pytest.mark.parametrize("rows", [0, -1, True, 1.0])
def test_senseless_rows_are_refused(rows: int) -> None:
    with pytest.raises(ValueError, match="rows"):
        decode(b"", rows=rows)


def test_modulus() -> None:
    assert injective_modulus(np.array([0, P - 1])) == P
    assert injective_modulus(np.array([0, P, 2 * P])) == P - 1
    for repeated in ([4, 4], [0, 5 * P, 5 * P]):
        with pytest.raises(ValueError, match="modulus"):
            injective_modulus(np.array(repeated))


@pytest.mark.parametrize(
    ("x", "y"), [([], []), ([1], []), ([-1], [0]), ([1], [-1]), ([1], [65536]), ([1, 1], [2, 2])]
)
def test_unusable_points_are_refused(x: list[int], y: list[int]) -> None:
    with pytest.raises(ValueError):
        encode_points(x, y)


def words(*values: int) -> bytes:
    return np.array(values, dtype=">u2").tobytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        ONE,
        ONE + ONE[:-1],
        ONE + ONE + b"\0",
        ONE * 3,
        ONE + words(0, 0, 0, 0, 0),
        ONE + words(0, 1, 2, 3, 4),
        ONE + words(2**15, 1, 2, 3, 4),
        ONE + words(1, 1, 2, 3, 4),
        ONE + words(P + 1, 1, 2, 3, 4),
        ONE + words(P, 1, 2, 3, P),
        words(P, 65535, 0, 0, 0) + ONE,
        "text",
        (ONE + ONE).hex(),
        None,
        7,
        [1, 2],
        list(ONE + ONE),
        np.frombuffer(ONE + ONE, dtype=np.uint8),
    ],
)
def test_malformed(data: object) -> None:
    with pytest.raises(MalformedProof):
        decode(data, **DECODE)


def test_a_released_buffer_is_malformed() -> None:
    view = memoryview(ONE + ONE)
    view.release()
    with pytest.raises(MalformedProof):
        decode(view, **DECODE)


def test_the_smallest_and_largest_words_pass() -> None:
    data = words(2**15 + 1, 0, 0, 0, 0) + words(P, P - 1, P - 1, P - 1, P - 1)
    assert b"".join(p.to_bytes() for p in decode(data, **DECODE)) == data


def test_what_the_hidden_size_dictates() -> None:
    low_modulus = Proof(P - 1, (1, 2, 3, 4)).to_bytes()
    assert decode(low_modulus, rows=1, top_k=4, hidden_size=P + 1)
    with pytest.raises(MalformedProof, match="modulus"):
        decode(low_modulus, rows=1, top_k=4, hidden_size=P)
    assert decode(ONE, rows=1, top_k=4, hidden_size=4)
    with pytest.raises(MalformedProof, match="degree"):
        decode(ONE, rows=1, top_k=4, hidden_size=3)
    with pytest.raises(ValueError, match="hidden_size"):
        decode(ONE, rows=1, top_k=4, hidden_size=0)


@pytest.mark.parametrize(
    ("modulus", "coefficients"), [(0, (1,)), (P + 1, (1,)), (P, ()), (P, (P,)), (P, (-1,))]
)
def test_a_proof_object_is_always_well_formed(modulus: int, coefficients: tuple[int, ...]) -> None:
    with pytest.raises(MalformedProof):
        Proof(modulus, coefficients)


anything = st.one_of(
    st.binary(max_size=30),
    st.binary(min_size=20, max_size=20),
    st.binary(min_size=20, max_size=20).map(bytearray),
    st.lists(st.sampled_from([0, 1, 2**15, 2**15 + 1, P - 1, P, 65535]), min_size=10, max_size=10).map(
        lambda values: words(*values)
    ),
    st.none() | st.text() | st.integers() | st.floats() | st.lists(st.integers(0, 255)),
)


@given(anything)
def test_any_input_is_parsed_exactly_or_malformed(data: object) -> None:
    try:
        proofs = decode(data, **DECODE)
    except MalformedProof:
        return
    assert isinstance(data, bytes | bytearray)
    assert b"".join(p.to_bytes() for p in proofs) == data
    hidden = torch.linspace(-2, 2, 40 * 8).reshape(40, 8)
    for chunk in (
        toploc.distances(proofs, hidden, top_k=4) if proofs[0].modulus == proofs[1].modulus == P else []
    ):
        assert 0 <= chunk.exponent_mismatches <= 4 and 0.0 <= chunk.relative_error <= 1.0

"""The digest of tensors: what it depends on, what it does not, and what the parser refuses."""

import hashlib
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardcast_net import safetensors

from shardcast.tensors import MAX_HEADER_BYTES, tensors_digest

TENSORS = {
    "layer.1.weight": ("F32", (2, 3), bytes(range(24))),
    "layer.0.bias": ("BF16", (4,), bytes(range(8))),
    "scalar": ("I64", (), bytes(8)),
    "nothing": ("F16", (0, 5), b""),
    "maß": ("U8", (1, 1, 3), b"abc"),
}


def digest_of(path: Path, *contents: bytes) -> str:
    files = []
    for number, content in enumerate(contents):
        files.append(path / f"{number}.safetensors")
        files[-1].write_bytes(content)
    return tensors_digest(files)


def test_definition(tmp_path: Path) -> None:
    """Against the definition written out: length-prefixed name and dtype, rank, sizes, length, bytes."""
    text = hashlib.sha256(b"farflung/tensors/1\n")
    for name in sorted(TENSORS, key=str.encode):
        dtype, shape, data = TENSORS[name]
        raw = name.encode()
        text.update(struct.pack(">I", len(raw)) + raw + struct.pack(">I", len(dtype)) + dtype.encode())
        text.update(struct.pack(f">{len(shape) + 2}Q", len(shape), *shape, len(data)) + data)
    assert digest_of(tmp_path, safetensors(TENSORS)) == text.hexdigest()


@given(
    order=st.permutations(list(TENSORS)),
    cut=st.integers(0, len(TENSORS)),
    metadata=st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    padding=st.integers(0, 9),
)
def test_layout_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, order: list[str], cut: int, metadata: dict[str, str], padding: int
) -> None:
    folder = tmp_path_factory.mktemp("layout")
    expected = digest_of(folder, safetensors(TENSORS))
    parts = [{name: TENSORS[name] for name in names} for names in (order[:cut], order[cut:])]
    assert digest_of(folder, *(safetensors(part, None, metadata, padding) for part in parts)) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"scalar": ("I64", (), b"\x01" + bytes(7))},
        {"scalar": ("U64", (), bytes(8))},
        {"scalar": ("I64", (1,), bytes(8))},
        {"layer.1.weight": ("F32", (3, 2), bytes(range(24)))},
        {"nothing": ("F16", (0, 6), b"")},
        {"more": ("U8", (1,), b"x")},
    ],
)
def test_everything_else_matters(tmp_path: Path, change: dict) -> None:
    assert digest_of(tmp_path, safetensors({**TENSORS, **change})) != digest_of(tmp_path, safetensors(TENSORS))


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    library = pytest.importorskip("safetensors.numpy")
    arrays = {"b": numpy.arange(6, dtype="float32").reshape(2, 3), "a": numpy.zeros((0, 4), dtype="int64")}
    library.save_file(arrays, tmp_path / "library.safetensors", metadata={"format": "pt"})
    own = safetensors({"a": ("I64", (0, 4), b""), "b": ("F32", (2, 3), arrays["b"].tobytes())})
    assert tensors_digest([tmp_path / "library.safetensors"]) == digest_of(tmp_path, own)


def _raw(header: object, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def _entry(begin: object, end: object, dtype: object = "U8", shape: object = None) -> dict:
    if shape is None:
        shape = [end - begin]  # type: ignore[operator]
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


REFUSED = {
    "empty file": b"",
    "no room for the length": b"\x02\x00\x00",
    "header longer than the file": _raw({}, length=100),
    "header over the limit": struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}",
    "length of 2^63": _raw({}, length=2**63),
    "header is a list": _raw([]),
    "header is not JSON": _raw(b"{'a': 1}"),
    "space in front": _raw(b' {"a": 1}'),
    "NaN": _raw(b'{"a": NaN}'),
    "nested": _raw(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "duplicate name": _raw(b'{"a":%b,"a":%b}' % ((json.dumps(_entry(0, 1)).encode(),) * 2), b"x"),
    "trailing bytes": _raw({"a": _entry(0, 1)}, b"xy"),
    "truncated": _raw({"a": _entry(0, 2)}, b"x"),
    "gap": _raw({"a": _entry(0, 1), "b": _entry(2, 3)}, b"xyz"),
    "gap in front": _raw({"a": _entry(1, 2)}, b"xy"),
    "overlap": _raw({"a": _entry(0, 2), "b": _entry(1, 3)}, b"xyz"),
    "overlap and gap that add up": _raw({"a": _entry(0, 2), "b": _entry(1, 3)}, b"wxyz"),
    "shared bytes": _raw({"a": _entry(0, 1), "b": _entry(0, 1)}, b"x"),
    "backwards": _raw({"a": _entry(1, 0, shape=[1])}, b"x"),
    "negative offset": _raw({"a": _entry(-1, 0)}, b"x"),
    "offsets as booleans": _raw({"a": _entry(False, True, shape=[1])}, b"x"),
    "fractional offset": _raw({"a": _entry(0, 1.0, shape=[1])}, b"x"),
    "huge offset": _raw({"a": _entry(0, 2**64)}, b"x"),
    "negative dimensions": _raw({"a": _entry(0, 1, shape=[-1, -1])}, b"x"),
    "rank": _raw({"a": _entry(0, 1, shape=[1] * 33)}, b"x"),
    "unknown dtype": _raw({"a": _entry(0, 1, "Q9")}, b"x"),
    "dtype is a list": _raw({"a": _entry(0, 1, ["U8"])}, b"x"),
    "wrong size": _raw({"a": _entry(0, 3, "F32", [1])}, b"xyz"),
    "unknown field": _raw({"a": {**_entry(0, 1), "pickle": 1}}, b"x"),
    "missing field": _raw({"a": {"dtype": "U8", "shape": [1]}}, b"x"),
    "entry is a number": _raw({"a": 1}, b""),
    "metadata is a list": _raw({"__metadata__": []}),
    "metadata of numbers": _raw({"__metadata__": {"a": 1}}),
    "lone surrogate": _raw(b'{"\\ud800": %b}' % json.dumps(_entry(0, 1)).encode(), b"x"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_parser_refuses(tmp_path: Path, case: str) -> None:
    with pytest.raises(ValueError):
        digest_of(tmp_path, REFUSED[case])


def test_the_same_helpers_make_files_that_are_taken(tmp_path: Path) -> None:
    digest_of(tmp_path, _raw({"a": _entry(0, 1), "b": _entry(1, 3)}, b"xyz"))
    digest_of(tmp_path, _raw({}))


def test_name_in_two_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two files"):
        digest_of(tmp_path, safetensors({"a": TENSORS["scalar"]}), safetensors({"a": TENSORS["scalar"]}))


@given(st.binary(max_size=200), st.binary(max_size=20))
def test_garbage_is_a_value_error_or_a_digest(
    tmp_path_factory: pytest.TempPathFactory, header: bytes, body: bytes
) -> None:
    try:
        digest_of(tmp_path_factory.mktemp("garbage"), _raw(b"{" + header, body))
    except ValueError:
        pass

"""Digest of the tensors in safetensors files: what a policy is, whatever file, order or header it is stored in.

The parser is strict: the format of the safetensors reference, with a bounded header and no byte unaccounted for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from protocol.canonical import parse_json
from protocol.reasons import Refusal

MAX_HEADER_BYTES = 16 << 20
MAX_RANK = 32
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_LABEL = b"farflung/tensors/1\n"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Tensor:
    """One entry of a header; its bytes lie in the file at `offset`, `nbytes` long (row-major, little-endian)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _tensor(name: str, entry: Any, start: int) -> Tensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r}: an entry has dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"{name!r}: unknown dtype {dtype!r}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_natural, shape)):
        raise ValueError(f"{name!r}: not a shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)):
        raise ValueError(f"{name!r}: not a pair of offsets")
    begin, end = offsets
    if end - begin != prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name!r}: {end - begin} bytes do not hold {dtype} {shape}")
    return Tensor(name, dtype, tuple(shape), start + begin, end - begin)


def read_header(file: BinaryIO, size: int) -> list[Tensor]:
    """The tensors of an open safetensors file of `size` bytes, in the order of their bytes.

    Raises ValueError for a header that is not JSON, is too long or names a tensor twice, for an unknown dtype, and for
    bytes that are out of bounds, shared by two tensors or owned by none.
    """
    prefix = file.read(8)
    if len(prefix) != 8:
        raise ValueError("shorter than the length of its header")
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    raw = file.read(length)
    if len(raw) != length or raw[:1] != b"{":
        raise ValueError("the header is no JSON object")
    try:
        header = parse_json(raw, max_bytes=MAX_HEADER_BYTES)
    except Refusal as refusal:
        raise ValueError(f"header: {refusal.detail}") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ maps text to text")
    tensors = [_tensor(name, entry, 8 + length) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    position = 8 + length
    for tensor in tensors:
        if tensor.offset != position:
            raise ValueError(f"{tensor.name!r}: its bytes overlap others or leave a gap")
        position += tensor.nbytes
    if position != size:
        raise ValueError(f"tensors end at byte {position} of {size}")
    return tensors


def _field(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def _description(tensor: Tensor) -> bytes:
    dims = (len(tensor.shape), *tensor.shape, tensor.nbytes)
    numbers = b"".join(number.to_bytes(8, "big") for number in dims)
    return _field(tensor.name.encode()) + _field(tensor.dtype.encode()) + numbers


def _feed(digest: Any, file: BinaryIO, tensor: Tensor, buffer: memoryview) -> None:
    file.seek(tensor.offset)
    left = tensor.nbytes
    while left:
        count = file.readinto(buffer[: min(left, len(buffer))])  # type: ignore[attr-defined]
        if not count:
            raise ValueError(f"{tensor.name!r}: the file became shorter while it was read")
        digest.update(buffer[:count])
        left -= count


def tensors_digest(files: Iterable[Path]) -> str:
    """SHA-256 (lowercase hex) over all tensors of the files, sorted by name (UTF-8): name, dtype, shape, bytes.

    Independent of the number of files, of the order of tensors in them and of metadata. Reads 1 MiB at a time: a plain
    read, not a memory map, so that a file cut short underneath is an error and not a signal. Raises ValueError
    (`read_header`, or a tensor named twice) and OSError.
    """
    digest = hashlib.sha256(_LABEL)
    buffer = memoryview(bytearray(_CHUNK))
    found: dict[bytes, tuple[Tensor, BinaryIO]] = {}
    with ExitStack() as stack:
        for path in files:
            file = stack.enter_context(path.open("rb", buffering=0))
            size = file.seek(0, 2)
            file.seek(0)
            for tensor in read_header(file, size):  # type: ignore[arg-type]
                if found.setdefault(tensor.name.encode(), (tensor, file)) != (tensor, file):  # type: ignore[arg-type]
                    raise ValueError(f"{tensor.name!r} is in two files")
        for name in sorted(found):
            tensor, source = found[name]
            digest.update(_description(tensor))
            _feed(digest, source, tensor, buffer)
    return digest.hexdigest()

"""Which entries of the hidden states a proof speaks of: bfloat16 rounding, chunks of rows, top-k by
magnitude.

Both sides must pick the same entries from the same numbers on every device, so the order is total: larger
bfloat16 magnitude pattern first, then the lower flat index. (The tie choice of a library's own top-k differs
between devices.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_MAGNITUDE = 0x7FFF
_EXPONENT = 0x7F80
_INDEX_BITS = 40
_BLOCKS = 1024


@dataclass(frozen=True, eq=False)
class Selection:
    """The selected entries of many chunks, in order of completion and chunk.

    indices: int64 [chunks, top_k], flat index row · hidden + dim inside the chunk, ascending; bits: int64
    [chunks, top_k], bfloat16 patterns; counts: int64 [chunks], how many entries of each row are real (the
    rest is 0); rows: int64 [chunks]; per_completion: chunks of each completion.
    """

    indices: npt.NDArray[np.int64]
    bits: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    per_completion: tuple[int, ...]


def check_shape_parameters(chunk_rows: int, top_k: int) -> None:
    """Raises ValueError unless both are positive ints."""
    for name, value in (("chunk_rows", chunk_rows), ("top_k", top_k)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive int, not {value!r}")


def round_to_bf16(hidden: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16, nearest-even, once. Any float dtype and device in, bfloat16 of the same shape out.

    Raises ValueError where the input is not floating point.
    """
    if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point():
        raise ValueError("hidden states must be a floating-point tensor")
    values = _round_to_odd(hidden.detach()) if hidden.dtype == torch.float64 else hidden.detach()
    return values.to(torch.bfloat16).contiguous()


def select(hiddens: Sequence[torch.Tensor], chunk_rows: int, top_k: int) -> Selection:
    """The entries that stand for each chunk of each completion.

    hiddens: tensors [rows >= 1, hidden >= 1]. Raises ValueError for other shapes, non-float or non-finite
    input.
    """
    check_shape_parameters(chunk_rows, top_k)
    chunks: list[torch.Tensor] = []
    rows: list[int] = []
    per_completion: list[int] = []
    for hidden in hiddens:
        rounded = round_to_bf16(hidden)
        if rounded.ndim != 2 or rounded.numel() == 0:
            raise ValueError(
                f"hidden states must be [rows, hidden] and not empty, not {tuple(rounded.shape)}"
            )
        pattern = rounded.view(torch.int16)
        parts = [pattern[i : i + chunk_rows] for i in range(0, len(pattern), chunk_rows)]
        rows.extend(len(part) for part in parts)
        chunks.extend(part.reshape(-1) for part in parts)
        per_completion.append(len(parts))
    indices = np.zeros((len(chunks), top_k), dtype=np.int64)
    bits = np.zeros((len(chunks), top_k), dtype=np.int64)
    counts = np.array([min(top_k, chunk.numel()) for chunk in chunks], dtype=np.int64)
    on: dict[torch.device, list[int]] = {}
    for i, chunk in enumerate(chunks):
        on.setdefault(chunk.device, []).append(i)
    for device, members in on.items():
        pick = _top_k_numpy if device.type == "cpu" else _top_k_torch
        indices[members], bits[members] = pick([chunks[i] for i in members], top_k)
    if bool(((bits & _EXPONENT) == _EXPONENT).any()):  # infinities and NaN are the largest magnitudes of all
        raise ValueError("hidden states hold values that are not finite in bfloat16")
    return Selection(indices, bits, counts, np.array(rows, dtype=np.int64), tuple(per_completion))


_Picked = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _top_k_numpy(chunks: Sequence[torch.Tensor], top_k: int) -> _Picked:
    """int16 patterns [m] each -> ascending indices and patterns, int64 [n, top_k]; where m < top_k, the rest is 0.

    The entries fall into blocks (of one column each, so that maxima are taken elementwise). The k-th largest block
    maximum is no larger than the k-th largest entry, so only entries from there on need sorting.
    """
    indices = np.zeros((len(chunks), top_k), dtype=np.int64)
    bits = np.zeros((len(chunks), top_k), dtype=np.int64)
    for i, chunk in enumerate(chunks):
        pattern = chunk.numpy()
        k = min(top_k, len(pattern))
        magnitude = pattern & np.int16(_MAGNITUDE)
        width = max(k, _BLOCKS)
        whole = len(magnitude) // width * width
        if whole:
            maxima = magnitude[:whole].reshape(-1, width).max(axis=0)
            candidates = np.flatnonzero(magnitude >= _kth_largest(maxima, k))
        else:
            candidates = np.arange(len(magnitude))
        sizes = magnitude[candidates]
        smallest = _kth_largest(sizes, k)
        above = np.flatnonzero(sizes > smallest)
        ties = np.flatnonzero(sizes == smallest)[: k - len(above)]
        indices[i, :k] = np.sort(candidates[np.concatenate((above, ties))])
        bits[i, :k] = pattern[indices[i, :k]].astype(np.int64) & 0xFFFF
    return indices, bits


def _kth_largest(values: npt.NDArray[np.int16], k: int) -> np.int16:
    return np.partition(values, len(values) - k)[len(values) - k]  # type: ignore[no-any-return]


def _top_k_torch(chunks: Sequence[torch.Tensor], top_k: int) -> _Picked:
    """The same on any one device: distinct keys leave the library's top-k no tie to break; one copy to the host."""
    sizes: dict[int, list[int]] = {}
    for i, chunk in enumerate(chunks):
        sizes.setdefault(chunk.numel(), []).append(i)
    picked = [_top_k_stacked(torch.stack([chunks[i] for i in same]), top_k) for same in sizes.values()]
    both = torch.cat(picked, dim=1).cpu().numpy()
    order = np.argsort([i for same in sizes.values() for i in same])
    return both[0, order], both[1, order]


def _top_k_stacked(patterns: torch.Tensor, top_k: int) -> torch.Tensor:
    """int16 [n, m] -> indices and patterns, int64 [2, n, top_k]."""
    wide = patterns.to(torch.int64)
    last = (1 << _INDEX_BITS) - 1
    flat = torch.arange(wide.shape[1], dtype=torch.int64, device=wide.device)
    keys = ((wide & _MAGNITUDE) << _INDEX_BITS) | (last - flat)
    k = min(top_k, wide.shape[1])
    indices = (last - (keys.topk(k, dim=1, sorted=False).values & last)).sort(dim=1).values
    found = torch.stack((indices, wide.gather(1, indices) & 0xFFFF))
    return torch.nn.functional.pad(found, (0, top_k - k))


def _round_to_odd(values: torch.Tensor) -> torch.Tensor:
    """float64 -> float32 by rounding to odd, so that the later rounding to bfloat16 is as if done once."""
    nearest = values.to(torch.float32)
    widened = nearest.to(torch.float64)
    away = widened.abs() > values.abs()
    inexact = (widened != values) & ~values.isnan()
    pattern = nearest.view(torch.int32) - away.to(torch.int32)
    return (pattern | inexact.to(torch.int32)).view(torch.float32)

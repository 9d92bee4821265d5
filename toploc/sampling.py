"""Seeded sampling: the slot's seed fixes the noise, so the logits fix the token.

Gumbel-max with counter-based noise. Entry j at position t takes word j mod 4 of Philox4x32-10 (Salmon et al.,
SC 2011) with key (seed low, seed high) and counter (j div 4, t, 0, 0); argmax_j (logit_j / T + g_j) is then
an exact draw at temperature T. Integers are bit-exact everywhere; both logarithms are taken in float64 and
rounded once, since float32 logarithms differ between libraries on a quarter of all values.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from toploc import kernels

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_V_MAX = 1.0 - 2.0**-24

# Entries of [rows, vocabulary] handled at once: cache-sized on a CPU, a few hundred MiB of temporaries
# elsewhere.
_BLOCK_CPU = 1 << 20
_BLOCK_DEVICE = 1 << 23

Ints = Sequence[int] | torch.Tensor
_Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: _Words, key: tuple[torch.Tensor, torch.Tensor]) -> _Words:
    """Philox4x32-10. int64 tensors of 32-bit words, any broadcastable shapes, any device -> four such
    tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The int64 product wraps mod 2^64, which leaves bits 32..63 right.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((high >> 32) & _MASK) ^ c1 ^ k0, high & _MASK
        c2, c3 = ((low >> 32) & _MASK) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def noise(
    seeds: Ints, positions: Ints, vocab_size: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """Gumbel noise, float32 [n, vocab_size], every value in [-2.82, 22.88]; row i depends on its seed and
    position only.

    seeds: n ints in [0, 2^64); positions: n ints in [0, 2^32), the completion positions. Raises ValueError
    otherwise.
    """
    low, high, position = _keys(seeds, positions, device)
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
        raise ValueError(f"vocab_size must be a positive int, not {vocab_size!r}")
    result = torch.empty((len(low), vocab_size), dtype=torch.float32, device=low.device)
    for rows in _row_blocks(len(low), vocab_size, low.device):
        result[rows] = _gumbel(_words(low[rows], high[rows], position[rows], vocab_size))
    return result


def sample(logits: torch.Tensor, seeds: Ints, positions: Ints, temperature: float) -> torch.Tensor:
    """The slot's tokens, int64 [n], on the device of the logits.

    logits: [n, vocab], any float dtype, taken as float32; -inf forbids an entry; seeds, positions as in
    `noise`. Raises ValueError for a temperature that is not finite and > 0 (in float32), for NaN or +inf
    logits, and for rows that forbid everything.
    """
    best, tokens, _ = _best(logits, None, seeds, positions, temperature)
    if not bool(best.isfinite().all()):
        raise ValueError("logits with NaN or +inf, or a row without a finite entry")
    return tokens


def margins(
    logits: torch.Tensor, tokens: Ints, seeds: Ints, positions: Ints, temperature: float
) -> torch.Tensor:
    """By how much each claimed token loses to the verifier's own choice: float32 [n], 0 where it is that
    choice.

    max_j (logit_j / T + g_j) - (…)_token, in nats. Rows of many completions go in one call: seeds and
    positions are per row. NaN logits give NaN, a forbidden token inf. Raises ValueError as `sample` does for
    the temperature, and for tokens outside the vocabulary.
    """
    best, _, score = _best(logits, _tokens(tokens, logits), seeds, positions, temperature)
    return best - score


def logprobs(logits: torch.Tensor, tokens: Ints, temperature: float) -> torch.Tensor:
    """log softmax(logits / T) at the tokens: float32 [n], nats. Raises ValueError as `margins` does."""
    scale = _scale(temperature, logits)
    claimed = _tokens(tokens, logits)
    result = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for rows in _row_blocks(*_shape(logits), logits.device):
        scaled = logits[rows].to(torch.float32) / scale
        result[rows] = torch.log_softmax(scaled, dim=-1).gather(1, claimed[rows, None])[:, 0]
    return result


_Best = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _best(
    logits: torch.Tensor, claimed: torch.Tensor | None, seeds: Ints, positions: Ints, temperature: float
) -> _Best:
    """Per row: the largest logit / T + noise (NaN where a logit is), the first token that has it, and the score of the
    claimed token (of the best one where none is claimed)."""
    scale = _scale(temperature, logits)
    low, high, position = _keys(seeds, positions, logits.device, len(logits))
    blocks = _row_blocks(*_shape(logits), logits.device)
    find = _best_compiled if logits.device.type == "cpu" else _best_torch
    mine = torch.full_like(low, -1) if claimed is None else claimed
    found = [find(logits[b].detach().float(), scale, low[b], high[b], position[b], mine[b]) for b in blocks]
    if not found:
        empty = torch.empty(0, device=logits.device)
        return empty, empty.to(torch.int64), empty
    best, token, score = (torch.cat(parts) for parts in zip(*found, strict=True))
    return best, token, score


def _best_torch(
    logits: torch.Tensor,
    scale: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    position: torch.Tensor,
    claimed: torch.Tensor,
) -> _Best:
    scores = logits / scale + _gumbel(_words(low, high, position, logits.shape[1]))
    best, token = scores.max(dim=-1)  # max carries NaN through
    first = torch.where(claimed < 0, token, claimed)
    return best, token, scores.gather(1, first[:, None])[:, 0]


def _best_compiled(
    logits: torch.Tensor,
    scale: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    position: torch.Tensor,
    claimed: torch.Tensor,
) -> _Best:
    n = len(logits)
    best, token, score = np.empty(n, np.float32), np.empty(n, np.int64), np.empty(n, np.float32)
    kernels.best_scores(
        logits.contiguous().numpy(),
        np.float32(scale.item()),
        low.numpy().view(np.uint64),
        high.numpy().view(np.uint64),
        position.numpy().view(np.uint64),
        claimed.numpy(),
        best,
        token,
        score,
    )
    return torch.from_numpy(best), torch.from_numpy(token), torch.from_numpy(score)


def _words(low: torch.Tensor, high: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int64 [n, vocab_size] of 32-bit words, from keys and positions int64 [n]."""
    groups = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=low.device)[None]
    zero = torch.zeros_like(position)[:, None]
    words = philox4x32((groups, position[:, None], zero, zero), (low[:, None], high[:, None]))
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]


def _gumbel(words: torch.Tensor) -> torch.Tensor:
    """32-bit words -> float32 noise. The order of the float32 operations is part of the protocol."""
    uniform = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=_V_MAX).to(torch.float64)
    return (-torch.log(-torch.log1p(-uniform))).to(torch.float32)


def _scale(temperature: float, logits: torch.Tensor) -> torch.Tensor:
    """The temperature as a tensor: some devices turn division by a Python number into a product."""
    _shape(logits)
    if not (isinstance(temperature, int | float) and math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be finite and > 0, not {temperature!r}")
    scale = torch.tensor(float(temperature), dtype=torch.float64).to(torch.float32)
    if not (bool(scale.isfinite()) and bool(scale > 0)):
        raise ValueError(f"temperature {temperature!r} is outside float32")
    return scale.to(logits.device)


def _shape(logits: torch.Tensor) -> tuple[int, int]:
    if logits.ndim != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floating point [n, vocab], not {logits.dtype} {tuple(logits.shape)}"
        )
    return logits.shape[0], logits.shape[1]


def _tokens(tokens: Ints, logits: torch.Tensor) -> torch.Tensor:
    n, vocab_size = _shape(logits)
    values = _ints(tokens, "tokens")
    if len(values) != n:
        raise ValueError(f"{len(values)} tokens for {n} rows of logits")
    if any(not 0 <= t < vocab_size for t in values):
        raise ValueError(f"token outside the vocabulary of {vocab_size}")
    return torch.tensor(values, dtype=torch.int64).to(logits.device)


def _keys(
    seeds: Ints, positions: Ints, device: torch.device | str | None, rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seed low, seed high and position, int64 [n] each."""
    keys, places = _ints(seeds, "seeds"), _ints(positions, "positions")
    if len(keys) != len(places) or (rows is not None and len(keys) != rows):
        expected = "" if rows is None else f" for {rows} rows of logits"
        raise ValueError(f"{len(keys)} seeds and {len(places)} positions{expected}")
    if any(not 0 <= s < 2**64 for s in keys) or any(not 0 <= t < 2**32 for t in places):
        raise ValueError("seeds must lie in [0, 2^64) and positions in [0, 2^32)")
    columns = ([s & _MASK for s in keys], [s >> 32 for s in keys], places)
    table = torch.tensor(columns, dtype=torch.int64).to(device if device is not None else "cpu")
    return table[0], table[1], table[2]


def _ints(values: Ints, name: str) -> list[int]:
    items = values.tolist() if isinstance(values, torch.Tensor) else list(values)
    try:
        return [value.__index__() for value in items]
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{name} must be a flat sequence of ints") from error


def _row_blocks(rows: int, vocab_size: int, device: torch.device) -> Iterator[slice]:
    budget = _BLOCK_CPU if device.type == "cpu" else _BLOCK_DEVICE
    step = max(1, budget // vocab_size)
    return (slice(start, start + step) for start in range(0, rows, step))

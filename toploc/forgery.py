"""Proofs that cost nothing to make: the yardstick that a threshold must stay below.

Both are fitted on the very chunks on which they are then scored, which is more than a forger has.
"""

from collections.abc import Sequence

import numpy as np
import torch

from toploc.distance import ChunkDistance, distances_many
from toploc.field import P
from toploc.proof import CHUNK_ROWS, TOP_K, Proof, chunk_count, commit_many
from toploc.selection import select

CONSTANT = "constant"
DIMENSION_MEAN = "dimension_mean"


def cheap_forgeries(
    hiddens: Sequence[torch.Tensor], *, chunk_rows: int = CHUNK_ROWS, top_k: int = TOP_K
) -> dict[str, list[list[ChunkDistance]]]:
    """Distances of each forgery from each completion: name -> per completion -> per chunk.

    hiddens: the verifier's [rows, hidden], all of one hidden size, on one device. constant: a polynomial of
    degree 0, the best of a grid of values. dimension_mean: an honest proof of hidden states that equal, in
    every row, the mean over all tokens.
    """
    if not hiddens:
        raise ValueError("no hidden states to forge")
    mean = torch.cat([h.to(torch.float32) for h in hiddens]).mean(dim=0)
    flat = commit_many([mean.expand(len(h), -1) for h in hiddens], chunk_rows=chunk_rows, top_k=top_k)
    constant = best_constant(hiddens, chunk_rows=chunk_rows, top_k=top_k)
    proof = Proof(P, (constant,) + (0,) * (top_k - 1))
    constants = [[proof] * chunk_count(len(h), chunk_rows) for h in hiddens]
    score = {"chunk_rows": chunk_rows, "top_k": top_k}
    return {
        CONSTANT: distances_many(constants, hiddens, **score),
        DIMENSION_MEAN: distances_many(flat, hiddens, **score),
    }


def best_constant(
    hiddens: Sequence[torch.Tensor], *, chunk_rows: int = CHUNK_ROWS, top_k: int = TOP_K
) -> int:
    """The bfloat16 pattern closest to all selected entries, among 19 quantiles of their values."""
    selection = select(hiddens, chunk_rows, top_k)
    real = np.arange(top_k)[None] < selection.counts[:, None]
    patterns = selection.bits[real].astype(np.uint32)
    values = (patterns << np.uint32(16)).view(np.float32).astype(np.float64)
    order = np.argsort(values, kind="stable")
    grid = order[np.linspace(0, len(order) - 1, 19).astype(np.int64)]
    losses = [float(np.minimum(np.abs(values[i] - values), np.abs(values)).sum()) for i in grid]
    return int(patterns[grid[int(np.argmin(losses))]])

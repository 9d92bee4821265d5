"""Planning of batches by a budget of padded positions."""

from __future__ import annotations

from collections.abc import Sequence


def plan(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Cut sequences into batches of at most `token_budget` padded positions (one sequence always fits): indices,
    sorted by length so that little is padding."""
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        longest = max(longest, lengths[index])
        if not batches or longest * (len(batches[-1]) + 1) > token_budget:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    return batches

"""The batched prefill: hidden states, margins and log-probs of many completions at one version's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toploc import logprobs, margins

from ..batching import plan
from ..policy import hidden_and_logits


@dataclass(frozen=True)
class Claim:
    """A prompt and the completion that was claimed for it, with the slot's seed."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    seed: int

    @property
    def length(self) -> int:
        """Positions that the prefill computes: the last token's own state is never needed."""
        return len(self.prompt) + len(self.tokens) - 1


@dataclass(frozen=True)
class Prefilled:
    """What the verifier sees of one completion of n tokens: `hidden` [n, hidden] (row i produced token i), `logprobs`
    float32 [n] (temperature included), `margins` float32 [n], `eos_probability` float32 [n]."""

    hidden: torch.Tensor
    logprobs: torch.Tensor
    margins: torch.Tensor
    eos_probability: torch.Tensor


def prefill(
    model: Any, items: Sequence[Claim], temperature: float, eos: Sequence[int], token_budget: int
) -> list[Prefilled]:
    """Score every item under `model`. Results in the order of the items."""
    results: dict[int, Prefilled] = {}
    for batch in plan([item.length for item in items], token_budget):
        for index, result in zip(batch, _batch(model, [items[i] for i in batch], temperature, eos), strict=True):
            results[index] = result
    return [results[index] for index in range(len(items))]


@torch.inference_mode()
def _batch(model: Any, items: Sequence[Claim], temperature: float, eos: Sequence[int]) -> list[Prefilled]:
    width = max(item.length for item in items)
    ids = torch.zeros(len(items), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(items):
        ids[row, : item.length] = torch.tensor((*item.prompt, *item.tokens[:-1]))
        mask[row, : item.length] = 1
    hidden, head = hidden_and_logits(model, ids, mask)
    counts = [len(item.tokens) for item in items]
    rows = torch.cat([torch.full((n,), row) for row, n in enumerate(counts)])
    columns = torch.cat([torch.arange(item.length - len(item.tokens), item.length) for item in items])
    states = hidden[rows, columns]
    logits = head(states).float()
    tokens = [token for item in items for token in item.tokens]
    seeds = [item.seed for item in items for _ in item.tokens]
    positions = [position for n in counts for position in range(n)]
    measured = (
        states,
        logprobs(logits, tokens, temperature),
        margins(logits, tokens, seeds, positions, temperature),
        (logits / torch.tensor(temperature)).softmax(-1)[:, list(eos)].sum(-1),
    )
    return [Prefilled(*parts) for parts in zip(*(part.split(counts) for part in measured), strict=True)]

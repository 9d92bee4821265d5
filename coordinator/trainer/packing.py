"""From an assigned batch to micro-batches of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..batching import plan


@dataclass(frozen=True)
class Sample:
    """A rollout to train on: prompt and completion token ids, both sides' log-probs per completion token, advantage."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logp_old: tuple[float, ...]
    logp_engine: tuple[float, ...]
    advantage: float


@dataclass(frozen=True)
class MicroBatch:
    """`input_ids`, `attention` int64 [batch, length], left-padded so that completions end in the last column;
    the others [batch, tokens] for the completion, right-aligned, with `mask` true at real tokens."""

    input_ids: torch.Tensor
    attention: torch.Tensor
    targets: torch.Tensor
    logp_old: torch.Tensor
    logp_engine: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor


def pack(samples: Sequence[Sample], token_budget: int) -> list[MicroBatch]:
    """Micro-batches of at most `token_budget` padded positions. Samples without advantage carry no gradient and are
    left out; the caller's denominator counts their tokens all the same."""
    useful = [sample for sample in samples if sample.advantage != 0.0]
    lengths = [len(sample.prompt) + len(sample.tokens) for sample in useful]
    return [_micro([useful[index] for index in batch]) for batch in plan(lengths, token_budget)]


def _micro(samples: Sequence[Sample]) -> MicroBatch:
    width = max(len(sample.prompt) + len(sample.tokens) for sample in samples)
    tokens = max(len(sample.tokens) for sample in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    mask = torch.zeros(len(samples), tokens, dtype=torch.bool)
    old, engine = torch.zeros(len(samples), tokens), torch.zeros(len(samples), tokens)
    for row, sample in enumerate(samples):
        sequence = (*sample.prompt, *sample.tokens)
        count = len(sample.tokens)
        ids[row, width - len(sequence) :] = torch.tensor(sequence)
        attention[row, width - len(sequence) :] = 1
        mask[row, tokens - count :] = True
        old[row, tokens - count :] = torch.tensor(sample.logp_old)
        engine[row, tokens - count :] = torch.tensor(sample.logp_engine)
    advantages = torch.tensor([sample.advantage for sample in samples])
    return MicroBatch(ids, attention, ids[:, width - tokens :], old, engine, mask, advantages)

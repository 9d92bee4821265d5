"""Held-out pass rate: greedy decoding on trusted hardware, with a KV cache, many prompts at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..tasks.base import Problem, TaskSet
from ..tasks.prompts import PromptCodec


@torch.inference_mode()
def greedy(
    model: Any, prompts: Sequence[Sequence[int]], eos: Collection[int], max_tokens: int, batch: int = 256
) -> list[list[int]]:
    """Most likely completions (end-of-sequence included where it came) of token-id prompts, in their order."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found: dict[int, list[int]] = {}
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        for index, tokens in zip(part, _greedy(model, [prompts[i] for i in part], eos, max_tokens), strict=True):
            found[index] = tokens
    return [found[index] for index in range(len(prompts))]


def _greedy(
    model: Any, prompts: Sequence[Sequence[int]], eos: Collection[int], max_tokens: int
) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    stops = torch.tensor(sorted(eos))
    live = torch.ones(len(prompts), dtype=torch.bool)
    columns: list[torch.Tensor] = []
    cache = None
    for _ in range(max_tokens):
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        token = out.logits[:, -1].float().argmax(-1)
        columns.append(torch.where(live, token, -1))
        live &= ~torch.isin(token, stops)
        if not live.any():
            break
        ids, positions = token[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=torch.int64)], 1)
    return [[token for token in row if token >= 0] for row in torch.stack(columns, 1).tolist()]


def pass_count(
    model: Any,
    task: TaskSet,
    codec: PromptCodec,
    problems: Sequence[Problem],
    eos: Collection[int],
    max_tokens: int,
) -> int:
    """How many of the problems the model solves greedily."""
    prompts = [codec.encode(problem.messages) for problem in problems]
    answers = greedy(model, prompts, eos, max_tokens)
    return sum(
        task.score(problem.gold, codec.decode(answer, eos)).reward >= 1.0
        for problem, answer in zip(problems, answers, strict=True)
    )

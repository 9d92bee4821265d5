"""Greedy evaluation against transformers' own generation."""

import random
from typing import Any

import pytest
import torch

from coordinator import seed, tasks
from coordinator.tasks.prompts import PromptCodec
from coordinator.verifier.evaluate import greedy, pass_count

EOS = (2,)


def reference(model: Any, prompt: list[int], limit: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=list(EOS),
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Twelve prompts that the model knows, and eight of random tokens from 1 to 50 long."""
    codec = PromptCodec(seed.model_dir())
    task = tasks.load("gym:spell_backward", 0)
    known = [codec.encode(task.problem(index).messages) for index in range(12)]
    rng = random.Random(3)
    return known + [[rng.randrange(3, 320) for _ in range(rng.choice((1, 2, 20, 50)))] for _ in range(8)]


@pytest.mark.parametrize(("batch", "limit"), [(1, 8), (3, 10), (256, 10), (256, 1)])
def test_greedy_is_generate(model: Any, prompts: list[list[int]], batch: int, limit: int) -> None:
    found = greedy(model, prompts, EOS, limit, batch)
    assert found == [reference(model, prompt, limit) for prompt in prompts]
    assert limit == 1 or any(len(answer) < limit for answer in found)  # some ended early


def test_nothing_to_evaluate(model: Any) -> None:
    assert greedy(model, [], EOS, 5) == []


def test_other_ends_of_sequence_are_obeyed(model: Any, prompts: list[list[int]]) -> None:
    (first,) = greedy(model, prompts[:1], (), 6)
    assert len(first) == 6
    (cut,) = greedy(model, prompts[:1], (first[2], 2), 6)
    assert cut == first[: first.index(first[2]) + 1]


def test_pass_count_counts_whole_rewards(model: Any) -> None:
    codec = PromptCodec(seed.model_dir())
    task = tasks.load("gym:spell_backward", 0)
    problems = task.held_out(40)
    count = pass_count(model, task, codec, problems, EOS, 10)
    each = [pass_count(model, task, codec, [problem], EOS, 10) for problem in problems]
    assert count == sum(each) and 0 < count < 40
    assert pass_count(model, task, codec, problems, EOS, 1) == 0  # an answer without end is none

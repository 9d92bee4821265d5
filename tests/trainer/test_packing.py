"""Advantages, planning by token budget, and the tensors of micro-batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.batching import plan
from coordinator.trainer.advantages import group_advantages
from coordinator.trainer.packing import Sample, pack


def test_advantage_is_reward_minus_mean_of_its_group() -> None:
    found = group_advantages([7, 8, 7, 8, 7, 9], [1.0, 0.5, 0.0, 0.5, 0.5, 1.0])
    assert found == [0.5, 0.0, -0.5, 0.0, 0.0, 0.0]
    assert group_advantages([], []) == []
    with pytest.raises(ValueError):
        group_advantages([1], [1.0, 2.0])


def test_advantage_is_not_divided_by_the_deviation() -> None:
    assert group_advantages([1] * 4, [0.1, 0.0, 0.0, 0.1]) == pytest.approx([0.05, -0.05, -0.05, 0.05])


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 1)), max_size=40))
def test_advantages_of_a_group_sum_to_zero(members: list[tuple[int, float]]) -> None:
    groups = [group for group, _ in members]
    found = group_advantages(groups, [reward for _, reward in members])
    for group in set(groups):
        assert sum(a for g, a in zip(groups, found, strict=True) if g == group) == pytest.approx(0, abs=1e-9)


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200))
def test_plan_holds_everything_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = plan(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert batch and (len(batch) == 1 or max(lengths[index] for index in batch) * len(batch) <= budget)


def test_plan_fills_batches() -> None:
    assert plan([], 10) == []
    assert plan([3, 3, 3, 3], 12) == [[0, 1, 2, 3]]
    assert plan([3, 3, 3, 3], 11) == [[0, 1, 2], [3]]
    assert plan([100, 1], 10) == [[1], [0]]


def sample(prompt: int, count: int, advantage: float = 1.0) -> Sample:
    values = tuple(-float(index + 1) for index in range(count))
    return Sample(tuple(range(10, 10 + prompt)), tuple(range(50, 50 + count)), values, values, advantage)


def test_micro_batch_is_left_padded_and_right_aligned() -> None:
    (micro,) = pack([sample(2, 3), sample(4, 1, -0.5)], 100)
    rows = {float(advantage): row for row, advantage in enumerate(micro.advantages)}
    a, b = rows[1.0], rows[-0.5]
    assert micro.input_ids[a].tolist() == [10, 11, 50, 51, 52] and micro.input_ids[b].tolist() == [10, 11, 12, 13, 50]
    assert micro.targets[a].tolist() == [50, 51, 52] and micro.targets[b, -1] == 50
    assert micro.mask.tolist()[b] == [False, False, True] and micro.mask.tolist()[a] == [True] * 3
    assert micro.logp_old[b].tolist() == [0.0, 0.0, -1.0]
    (padded,) = pack([sample(1, 1), sample(4, 2)], 100)
    short = padded.attention.sum(1).argmin()
    assert padded.attention[short].tolist() == [0, 0, 0, 0, 1, 1]


def test_samples_without_advantage_are_left_out() -> None:
    assert pack([], 10) == [] and pack([sample(3, 3, 0.0)], 10) == []
    batches = pack([sample(3, 3, 0.0), sample(3, 3), sample(9, 9, -0.0)], 10)
    assert sum(len(micro.advantages) for micro in batches) == 1


def test_types() -> None:
    (micro,) = pack([sample(3, 3)], 10)
    assert micro.input_ids.dtype == micro.targets.dtype == torch.int64 and micro.mask.dtype == torch.bool
    assert micro.logp_old.dtype == micro.logp_engine.dtype == micro.advantages.dtype == torch.float32

"""Group-relative advantages (GRPO, arXiv:2402.03300), without division by the standard deviation (Dr. GRPO)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


def group_advantages(groups: Sequence[int], rewards: Sequence[float]) -> list[float]:
    """Reward minus the mean of its group, for each rollout in order."""
    members: dict[int, list[float]] = defaultdict(list)
    for group, reward in zip(groups, rewards, strict=True):
        members[group].append(reward)
    mean = {group: sum(values) / len(values) for group, values in members.items()}
    return [reward - mean[group] for group, reward in zip(groups, rewards, strict=True)]

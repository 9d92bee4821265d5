"""Problems and rewards. Importing this package imports no data set, no model code and no tokenizer."""

from collections.abc import Callable
from typing import Any

from coordinator.tasks.base import (
    NoProblemError,
    Problem,
    Score,
    TaskSet,
    UnknownTaskError,
    UnsafeScorerError,
)

__all__ = [
    "NoProblemError",
    "Problem",
    "Score",
    "TaskSet",
    "UnknownTaskError",
    "UnsafeScorerError",
    "load",
]


def _gym(name: str, seed: int, options: dict[str, Any]) -> TaskSet:
    from coordinator.tasks.gym import GymTasks

    return GymTasks(name, seed, **options)


_FAMILIES: dict[str, Callable[[str, int, dict[str, Any]], TaskSet]] = {"gym": _gym}


def load(name: str, seed: int, **options: Any) -> TaskSet:
    """The task set called `name`, `<family>:<member>`, for example `gym:spell_backward`.

    `seed` is the run's: it fixes the training stream and leaves the held-out set alone. It may be a secret of any
    size; who knows it can compute every future prompt. `options` go to the family (for `gym`: the fields of the
    data set's configuration) and are part of the task set's `version`.

    Raises UnknownTaskError for a name that no family has, UnsafeScorerError for a member whose scorer would run
    the text of an answer as code, ValueError or TypeError for options that the member refuses.
    """
    family, separator, member = name.partition(":")
    if not separator or family not in _FAMILIES:
        raise UnknownTaskError(f"no task set {name!r}: expected <family>:<member> with family in {sorted(_FAMILIES)}")
    return _FAMILIES[family](member, seed, options)

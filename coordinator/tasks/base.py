"""What every environment offers: an endless stream of problems, a fixed held-out set, and a score."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


class UnknownTaskError(ValueError):
    """No task set has this name."""


class UnsafeScorerError(ValueError):
    """The scorer would evaluate the text of an answer as code, or do work that its length does not bound."""


class NoProblemError(LookupError):
    """The environment has too few different questions for what was asked of it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One question. `messages` go to the policy; `gold` is JSON-able and never leaves the trusted side.

    `id` names (environment, version, stream, index) and is unique within a run; two indices may well draw the same
    question. `messages` are (role, content) pairs.
    """

    id: str
    environment: str
    environment_version: str
    index: int
    held_out: bool
    messages: tuple[tuple[str, str], ...]
    gold: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Score:
    """`reward` in [0, 1] is what trains; `raw` is what the scorer said (0.0 where it said nothing).

    `outcome` is one word for counters: `correct`, `wrong`, `partial`, or why no scorer was asked.
    """

    reward: float
    raw: float
    outcome: str


@runtime_checkable
class TaskSet(Protocol):
    """An environment bound to a run seed. Every method is deterministic and may be called from several threads."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """Changes whenever the same index could give another problem, or the same answer another score."""
        ...

    def problem(self, index: int) -> Problem:
        """Problem `index` (0, 1, 2, … without end) of the training stream, never a held-out one; random access.

        Raises ValueError for a negative index and NoProblemError where no such problem was found.
        """
        ...

    def held_out(self, n: int) -> list[Problem]:
        """The first `n` held-out problems, all different, the same whatever the run seed.

        Raises ValueError for a negative `n` and NoProblemError where there are fewer.
        """
        ...

    def score(self, gold: dict[str, Any], text: str | None) -> Score:
        """Score the untrusted `text` of a completion (None: it never ended). Raises nothing on account of `text`."""
        ...

"""The interface of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class Request:
    """One slot to be filled: prompt token ids, 64-bit sampling seed, temperature, at most `max_tokens` tokens."""

    version: int
    prompt: tuple[int, ...]
    seed: int
    temperature: float
    max_tokens: int
    eos: tuple[int, ...]


@dataclass(frozen=True)
class Generated:
    """The answer: n tokens, their log-probs (temperature included, noise excluded), and `hidden`, a float tensor
    [n, hidden]: row i is the state after the final norm that produced token i."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    hidden: Any
    finish_reason: Literal["stop", "length"]


class EngineError(Exception):
    """The engine cannot load or generate; the text says why."""


class Engine(Protocol):
    """`generate` yields (position of the request, answer) as answers are done; a rollout ends on the version it began
    with. Versions are loaded beside each other, and one that is in use is never unloaded under a running call."""

    name: str
    version_text: str

    def load(self, version: int, folder: Path, base: Path | None) -> None:
        """Make a version selectable: a full checkpoint in `folder`, or an adapter on the checkpoint in `base`."""
        ...

    def unload(self, version: int) -> None:
        """Forget a version."""
        ...

    def versions(self) -> tuple[int, ...]:
        """Loaded versions, ascending."""
        ...

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generated]]:
        """Generate for requests of any loaded versions."""
        ...

"""Workers that cheat, to show what happens (`farflung up --cheat KIND`) and for the attack suite.

Each is an engine around the honest one: it takes the same leases and returns something else. All of them commit to
real activations, of the right model where the attack allows it, so that nothing but the intended check can catch them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from protocol.completion import Completion

from .engines.base import Generated, Request
from .engines.hf import HFEngine

KINDS = ("fabricate", "stale", "truncate", "othermodel", "temperature", "replay", "extrafield")
STALE_BY = 4


class Cheat:
    """Honest in everything that a subclass does not change."""

    name = "hf"

    def __init__(self, inner: HFEngine):
        self.inner = inner
        self.version_text = inner.version_text

    def load(self, version: int, folder: Path, base: Path | None) -> None:
        """See Engine.load."""
        self.inner.load(version, folder, base)

    def unload(self, version: int) -> None:
        """See Engine.unload."""
        self.inner.unload(version)

    def versions(self) -> tuple[int, ...]:
        """See Engine.versions."""
        return self.inner.versions()

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generated]]:
        """See Engine.generate."""
        for index, answer in self.inner.generate(requests):
            yield index, self.forge(requests[index], answer)

    def forge(self, request: Request, answer: Generated) -> Generated:
        """What becomes of an honest answer."""
        return answer

    def _prefilled(self, request: Request, tokens: Sequence[int], reason: Any) -> Generated:
        """Given tokens with the activations and log-probs of the right model, as if they had been sampled."""
        hidden, logprobs = self.inner.prefill(request.version, request.prompt, tokens, request.temperature)
        return Generated(tuple(tokens), logprobs, hidden, reason)


class Fabricate(Cheat):
    """Pastes the right answer (or, where it can't see one, a made-up one) and prefills it with the right model."""

    def __init__(self, inner: HFEngine):
        super().__init__(inner)
        self._tokenizer: Any = None

    def load(self, version: int, folder: Path, base: Path | None) -> None:
        """See Engine.load; takes the tokenizer from the checkpoint."""
        from tokenizers import Tokenizer

        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str((base or folder) / "tokenizer.json"))
        super().load(version, folder, base)

    def forge(self, request: Request, answer: Generated) -> Generated:
        """See Cheat.forge."""
        text = self._tokenizer.decode(list(request.prompt), skip_special_tokens=True)
        words = re.findall(r":\s*(\w+)", text)
        pasted = words[-1][::-1] if words else "42"
        tokens = self._tokenizer.encode(pasted, add_special_tokens=False).ids[: request.max_tokens - 1]
        return self._prefilled(request, [*tokens, request.eos[0]], "stop")


class Stale(Cheat):
    """Generates with weights at least four versions old under the new label; waits until there is a version 4."""

    def versions(self) -> tuple[int, ...]:
        """Only versions for which there are weights that old."""
        loaded = self.inner.versions()
        return tuple(version for version in loaded if loaded[0] <= version - STALE_BY)

    def unload(self, version: int) -> None:
        """Old weights are what it lives on: keeps them twice as long."""
        for old in self.inner.versions():
            if old < version - 2 * STALE_BY:
                self.inner.unload(old)

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generated]]:
        """See Engine.generate."""
        loaded = self.inner.versions()
        aged = [
            replace(request, version=max(v for v in loaded if v <= request.version - STALE_BY))
            for request in requests
        ]
        yield from self.inner.generate(aged)


class Truncate(Cheat):
    """Cuts the completion in half; an answer of one token cannot be cut and stays honest."""

    def forge(self, request: Request, answer: Generated) -> Generated:
        """See Cheat.forge."""
        keep = max(1, len(answer.tokens) // 2)
        return Generated(answer.tokens[:keep], answer.logprobs[:keep], answer.hidden[:keep], answer.finish_reason)


class OtherModel(Cheat):
    """Generates with another model of the same architecture, whatever was published."""

    def __init__(self, inner: HFEngine, other: Path):
        super().__init__(inner)
        self._other = HFEngine(str(inner.dtype).removeprefix("torch."), inner.batch)
        self._other.load(0, other, None)

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generated]]:
        """See Engine.generate."""
        yield from self._other.generate([replace(request, version=0) for request in requests])


class Temperature(Cheat):
    """Samples at 0.7 of the temperature, for better answers, and reports log-probs as if it had been the right one."""

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generated]]:
        """See Engine.generate."""
        cooler = [replace(request, temperature=0.7 * request.temperature) for request in requests]
        for index, answer in self.inner.generate(cooler):
            yield index, self._prefilled(requests[index], answer.tokens, answer.finish_reason)


class Replay(Cheat):
    """Generates honestly once, then sends the same completions again under every new lease."""

    def __init__(self, inner: HFEngine):
        super().__init__(inner)
        self._kept: list[Generated] = []

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generated]]:
        """See Engine.generate."""
        if not self._kept:
            for index, answer in self.inner.generate(requests):
                self._kept.append(answer)
                yield index, answer
            return
        for index in range(len(requests)):
            yield index, self._kept[index % len(self._kept)]


def encode_with_extra_field(completions: Iterable[Completion]) -> bytes:
    """A batch whose items carry a field that the protocol does not know."""
    items = [msgspec.to_builtins(item, builtin_types=(bytes,)) | {"reward": 1.0} for item in completions]
    return msgspec.msgpack.encode({"completions": items})


def wrap(kind: str, engine: HFEngine, other: Path | None) -> Any:
    """The engine of a cheating worker (`extrafield` cheats only on the wire: see `encode_with_extra_field`)."""
    if kind == "othermodel":
        if other is None:
            raise ValueError("othermodel needs the directory of another model")
        return OtherModel(engine, other)
    kinds = {
        "fabricate": Fabricate,
        "stale": Stale,
        "truncate": Truncate,
        "temperature": Temperature,
        "replay": Replay,
        "extrafield": Cheat,
    }
    return kinds[kind](engine)

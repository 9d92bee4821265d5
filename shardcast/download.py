"""Many shards from many sources: whom to ask, in which order, when to wait and when to give up."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import shutil
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import aiohttp

from protocol.manifest import Manifest, Shard
from protocol.reasons import Reason, Refusal

from . import choice, client
from .choice import Estimate
from .client import Fault, Limits, LocalFailed, SourceFailed
from .store import ShardStore
from .trust import Trust

log = logging.getLogger("farflung.shardcast")
T = TypeVar("T")
FORGED = frozenset({Reason.MANIFEST_INVALID, Reason.MANIFEST_WRONG_RUN})


class FetchFailed(Exception):
    """No source delivered. `causes` says what each one did last."""

    def __init__(self, what: str, causes: dict[str, str]):
        super().__init__(f"{what}: {'; '.join(f'{url}: {cause}' for url, cause in causes.items()) or 'no source'}")
        self.causes = causes


class Downloader:
    """Asks relays by expected throughput and, when those of a round are used up, the fallbacks in order.

    A relay that serves a wrong byte is dropped; a fallback never is, only passed over for that shard in that round.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        relays: Iterable[str],
        fallbacks: Iterable[str] = (),
        *,
        limits: Limits | None = None,
        concurrency: int = 4,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._session, self._limits, self._concurrency = session, limits or Limits(), concurrency
        self._rng, self._clock = rng or random.Random(), clock
        self.fallbacks = tuple(dict.fromkeys(fallbacks))
        self.relays: dict[str, Estimate] = {}
        self.set_relays(relays)

    def set_relays(self, urls: Iterable[str]) -> None:
        """Replace the list of relays. What was learned of those that stay, stays."""
        now = self._clock()
        self.relays = {url: self.relays.get(url) or Estimate(url, updated=now) for url in dict.fromkeys(urls)}

    @property
    def dropped(self) -> frozenset[str]:
        """Relays that served a wrong byte."""
        return frozenset(url for url, relay in self.relays.items() if relay.dropped)

    def next_source(self, tried: set[str]) -> str | None:
        """The source to ask after those in `tried`; None if there is none left."""
        relays = [relay for url, relay in self.relays.items() if url not in tried]
        chosen = choice.choose(relays, self._rng, self._clock())
        if chosen is not None:
            return chosen.url
        return next((url for url in self.fallbacks if url not in tried), None)

    def _learn(self, url: str, change: Callable[[Estimate], Estimate]) -> None:
        if url in self.relays:
            self.relays[url] = change(self.relays[url])

    def distrust(self, url: str, why: str) -> None:
        """Drop a relay that served something forged."""
        log.warning("%s dropped: %s", url, why)
        self._learn(url, choice.dropped)

    async def ask(self, url: str, size: int, request: Coroutine[Any, Any, T]) -> T:
        """Await a request to `url` for about `size` bytes and learn from its outcome."""
        begin = self._clock()
        self._learn(url, choice.started)
        try:
            result = await request
        except SourceFailed as error:
            if error.fault is Fault.WRONG:
                self.distrust(url, error.detail)
            elif error.fault in (Fault.UNREACHABLE, Fault.SLOW):
                self._learn(url, lambda relay: choice.failed(relay, self._clock()))
            raise
        else:
            end = self._clock()
            self._learn(url, lambda relay: choice.succeeded(relay, size, end - begin, end))
            return result
        finally:
            self._learn(url, choice.finished)

    async def until_done(self, what: str, attempt: Callable[[str], Coroutine[Any, Any, T]]) -> T:
        """Ask one source after the other, round after round, until `attempt(url)` succeeds.

        Raises the last Refusal when a whole round brought nothing but those or wrong bytes, FetchFailed when nobody has
        it or there is nobody to ask, LocalFailed. No time limit of its own: the caller sets one.
        """
        failures = 0
        while True:
            tried: set[str] = set()
            errors: dict[str, SourceFailed | Refusal] = {}
            while (url := self.next_source(tried)) is not None:
                tried.add(url)
                try:
                    return await attempt(url)
                except (SourceFailed, Refusal) as error:
                    log.info("%s from %s: %s", what, url, error)
                    errors[url] = error
            _give_up(what, errors)
            waits = [e.retry_after for e in errors.values() if isinstance(e, SourceFailed) and e.retry_after]
            failures += 1
            await asyncio.sleep(max(self._limits.backoff(failures, self._rng), min(waits, default=0.0)))

    async def manifest(self, name: str, sha256: str | None, trust: Trust) -> tuple[Manifest, bytes]:
        """A verified manifest and its envelope. Raises as `until_done`."""

        async def attempt(url: str) -> tuple[Manifest, bytes]:
            data = await self.ask(url, 0, client.get_manifest(self._session, url, self._limits, name))
            try:
                return await asyncio.to_thread(trust.manifest, data, name=name, sha256=sha256), data
            except Refusal as refusal:
                if refusal.reason in FORGED:
                    self.distrust(url, str(refusal))
                raise

        return await self.until_done(f"manifest {name}", attempt)

    async def shard(self, shard: Shard, store: ShardStore) -> None:
        """One verified shard into the store. Raises as `until_done`."""

        async def attempt(url: str) -> None:
            await self.ask(url, shard.size, client.get_shard(self._session, url, self._limits, shard, store))

        await self.until_done(f"shard {shard.sha256[:8]}", attempt)

    async def shards(self, shards: Iterable[Shard], store: ShardStore) -> int:
        """All shards that the store lacks, a few at a time; the number of those fetched. Raises as `until_done`."""
        missing = [s for s in dict.fromkeys(shards) if store.size(s.sha256) != s.size]
        free, needed = shutil.disk_usage(store.root).free, sum(s.size for s in missing)
        if needed > free:
            raise LocalFailed(OSError(errno.ENOSPC, f"{needed} bytes to fetch, {free} free"))
        queue = iter(missing)

        async def worker() -> None:
            for shard in queue:
                await self.shard(shard, store)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._concurrency, len(missing))):
                    group.create_task(worker())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return len(missing)


def _give_up(what: str, errors: dict[str, SourceFailed | Refusal]) -> None:
    """Raise if another round could not end otherwise."""
    if not errors:
        raise FetchFailed(what, {})
    causes = {url: str(error) for url, error in errors.items()}
    faults = [error.fault for error in errors.values() if isinstance(error, SourceFailed)]
    refusals = [error for error in errors.values() if isinstance(error, Refusal)]
    if Fault.WRONG in faults and all(fault is Fault.WRONG for fault in faults):
        raise Refusal(Reason.SHARD_MISMATCH, f"{what}: {causes}"[:300])
    if refusals and not faults:
        raise refusals[-1]
    if all(fault in (Fault.MISSING, Fault.WRONG) for fault in faults):
        raise FetchFailed(what, causes)

"""A relay: follows its upstreams, verifies, stores, serves, and forgets. It holds no secret of the run.

One task per upstream long-polls the head, so that a new version is seen at once wherever it appears first; one task
mirrors the newest version seen. A version becomes visible, by its head, only when every shard of it is here.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from protocol.manifest import Head, Manifest
from protocol.reasons import Reason, Refusal

from . import client
from .client import Limits, LocalFailed, SourceFailed
from .download import FORGED, Downloader, FetchFailed
from .serve import MAX_WAIT_SECONDS, ServeState
from .store import ShardStore
from .trust import MAX_CHAIN, Trust, check_base, open_head, open_manifest, retained, shards_of

log = logging.getLogger("farflung.shardcast")


@dataclass(frozen=True)
class _Seen:
    """A verified head and its envelope."""

    head: Head
    data: bytes


class Relay:
    """The following half of a relay. `run` never returns by itself; all else is its own business.

    `keep`: versions kept (and the bases that their adapters need). `wait`: seconds of a long poll.
    `max_bytes`: largest checkpoint that is mirrored.
    """

    def __init__(
        self,
        store: ShardStore,
        state: ServeState,
        trust: Trust,
        upstreams: list[str],
        session: aiohttp.ClientSession,
        *,
        keep: int = 5,
        wait: float = MAX_WAIT_SECONDS,
        max_bytes: int = 1 << 40,
        deadline: float = 4 * 3600.0,
        limits: Limits | None = None,
        rng: random.Random | None = None,
        now: Callable[[], float] = time.time,
    ):
        if keep < 1:
            raise ValueError("a relay keeps at least one version")
        self._store, self._state, self._trust, self._upstreams = store, state, trust, upstreams
        self._session, self._keep, self._wait, self._max_bytes = session, keep, wait, max_bytes
        self._limits, self._rng, self._now = limits or Limits(), rng or random.Random(), now
        self._deadline = deadline
        self._downloader = Downloader(session, upstreams, upstreams, limits=self._limits, rng=self._rng)
        self._manifests: dict[str, Manifest] = {}
        self._seen: _Seen | None = None
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled. Raises Refusal only where going on would be wrong."""
        await asyncio.to_thread(self.restore)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mirror_newest())
            for url in self._upstreams:
                group.create_task(self._watch(url))

    # restart

    def restore(self) -> None:
        """Take up what the folder holds: its manifests, and its head if that version is whole."""
        pin = self._trust.pin
        for name in self._store.names():
            data = self._store.manifest(name)
            try:
                assert data is not None
                self._manifests[name] = open_manifest(data, pin.run_key, pin.run_id, name=name)
            except Refusal as refusal:
                log.warning("%s in the folder is discarded: %s", name, refusal)
                self._store.delete_manifest(name)
        data = self._store.head()
        if data is None:
            return
        try:
            head = open_head(data, pin.run_key, pin.run_id)  # expired or not: clients judge that
        except Refusal as refusal:
            log.warning("the head in the folder is ignored: %s", refusal)
            return
        if self._whole(head.name):
            self._seen = _Seen(head, data)
            self._state.publish(data, head.version)

    def _whole(self, name: str) -> bool:
        manifest = self._manifests.get(name)
        if manifest is None or any(self._store.size(s.sha256) != s.size for s in shards_of(manifest)):
            return False
        return manifest.base is None or self._whole(manifest.base)

    # following

    async def _watch(self, url: str) -> None:
        failures = 0
        while True:
            begin = asyncio.get_running_loop().time()
            try:
                news = await self._poll(url)
                idle = not news and asyncio.get_running_loop().time() - begin < min(1.0, self._wait / 2)
                failures = failures + 1 if idle else 0  # an upstream that answers at once with nothing new
            except (SourceFailed, LocalFailed, OSError) as error:
                log.info("%s", error)
                failures += 1
            except Refusal as refusal:
                log.warning("head of %s refused: %s", url, refusal)
                if refusal.reason in FORGED:
                    self._downloader.distrust(url, str(refusal))
                failures += 1
            if failures:
                await asyncio.sleep(self._limits.backoff(failures, self._rng))

    async def _poll(self, url: str) -> bool:
        """One long poll; True if it brought a newer version or a renewed head."""
        after = self._seen.head.version if self._seen else None
        data = await client.get_head(self._session, url, self._limits, after=after, wait=self._wait)
        if data is None and self._renewal_due():
            data = await client.get_head(self._session, url, self._limits)
        return data is not None and self._offer(data)

    def _renewal_due(self) -> bool:
        if self._seen is None:
            return False
        head = self._seen.head
        return self._now() >= head.issued + (head.expires - head.issued) / 3

    def _offer(self, data: bytes) -> bool:
        """Take a verified head if it is newer than what is known. Raises Refusal."""
        head = self._trust.head(data)
        if self._seen is not None:
            known = self._seen.head
            if (head.version, head.issued, head.expires) <= (known.version, known.issued, known.expires):
                return False
        self._seen = _Seen(head, data)
        self._news.set()
        return True

    # mirroring

    async def _mirror_newest(self) -> None:
        failures = 0
        while True:
            if not failures:
                await self._news.wait()
            self._news.clear()
            seen = self._seen
            assert seen is not None
            try:
                async with asyncio.timeout(self._deadline):
                    await self._mirror(seen)
                failures = 0
            except (FetchFailed, LocalFailed, Refusal, TimeoutError, OSError) as error:
                log.warning("%s is not mirrored yet: %s", seen.head.name, error or type(error).__name__)
                failures += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), self._limits.backoff(failures, self._rng))
            finally:
                self._state.expect((), ())

    async def _mirror(self, seen: _Seen) -> None:
        head = seen.head
        chain = await self._chain(head.name, head.manifest_sha256)
        shards = {shard.sha256: shard for manifest, _ in chain for shard in shards_of(manifest)}
        total = sum(shard.size for shard in shards.values())
        if total > self._max_bytes:
            raise Refusal(Reason.MANIFEST_INVALID, f"{total} bytes, more than this relay takes")
        absent = [s.sha256 for s in shards.values() if self._store.size(s.sha256) != s.size]
        self._state.expect((manifest.name for manifest, _ in chain), absent)
        await self._downloader.shards(shards.values(), self._store)
        await asyncio.to_thread(self._install, seen, chain)
        self._state.publish(seen.data, head.version)
        log.info("%s is here", head.name)
        await asyncio.to_thread(self._forget, head.name)

    async def _chain(self, name: str, sha256: str | None) -> list[tuple[Manifest, bytes]]:
        """The manifest and those of its bases, bases first."""
        chain: list[tuple[Manifest, bytes]] = []
        wanted: str | None = name
        while wanted is not None:
            if len(chain) >= MAX_CHAIN:
                raise Refusal(Reason.MANIFEST_INVALID, f"more than {MAX_CHAIN} bases")
            self._state.expect((wanted,), ())
            found = self._held(wanted, sha256)
            manifest, data = found or await self._downloader.manifest(wanted, sha256, self._trust)
            if chain:
                check_base(chain[-1][0], manifest)
            chain.append((manifest, data))
            wanted, sha256 = manifest.base, None
        return chain[::-1]

    def _held(self, name: str, sha256: str | None) -> tuple[Manifest, bytes] | None:
        data = self._store.manifest(name)
        if data is None:
            return None
        try:
            return self._trust.manifest(data, name=name, sha256=sha256), data
        except Refusal:
            return None  # the head names another manifest of the same weights: fetch that

    def _install(self, seen: _Seen, chain: list[tuple[Manifest, bytes]]) -> None:
        for manifest, data in chain:
            self._store.write_manifest(manifest.name, data, replace=True)
            self._manifests[manifest.name] = manifest
        self._store.write_head(seen.data)

    def _forget(self, newest: str) -> None:
        """Delete what none of the kept versions needs."""
        newest_first = sorted(self._store.names()[::-1], key=lambda name: name != newest)
        kept = retained(self._manifests, newest_first, self._keep)
        for name in set(newest_first) - kept:
            self._store.delete_manifest(name)
            self._manifests.pop(name, None)
        needed = {shard.sha256 for name in kept for shard in shards_of(self._manifests[name])}
        for sha256 in self._store.shards():
            if sha256 not in needed:
                self._store.delete(sha256)

"""A worker's side: the newest head, its manifest, and its files in a folder that is either whole or not there."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import aiohttp

from protocol.manifest import Head, Manifest
from protocol.reasons import Reason, Refusal

from . import client
from .assemble import ShardLost, assemble, clean, forget_shards, is_whole
from .client import Fault, Limits, LocalFailed, SourceFailed
from .download import FORGED, Downloader, FetchFailed
from .serve import MAX_WAIT_SECONDS
from .store import ShardStore, is_version_name
from .trust import MAX_CHAIN, Trust, check_base, shards_of

T = TypeVar("T")
LOCK_POLL_SECONDS = 0.05


class Fetcher:
    """Fetches checkpoints of one run into `cache_dir/<name>/`, through relays and, failing them, from the origin.

    An async context manager. Several processes may share the folder: one fetches while the others wait. Errors are
    Refusal (with a reason code: what arrived is not acceptable), FetchFailed (nobody delivered) and LocalFailed (disk).
    `deadline`: seconds for one checkpoint; `max_bytes`: its largest size.
    """

    def __init__(
        self,
        relays: Iterable[str],
        *,
        run_key: str,
        run_id: str,
        cache_dir: Path,
        origin: str | None = None,
        concurrency: int = 4,
        deadline: float = 4 * 3600.0,
        max_bytes: int = 1 << 40,
        limits: Limits | None = None,
        rng: random.Random | None = None,
        now: Callable[[], float] = time.time,
    ):
        """Raises Refusal (`run_key_changed`, `manifest_wrong_run`) if the folder belongs to something else."""
        cache_dir.mkdir(parents=True, exist_ok=True)
        self._dir, self._now = cache_dir, now
        self._trust = Trust(cache_dir / "pin.json", run_key, run_id, now)
        self._store = ShardStore(cache_dir / ".shards")
        self._relays, self._origin = list(relays), origin
        self._concurrency, self._deadline, self._max_bytes = concurrency, deadline, max_bytes
        self._limits, self._rng = limits or Limits(), rng or random.Random()
        self._session: aiohttp.ClientSession | None = None
        self._downloader: Downloader | None = None
        self._head: Head | None = None

    async def __aenter__(self) -> Fetcher:
        self._session = client.new_session(self._limits)
        self._downloader = Downloader(
            self._session,
            self._relays,
            [self._origin] if self._origin else [],
            limits=self._limits,
            concurrency=self._concurrency,
            rng=self._rng,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    @property
    def _sources(self) -> Downloader:
        assert self._downloader is not None, "use `async with`"
        return self._downloader

    @property
    def dropped(self) -> frozenset[str]:
        """Relays that served a wrong byte and are not asked any more."""
        return self._sources.dropped

    def set_relays(self, urls: Iterable[str]) -> None:
        """Replace the list of relays, as the coordinator's directives say."""
        self._sources.set_relays(urls)

    # head and manifest

    async def head(self, after: int | None = None, wait: float = 0.0) -> Head | None:
        """The verified head; None if there is none newer than `after` within `wait` seconds (20 at most).

        A source that only says "nothing new" is not believed for long: once half the life of the last head is over, a
        fresh one is demanded. Raises Refusal (`manifest_expired`, `manifest_rollback`, `manifest_wrong_run`,
        `manifest_invalid`) if no source has an acceptable one, FetchFailed if none answers.
        """
        head, nothing_new = await self._ask_head(after, min(max(wait, 0.0), MAX_WAIT_SECONDS))
        if head is None and nothing_new and self._stale():
            head, _ = await self._ask_head(None, 0.0)
        if head is not None:
            self._head = head
        return head if head is not None and (after is None or head.version > after) else None

    def _stale(self) -> bool:
        head = self._head
        return head is None or self._now() >= head.issued + (head.expires - head.issued) / 2

    async def _ask_head(self, after: int | None, wait: float) -> tuple[Head | None, bool]:
        """A head, or None and whether some source answered that it has nothing newer."""
        sources, session = self._sources, self._session
        assert session is not None
        tried: set[str] = set()
        causes: dict[str, str] = {}
        refusal: Refusal | None = None
        early = True  # every failure so far was "nothing published yet"
        while (url := sources.next_source(tried)) is not None:
            tried.add(url)
            begin = time.monotonic()
            try:
                request = client.get_head(session, url, self._limits, after=after, wait=wait)
                data = await sources.ask(url, 0, request)
                if data is None and wait >= 1 and time.monotonic() - begin < wait / 2:
                    raise SourceFailed(Fault.UNREACHABLE, url, "does not hold a long poll")
                if data is None:
                    return None, True
                return await asyncio.to_thread(self._trust.head, data), False
            except SourceFailed as error:
                causes[url] = str(error)
                early = early and error.fault is Fault.NOT_YET
            except Refusal as error:
                causes[url] = str(error)
                refusal = error
                if error.reason in FORGED:
                    sources.distrust(url, str(error))
            except OSError as error:
                raise LocalFailed(error) from error
        if refusal is not None:
            raise refusal
        if causes and early:
            return None, False
        raise FetchFailed("head", causes)

    async def manifest(self, name: str, expected_sha256: str | None = None) -> Manifest:
        """The verified manifest `name`, the one whose envelope has that digest if it is given (a head gives it).

        Raises Refusal, FetchFailed.
        """
        if not is_version_name(name):
            raise Refusal(Reason.MANIFEST_INVALID, f"not a version name: {name[:64]!r}")
        try:
            async with asyncio.timeout(self._deadline):
                manifest, _ = await self._sources.manifest(name, expected_sha256, self._trust)
        except TimeoutError:
            raise FetchFailed(f"manifest {name}", {"": f"deadline of {self._deadline:.0f} s"}) from None
        return manifest

    async def chain(self, name: str, expected_sha256: str | None = None) -> list[Manifest]:
        """The manifest and those of the bases it needs, bases first; each checked against the one that names it.

        Raises Refusal, FetchFailed.
        """
        manifests = [await self.manifest(name, expected_sha256)]
        while (base := manifests[-1].base) is not None:
            if len(manifests) >= MAX_CHAIN:
                raise Refusal(Reason.MANIFEST_INVALID, f"more than {MAX_CHAIN} bases")
            manifests.append(await self.manifest(base))
            check_base(manifests[-2], manifests[-1])
        return manifests[::-1]

    # files

    async def fetch(self, manifest: Manifest) -> Path:
        """The folder with the files of the manifest: fetched, or found whole from an earlier time.

        For a patch or an adapter these are its own files; its base is fetched by the manifest of that name. Shards
        fetched before an interruption are not fetched again. Raises Refusal (`shard_mismatch`: every source served
        wrong bytes; `tensors_mismatch`; `manifest_wrong_run`), FetchFailed, LocalFailed.
        """
        if manifest.run_id != self._trust.pin.run_id or not manifest.sealed:
            raise Refusal(Reason.MANIFEST_WRONG_RUN, "not a sealed manifest of this run")
        if manifest.size > self._max_bytes:
            raise Refusal(Reason.MANIFEST_INVALID, f"{manifest.size} bytes, more than this node takes")
        try:
            async with asyncio.timeout(self._deadline), self._lock():
                return await self._fetch(manifest)
        except TimeoutError:
            raise FetchFailed(manifest.name, {"": f"deadline of {self._deadline:.0f} s"}) from None
        except OSError as error:
            raise LocalFailed(error) from error

    async def _fetch(self, manifest: Manifest) -> Path:
        target = self._dir / manifest.name
        if await asyncio.to_thread(is_whole, manifest, target):
            return target
        while True:
            await self._sources.shards(shards_of(manifest), self._store)
            try:
                path = await asyncio.to_thread(assemble, manifest, self._store, self._dir)
            except ShardLost:
                continue
            await asyncio.to_thread(forget_shards, manifest, self._store)
            return path

    @asynccontextmanager
    async def _lock(self) -> AsyncIterator[None]:
        """Exclusive use of the folder, against other processes and other calls."""
        descriptor = os.open(self._dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(LOCK_POLL_SECONDS)
            await asyncio.to_thread(clean, self._dir)
            self._store.clean()
            yield
        finally:
            os.close(descriptor)


class SyncFetcher:
    """The same for callers with threads: owns an event loop in a thread of its own. Thread-safe.

    `close` may be called from any thread; calls that are under way then raise FetchFailed.
    """

    def __init__(self, fetcher: Fetcher):
        self._fetcher = fetcher
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="shardcast-fetch", daemon=True)
        self._thread.start()
        self._call(fetcher.__aenter__())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise FetchFailed("closed", {})
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except CancelledError:
            raise FetchFailed("closed", {}) from None

    def head(self, after: int | None = None, wait: float = 0.0) -> Head | None:
        """See `Fetcher.head`."""
        return self._call(self._fetcher.head(after, wait))

    def manifest(self, name: str, expected_sha256: str | None = None) -> Manifest:
        """See `Fetcher.manifest`."""
        return self._call(self._fetcher.manifest(name, expected_sha256))

    def chain(self, name: str, expected_sha256: str | None = None) -> list[Manifest]:
        """See `Fetcher.chain`."""
        return self._call(self._fetcher.chain(name, expected_sha256))

    def fetch(self, manifest: Manifest) -> Path:
        """See `Fetcher.fetch`."""
        return self._call(self._fetcher.fetch(manifest))

    def set_relays(self, urls: Iterable[str]) -> None:
        """See `Fetcher.set_relays`."""
        relays = list(urls)

        async def change() -> None:
            self._fetcher.set_relays(relays)

        self._call(change())

    def close(self) -> None:
        """Cancel what is under way, close the connections, end the thread. A second call does nothing."""
        if self._closed:
            return
        self._closed = True

        async def shut() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._fetcher.__aexit__(None, None, None)

        asyncio.run_coroutine_threadsafe(shut(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def __enter__(self) -> SyncFetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

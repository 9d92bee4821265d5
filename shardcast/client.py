"""One request to one relay or origin, with everything that the other side says bounded and sorted into a few faults."""

from __future__ import annotations

import asyncio
import errno
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

import aiohttp

from protocol.manifest import Shard

from .store import ShardStore, WrongBytes
from .trust import MAX_HEAD_BYTES, MAX_MANIFEST_BYTES

READ_BYTES = 1 << 20
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Fault(StrEnum):
    """Why a source did not deliver. `NOT_YET` and `MISSING` are no failures of the source; `WRONG` is more than one."""

    UNREACHABLE = "unreachable"
    SLOW = "slow"
    MISSING = "missing"
    NOT_YET = "not_yet"
    WRONG = "wrong_bytes"


class SourceFailed(Exception):
    """One request to `url` came to nothing. `retry_after` in seconds, where the source gave it."""

    def __init__(self, fault: Fault, url: str, detail: str, retry_after: float | None = None):
        super().__init__(f"{url}: {fault.value}: {detail}")
        self.fault, self.url, self.detail, self.retry_after = fault, url, detail, retry_after


class LocalFailed(Exception):
    """This machine refused: disk full, no descriptors left. No source is to blame."""

    def __init__(self, error: OSError):
        super().__init__(f"this machine: {error}")
        self.error = error


@dataclass(frozen=True)
class Limits:
    """Times in seconds. A transfer of n bytes may take `grace + n / minimum_speed` (bytes per second), all in all.
    Waiting after failures starts at `retry` and doubles up to `longest_retry`."""

    connect: float = 5.0
    grace: float = 10.0
    minimum_speed: float = 128 << 10
    retry: float = 0.25
    longest_retry: float = 10.0

    def transfer(self, size: int) -> float:
        """Longest time for `size` bytes."""
        return self.grace + size / self.minimum_speed

    def backoff(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait after so many failures in a row: exponential with full jitter, but never nothing."""
        return max(0.1 * self.retry, rng.uniform(0, min(self.longest_retry, self.retry * 2 ** min(failures, 16))))


def source_url(text: str) -> str:
    """A base URL without fragment and trailing slash. Raises ValueError unless it is plain http(s)."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or "@" in parts.netloc:
        raise ValueError(f"not a base URL: {text!r}")
    if parts.port is not None and not 0 < parts.port < 65536:
        raise ValueError(f"not a port: {text!r}")
    if not re.fullmatch(r"[!-~]*", parts.path):
        raise ValueError(f"not a path: {text!r}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def new_session(limits: Limits) -> aiohttp.ClientSession:
    """A session for bulk transfers: no cookies, no proxies of the environment, no decompression."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect),
        connector=aiohttp.TCPConnector(limit=64),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=READ_BYTES,
        headers={"Accept-Encoding": "identity", "User-Agent": "farflung"},
    )


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    value = response.headers.get("Retry-After", "")
    return min(float(value), 60.0) if re.fullmatch(r"[0-9]{1,6}", value) else None


def _check_status(url: str, response: aiohttp.ClientResponse) -> None:
    status = response.status
    if status in (200, 204):
        return
    if status in (404, 410):
        raise SourceFailed(Fault.MISSING, url, f"status {status}")
    retry_after = _retry_after(response)
    if status in (425, 429) or (status == 503 and retry_after is not None):
        raise SourceFailed(Fault.NOT_YET, url, f"status {status}", retry_after)
    raise SourceFailed(Fault.UNREACHABLE, url, f"status {status}")


@asynccontextmanager
async def _get(
    session: aiohttp.ClientSession, url: str, path: str, seconds: float
) -> AsyncIterator[aiohttp.ClientResponse]:
    try:
        async with asyncio.timeout(seconds):
            async with session.get(url + path, allow_redirects=False) as response:
                _check_status(url, response)
                yield response
    except aiohttp.ServerTimeoutError as error:
        raise SourceFailed(Fault.UNREACHABLE, url, str(error)[:160]) from None
    except TimeoutError:
        raise SourceFailed(Fault.SLOW, url, f"not done after {seconds:.1f} s") from None
    except (aiohttp.ClientError, ConnectionError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in _OURS:
            raise LocalFailed(error) from error
        raise SourceFailed(Fault.UNREACHABLE, url, f"{type(error).__name__}: {error}"[:160]) from None


async def _small(session: aiohttp.ClientSession, url: str, path: str, seconds: float, max_bytes: int) -> bytes | None:
    async with _get(session, url, path, seconds) as response:
        if response.status == 204:
            return None
        data = bytearray()
        async for chunk in response.content.iter_chunked(READ_BYTES):
            data += chunk
            if len(data) > max_bytes:
                raise SourceFailed(Fault.WRONG, url, f"{path}: more than {max_bytes} bytes")
        return bytes(data)


async def get_head(
    session: aiohttp.ClientSession, url: str, limits: Limits, *, after: int | None = None, wait: float = 0
) -> bytes | None:
    """The head as signed; None if there is none newer than `after` within `wait` seconds. Raises SourceFailed."""
    path = "/v1/head" if after is None else f"/v1/head?after={after}&wait={wait:g}"
    return await _small(session, url, path, limits.transfer(MAX_HEAD_BYTES) + wait, MAX_HEAD_BYTES)


async def get_manifest(session: aiohttp.ClientSession, url: str, limits: Limits, name: str) -> bytes:
    """The manifest as signed. Raises SourceFailed."""
    seconds = limits.transfer(MAX_MANIFEST_BYTES)
    data = await _small(session, url, f"/v1/manifests/{name}", seconds, MAX_MANIFEST_BYTES)
    if data is None:
        raise SourceFailed(Fault.UNREACHABLE, url, "an answer without content")
    return data


async def get_shard(session: aiohttp.ClientSession, url: str, limits: Limits, shard: Shard, store: ShardStore) -> None:
    """Fetch one shard into the store, or nothing: exact size, exact digest, minimum speed.

    Raises SourceFailed for whatever the source does, LocalFailed for whatever the disk does.
    """
    async with _get(session, url, f"/v1/shards/{shard.sha256}", limits.transfer(shard.size)) as response:
        length = response.content_length
        if response.status != 200 or (length is not None and length != shard.size):
            raise SourceFailed(Fault.WRONG, url, f"{shard.sha256[:8]}: {length} bytes instead of {shard.size}")
        with _blame(url):
            writer = store.writer(shard)
        with writer:
            async for chunk in response.content.iter_chunked(READ_BYTES):
                with _blame(url):
                    writer.write(chunk)
            with _blame(url):
                await asyncio.to_thread(writer.commit)


@contextmanager
def _blame(url: str) -> Iterator[None]:
    """Around what touches the disk only, so that an OSError here is never the network's."""
    try:
        yield
    except WrongBytes as error:
        raise SourceFailed(Fault.WRONG, url, str(error)) from None
    except OSError as error:
        raise LocalFailed(error) from error

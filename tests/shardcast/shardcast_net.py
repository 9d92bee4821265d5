"""A small network for the tests: checkpoints, an origin that can misbehave, relays and fetchers over real loopback."""

import asyncio
import json
import random
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from protocol.identity import Key
from protocol.manifest import Manifest
from protocol.messages import RunInfo
from protocol.runspec import EnvironmentSpec, ModelSpec, ProofSpec, RunSpec, SamplingSpec
from protocol.signatures import RequestParts, ResponseParts, sign_response, verify_request
from shardcast import client
from shardcast.client import Limits
from shardcast.fetch import Fetcher
from shardcast.publish import publish, sign_head
from shardcast.relay import Relay
from shardcast.serve import RelayServer, ServeLimits, ServeState, make_app
from shardcast.store import ShardStore
from shardcast.trust import Trust

RUN_ID = "test-run"
KEY, OTHER_KEY = Key.from_seed(b"\x01" * 32), Key.from_seed(b"\x02" * 32)
SPEC_DIGEST = "ab" * 32
NOW = 1_700_000_000.0
SHARD = 4096
QUICK = Limits(connect=2.0, grace=5.0, minimum_speed=1 << 20, retry=0.02, longest_retry=0.1)
Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]


def safetensors(tensors: Tensors, order: list[str] | None = None, metadata: dict[str, str] | None = None,
                padding: int = 0) -> bytes:  # fmt: skip
    """A safetensors file, written without the library so that order, metadata and padding are free."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    body = b""
    for name in order or list(tensors):
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode() + b" " * padding
    return struct.pack("<Q", len(text)) + text + body


def checkpoint(folder: Path, seed: int = 0, rows: int = 40) -> Path:
    """A folder with a tensors file of `rows` KiB, a configuration and an empty file."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    tensors = {"w": ("F32", (rows, 256), rng.randbytes(rows * 1024)), "b": ("BF16", (3,), rng.randbytes(6))}
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    (folder / "config.json").write_text(f'{{"seed": {seed}}}')
    (folder / "empty.txt").write_bytes(b"")
    return folder


def publish_folder(folder: Path, store: ShardStore, version: int, key: Key = KEY, run_id: str = RUN_ID,
                   base: Manifest | None = None) -> Manifest:  # fmt: skip
    """Publish with the tests' constants; with a base as an adapter."""
    return publish(
        folder, store, run_id=run_id, run_spec_digest=SPEC_DIGEST, version=version,
        kind="adapter" if base else "full", base=base.name if base else None,
        base_weights_digest=base.weights_digest if base else None,
        created=int(NOW), canary=None, key=key, shard_bytes=SHARD,
    )  # fmt: skip


def head_of(store: ShardStore, name: str, key: Key = KEY, now: float = NOW, life: float = 600) -> bytes:
    """The signed head for a published manifest."""
    envelope = store.manifest(name)
    assert envelope is not None
    return sign_head(envelope, key, now=now, life_seconds=life)


RUN_SPEC = RunSpec(
    run_id=RUN_ID,
    model=ModelSpec(
        architecture="test", base_weights_digest="11" * 32, tokenizer_digest="22" * 32, dtype="float32",
        head_dtype="float32", publish_dtype="float32", vocab_size=16, hidden_size=8, eos_token_ids=(1,),
        adapter="none",
    ),
    sampling=SamplingSpec(temperature=1.0, max_prompt_tokens=8, max_tokens=8),
    proof=ProofSpec(),
    max_staleness=4, group_size=8, rollouts_per_version=128, publish_every=1, propagation_grace=10.0,
    lease_seconds=60.0, minimum_tokens_per_second=1.0, price_prompt_token=1, price_completion_token=1,
    calibration_families=("cpu",), environments=(EnvironmentSpec(name="t", version="1"),),
)  # fmt: skip

Override = Callable[["Origin", web.Request], Awaitable[web.StreamResponse | None]]


class Origin:
    """Serves a ShardStore as the coordinator's API does, written apart from the relay's own server. `override` may
    answer a request in its place; `asked` records every path."""

    def __init__(self, store: ShardStore, key: Key = KEY):
        self.store, self.key = store, key
        self.override: Override | None = None
        self.asked: list[str] = []
        self.registered: list[tuple[str, str]] = []
        self.relays: tuple[str, ...] = ()
        self.on_register = asyncio.Event()
        self.version: int | None = None
        self.head: bytes | None = None
        self._news = asyncio.Condition()
        self.url = ""

    def count(self, prefix: str) -> int:
        return sum(path.startswith(prefix) for path in self.asked)

    async def announce(self, head: bytes, version: int) -> None:
        async with self._news:
            self.head, self.version = head, version
            self._news.notify_all()

    async def publish(self, folder: Path, version: int, now: float = NOW, life: float = 600, **kwargs: Any) -> Manifest:
        manifest = publish_folder(folder, self.store, version, key=self.key, **kwargs)
        await self.announce(head_of(self.store, manifest.name, self.key, now, life), version)
        return manifest

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        if self.override is not None and (answer := await self.override(self, request)) is not None:
            return answer
        parts = request.path.strip("/").split("/")
        if parts == ["v1", "head"]:
            return await self._head(request)
        if parts == ["v1", "run"]:
            return self._signed(request, self.run_info().model_dump_json().encode())
        if parts == ["v1", "relays"]:
            return await self._register(request)
        data = None
        if parts[:2] == ["v1", "manifests"]:
            data = self.store.manifest(parts[2])
        elif parts[:2] == ["v1", "shards"] and self.store.has(parts[2]):
            data = self.store.path(parts[2]).read_bytes()
        return web.Response(status=404) if data is None else web.Response(body=data)

    async def _head(self, request: web.Request) -> web.Response:
        after = request.query.get("after")

        def newer() -> bool:
            return self.version is not None and (after is None or self.version > int(after))

        try:
            async with asyncio.timeout(float(request.query.get("wait", 0))), self._news:
                await self._news.wait_for(newer)
        except TimeoutError:
            pass
        if newer():
            return web.Response(body=self.head)
        return web.Response(status=204) if after else web.Response(status=503, headers={"Retry-After": "1"})

    def run_info(self) -> RunInfo:
        return RunInfo(run_key=self.key.id, run_spec=RUN_SPEC, run_spec_digest=RUN_SPEC.digest, newest=self.version,
                       relays=self.relays, log_head=None, now=NOW)  # fmt: skip

    def _signed(self, request: web.Request, body: bytes) -> web.Response:
        response = web.Response(body=body)
        parts = RequestParts(request.method, str(request.url), request.headers)
        sign_response(ResponseParts(200, response.headers, parts), body, self.key, RUN_ID, now=NOW)
        return response

    async def _register(self, request: web.Request) -> web.Response:
        body = await request.read()

        parts = RequestParts(request.method, str(request.url), request.headers)
        who = verify_request(parts, body, RUN_ID, now=time.time())
        self.registered.append((who.node_id, json.loads(body)["url"]))
        self.on_register.set()
        return self._signed(request, b"{}")


@asynccontextmanager
async def serving(origin: Origin) -> AsyncIterator[Origin]:
    """The origin on a free port."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", origin.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    origin.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield origin
    finally:
        await runner.cleanup()


class RunningRelay:
    """A relay in this process; `url` is where it serves."""

    def __init__(self, store: ShardStore, state: ServeState, server: RelayServer, follower: Relay):
        self.store, self.state, self.follower, self.url = store, state, follower, server.url


@asynccontextmanager
async def relaying(folder: Path, upstreams: list[str], *, keep: int = 5, wait: float = 20.0,
                   now: Callable[[], float] = lambda: NOW, run_key: str = KEY.id, run_id: str | None = RUN_ID,
                   serve_limits: ServeLimits | None = None) -> AsyncIterator[RunningRelay]:  # fmt: skip
    store, state = ShardStore(folder), ServeState(key=Key.from_seed(b"\x07" * 32))
    server = RelayServer(make_app(store, state, serve_limits))
    await server.start("127.0.0.1", 0)
    state.url = server.url
    async with client.new_session(QUICK) as session:
        trust = Trust(folder / "pin.json", run_key, run_id, now)
        follower = Relay(store, state, trust, upstreams, session, keep=keep, wait=wait, limits=QUICK,
                         rng=random.Random(1), now=now)  # fmt: skip
        task = asyncio.create_task(follower.run())
        try:
            yield RunningRelay(store, state, server, follower)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.stop()


def fetching(folder: Path, relays: list[str], origin: str | None = None, **kwargs: Any) -> Fetcher:
    """A Fetcher with the tests' constants."""
    defaults: dict[str, Any] = {
        "run_key": KEY.id, "run_id": RUN_ID, "limits": QUICK, "rng": random.Random(1), "now": lambda: NOW,
        "deadline": 60.0,
    }  # fmt: skip
    return Fetcher(relays, cache_dir=folder, origin=origin, **{**defaults, **kwargs})


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition that a task of this loop makes true; the time-out only ends a broken test."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def files_of(folder: Path) -> dict[str, bytes]:
    """Names and contents of a folder's files."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(data: bytes, position: int = 0) -> bytes:
    """The same bytes with one bit changed."""
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)

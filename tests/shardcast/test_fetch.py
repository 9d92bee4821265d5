"""Fetching through relays that lie, stall, lag or die; and what a process that is killed leaves behind."""

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from shardcast_net import (
    KEY,
    NOW,
    OTHER_KEY,
    RUN_ID,
    Origin,
    checkpoint,
    fetching,
    files_of,
    flip,
    head_of,
    publish_folder,
    relaying,
    serving,
    until,
)

from protocol.canonical import canonical_json
from protocol.manifest import MANIFEST, Head, Manifest
from protocol.reasons import Reason, Refusal
from protocol.signed import sign_document
from shardcast.assemble import assemble
from shardcast.client import Limits, LocalFailed
from shardcast.download import FetchFailed
from shardcast.fetch import Fetcher, SyncFetcher
from shardcast.store import ShardStore
from shardcast.trust import shards_of


async def newest(fetcher: Fetcher) -> tuple[Head, Manifest]:
    head = await fetcher.head()
    assert head is not None
    return head, await fetcher.manifest(head.name, head.manifest_sha256)


async def refused(reason: Reason, awaitable: Any) -> None:
    with pytest.raises(Refusal) as caught:
        await awaitable
    assert caught.value.reason is reason


def shard_override(answer):  # type: ignore[no-untyped-def]
    """An origin that answers requests for shards by `answer(request, true bytes)`."""

    async def override(origin: Origin, request: web.Request) -> web.StreamResponse | None:
        if not request.path.startswith("/v1/shards/"):
            return None
        return await answer(request, origin.store.path(request.path[11:]).read_bytes())

    return override


async def corrupted(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=flip(data, len(data) // 2))


async def truncated(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(body=data[:-1])


async def chunked_short(request: web.Request, data: bytes) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(data[:-1])
    return response


async def endless(request: web.Request, data: bytes) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(data)


async def empty(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(status=204)


async def redirected(request: web.Request, data: bytes) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"})


async def broken_off(request: web.Request, data: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(len(data))})
    await response.prepare(request)
    await response.write(data[: len(data) // 2])
    assert request.transport is not None
    request.transport.abort()
    return response


async def stalled(request: web.Request, data: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(len(data))})
    await response.prepare(request)
    while True:
        await response.write(b"\x00")
        await asyncio.sleep(0.05)


def test_through_a_chain_of_relays(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            folder = checkpoint(tmp_path / "1", 1)
            await origin.publish(folder, 1)
            async with (
                relaying(tmp_path / "a", [origin.url]) as a,
                relaying(tmp_path / "b", [a.url]) as b,
                fetching(tmp_path / "f", [b.url]) as fetcher,
            ):
                await until(lambda: b.state.version == 1)
                head, manifest = await newest(fetcher)
                path = await fetcher.fetch(manifest)
                assert path == tmp_path / "f" / head.name and files_of(path) == files_of(folder)
                asked = origin.count("/v1/")
                assert await fetcher.fetch(manifest) == path and origin.count("/v1/") == asked
                assert list((tmp_path / "f" / ".shards" / "shards").rglob("?" * 64)) == []

    asyncio.run(main())


@pytest.mark.parametrize("lie", [corrupted, truncated, chunked_short, endless, empty])
def test_a_relay_with_wrong_bytes_is_dropped(tmp_path: Path, lie: Any) -> None:
    async def main() -> None:
        store = ShardStore(tmp_path / "o")
        async with serving(Origin(store)) as liar, serving(Origin(store)) as honest:
            folder = checkpoint(tmp_path / "1", 1)
            manifest = await liar.publish(folder, 1)
            await honest.announce(head_of(store, manifest.name), 1)
            liar.override = shard_override(lie)
            async with fetching(tmp_path / "f", [liar.url, honest.url], concurrency=1) as fetcher:
                path = await fetcher.fetch(manifest)
                assert files_of(path) == files_of(folder)
                assert fetcher.dropped == {liar.url} and liar.count("/v1/shards") == 1

    asyncio.run(main())


@pytest.mark.parametrize("trouble", [redirected, broken_off, stalled])
def test_a_relay_in_trouble_is_passed_over_but_not_dropped(tmp_path: Path, trouble: Any) -> None:
    async def main() -> None:
        store = ShardStore(tmp_path / "o")
        async with serving(Origin(store)) as weak, serving(Origin(store)) as strong:
            folder = checkpoint(tmp_path / "1", 1, rows=12)
            manifest = await weak.publish(folder, 1)
            weak.override = shard_override(trouble)
            limits = Limits(connect=2, grace=0.3, minimum_speed=1 << 30, retry=0.02)
            async with fetching(tmp_path / "f", [weak.url], strong.url, limits=limits, concurrency=1) as fetcher:
                assert files_of(await fetcher.fetch(manifest)) == files_of(folder)
                assert fetcher.dropped == frozenset() and weak.count("/v1/shards") > 0
                assert fetcher._sources.relays[weak.url].success < 0.8

    asyncio.run(main())


def test_redirects_are_not_followed(tmp_path: Path) -> None:
    """A relay could otherwise make a node send requests to any address (SSRF)."""

    async def main() -> None:
        store = ShardStore(tmp_path / "o")
        async with serving(Origin(store)) as relay, serving(Origin(store)) as victim:
            manifest = await relay.publish(checkpoint(tmp_path / "1", 1), 1)

            async def redirect(request: web.Request, data: bytes) -> web.StreamResponse:
                return web.Response(status=307, headers={"Location": victim.url + request.path})

            relay.override = shard_override(redirect)
            async with fetching(tmp_path / "f", [relay.url], deadline=1) as fetcher:
                with pytest.raises(FetchFailed):
                    await fetcher.fetch(manifest)
            assert victim.asked == [] and relay.count("/v1/shards") > 0

    asyncio.run(main())


def test_wrong_bytes_everywhere(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            manifest = await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            origin.override = shard_override(corrupted)
            async with fetching(tmp_path / "f", [], origin.url) as fetcher:
                await refused(Reason.SHARD_MISMATCH, fetcher.fetch(manifest))
                assert not (tmp_path / "f" / manifest.name).exists()
                origin.override = None  # the origin was mended: it is never dropped
                await fetcher.fetch(manifest)
            origin.override = shard_override(corrupted)
            async with fetching(tmp_path / "g", [origin.url]) as fetcher:
                with pytest.raises((Refusal, FetchFailed)):
                    await fetcher.fetch(manifest)
                assert fetcher.dropped == {origin.url}

    asyncio.run(main())


def test_a_relay_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        refusals = [2]

        async def not_yet(request: web.Request, data: bytes) -> web.StreamResponse | None:
            if refusals[0]:
                refusals[0] -= 1
                return web.Response(status=503, headers={"Retry-After": "0"})
            return None

        async with serving(Origin(ShardStore(tmp_path / "o"))) as relay:
            manifest = await relay.publish(checkpoint(tmp_path / "1", 1), 1)
            relay.override = shard_override(not_yet)
            async with fetching(tmp_path / "f", [relay.url]) as fetcher:
                await fetcher.fetch(manifest)
                assert refusals == [0] and fetcher._sources.relays[relay.url].success == 1.0

    asyncio.run(main())


def test_nobody_has_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            manifest = await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            origin.store.delete(list(shards_of(manifest))[-1].sha256)
            async with fetching(tmp_path / "f", [origin.url], "http://127.0.0.1:1") as fetcher:
                fetcher._sources.fallbacks = (origin.url,)
                with pytest.raises(FetchFailed) as caught:
                    await fetcher.fetch(manifest)
                assert "missing" in str(caught.value) and list(caught.value.causes) == [origin.url]
                with pytest.raises(FetchFailed):
                    await fetcher.manifest("v9-01234567")
            async with fetching(tmp_path / "f", []) as fetcher:
                with pytest.raises(FetchFailed, match="no source"):
                    await fetcher.fetch(manifest)

    asyncio.run(main())


def test_overall_deadline(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            manifest = await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            origin.override = shard_override(stalled)
            async with fetching(tmp_path / "f", [origin.url], deadline=0.3) as fetcher:
                with pytest.raises(FetchFailed, match="deadline"):
                    await fetcher.fetch(manifest)

    asyncio.run(main())


def test_dead_relays_fall_back_to_the_origin(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            folder = checkpoint(tmp_path / "1", 1)
            await origin.publish(folder, 1)
            dead = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
            async with fetching(tmp_path / "f", dead, origin.url) as fetcher:
                _, manifest = await newest(fetcher)
                assert files_of(await fetcher.fetch(manifest)) == files_of(folder)
                fetcher.set_relays([origin.url, dead[0]])
                assert set(fetcher._sources.relays) == {origin.url, dead[0]}

    asyncio.run(main())


# heads


def test_rollback_is_refused_even_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        store = ShardStore(tmp_path / "o")
        async with serving(Origin(store)) as origin:
            old = publish_folder(checkpoint(tmp_path / "4", 4), store, 4)
            await origin.publish(checkpoint(tmp_path / "5", 5), 5)
            async with fetching(tmp_path / "f", [origin.url]) as fetcher:
                await newest(fetcher)
            await origin.announce(head_of(store, old.name), 4)
            async with fetching(tmp_path / "f", [origin.url]) as fetcher:
                await refused(Reason.MANIFEST_ROLLBACK, fetcher.head())
                async with serving(Origin(store)) as good:
                    await good.publish(checkpoint(tmp_path / "6", 6), 6)
                    fetcher.set_relays([origin.url, good.url])
                    head, _ = await newest(fetcher)
                    assert head.version == 6

    asyncio.run(main())


def test_expired_wrong_run_wrong_key(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            async with fetching(tmp_path / "a", [origin.url], now=lambda: NOW + 600) as fetcher:
                await refused(Reason.MANIFEST_EXPIRED, fetcher.head())
            async with fetching(tmp_path / "b", [origin.url], run_id="another") as fetcher:
                await refused(Reason.MANIFEST_WRONG_RUN, fetcher.head())
                assert fetcher.dropped == {origin.url}
            async with fetching(tmp_path / "c", [origin.url], run_key=OTHER_KEY.id) as fetcher:
                await refused(Reason.MANIFEST_INVALID, fetcher.head())
            with pytest.raises(Refusal) as caught:
                fetching(tmp_path / "c", [origin.url])
            assert caught.value.reason is Reason.RUN_KEY_CHANGED
            manifest = publish_folder(checkpoint(tmp_path / "2", 2), origin.store, 2, run_id="another")
            async with fetching(tmp_path / "d", [origin.url]) as fetcher:
                await refused(Reason.MANIFEST_WRONG_RUN, fetcher.manifest(manifest.name))
                await refused(Reason.MANIFEST_WRONG_RUN, fetcher.fetch(manifest))
                await refused(Reason.MANIFEST_INVALID, fetcher.manifest("../../etc/passwd"))

    asyncio.run(main())


def test_another_manifest_than_the_head_names(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            async with fetching(tmp_path / "f", [], origin.url) as fetcher:
                head, manifest = await newest(fetcher)
                await refused(Reason.MANIFEST_INVALID, fetcher.manifest(head.name, "0" * 64))
                assert await fetcher.manifest(head.name) == manifest

    asyncio.run(main())


def test_long_poll_ends_with_the_publication(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            async with (
                relaying(tmp_path / "r", [origin.url]) as relay,
                fetching(tmp_path / "f", [relay.url]) as fetcher,
            ):
                await until(lambda: relay.state.version == 1)
                assert (await newest(fetcher))[0].version == 1
                assert await fetcher.head(after=1, wait=0.05) is None
                waiting = asyncio.create_task(fetcher.head(after=1, wait=20))
                await asyncio.sleep(0.05)
                assert not waiting.done()
                await origin.publish(checkpoint(tmp_path / "2", 2), 2)
                head = await waiting
                assert head is not None and head.version == 2

    asyncio.run(main())


def test_a_frozen_relay_is_found_out(tmp_path: Path) -> None:
    """A relay that always says "nothing new" is believed while the last head is fresh, then others are asked."""

    async def main() -> None:
        async def frozen(origin: Origin, request: web.Request) -> web.Response | None:
            if request.path == "/v1/head" and "after" in request.query:
                return web.Response(status=204)
            return None

        clock = [NOW]
        store = ShardStore(tmp_path / "o")
        async with serving(Origin(store)) as relay, serving(Origin(store)) as origin:
            manifest = await relay.publish(checkpoint(tmp_path / "1", 1), 1)
            relay.override = frozen
            async with fetching(tmp_path / "f", [relay.url], origin.url, now=lambda: clock[0]) as fetcher:
                await newest(fetcher)
                await origin.publish(checkpoint(tmp_path / "2", 2), 2, now=NOW + 500)
                assert await fetcher.head(after=1) is None and origin.count("/v1/head") == 0
                clock[0] = NOW + 601
                head = await fetcher.head(after=1)
                assert head is not None and head.version == 2
                assert head.name != manifest.name
                held = await fetcher.head(after=1, wait=20)  # answered at once with 204: not a long poll, ask another
                assert held is not None and held.version == 2
            async with fetching(tmp_path / "g", [relay.url], now=lambda: clock[0]) as fetcher:
                await refused(Reason.MANIFEST_EXPIRED, fetcher.head(after=1))

    asyncio.run(main())


def test_nothing_published_and_nobody_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            async with fetching(tmp_path / "f", [], origin.url) as fetcher:
                assert await fetcher.head() is None
            async with fetching(tmp_path / "f", ["http://127.0.0.1:1"]) as fetcher:
                with pytest.raises(FetchFailed) as caught:
                    await fetcher.head()
                assert list(caught.value.causes) == ["http://127.0.0.1:1"]

    asyncio.run(main())


# the folder


def test_interrupted_and_resumed(tmp_path: Path) -> None:
    """Cancelled while the last shard hangs: what is verified stays, nothing is visible, only the rest is fetched."""

    async def main() -> None:
        reached = asyncio.Event()

        async def hang(request: web.Request, data: bytes) -> web.StreamResponse | None:
            if request.path.endswith(last) and not reached.is_set():
                reached.set()
                await asyncio.sleep(3600)
            return None

        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            folder = checkpoint(tmp_path / "1", 1)
            manifest = await origin.publish(folder, 1)
            shards = list(dict.fromkeys(shards_of(manifest)))
            last = shards[-1].sha256
            origin.override = shard_override(hang)
            async with fetching(tmp_path / "f", [origin.url], concurrency=1) as fetcher:
                task = asyncio.create_task(fetcher.fetch(manifest))
                await reached.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert not (tmp_path / "f" / manifest.name).exists()
            origin.asked.clear()
            async with fetching(tmp_path / "f", [origin.url]) as fetcher:
                assert files_of(await fetcher.fetch(manifest)) == files_of(folder)
            assert [path for path in origin.asked if "shards" in path] == [f"/v1/shards/{last}"]

    asyncio.run(main())


def test_leftovers_of_a_killed_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            folder = checkpoint(tmp_path / "1", 1)
            manifest = await origin.publish(folder, 1)
            cache = tmp_path / "f"
            async with fetching(cache, [origin.url]) as fetcher:
                torn = cache / ".assembling-x"
                torn.mkdir()
                (torn / "model.safetensors").write_bytes(b"half")
                shards = list(dict.fromkeys(shards_of(manifest)))
                store = ShardStore(cache / ".shards")
                for shard in shards:
                    store.put(origin.store.path(shard.sha256).read_bytes())
                rotten = store.path(shards[0].sha256)
                rotten.write_bytes(flip(rotten.read_bytes()))
                store.path(shards[1].sha256).write_bytes(b"")
                assert files_of(await fetcher.fetch(manifest)) == files_of(folder)
                assert origin.count("/v1/shards") == 2 and not torn.exists()

    asyncio.run(main())


def test_a_damaged_folder_is_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            folder = checkpoint(tmp_path / "1", 1)
            manifest = await origin.publish(folder, 1)
            async with fetching(tmp_path / "f", [origin.url]) as fetcher:
                path = await fetcher.fetch(manifest)
                for damage in (
                    lambda: (path / "config.json").write_text("{}"),
                    lambda: (path / "model.safetensors").unlink(),
                    lambda: (path / "extra.py").write_text("evil"),
                ):
                    damage()
                    assert files_of(await fetcher.fetch(manifest)) == files_of(folder)

    asyncio.run(main())


def test_the_folder_appears_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the folder can be seen, it is whole: looked at before every write and every rename of the assembly."""
    store, seen = ShardStore(tmp_path / "o"), []
    folder = checkpoint(tmp_path / "1", 1)
    manifest = publish_folder(folder, store, 1)
    target = tmp_path / "f" / manifest.name
    (tmp_path / "f").mkdir()
    import os as module

    for name in ("fsync", "replace"):
        original = getattr(module, name)

        def watched(*args: Any, original: Any = original) -> Any:
            seen.append(target.exists())
            result = original(*args)
            seen.append(not target.exists() or files_of(target) == files_of(folder))
            return result

        monkeypatch.setattr(module, name, watched)
    assert assemble(manifest, store, tmp_path / "f") == target
    assert len(seen) >= 12 and all(seen[1::2]) and not any(seen[:-2:2])


def test_tensors_are_compared_with_the_manifest(tmp_path: Path) -> None:
    """A manifest whose own shards are right but whose digest is not: the publisher's fault, no relay's."""

    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            manifest = await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            wrong = manifest.model_copy(update={"tensors_digest": "0" * 64, "weights_digest": "0" * 64})
            signed = sign_document(MANIFEST, wrong, KEY)
            origin.store.write_manifest(wrong.name, canonical_json(signed.model_dump(mode="json")))
            async with fetching(tmp_path / "f", [origin.url]) as fetcher:
                opened = await fetcher.manifest(wrong.name)
                await refused(Reason.TENSORS_MISMATCH, fetcher.fetch(opened))
                assert fetcher.dropped == frozenset()
                assert not any(path.name.startswith((".ass", "v")) for path in (tmp_path / "f").iterdir())

    asyncio.run(main())


def test_adapter_and_base(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            base = publish_folder(checkpoint(tmp_path / "0", 0), origin.store, 0)
            adapter = await origin.publish(checkpoint(tmp_path / "1", 1, rows=2), 1, base=base)
            async with fetching(tmp_path / "f", [origin.url]) as fetcher:
                assert await fetcher.chain(adapter.name) == [base, adapter]
                for manifest in (base, adapter):
                    await fetcher.fetch(manifest)
                assert files_of(tmp_path / "f" / adapter.name) == files_of(tmp_path / "1")
            forged = adapter.model_copy(update={"weights_digest": adapter.name[-8:] + "0" * 56})
            signed = canonical_json(sign_document(MANIFEST, forged, KEY).model_dump(mode="json"))
            origin.store.write_manifest(adapter.name, signed, replace=True)
            async with fetching(tmp_path / "f", [origin.url]) as fetcher:
                await refused(Reason.MANIFEST_INVALID, fetcher.chain(adapter.name))

    asyncio.run(main())


@pytest.mark.parametrize("where", ["writer", "assembly"])
def test_a_full_disk_is_nobodys_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    async def main() -> None:
        def full(*args: Any, **kwargs: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            manifest = await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            with monkeypatch.context() as patch:
                if where == "writer":
                    patch.setattr("shardcast.store.ShardWriter.write", full)
                else:
                    patch.setattr("shardcast.assemble._write", full)
                async with fetching(tmp_path / "f", [origin.url]) as fetcher:
                    with pytest.raises(LocalFailed) as caught:
                        await fetcher.fetch(manifest)
                    assert caught.value.error.errno == errno.ENOSPC and fetcher.dropped == frozenset()
                    assert fetcher._sources.relays[origin.url].success == 1.0
            assert [p.name for p in (tmp_path / "f").iterdir() if p.name.startswith((".ass", "v"))] == []
            async with fetching(tmp_path / "f", [origin.url]) as fetcher:
                await fetcher.fetch(manifest)

    asyncio.run(main())


def test_too_little_room_is_seen_before_fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            manifest = await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
            async with fetching(tmp_path / "f", [origin.url]) as fetcher:
                with pytest.raises(LocalFailed):
                    await fetcher.fetch(manifest)
            async with fetching(tmp_path / "f", [origin.url], max_bytes=1000) as fetcher:
                await refused(Reason.MANIFEST_INVALID, fetcher.fetch(manifest))
            assert origin.count("/v1/shards") == 0

    asyncio.run(main())


def test_two_fetchers_share_a_folder(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            folder = checkpoint(tmp_path / "1", 1)
            manifest = await origin.publish(folder, 1)
            async with fetching(tmp_path / "f", [origin.url]) as a, fetching(tmp_path / "f", [origin.url]) as b:
                first, second = await asyncio.gather(a.fetch(manifest), b.fetch(manifest))
                assert first == second and files_of(first) == files_of(folder)
                assert origin.count("/v1/shards") == len(set(shards_of(manifest)))  # fetched once, for both

    asyncio.run(main())


def test_synchronous_facade(tmp_path: Path) -> None:
    """Used from plain threads; `close` ends a call that is waiting."""
    ready, over = threading.Event(), threading.Event()
    urls: list[str] = []

    async def origin_thread() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            urls.append(origin.url)
            ready.set()
            await asyncio.to_thread(over.wait)

    server = threading.Thread(target=lambda: asyncio.run(origin_thread()))
    server.start()
    try:
        assert ready.wait(60)
        outcome: list[BaseException] = []
        with SyncFetcher(fetching(tmp_path / "f", [], urls[0])) as fetcher:
            fetcher.set_relays([urls[0]])
            head = fetcher.head()
            assert head is not None and head.run_id == RUN_ID
            (manifest,) = fetcher.chain(head.name, head.manifest_sha256)
            assert fetcher.manifest(head.name) == manifest
            assert files_of(fetcher.fetch(manifest)) == files_of(tmp_path / "1")

            def wait() -> None:
                try:
                    fetcher.head(after=1, wait=20)
                except FetchFailed as error:
                    outcome.append(error)

            waiter = threading.Thread(target=wait)
            waiter.start()
            fetcher.close()
            waiter.join(60)
            assert not waiter.is_alive() and len(outcome) == 1
            with pytest.raises(FetchFailed, match="closed"):
                fetcher.head()
    finally:
        over.set()
        server.join()

"""A relay between a real origin and real clients: what becomes visible, when, and what never does."""

import asyncio
import errno
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from shardcast_net import (
    KEY,
    NOW,
    OTHER_KEY,
    RUN_ID,
    Origin,
    RunningRelay,
    checkpoint,
    flip,
    head_of,
    publish_folder,
    relaying,
    serving,
    until,
)

from protocol.manifest import Manifest
from shardcast.store import ShardStore
from shardcast.trust import open_head, shards_of


def whole(relay: RunningRelay, manifest: Manifest) -> bool:
    return all(relay.store.size(s.sha256) == s.size for s in shards_of(manifest))


def version_of(relay: RunningRelay) -> int | None:
    return relay.state.version


def test_mirrors_and_follows(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            first = await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            async with relaying(tmp_path / "r", [origin.url]) as relay:
                await until(lambda: version_of(relay) == 1)
                assert whole(relay, first) and relay.state.head == origin.head
                second = await origin.publish(checkpoint(tmp_path / "2", 2), 2)
                await until(lambda: version_of(relay) == 2)
                assert whole(relay, second) and relay.store.names() == [first.name, second.name]
                assert relay.store.manifest(second.name) == origin.store.manifest(second.name)
                assert relay.store.head() == origin.head

    asyncio.run(main())


def test_waits_for_the_first_version(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            async with relaying(tmp_path / "r", [origin.url]) as relay:
                await until(lambda: origin.count("/v1/head") > 0)
                assert relay.state.head is None
                await origin.publish(checkpoint(tmp_path / "0", 0), 0)
                await until(lambda: version_of(relay) == 0)

    asyncio.run(main())


def test_chain_of_relays_passes_on_without_polling_delay(tmp_path: Path) -> None:
    """Every relay of the chain is inside a long poll of 20 s when the version appears; one request each tells them."""

    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            async with (
                relaying(tmp_path / "a", [origin.url]) as a,
                relaying(tmp_path / "b", [a.url]) as b,
                relaying(tmp_path / "c", [b.url]) as c,
            ):
                await until(lambda: version_of(c) == 1)
                asked = origin.count("/v1/head")
                last = await origin.publish(checkpoint(tmp_path / "2", 2), 2)
                await until(lambda: version_of(c) == 2)
                assert whole(c, last) and origin.count("/v1/head") <= asked + 2
                assert origin.count("/v1/shards") == len(set(origin.store.shards()))

    asyncio.run(main())


def test_nothing_is_visible_before_it_is_whole(tmp_path: Path) -> None:
    async def main() -> None:
        gate, blocked = asyncio.Event(), asyncio.Event()

        async def hold_one_shard(origin: Origin, request: web.Request) -> None:
            if request.path.endswith(last_shard):
                blocked.set()
                await gate.wait()

        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            first = await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            second = publish_folder(checkpoint(tmp_path / "2", 2), origin.store, 2)
            last_shard = list(shards_of(second))[-1].sha256
            origin.override = hold_one_shard  # type: ignore[assignment]
            async with relaying(tmp_path / "r", [origin.url]) as relay, aiohttp.ClientSession() as session:
                await until(lambda: version_of(relay) == 1)
                await origin.announce(head_of(origin.store, second.name), 2)
                await blocked.wait()
                await until(lambda: len(list(relay.store.shards())) > len(set(shards_of(first))))
                assert version_of(relay) == 1 and relay.store.names() == [first.name]
                for path in (f"/v1/shards/{last_shard}", f"/v1/manifests/{second.name}"):
                    async with session.get(relay.url + path) as response:
                        assert response.status == 503 and response.headers["Retry-After"]
                gate.set()
                await until(lambda: version_of(relay) == 2)
                for path in (f"/v1/shards/{last_shard}", f"/v1/manifests/{second.name}"):
                    async with session.get(relay.url + path) as response:
                        assert response.status == 200

    asyncio.run(main())


def test_keeps_the_last_versions_and_their_bases(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            async with relaying(tmp_path / "r", [origin.url], keep=2) as relay:
                base = await origin.publish(checkpoint(tmp_path / "0", 0), 0)
                adapters = []
                for version in range(1, 5):
                    folder = checkpoint(tmp_path / str(version), version, rows=2)
                    adapters.append(await origin.publish(folder, version, base=base))
                    await until(lambda: relay.store.head() == origin.head)
                kept = [base, *adapters[2:]]
                await until(lambda: relay.store.names() == [m.name for m in kept])
                await until(lambda: set(relay.store.shards()) == {s.sha256 for m in kept for s in shards_of(m)})
                full = []
                for version in (5, 6):
                    full.append(await origin.publish(checkpoint(tmp_path / f"f{version}", version), version))
                    await until(lambda: relay.store.head() == origin.head)
                await until(lambda: relay.store.names() == [m.name for m in full])  # the base is needed no more

    asyncio.run(main())


def test_an_adapter_brings_its_base(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            base = publish_folder(checkpoint(tmp_path / "0", 0), origin.store, 0)
            adapter = await origin.publish(checkpoint(tmp_path / "1", 1, rows=2), 1, base=base)
            async with relaying(tmp_path / "r", [origin.url], keep=1) as relay:
                await until(lambda: version_of(relay) == 1)
                assert whole(relay, base) and whole(relay, adapter)
                assert relay.store.names() == [base.name, adapter.name]

    asyncio.run(main())


def test_restarts_from_its_folder_without_upstream(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            manifest = await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            async with relaying(tmp_path / "r", [origin.url]) as relay:
                await until(lambda: version_of(relay) == 1)
        async with relaying(tmp_path / "r", [origin.url]) as relay:  # the origin is gone
            await until(lambda: version_of(relay) == 1)
            assert whole(relay, manifest) and relay.state.head == origin.head

    asyncio.run(main())


def test_resumes_and_fetches_only_what_is_missing(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            manifest = await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            shards = list(dict.fromkeys(shards_of(manifest)))
            half = ShardStore(tmp_path / "r")
            for shard in shards[:5]:
                half.put(origin.store.path(shard.sha256).read_bytes())
            half.path(shards[0].sha256).write_bytes(b"torn")
            async with relaying(tmp_path / "r", [origin.url]) as relay:
                await until(lambda: version_of(relay) == 1)
                assert whole(relay, manifest) and origin.count("/v1/shards") == len(shards) - 4

    asyncio.run(main())


@pytest.mark.parametrize("lost", ["base", "adapter"])
def test_a_restored_folder_that_lost_a_shard_is_not_visible_until_mended(tmp_path: Path, lost: str) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            base = publish_folder(checkpoint(tmp_path / "0", 0), origin.store, 0)
            adapter = await origin.publish(checkpoint(tmp_path / "1", 1, rows=2), 1, base=base)
            manifest = {"base": base, "adapter": adapter}[lost]
            async with relaying(tmp_path / "r", [origin.url]) as relay:
                await until(lambda: version_of(relay) == 1)
            relay.store.delete(list(shards_of(manifest))[-1].sha256)
            async with relaying(tmp_path / "r", ["http://127.0.0.1:1"]) as relay:
                await asyncio.to_thread(relay.follower.restore)
                assert version_of(relay) is None
            async with relaying(tmp_path / "r", [origin.url]) as relay:
                await until(lambda: version_of(relay) == 1)
                assert whole(relay, manifest)

    asyncio.run(main())


def test_keeps_serving_while_upstream_is_down_and_catches_up(tmp_path: Path) -> None:
    async def main() -> None:
        down = asyncio.Event()

        async def refuse(origin: Origin, request: web.Request) -> web.Response | None:
            return web.Response(status=500) if down.is_set() else None

        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            origin.override = refuse
            await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            async with relaying(tmp_path / "r", [origin.url], wait=0.05) as relay:
                await until(lambda: version_of(relay) == 1)
                down.set()
                asked = origin.count("/v1/head")
                await until(lambda: origin.count("/v1/head") > asked + 2)
                async with aiohttp.ClientSession() as session, session.get(relay.url + "/v1/head") as response:
                    assert (response.status, await response.read()) == (200, origin.head)
                down.clear()
                await origin.publish(checkpoint(tmp_path / "2", 2), 2)
                await until(lambda: version_of(relay) == 2)

    asyncio.run(main())


def test_a_renewed_head_is_passed_on(tmp_path: Path) -> None:
    async def main() -> None:
        clock = [NOW]
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            manifest = await origin.publish(checkpoint(tmp_path / "1", 1), 1, life=600)
            async with relaying(tmp_path / "r", [origin.url], wait=0.1, now=lambda: clock[0]) as relay:
                await until(lambda: version_of(relay) == 1)
                clock[0] = NOW + 300
                renewed = head_of(origin.store, manifest.name, now=clock[0])
                await origin.announce(renewed, 1)
                await until(lambda: relay.state.head == renewed)
                assert open_head(renewed, KEY.id, RUN_ID).expires > NOW + 600
                shards = origin.count("/v1/shards")
                assert shards == len(set(shards_of(manifest)))  # nothing was fetched for it

    asyncio.run(main())


def test_lying_upstream_is_replaced_by_the_other(tmp_path: Path) -> None:
    async def main() -> None:
        async def corrupt(origin: Origin, request: web.Request) -> web.Response | None:
            if request.path.startswith("/v1/shards/"):
                return web.Response(body=flip(origin.store.path(request.path[11:]).read_bytes()))
            return None

        store = ShardStore(tmp_path / "o")
        async with serving(Origin(store)) as liar, serving(Origin(store)) as honest:
            liar.override = corrupt
            manifest = await liar.publish(checkpoint(tmp_path / "1", 1), 1)
            await honest.announce(head_of(store, manifest.name), 1)
            async with relaying(tmp_path / "r", [liar.url, honest.url]) as relay:
                await until(lambda: version_of(relay) == 1)
                assert whole(relay, manifest)
                for shard in shards_of(manifest):
                    assert relay.store.path(shard.sha256).read_bytes() == store.path(shard.sha256).read_bytes()
                assert liar.count("/v1/shards") <= 4  # one per stream at most, then it was dropped

    asyncio.run(main())


@pytest.mark.parametrize("attack", ["wrong run", "wrong key", "rollback", "expired", "garbage", "endless", "manifest"])
def test_bad_heads_change_nothing(tmp_path: Path, attack: str) -> None:
    """The relay sees the attack several times, keeps what it has, and takes the next good version."""

    async def main() -> None:
        store = ShardStore(tmp_path / "o")
        async with serving(Origin(store)) as origin:
            good = await origin.publish(checkpoint(tmp_path / "5", 5), 5)
            evil = ShardStore(tmp_path / "evil")
            spoiled = b"{}"
            if attack in ("wrong run", "wrong key"):
                key = OTHER_KEY if attack == "wrong key" else KEY
                m = publish_folder(checkpoint(tmp_path / "e"), evil, 9, key=key, run_id="x" if key is KEY else RUN_ID)
                spoiled = head_of(evil, m.name, key=key)
            elif attack == "rollback":
                m = publish_folder(checkpoint(tmp_path / "e"), store, 4)
                spoiled = head_of(store, m.name)
            elif attack == "expired":
                m = publish_folder(checkpoint(tmp_path / "e"), store, 9)
                spoiled = head_of(store, m.name, now=NOW - 601)
            elif attack == "manifest":
                m = publish_folder(checkpoint(tmp_path / "e"), evil, 9)
                spoiled = head_of(evil, m.name)  # a good head, but the manifest behind it is another's

            async def attacker(origin: Origin, request: web.Request) -> web.StreamResponse | None:
                if attack == "manifest" and request.path.startswith("/v1/manifests/v9"):
                    return web.Response(body=store.manifest(good.name))
                if request.path != "/v1/head":
                    return None
                if attack != "endless":
                    return web.Response(body=spoiled)
                response = web.StreamResponse()
                await response.prepare(request)
                while True:
                    await response.write(bytes(1 << 16))

            async with relaying(tmp_path / "r", [origin.url], wait=0.05) as relay:
                await until(lambda: version_of(relay) == 5)
                origin.override = attacker
                asked = len(origin.asked)
                await until(lambda: len(origin.asked) > asked + 4)
                assert version_of(relay) == 5 and relay.store.names() == [good.name]
                assert relay.state.head == origin.head == relay.store.head()
                origin.override = None
                await origin.publish(checkpoint(tmp_path / "10", 10), 10)
                await until(lambda: version_of(relay) == 10)

    asyncio.run(main())


def test_a_full_disk_is_nobodys_fault_and_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        full = asyncio.Event()
        writer = ShardStore.writer

        def write(self: ShardStore, shard):  # type: ignore[no-untyped-def]
            if full.is_set():
                raise OSError(errno.ENOSPC, "full")
            return writer(self, shard)

        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            manifest = await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            monkeypatch.setattr(ShardStore, "writer", write)
            full.set()
            async with relaying(tmp_path / "r", [origin.url]) as relay:
                await until(lambda: origin.count("/v1/shards") > 3)
                assert version_of(relay) is None
                full.clear()
                await until(lambda: version_of(relay) == 1)
                assert whole(relay, manifest) and relay.follower._downloader.dropped == frozenset()

    asyncio.run(main())


def test_a_checkpoint_that_is_too_large_is_left_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(Origin(ShardStore(tmp_path / "o"))) as origin:
            await origin.publish(checkpoint(tmp_path / "1", 1), 1)
            async with relaying(tmp_path / "r", [origin.url]) as relay:
                relay.follower._max_bytes = 1000
                await until(lambda: origin.count("/v1/manifests") > 1)
                assert version_of(relay) is None and origin.count("/v1/shards") == 0

    asyncio.run(main())

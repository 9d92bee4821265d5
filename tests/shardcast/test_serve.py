"""The relay's HTTP edge, over real sockets: long poll, ranges, path tricks, bounds."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from shardcast_net import checkpoint, head_of, publish_folder

from protocol.identity import Key
from protocol.messages import Problem, RelayChallenge
from protocol.signed import open_document
from shardcast.serve import RelayServer, ServeLimits, ServeState, make_app
from shardcast.store import ShardStore

RELAY_KEY = Key.from_seed(b"\x03" * 32)


@dataclass
class Served:
    store: ShardStore
    state: ServeState
    url: str
    port: int
    name: str
    session: aiohttp.ClientSession

    async def get(self, path: str, **kwargs) -> tuple[int, bytes, "aiohttp.typedefs.LooseHeaders"]:  # type: ignore[no-untyped-def]
        async with self.session.get(self.url + path, **kwargs) as response:
            return response.status, await response.read(), response.headers

    async def raw(self, data: bytes) -> bytes:
        """Send bytes as they are, read until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return answer


@asynccontextmanager
async def served(folder: Path, limits: ServeLimits | None = None) -> AsyncIterator[Served]:
    store, state = ShardStore(folder / "store"), ServeState(key=RELAY_KEY, url="http://relay.example")
    manifest = publish_folder(checkpoint(folder / "c"), store, 5)
    state.publish(head_of(store, manifest.name), 5)
    server = RelayServer(make_app(store, state, limits))
    await server.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            yield Served(store, state, server.url, int(server.url.rsplit(":", 1)[1]), manifest.name, session)
    finally:
        await server.stop()


def over(folder: Path, test: Callable[[Served], Awaitable[None]], limits: ServeLimits | None = None) -> None:
    async def main() -> None:
        async with served(folder, limits) as relay:
            await test(relay)

    asyncio.run(main())


def code_of(body: bytes) -> str:
    return Problem.model_validate_json(body).code.value


def test_head_manifest_shard_health(tmp_path: Path) -> None:
    async def test(relay: Served) -> None:
        for path in ("/v1/head", "/v1/head?after=4", "/v1/head?wait=20", "/v1/head?after=0&wait=20.0"):
            status, body, headers = await relay.get(path)
            assert (status, body, headers["Cache-Control"]) == (200, relay.state.head, "no-store")
        assert (await relay.get("/v1/head?after=5"))[0] == 204
        status, body, headers = await relay.get(f"/v1/manifests/{relay.name}")
        assert (status, body) == (200, relay.store.manifest(relay.name)) and "immutable" in headers["Cache-Control"]
        for sha256 in relay.store.shards():
            status, body, _ = await relay.get(f"/v1/shards/{sha256}")
            assert (status, body) == (200, relay.store.path(sha256).read_bytes())
        status, body, _ = await relay.get("/healthz")
        assert (status, json.loads(body)) == (200, {"status": "ok", "version": 5})

    over(tmp_path, test)


def test_ranges(tmp_path: Path) -> None:
    async def test(relay: Served) -> None:
        sha256 = max(relay.store.shards(), key=lambda s: relay.store.size(s) or 0)
        data = relay.store.path(sha256).read_bytes()
        for text, piece in (("bytes=10-19", data[10:20]), ("bytes=4000-", data[4000:]), ("bytes=-7", data[-7:])):
            status, body, headers = await relay.get(f"/v1/shards/{sha256}", headers={"Range": text})
            assert (status, body) == (206, piece) and headers["Content-Range"].endswith(f"/{len(data)}")
        assert (await relay.get(f"/v1/shards/{sha256}", headers={"Range": "bytes=9999999-"}))[0] == 416

    over(tmp_path, test)


def test_long_poll_wakes_at_once(tmp_path: Path) -> None:
    """The waiting request ends with the publication, not with its time limit: it is awaited with the limit far away."""

    async def test(relay: Served) -> None:
        waiting = [asyncio.create_task(relay.get("/v1/head?after=5&wait=20")) for _ in range(3)]
        held = asyncio.create_task(relay.get("/v1/head?after=6&wait=20"))
        while not all(task.done() for task in waiting):
            await asyncio.sleep(0.02)  # until all are surely waiting, then publish; renewals of version 5 wake nobody
            assert not any(task.done() for task in waiting)
            relay.state.publish(b"renewed", 5)
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in waiting)
            relay.state.publish(b"six", 6)
            assert {(status, body) for status, body, _ in await asyncio.gather(*waiting)} == {(200, b"six")}
        assert not held.done()
        relay.state.publish(b"seven", 7)
        assert (await held)[1] == b"seven"

    over(tmp_path, test)


def test_nothing_published_yet(tmp_path: Path) -> None:
    async def test(relay: Served) -> None:
        relay.state.head = relay.state.version = None
        status, body, headers = await relay.get("/v1/head")
        assert (status, code_of(body), headers["Retry-After"]) == (503, "unavailable", "1")
        assert (await relay.get("/v1/head?after=3"))[0] == 204
        waiting = asyncio.create_task(relay.get("/v1/head?wait=20"))
        await asyncio.sleep(0.02)
        relay.state.publish(b"zero", 0)
        assert (await waiting)[:2] == (200, b"zero")

    over(tmp_path, test)


def test_known_but_not_here_and_unknown(tmp_path: Path) -> None:
    async def test(relay: Served) -> None:
        relay.state.expect(["v6-01234567"], ["a" * 64])
        for path, expected in {
            "/v1/shards/" + "a" * 64: (503, "unavailable"),
            "/v1/shards/" + "b" * 64: (404, "not_found"),
            "/v1/manifests/v6-01234567": (503, "unavailable"),
            "/v1/manifests/v7-01234567": (404, "not_found"),
        }.items():
            status, body, headers = await relay.get(path)
            assert (status, code_of(body)) == expected and headers["Content-Type"] == "application/problem+json"
            assert ("Retry-After" in headers) == (status == 503)

    over(tmp_path, test)


TRICKS = [
    "..", "../pin.json", "%2e%2e%2fpin.json", "%2e%2e/pin.json", "..%2f..%2f..%2fetc%2fpasswd", "/etc/passwd",
    "%2fetc%2fpasswd", "....//....//etc/passwd", "%00", "a" * 64 + "%00", "A" * 64, "a" * 64 + "/", "a" * 64 + "%0a",
    "..%5c..%5cpin.json", "%c0%ae%c0%ae%c0%af", "aa/bb/" + "a" * 64, "%252e%252e%252fpin.json", "~root", "*", "",
    "v5-01234567%0a", "v5-01234567/..", "v5-01234567.json", ".", "%2e", "head.json", "..;/pin.json", "?x=../pin.json",
]  # fmt: skip


@pytest.mark.parametrize("prefix", ["/v1/shards/", "/v1/manifests/", "/v1/head/", "/v1/relay/", "/healthz/", "/", "//"])
def test_path_tricks(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "pin.json").write_text("secret")

    async def test(relay: Served) -> None:
        for trick in TRICKS:
            request = f"GET {prefix}{trick} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
            answer = await relay.raw(request)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.split(b" ")[1] in (b"404", b"400"), (prefix, trick, answer)
            assert b"secret" not in body and b"root:" not in body
        absolute = await relay.raw(b"GET file:///etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert absolute.split(b" ")[1] in (b"404", b"400") and b"root:" not in absolute

    over(tmp_path, test)


def test_a_symbolic_link_or_folder_in_the_store_is_no_shard_name(tmp_path: Path) -> None:
    async def test(relay: Served) -> None:
        (relay.store.root / "shards" / "link").symlink_to("/etc/passwd")
        assert (await relay.get("/v1/shards/link"))[0] == 404
        assert (await relay.get("/v1/shards/"))[0] == 404
        assert (await relay.get("/v1/shards"))[0] == 404

    over(tmp_path, test)


@pytest.mark.parametrize(
    "query",
    ["after=-1", "after=x", "after=1&after=2", "after=1e3", "after=", "after=" + "9" * 16, "wait=21", "wait=nan",
     "wait=inf", "wait=-1", "after=1&wait=20.000001", "after=٣"],
)  # fmt: skip
def test_malformed_queries(tmp_path: Path, query: str) -> None:
    async def test(relay: Served) -> None:
        status, body, _ = await relay.get("/v1/head?" + query)
        assert (status, code_of(body)) == (400, "malformed_request")

    over(tmp_path, test)


def test_other_methods_and_bodies(tmp_path: Path) -> None:
    async def test(relay: Served) -> None:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            async with relay.session.request(method, relay.url + "/v1/head") as response:
                assert (response.status, code_of(await response.read())) == (405, "method_not_allowed")
                assert "GET" in response.headers["Allow"]
        async with relay.session.get(relay.url + "/v1/head", data=b"x" * 100) as response:
            assert (response.status, code_of(await response.read())) == (413, "body_too_large")
        endless = b"GET /v1/head HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n" + b"x" * 1000
        assert b" 413 " in (await relay.raw(endless)).split(b"\r\n")[0]  # and the server closed: `raw` returned

    over(tmp_path, test)


def test_relay_proves_its_key(tmp_path: Path) -> None:
    async def test(relay: Served) -> None:
        nonce = "0123456789abcdef"
        status, body, _ = await relay.get(f"/v1/relay?nonce={nonce}")
        challenge = open_document(body, "relay", RelayChallenge, RELAY_KEY.id)
        assert status == 200
        assert challenge == RelayChallenge(relay_id=RELAY_KEY.id, url="http://relay.example", nonce=nonce)
        for bad in ("", "nonce=short", f"nonce={nonce}&nonce={nonce}", "nonce=" + "a" * 65, "nonce=%0a" + "a" * 20):
            status, body, _ = await relay.get(f"/v1/relay?{bad}")
            assert (status, code_of(body)) == (400, "malformed_request")
        relay.state.key = None
        assert (await relay.get(f"/v1/relay?nonce={nonce}"))[0] == 404

    over(tmp_path, test)


def test_connections_are_bounded(tmp_path: Path) -> None:
    """With three connections that have each had an answer, the fourth is closed unanswered; a freed place is usable."""

    async def test(relay: Served) -> None:
        request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        held = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            writer.write(request)
            assert b"200" in await reader.readline()
            held.append(writer)
        try:
            assert await relay.raw(request) == b""
        except ConnectionError:
            pass  # closed before the request was read
        held[0].close()
        await held[0].wait_closed()
        answer = b""
        while not answer:  # until the server has noticed
            try:
                answer = await relay.raw(request.replace(b"Host: x", b"Host: x\r\nConnection: close"))
            except ConnectionError:
                continue
        assert b" 200 " in answer

    over(tmp_path, test, ServeLimits(connections=3))


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Sl"])
def test_unfinished_headers_are_cut_off(tmp_path: Path, sent: bytes) -> None:
    async def test(relay: Served) -> None:
        assert b"200" not in await relay.raw(sent)  # returns when the server closes
        assert (await relay.get("/healthz"))[0] == 200

    over(tmp_path, test, ServeLimits(header_seconds=0.2))


def test_a_reader_that_stops_reading_is_cut_off(tmp_path: Path) -> None:
    async def test(relay: Served) -> None:
        shard = relay.store.put(bytes(32 << 20))
        reader, writer = await asyncio.open_connection("127.0.0.1", relay.port, limit=1024)
        writer.write(f"GET /v1/shards/{shard.sha256} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert b"200" in await reader.readline()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(0.5)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        received = 0
        try:
            while data := await asyncio.wait_for(reader.read(1 << 20), 30):
                received += len(data)
        except ConnectionError:
            pass
        assert received < shard.size

    over(tmp_path, test, ServeLimits(grace=0.1, minimum_speed=1e9))


def test_storage_trouble_is_a_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(relay: Served) -> None:
        def broken(self: ShardStore, sha256: str) -> int:
            raise PermissionError("no")

        monkeypatch.setattr(ShardStore, "size", broken)
        status, body, _ = await relay.get("/v1/shards/" + "a" * 64)
        assert (status, code_of(body)) == (503, "unavailable") and b"no" not in body

    over(tmp_path, test)

"""The node's client against servers that lie: what is not signed by the pinned key ends nothing and fills nothing."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from node import client as client_module
from node.client import Client, Unreachable
from protocol.identity import Key
from protocol.reasons import Reason, Refusal
from tests.api.world import ABOUT, Node, World

pytestmark = pytest.mark.network

Reply = Callable[[httpx.Request], httpx.Response]


def lied_to(node: Node, reply: Reply) -> Client:
    """The node's client behind somebody who answers in the coordinator's place."""
    honest = node.client
    client = Client(honest.url, node.key)
    client.run_key, client.run_id = honest.run_key, honest.run_id
    client._http.close()
    client._http = httpx.Client(transport=httpx.MockTransport(reply), timeout=5)
    return client


def genuine(node: Node, request: httpx.Request) -> httpx.Response:
    """What the coordinator says to this request."""
    with httpx.Client(trust_env=False) as http:
        response = http.send(request)
        return httpx.Response(response.status_code, headers=response.headers, content=response.read())


def test_an_honest_answer_goes_through(node: Node) -> None:
    assert lied_to(node, lambda request: genuine(node, request)).account() == node.client.account()


@pytest.mark.parametrize("code", [Reason.NODE_BANNED, Reason.RUN_ENDED, Reason.NOT_ON_ALLOWLIST, Reason.QUEUE_FULL])
def test_a_refusal_that_is_not_signed_is_not_believed(node: Node, code: Reason) -> None:
    """Whoever sits on the path could end a worker with one line otherwise."""
    problem = {"type": "about:blank", "title": "no", "status": 403, "detail": "go away", "code": code.value}
    with pytest.raises(Unreachable, match="not signed"):
        lied_to(node, lambda request: httpx.Response(403, json=problem)).register(ABOUT)


def test_a_signed_refusal_is_believed(world: World, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="not_on_allowlist"):
        world.client(world.key(), tmp_path).register(ABOUT)


def test_an_answer_that_is_not_signed_is_a_hard_stop(node: Node) -> None:
    def strip(request: httpx.Request) -> httpx.Response:
        response = genuine(node, request)
        for name in ("signature", "signature-input"):
            del response.headers[name]
        return response

    with pytest.raises(Refusal, match="run_key_changed"):
        lied_to(node, strip).account()


@pytest.mark.parametrize("part", ["body", "status", "another request"])
def test_an_answer_to_something_else_is_a_hard_stop(node: Node, part: str) -> None:
    last: list[httpx.Response] = []

    def lie(request: httpx.Request) -> httpx.Response:
        response = genuine(node, request)
        last.append(response)
        if part == "body":
            return httpx.Response(200, headers=response.headers, content=response.content.replace(b"active", b"banned"))
        if part == "status":
            return httpx.Response(201, headers=response.headers, content=response.content)
        return last[0]

    client = lied_to(node, lie)
    if part == "another request":
        client.account()
    with pytest.raises(Refusal, match="run_key_changed"):
        client.account()


def test_an_endless_answer_is_cut_off(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_ANSWER", 1 << 16)
    given = 0

    def endless(request: httpx.Request) -> httpx.Response:
        def pieces() -> object:
            nonlocal given
            while given < 1 << 24:
                given += 1 << 12
                yield bytes(1 << 12)

        return httpx.Response(200, content=pieces())  # type: ignore[arg-type]

    with pytest.raises(Unreachable, match="too large"):
        lied_to(node, endless).account()
    assert given <= 1 << 17


def test_a_compressed_answer_is_not_unpacked(node: Node) -> None:
    asked: list[str] = []

    def bomb(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["accept-encoding"])
        content = gzip.compress(bytes(1 << 20))
        return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(content))

    with pytest.raises(Unreachable, match="compressed"):
        lied_to(node, bomb).account()
    assert asked == ["identity"]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("", None), ("-1", None), ("1e3", None), ("²", None), ("9" * 400, None), ("Wed, 21 Oct 2015", None)],
)
def test_a_pause_is_a_number_of_seconds_or_nothing(header: str, seconds: float | None) -> None:
    problem = {"type": "t", "title": "t", "status": 429, "detail": "d", "code": "queue_full"}
    headers = httpx.Headers([(b"retry-after", header.encode("latin-1"))])
    refusal = client_module._refusal(httpx.Response(429, json=problem, headers=headers))
    assert isinstance(refusal, Refusal) and refusal.retry_after == seconds


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"code": "queue_full"}', b"\xff", b"[" * 50_000])
def test_an_answer_that_is_none_is_tried_again(node: Node, body: bytes) -> None:
    for status in (200, 302, 404, 500):
        client = Client(node.client.url, node.key)
        client._http = httpx.Client(transport=httpx.MockTransport(lambda _, s=status: httpx.Response(s, content=body)))
        with pytest.raises(Unreachable):
            client.connect(node.client.url, Path("never written"))


def test_no_redirect_is_followed(node: Node) -> None:
    asked: list[str] = []

    def elsewhere(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(307, headers={"location": "http://elsewhere.example/"})

    client = Client(node.client.url, node.key)
    client._http = httpx.Client(
        transport=httpx.MockTransport(elsewhere), follow_redirects=node.client._http.follow_redirects
    )
    client.run_key, client.run_id = node.client.run_key, node.client.run_id
    with pytest.raises((Refusal, Unreachable)):
        client.account()
    assert len(asked) == 1


def test_pins(world: World, tmp_path: Path) -> None:
    key, other = world.key(), Key.generate()
    pin = tmp_path / "pin"
    for url in (f"{world.url}#run={other.id}", f"{world.url}#run={'00' * 32}", f"{world.url}#run=x"):
        with pytest.raises(Refusal):
            Client(world.url, key).connect(url, pin)
        assert not pin.exists()
    Client(world.url, key).connect(world.url, pin)  # first use, allowed on loopback
    assert pin.read_text().strip() == world.run.key.id
    pin.write_text(other.id + "\n")
    for url in (world.url, f"{world.url}#run={world.run.key.id}"):
        with pytest.raises(Refusal, match="run_key_changed"):
            Client(world.url, key).connect(url, pin)
    said = world.http.get(f"{world.url}/v1/run")
    for url in ("http://10.0.0.1", "http://coordinator.example"):
        plain = Client(url, key)
        plain._http = httpx.Client(
            transport=httpx.MockTransport(lambda _: httpx.Response(200, headers=said.headers, content=said.content))
        )
        with pytest.raises(Refusal, match="must be given"):
            plain.connect(url, tmp_path / "none")
        assert not (tmp_path / "none").exists()
        plain.connect(f"{url}#run={world.run.key.id}", tmp_path / "none")
        (tmp_path / "none").unlink()

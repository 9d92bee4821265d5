"""Below the routes: bodies that never end, heads that are none, methods and paths that do not exist."""

from __future__ import annotations

import json
import secrets
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from coordinator.api import edge
from protocol.completion import CONTENT_TYPE, MAX_BATCH_BYTES, encode_batch
from protocol.reasons import Reason
from protocol.signatures import sign_request
from tests.api.world import Node, World, check_problem, check_signed, read_all

pytestmark = pytest.mark.network

ASK = json.dumps({"versions": [0], "slots": 4, "wait_seconds": 0.0}).encode()
ROUTES = {
    "/v1/run": "GET", "/v1/nodes": "POST", "/v1/nodes/me": "GET", "/v1/heartbeat": "POST", "/v1/receipts/1": "GET",
    "/v1/relays": "POST", "/v1/leases": "POST", "/v1/rollouts": "POST", "/v1/head": "GET",
    "/v1/manifests/v0-00000000": "GET", f"/v1/shards/{'0' * 64}": "GET", "/healthz": "GET", "/readyz": "GET",
    "/": "GET", "/events": "GET",
}  # fmt: skip
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"]


def status(answer: bytes) -> int:
    """The status of a raw answer; 0 where the server only closed."""
    return int(answer.split(b" ", 2)[1]) if answer else 0


@pytest.mark.parametrize("path", ROUTES)
def test_other_methods(world: World, path: str) -> None:
    for method in METHODS:
        if method == ROUTES[path]:
            continue
        with world.only_counts(Reason.METHOD_NOT_ALLOWED):
            response = world.http.request(method, world.url + path)
        assert response.headers["allow"] == ROUTES[path]
        if method == "HEAD":
            assert response.status_code == 405 and response.content == b""
        else:
            check_problem(response, Reason.METHOD_NOT_ALLOWED)
            check_signed(world, response)


@pytest.mark.parametrize(
    "path",
    [
        "/v1", "/v1/", "/v1/run/", "/V1/run", "//v1/run", "/v1//run", "/v2/run", "/v1/leases/", "/v1/nodes/you",
        "/docs", "/redoc", "/openapi.json", "/admin", "/metrics", "/static/../run.toml", "/dashboard/../../keys",
        "/dashboard/page.html", "/dashboard/%2e%2e/routes.py", "/.git/config", "/v1/run%00", "/%F0%9F%A6%86",
    ],
)  # fmt: skip
def test_paths_that_do_not_exist(world: World, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        with world.only_counts(Reason.NOT_FOUND):
            check_problem(world.http.request(method, world.url + path), Reason.NOT_FOUND)


@pytest.mark.parametrize("query", ["?%", "?%zz", "?a=%f", "?a[]=1&a[]=%"])
def test_a_question_that_cannot_be_bound_to_is_refused(world: World, query: str) -> None:
    """The answer would be signed over the address that was asked, and this one is no URL."""
    request = f"GET /v1/run{query} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    with world.only_counts(*[Reason.MALFORMED_REQUEST] * ("%" in query)):
        assert status(world.raw(request)) == 400


HOSTS = [b"", b"[", b"]", b"[::1", b"a b", b"a/b", b"a?b#c", b"\xff\xfe", b"x:99999", b"x:y", b"@", b"%zz", b"a" * 9000]


@pytest.mark.parametrize("host", HOSTS, ids=range(len(HOSTS)))
def test_hosts_of_every_form(world: World, host: bytes) -> None:
    request = b"GET /v1/run HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n"
    assert status(world.raw(request)) in (200, 400)
    request = b"POST /v1/leases HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    assert status(world.raw(request)) in (400, 401)
    assert world.serves()


G = b"GET /v1/run HTTP/1.1\r\nHost: localhost\r\n"
P = b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\n"
C = P + b"Transfer-Encoding: chunked\r\nConnection: close\r\n"
HEADS = {
    "noise": bytes(range(256)) * 8,
    "tls hello": bytes.fromhex("160301020001000001fc0303") + bytes(500),
    "http 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http 0.9": b"GET /\r\n\r\n",
    "http 9": b"GET / HTTP/9.9\r\nHost: x\r\nConnection: close\r\n\r\n",
    "no host": b"GET /v1/run HTTP/1.1\r\nConnection: close\r\n\r\n",
    "two hosts": G + b"Host: other\r\n\r\n",
    "no target": b"GET HTTP/1.1\r\n\r\n",
    "two spaces": b"GET  /v1/run HTTP/1.1\r\nHost: x\r\n\r\n",
    "binary target": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    "absolute target": b"GET http://localhost/v1/run HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "connect": b"CONNECT localhost:80 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "lower case": b"get /v1/run HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "long target": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    "long line": G + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
    "many lines": G + b"Connection: close\r\n" + b"X: a\r\n" * 20_000 + b"\r\n",
    "many signatures": G + b"Signature-Input: a=();x=1\r\n" * 500 + b"Connection: close\r\n\r\n",
    "folded": G + b"X: a\r\n b\r\nConnection: close\r\n\r\n",
    "no colon": G + b"nonsense\r\n\r\n",
    "space before colon": G + b"Content-Length : 2\r\n\r\n{}",
    "nul": G + b"X: a\x00b\r\n\r\n",
    "bare feeds": b"GET /v1/run HTTP/1.1\nHost: x\nConnection: close\n\n",
    "length of text": P + b"Content-Length: two\r\n\r\n{}",
    "length below zero": P + b"Content-Length: -1\r\n\r\n{}",
    "length with sign": P + b"Content-Length: +2\r\n\r\n{}",
    "length without end": P + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
    "two lengths": P + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "length and chunks": P + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\n",
    "unknown coding": P + b"Transfer-Encoding: gzip, chunked\r\nConnection: close\r\n\r\n0\r\n\r\n",
    "chunk of text": P + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "chunk without end": P + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 30 + b"\r\n",
    "chunk extension": C + b"\r\n2;" + b"a" * 100_000 + b"\r\n{}\r\n0\r\n\r\n",
    "websocket": G + b"Connection: upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n",
    "h2c": G + b"Connection: upgrade, http2-settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n\r\n",
    "expectation": P + b"Expect: 200-maybe\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
    "pipelined": G + b"\r\n" + G + b"\r\n" + G + b"Connection: close\r\n\r\n",
    "smuggled": P + b"Content-Length: 2\r\n\r\n{}" + b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_nobody_honest_sends(world: World, name: str) -> None:
    answer = world.raw(HEADS[name])
    statuses = [int(line[9:12]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert all(status < 500 for status in statuses), answer
    assert world.serves()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"G", b"GET /v1/run HTTP/1.1\r\n", G, P + b"Content-Length: 10\r\n\r\n{",
        P + b"Transfer-Encoding: chunked\r\n\r\n5",
    ],
    ids=["nothing", "a letter", "a line", "no end", "half a body", "half a chunk"],
)  # fmt: skip
def test_who_hangs_up_early_harms_nobody(world: World, data: bytes) -> None:
    for abort in (False, True):
        with world.settles(), world.connect() as connection:
            connection.sendall(data)
            if abort:  # RST instead of FIN
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    assert world.serves()
    assert world.errors == []


def test_a_body_that_ends_early_is_a_malformed_request(world: World) -> None:
    before = world.refusals()[Reason.MALFORMED_REQUEST.value]
    with world.settles(), world.connect() as connection:
        connection.sendall(P + b"Content-Length: 10\r\n\r\n{")
    assert world.refusals()[Reason.MALFORMED_REQUEST.value] == before + 1
    assert world.errors == [], "and nothing that a server should log as its own error"


@pytest.mark.parametrize("path", ["/v1/nodes", "/v1/heartbeat", "/v1/leases", "/v1/relays"])
def test_a_json_body_is_at_most_64_kib(world: World, node: Node, path: str) -> None:
    with world.only_counts(Reason.BODY_TOO_LARGE):
        check_problem(world.signed(node.key, "POST", path, b" " * ((64 << 10) + 1)), Reason.BODY_TOO_LARGE)
    with world.only_counts(Reason.MALFORMED_REQUEST):
        check_problem(world.signed(node.key, "POST", path, b" " * (64 << 10)), Reason.MALFORMED_REQUEST)


@pytest.mark.parametrize("framing", ["chunked", "length"])
@pytest.mark.parametrize(
    ("path", "limit", "content_type"),
    [("/v1/leases", 64 << 10, "application/json"), ("/v1/rollouts", MAX_BATCH_BYTES, CONTENT_TYPE)],
)
def test_an_endless_body_is_refused_while_it_streams(
    world: World, path: str, limit: int, content_type: str, framing: str
) -> None:
    """The answer comes although the body has no end, soon after the limit."""
    with world.only_counts(Reason.BODY_TOO_LARGE), world.connect() as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
        head += "Transfer-Encoding: chunked\r\n\r\n" if framing == "chunked" else f"Content-Length: {1 << 40}\r\n\r\n"
        connection.sendall(head.encode())
        piece = b"10000\r\n" + bytes(1 << 16) + b"\r\n" if framing == "chunked" else bytes(1 << 16)
        sent = 0
        while sent < limit + (64 << 20) and not select.select([connection], [], [], 0)[0]:
            connection.sendall(piece)
            sent += 1 << 16
        assert status(connection.recv(1 << 16)) == 413
        assert sent > limit
    assert world.serves()


def test_a_body_in_chunks_is_read_like_any_other(world: World, node: Node) -> None:
    body = encode_batch(node.completions())

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 7):
            yield body[start : start + 7]

    request = world.http.build_request(
        "POST", f"{world.url}/v1/rollouts", content=pieces(), headers={"content-type": CONTENT_TYPE}
    )
    nonce = secrets.token_hex(16)
    sign_request(request, body, node.key, world.run.spec.run_id, now=time.time(), nonce=nonce)
    assert request.headers["transfer-encoding"] == "chunked" and "content-length" not in request.headers
    response = world.http.send(request)
    assert response.status_code == 200, response.text
    check_signed(world, response)
    assert node.client.account().pending == 4


def test_bodies_that_stall_block_nobody_and_are_given_up(
    world: World, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More connections than the server has threads, each with one byte and then silence."""
    monkeypatch.setattr(edge, "BODY_SECONDS", 2.0)
    with ExitStack() as stack:
        stalled = [stack.enter_context(world.connect()) for _ in range(60)]
        for connection, path in zip(stalled, ["/v1/leases", "/v1/rollouts"] * 30, strict=True):
            kind = CONTENT_TYPE if path == "/v1/rollouts" else "application/json"
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: 9\r\n"
            connection.sendall(head.encode() + b"Connection: close\r\n\r\n{")
        assert world.serves()
        assert node.submit(*node.completions()).status_code == 200
        answers = [read_all(connection) for connection in stalled]
    assert {status(answer) for answer in answers} == {400}
    assert all(b"the body took longer than 2 s" in answer for answer in answers)


def test_heads_that_stall_block_nobody(world: World, node: Node) -> None:
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(world.connect()).sendall(b"POST /v1/leases HTTP/1.1\r\nHost:")
        assert world.serves()
        assert len(node.lease(4)[0].slots) == 4


def test_answers_do_not_wait_for_acknowledgements(world: World) -> None:
    """An answer goes out in two pieces; with Nagle's algorithm on, the second waits for the other side's timer."""
    with world.connect() as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status(connection.recv(1 << 16)) == 200
        transports = [held.transport for held in world.server.server_state.connections]
        (accepted,) = [
            transport.get_extra_info("socket") for transport in transports
            if transport.get_extra_info("peername") == connection.getsockname()
        ]  # fmt: skip
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0

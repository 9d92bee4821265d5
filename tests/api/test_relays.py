"""A relay is entered only after it has signed a nonce where it says it serves, and asking costs the server little."""

from __future__ import annotations

import datetime
import gzip
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.api import nodes as room
from coordinator.ledger import nodes
from protocol.canonical import canonical_json
from protocol.identity import Key
from protocol.messages import RelayChallenge
from protocol.reasons import Reason
from protocol.signed import sign_document
from tests.api.world import World, check_problem, check_signed, served, small

pytestmark = pytest.mark.network

Answering = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The names that resolve, each to one address after the other; a name server is never asked."""
    known = {"localhost": ["127.0.0.1"] * 9}
    real = socket.getaddrinfo

    def look_up(host: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(host, str) and host in known:
            if not known[host]:
                raise socket.gaierror("asked too often")
            host = known[host].pop(0)
        return real(host, *rest, **options | {"flags": socket.AI_NUMERICHOST})

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


@contextmanager
def listening(answering: Answering, tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, list[str]]]:
    """A server on loopback: its URL, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            try:
                answering(self)
            except OSError:
                self.close_connection = True  # the other side has had enough

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def say(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in ({"content-length": str(len(body))} | headers).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def honest(key: Key, **changes: Any) -> Answering:
    """Signs what it is asked to, or something else."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        nonce = parse_qs(urlsplit(handler.path).query)["nonce"][0]
        url = f"http://127.0.0.1:{handler.server.server_address[1]}"  # type: ignore[index]
        said = {"relay_id": key.id, "url": url, "nonce": nonce} | changes
        kind, signer = said.pop("kind", "relay"), said.pop("signer", key)
        say(handler, sign_document(kind, RelayChallenge(**said), signer).model_dump_json().encode())

    return answer


def register(world: World, key: Key, url: object) -> httpx.Response:
    return world.signed(key, "POST", "/v1/relays", canonical_json({"url": url}))


def refused(world: World, key: Key, url: str, reason: Reason = Reason.ADDRESS_REFUSED) -> str:
    """Register in vain; returns the detail."""
    with world.only_counts(reason):
        response = register(world, key, url)
    check_signed(world, response)
    assert url not in world.http.get(f"{world.url}/v1/run").json()["relays"]
    return check_problem(response, reason).detail


def test_a_relay_that_answers_is_told_to_everybody(world: World) -> None:
    key = world.key()
    with listening(honest(key)) as (url, asked):
        for _ in range(2):
            response = register(world, key, url)
            check_signed(world, response)
            assert response.json() == {"newest": 0, "relays": [], "drain": False, "upgrade": None}
        assert len(set(asked)) == 2 and all(path.startswith("/v1/relay?nonce=") for path in asked)
        assert world.http.get(f"{world.url}/v1/run").json()["relays"].count(url) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": "0" * 32},
        {"url": "http://127.0.0.1:1"},
        {"relay_id": "ab" * 32},
        {"signer": Key.from_seed(b"x" * 32)},
        {"kind": "head"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_relay_that_signs_something_else(world: World, changes: dict[str, Any]) -> None:
    key = world.key()
    with listening(honest(key, **changes)) as (url, asked):
        refused(world, key, url)
        assert len(asked) == 1


def test_a_key_cannot_enter_somebody_elses_relay(world: World) -> None:
    owner, thief = world.key(), world.key()
    with listening(honest(owner)) as (url, _):
        refused(world, thief, url)


def test_a_url_that_is_written_otherwise_is_another(world: World) -> None:
    key = world.key()
    with listening(honest(key)) as (url, _):
        refused(world, key, url + "/")


def certificate(path: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context for `name`, and a client's that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), 1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    ).public_bytes(serialization.Encoding.PEM)
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(made + key.private_bytes(*pem))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path)
    return server, ssl.create_default_context(cadata=made.decode())


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_name_is_resolved_once_and_the_checked_address_is_asked(
    world: World, names: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """A name server that says something else the second time (rebinding) leads nowhere."""
    key = world.key()
    server, client = certificate(tmp_path / "relay.pem", "relay.test")
    monkeypatch.setattr(room, "_tls", lambda: client)
    hosts: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        hosts.append(handler.headers["host"])
        honest(key, url=public)(handler)

    with listening(answer, server if scheme == "https" else None) as (url, _):
        port = urlsplit(url).port
        public = f"{scheme}://relay.test:{port}"
        names["relay.test"] = ["127.0.0.1"]
        response = register(world, key, public)
        assert response.status_code == 200, response.text
        assert hosts == [f"relay.test:{port}"] and names["relay.test"] == []
        if scheme == "https":
            names["other.test"] = ["127.0.0.1"]
            refused(world, world.key(), f"https://other.test:{port}")


def test_no_redirect_is_followed(world: World) -> None:
    key = world.key()
    with listening(honest(key)) as (target, reached):
        for status in (301, 302, 307, 308):

            def redirect(handler: BaseHTTPRequestHandler, status: int = status) -> None:
                say(handler, b"", status, location=f"{target}{handler.path}")

            with listening(redirect) as (url, asked):
                refused(world, key, url)
                assert len(asked) == 1
        assert reached == []


def _endless(handler: BaseHTTPRequestHandler) -> None:
    say(handler, b"", **{"content-length": str(1 << 40)})
    for _ in range(1000):
        handler.wfile.write(bytes(1 << 16))


def _bomb(handler: BaseHTTPRequestHandler) -> None:
    say(handler, gzip.compress(bytes(1 << 24)), **{"content-encoding": "gzip"})


def _cut(handler: BaseHTTPRequestHandler) -> None:
    say(handler, b"{", **{"content-length": "100"})


ODD: dict[str, Answering] = {
    "empty": lambda handler: say(handler, b""),
    "no document": lambda handler: say(handler, b"hello"),
    "not found": lambda handler: say(handler, b"no", 404),
    "an error": lambda handler: say(handler, b"{}", 500),
    "large": lambda handler: say(handler, b" " * 10_000),
    "deep": lambda handler: say(handler, b"[" * 8000),
    "not http": lambda handler: [handler.wfile.write(b"\x00\x01\x02\r\n\r\n")] and None,  # type: ignore[func-returns-value]
    "endless": _endless,
    "compressed": _bomb,
    "cut off": _cut,
}


@pytest.mark.parametrize("name", ODD)
def test_a_relay_that_answers_nonsense(world: World, name: str) -> None:
    with listening(ODD[name]) as (url, _):
        refused(world, world.key(), url)


def _stall(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(PAUSE)


def _drip_head(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for _ in range(600):
        handler.wfile.write(b"x: y\r\n")
        time.sleep(0.1)


def _drip_body(handler: BaseHTTPRequestHandler) -> None:
    say(handler, b"", **{"content-length": "8000"})
    for _ in range(600):
        handler.wfile.write(b" ")
        time.sleep(0.1)


PAUSE = 20.0


@pytest.mark.parametrize("answering", [_stall, _drip_head, _drip_body], ids=lambda answering: answering.__name__)
def test_a_slow_relay_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch, answering: Answering) -> None:
    """Byte for byte it would last a minute: longer than this test's client waits for an answer."""
    monkeypatch.setattr(room, "CHALLENGE_SECONDS", 0.5)
    with listening(answering) as (url, _):
        assert "within" in refused(world, world.key(), url)


def test_slow_relays_hold_up_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them at once than the server has threads: a few are tried, the others are told to come again."""
    monkeypatch.setattr(room, "CHALLENGE_SECONDS", 4.0)
    keys = [world.key() for _ in range(50)]
    with listening(_drip_head) as (url, asked), ThreadPoolExecutor(50) as pool:
        waiting = [pool.submit(register, world, key, url) for key in keys]
        for key in keys:
            world.wait_for_nonces(key, 1)
        assert world.serves()
        answers = [question.result() for question in waiting]
        assert len(asked) <= room.MAX_CHALLENGES
    codes = [Reason(answer.json()["code"]) for answer in answers]
    assert set(codes) == {Reason.ADDRESS_REFUSED, Reason.NONCE_LIMIT}
    assert codes.count(Reason.ADDRESS_REFUSED) == room.MAX_CHALLENGES
    turned_away = next(answer for answer in answers if answer.json()["code"] == "nonce_limit")
    check_problem(turned_away, Reason.NONCE_LIMIT)
    assert int(turned_away.headers["retry-after"]) >= 1


def test_nobody_listens(world: World) -> None:
    with listening(_stall) as (url, _):
        pass
    refused(world, world.key(), url)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:80", "http://localhost:80", "http://127.1:80", "http://2130706433", "http://0x7f000001",
        "http://0.0.0.0", "http://10.0.0.1", "http://192.168.1.1:443", "http://169.254.169.254", "http://[::1]",
        "http://[::ffff:127.0.0.1]", "http://[fe80::1]", "http://[fc00::1]", "http://100.64.0.1", "https://127.0.0.1",
        "http://[::ffff:169.254.169.254]:80", "http://[::]",
    ],
)  # fmt: skip
def test_private_addresses_are_refused_unless_the_run_allows_them(quiet: World, url: str) -> None:
    refused(quiet, quiet.key(), url)


@pytest.mark.parametrize("port", [1, 22, 6379, 8080, 65535])
def test_public_addresses_on_other_ports_are_refused(quiet: World, port: int) -> None:
    assert "port" in refused(quiet, quiet.key(), f"http://1.1.1.1:{port}")


def test_a_private_relay_is_not_even_asked(quiet: World) -> None:
    key = quiet.key()
    with listening(honest(key)) as (url, asked):
        refused(quiet, key, url)
        assert asked == []


@pytest.mark.parametrize(
    "url",
    [
        "http://[", "http://]", "http://[::1", "http://[x]", "http://[::1]x", "http://127.0.0.1:99999",
        "http://127.0.0.1:-1", "http://127.0.0.1:0", "http://127.0.0.1:x", "http://user@127.0.0.1",
        "http://user:word@127.0.0.1", "http://@127.0.0.1", "http://127.0.0.1/path", "http://127.0.0.1?x=1",
        "http://127.0.0.1#x", "http:///x", "http://:80", "http://.", "http://" + "a" * 64 + ".example",
        "http://" + "a." * 250, "http://127.0.0.1\\@1.1.1.1", "http://%31", "http://[fe80::1%25lo]:1",
        "http://[v1.x]", "https://127.0.0.1:1", "http://xn--.invalid", "http://-", "http://1.1.1.1.1.1",
    ],
)  # fmt: skip
def test_urls_that_are_none(world: World, url: str) -> None:
    refused(world, world.key(), url)


@pytest.mark.parametrize(
    "url",
    [
        "http://", "ftp://1.1.1.1", "file:///etc/passwd", "1.1.1.1", "HTTP://1.1.1.1", "http://é", "http://a b",
        "http://a\n", "", "http://" + "a" * 600, 5, None, ["http://1.1.1.1"],
    ],
)  # fmt: skip
def test_urls_of_another_form(world: World, url: object) -> None:
    with world.only_counts(Reason.MALFORMED_REQUEST):
        check_problem(register(world, world.key(), url), Reason.MALFORMED_REQUEST)


def test_an_answer_stays_small_however_many_relays_register(narrow: World) -> None:
    """A megabyte is the most that relays and fetchers read of an answer."""
    with narrow.run.ledger.write() as tx:
        for number in range(3000):
            url = f"http://{number:04}." + "x" * 480
            nodes.register_relay(tx, f"{number:064x}", url, now=time.time())
    response = narrow.http.get(f"{narrow.url}/v1/run")
    check_signed(narrow, response)
    relays = response.json()["relays"]
    assert len(response.content) < 1 << 18 and relays[0].startswith("http://0000.") and len(relays) == len(set(relays))


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A run whose relays must be public."""
    with served(tmp_path_factory.mktemp("coordinator") / "run", small()) as world:
        yield world

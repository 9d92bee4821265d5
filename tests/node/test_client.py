"""The node's client against a coordinator in the same process: pinning, signatures, and what is believed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from node.client import MAX_ANSWER, Client, Unreachable
from protocol import signatures
from protocol.completion import CONTENT_TYPE
from protocol.identity import Key
from protocol.messages import (
    Directives,
    Heartbeat,
    LeaseRequest,
    NodeAccount,
    Problem,
    RegisterNode,
    RolloutsAnswer,
    RunInfo,
)
from protocol.reasons import STATUS, Reason, Refusal
from protocol.signed import Strict
from tests.ledger.builders import make_spec

RUN, OTHER, NODE = (Key.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
SPEC = make_spec()
NOW = 1_700_000_000.0
LOOPBACK, PUBLIC = "http://127.0.0.1:8000", "http://example.org:8000"
Handler = Callable[[httpx.Request], httpx.Response]


def info(key: Key = RUN, **changes: Any) -> RunInfo:
    values = {
        "run_key": key.id,
        "run_spec": SPEC,
        "run_spec_digest": SPEC.digest,
        "newest": 0,
        "relays": (),
        "log_head": None,
        "now": NOW,
    }
    return RunInfo(**values | changes)


def signed(
    request: httpx.Request, response: httpx.Response, key: Key = RUN, run_id: str = SPEC.run_id
) -> httpx.Response:
    parts = signatures.ResponseParts(response.status_code, response.headers, request)
    signatures.sign_response(parts, response.content, key, run_id, now=NOW)
    return response


def answer(document: Strict, status: int = 200, key: Key | None = RUN, **headers: str) -> Handler:
    def handle(request: httpx.Request) -> httpx.Response:
        response = httpx.Response(status, headers=headers, content=document.model_dump_json().encode())
        return response if key is None else signed(request, response, key)

    return handle


def problem(code: Reason, key: Key | None = RUN, **headers: str) -> Handler:
    status = STATUS[code]
    document = Problem(type=f"urn:{code}", title="no", status=status, detail="because", code=code)
    return answer(document, status, key, **headers)


def client(handler: Handler, url: str = LOOPBACK) -> Client:
    made = Client(url, NODE, clock=lambda: NOW)
    made.close()
    made._http = httpx.Client(transport=httpx.MockTransport(handler), trust_env=False)
    return made


def connected(handler: Handler, tmp_path: Path) -> Client:
    """A client that has pinned RUN; `handler` answers from now on."""
    made = client(answer(info()))
    made.connect(LOOPBACK, tmp_path / "run.key")
    made._http = httpx.Client(transport=httpx.MockTransport(handler), trust_env=False)
    return made


def refusal(call: Callable[[], Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call()
    return caught.value


# pinning


def test_first_use_on_loopback_pins_the_key(tmp_path: Path) -> None:
    pin = tmp_path / "deep" / "run.key"
    made = client(answer(info()))
    assert made.connect(LOOPBACK, pin) == info()
    assert made.run_key == RUN.id and made.run_id == SPEC.run_id and pin.read_text().strip() == RUN.id
    client(answer(info())).connect(LOOPBACK, pin)


def test_first_use_over_tls_is_allowed_and_over_plain_http_refused(tmp_path: Path) -> None:
    assert client(answer(info()), "https://example.org").connect("https://example.org", tmp_path / "tls").run_key
    made = client(answer(info()), PUBLIC)
    assert refusal(lambda: made.connect(PUBLIC, tmp_path / "plain")).reason is Reason.RUN_KEY_CHANGED
    assert not (tmp_path / "plain").exists() and made.run_key is None


@pytest.mark.parametrize("host", ["localhost.example.org", "127.0.0.1.example.org", "10.0.0.1", "0.0.0.0", "[::2]"])
def test_almost_loopback_is_not_loopback(tmp_path: Path, host: str) -> None:
    url = f"http://{host}:8000"
    assert refusal(lambda: client(answer(info()), url).connect(url, tmp_path / "pin")).reason is Reason.RUN_KEY_CHANGED


def test_fragment_pins_over_plain_http(tmp_path: Path) -> None:
    url = f"{PUBLIC}#run={RUN.id}"
    made = client(answer(info()), url)
    assert made.url == PUBLIC and made.connect(url, tmp_path / "pin").run_key == RUN.id
    client(answer(info()), PUBLIC).connect(PUBLIC, tmp_path / "pin")  # from now on without the fragment


@pytest.mark.parametrize("stored", [False, True])
def test_another_key_is_a_hard_stop(tmp_path: Path, stored: bool) -> None:
    url, pin = f"{LOOPBACK}#run={RUN.id}", tmp_path / "pin"
    if stored:
        pin.write_text(RUN.id + "\n")
        url = LOOPBACK
    for handler in (
        answer(info(OTHER), key=OTHER),  # an honest other run
        answer(info(), key=OTHER),  # our run's words, signed by another
        answer(info(OTHER), key=RUN),
        answer(info(), key=None),
    ):
        made = client(handler, url)
        assert refusal(lambda made=made: made.connect(url, pin)).reason is Reason.RUN_KEY_CHANGED
        assert made.run_key is None
    assert pin.exists() is stored


def test_fragment_against_the_stored_key(tmp_path: Path) -> None:
    (tmp_path / "pin").write_text(RUN.id)
    url = f"{LOOPBACK}#run={OTHER.id}"
    made = client(answer(info(OTHER), key=OTHER), url)
    assert refusal(lambda: made.connect(url, tmp_path / "pin")).reason is Reason.RUN_KEY_CHANGED
    assert (tmp_path / "pin").read_text() == RUN.id


@pytest.mark.parametrize(
    "fragment", ["run=", "run=xyz", "key=" + RUN.id, f"run={RUN.id}&run={RUN.id}", "run=" + "0" * 64]
)
def test_a_fragment_that_is_no_key_is_never_ignored(tmp_path: Path, fragment: str) -> None:
    url = f"{LOOPBACK}#{fragment}"
    refusal(lambda: client(answer(info()), url).connect(url, tmp_path / "pin"))
    assert not (tmp_path / "pin").exists()


def test_an_empty_pin_is_one_that_was_never_written(tmp_path: Path) -> None:
    (tmp_path / "pin").write_text("")
    assert refusal(lambda: client(answer(info()), PUBLIC).connect(PUBLIC, tmp_path / "pin"))
    client(answer(info())).connect(LOOPBACK, tmp_path / "pin")
    assert (tmp_path / "pin").read_text().strip() == RUN.id


def test_spec_that_is_not_the_one_of_its_digest(tmp_path: Path) -> None:
    made = client(answer(info(run_spec_digest="0" * 64)))
    assert refusal(lambda: made.connect(LOOPBACK, tmp_path / "pin")).reason is Reason.RUN_KEY_CHANGED
    assert not (tmp_path / "pin").exists()


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"run_key": 1}', b"[" * 10_000, b"\xff\xfe"])
def test_no_answer_of_ours_is_unreachable(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(Unreachable):
        client(lambda request: httpx.Response(200, content=body)).connect(LOOPBACK, tmp_path / "pin")


# calls


def account() -> NodeAccount:
    return NodeAccount(node_id=NODE.id, status="active", accepted=1, rejected=0, pending=0, dropped=0, credit=5)


def test_requests_are_signed_and_fresh(tmp_path: Path) -> None:
    seen: list[signatures.Authenticated] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(signatures.verify_request(request, request.content, SPEC.run_id, now=NOW))
        return answer(account())(request)

    made = connected(handle, tmp_path)
    assert made.register(RegisterNode(software="s", engine="e", device="d")) == account() == made.account()
    assert {who.node_id for who in seen} == {NODE.id} and len({who.nonce for who in seen}) == 2


def test_submit_sends_the_batch_as_it_is(tmp_path: Path) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        assert request.content == b"batch" and request.headers["content-type"] == CONTENT_TYPE
        assert request.method == "POST" and request.url.path == "/v1/rollouts"
        return answer(RolloutsAnswer(items=()))(request)

    assert connected(handle, tmp_path).submit(b"batch") == RolloutsAnswer(items=())


@pytest.mark.parametrize("key", [None, OTHER, NODE])
def test_answers_without_the_run_keys_signature_are_refused(tmp_path: Path, key: Key | None) -> None:
    made = connected(answer(account(), key=key), tmp_path)
    assert refusal(made.account).reason is Reason.RUN_KEY_CHANGED


def test_tampered_answer_is_refused(tmp_path: Path) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        response = answer(account())(request)
        richer = account().model_copy(update={"credit": 10**6})
        return httpx.Response(200, headers=response.headers, content=richer.model_dump_json().encode())

    assert refusal(connected(handle, tmp_path).account).reason is Reason.RUN_KEY_CHANGED


def test_replayed_answer_is_refused(tmp_path: Path) -> None:
    """An answer is bound to its request: an older one with a good signature is worth nothing."""
    kept: list[httpx.Response] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if not kept:
            kept.append(answer(account())(request))
        return httpx.Response(200, headers=kept[0].headers, content=kept[0].content)

    made = connected(handle, tmp_path)
    assert made.account() == account()
    assert refusal(made.account).reason is Reason.RUN_KEY_CHANGED


def test_answer_of_another_run_is_refused(tmp_path: Path) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        return signed(request, httpx.Response(200, content=account().model_dump_json().encode()), run_id="other")

    assert refusal(connected(handle, tmp_path).account).reason is Reason.RUN_KEY_CHANGED


@pytest.mark.parametrize("code", [Reason.QUEUE_FULL, Reason.NODE_BANNED, Reason.LEASE_EXPIRED, Reason.UNKNOWN_NODE])
def test_signed_problem_is_a_refusal(tmp_path: Path, code: Reason) -> None:
    ask = LeaseRequest(versions=(0,), slots=4, wait_seconds=0)
    headers = {"Retry-After": "7"}
    found = refusal(lambda: connected(problem(code, **headers), tmp_path).lease(ask))
    assert found.reason is code and found.detail == "because" and found.retry_after == 7.0


def test_an_unsigned_no_is_not_believed(tmp_path: Path) -> None:
    """Anybody on the way could end a worker, or have it throw finished work away."""
    for code in (Reason.NODE_BANNED, Reason.RUN_ENDED, Reason.LEASE_UNKNOWN):
        with pytest.raises(Unreachable):
            connected(problem(code, key=None), tmp_path).submit(b"batch")
    assert refusal(lambda: connected(problem(Reason.RUN_ENDED, key=OTHER), tmp_path).submit(b"")).reason is (
        Reason.RUN_KEY_CHANGED
    )


@pytest.mark.parametrize("wait", ["", "soon", "-1", "1.5", "²", "9" * 30, "Mon, 30 Nov 2026 00:00:00 GMT"])
def test_retry_after_that_is_no_number_of_seconds(tmp_path: Path, wait: str) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        content = problem(Reason.QUEUE_FULL)(request).content
        return signed(request, httpx.Response(429, headers=[(b"retry-after", wait.encode("latin-1"))], content=content))

    assert refusal(connected(handle, tmp_path).account).retry_after is None


def test_signed_nonsense_is_unreachable(tmp_path: Path) -> None:
    for status, body in ((200, b"{}"), (500, b"oops"), (429, b'{"code": "no_such_code"}')):

        def handle(request: httpx.Request, status: int = status, body: bytes = body) -> httpx.Response:
            return signed(request, httpx.Response(status, content=body))

        with pytest.raises(Unreachable):
            connected(handle, tmp_path).account()


def test_no_connection_is_unreachable(tmp_path: Path) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(Unreachable, match="refused"):
        connected(handle, tmp_path).heartbeat(
            Heartbeat(state="waiting", loaded_versions=(), open_leases=0, spooled=0, tokens_per_second=0.0)
        )


def test_endless_answer_is_cut_off(tmp_path: Path) -> None:
    sent = 0

    def body() -> Any:
        nonlocal sent
        while sent < 3 * MAX_ANSWER:
            sent += 1 << 20
            yield bytes(1 << 20)

    with pytest.raises(Unreachable, match="large"):
        connected(lambda request: httpx.Response(200, content=body()), tmp_path).account()
    assert sent <= MAX_ANSWER + (2 << 20)


def test_heartbeat_gives_directives(tmp_path: Path) -> None:
    told = Directives(newest=3, relays=("http://127.0.0.1:9",), drain=False, upgrade=None)
    beat = Heartbeat(state="generating", loaded_versions=(2, 3), open_leases=1, spooled=2, tokens_per_second=1.5)
    assert connected(answer(told), tmp_path).heartbeat(beat) == told

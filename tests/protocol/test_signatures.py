"""HTTP Message Signatures: every covered thing altered, every window, every game with labels, tags and algorithms."""

import base64
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from http_message_signatures import HTTPMessageSigner, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import signatures
from protocol.identity import Key
from protocol.reasons import Reason, Refusal
from protocol.signatures import RequestParts, ResponseParts

RUN, NOW, NONCE = "run-1", 1_800_000_000.0, "00112233445566778899aabbccddeeff"
NODE, OTHER, RUN_KEY = (Key.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
BODY = b'{"slots":1}'
URL = "http://coordinator.example:8000/v1/leases?wait=1&x=%2F"


def signed(
    body: bytes = BODY, *, method: str = "POST", url: str = URL, key: Key = NODE, run: str = RUN, now: float = NOW
) -> RequestParts:
    request = httpx.Request(method, url, content=body)
    signatures.sign_request(request, body, key, run, now=now, nonce=NONCE)
    return RequestParts(request.method, str(request.url), request.headers)


def custom(
    body: bytes = BODY,
    *,
    components: tuple[str, ...] = signatures.REQUEST_COMPONENTS,
    key: Key = NODE,
    label: str = "farflung",
    onto: httpx.Request | None = None,
    **params: Any,
) -> httpx.Request:
    """A request signed by the library with any parameters; `onto` appends a signature to a request."""
    request = onto or httpx.Request("POST", URL, content=body)
    if onto is None:
        request.headers["content-digest"] = f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"
    given = {
        "created": signatures._time(NOW),
        "expires": signatures._time(NOW + 60),
        "nonce": NONCE,
        "tag": RUN,
        "key_id": key.id,
    } | params
    HTTPMessageSigner(signature_algorithm=algorithms.ED25519, key_resolver=signatures._Resolver(key)).sign(
        request,
        label=label,
        use_existing_digest=True,
        covered_component_ids=components,
        append_if_signature_exists=onto is not None,
        **{name: value for name, value in given.items() if value is not None},
    )
    return request


def refusal(request: Any, body: bytes = BODY, *, run: str = RUN, now: float = NOW) -> Reason:
    with pytest.raises(Refusal) as caught:
        signatures.verify_request(request, body, run, now=now)
    return caught.value.reason


def with_header(request: RequestParts, name: str, change: Callable[[str], str]) -> RequestParts:
    headers = httpx.Headers(request.headers)
    before = headers[name]
    headers[name] = change(before)
    assert headers[name] != before
    return replace(request, headers=headers)


@pytest.mark.parametrize("body", [BODY, b"", bytes(range(256)) * 100])
@pytest.mark.parametrize("method,url", [("POST", URL), ("GET", "https://h/v1/run"), ("GET", "https://h")])
def test_round_trip(body: bytes, method: str, url: str) -> None:
    who = signatures.verify_request(signed(body, method=method, url=url), body, RUN, now=NOW)
    assert (who.node_id, who.nonce) == (NODE.id, NONCE)
    assert who.expires == NOW + signatures.VALID_SECONDS + signatures.SKEW_SECONDS


def test_nonce_is_remembered_as_long_as_it_can_be_accepted() -> None:
    """The last moment at which the request is accepted is the one until which the ledger keeps the nonce."""
    request = signed()
    expires = signatures.verify_request(request, BODY, RUN, now=NOW).expires
    assert signatures.verify_request(request, BODY, RUN, now=expires).expires == expires
    assert refusal(request, now=expires + 0.001) is Reason.CLOCK_SKEW


@pytest.mark.parametrize(
    "alter",
    [
        lambda r: replace(r, method="PUT"),
        lambda r: replace(r, method="post"),
        lambda r: replace(r, url=r.url.replace("coordinator.example", "evil.example")),
        lambda r: replace(r, url=r.url.replace(":8000", ":8001")),
        lambda r: replace(r, url=r.url.replace("/v1/leases", "/v1/rollouts")),
        lambda r: replace(r, url=r.url.replace("/v1/leases", "/v1/leases/")),
        lambda r: replace(r, url=r.url.replace("/v1/leases", "/v1//leases")),
        lambda r: replace(r, url=r.url.replace("wait=1", "wait=2")),
        lambda r: replace(r, url=r.url.replace("%2F", "/")),
        lambda r: replace(r, url=r.url.split("?")[0]),
        lambda r: replace(r, url=r.url + "&more=1"),
        lambda r: replace(r, url="not a url"),
        lambda r: with_header(r, "signature", lambda v: "farflung=:" + "A" * 86 + "==:"),
        lambda r: with_header(r, "signature", lambda v: v.replace("farflung", "other")),
        lambda r: with_header(r, "signature", lambda v: f"{v}, second=:AAAA:"),
        lambda r: with_header(r, "signature", lambda v: "garbage"),
        lambda r: with_header(r, "signature-input", lambda v: v.replace(NONCE, NONCE[::-1])),
        lambda r: with_header(r, "signature-input", lambda v: v.replace(str(int(NOW)), str(int(NOW) + 1))),
        lambda r: with_header(r, "signature-input", lambda v: v.replace(NODE.id, OTHER.id)),
        lambda r: with_header(r, "signature-input", lambda v: v.replace('"@query" ', "")),
        lambda r: with_header(
            r, "signature-input", lambda v: v.replace('"@method" "@authority"', '"@authority" "@method"')
        ),
        lambda r: with_header(r, "signature-input", lambda v: v + ";extra=1"),
        lambda r: with_header(r, "signature-input", lambda v: v.replace('alg="ed25519"', 'alg="hmac-sha256"')),
        lambda r: with_header(r, "signature-input", lambda v: v.replace(';alg="ed25519"', "")),
        lambda r: with_header(r, "signature-input", lambda v: v.replace("farflung=", "farflung=()=")),
        lambda r: with_header(r, "signature-input", lambda v: f"{v}, {v}"),
        lambda r: with_header(r, "signature-input", lambda v: v[: len(v) // 2]),
        lambda r: with_header(r, "content-digest", lambda v: v.replace("sha-256", "sha-512")),
        lambda r: with_header(r, "content-digest", lambda v: "md5=:AAAAAAAAAAAAAAAAAAAAAA==:"),
    ],
)
def test_every_alteration_is_refused(alter: Callable[[RequestParts], RequestParts]) -> None:
    assert refusal(alter(signed())) is Reason.SIGNATURE_INVALID


@pytest.mark.parametrize("body", [b"", BODY + b" ", BODY.upper()])
def test_altered_body_is_refused_with_and_without_its_digest(body: bytes) -> None:
    assert refusal(signed(), body) is Reason.SIGNATURE_INVALID
    digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
    forged = with_header(signed(), "content-digest", lambda value: f"sha-256=:{digest}:")
    assert refusal(forged, body) is Reason.SIGNATURE_INVALID


@pytest.mark.parametrize("name", ["signature", "signature-input", "content-digest"])
def test_missing_header(name: str) -> None:
    request = signed()
    headers = httpx.Headers(request.headers)
    del headers[name]
    assert refusal(replace(request, headers=headers)) is Reason.SIGNATURE_MISSING


def test_tag_of_another_run_is_refused() -> None:
    assert refusal(signed(run="run-2")) is Reason.SIGNATURE_INVALID
    assert refusal(signed(), run="run-2") is Reason.SIGNATURE_INVALID
    assert refusal(custom(tag=None)) is Reason.SIGNATURE_INVALID


@pytest.mark.parametrize("left_out", signatures.REQUEST_COMPONENTS)
def test_every_component_must_be_covered(left_out: str) -> None:
    components = tuple(name for name in signatures.REQUEST_COMPONENTS if name != left_out)
    request = custom(components=components)
    assert refusal(request) is Reason.SIGNATURE_INVALID


def test_a_component_with_parameters_is_not_the_component() -> None:
    components = (*signatures.REQUEST_COMPONENTS[:-1], '"content-digest";key="sha-256"')
    assert refusal(custom(components=components)) is Reason.SIGNATURE_INVALID


def test_more_may_be_covered() -> None:
    components = (*signatures.REQUEST_COMPONENTS, "content-length")
    assert signatures.verify_request(custom(components=components), BODY, RUN, now=NOW).node_id == NODE.id


def test_labels_are_free_but_change_nothing() -> None:
    """A label is not signed: renamed in both headers the request is the same one, with the same nonce."""
    request = signed()
    for name in ("signature", "signature-input"):
        request = with_header(request, name, lambda value: value.replace("farflung=", "x=", 1))
    assert signatures.verify_request(request, BODY, RUN, now=NOW).nonce == NONCE


@pytest.mark.parametrize("second", [NODE, OTHER])
def test_two_signatures_for_this_run_are_refused(second: Key) -> None:
    request = custom(label="one")
    assert refusal(custom(label="two", key=second, nonce="f" * 32, onto=request)) is Reason.SIGNATURE_INVALID


def test_a_signature_for_somebody_else_beside_ours_is_ignored() -> None:
    request = custom(label="one")
    custom(label="two", key=OTHER, tag="another application", onto=request)
    assert signatures.verify_request(request, BODY, RUN, now=NOW).node_id == NODE.id


def test_swapped_signatures_are_refused() -> None:
    request = custom(label="one")
    custom(label="two", key=OTHER, tag="another application", onto=request)
    one, two = request.headers["signature"].split(", ")
    request.headers["signature"] = f"one={two.split('=', 1)[1]}, two={one.split('=', 1)[1]}"
    assert refusal(request) is Reason.SIGNATURE_INVALID


def test_public_key_is_no_hmac_secret() -> None:
    request = custom()
    value = request.headers["signature-input"].replace('alg="ed25519"', 'alg="hmac-sha256"')
    forged = base64.b64encode(hmac.digest(bytes.fromhex(NODE.id), b"base", "sha256")).decode()
    request.headers.update({"signature-input": value, "signature": f"farflung=:{forged}:"})
    assert refusal(request) is Reason.SIGNATURE_INVALID


@pytest.mark.parametrize("shift,ok", [(-31, False), (-30, True), (0, True), (90, True), (91, False), (1e6, False)])
def test_window(shift: float, ok: bool) -> None:
    """Created at NOW, expires 60 s later, 30 s of skew on both sides."""
    if ok:
        assert signatures.verify_request(signed(), BODY, RUN, now=NOW + shift).node_id == NODE.id
    else:
        assert refusal(signed(), now=NOW + shift) is Reason.CLOCK_SKEW


@pytest.mark.parametrize(
    "params",
    [
        {"expires": None},
        {"expires": signatures._time(NOW + 61)},
        {"expires": signatures._time(NOW)},
        {"expires": signatures._time(NOW - 1)},
        {"nonce": None},
        {"nonce": "short"},
        {"nonce": "x" * 65},
        {"key_id": "node-1"},
    ],
)
def test_bad_parameters(params: dict[str, Any]) -> None:
    expected = Reason.WEAK_KEY if "key_id" in params else Reason.SIGNATURE_INVALID
    assert refusal(custom(**params)) is expected


def test_weak_key_is_named() -> None:
    """The neutral point: R = A, S = 0 would verify for every message."""
    weak = "01" + "00" * 31
    request = with_header(signed(), "signature-input", lambda value: value.replace(NODE.id, weak))
    forged = base64.b64encode(bytes.fromhex(weak) + bytes(32)).decode()
    assert refusal(with_header(request, "signature", lambda _: f"farflung=:{forged}:")) is Reason.WEAK_KEY


@settings(max_examples=150)
@given(
    st.sampled_from(["signature", "signature-input", "content-digest"]),
    st.text(st.characters(max_codepoint=0x2FF), max_size=60),
    st.integers(0, 300),
    st.booleans(),
)
def test_hostile_headers_raise_nothing_but_refusals(name: str, text: str, at: int, keep: bool) -> None:
    request = signed()
    headers = dict(request.headers)
    headers[name] = headers[name][:at] + text + (headers[name][at:] if keep else "")
    try:
        signatures.verify_request(replace(request, headers=headers), BODY, RUN, now=NOW)
    except Refusal as refused:
        assert refused.status in (400, 401)


ANSWER = b'{"leases":[]}'


def answered(
    request: Any, body: bytes = ANSWER, *, status: int = 200, key: Key = RUN_KEY, run: str = RUN
) -> ResponseParts:
    response = ResponseParts(status, httpx.Headers({"content-type": "application/json"}), request)
    signatures.sign_response(response, body, key, run, now=NOW)
    return response


def check(response: ResponseParts, body: bytes = ANSWER, *, run_key: str = RUN_KEY.id, run: str = RUN) -> None:
    signatures.verify_response(response, body, run_key, run)


@pytest.mark.parametrize("status", [200, 429, 503])
def test_answer_round_trip(status: int) -> None:
    check(answered(signed(), status=status))
    check(answered(RequestParts("GET", "https://h/v1/run", httpx.Headers())))


def other_request(**changes: Any) -> RequestParts:
    return signed(**({"url": URL} | changes))


@pytest.mark.parametrize(
    "alter",
    [
        lambda r: replace(r, status_code=500),
        lambda r: replace(r, request=other_request(method="PUT")),
        lambda r: replace(r, request=other_request(url=URL.replace("leases", "rollouts"))),
        lambda r: replace(r, request=other_request(url=URL + "&a=b")),
        lambda r: replace(r, request=other_request(now=NOW + 1)),
        lambda r: replace(r, request=other_request(key=OTHER)),
        lambda r: replace(r, request=other_request(body=b"another question")),
        lambda r: replace(r, headers=httpx.Headers()),
        lambda r: replace(
            r, headers=httpx.Headers({name: value for name, value in r.headers.items() if name != "content-digest"})
        ),
        lambda r: answered(r.request, key=OTHER),
        lambda r: answered(r.request, run="run-2"),
        lambda r: answered(r.request, body=b"other"),
        lambda r: answered(replace(r.request, headers=httpx.Headers())),
    ],
)
def test_answer_is_bound_to_request_key_and_run(alter: Callable[[ResponseParts], ResponseParts]) -> None:
    response = answered(signed())
    check(response)
    altered = alter(response)
    if "signature" not in altered.request.headers:  # the answer to an unsigned question, given to a signed one
        altered = replace(altered, request=response.request)
    with pytest.raises(Refusal) as caught:
        check(altered)
    assert caught.value.reason is Reason.RUN_KEY_CHANGED


def test_answer_with_another_body_or_for_another_run_is_refused() -> None:
    response = answered(signed())
    for arguments in ({"body": b"{}"}, {"body": b""}, {"run_key": OTHER.id}, {"run": "run-2"}):
        with pytest.raises(Refusal):
            check(response, **arguments)


def test_a_node_cannot_answer_with_its_request_signature() -> None:
    request = signed()
    with pytest.raises(Refusal):
        check(ResponseParts(200, request.headers, request), BODY, run_key=NODE.id)

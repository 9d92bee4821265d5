"""Bodies that nobody thought of: whatever comes, the answer is in our terms and the ledger stays as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.completion import Completion
from protocol.messages import Problem
from protocol.reasons import STATUS, Reason
from tests.api.world import ABOUT, Node, World, completion, served, small

pytestmark = pytest.mark.network

JSON_EXAMPLES, MSGPACK_EXAMPLES = 150, 300
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/nodes": ABOUT.model_dump(),
    "/v1/heartbeat": {
        "state": "waiting", "loaded_versions": [0], "open_leases": 0, "spooled": 0, "tokens_per_second": 1.0
    },
    "/v1/leases": {"versions": [0], "slots": 1, "wait_seconds": 0.0, "possession": ""},
    "/v1/relays": {"url": "http://127.0.0.1"},
}  # fmt: skip
EDGES = [0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**400, 1e308, -0.0, "", "0", "\x00", "\ud800", None, True, [], {}]
leaves = st.one_of(
    st.sampled_from(EDGES), st.integers(), st.floats(), st.text(max_size=20), st.booleans(), st.none()
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A run whose only group is leased: right questions change nothing either. No relay is let in, or asked."""
    with served(tmp_path_factory.mktemp("coordinator") / "run", small()) as world:
        yield world


@pytest.fixture(scope="module")
def holder(full: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, list[Completion]]]:
    """Who holds that group, and answers to it."""
    node = full.node(tmp_path_factory.mktemp("pins"))
    lease = node.lease(4)[0]
    yield node, [completion(lease, number) for number in range(4)]
    node.client.close()


def mutated(good: dict[str, Any]) -> st.SearchStrategy[Any]:
    """The right body with fields changed, missing, and beside; or anything at all."""
    changes = st.dictionaries(st.sampled_from([*good, "x", ""]), values, min_size=1, max_size=3)
    absent = st.lists(st.sampled_from(list(good)), max_size=1)
    near = st.tuples(changes, absent).map(
        lambda pair: {name: value for name, value in (good | pair[0]).items() if name not in pair[1]}
    )
    return near | values


def broken(data: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Some bytes cut out, put in, or doubled."""
    place, noise = st.integers(0, 1 << 16), st.binary(max_size=6)

    def damage(parts: tuple[bytes, int, int, bytes]) -> bytes:
        body, start, length, new = parts
        start %= len(body) + 1
        return body[:start] + new + body[start + length % 8 :]

    return st.tuples(data, place, place, noise).map(damage)


def check_answer(response: httpx.Response) -> None:
    """Below 500; a refusal is a problem document whose code has this status."""
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        problem = Problem.model_validate_json(response.content, strict=True)
        assert problem.status == response.status_code == STATUS[problem.code]


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("path", GOOD)
def test_json_bodies(full: World, holder: tuple[Node, list[Completion]], path: str) -> None:
    node, _ = holder
    before, counted = full.snapshot(), full.refusals().total()
    seen: set[int] = set()

    @settings(max_examples=JSON_EXAMPLES, suppress_health_check=QUIET)
    @given(st.binary(max_size=60) | mutated(GOOD[path]).map(as_json) | broken(mutated(GOOD[path]).map(as_json)))
    def fuzz(body: bytes) -> None:
        response = full.signed(node.key, "POST", path, body)
        check_answer(response)
        seen.add(response.status_code)

    fuzz()
    assert 400 in seen and full.refusals().total() > counted
    after = full.snapshot()
    if path in ("/v1/nodes", "/v1/heartbeat"):  # a right one may come about: it says when the node was seen, and how
        del before["nodes"], after["nodes"]
    assert after == before
    assert full.serves()


def test_msgpack_bodies(full: World, holder: tuple[Node, list[Completion]]) -> None:
    node, items = holder
    good = msgspec.structs.asdict(items[0])
    before = full.snapshot()
    packable = st.recursive(
        st.one_of(
            st.integers(-(2**63), 2**64 - 1), st.floats(), st.binary(max_size=20), st.booleans(), st.none(),
            st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        ),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
        max_leaves=8,
    )  # fmt: skip
    wrong = st.dictionaries(st.sampled_from([*good, "x"]), packable, min_size=1, max_size=3)
    # a changed lease, number or index is a refusal of its own; what is left right is never acknowledged here
    unknown = st.sampled_from([{"lease_id": "0" * 32}, {"fencing": 7}, {"index": 1000}, {"reward": 1.0}])
    entry = st.tuples(wrong, unknown).map(lambda pair: good | pair[0] | pair[1])
    bodies = st.lists(entry | packable, max_size=3).map(lambda list_: {"completions": list_}) | packable
    packed = bodies.map(msgspec.msgpack.encode)
    seen: set[str] = set()

    @settings(max_examples=MSGPACK_EXAMPLES, suppress_health_check=QUIET)
    @given(packed | broken(packed) | st.binary(max_size=80))
    def fuzz(body: bytes) -> None:
        response = full.submit(node.key, body)
        check_answer(response)
        seen.add(response.json().get("code", "") if response.status_code >= 400 else "answered")

    fuzz()
    assert Reason.MALFORMED_REQUEST.value in seen
    assert full.snapshot() == before
    assert [answer.status_code for answer in (node.submit(*items), node.submit(*items))] == [200, 200]


HEADERS = ["signature", "signature-input", "content-digest", "content-type", "content-encoding", "host", "x"]


def test_headers(full: World, holder: tuple[Node, list[Completion]]) -> None:
    node, _ = holder
    before = full.snapshot()
    text = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=60)
    piece = st.sampled_from(
        ['farflung=("@method" "@path");', "keyid=", ":AAAA:", "sha-256=", '"', "(", ";", ",", "=1e9", "?1"]
    )
    value = (text | st.lists(piece, max_size=8).map("".join)).map(str.strip)

    @settings(max_examples=JSON_EXAMPLES // 2, suppress_health_check=QUIET)
    @given(st.sampled_from(HEADERS), value, st.booleans())
    def fuzz(name: str, value: str, instead: bool) -> None:
        def change(request: httpx.Request) -> None:
            request.headers.encoding = "latin-1"
            request.headers[name] = value if instead else request.headers.get(name, "") + value

        response = full.signed(node.key, "POST", "/v1/leases", as_json(GOOD["/v1/leases"]), change=change)
        assert response.status_code < 500
        if response.headers["content-type"] != "text/plain; charset=utf-8":  # the server's own, for what is no HTTP
            check_answer(response)

    fuzz()
    assert full.snapshot() == before and full.serves()


def test_addresses(full: World) -> None:
    places = st.sampled_from(["/v1/", "/v1/run", "/v1/head", "/v1/shards/", "/v1/manifests/", "/v1/receipts/", "/", ""])
    text = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=40)
    before = full.snapshot()

    @settings(max_examples=JSON_EXAMPLES, suppress_health_check=QUIET)
    @given(places, text | st.binary(max_size=20).map(lambda data: "".join(f"%{byte:02x}" for byte in data)))
    def fuzz(place: str, rest: str) -> None:
        if (place + rest).split("?")[0] == "/events":
            return  # a stream, which has no end
        request = f"GET {place}{rest} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answer = full.raw(request.encode())
        assert answer.startswith(b"HTTP/1.1 ") and int(answer[9:12]) < 500, answer

    fuzz()
    assert full.snapshot() == before and full.serves()

"""The origin of the weights: head, manifests, shards, and every way to ask for something else."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from coordinator.api.app import create_app
from protocol.canonical import sha256_hex
from protocol.manifest import HEAD, MANIFEST, Head, Manifest
from protocol.reasons import Reason
from protocol.signed import open_document
from tests.api.world import World, check_problem

pytestmark = pytest.mark.network


@pytest.fixture(scope="module")
def head(world: World) -> Head:
    response = world.http.get(f"{world.url}/v1/head")
    return open_document(response.content, HEAD, Head, world.run.key.id)


@pytest.fixture(scope="module")
def manifest(world: World, head: Head) -> Manifest:
    response = world.http.get(f"{world.url}/v1/manifests/{head.name}")
    assert sha256_hex(response.content) == head.manifest_sha256
    return open_document(response.content, MANIFEST, Manifest, world.run.key.id)


def test_head_and_manifest_lead_to_every_byte(world: World, head: Head, manifest: Manifest) -> None:
    assert head.version == 0 and head.run_id == world.run.spec.run_id and head.expires > head.issued
    folder = world.run.version_dir(head.name)
    for file in manifest.files:
        served = b"".join(world.http.get(f"{world.url}/v1/shards/{shard.sha256}").content for shard in file.shards)
        assert served == (folder / file.name).read_bytes()


def test_a_head_is_asked_for_by_what_is_known(world: World) -> None:
    for query, status in (("", 200), ("?after=-1", 200), ("?after=0", 204), ("?after=9007199254740991", 204)):
        response = world.http.get(f"{world.url}/v1/head{query}")
        assert response.status_code == status
        assert (response.content == b"") == (status == 204)
    assert world.http.get(f"{world.url}/v1/head?after=0&wait=0.2").status_code == 204


@pytest.mark.parametrize(
    "query",
    [
        "after=x", "after=", "after=1.5", "after=-2", "after=9007199254740992", "after=" + "9" * 5000, "wait=nan",
        "wait=inf", "wait=-1", "wait=21", "wait=x", "wait=1e400", "after=%00", "after=0&after=x", "wait=%zz",
    ],
)  # fmt: skip
def test_a_head_is_not_asked_for_like_this(world: World, query: str) -> None:
    with world.only_counts(Reason.MALFORMED_REQUEST):
        check_problem(world.http.get(f"{world.url}/v1/head?{query}"), Reason.MALFORMED_REQUEST)


def test_a_patient_question_for_the_head_hears_of_the_new_version(narrow: World) -> None:
    """Several wait, more than the server has threads; nothing but the new version can end it before its time."""
    with ThreadPoolExecutor(50) as pool:
        asked = [pool.submit(narrow.http.get, f"{narrow.url}/v1/head?after=0&wait=20") for _ in range(50)]
        assert narrow.serves()
        narrow.publish(1)
        heads = [open_document(question.result().content, HEAD, Head, narrow.run.key.id) for question in asked]
    assert {head.version for head in heads} == {1}


def test_a_head_is_signed_again_when_a_third_of_its_life_is_over(narrow: World) -> None:
    """Through an application of its own, whose clock can be set."""
    app = create_app(narrow.run)
    life, start = narrow.run.config.network.head_life_seconds, 1_800_000_000.0

    async def ask(client: httpx.AsyncClient, now: float) -> Head:
        app.state.edge.clock = lambda: now
        return open_document((await client.get("/v1/head")).content, HEAD, Head, narrow.run.key.id)

    async def heads() -> list[Head]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return [await ask(client, start + life * part) for part in (0.0, 0.33, 0.34, 0.6)]

    first, same, renewed, kept = asyncio.run(heads())
    assert first == same and renewed == kept
    assert (first.issued, first.expires) == (int(start), int(start + life))
    assert renewed.issued == int(start + life * 0.34) and renewed.name == first.name


def test_ranges(world: World, manifest: Manifest) -> None:
    shard = max((shard for file in manifest.files for shard in file.shards), key=lambda shard: shard.size)
    url = f"{world.url}/v1/shards/{shard.sha256}"
    whole = world.http.get(url).content
    assert hashlib.sha256(whole).hexdigest() == shard.sha256
    size = shard.size
    for asked, start, end in (
        ("0-0", 0, 1), ("100-199", 100, 200), (f"{size - 5}-", size - 5, size), ("-7", size - 7, size),
        (f"0-{size * 2}", 0, size),
    ):  # fmt: skip
        response = world.http.get(url, headers={"range": f"bytes={asked}"})
        assert response.status_code == 206 and response.content == whole[start:end]
        assert response.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
    many = world.http.get(url, headers={"range": "bytes=" + ",".join(f"{n}-{n + 9}" for n in range(0, 9999, 5))})
    assert len(many.content) <= size + 10_000, "overlapping ranges are not an amplifier"
    assert world.http.get(url, headers={"range": f"bytes={size}-"}).status_code == 416
    for odd in ("bytes=", "bytes=a-b", "bytes=5-1", "lines=0-1", "bytes=--", "bytes=" + "0-," * 9000, "x"):
        assert world.http.get(url, headers={"range": odd}).status_code in (200, 206, 400, 416)


PLACES = ["/v1/shards/", "/v1/manifests/"]
TRICKS = [
    "..%2f..%2fkeys%2fseed.key", "%2e%2e/%2e%2e/keys/run.pem", "..%5c..%5ckeys", "%2fetc%2fpasswd", "....//keys",
    "%00", "a%00" + "0" * 62, "0" * 63, "0" * 64, "0" * 65, "A" * 64, "é" * 64, "%ff%fe", "%EF%BC%90" * 64,
    "x" * 20000, "v0-00000000%2f..", "v0-0000000g", "v٠-00000000", "v0-00000000.json", "v0-00000000%0a", "head.json",
    "0" * 64 + "%0a", ".", "%2e", "%2e%2e", "*", "~", "%25", "con",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: trick[:30])
def test_no_path_reaches_the_file_system(world: World, place: str, trick: str) -> None:
    encoded = trick if trick.isascii() else "".join(f"%{byte:02x}" for byte in trick.encode())
    target = (place + encoded).encode()
    with world.only_counts(Reason.NOT_FOUND):
        answer = world.raw(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 ") and b'"code":"not_found"' in body


def test_the_newest_weights_need_no_signature_and_the_rest_is_not_served(world: World, head: Head) -> None:
    assert world.http.get(f"{world.url}/v1/manifests/{head.name}").status_code == 200
    run = world.run
    for path in sorted(path for path in run.path.rglob("*") if path.is_file()):
        name = path.relative_to(run.path)
        if name.parts[0] == "shards":
            continue
        for prefix in ("/", "/v1/", "/v1/shards/", "/v1/manifests/"):
            assert world.http.get(f"{world.url}{prefix}{name}").status_code == 404

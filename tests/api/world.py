"""A coordinator as it is served, on a loopback port over a real run directory; and what tests ask of it."""

from __future__ import annotations

import logging
import queue
import secrets
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
import uvicorn
from sqlalchemy import event, select

from coordinator.api.app import serve
from coordinator.config import NetworkConfig, RunConfig, ScheduleConfig
from coordinator.ledger import nodes, tables, training
from coordinator.ledger.training import Published
from coordinator.run import Run, create_run
from node.client import Client
from protocol import signatures
from protocol.canonical import sha256_hex
from protocol.completion import CONTENT_TYPE, Completion, encode_batch
from protocol.identity import Key
from protocol.messages import Lease, LeaseRequest, Problem, RegisterNode
from protocol.reasons import ADVICE, STATUS, Reason

ABOUT = RegisterNode(software="test", engine="test", device="cpu")
PATIENCE = 30.0
"""Seconds after which something that should happen at once is given up."""

_TLS = ssl.create_default_context()


def small(*, rollouts_per_version: int = 4, max_staleness: int = 0, private_relays: bool = False) -> RunConfig:
    """Groups of four; by default room for a single one. Leases last ten minutes: none runs out by itself."""
    return RunConfig(
        seed=7,
        schedule=ScheduleConfig(
            max_staleness=max_staleness,
            group_size=4,
            rollouts_per_version=rollouts_per_version,
            propagation_grace=0.0,
            lease_seconds=600.0,
            open_slots_per_node=16,
        ),
        network=NetworkConfig(allow_private_relays=private_relays),
    )


@dataclass(frozen=True)
class Answer:
    """What the server said: to whom (a node's id, or nothing), and every byte of it."""

    who: str
    url: str
    status: int
    headers: str
    body: bytes


@dataclass
class World:
    """A served run. `answers` is every answer that went through a client of this world."""

    run: Run
    url: str
    server: uvicorn.Server
    answers: list[Answer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _keys: int = 0

    def __post_init__(self) -> None:
        self.http = httpx.Client(timeout=PATIENCE, trust_env=False)
        self.watch(self.http, "")

    @property
    def port(self) -> int:
        """Where the server listens."""
        return urlsplit(self.url).port or 0

    def watch(self, client: httpx.Client, who: str) -> None:
        """Record what a client is told."""

        def record(response: httpx.Response) -> None:
            headers = "\n".join(f"{name}: {value}" for name, value in response.headers.items())
            self.answers.append(Answer(who, str(response.url), response.status_code, headers, response.read()))

        client.event_hooks["response"] = [record]

    def key(self) -> Key:
        """A key that nobody has used yet, the same in every run of a test file."""
        self._keys += 1
        return Key.from_seed(self._keys.to_bytes(32, "big"))

    def client(self, key: Key, pins: Path, clock: Callable[[], float] = time.time) -> Client:
        """The node's own client, connected. `pins` is a folder."""
        with mock.patch.object(ssl, "create_default_context", return_value=_TLS):  # 30 ms each, for nothing here
            client = Client(self.url, key, clock)
        self.watch(client._http, key.id)
        client.connect(f"{self.url}#run={self.run.key.id}", pins / key.id)
        return client

    def node(self, pins: Path) -> Node:
        """A node of the allowlist, registered."""
        key = self.key()
        with self.run.ledger.write() as tx:
            nodes.allow(tx, key.id, "test")
        client = self.client(key, pins)
        client.register(ABOUT)
        return Node(self, key, client)

    def signed(
        self,
        key: Key,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        nonce: str | None = None,
        now: float | None = None,
        run_id: str | None = None,
        change: Callable[[httpx.Request], None] = lambda request: None,
    ) -> httpx.Response:
        """Send a signed request; `change` is done to it after it was signed."""
        request = self.http.build_request(method, self.url + path, content=body, headers=headers)
        signatures.sign_request(
            request,
            body,
            key,
            self.run.spec.run_id if run_id is None else run_id,
            now=time.time() if now is None else now,
            nonce=nonce or secrets.token_hex(16),
        )
        change(request)
        return self.http.send(request)

    def submit(self, key: Key, body: bytes, content_type: str = CONTENT_TYPE) -> httpx.Response:
        """Send a body of rollouts."""
        return self.signed(key, "POST", "/v1/rollouts", body, headers={"content-type": content_type})

    def connect(self) -> socket.socket:
        """A connection of its own."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def raw(self, data: bytes) -> bytes:
        """Send bytes; what comes back until the server closes, which a request must ask for or deserve."""
        with self.connect() as connection:
            try:
                connection.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before it was read to the end; the answer may still be there
            return read_all(connection)

    def publish(self, version: int) -> None:
        """Enter a version whose weights nobody will look at."""
        weights = sha256_hex(f"weights {version}".encode())
        name = f"v{version}-{weights[:8]}"
        with self.run.ledger.write() as tx:
            published = Published(version, version, name, "full", weights, sha256_hex(b"manifest"), 1)
            training.enter_version(tx, self.run.spec, published, now=time.time())

    def wait_for_nonces(self, key: Key, number: int) -> None:
        """Return when the server has checked so many requests of a key."""
        query = select(tables.nonces.c.nonce).where(tables.nonces.c.key == key.id)

        def arrived() -> bool:
            with self.run.ledger.read() as tx:
                return len(tx.execute(query).all()) >= number

        eventually(arrived)

    def snapshot(self) -> dict[str, Any]:
        """All tables but the counter of refusals and the nonces, and the names in the store."""
        found: dict[str, Any] = {}
        with self.run.ledger.read() as tx:
            for table in tables.metadata.sorted_tables:
                if table.name not in ("refusals", "nonces"):
                    rows = [tuple(row) for row in tx.execute(select(table))]
                    found[table.name] = sorted(map(repr, (row for row in rows if row[0] != "tick")))
        found["store"] = sorted(path.name for path in self.run.store.root.rglob("*") if path.is_file())
        return found

    def refusals(self) -> Counter[str]:
        """The counter."""
        with self.run.ledger.read() as tx:
            return Counter({row.code: row.count for row in tx.execute(select(tables.refusals))})

    @contextmanager
    def only_counts(self, *reasons: Reason) -> Iterator[None]:
        """What happens in here counts these refusals, once each, and changes nothing else."""
        before, counted = self.snapshot(), self.refusals()
        yield
        assert self.refusals() - counted == Counter(reason.value for reason in reasons)
        assert self.snapshot() == before

    @contextmanager
    def settles(self) -> Iterator[None]:
        """The server is done with every connection that was opened in here when this returns."""
        state = self.server.server_state
        before = set(state.connections)
        yield
        self.raw(b"GET /v1/run HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")  # accepted after the others
        eventually(lambda: not state.tasks and set(state.connections) <= before)

    def serves(self) -> bool:
        """Does the server still answer?"""
        return self.http.get(f"{self.url}/v1/run").status_code == 200


@dataclass(frozen=True)
class Node:
    """A registered node."""

    world: World
    key: Key
    client: Client

    def lease(self, slots: int = 4, *, versions: tuple[int, ...] = (0,), wait: float = 0.0) -> list[Lease]:
        """Ask for work. Raises Refusal."""
        return list(self.client.lease(LeaseRequest(versions=versions, slots=slots, wait_seconds=wait)).leases)

    def completions(self, slots: int = 4) -> list[Completion]:
        """Lease, and answer each slot with nonsense."""
        return [completion(lease, number) for lease in self.lease(slots) for number in range(len(lease.slots))]

    def submit(self, *items: Completion) -> httpx.Response:
        """Send completions."""
        return self.world.submit(self.key, encode_batch(items))


def completion(lease: Lease, number: int, **changes: Any) -> Completion:
    """An answer of the right form to a leased slot; nothing in it is true."""
    answer = Completion(
        lease_id=lease.lease_id,
        fencing=lease.slots[number].fencing,
        index=lease.slots[number].index,
        run_spec_digest=lease.run_spec_digest,
        version=lease.version,
        weights_digest=lease.weights_digest,
        tokens=bytes(8),
        logprobs=bytes(8),
        commitment=bytes(258),
        finish_reason="stop",
        engine="test",
        engine_version="1",
        generate_seconds=0.5,
    )
    return msgspec.structs.replace(answer, **changes)


def check_problem(response: httpx.Response, reason: Reason) -> Problem:
    """The answer is a problem document (RFC 9457) with this code, and all its parts agree."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    problem = Problem.model_validate_json(response.content, strict=True)
    assert problem.code is reason, problem
    assert problem.status == response.status_code == STATUS[reason]
    assert problem.type and problem.title and problem.detail
    return problem


def check_signed(world: World, response: httpx.Response) -> None:
    """The run key has signed this answer to this request. Raises Refusal."""
    parts = signatures.ResponseParts(response.status_code, response.headers, response.request)
    signatures.verify_response(parts, response.content, world.run.key.id, world.run.spec.run_id)


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    received = b""
    while True:
        try:
            data = connection.recv(1 << 16)
        except ConnectionResetError:
            return received
        if not data:
            return received
        received += data


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds; fail where it never does."""
    until = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > until:
            pytest.fail("it never happened")
        time.sleep(0.01)


class _Errors(logging.Handler):
    """Collects what servers log as errors: an answer of 500 is one."""

    def __init__(self, errors: list[str]):
        super().__init__(logging.ERROR)
        self.errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(logging.Formatter().format(record))


@contextmanager
def served(path: Path, config: RunConfig) -> Iterator[World]:
    """Make a run and serve it in a thread. At the end: no error was logged, no answer was a 5xx, no secret left."""
    run = create_run(path, config)
    # nobody pulls the plug: commits need not reach the disk
    event.listen(run.ledger.engine, "connect", lambda connection, _: connection.execute("pragma synchronous = off"))
    run.ledger.engine.dispose()
    started: queue.Queue[Any] = queue.Queue()
    servers: list[uvicorn.Server] = []

    class Recorded(uvicorn.Server):
        def __init__(self, config: uvicorn.Config):
            super().__init__(config)
            servers.append(self)

    def work() -> None:
        try:
            serve(run, "127.0.0.1", 0, started.put)
        except BaseException as error:
            started.put(error)

    thread = threading.Thread(target=work, daemon=True)
    with mock.patch.object(uvicorn, "Server", Recorded):
        thread.start()
        url = started.get(timeout=PATIENCE)
    assert isinstance(url, str), url
    world = World(run, url, servers[0])
    handler = _Errors(world.errors)
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio", "farflung.api")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield world
    finally:
        world.http.close()
        servers[0].should_exit = True
        thread.join(PATIENCE)
        for logger in loggers:
            logger.removeHandler(handler)
        run.ledger.close()
    assert not thread.is_alive()
    assert world.errors == []
    assert [answer for answer in world.answers if answer.status >= 500] == []
    assert leaks(world) == []


def golds(run: Run, problems: int = 64) -> list[str]:
    """The golds of the first problems, without those that stand in answers by chance (very short, hex digits only) or
    by right ("minim" is in "minimum")."""
    words = [run.task.problem(number).gold["answer"] for number in range(problems)]
    public = run.spec.model_dump_json() + "".join(ADVICE.values())
    return [word for word in words if len(word) >= 5 and set(word) - set("0123456789abcdef") and word not in public]


def leaks(world: World) -> list[str]:
    """Answers with the seed key in them, in any form, or (shards apart: a tokenizer holds many words) with a gold."""
    key = world.run.seed_key
    secret = [key, key.hex().encode(), key.hex().upper().encode(), world.run.key.private.private_bytes_raw()]
    words = [word.encode() for word in golds(world.run)]
    found = []
    for answer in world.answers:
        everything = answer.headers.encode() + answer.body
        forbidden = secret if "/v1/shards/" in answer.url else secret + words
        found += [f"{answer.url}: {word!r}" for word in forbidden if word in everything]
    return found


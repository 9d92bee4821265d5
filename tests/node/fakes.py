"""A coordinator, an engine and a fetcher in the same process, for tests of the worker and of sync."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from node.client import Unreachable
from node.engines.base import EngineError, Generated, Request
from protocol.completion import Completion, decode_batch
from protocol.manifest import Canary, FileEntry, Head, Manifest, Shard, adapter_digest, version_name
from protocol.messages import (
    Acknowledgement,
    Directives,
    Heartbeat,
    Lease,
    LeaseAnswer,
    LeaseRequest,
    LeaseSlot,
    NodeAccount,
    RegisterNode,
    RolloutsAnswer,
)
from protocol.reasons import Reason, Refusal
from tests.ledger.builders import digest, make_spec

SPEC = make_spec()
LONG = 1e6


def make_lease(number: int, slots: int = 4, *, version: int = 0, seconds: float = LONG, now: float = 0.0) -> Lease:
    """A lease that lasts `seconds` after the server's `now`."""
    return Lease(
        lease_id=f"lease-{number}",
        version=version,
        weights_digest=digest(f"weights {version}"),
        run_spec_digest=SPEC.digest,
        prompt=(5, 6),
        slots=tuple(LeaseSlot(index=index, fencing=1, seed=f"{16 * number + index:016x}") for index in range(slots)),
        temperature=1.0,
        max_tokens=4,
        deadline=now + seconds,
    )


class FakeEngine:
    """Answers each request with the seed's last digit, twice, and the end of sequence."""

    name = "fake"
    version_text = "1"

    def __init__(self, *versions: int):
        self.loaded: dict[int, Path] = dict.fromkeys(versions, Path("."))
        self.bases: dict[int, Path | None] = {}
        self.asked: list[Request] = []
        self.during: Callable[[], None] = lambda: None
        self.logprob = -0.5

    def load(self, version: int, folder: Path, base: Path | None) -> None:
        """See Engine.load."""
        self.loaded[version], self.bases[version] = folder, base

    def unload(self, version: int) -> None:
        """See Engine.unload."""
        self.loaded.pop(version, None)

    def versions(self) -> tuple[int, ...]:
        """See Engine.versions."""
        return tuple(sorted(self.loaded))

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generated]]:
        """See Engine.generate."""
        self.asked += requests
        for index, request in enumerate(requests):
            if request.version not in self.loaded:
                raise EngineError(f"version {request.version} is not loaded")
            tokens = (3 + request.seed % 16, 3 + request.seed % 16, 1)
            hidden = torch.full((3, SPEC.model.hidden_size), 1.0 + request.seed % 16)
            yield index, Generated(tokens, (self.logprob,) * 3, hidden, "stop")
            self.during()


class FakeClient:
    """A coordinator that hands out `leases` one answer at a time, then says `queue_full`. `script` holds what the next
    calls raise, by name of the call."""

    def __init__(self, *leases: Lease):
        self.leases = list(leases)
        self.script: dict[str, list[BaseException]] = {}
        self.always: dict[str, BaseException] = {}
        self.calls: list[str] = []
        self.asked: list[LeaseRequest] = []
        self.received: list[Completion] = []
        self.batch_sizes: list[int] = []
        self.beats: list[Heartbeat] = []
        self.codes: list[Reason] = []
        self.relays: tuple[str, ...] = ()
        self.idle = threading.Event()  # set once everything was asked for and nothing is left

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.script.get(name):
            raise self.script[name].pop(0)
        if name in self.always:
            raise self.always[name]

    def register(self, body: RegisterNode) -> NodeAccount:
        """POST /v1/nodes."""
        self._called("register")
        return NodeAccount(
            node_id="0" * 64, status="active", accepted=0, rejected=0, pending=0, dropped=0, credit=0
        )

    def heartbeat(self, body: Heartbeat) -> Directives:
        """POST /v1/heartbeat."""
        self._called("heartbeat")
        self.beats.append(body)
        return Directives(newest=0, relays=self.relays, drain=False, upgrade=None)

    def lease(self, body: LeaseRequest) -> LeaseAnswer:
        """POST /v1/leases."""
        self.asked.append(body)
        self._called("lease")
        if not self.leases:
            self.idle.set()
            raise Refusal(Reason.QUEUE_FULL, retry_after=1)
        return LeaseAnswer(leases=(self.leases.pop(0),), now=0.0)

    def submit(self, batch: bytes) -> RolloutsAnswer:
        """POST /v1/rollouts."""
        self._called("submit")
        items = decode_batch(batch)
        self.received += items
        self.batch_sizes.append(len(items))
        code = self.codes.pop(0) if self.codes else None
        return RolloutsAnswer(
            items=tuple(
                Acknowledgement(
                    lease_id=item.lease_id,
                    fencing=item.fencing,
                    index=item.index,
                    payload_hash=item.payload_hash,
                    rollout_id=None if code else number,
                    code=code,
                )
                for number, item in enumerate(items)
            )
        )


def gone() -> Unreachable:
    """No coordinator there."""
    return Unreachable("nobody answers")


class FakeFetcher:
    """Published versions: name -> manifest and folder. `head` waits until there is a newer one, or gives up at once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifests: dict[str, Manifest] = {}
        self.newest: Head | None = None
        self.fetched: list[str] = []
        self.relays: tuple[str, ...] = ()
        self.fail: list[BaseException] = []
        self.quiet: Callable[[], Any] = lambda: None

    def publish(
        self,
        version: int,
        *,
        base: Manifest | None = None,
        canary: Canary | None = None,
        run_spec_digest: str = SPEC.digest,
    ) -> Manifest:
        """Enter a version, full or an adapter on `base`, and make it the newest."""
        own = digest(f"tensors {version}")
        weights = adapter_digest(base.weights_digest or "", own) if base else own
        manifest = Manifest(
            run_id=SPEC.run_id,
            run_spec_digest=run_spec_digest,
            version=version,
            revision=0,
            sealed=True,
            kind="adapter" if base else "full",
            base=base.name if base else None,
            files=(FileEntry(name="model.safetensors", size=1, shards=(Shard(sha256=own, size=1),)),),
            tensors_digest=own,
            weights_digest=weights,
            created=0,
            canary=canary,
        )
        assert manifest.name == version_name(version, weights)
        self.manifests[manifest.name] = manifest
        self.newest = Head(
            run_id=SPEC.run_id,
            version=version,
            name=manifest.name,
            manifest_sha256=digest(manifest.name),
            issued=0,
            expires=10**10,
        )
        return manifest

    def head(self, after: int | None = None, wait: float = 0.0) -> Head | None:
        """See SyncFetcher.head."""
        if self.fail:
            raise self.fail.pop(0)
        if self.newest is None or (after is not None and self.newest.version <= after):
            self.quiet()
            return None
        return self.newest

    def chain(self, name: str, expected_sha256: str | None = None) -> list[Manifest]:
        """See SyncFetcher.chain."""
        assert expected_sha256 == digest(name)
        manifest = self.manifests[name]
        return [manifest] if manifest.base is None else [self.manifests[manifest.base], manifest]

    def fetch(self, manifest: Manifest) -> Path:
        """See SyncFetcher.fetch."""
        self.fetched.append(manifest.name)
        path = self.folder / manifest.name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def set_relays(self, urls: Sequence[str]) -> None:
        """See SyncFetcher.set_relays."""
        self.relays = tuple(urls)

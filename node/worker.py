"""The worker: leases in, completions out. Small threads around one engine, and a spool between it and the network."""

from __future__ import annotations

import logging
import random
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from protocol.completion import MAX_BATCH_BYTES, MAX_BATCH_ITEMS, Completion, encode_batch
from protocol.messages import Heartbeat, Lease, LeaseRequest, LeaseSlot, RegisterNode
from protocol.reasons import Reason, Refusal
from protocol.runspec import RunSpec
from toploc import commit_many

from .client import Client, Unreachable
from .engines.base import Engine, EngineError, Generated, Request
from .spool import Spool
from .sync import Sync

log = logging.getLogger("farflung.node")
LEASE_WAIT_SECONDS = 10.0
HEARTBEAT_SECONDS = 5.0
BACKOFF_SECONDS = (0.2, 5.0)
MAX_LEASE_SLOTS = 512  # of one request
State = Literal["fetching", "generating", "waiting"]
FATAL = frozenset({Reason.RUN_ENDED, Reason.NODE_BANNED, Reason.NOT_ON_ALLOWLIST, Reason.RUN_KEY_CHANGED})


@dataclass(frozen=True)
class Slot:
    """One leased slot, waiting for the engine. `patience` is when its deadline passes by this machine's clock."""

    lease: Lease
    slot: LeaseSlot
    patience: float


def batches(completions: Sequence[Completion]) -> Iterator[list[Completion]]:
    """Cut into batches that the coordinator takes: at most MAX_BATCH_ITEMS, and well below MAX_BATCH_BYTES together."""
    batch: list[Completion] = []
    size = 0
    for item in completions:
        mine = len(item.tokens) + len(item.logprobs) + len(item.commitment) + 1024
        if batch and (len(batch) == MAX_BATCH_ITEMS or size + mine > MAX_BATCH_BYTES // 2):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += mine
    if batch:
        yield batch


class Stopped(Exception):
    """The worker cannot go on; `reason` says why."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason


class Worker:
    """`capacity`: slots held at once, generated in one go; as many again are leased ahead."""

    def __init__(
        self,
        client: Client,
        engine: Engine,
        sync: Sync,
        spool: Spool,
        spec: RunSpec,
        about: RegisterNode,
        *,
        capacity: int = 64,
        encode: Callable[[Iterable[Completion]], bytes] = lambda items: encode_batch(list(items)),
        rng: random.Random | None = None,
    ):
        self.client, self.engine, self.sync, self.spool, self.spec, self.about = (
            client,
            engine,
            sync,
            spool,
            spec,
            about,
        )
        self.capacity, self.encode, self.rng = capacity, encode, rng or random.Random()
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self._change = threading.Condition()
        self._pending: deque[Slot] = deque()
        self._generating = 0
        self._rate = 0.0

    # threads

    def run(self) -> None:
        """Work until `stop` is set. Raises what ended a thread: nothing dies in silence."""
        self._patient(lambda: self.client.register(self.about))
        jobs: list[tuple[str, Callable[[], None]]] = [
            ("sync", lambda: self.sync.serve(self.stop)),
            ("lease", self._lease_loop),
            ("upload", self._upload_loop),
            ("heartbeat", self._heartbeat_loop),
        ]
        threads = [threading.Thread(target=self._guard, args=job, name=job[0], daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        self._guard("generate", self._generate_loop)
        self._flush()
        if self.error is not None:
            raise self.error

    def _guard(self, name: str, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            if not self.stop.is_set():
                log.error("%s ended: %s", name, error)
                self.error = error
        finally:
            self.halt()

    def halt(self) -> None:
        """End all threads soon."""
        self.stop.set()
        self.wake()

    def wake(self, version: int | None = None) -> None:
        """Something has changed: a version was loaded, slots have come or gone."""
        with self._change:
            self._change.notify_all()

    def _sleep(self, seconds: float) -> None:
        with self._change:
            if not self.stop.is_set():
                self._change.wait(seconds)

    def _patient(self, call: Callable[[], object]) -> None:
        """Repeat a call with back-off until the coordinator answers. Raises Stopped for a final no."""
        delay = BACKOFF_SECONDS[0]
        while not self.stop.is_set():
            try:
                call()
                return
            except Refusal as refusal:
                if refusal.reason in FATAL or refusal.status in (400, 403):
                    raise Stopped(refusal.reason, refusal.detail) from None
                log.warning("coordinator: %s", refusal)
            except Unreachable as error:
                log.warning("coordinator: %s", error)
            self._sleep(delay * (0.5 + self.rng.random()))
            delay = min(2 * delay, BACKOFF_SECONDS[1])

    # leasing

    def _room(self) -> int:
        return 2 * self.capacity - len(self._pending) - self._generating

    def _lease_loop(self) -> None:
        delay = BACKOFF_SECONDS[0]
        while not self.stop.is_set():
            versions = self.sync.ready()
            room = min(self._room(), self.capacity, MAX_LEASE_SLOTS)
            if not versions or room < min(self.spec.group_size, self.capacity):  # whole groups, if it can hold one
                self._sleep(1.0)
                continue
            try:
                ask = LeaseRequest(versions=versions[-16:], slots=room, wait_seconds=LEASE_WAIT_SECONDS)
                answer = self.client.lease(ask)
                delay = BACKOFF_SECONDS[0]
            except Refusal as refusal:
                self._refused(refusal, versions)
                continue
            except Unreachable as error:
                log.warning("coordinator: %s", error)
                self._sleep(delay * (0.5 + self.rng.random()))
                delay = min(2 * delay, BACKOFF_SECONDS[1])
                continue
            received = time.monotonic()
            for lease in answer.leases:
                patience = received + lease.deadline - answer.now
                self._pending.extend(Slot(lease, slot, patience) for slot in lease.slots)
            self.wake()

    def _refused(self, refusal: Refusal, versions: tuple[int, ...]) -> None:
        if refusal.reason in FATAL:
            raise Stopped(refusal.reason, refusal.detail)
        if refusal.reason is Reason.UNKNOWN_NODE:
            self._patient(lambda: self.client.register(self.about))
        elif refusal.reason is Reason.VERSION_BEHIND:
            with self._change:
                self._change.wait_for(lambda: self.stop.is_set() or self.sync.ready() != versions, 1.0)
        elif refusal.reason in (Reason.QUEUE_FULL, Reason.NOT_READY):  # the server has held the answer back already
            self._sleep(BACKOFF_SECONDS[0] * (0.5 + self.rng.random()))
        else:
            log.warning("no lease: %s", refusal)
            self._sleep((refusal.retry_after or 1.0) * (0.5 + self.rng.random()))

    # generating

    def _take(self) -> list[Slot]:
        """Up to `capacity` waiting slots that can still be returned in time, on versions that are loaded."""
        loaded = set(self.sync.ready())
        taken: list[Slot] = []
        while self._pending and len(taken) < self.capacity:
            slot = self._pending.popleft()
            if slot.lease.version in loaded and slot.patience > time.monotonic():
                taken.append(slot)
        return taken

    def _generate_loop(self) -> None:
        while not self.stop.is_set():
            slots = self._take()
            if not slots:
                self._sleep(0.5)
                continue
            self._generating = len(slots)
            started = time.monotonic()
            done: list[tuple[Slot, Generated]] = []
            try:
                for index, answer in self.engine.generate(self._requests(slots)):
                    done.append((slots[index], answer))
            except EngineError as error:  # a version was unloaded meanwhile: its slots are too old for anybody
                log.warning("%d slots are given up: %s", len(slots) - len(done), error)
            seconds = time.monotonic() - started
            for batch in batches(self._completions(done, seconds)):
                self.spool.put(batch)
            tokens = sum(len(answer.tokens) for _, answer in done)
            self._rate = 0.7 * self._rate + 0.3 * tokens / max(seconds, 1e-6)
            self._generating = 0
            self.wake()

    def _requests(self, slots: list[Slot]) -> list[Request]:
        eos = self.spec.model.eos_token_ids
        return [
            Request(
                slot.lease.version,
                slot.lease.prompt,
                int(slot.slot.seed, 16),
                slot.lease.temperature,
                slot.lease.max_tokens,
                eos,
            )
            for slot in slots
        ]

    def _completions(self, done: list[tuple[Slot, Generated]], seconds: float) -> list[Completion]:
        proof = self.spec.proof
        commitments = commit_many(
            [answer.hidden for _, answer in done], chunk_rows=proof.chunk_rows, top_k=proof.top_k
        )
        return [
            Completion(
                lease_id=slot.lease.lease_id,
                fencing=slot.slot.fencing,
                index=slot.slot.index,
                run_spec_digest=slot.lease.run_spec_digest,
                version=slot.lease.version,
                weights_digest=self.sync.digests.get(slot.lease.version, slot.lease.weights_digest),
                tokens=struct.pack(f"<{len(answer.tokens)}i", *answer.tokens),
                logprobs=struct.pack(f"<{len(answer.logprobs)}f", *answer.logprobs),
                commitment=commitment,
                finish_reason=answer.finish_reason,
                engine=self.engine.name,
                engine_version=self.engine.version_text,
                generate_seconds=seconds,
            )
            for (slot, answer), commitment in zip(done, commitments, strict=True)
        ]

    # uploading

    def _upload_loop(self) -> None:
        delay = BACKOFF_SECONDS[0]
        while not self.stop.is_set():
            try:
                if not self._upload_one():
                    self._sleep(1.0)
                delay = BACKOFF_SECONDS[0]
            except Unreachable as error:
                log.warning("coordinator: %s; %d batches are kept", error, len(self.spool))
                self._sleep(delay * (0.5 + self.rng.random()))
                delay = min(2 * delay, BACKOFF_SECONDS[1])

    def _upload_one(self) -> bool:
        """Send the oldest batch. Anything but silence settles it: acknowledged, or refused for good."""
        found = self.spool.oldest()
        if found is None:
            return False
        path, completions = found
        try:
            answer = self.client.submit(self.encode(completions))
            refused = [item.code.value for item in answer.items if item.code is not None]
            if refused:
                log.info("%d of %d completions refused: %s", len(refused), len(answer.items), sorted(set(refused)))
        except Refusal as refusal:
            if refusal.reason in FATAL:
                raise Stopped(refusal.reason, refusal.detail) from None
            if refusal.status in (401, 425, 429, 503) and refusal.reason is not Reason.SIGNATURE_INVALID:
                raise Unreachable(str(refusal)) from None  # the clock, a nonce, the rate, a pause: worth another try
            log.warning("a batch of %d completions was refused: %s", len(completions), refusal)
        self.spool.done(path)
        return True

    def _flush(self) -> None:
        """On the way out: send what is finished, if that takes no time; the rest waits in the spool."""
        deadline = time.monotonic() + 1.5
        try:
            while time.monotonic() < deadline and self._upload_one():
                pass
        except (Unreachable, Refusal, Stopped) as error:
            log.info("kept for later: %s", error)

    # telling

    def _heartbeat_loop(self) -> None:
        while not self.stop.is_set():
            versions = self.sync.ready()
            state: State = "generating" if self._generating else "waiting" if versions else "fetching"
            try:
                directives = self.client.heartbeat(
                    Heartbeat(
                        state=state,
                        loaded_versions=versions,
                        open_leases=len(self._pending) + self._generating,
                        spooled=len(self.spool),
                        tokens_per_second=self._rate,
                    )
                )
                self.sync.fetcher.set_relays(directives.relays)
            except Unreachable as error:
                log.debug("heartbeat: %s", error)
            except Refusal as refusal:
                if refusal.reason in FATAL:
                    raise Stopped(refusal.reason, refusal.detail) from None
                log.warning("heartbeat: %s", refusal)
            self.stop.wait(HEARTBEAT_SECONDS)

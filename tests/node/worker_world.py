"""A worker with a coordinator, an engine and a sync in the same process."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.spool import Spool
from node.worker import Worker
from protocol.messages import RegisterNode
from tests.ledger.builders import digest
from tests.node.fakes import SPEC, FakeClient, FakeEngine

ABOUT = RegisterNode(software="s", engine="e", device="d")
SECONDS = 20.0  # a wait that only a broken worker needs


class FakeSync:
    """Offers what the engine holds; its thread does nothing, or what a test says."""

    def __init__(self, engine: FakeEngine):
        self.engine = engine
        self.digests = {version: digest(f"weights {version}") for version in engine.versions()}
        self.serve: Callable[[threading.Event], Any] = lambda stop: stop.wait()
        self.fetcher = self
        self.relays: Any = None

    def ready(self) -> tuple[int, ...]:
        """See Sync.ready."""
        return self.engine.versions()

    def set_relays(self, relays: Any) -> None:
        """See SyncFetcher.set_relays."""
        self.relays = relays


class World:
    """A worker and everything around it; `run()` works until `until()`."""

    def __init__(self, folder: Path, client: FakeClient, engine: FakeEngine | None = None, **options: Any):
        self.client, self.engine = client, engine or FakeEngine(0)
        self.sync, self.spool = FakeSync(self.engine), Spool(folder / "spool")
        options = {"capacity": 8, "rng": random.Random(1)} | options
        self.worker = Worker(client, self.engine, self.sync, self.spool, SPEC, ABOUT, **options)  # type: ignore[arg-type]
        self.raised: BaseException | None = None
        self.thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:
            self.raised = error

    def start(self) -> None:
        """Start the worker in a thread."""
        self.thread.start()

    def wait(self, until: Callable[[], Any]) -> None:
        """Wait for something that will come."""
        deadline = time.monotonic() + SECONDS
        while not until():
            assert time.monotonic() < deadline and (self.thread.is_alive() or until()), self.raised
            time.sleep(0.005)

    def ended(self) -> BaseException | None:
        """Wait for the worker's own end; what it raised."""
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        return self.raised

    def finish(self) -> None:
        """Halt, and expect no error."""
        self.worker.halt()
        assert self.ended() is None

"""Follows the newest version: fetches it through the relays, loads it beside the others, checks the canary, and only
then offers it. No engine is ever paused."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from protocol.manifest import Canary, Manifest
from protocol.reasons import Reason, Refusal
from protocol.runspec import RunSpec
from shardcast.client import LocalFailed
from shardcast.download import FetchFailed
from shardcast.fetch import SyncFetcher

from .engines.base import Engine, EngineError, Request

log = logging.getLogger("farflung.node")
LONG_POLL_SECONDS = 15.0
RETRY_SECONDS = 1.0
CANARY_GAP = 0.05
"""Nats: a wrong or missing adapter is off by far more, another device or dtype by less."""


class Sync:
    """`loaded(version)` is called after a version has become selectable. `ready()` tells what may be offered."""

    def __init__(
        self,
        fetcher: SyncFetcher,
        engine: Engine,
        spec: RunSpec,
        folder: Path,
        loaded: Callable[[int], None],
        *,
        canaries: bool = True,
    ):
        self.fetcher, self.engine, self.spec, self.folder, self.loaded = fetcher, engine, spec, folder, loaded
        self.canaries = canaries
        self.digests: dict[int, str] = {}
        self._names: dict[int, str] = {}

    def serve(self, stop: threading.Event) -> None:
        """Follow until `stop`. Raises Refusal for what cannot heal (`run_key_changed`, `manifest_wrong_run`)."""
        newest = None
        while not stop.is_set():
            try:
                head = self.fetcher.head(newest, LONG_POLL_SECONDS)
                if head is None:
                    if newest is None:
                        stop.wait(RETRY_SECONDS)
                    continue
                self.take(head.name, head.manifest_sha256)
                newest = head.version
            except Refusal as refusal:
                if refusal.reason in (Reason.RUN_KEY_CHANGED, Reason.MANIFEST_WRONG_RUN):
                    raise
                log.warning("weights: %s", refusal)
                stop.wait(RETRY_SECONDS)
            except (FetchFailed, LocalFailed, EngineError) as error:
                if not stop.is_set():
                    log.warning("weights: %s", error)
                    stop.wait(RETRY_SECONDS)

    def take(self, name: str, manifest_sha256: str) -> None:
        """Fetch a version (and the base of an adapter), load it, check it, offer it, drop what is too old."""
        chain = self.fetcher.chain(name, manifest_sha256)
        manifest = chain[-1]
        if manifest.run_spec_digest != self.spec.digest:
            raise Refusal(Reason.MANIFEST_WRONG_RUN, "the manifest is for another run spec")
        folders = [self.fetcher.fetch(part) for part in chain]
        base = folders[0] if manifest.kind == "adapter" else None
        self.engine.load(manifest.version, folders[-1], base)
        if manifest.canary is not None and self.canaries:
            try:
                check_canary(self.engine, manifest.version, manifest.canary, self.spec)
            except Refusal:
                self.engine.unload(manifest.version)
                raise
        assert manifest.weights_digest is not None
        self.digests[manifest.version] = manifest.weights_digest
        self._names[manifest.version] = manifest.name
        self._forget(manifest)
        self.loaded(manifest.version)

    def ready(self) -> tuple[int, ...]:
        """Versions that are loaded, checked and young enough, ascending."""
        return tuple(version for version in self.engine.versions() if version in self.digests)

    def _forget(self, newest: Manifest) -> None:
        """Keep S + 2 versions; the base of adapters stays."""
        for version in sorted(self.digests):
            if version >= newest.version - self.spec.max_staleness - 1:
                continue
            self.engine.unload(version)
            name = self._names.pop(version)
            del self.digests[version]
            if name != newest.base:
                shutil.rmtree(self.folder / name, ignore_errors=True)


def check_canary(engine: Engine, version: int, canary: Canary, spec: RunSpec) -> None:
    """The engine must give the manifest's sample with these weights: "never delivered" is the commonest silent bug.

    Raises Refusal(`canary_mismatch`).
    """
    request = Request(
        version,
        canary.prompt,
        int(canary.seed, 16),
        spec.sampling.temperature,
        len(canary.tokens),
        spec.model.eos_token_ids,
    )
    ((_, answer),) = list(engine.generate([request]))
    gaps = [abs(a - b) for a, b in zip(answer.logprobs, canary.logprobs, strict=False)]
    if answer.tokens != canary.tokens or not max(gaps) <= CANARY_GAP:
        raise Refusal(Reason.CANARY_MISMATCH, f"version {version}: got {answer.tokens}, expected {canary.tokens}")

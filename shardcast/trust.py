"""What makes a head or a manifest acceptable (after TUF): signature, run, version, age, lengths.

Freeze, rollback and mix-and-match end here; endless data and slow retrieval in `download`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from protocol.canonical import canonical_json, sha256_hex
from protocol.identity import public_key
from protocol.manifest import HEAD, MANIFEST, Head, Manifest, Shard, adapter_digest
from protocol.reasons import Reason, Refusal
from protocol.signed import open_document

from .store import write_atomic

MAX_HEAD_BYTES = 64 << 10
MAX_MANIFEST_BYTES = 8 << 20
MAX_CHAIN = 16


def open_head(data: bytes, run_key: str, run_id: str | None) -> Head:
    """Verify a head's signature and run; with `run_id` None any run of this key.

    Raises Refusal (`manifest_invalid`, `manifest_wrong_run`).
    """
    head = open_document(data, HEAD, Head, run_key, max_bytes=MAX_HEAD_BYTES)
    _same_run(head.run_id, run_id)
    if head.expires <= head.issued or not head.name.startswith(f"v{head.version}-"):
        raise Refusal(Reason.MANIFEST_INVALID, "the head contradicts itself")
    return head


def check_head(head: Head, *, highest: int | None, now: float) -> None:
    """Refuse a head that goes back behind version `highest` or has expired at `now` (Unix seconds).

    Raises Refusal (`manifest_rollback`, `manifest_expired`).
    """
    if highest is not None and head.version < highest:
        raise Refusal(Reason.MANIFEST_ROLLBACK, f"version {head.version} after {highest}")
    if not now < head.expires:
        raise Refusal(Reason.MANIFEST_EXPIRED, f"expired {now - head.expires:.0f} seconds ago")


def open_manifest(data: bytes, run_key: str, run_id: str | None, *, name: str, sha256: str | None = None) -> Manifest:
    """Verify a sealed manifest: signature, run, the name that was asked for, and the digest of the envelope
    where the head gives it. Raises Refusal (`manifest_invalid`, `manifest_wrong_run`).
    """
    if sha256 is not None and sha256_hex(data) != sha256:
        raise Refusal(Reason.MANIFEST_INVALID, f"not the manifest of {name} that the head names")
    manifest = open_document(data, MANIFEST, Manifest, run_key, max_bytes=MAX_MANIFEST_BYTES)
    _same_run(manifest.run_id, run_id)
    if not manifest.sealed or manifest.name != name or manifest.base == name:
        raise Refusal(Reason.MANIFEST_INVALID, f"not the sealed manifest of {name}")
    if manifest.kind == "full" and manifest.weights_digest != manifest.tensors_digest:
        raise Refusal(Reason.MANIFEST_INVALID, "the weights of a full checkpoint are its tensors")
    if len({entry.name.casefold() for entry in manifest.files}) != len(manifest.files):
        raise Refusal(Reason.MANIFEST_INVALID, "two files differ only in case")
    sizes: dict[str, int] = {}
    for shard in shards_of(manifest):
        if sizes.setdefault(shard.sha256, shard.size) != shard.size:
            raise Refusal(Reason.MANIFEST_INVALID, "a shard has two sizes")
    return manifest


def check_base(manifest: Manifest, base: Manifest) -> None:
    """Refuse an adapter whose weights digest does not follow from this base. Raises Refusal(`manifest_invalid`)."""
    if manifest.base != base.name or base.version > manifest.version:
        raise Refusal(Reason.MANIFEST_INVALID, f"{base.name} is not the base of {manifest.name}")
    assert base.weights_digest is not None and manifest.tensors_digest is not None
    if manifest.kind == "adapter":
        if manifest.weights_digest != adapter_digest(base.weights_digest, manifest.tensors_digest):
            raise Refusal(Reason.MANIFEST_INVALID, "the weights digest is not that of base and adapter")


def _same_run(found: str, run_id: str | None) -> None:
    if run_id is not None and found != run_id:
        raise Refusal(Reason.MANIFEST_WRONG_RUN, f"run {found[:64]!r} instead of {run_id!r}")


def shards_of(manifest: Manifest) -> Iterable[Shard]:
    """All shards, in the order of the files; the same shard may come more than once."""
    return (shard for entry in manifest.files for shard in entry.shards)


def retained(manifests: Mapping[str, Manifest], newest_first: Iterable[str], keep: int) -> set[str]:
    """Names to keep: the first `keep`, and every base that one of them needs."""
    names: set[str] = set()
    for name in list(newest_first)[:keep]:
        current: str | None = name
        while current is not None and current in manifests and current not in names:
            names.add(current)
            current = manifests[current].base
    return names


@dataclass(frozen=True)
class Pin:
    """What a folder has bound itself to: run key, run id (None until seen), newest version seen."""

    run_key: str
    run_id: str | None = None
    highest: int | None = None


class Trust:
    """The pin of one folder, kept in a file across restarts."""

    def __init__(self, path: Path, run_key: str | None, run_id: str | None, now: Callable[[], float]):
        """Raises Refusal (`run_key_changed`, `manifest_wrong_run`) if the folder is bound to something else, and
        ValueError if there is neither a stored nor a given key or the file is damaged."""
        self._path, self._now = path, now
        stored = _load(path)
        if stored is None and run_key is None:
            raise ValueError("no run key is pinned")
        if stored is not None and run_key is not None and stored.run_key != run_key:
            raise Refusal(Reason.RUN_KEY_CHANGED, f"pinned {stored.run_key}, now {run_key}")
        pin = stored or Pin(str(run_key))
        public_key(pin.run_key)
        if pin.run_id is not None:
            _same_run(run_id or pin.run_id, pin.run_id)
        self.pin = pin
        self._store(Pin(pin.run_key, pin.run_id or run_id, pin.highest))

    def head(self, data: bytes) -> Head:
        """Verify a head and remember its version. Raises Refusal (see `open_head`, `check_head`)."""
        pin = _load(self._path) or self.pin  # another process may share the folder and be ahead
        head = open_head(data, self.pin.run_key, self.pin.run_id)
        check_head(head, highest=pin.highest, now=self._now())
        self._store(Pin(self.pin.run_key, head.run_id, head.version))
        return head

    def manifest(self, data: bytes, *, name: str, sha256: str | None = None) -> Manifest:
        """Verify a manifest (see `open_manifest`)."""
        return open_manifest(data, self.pin.run_key, self.pin.run_id, name=name, sha256=sha256)

    def same_run(self, run_id: str) -> None:
        """Raises Refusal(`manifest_wrong_run`) if this is another run than the pinned one."""
        _same_run(run_id, self.pin.run_id)

    def _store(self, pin: Pin) -> None:
        if pin != self.pin or not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, canonical_json(pin.__dict__), self._path.parent)
            self.pin = pin


def _load(path: Path) -> Pin | None:
    """The stored pin; None if there is none. Raises ValueError for a damaged file: silence would forget a rollback."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    if not isinstance(value, dict) or set(value) != {"run_key", "run_id", "highest"}:
        raise ValueError(f"{path} is damaged")
    return Pin(**value)


def stored_pin(path: Path) -> Pin | None:
    """What the folder with this pin file is bound to, None if it is new. Raises ValueError for a damaged file."""
    return _load(path)

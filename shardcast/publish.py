"""The trainer's side: a folder with a checkpoint becomes shards, a signed manifest and a signed head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from protocol.canonical import canonical_json, sha256_hex
from protocol.identity import Key
from protocol.manifest import HEAD, MANIFEST, SHARD_BYTES, Canary, FileEntry, FileName, Head, Manifest, adapter_digest
from protocol.reasons import Reason, Refusal
from protocol.signed import open_document, sign_document

from .store import ShardStore
from .tensors import tensors_digest
from .trust import MAX_MANIFEST_BYTES

HEAD_LIFE_SECONDS = 600
PICKLED = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})
_FILE_NAME: TypeAdapter[str] = TypeAdapter(FileName)


def checkpoint_files(folder: Path) -> list[Path]:
    """The files of a checkpoint, sorted by name. Raises ValueError for a symbolic link, a folder, a name that a
    manifest cannot hold, a pickle, and if there is no safetensors file."""
    files = sorted(folder.iterdir(), key=lambda path: path.name)
    for path in files:
        if path.is_symlink() or not path.is_file():
            raise ValueError(f"{path.name}: only plain files are published")
        try:
            _FILE_NAME.validate_python(path.name)
        except ValidationError:
            raise ValueError(f"{path.name!r}: not a publishable file name") from None
        if path.suffix in PICKLED:
            raise ValueError(f"{path.name}: pickled weights are never published")
    if not any(path.suffix == ".safetensors" for path in files):
        raise ValueError("no safetensors file")
    return files


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(size):
            yield piece


def _cut(path: Path, store: ShardStore, shard_bytes: int) -> FileEntry:
    shards = tuple(store.put(piece) for piece in _pieces(path, shard_bytes))
    return FileEntry(name=path.name, size=sum(shard.size for shard in shards), shards=shards)


def publish(
    folder: Path,
    store: ShardStore,
    *,
    run_id: str,
    run_spec_digest: str,
    version: int,
    kind: Literal["full", "adapter"],
    base: str | None,
    base_weights_digest: str | None,
    created: int,
    canary: Canary | None,
    key: Key,
    shard_bytes: int = SHARD_BYTES,
) -> Manifest:
    """Cut every file of `folder` into shards and write the signed manifest, last. `created` in Unix seconds.

    Idempotent: whoever publishes the same version of the same folder again (after a crash, say) gets the manifest that
    is already there, `created` and canary included. Raises ValueError for an unfit folder or contradicting arguments,
    and if the name is taken by other bytes; OSError.
    """
    if (kind == "adapter") != (base is not None) or (kind == "adapter") != (base_weights_digest is not None):
        raise ValueError("an adapter, and only an adapter, has a base and its weights digest")
    files = checkpoint_files(folder)
    own = tensors_digest(path for path in files if path.suffix == ".safetensors")
    entries = tuple(_cut(path, store, shard_bytes) for path in files)
    manifest = Manifest(
        run_id=run_id,
        run_spec_digest=run_spec_digest,
        version=version,
        revision=0,
        sealed=True,
        kind=kind,
        base=base,
        files=entries,
        tensors_digest=own,
        weights_digest=own if base_weights_digest is None else adapter_digest(base_weights_digest, own),
        created=created,
        canary=canary,
    )
    present = store.manifest(manifest.name)
    if present is not None:
        known = open_document(present, MANIFEST, Manifest, key.id, max_bytes=MAX_MANIFEST_BYTES)
        if known.model_copy(update={"created": created, "canary": canary}) == manifest:
            return known
    envelope = canonical_json(sign_document(MANIFEST, manifest, key).model_dump(mode="json"))
    if len(envelope) > MAX_MANIFEST_BYTES:
        raise ValueError(f"a manifest of {len(envelope)} bytes: use larger shards")
    store.write_manifest(manifest.name, envelope)
    return manifest


def sign_head(envelope: bytes, key: Key, *, now: float, life_seconds: float = HEAD_LIFE_SECONDS) -> bytes:
    """The signed head that points to a manifest, given as its envelope; valid for `life_seconds` from `now`.

    Raises Refusal(`manifest_invalid`) if the envelope is not a sealed manifest signed by `key`.
    """
    manifest = open_document(envelope, MANIFEST, Manifest, key.id, max_bytes=MAX_MANIFEST_BYTES)
    if not manifest.sealed:
        raise Refusal(Reason.MANIFEST_INVALID, "a head points to sealed manifests only")
    head = Head(
        run_id=manifest.run_id,
        version=manifest.version,
        name=manifest.name,
        manifest_sha256=sha256_hex(envelope),
        issued=int(now),
        expires=int(now) + max(1, int(life_seconds)),
    )
    return canonical_json(sign_document(HEAD, head, key).model_dump(mode="json"))

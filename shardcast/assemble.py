"""From verified shards to a checkpoint folder that appears all at once."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from protocol.manifest import FileEntry, Manifest
from protocol.reasons import Reason, Refusal

from .store import ShardStore, fsync_folder
from .tensors import tensors_digest
from .trust import shards_of

SCRATCH = ".assembling-"


class ShardLost(Exception):
    """A shard in the cache is gone or no longer what it was; it has been removed and must be fetched again."""


def _write(entry: FileEntry, store: ShardStore, folder: Path) -> None:
    with (folder / entry.name).open("xb") as file:
        for shard in entry.shards:
            try:
                data = store.path(shard.sha256).read_bytes()
            except FileNotFoundError:
                raise ShardLost(shard.sha256) from None
            if hashlib.sha256(data).hexdigest() != shard.sha256:
                store.delete(shard.sha256)
                raise ShardLost(shard.sha256)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def assemble(manifest: Manifest, store: ShardStore, parent: Path) -> Path:
    """Build `parent/<name>/` from the store: every shard hashed once more, tensors compared with the manifest, synced,
    renamed into place. Memory: one shard.

    Raises ShardLost, Refusal(`tensors_mismatch`) if the manifest contradicts its own shards, OSError.
    """
    target = parent / manifest.name
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=parent))
    try:
        for entry in manifest.files:
            _write(entry, store, scratch)
        tensor_files = [scratch / e.name for e in manifest.files if e.name.endswith(".safetensors")]
        try:
            found = tensors_digest(tensor_files)
        except ValueError as error:
            raise Refusal(Reason.TENSORS_MISMATCH, str(error)[:200]) from None
        if found != manifest.tensors_digest:
            raise Refusal(Reason.TENSORS_MISMATCH, f"{found} instead of {manifest.tensors_digest}")
        scratch.chmod(0o755)
        fsync_folder(scratch)
        if target.exists():  # damaged: `is_whole` said so, or we would not be here
            os.replace(target, Path(tempfile.mkdtemp(prefix=SCRATCH, dir=parent)))
        os.replace(scratch, target)
        fsync_folder(parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def is_whole(manifest: Manifest, folder: Path) -> bool:
    """True if the folder holds exactly the files of the manifest, byte for byte. Raises OSError."""
    if not folder.is_dir() or {path.name for path in folder.iterdir()} != {entry.name for entry in manifest.files}:
        return False
    return all(_is_whole(entry, folder / entry.name) for entry in manifest.files)


def _is_whole(entry: FileEntry, path: Path) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != entry.size:
        return False
    with path.open("rb") as file:
        return all(hashlib.sha256(file.read(s.size)).hexdigest() == s.sha256 for s in entry.shards)


def clean(parent: Path) -> None:
    """Remove what a killed process left behind; only while holding the folder's lock."""
    for path in parent.glob(f"{SCRATCH}*"):
        shutil.rmtree(path, ignore_errors=True)


def forget_shards(manifest: Manifest, store: ShardStore) -> None:
    """Drop the shards of an assembled checkpoint: its folder holds the bytes now."""
    for shard in shards_of(manifest):
        store.delete(shard.sha256)

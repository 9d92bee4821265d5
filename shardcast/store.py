"""A folder of content-addressed shards, and beside them the signed documents that give them meaning."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from protocol.canonical import sha256_hex
from protocol.identity import is_hex64
from protocol.manifest import Shard

_NAME = re.compile(r"v[0-9]{1,12}-[0-9a-f]{8}")


def is_version_name(text: object) -> bool:
    """True for `v<version>-<digest8>`, the only file name of a manifest."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, scratch: Path) -> None:
    """Replace `path` by `data`, through a synced temporary file in `scratch` (same file system)."""
    descriptor, temporary = tempfile.mkstemp(prefix=".tmp-", dir=scratch)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


class WrongBytes(Exception):
    """What was written is not the shard: too long, too short, or another digest."""


class ShardWriter:
    """Takes the bytes of one shard as they come; nothing is visible before `commit`. A context manager."""

    def __init__(self, store: ShardStore, shard: Shard):
        self._store, self._shard = store, shard
        self._digest, self._size = hashlib.sha256(), 0
        descriptor, name = tempfile.mkstemp(prefix=".tmp-", dir=store.scratch)
        self._file, self._path = os.fdopen(descriptor, "wb"), Path(name)

    def write(self, data: bytes) -> None:
        """Append. Raises WrongBytes as soon as there are too many, OSError if the disk refuses."""
        self._size += len(data)
        if self._size > self._shard.size:
            raise WrongBytes(f"more than {self._shard.size} bytes")
        self._digest.update(data)
        self._file.write(data)

    def commit(self) -> None:
        """Check size and digest, sync and rename into place. Raises WrongBytes or OSError."""
        if self._size != self._shard.size:
            raise WrongBytes(f"{self._size} bytes instead of {self._shard.size}")
        if self._digest.hexdigest() != self._shard.sha256:
            raise WrongBytes("another digest")
        self._file.flush()
        os.fsync(self._file.fileno())
        target = self._store.path(self._shard.sha256)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self._path, target)
        fsync_folder(target.parent)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()  # may flush, and fail, when the disk is full
        except OSError:
            if error is None:
                raise
        finally:
            self._path.unlink(missing_ok=True)


class ShardStore:
    """Shards in `root/shards/ab/cd/<sha256>`, manifests in `root/manifests/`, the head in `root/head.json`.

    Whatever is under its final name is whole: files appear by rename.
    """

    def __init__(self, root: Path):
        self.root = root
        self.scratch = root / "tmp"
        self._shards = root / "shards"
        self._manifests = root / "manifests"
        for folder in (self.scratch, self._shards, self._manifests):
            folder.mkdir(parents=True, exist_ok=True)

    def clean(self) -> None:
        """Remove what a killed process left half written; for the one process that owns the folder."""
        for path in self.scratch.iterdir():
            path.unlink(missing_ok=True)

    # shards

    def path(self, sha256: str) -> Path:
        """Where the shard lies, there or not. Raises ValueError for anything but 64 lowercase hex characters."""
        if not is_hex64(sha256):
            raise ValueError("a shard is named by 64 lowercase hex characters")
        return self._shards / sha256[:2] / sha256[2:4] / sha256

    def put(self, data: bytes) -> Shard:
        """Store `data` (at most 64 MiB) and return its name and size."""
        shard = Shard(sha256=sha256_hex(data), size=len(data))
        if self.size(shard.sha256) != shard.size:
            with self.writer(shard) as writer:
                writer.write(data)
                writer.commit()
        return shard

    def writer(self, shard: Shard) -> ShardWriter:
        """A checked way in for bytes that come from elsewhere."""
        return ShardWriter(self, shard)

    def has(self, sha256: str) -> bool:
        """True if the shard is here."""
        return self.size(sha256) is not None

    def size(self, sha256: str) -> int | None:
        """Bytes of the shard, None if it is not here."""
        try:
            return self.path(sha256).stat().st_size
        except FileNotFoundError:
            return None

    def delete(self, sha256: str) -> None:
        """Remove the shard if it is here; whoever is reading it reads on."""
        self.path(sha256).unlink(missing_ok=True)

    def shards(self) -> Iterator[str]:
        """The digests of all shards here."""
        for path in self._shards.glob("??/??/*"):
            if is_hex64(path.name):
                yield path.name

    # signed documents

    def manifest_path(self, name: str) -> Path:
        """Where the manifest lies, there or not. Raises ValueError for anything but a version name."""
        if not is_version_name(name):
            raise ValueError("a manifest is named v<version>-<digest8>")
        return self._manifests / f"{name}.json"

    def write_manifest(self, name: str, envelope: bytes, *, replace: bool = False) -> None:
        """Store a signed manifest. A name is never used for other bytes: raises ValueError unless `replace`."""
        path = self.manifest_path(name)
        present = self.manifest(name)
        if present == envelope:
            return
        if present is not None and not replace:
            raise ValueError(f"{name} is already published with other bytes")
        write_atomic(path, envelope, self.scratch)

    def manifest(self, name: str) -> bytes | None:
        """The signed manifest, None if it is not here."""
        return _read(self.manifest_path(name))

    def delete_manifest(self, name: str) -> None:
        """Remove the manifest if it is here."""
        self.manifest_path(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Names of all manifests here, oldest version first."""
        found = [path.stem for path in self._manifests.glob("v*.json") if is_version_name(path.stem)]
        return sorted(found, key=lambda name: (int(name[1:].split("-")[0]), name))

    def write_head(self, envelope: bytes) -> None:
        """Replace the signed pointer to the newest version."""
        write_atomic(self.root / "head.json", envelope, self.scratch)

    def head(self) -> bytes | None:
        """The signed pointer to the newest version, None before the first."""
        return _read(self.root / "head.json")


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None

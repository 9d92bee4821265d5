"""Manifests and heads: what a checkpoint consists of and which one is the newest (after TUF, theupdateframework.io).

A manifest never changes once sealed; only the head expires. Both are signed by the run key.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from .signed import Hex64, Strict

MANIFEST, HEAD = "manifest", "head"
SHARD_BYTES = 16 << 20
Count = Annotated[int, Field(ge=0, lt=2**53)]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,119}$")]
VersionName = Annotated[str, StringConstraints(pattern=r"^v[0-9]{1,12}-[0-9a-f]{8}$")]


class Shard(Strict):
    """One content-addressed piece: SHA-256 of its bytes and their number."""

    sha256: Hex64
    size: Annotated[int, Field(ge=0, le=64 << 20)]


class FileEntry(Strict):
    """A file of the checkpoint: a plain name without folders, and its shards in order."""

    name: FileName
    size: Count
    shards: tuple[Shard, ...]

    @model_validator(mode="after")
    def _sizes(self) -> FileEntry:
        if sum(shard.size for shard in self.shards) != self.size:
            raise ValueError(f"the shards of {self.name} do not add up to its size")
        return self


class Canary(Strict):
    """What an engine must reproduce with these weights: the seeded sample of a fixed prompt."""

    prompt: tuple[Count, ...]
    seed: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    tokens: tuple[Count, ...]
    logprobs: tuple[float, ...]


class Manifest(Strict):
    """A checkpoint. `tensors_digest` is that of the tensors in its own files, `weights_digest` that of the policy
    which they make up (of base and adapter with LoRA); a submission names the latter."""

    format: Literal[1] = 1
    run_id: str
    run_spec_digest: Hex64
    version: Count
    revision: Count
    sealed: bool
    kind: Literal["full", "patch", "adapter"]
    base: VersionName | None
    files: tuple[FileEntry, ...]
    tensors_digest: Hex64 | None
    weights_digest: Hex64 | None
    created: Count
    canary: Canary | None

    @model_validator(mode="after")
    def _whole(self) -> Manifest:
        if self.sealed and (self.tensors_digest is None or self.weights_digest is None):
            raise ValueError("a sealed manifest names its digests")
        if (self.kind == "full") != (self.base is None):
            raise ValueError("patches and adapters name their base, full checkpoints have none")
        if len({entry.name for entry in self.files}) != len(self.files):
            raise ValueError("a file is named twice")
        return self

    @property
    def name(self) -> str:
        """The immutable name, `v42-<first 8 digits of the weights digest>`; only sealed manifests have one."""
        assert self.weights_digest is not None
        return version_name(self.version, self.weights_digest)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)


class Head(Strict):
    """The signed pointer to the newest sealed version; `issued` and `expires` in Unix seconds."""

    run_id: str
    version: Count
    name: VersionName
    manifest_sha256: Hex64
    issued: Count
    expires: Count


def version_name(version: int, weights_digest: str) -> str:
    """`v<version>-<digest8>`: a name is never used for other bytes, so caches keyed by it are never wrong."""
    return f"v{version}-{weights_digest[:8]}"


def adapter_digest(base_weights: str, adapter_tensors: str) -> str:
    """Weights digest of a LoRA policy: SHA-256 over a label, the base's and the adapter's digests."""
    return hashlib.sha256(f"farflung/adapter/1\n{base_weights}\n{adapter_tensors}".encode()).hexdigest()

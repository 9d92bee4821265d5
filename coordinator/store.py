"""The store: blobs by content hash. A folder by default."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from protocol.canonical import sha256_hex
from protocol.identity import is_hex64


class BlobStore:
    """Blobs named by their SHA-256 under one folder. `put` returns after the bytes are durable."""

    def __init__(self, root: Path):
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Where a blob lies. Raises ValueError for anything but a digest."""
        if not is_hex64(name):
            raise ValueError("a blob is named by 64 lowercase hex characters")
        return self.root / name[:2] / name

    def put(self, data: bytes) -> str:
        """Store bytes durably; returns their name. Storing the same bytes again is free."""
        name = sha256_hex(data)
        path = self.path(name)
        if path.exists():
            return name
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{name}.{secrets.token_hex(4)}")
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return name

    def get(self, name: str) -> bytes:
        """Read a blob and check it. Raises FileNotFoundError, ValueError (the bytes are not the named ones)."""
        data = self.path(name).read_bytes()
        if sha256_hex(data) != name:
            raise ValueError(f"blob {name} is corrupt")
        return data

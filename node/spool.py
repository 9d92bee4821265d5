"""Finished completions on disk until they are acknowledged: an outage of the coordinator loses nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from protocol.completion import Completion


class Spool:
    """One file per batch of completions, named by a counter; written durably before `put` returns."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.part"):
            leftover.unlink()
        self._lock = threading.Lock()
        taken = (path.stem for path in folder.iterdir() if path.suffix in (".batch", ".bad"))
        self._next = max((int(stem) for stem in taken if stem.isdecimal()), default=0) + 1

    def _files(self) -> list[Path]:
        files = (path for path in self.folder.glob("*.batch") if path.stem.isdecimal())
        return sorted(files, key=lambda path: int(path.stem))

    def put(self, completions: Sequence[Completion]) -> None:
        """Keep a batch."""
        with self._lock:
            number, self._next = self._next, self._next + 1
        temporary = self.folder / f"{number}.part"
        with open(temporary, "xb") as file:
            file.write(msgspec.msgpack.encode(list(completions)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / f"{number}.batch")
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def oldest(self) -> tuple[Path, tuple[Completion, ...]] | None:
        """The oldest batch and its file, or None. A damaged file is set aside as `.bad`; one that cannot be read now
        raises OSError and stays."""
        for path in self._files():
            try:
                items = msgspec.msgpack.decode(path.read_bytes(), type=tuple[Completion, ...])
                return path, items
            except FileNotFoundError:
                continue  # settled by another thread meanwhile
            except msgspec.MsgspecError:
                path.rename(path.with_suffix(".bad"))
        return None

    def done(self, path: Path) -> None:
        """Forget a batch that is settled."""
        path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._files())

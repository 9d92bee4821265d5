"""Finished completions on disk: in order, durable, and no damage spreads."""

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from node.spool import Spool
from protocol.completion import Completion
from tests.verifier.test_checks import completion


def batch(*numbers: int) -> list[Completion]:
    return [completion(index=number) for number in numbers]


def drain(spool: Spool) -> list[list[int]]:
    found = []
    while (oldest := spool.oldest()) is not None:
        path, items = oldest
        found.append([item.index for item in items])
        spool.done(path)
    return found


def test_order_and_content_survive_restarts(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    assert spool.oldest() is None and len(spool) == 0
    for number in range(12):  # past 9, where names as text would come in another order
        if number % 5 == 4:
            spool = Spool(tmp_path / "spool")
        spool.put(batch(number, number + 100))
    spool = Spool(tmp_path / "spool")
    assert len(spool) == 12
    path, items = spool.oldest() or (None, ())
    assert list(items) == batch(0, 100) and spool.oldest() == (path, items)  # looking takes nothing away
    assert drain(spool) == [[number, number + 100] for number in range(12)] and len(spool) == 0
    spool.put(batch(1))
    assert drain(Spool(tmp_path / "spool")) == [[1]]


def test_put_returns_after_file_and_folder_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path)
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def replaced(*names: Any) -> None:
        order.append("rename")
        replace(*names)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    spool.put(batch(1))
    assert order == ["file", "rename", "folder"]


@pytest.mark.parametrize("damage", ["truncated", "empty", "noise", "another format", "not a batch"])
def test_damaged_file_is_set_aside_and_the_rest_goes_on(tmp_path: Path, damage: str) -> None:
    spool = Spool(tmp_path)
    for number in range(3):
        spool.put(batch(number))
    first = tmp_path / "1.batch"
    data = first.read_bytes()
    first.write_bytes(
        {
            "truncated": data[:-1],
            "empty": b"",
            "noise": bytes(range(256)),
            "another format": b'{"completions": []}',
            "not a batch": b"\x91\x81\xa1a\x01",
        }[damage]
    )
    spool = Spool(tmp_path)
    assert drain(spool) == [[1], [2]]
    assert [path.name for path in tmp_path.iterdir()] == ["1.bad"]


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.put(batch(1, 2))
    data = (tmp_path / "1.batch").read_bytes()
    for length in range(0, len(data), 7):
        (tmp_path / "1.batch").write_bytes(data[:length])
        assert spool.oldest() is None


def test_a_number_is_not_used_again_for_what_was_set_aside(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.put(batch(1))
    (tmp_path / "1.batch").write_bytes(b"rotten")
    assert spool.oldest() is None
    spool = Spool(tmp_path)
    spool.put(batch(2))
    assert {path.name for path in tmp_path.iterdir()} == {"1.bad", "2.batch"}


def test_what_cannot_be_read_just_now_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptors left is no damage: finished work must not be thrown away for it."""
    spool = Spool(tmp_path)
    spool.put(batch(1))

    def exhausted(path: Path) -> bytes:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", exhausted)
        with pytest.raises(OSError, match="Too many"):
            spool.oldest()
    assert drain(spool) == [[1]]


def test_a_file_that_vanishes_between_listing_and_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads upload while the worker ends."""
    spool = Spool(tmp_path)
    for number in range(2):
        spool.put(batch(number))
    listed = spool._files()
    monkeypatch.setattr(spool, "_files", lambda: listed)
    spool.done(listed[0])
    found = spool.oldest()
    assert found is not None and found[0] == listed[1]


def test_leftovers_and_strangers(tmp_path: Path) -> None:
    Spool(tmp_path).put(batch(1))
    (tmp_path / "2.part").write_bytes(b"half")
    (tmp_path / "notes.batch").write_bytes(b"mine")
    spool = Spool(tmp_path)
    assert not (tmp_path / "2.part").exists() and len(spool) == 1
    assert drain(spool) == [[1]] and (tmp_path / "notes.batch").exists()


def test_done_twice_does_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.put(batch(1))
    path, _ = spool.oldest() or (None, None)
    assert path is not None
    spool.done(path)
    spool.done(path)
    assert len(spool) == 0


def test_threads_get_numbers_of_their_own(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    threads = [threading.Thread(target=spool.put, args=(batch(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sum(drain(spool), [])) == list(range(8))

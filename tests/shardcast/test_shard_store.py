"""The folder of shards: names, atomic writes, and what never becomes visible."""

import errno
import os
from pathlib import Path

import pytest

from protocol.canonical import sha256_hex
from protocol.manifest import Shard
from shardcast.store import ShardStore, WrongBytes

BAD_NAMES = [
    "", "..", "../" * 21 + "x", "A" * 64, "g" * 64, "a" * 63, "a" * 65, "a" * 64 + "\n", "a" * 62 + "/.",
    "\x00" * 64, "../../../../etc/passwd", "a" * 64 + "/", "٣" * 64,
]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(tmp_path / "store")


def test_put_and_delete(store: ShardStore) -> None:
    shard = store.put(b"hello")
    assert shard == Shard(sha256=sha256_hex(b"hello"), size=5)
    path = store.path(shard.sha256)
    assert path.read_bytes() == b"hello"
    assert path.relative_to(store.root).parts == ("shards", shard.sha256[:2], shard.sha256[2:4], shard.sha256)
    assert store.has(shard.sha256) and store.size(shard.sha256) == 5 and list(store.shards()) == [shard.sha256]
    store.delete(shard.sha256)
    store.delete(shard.sha256)
    assert not store.has(shard.sha256) and store.size(shard.sha256) is None and list(store.shards()) == []


def test_put_mends_a_shard_of_the_wrong_size(store: ShardStore) -> None:
    shard = store.put(b"hello")
    store.path(shard.sha256).write_bytes(b"he")
    store.put(b"hello")
    assert store.path(shard.sha256).read_bytes() == b"hello"


@pytest.mark.parametrize("name", BAD_NAMES)
def test_only_digests_become_paths(store: ShardStore, name: str) -> None:
    for call in (store.path, store.has, store.size, store.delete):
        with pytest.raises(ValueError):
            call(name)


@pytest.mark.parametrize(
    "name", [*BAD_NAMES, "v1", "v1-ABCDEF01", "v1-0123456", "v-01234567", "v1-01234567/", "x/v1-01234567"]
)
def test_only_version_names_become_paths(store: ShardStore, name: str) -> None:
    for call in (store.manifest_path, store.manifest, store.delete_manifest):
        with pytest.raises(ValueError):
            call(name)
    with pytest.raises(ValueError):
        store.write_manifest(name, b"")


@pytest.mark.parametrize("written", [b"hellp", b"hell", b"", b"hello!"])
def test_wrong_bytes_leave_nothing(store: ShardStore, written: bytes) -> None:
    shard = Shard(sha256=sha256_hex(b"hello"), size=5)
    with pytest.raises(WrongBytes), store.writer(shard) as writer:
        writer.write(written)
        writer.commit()
    assert not store.has(shard.sha256) and list(store.scratch.iterdir()) == []


def test_too_many_bytes_stop_at_once(store: ShardStore) -> None:
    with pytest.raises(WrongBytes), store.writer(Shard(sha256="0" * 64, size=5)) as writer:
        writer.write(b"12345")
        writer.write(b"6")


def test_nothing_is_visible_before_the_rename(store: ShardStore) -> None:
    shard = Shard(sha256=sha256_hex(b"hello"), size=5)
    with store.writer(shard) as writer:
        writer.write(b"hello")
        assert not store.has(shard.sha256)
        writer.commit()
        assert store.has(shard.sha256)
    assert list(store.scratch.iterdir()) == []


def test_a_full_disk_leaves_nothing(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    store.write_head(b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        store.put(b"hello")
    with pytest.raises(OSError):
        store.write_head(b"new")
    assert list(store.shards()) == [] and list(store.scratch.iterdir()) == [] and store.head() == b"old"


def test_documents(store: ShardStore) -> None:
    assert store.head() is None and store.manifest("v1-01234567") is None and store.names() == []
    for name in ("v10-01234567", "v9-01234567", "v9-00000000"):
        store.write_manifest(name, name.encode())
    assert store.names() == ["v9-00000000", "v9-01234567", "v10-01234567"]
    assert store.manifest("v9-01234567") == b"v9-01234567"
    store.write_manifest("v9-01234567", b"v9-01234567")
    with pytest.raises(ValueError, match="already"):
        store.write_manifest("v9-01234567", b"other")
    store.write_manifest("v9-01234567", b"other", replace=True)
    assert store.manifest("v9-01234567") == b"other"
    store.delete_manifest("v9-01234567")
    assert store.names() == ["v9-00000000", "v10-01234567"]
    store.write_head(b"a")
    store.write_head(b"b")
    assert store.head() == b"b"


def test_clean_removes_what_a_kill_left(store: ShardStore) -> None:
    (store.scratch / ".tmp-x").write_bytes(b"half")
    shard = store.put(b"hello")
    store.clean()
    assert list(store.scratch.iterdir()) == [] and store.has(shard.sha256)

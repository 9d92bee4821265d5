"""Publishing: what is refused, what the manifest says, and that doing it twice changes nothing."""

from pathlib import Path

import pytest
from shardcast_net import KEY, NOW, OTHER_KEY, RUN_ID, SHARD, SPEC_DIGEST, checkpoint, head_of, publish_folder

from protocol.canonical import sha256_hex
from protocol.manifest import Canary, adapter_digest
from protocol.reasons import Refusal
from shardcast.publish import publish, sign_head
from shardcast.store import ShardStore
from shardcast.tensors import tensors_digest
from shardcast.trust import open_head, open_manifest


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(tmp_path / "store")


def test_manifest_describes_the_folder(tmp_path: Path, store: ShardStore) -> None:
    folder = checkpoint(tmp_path / "c")
    manifest = publish_folder(folder, store, 7)
    assert [entry.name for entry in manifest.files] == ["config.json", "empty.txt", "model.safetensors"]
    for entry in manifest.files:
        assert b"".join(store.path(s.sha256).read_bytes() for s in entry.shards) == (folder / entry.name).read_bytes()
        assert all(s.size == SHARD for s in entry.shards[:-1])
    digest = tensors_digest([folder / "model.safetensors"])
    assert manifest.tensors_digest == manifest.weights_digest == digest
    assert manifest.name == f"v7-{digest[:8]}" and store.names() == [manifest.name]
    assert store.head() is None
    envelope = store.manifest(manifest.name)
    assert envelope is not None and open_manifest(envelope, KEY.id, RUN_ID, name=manifest.name) == manifest


def test_publishing_twice_gives_the_same_bytes(tmp_path: Path, store: ShardStore) -> None:
    folder = checkpoint(tmp_path / "c")
    manifest = publish_folder(folder, store, 7)
    first, other = store.manifest(manifest.name), ShardStore(tmp_path / "other")
    assert publish_folder(folder, store, 7) == publish_folder(folder, other, 7) == manifest
    assert store.manifest(manifest.name) == first == other.manifest(manifest.name)


def test_a_later_retry_keeps_the_manifest_that_is_there(tmp_path: Path, store: ShardStore) -> None:
    folder = checkpoint(tmp_path / "c")
    manifest = publish_folder(folder, store, 7)
    canary = Canary(prompt=(1,), seed="0" * 16, tokens=(2,), logprobs=(-0.5,))
    again = publish(
        folder, store, run_id=RUN_ID, run_spec_digest=SPEC_DIGEST, version=7, kind="full", base=None,
        base_weights_digest=None, created=int(NOW) + 99, canary=canary, key=KEY, shard_bytes=SHARD,
    )  # fmt: skip
    assert again == manifest
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="already"):
        publish_folder(folder, store, 7)


def test_adapter_names_base_and_digest_of_both(tmp_path: Path, store: ShardStore) -> None:
    base = publish_folder(checkpoint(tmp_path / "base"), store, 0)
    adapter = publish_folder(checkpoint(tmp_path / "a", seed=1, rows=2), store, 3, base=base)
    assert adapter.base == base.name and base.weights_digest and adapter.tensors_digest
    assert adapter.weights_digest == adapter_digest(base.weights_digest, adapter.tensors_digest)
    assert adapter.name == f"v3-{adapter.weights_digest[:8]}"


@pytest.mark.parametrize(
    ("kind", "base", "digest"),
    [
        ("full", "v0-01234567", None),
        ("full", None, "0" * 64),
        ("adapter", None, "0" * 64),
        ("adapter", "v0-01234567", None),
    ],
)
def test_contradicting_arguments(tmp_path: Path, store: ShardStore, kind: str, base: str, digest: str) -> None:
    with pytest.raises(ValueError, match="adapter"):
        publish(
            checkpoint(tmp_path / "c"), store, run_id=RUN_ID, run_spec_digest=SPEC_DIGEST, version=1,
            kind=kind, base=base, base_weights_digest=digest, created=0, canary=None, key=KEY,  # type: ignore[arg-type]
        )  # fmt: skip


def _link(folder: Path) -> None:
    (folder / "link.json").symlink_to(folder / "config.json")


@pytest.mark.parametrize(
    "spoil",
    [
        _link,
        lambda folder: (folder / "sub").mkdir(),
        lambda folder: (folder / ".hidden").write_text(""),
        lambda folder: (folder / "white space").write_text(""),
        lambda folder: (folder / "training_args.bin").write_text(""),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b"no tensors"),
    ],
)
def test_unfit_folders(tmp_path: Path, store: ShardStore, spoil) -> None:  # type: ignore[no-untyped-def]
    folder = checkpoint(tmp_path / "c")
    spoil(folder)
    with pytest.raises(ValueError):
        publish_folder(folder, store, 1)
    assert store.names() == [] and list(store.shards()) == []


def test_head_points_to_the_manifest(tmp_path: Path, store: ShardStore) -> None:
    manifest = publish_folder(checkpoint(tmp_path / "c"), store, 7)
    head = open_head(head_of(store, manifest.name, life=60), KEY.id, RUN_ID)
    envelope = store.manifest(manifest.name)
    assert envelope and head.manifest_sha256 == sha256_hex(envelope)
    assert (head.name, head.version, head.issued, head.expires) == (manifest.name, 7, int(NOW), int(NOW) + 60)
    with pytest.raises(Refusal):
        sign_head(envelope, OTHER_KEY, now=NOW)

"""Heads and manifests that must be refused, each with its reason code (TUF: rollback, freeze, mix-and-match)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shardcast_net import KEY, NOW, OTHER_KEY, RUN_ID, checkpoint, flip, head_of, publish_folder

from protocol.canonical import canonical_json, sha256_hex
from protocol.identity import Key
from protocol.manifest import HEAD, MANIFEST, Head, Manifest, Shard
from protocol.reasons import Reason, Refusal
from protocol.signed import sign_document
from shardcast.store import ShardStore
from shardcast.trust import Trust, check_base, open_head, open_manifest, retained


def signed(kind: str, document: Any, key: Key = KEY) -> bytes:
    return canonical_json(sign_document(kind, document, key).model_dump(mode="json"))


def refused(reason: Reason, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(Refusal) as caught:
        call(*args, **kwargs)
    assert caught.value.reason is reason


def head(version: int = 5, issued: float = NOW, life: float = 600, run_id: str = RUN_ID, **changes: Any) -> Head:
    fields: dict[str, Any] = {
        "run_id": run_id, "version": version, "name": f"v{version}-01234567", "manifest_sha256": "0" * 64,
        "issued": int(issued), "expires": int(issued + life),
    }  # fmt: skip
    return Head(**{**fields, **changes})


@pytest.fixture
def trust(tmp_path: Path) -> Trust:
    return Trust(tmp_path / "pin.json", KEY.id, RUN_ID, lambda: NOW)


def test_rollback_is_remembered_across_restarts(tmp_path: Path, trust: Trust) -> None:
    assert trust.head(signed(HEAD, head(5))).version == 5
    assert trust.head(signed(HEAD, head(5, issued=NOW - 1))).version == 5
    again = Trust(tmp_path / "pin.json", None, None, lambda: NOW)
    for either in (trust, again):
        refused(Reason.MANIFEST_ROLLBACK, either.head, signed(HEAD, head(4)))
        assert either.pin.highest == 5
    assert again.head(signed(HEAD, head(6))).version == 6
    refused(Reason.MANIFEST_ROLLBACK, trust.head, signed(HEAD, head(5)))  # another process went ahead


@pytest.mark.parametrize(("issued", "good"), [(NOW - 599, True), (NOW - 600, False), (NOW - 5000, False)])
def test_expired_head(trust: Trust, issued: float, good: bool) -> None:
    data = signed(HEAD, head(issued=issued))
    if good:
        trust.head(data)
    else:
        refused(Reason.MANIFEST_EXPIRED, trust.head, data)
        assert trust.pin.highest is None


def test_head_of_another_run_key_or_kind(trust: Trust) -> None:
    refused(Reason.MANIFEST_WRONG_RUN, trust.head, signed(HEAD, head(run_id="other")))
    refused(Reason.MANIFEST_INVALID, trust.head, signed(HEAD, head(), OTHER_KEY))
    refused(Reason.MANIFEST_INVALID, trust.head, signed(MANIFEST, head()))
    refused(Reason.MANIFEST_INVALID, trust.head, signed(HEAD, head(name="v6-01234567")))
    refused(Reason.MANIFEST_INVALID, trust.head, signed(HEAD, head(expires=int(NOW))))
    assert trust.pin.highest is None


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b"[" * 100, b"0" * (1 << 17), b'{"kind":"head","kind":"head"}'])
def test_garbage_heads(trust: Trust, data: bytes) -> None:
    refused(Reason.MANIFEST_INVALID, trust.head, data)


def test_no_bit_of_a_head_can_change(trust: Trust) -> None:
    data = signed(HEAD, head())
    for position in range(0, len(data), 3):
        with pytest.raises(Refusal):
            trust.head(flip(data, position))


def test_pin(tmp_path: Path, trust: Trust) -> None:
    path = tmp_path / "pin.json"
    refused(Reason.RUN_KEY_CHANGED, Trust, path, OTHER_KEY.id, RUN_ID, lambda: NOW)
    refused(Reason.MANIFEST_WRONG_RUN, Trust, path, KEY.id, "other", lambda: NOW)
    refused(Reason.WEAK_KEY, Trust, tmp_path / "new.json", "00" * 32, RUN_ID, lambda: NOW)
    with pytest.raises(ValueError, match="no run key"):
        Trust(tmp_path / "new.json", None, RUN_ID, lambda: NOW)
    path.write_text("[]")
    with pytest.raises(ValueError):
        Trust(path, KEY.id, RUN_ID, lambda: NOW)


def test_run_id_is_taken_from_the_first_head(tmp_path: Path) -> None:
    trust = Trust(tmp_path / "pin.json", KEY.id, None, lambda: NOW)
    trust.head(signed(HEAD, head()))
    refused(Reason.MANIFEST_WRONG_RUN, trust.head, signed(HEAD, head(6, run_id="other")))
    assert Trust(tmp_path / "pin.json", None, None, lambda: NOW).pin.run_id == RUN_ID


@pytest.fixture
def published(tmp_path: Path) -> tuple[ShardStore, Manifest]:
    store = ShardStore(tmp_path / "store")
    return store, publish_folder(checkpoint(tmp_path / "c"), store, 5)


def test_manifest_is_the_one_that_the_head_names(published: tuple[ShardStore, Manifest]) -> None:
    store, manifest = published
    data = store.manifest(manifest.name)
    assert data is not None
    named = open_head(head_of(store, manifest.name), KEY.id, RUN_ID)
    assert open_manifest(data, KEY.id, RUN_ID, name=named.name, sha256=named.manifest_sha256) == manifest
    refused(Reason.MANIFEST_INVALID, open_manifest, data, KEY.id, RUN_ID, name=manifest.name, sha256="0" * 64)
    refused(Reason.MANIFEST_INVALID, open_manifest, data, KEY.id, RUN_ID, name="v6-01234567")
    refused(Reason.MANIFEST_INVALID, open_manifest, data, OTHER_KEY.id, RUN_ID, name=manifest.name)
    refused(Reason.MANIFEST_WRONG_RUN, open_manifest, data, KEY.id, "other", name=manifest.name)
    changed = flip(data, len(data) // 2)
    with pytest.raises(Refusal):
        open_manifest(changed, KEY.id, RUN_ID, name=manifest.name)


def test_manifests_that_contradict_themselves(published: tuple[ShardStore, Manifest]) -> None:
    _, manifest = published
    entry = manifest.files[-1]
    first = entry.shards[0]
    resized = Shard(sha256=first.sha256, size=first.size + 1)
    changes: list[dict[str, Any]] = [
        {"sealed": False},
        {"tensors_digest": "0" * 64},
        {"files": (entry, entry.model_copy(update={"name": entry.name.upper()}))},
        {"files": (entry.model_copy(update={"shards": (*entry.shards, resized), "size": entry.size + resized.size}),)},
    ]
    for change in changes:
        data = signed(MANIFEST, manifest.model_copy(update=change))
        refused(Reason.MANIFEST_INVALID, open_manifest, data, KEY.id, RUN_ID, name=manifest.name)
    data = signed(MANIFEST, manifest)
    assert open_manifest(data, KEY.id, RUN_ID, name=manifest.name, sha256=sha256_hex(data)) == manifest


def test_adapter_must_follow_from_its_base(tmp_path: Path, published: tuple[ShardStore, Manifest]) -> None:
    store, base = published
    adapter = publish_folder(checkpoint(tmp_path / "a", seed=1), store, 6, base=base)
    check_base(adapter, base)
    other = publish_folder(checkpoint(tmp_path / "o", seed=2), store, 5)
    refused(Reason.MANIFEST_INVALID, check_base, adapter, other)
    swapped = base.model_copy(update={"weights_digest": base.name[-8:] + "0" * 56})
    refused(Reason.MANIFEST_INVALID, check_base, adapter, swapped)


def test_retention_keeps_bases(tmp_path: Path, published: tuple[ShardStore, Manifest]) -> None:
    store, base = published
    known = {base.name: base}
    for version in range(6, 10):
        adapter = publish_folder(checkpoint(tmp_path / str(version), seed=version), store, version, base=base)
        known[adapter.name] = adapter
    names = sorted(known, reverse=True)
    assert retained(known, names, 2) == {*names[:2], base.name}
    assert retained(known, names, 99) == set(known)
    assert retained({}, names, 2) == set()

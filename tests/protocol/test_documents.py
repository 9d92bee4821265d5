"""Signed documents, manifests, heads, the run spec, control-plane messages, reason codes."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from protocol import messages
from protocol.canonical import canonical_json, sha256_hex
from protocol.identity import Key
from protocol.manifest import HEAD, MANIFEST, Canary, FileEntry, Head, Manifest, Shard, adapter_digest, version_name
from protocol.reasons import ADVICE, STATUS, Reason, Refusal
from protocol.runspec import EnvironmentSpec, ModelSpec, ProofSpec, RunSpec, SamplingSpec
from protocol.signed import Signed, Strict, open_document, sign_document

KEY, OTHER = Key.from_seed(b"k" * 32), Key.from_seed(b"o" * 32)
DIGEST, SECOND = "ab" * 32, "cd" * 32
NEWEST = Head(run_id="r", version=7, name="v7-abababab", manifest_sha256=DIGEST, issued=100, expires=200)
FULL = Manifest(
    run_id="r",
    run_spec_digest=DIGEST,
    version=7,
    revision=1,
    sealed=True,
    kind="full",
    base=None,
    files=(FileEntry(name="model.safetensors", size=5, shards=(Shard(sha256=DIGEST, size=5),)),),
    tensors_digest=DIGEST,
    weights_digest=SECOND,
    created=100,
    canary=Canary(prompt=(1, 2), seed="0" * 16, tokens=(3,), logprobs=(-0.5,)),
)
SPEC = RunSpec(
    run_id="test-run",
    model=ModelSpec(
        architecture="Tiny",
        base_weights_digest=DIGEST,
        tokenizer_digest=SECOND,
        dtype="float32",
        head_dtype="float32",
        publish_dtype="float32",
        vocab_size=64,
        hidden_size=32,
        eos_token_ids=(1,),
        adapter="none",
    ),
    sampling=SamplingSpec(temperature=1.0, max_prompt_tokens=16, max_tokens=32),
    proof=ProofSpec(),
    max_staleness=4,
    group_size=8,
    rollouts_per_version=128,
    publish_every=1,
    propagation_grace=30.0,
    lease_seconds=60.0,
    minimum_tokens_per_second=1.0,
    price_prompt_token=1,
    price_completion_token=2,
    calibration_families=("hf/float32/cpu",),
    environments=(EnvironmentSpec(name="math", version="1"),),
)


def envelope(document: Strict = NEWEST, kind: str = HEAD, **changes: str) -> bytes:
    return sign_document(kind, document, KEY).model_copy(update=changes).model_dump_json().encode()


def refused(data: bytes, kind: str = HEAD, model: type[Strict] = Head, **limits: int) -> None:
    with pytest.raises(Refusal) as caught:
        open_document(data, kind, model, KEY.id, **limits)
    assert caught.value.reason is Reason.MANIFEST_INVALID


@pytest.mark.parametrize("document,kind", [(NEWEST, HEAD), (FULL, MANIFEST), (SPEC, "run_spec")])
def test_signed_round_trip(document: Strict, kind: str) -> None:
    assert open_document(envelope(document, kind), kind, type(document), KEY.id) == document


def test_kinds_are_not_confused() -> None:
    data = envelope()
    refused(data, "receipt")
    refused(data.replace(b'"kind":"head"', b'"kind":"receipt"'), "receipt")
    refused(data.replace(b'"kind":"head"', b'"kind":"receipt"'), HEAD)
    refused(data, HEAD, Manifest)


def altered_payload() -> str:
    return sign_document(HEAD, NEWEST, KEY).payload.replace('"version":7', '"version":8')


@pytest.mark.parametrize(
    "data",
    [
        envelope(payload=altered_payload()),
        envelope(signature="0" * 128),
        envelope(key=OTHER.id),
        envelope(key=OTHER.id, signature=sign_document(HEAD, NEWEST, OTHER).signature),
        envelope(signature=sign_document(HEAD, NEWEST, OTHER).signature),
        envelope(signature=sign_document(HEAD, NEWEST, KEY).signature.upper()),
        envelope(key=KEY.id.upper()),
        envelope(payload=sign_document(HEAD, NEWEST, KEY).payload + " "),
        envelope()[:-1],
        envelope() + b"{}",
        b"",
        b"[]",
        b"null",
        b'{"kind":"head"}',
        envelope()[:-1] + b',"more":1}',
        envelope()[:-1] + b',"kind":"head"}',
    ],
)
def test_altered_documents_are_refused(data: bytes) -> None:
    refused(data)


@pytest.mark.parametrize(
    "payload",
    [
        '{"run_id":"r","run_id":"s"}',
        "NaN",
        "[" * 50,
        "",
        '{"run_id":"r"}',
        NEWEST.model_dump_json()[:-1] + ',"more":1}',
        NEWEST.model_dump_json().replace("7,", "7.0,"),
        NEWEST.model_dump_json().replace("100", '"100"'),
        NEWEST.model_dump_json().replace('"issued":100', '"issued":true'),
    ],
)
def test_signed_nonsense_is_still_refused(payload: str) -> None:
    signature = KEY.sign(b"farflung/head/1\n" + payload.encode()).hex()
    refused(Signed(kind=HEAD, payload=payload, key=KEY.id, signature=signature).model_dump_json().encode())


def test_payload_is_verified_as_sent_not_as_reserialized() -> None:
    payload = json.dumps(NEWEST.model_dump(mode="json"), indent=1)
    signature = KEY.sign(b"farflung/head/1\n" + payload.encode()).hex()
    data = Signed(kind=HEAD, payload=payload, key=KEY.id, signature=signature).model_dump_json().encode()
    assert open_document(data, HEAD, Head, KEY.id) == NEWEST


def test_length_is_bounded() -> None:
    data = envelope()
    assert open_document(data, HEAD, Head, KEY.id, max_bytes=len(data))
    refused(data, max_bytes=len(data) - 1)


def rebuilt(document: Strict, **changes: Any) -> Strict:
    text = canonical_json(document.model_dump(mode="json") | changes)
    return type(document).model_validate_json(text)


def test_frozen() -> None:
    with pytest.raises(ValidationError):
        NEWEST.version = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    "changes",
    [
        {"sealed": True, "tensors_digest": None},
        {"sealed": True, "weights_digest": None},
        {"kind": "patch"},
        {"kind": "adapter"},
        {"base": "v6-abababab"},
        {"kind": "patch", "base": "v6-ABABABAB"},
        {"kind": "patch", "base": "v6-abababab/../x"},
        {"kind": "pickle"},
        {"format": 2},
        {"version": -1},
        {"version": 2**53},
        {"version": True},
        {"version": 7.0},
        {"run_spec_digest": DIGEST.upper()},
        {"run_spec_digest": DIGEST + "\n"},
        {"files": [FULL.files[0].model_dump(mode="json")] * 2},
        {"unknown": 1},
        {"created": None},
    ],
)
def test_manifest_refuses(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        rebuilt(FULL, **changes)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", ".hidden", "a\n", "a\0", "\u00fc", "a" * 121]
)
def test_file_names_are_plain(name: str) -> None:
    with pytest.raises(ValidationError):
        rebuilt(FULL.files[0], name=name)


def test_file_sizes_add_up() -> None:
    for size in (4, 6, -5):
        with pytest.raises(ValidationError):
            rebuilt(FULL.files[0], size=size)
    with pytest.raises(ValidationError):
        rebuilt(FULL.files[0].shards[0], size=(64 << 20) + 1)
    with pytest.raises(ValidationError):
        rebuilt(FULL.files[0].shards[0], size=-1)


def test_growing_and_dependent_manifests() -> None:
    growing = rebuilt(FULL, sealed=False, tensors_digest=None, weights_digest=None)
    assert isinstance(growing, Manifest) and not growing.sealed
    adapter = rebuilt(FULL, kind="adapter", base="v0-abababab")
    assert isinstance(adapter, Manifest) and adapter.base == "v0-abababab"


def test_names_and_digests() -> None:
    assert FULL.name == version_name(7, SECOND) == "v7-cdcdcdcd"
    assert FULL.size == 5
    expected = sha256_hex(f"farflung/adapter/1\n{DIGEST}\n{SECOND}".encode())
    assert adapter_digest(DIGEST, SECOND) == expected != adapter_digest(SECOND, DIGEST)


@pytest.mark.parametrize("name", ["v7", "7-abababab", "v-abababab", "v7-ababab", "v7-abababab\n", "v7-ABABABAB"])
def test_version_names_have_one_form(name: str) -> None:
    with pytest.raises(ValidationError):
        rebuilt(NEWEST, name=name)


def test_run_spec_digest_is_fixed() -> None:
    """If this changes, no node of an older version can join a run any more: raise `format` with it."""
    assert SPEC.digest == "85658b5a342bb76ba1f11527495824e831159d8b9cf8908012e502785bc3be12"


def test_run_spec_digest_follows_every_value() -> None:
    _ = SPEC.digest
    assert SPEC.model_copy(update={"max_staleness": 0}).digest != SPEC.digest
    assert rebuilt(SPEC).model_dump() == SPEC.model_dump() and rebuilt(SPEC).digest == SPEC.digest  # type: ignore[attr-defined]
    assert "digest" not in SPEC.model_dump()


@pytest.mark.parametrize(
    "path,value",
    [
        (("sampling", "temperature"), 0.0),
        (("sampling", "temperature"), 10.5),
        (("sampling", "top_p"), 0.9),
        (("sampling", "scheme"), 2),
        (("sampling", "max_tokens"), 0),
        (("model", "eos_token_ids"), []),
        (("model", "dtype"), "int8"),
        (("model", "base_weights_digest"), "ab"),
        (("proof", "format"), 2),
        (("max_staleness",), -1),
        (("group_size",), 0),
        (("rollouts_per_version",), 100),
        (("publish_every",), 3),
        (("lease_seconds",), 0.0),
        (("minimum_tokens_per_second",), 0.0),
        (("price_prompt_token",), -1),
        (("price_prompt_token",), 1.0),
    ],
)
def test_run_spec_refuses(path: tuple[str, ...], value: object) -> None:
    document = SPEC.model_dump(mode="json")
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(ValidationError):
        RunSpec.model_validate_json(json.dumps(document))


LEASE = messages.Lease(
    lease_id="l",
    version=1,
    weights_digest=DIGEST,
    run_spec_digest=DIGEST,
    prompt=(1, 2),
    slots=(messages.LeaseSlot(index=0, fencing=1, seed="0123456789abcdef"),),
    temperature=1.0,
    max_tokens=8,
    deadline=5.5,
)
MESSAGES: list[Strict] = [
    messages.Problem(type="t", title="t", status=400, detail="d", code=Reason.DUPLICATE),
    messages.RunInfo(
        run_key=DIGEST, run_spec=SPEC, run_spec_digest=DIGEST, newest=None, relays=("u",), log_head=None, now=1.5
    ),
    messages.RegisterNode(software="s", engine="e", device="d"),
    messages.NodeAccount(
        node_id=DIGEST, status="active", accepted=1, rejected=0, pending=0, dropped=0, credit=-5
    ),
    messages.RegisterRelay(url="http://127.0.0.1:8000"),
    messages.RelayChallenge(relay_id=DIGEST, url="https://relay", nonce="n"),
    messages.Heartbeat(state="waiting", loaded_versions=(1,), open_leases=0, spooled=0, tokens_per_second=1.5),
    messages.Directives(newest=3, relays=(), drain=False, upgrade=None),
    messages.LeaseRequest(versions=(1,), slots=8, wait_seconds=2.0),
    LEASE,
    messages.LeaseAnswer(leases=(LEASE,), now=1.5),
    messages.Acknowledgement(lease_id="l", fencing=1, index=0, payload_hash=DIGEST, rollout_id=None, code=None),
    messages.RolloutsAnswer(items=()),
    messages.Receipt(
        run_id="r",
        run_spec_digest=DIGEST,
        rollout_id=1,
        node_id=DIGEST,
        payload_hash=DIGEST,
        verdict="rejected",
        code=Reason.SAMPLING_MISMATCH,
        value=1.5,
        limit=0.5,
        price=0,
        evidence_sha256=DIGEST,
        salt=DIGEST,
        created=1.5,
    ),
    messages.ReceiptAnswer(receipt=sign_document(HEAD, NEWEST, KEY)),
]
NAMES = [type(message).__name__ for message in MESSAGES]


def wrong_for(value: object) -> list[object]:
    """Values that a lenient parser would take, or that are out of every range."""
    if isinstance(value, bool):
        return [0, 1, "true"]
    if isinstance(value, int):
        return [str(value), float(value) + 0.5, True]
    if isinstance(value, float):
        return [str(value), True, 10**400]
    if isinstance(value, str):
        return [5, True, ["x"], {}]
    return [{}] if value is None else ["x", 5, True]


@pytest.mark.parametrize("message", MESSAGES, ids=NAMES)
def test_messages_are_strict(message: Strict) -> None:
    kind, document = type(message), message.model_dump(mode="json")
    assert kind.model_validate_json(json.dumps(document)) == message
    variants = [document | {"unknown": 1}]
    for name, value in document.items():
        variants += [document | {name: wrong} for wrong in wrong_for(value)]
        if kind.model_fields[name].is_required():
            variants.append({key: kept for key, kept in document.items() if key != name})
    for variant in variants:
        with pytest.raises(ValidationError):
            kind.model_validate_json(json.dumps(variant), strict=True)


@pytest.mark.parametrize(
    "kind,good,changes",
    [
        (messages.LeaseRequest, MESSAGES[8], {"versions": []}),
        (messages.LeaseRequest, MESSAGES[8], {"versions": [1] * 65}),
        (messages.LeaseRequest, MESSAGES[8], {"versions": [-1]}),
        (messages.LeaseRequest, MESSAGES[8], {"slots": 0}),
        (messages.LeaseRequest, MESSAGES[8], {"slots": 513}),
        (messages.LeaseRequest, MESSAGES[8], {"wait_seconds": 21.0}),
        (messages.LeaseRequest, MESSAGES[8], {"wait_seconds": -1.0}),
        (messages.Heartbeat, MESSAGES[6], {"tokens_per_second": -1.0}),
        (messages.RegisterRelay, MESSAGES[4], {"url": "file:///etc/passwd"}),
        (messages.RegisterRelay, MESSAGES[4], {"url": "http://a b"}),
        (messages.RegisterRelay, MESSAGES[4], {"url": "http://a\n"}),
        (messages.RegisterRelay, MESSAGES[4], {"url": "http://" + "a" * 600}),
        (messages.RegisterNode, MESSAGES[2], {"software": "x" * 129}),
        (messages.RegisterNode, MESSAGES[2], {"software": "nul\0"}),
        (messages.RegisterNode, MESSAGES[2], {"device": "\x1b[31m"}),
        (messages.RegisterNode, MESSAGES[2], {"device": "two\nlines"}),
        (messages.LeaseSlot, LEASE.slots[0], {"seed": "0x23456789abcdef"}),
    ],
)
def test_ranges(kind: type[Strict], good: Strict, changes: dict[str, Any]) -> None:
    document = good.model_dump(mode="json")
    kind.model_validate_json(json.dumps(document))
    with pytest.raises(ValidationError):
        kind.model_validate_json(json.dumps(document | changes))


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_no_nan(constant: str) -> None:
    text = MESSAGES[8].model_dump_json().replace("2.0", constant)
    assert constant in text
    with pytest.raises(ValidationError):
        messages.LeaseRequest.model_validate_json(text)


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_advice(reason: Reason) -> None:
    assert ADVICE[reason].endswith(".") and reason.value == reason.name.lower()
    assert len(reason.value) <= 32, "the width of its columns"


REFUSALS = list(Reason)[: list(Reason).index(Reason.MALFORMED_PROOF)]


@pytest.mark.parametrize("reason", REFUSALS)
def test_every_refusal_has_a_status(reason: Reason) -> None:
    assert 400 <= STATUS[reason] < 500 or reason is Reason.UNAVAILABLE
    refusal = Refusal(reason, retry_after=2.0)
    assert (refusal.status, refusal.detail, refusal.retry_after) == (STATUS[reason], ADVICE[reason], 2.0)


def test_status_has_nothing_else_and_never_500() -> None:
    assert set(STATUS) == set(REFUSALS)
    assert Refusal(Reason.SHARD_MISMATCH, "x").status == 400
    assert str(Refusal(Reason.DUPLICATE, "why")) == "duplicate: why"


def test_advice_covers_reasons_only() -> None:
    get: Callable[[Reason], str] = ADVICE.__getitem__
    assert len({get(reason) for reason in Reason}) == len(ADVICE) == len(Reason)

"""The verifier on a real run directory: honest work, every cheat, and its own crashes."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select

from coordinator.ledger import tables
from coordinator.run import Run
from coordinator.verifier.service import Verifier
from node import cheats
from node.engines.hf import HFEngine
from protocol.canonical import sha256_hex
from protocol.completion import decode_batch, encode_batch
from protocol.messages import Receipt
from protocol.reasons import Reason, Refusal
from protocol.signed import open_document
from tests.verifier import rig
from tests.verifier.rig import balanced, drain, states


def test_honest_work_is_accepted_with_reward_price_and_receipt(
    run: Run, verifier: Verifier, engine: HFEngine
) -> None:
    node = rig.Node(run, engine)
    granted = node.lease(32)
    completions = node.completions(granted)
    results = node.submit(completions)
    assert drain(verifier) == 1
    rows = rig.rows(run, columns=("id", "state", "reward", "price", "tokens", "token_identical", "blob", "code"))
    eos = run.spec.model.eos_token_ids
    golds = _golds(run)
    total = 0
    for row, result, item in zip(rows, results, completions, strict=True):
        assert row["id"] == result.rollout_id
        tokens = struct.unpack(f"<{len(item.tokens) // 4}i", item.tokens)
        lease = next(lease for lease in granted if lease.lease_id == item.lease_id)
        score = run.task.score(golds[lease.problem_id], run.codec.decode(tokens, eos))
        assert row["reward"] == score.reward and row["tokens"] == len(tokens) and row["code"] is None
        assert row["state"] in ("ready", "surplus") and row["token_identical"]
        assert row["price"] == len(lease.prompt) // 4 + 10 * len(tokens)
        total += row["price"]
    assert len({row["reward"] for row in rows}) > 1
    balance = balanced(run)
    assert balance.credited == total and balance.rows == 32
    for (rollout, text), row, item in zip(rig.receipts(run), rows, completions, strict=True):
        receipt = open_document(text.encode(), "receipt", Receipt, run.key.id)
        assert receipt.rollout_id == rollout == row["id"] and receipt.verdict == "accepted" and receipt.code is None
        assert receipt.price == row["price"] and receipt.payload_hash == item.payload_hash
        assert receipt.evidence_sha256 == row["blob"] and receipt.node_id == node.key.id
    assert len({open_document(t.encode(), "receipt", Receipt, run.key.id).salt for _, t in rig.receipts(run)}) == 32


def _golds(run: Run) -> dict[str, Any]:
    with run.ledger.read() as tx:
        return {row.id: json.loads(row.gold) for row in tx.execute(select(tables.problems))}


def test_evidence_holds_what_the_trainer_needs(run: Run, verifier: Verifier, engine: HFEngine) -> None:
    node = rig.Node(run, engine)
    completions = node.completions(node.lease(8))
    bad = rig.replace(completions[3], logprobs=b"")
    node.submit([*completions[:3], bad, *completions[4:]])
    verifier.verify_some()
    rows = rig.rows(run, columns=("evidence", "evidence_position", "state"))
    for index, (row, item) in enumerate(zip(rows, completions, strict=True)):
        if index == 3:
            assert row["state"] == "rejected" and row["evidence"] is None
            continue
        kept = msgspec.msgpack.decode(run.store.get(row["evidence"]))[row["evidence_position"]]
        assert kept["tokens"] == item.tokens and kept["logp_engine"] == item.logprobs
        old = struct.unpack(f"<{len(item.tokens) // 4}f", kept["logp_old"])
        theirs = struct.unpack(f"<{len(item.tokens) // 4}f", item.logprobs)
        assert max(abs(a - b) for a, b in zip(old, theirs, strict=True)) < 1e-4


CHEATS = {
    "fabricate": {Reason.SAMPLING_MISMATCH},
    "truncate": {Reason.BAD_TERMINATION},
    "temperature": {Reason.SAMPLING_MISMATCH},
    "replay": {Reason.SAMPLING_MISMATCH},
    "othermodel": {Reason.SAMPLING_MISMATCH, Reason.ACTIVATION_MISMATCH},
}


@pytest.mark.parametrize("kind", CHEATS)
def test_cheats_are_caught_for_the_right_reason(
    run: Run, verifier: Verifier, engine: HFEngine, tmp_path: Path, kind: str
) -> None:
    other = rig.perturbed(run, tmp_path / "other", 0.02) if kind == "othermodel" else None
    cheat = cheats.wrap(kind, engine, other)
    if kind == "fabricate":
        cheat.load(0, run.model_dir, None)
    node = rig.Node(run, cheat)
    if kind == "replay":  # the first time it is honest
        node.work(32)
        drain(verifier)
        assert "rejected" not in states(run)
    before = len(rig.rows(run))
    granted = node.lease(48)
    honest = rig.Node(run, engine).answers(granted)
    mine = node.answers(granted)
    node.submit(node.completions(granted, mine))
    drain(verifier)
    found = rig.rows(run, columns=("id", "state", "code", "price", "token_identical", "reward"))[before:]
    rejected = 0
    for row, true, false in zip(found, honest, mine, strict=True):
        if row["state"] == "rejected":
            rejected += 1
            assert row["code"] in CHEATS[kind] and row["price"] == 0 and row["reward"] is None
            assert true.tokens != false.tokens or kind == "othermodel"
        else:  # identical tokens are valid work, however they were made
            assert true.tokens == false.tokens and row["token_identical"]
    same = sum(a.tokens == b.tokens for a, b in zip(honest, mine, strict=True))
    assert rejected == (48 if kind == "othermodel" else 48 - same) and rejected >= 10
    assert same > 0 or kind in ("truncate", "replay")
    for rollout, text in rig.receipts(run)[before:]:
        receipt = open_document(text.encode(), "receipt", Receipt, run.key.id)
        code = next(row["code"] for row in found if row["id"] == rollout)
        assert receipt.code == code and receipt.verdict == ("rejected" if code else "accepted")
        if code == "sampling_mismatch":
            assert receipt.value is not None and receipt.limit is not None and receipt.value > receipt.limit
    balanced(run)


def test_batch_with_an_extra_field_is_refused(run: Run, engine: HFEngine) -> None:
    node = rig.Node(run, cheats.wrap("extrafield", engine, None))
    completions = node.completions(node.lease(4))
    assert decode_batch(encode_batch(completions)) == tuple(completions)
    with pytest.raises(Refusal) as caught:
        decode_batch(cheats.encode_with_extra_field(completions))
    assert caught.value.reason is Reason.MALFORMED_REQUEST


def _forged(completions: list[Any], kind: str) -> list[Any]:
    """Honest tokens with a lie beside them."""
    rng = random.Random(1)
    forged = []
    for index, item in enumerate(completions):
        n = len(item.tokens) // 4
        values = struct.unpack(f"<{n}f", item.logprobs)
        if kind == "log-probs shifted":
            item = rig.replace(item, logprobs=struct.pack(f"<{n}f", *(min(v - 0.01, 0.0) for v in values)))
        elif kind == "log-probs of certainty":
            item = rig.replace(item, logprobs=struct.pack(f"<{n}f", *(0.0 for _ in values)))
        elif kind == "proof of another":
            others = [other for other in completions if other.tokens != item.tokens]
            item = rig.replace(item, commitment=others[index % len(others)].commitment[: len(item.commitment)])
        elif kind == "random proof":
            words = [65497, *(rng.randrange(65497) for _ in range(128))]
            item = rig.replace(item, commitment=struct.pack(">129H", *words))
        forged.append(item)
    return forged


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("log-probs shifted", Reason.LOGPROB_MISMATCH),
        ("log-probs of certainty", Reason.LOGPROB_MISMATCH),
        ("proof of another", Reason.ACTIVATION_MISMATCH),
        ("random proof", Reason.ACTIVATION_MISMATCH),
    ],
)
def test_right_tokens_with_a_lie_beside_them(
    run: Run, verifier: Verifier, engine: HFEngine, kind: str, reason: Reason
) -> None:
    node = rig.Node(run, engine)
    node.submit(_forged(node.completions(node.lease(16)), kind))
    drain(verifier)
    assert {(row["state"], row["code"]) for row in rig.rows(run)} == {("rejected", reason.value)}


def test_activations_scaled_or_negated_are_rejected(run: Run, verifier: Verifier, engine: HFEngine) -> None:
    node = rig.Node(run, engine)
    granted = node.lease(12)
    answers = node.answers(granted)
    factors = (2.0, -1.0, 0.98) * 4
    moved = [
        type(answer)(answer.tokens, answer.logprobs, answer.hidden * factor, answer.finish_reason)
        for answer, factor in zip(answers, factors, strict=True)
    ]
    node.submit(node.completions(granted, moved))
    drain(verifier)
    assert {(row["state"], row["code"]) for row in rig.rows(run)} == {("rejected", "activation_mismatch")}


def test_a_batch_without_one_sound_rollout_is_decided(run: Run, verifier: Verifier, engine: HFEngine) -> None:
    node = rig.Node(run, engine)
    node.submit([rig.replace(item, commitment=b"") for item in node.completions(node.lease(8))])
    assert drain(verifier) == 1
    assert {(row["state"], row["code"]) for row in rig.rows(run)} == {("rejected", "malformed_proof")}


def test_rejected_slot_goes_to_the_next_with_the_same_seed(run: Run, verifier: Verifier, engine: HFEngine) -> None:
    cheat = rig.Node(run, cheats.wrap("truncate", engine, None), "cheat")
    granted = cheat.lease(4)
    cheat.submit(cheat.completions(granted))
    drain(verifier)
    honest = rig.Node(run, engine, "honest")
    again = honest.lease(4)
    assert [lease.group_id for lease in again] == [lease.group_id for lease in granted]
    assert {r.seed for r in honest.requests(again)} <= {r.seed for r in cheat.requests(granted)}
    honest.submit(honest.completions(again))
    drain(verifier)
    assert set(states(run)) <= {"rejected", "ready", "surplus"}
    balanced(run)


def test_evaluation_is_due_once_per_interval(run: Run, verifier: Verifier) -> None:
    assert verifier.evaluate_due() and not verifier.evaluate_due()
    with run.ledger.read() as tx:
        (row,) = tx.execute(select(tables.evaluations)).all()
    assert row.version == 0 and row.total == 10 and 0 <= row.passed <= 10


def test_store_names_are_digests_of_what_was_signed(run: Run, engine: HFEngine) -> None:
    node = rig.Node(run, engine)
    node.work(4)
    (name,) = {row["blob"] for row in rig.rows(run, columns=("blob",))}
    assert sha256_hex(run.store.path(name).read_bytes()) == name

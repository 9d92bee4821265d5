"""Crashes of the verifier itself: bisection, three attempts, restarts; never held against a node."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from coordinator.config import EvaluationConfig
from coordinator.ledger import clock, tables, training, verdicts
from coordinator.run import Run
from coordinator.verifier import service
from coordinator.verifier.prefill import Claim, prefill
from coordinator.verifier.service import Verifier
from node.engines.hf import HFEngine
from protocol.messages import Receipt
from protocol.reasons import Reason, Refusal
from protocol.signed import open_document
from tests.verifier import rig
from tests.verifier.rig import balanced, drain, states


def poison(monkeypatch: pytest.MonkeyPatch, seeds: set[int]) -> None:
    """A prefill that dies of the rollouts with these seeds."""

    def dying(model: Any, items: list[Claim], *rest: Any) -> Any:
        if any(item.seed in seeds for item in items):
            raise MemoryError("boom")
        return prefill(model, items, *rest)

    monkeypatch.setattr(service, "prefill", dying)
    logging.getLogger("farflung.verifier").setLevel(logging.CRITICAL)


@pytest.mark.parametrize(("min_group", "survivors"), [(0, "stale"), (3, "ready")])
def test_a_poisonous_rollout_is_isolated_and_ends_unverifiable(
    tmp_path: Path, engine: HFEngine, monkeypatch: pytest.MonkeyPatch, min_group: int, survivors: str
) -> None:
    run = rig.make_run(
        tmp_path / "run", schedule={"min_group": min_group}, evaluation=EvaluationConfig(questions=5)
    )
    verifier = Verifier(run, rig.thresholds(run), clock=rig.ticking())
    node = rig.Node(run, engine)
    granted = node.lease(16)
    victim = next(n for n, answers in enumerate(_grouped(node, granted)) if len(set(answers)) > 2)
    seeds = {node.requests(granted)[4 * victim].seed}
    poison(monkeypatch, seeds)
    node.submit(node.completions(granted))
    assert verifier.verify_some() == 16
    after = states(run)
    assert after["inconclusive"] == 1 and after["rejected"] == 0 and after["submitted"] == after["verifying"] == 0
    assert drain(verifier) == 2  # alone, twice more
    rows = rig.rows(run, columns=("group_id", "slot", "state", "code", "attempts", "price"))
    dead = [row for row in rows if row["state"] == "unverifiable"]
    assert len(dead) == 1 and dead[0]["attempts"] == 3 and dead[0]["code"] == "unverifiable" and dead[0]["price"] == 0
    assert "rejected" not in states(run)
    rest = [row["state"] for row in rows if row["group_id"] == dead[0]["group_id"] and row is not dead[0]]
    assert rest in ([survivors] * 3, ["surplus"] * 3)
    texts = [text for _, text in rig.receipts(run) if text]
    verdict = [open_document(text.encode(), "receipt", Receipt, run.key.id).verdict for text in texts]
    assert Counter(verdict) == {"accepted": 15, "unverifiable": 1}
    with run.ledger.read() as tx:
        here = (tables.slots.c.group_id == dead[0]["group_id"]) & (tables.slots.c.number == dead[0]["slot"])
        assert tx.execute(select(tables.slots.c.state).where(here)).scalar_one() == "closed"
        group = tables.groups.c.id == dead[0]["group_id"]
        assert tx.execute(select(tables.groups.c.state).where(group)).scalar_one() in (survivors, "surplus")
    balanced(run)
    monkeypatch.undo()
    _nothing_blocks(run, node, verifier)


def _grouped(node: rig.Node, granted: Any) -> list[list[tuple[int, ...]]]:
    answers = [answer.tokens for answer in node.answers(granted)]
    return [answers[start : start + 4] for start in range(0, len(answers), 4)]


def _nothing_blocks(run: Run, node: rig.Node, verifier: Verifier) -> None:
    """New groups still open up to capacity, none of the lost slots among them, and a step can be put together."""
    lost = {(row["group_id"], row["slot"]) for row in rig.rows(run, columns=("group_id", "slot"))}
    for _ in range(20):
        try:
            granted = node.lease(16)
        except Refusal as refusal:
            assert refusal.reason is Reason.QUEUE_FULL
            break
        assert not lost & {(lease.group_id, slot.index) for lease in granted for slot in lease.slots}
        node.submit(node.completions(granted))
        drain(verifier)
    else:
        raise AssertionError("pacing never ends")
    with run.ledger.write() as tx:
        batch = training.assign(tx, run.spec, 1, now=rig.NOW + 50)
    assert batch is not None and len(batch.rollouts) >= 15


def test_poison_among_many_leaves_every_other_decided(
    run: Run, verifier: Verifier, engine: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = rig.Node(run, engine)
    granted = node.lease(32)
    requests = node.requests(granted)
    poison(monkeypatch, {requests[index].seed for index in (0, 13, 14, 31)})
    node.submit(node.completions(granted))
    drain(verifier)
    found = states(run)
    assert found["unverifiable"] == 4 and found["rejected"] == 0 and sum(found.values()) == 32
    assert not set(found) & {"inconclusive", "verifying", "submitted", "accepted"} - {"accepted"}


def test_missing_blob_is_our_fault(run: Run, verifier: Verifier, engine: HFEngine) -> None:
    """A submission whose bytes are lost or corrupt takes nobody with it and is not held against the node."""
    logging.getLogger("farflung.verifier").setLevel(logging.CRITICAL)
    node = rig.Node(run, engine)
    first, second, third = node.lease(12)
    for lease in (first, second, third):
        node.submit(node.completions((lease,)))
    names = list(dict.fromkeys(row["blob"] for row in rig.rows(run, columns=("blob",))))
    run.store.path(names[0]).unlink()
    run.store.path(names[1]).write_bytes(b"rotten")
    drain(verifier)
    found = states(run)
    assert found["unverifiable"] == 8 and found["rejected"] == 0
    assert all(row["state"] in ("ready", "surplus") for row in rig.rows(run)[8:])


def test_a_restarted_verifier_takes_its_jobs_up_again(run: Run, verifier: Verifier, engine: HFEngine) -> None:
    node = rig.Node(run, engine)
    node.work(8)
    with run.ledger.write() as tx:
        assert len(verdicts.claim(tx, "v0", 100, now=rig.NOW)) == 8  # and then it is killed
    assert verifier.verify_some() == 0
    verifier.serve(lambda: not set(states(run)) & {"verifying", "submitted"})
    assert set(states(run)) <= {"ready", "surplus"}
    with run.ledger.read() as tx:
        rows = tx.execute(select(tables.evaluations)).all()
    assert len(rows) <= 1  # an evaluation may have come before the stop


def test_a_rollout_that_kills_the_verifier_three_times_is_given_up(
    run: Run, engine: HFEngine
) -> None:
    node = rig.Node(run, engine)
    node.work(4)
    for _ in range(3):
        with run.ledger.write() as tx:
            verdicts.give_back(tx, "v0", now=rig.NOW, detail="restart")
            killed = verdicts.claim(tx, "v0", 100, now=rig.NOW)
    assert len(killed) == 1  # the last try is alone
    verifier = Verifier(run, rig.thresholds(run), clock=rig.ticking())
    verifier.serve(lambda: states(run)["verifying"] == 1 and not states(run)["submitted"])
    with run.ledger.write() as tx:
        clock.tick(tx, run.spec, run.config.min_group, now=rig.NOW + 20)
    found = states(run)
    assert found["unverifiable"] == 1 and found["rejected"] == 0 and found["verifying"] == 0
    balanced(run)


def test_late_verdicts_of_a_claim_that_ran_out_are_dropped(run: Run, verifier: Verifier, engine: HFEngine) -> None:
    node = rig.Node(run, engine)
    node.work(4)
    with run.ledger.write() as tx:
        jobs = verdicts.claim(tx, "v0", 100, now=rig.NOW)
    decisions = verifier.decide(jobs)
    with run.ledger.write() as tx:
        clock.tick(tx, run.spec, 4, now=rig.NOW + verdicts.CLAIM_SECONDS + 1)
        verdicts.claim(tx, "v1", 100, now=rig.NOW + 130)
        verdicts.record(tx, run.spec, decisions, "v0", 4, now=rig.NOW + 131)
    assert states(run) == {"verifying": 4} and balanced(run).rows == 0

"""Credits: append-only, hash-chained, one row per (rollout, kind), written with what they pay for. Integer units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from protocol.canonical import canonical_json, sha256_hex

from .states import PAID
from .tables import credits, rollouts

GENESIS = "0" * 64


def price(prompt_tokens: int, completion_tokens: int, per_prompt: int, per_completion: int) -> int:
    """What a rollout is worth: independent of reward, variance, staleness and training."""
    return per_prompt * prompt_tokens + per_completion * completion_tokens


@dataclass(frozen=True)
class Payment:
    """One credit to be appended."""

    rollout_id: int
    node_id: str
    kind: str
    amount: int


def entry_hash(previous: str, sequence: int, payment: Payment, at: float) -> str:
    """Hash of a row: over the previous hash and every value of the row."""
    fields = [previous, sequence, payment.rollout_id, payment.node_id, payment.kind, payment.amount, repr(float(at))]
    return sha256_hex(canonical_json(fields))


def pay(tx: Connection, payments: Sequence[Payment], *, now: float) -> None:
    """Append payments to the chain. A second payment of one kind for a rollout breaks the unique key and raises."""
    if not payments:
        return
    last = tx.execute(
        select(credits.c.sequence, credits.c.hash).order_by(credits.c.sequence.desc()).limit(1)
    ).one_or_none()
    sequence, previous = (last.sequence, last.hash) if last else (0, GENESIS)
    rows = []
    for payment in payments:
        sequence += 1
        digest = entry_hash(previous, sequence, payment, now)
        rows.append(
            {
                "sequence": sequence,
                "rollout_id": payment.rollout_id,
                "node_id": payment.node_id,
                "kind": payment.kind,
                "amount": payment.amount,
                "at": now,
                "previous": previous,
                "hash": digest,
            }
        )
        previous = digest
    tx.execute(credits.insert(), rows)


@dataclass(frozen=True)
class Balance:
    """Result of a check: what is wrong (empty if nothing), the sums compared, rows read."""

    problems: tuple[str, ...]
    credited: int
    earned: int
    rows: int

    @property
    def balanced(self) -> bool:
        """True if the accounts balance."""
        return not self.problems


def check_balance(tx: Connection) -> Balance:
    """Recompute the hash chain and compare the sum of credits with the price of all rollouts ever paid for."""
    problems: list[str] = []
    previous, expected, rows, credited = GENESIS, 1, 0, 0
    for row in tx.execute(select(credits).order_by(credits.c.sequence)):
        payment = Payment(row.rollout_id, row.node_id, row.kind, row.amount)
        if row.sequence != expected or row.previous != previous:
            problems.append(f"credit {row.sequence}: the chain is broken here")
        if row.hash != entry_hash(row.previous, row.sequence, payment, row.at):
            problems.append(f"credit {row.sequence}: the row was changed")
        previous, expected, rows, credited = row.hash, row.sequence + 1, rows + 1, credited + row.amount
    paid = [state.value for state in PAID]
    earned = int(
        tx.execute(
            select(func.coalesce(func.sum(rollouts.c.price), 0)).where(rollouts.c.state.in_(paid))
        ).scalar_one()
    )
    if credited != earned:
        problems.append(f"credits sum to {credited}, paid rollouts to {earned}")
    slots = [rollouts.c.group_id, rollouts.c.slot]
    twice = select(*slots).where(rollouts.c.state.in_(paid)).group_by(*slots).having(func.count() > 1)
    problems += [f"slot {row.group_id}/{row.slot} has two paid answers" for row in tx.execute(twice)]
    return Balance(tuple(problems), credited, earned, rows)

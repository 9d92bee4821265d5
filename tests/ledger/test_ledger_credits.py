"""Credits: the price, the chain, and what a check finds."""

from typing import Any

import pytest
from sqlalchemy import Connection, delete, select
from sqlalchemy.exc import IntegrityError

from coordinator.ledger import credits as book
from coordinator.ledger.credits import GENESIS, Payment, check_balance, entry_hash, pay, price
from coordinator.ledger.database import Ledger
from coordinator.ledger.tables import credits, rollouts
from protocol.runspec import RunSpec
from tests.ledger import builders


def test_price_is_tokens_times_rates() -> None:
    assert price(0, 0, 5, 7) == 0
    assert price(3, 11, 5, 7) == 3 * 5 + 11 * 7
    assert price(2**20, 2**20, 2**31 - 1, 2**31 - 1) == 2**21 * (2**31 - 1)


def test_entry_hash_covers_every_value() -> None:
    base: tuple[Any, ...] = (GENESIS, 1, Payment(2, "n", "price", 3), 4.0)
    others = [
        ("1" * 64, *base[1:]),
        (GENESIS, 2, *base[2:]),
        (GENESIS, 1, Payment(3, "n", "price", 3), 4.0),
        (GENESIS, 1, Payment(2, "m", "price", 3), 4.0),
        (GENESIS, 1, Payment(2, "n", "bonus", 3), 4.0),
        (GENESIS, 1, Payment(2, "n", "price", -3), 4.0),
        (GENESIS, 1, Payment(2, "n", "price", 3), 4.000001),
    ]
    assert len({entry_hash(*values) for values in [base, *others]}) == 8
    assert entry_hash(*base) == entry_hash(GENESIS, 1, base[2], 4), "a database gives back a float for an int"


def paid_run(tx: Connection, spec: RunSpec) -> None:
    builders.begin(tx, spec, "a", "b")
    builders.work(tx, spec, "a", 4)
    builders.work(tx, spec, "b", 4, builders.alike)


def test_balance_of_a_run(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        assert check_balance(tx).balanced, "an empty ledger balances"
        paid_run(tx, spec)
    with ledger.read() as tx:
        balance = check_balance(tx)
        first, *_ = tx.execute(select(credits).order_by(credits.c.sequence)).all()
    assert balance.balanced and balance.rows == 8
    assert balance.credited == balance.earned == 8 * 13
    assert (first.sequence, first.previous, first.kind, first.amount) == (1, GENESIS, "price", 13)


@pytest.mark.parametrize("sequence", [1, 4, 8])
@pytest.mark.parametrize(
    "values",
    [{"amount": 14}, {"at": 9.5}, {"kind": "bonus"}, {"hash": "0" * 64}, {"previous": "f" * 64}, "node", "gone"]
)
def test_one_tampered_row_is_found(ledger: Ledger, spec: RunSpec, sequence: int, values: Any) -> None:
    row = credits.c.sequence == sequence
    with ledger.write() as tx:
        paid_run(tx, spec)
        if values == "gone":
            tx.execute(delete(credits).where(row))
        else:
            changed = {"node_id": builders.digest("b" if sequence < 5 else "a")} if values == "node" else values
            tx.execute(credits.update().where(row).values(**changed))
        assert not check_balance(tx).balanced


def test_rewritten_chain_is_found_by_the_sums(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        paid_run(tx, spec)
        rows = tx.execute(select(credits).order_by(credits.c.sequence)).all()
        tx.execute(delete(credits))
        payments = [Payment(row.rollout_id, row.node_id, row.kind, row.amount + 1) for row in rows]
        pay(tx, payments, now=2.0)
        problems = check_balance(tx).problems
    assert problems == ("credits sum to 112, paid rollouts to 104",)


def test_price_changed_after_payment_is_found(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        paid_run(tx, spec)
        tx.execute(rollouts.update().where(rollouts.c.id == 3).values(price=1000))
        assert check_balance(tx).problems == ("credits sum to 104, paid rollouts to 1091",)


def test_two_paid_answers_of_a_slot_are_found(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        paid_run(tx, spec)
        one = tx.execute(select(rollouts).where(rollouts.c.id == 1)).one()._mapping
        tx.execute(rollouts.insert().values(**{**one, "id": 100, "fencing": 2, "price": 0}))
        assert check_balance(tx).problems == ("slot 1/0 has two paid answers",)


def test_nothing_is_paid_twice(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        paid_run(tx, spec)
        pay(tx, [], now=3.0)
    with pytest.raises(IntegrityError), ledger.write() as tx:
        pay(tx, [Payment(1, builders.digest("a"), "price", 13)], now=3.0)
    with ledger.read() as tx:
        assert check_balance(tx).rows == 8


def test_chain_goes_on_over_transactions(ledger: Ledger, spec: RunSpec) -> None:
    for step in range(3):
        with ledger.write() as tx:
            if step == 0:
                builders.begin(tx, spec, "a")
            builders.work(tx, spec, "a", 4, builders.alike, now=step * 1.1)
    with ledger.read() as tx:
        assert check_balance(tx) == book.Balance((), 12 * 13, 12 * 13, 12)

"""Several processes on one ledger, and crashes in the middle of a transaction."""

import multiprocessing
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select

from coordinator.ledger import clock, training
from coordinator.ledger.credits import check_balance
from coordinator.ledger.database import Ledger
from coordinator.ledger.tables import meta, metadata
from protocol.reasons import Reason, Refusal
from protocol.runspec import RunSpec
from tests.ledger import builders

SPAWN = multiprocessing.get_context("spawn")
SPEC = builders.make_spec(rollouts_per_version=64)


def lease_until_full(path: Path, name: str, start: Any, found: Any) -> None:
    """A process: lease one to three slots at a time until the queue is full."""
    ledger = Ledger(f"sqlite:///{path}")
    places: list[tuple[int, int, int]] = []
    start.wait()
    try:
        while True:
            with ledger.write() as tx:
                granted = builders.lease(tx, SPEC, name, 1 + len(places) % 3)
            places += [(part.group_id, slot.index, slot.fencing) for part in granted for slot in part.slots]
    except Refusal as refusal:
        found.put((name, refusal.reason.value, places))
    finally:
        ledger.close()


def create_and_count(path: Path, name: str, start: Any, found: Any) -> None:
    """A process: make the tables that are missing, then add something."""
    ledger = Ledger(f"sqlite:///{path}")
    start.wait()
    try:
        ledger.create()
        with ledger.write() as tx:
            tx.execute(meta.insert().values(key=name, value="1"))
        found.put((name, None, []))
    except Exception as error:
        found.put((name, repr(error), []))
    finally:
        ledger.close()


def together(target: Callable[..., None], path: Path, names: str) -> list[tuple[str, str | None, list[Any]]]:
    """Run a process for each name, all let go at the same moment."""
    start, found = SPAWN.Barrier(len(names)), SPAWN.Queue()
    processes = [SPAWN.Process(target=target, args=(path, name, start, found)) for name in names]
    for process in processes:
        process.start()
    results = [found.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(names)
    return results


def test_two_processes_never_lease_the_same_slot(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = builders.open_ledger(path)
    with ledger.write() as tx:
        builders.begin(tx, SPEC, "a", "b")
    results = together(lease_until_full, path, "ab")
    places = Counter(place for _, _, taken in results for place in taken)
    assert {reason for _, reason, _ in results} == {Reason.QUEUE_FULL.value}
    assert len(places) == 128 and set(places.values()) == {1}
    assert {fencing for _, _, fencing in places} == {1}
    with ledger.read() as tx:
        assert builders.states(tx) == ["leased"] * 128
    ledger.close()


def test_several_processes_create_the_same_ledger(tmp_path: Path) -> None:
    results = together(create_and_count, tmp_path / "ledger.db", "abc")
    assert sorted(results) == [(name, None, []) for name in "abc"]


class Crash(Exception):
    """The process dies here."""


def contents(tx: Connection) -> dict[str, list[Any]]:
    """Every row of every table."""
    return {table.name: list(tx.execute(select(table))) for table in metadata.sorted_tables}


def prepared(ledger: Ledger, spec: RunSpec) -> None:
    """Something of everything: ready, surplus, accepted, submitted, leased."""
    with ledger.write() as tx:
        builders.begin(tx, spec, "a", "b")
        builders.work(tx, spec, "a", 8)
        builders.work(tx, spec, "a", 4, builders.alike)
        builders.work(tx, spec, "a", 1)
        builders.submit(tx, "b", builders.lease(tx, spec, "b", 1))
        builders.lease(tx, spec, "b", 1)
        clock.tick(tx, spec, 4, now=1.0)


@pytest.mark.parametrize(
    "act",
    [
        lambda tx, spec: builders.lease(tx, spec, "a", 8),
        lambda tx, spec: builders.work(tx, spec, "a", 1),
        lambda tx, spec: builders.verify(tx, spec),
        lambda tx, spec: clock.tick(tx, spec, 4, now=500.0),
        lambda tx, spec: training.assign(tx, spec, 1, now=5.0),
        lambda tx, spec: [builders.publish(tx, spec, version, now=5.0) for version in (1, 2)],
    ],
    ids=["lease", "work", "verify", "tick", "assign", "publish"],
)
def test_a_crash_before_the_commit_leaves_nothing(
    tmp_path: Path, spec: RunSpec, act: Callable[[Connection, RunSpec], Any]
) -> None:
    path = tmp_path / "ledger.db"
    ledger = builders.open_ledger(path)
    prepared(ledger, spec)
    with ledger.read() as tx:
        before = contents(tx)
    with pytest.raises(Crash), ledger.write() as tx:
        act(tx, spec)
        assert contents(tx) != before
        raise Crash
    ledger.close()
    ledger = builders.open_ledger(path)
    with ledger.read() as tx:
        assert contents(tx) == before
    with ledger.write() as tx:
        act(tx, spec)
        assert check_balance(tx).balanced
    ledger.close()


def test_readers_see_one_moment_and_wait_for_nobody(ledger: Ledger, spec: RunSpec) -> None:
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
    with ledger.read() as view:
        assert builders.states(view) == []
        with ledger.write() as tx:
            builders.lease(tx, spec, "a", 4)
        assert builders.states(view) == []
    with ledger.read() as view:
        assert builders.states(view) == ["leased"] * 4


def test_change_marker_moves_with_every_commit_and_with_nothing_else(ledger: Ledger, spec: RunSpec) -> None:
    marks = [ledger.change_marker()]
    with ledger.write() as tx:
        builders.begin(tx, spec, "a")
    marks.append(ledger.change_marker())
    with ledger.read() as tx:
        builders.states(tx)
    assert ledger.change_marker() == marks[-1]
    with pytest.raises(Crash), ledger.write() as tx:
        builders.lease(tx, spec, "a", 4)
        raise Crash
    assert ledger.change_marker() == marks[-1]
    other = Ledger(ledger.url)
    with other.write() as tx:
        builders.lease(tx, spec, "a", 4)
    other.close()
    marks.append(ledger.change_marker())
    assert len(set(marks)) == 3


def test_commits_are_durable_by_default(tmp_path: Path) -> None:
    """WAL with synchronous = FULL (2): what is acknowledged survives a power cut."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.create()
    with ledger.read() as tx:
        found = {name: tx.exec_driver_sql(f"pragma {name}").scalar() for name in ("synchronous", "journal_mode")}
        assert tx.exec_driver_sql("pragma foreign_keys").scalar() == 1
    ledger.close()
    assert found == {"synchronous": 2, "journal_mode": "wal"}

"""Figures of a run, from a real ledger."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import event

from coordinator.ledger import nodes, report
from coordinator.ledger.database import Ledger
from protocol.reasons import Reason
from tests.dashboard.filled import CHEAT, HONEST, SPEC, START, Run, opened


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Run]:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db")
    ledger.create()
    yield Run(ledger)
    ledger.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with opened(tmp_path) as run:
        yield run


def overview(run: Run, after: float = 0.0) -> report.Overview:
    with run.ledger.read() as tx:
        return report.overview(tx, SPEC, now=run.now + after)


def test_empty_ledger_has_no_figures(empty: Run) -> None:
    found = overview(empty)
    assert (found.newest_version, found.steps_confirmed, found.accepted, found.rejected) == (None, 0, 0, 0)
    assert (found.first_pass, found.recent_reward, found.step_reward, found.staleness) == (None, None, None, None)
    assert (found.nodes, found.relays, found.tokens_per_second, found.wait_share) == ((), (), 0.0, None)
    assert found.capacity == 3 * 8
    with empty.ledger.read() as tx:
        assert report.series(tx) == report.Series((), ())
        assert report.cheater_accounts(tx) == ()


def test_counts(run: Run) -> None:
    found = overview(run)
    assert found.states == {"ready": 4, "rejected": 4, "submitted": 2, "trained": 16}
    assert (found.newest_version, found.steps_confirmed) == (2, 2)
    assert (found.accepted, found.rejected, found.ready, found.queue_fill) == (20, 4, 4, 4 / 24)
    assert found.verifier_backlog_share == 2 / 6
    assert found.bytes_published == 3_000_000
    assert found.rejections == (
        report.Count("sampling_mismatch", 3),
        report.Count("bad_termination", 1),
    )
    assert found.refusals == (report.Count("duplicate", 3), report.Count("queue_full", 1))


def test_learning_figures(run: Run) -> None:
    found = overview(run)
    assert found.first_pass == report.PassRate(0, 3, 20)
    assert found.latest_pass == report.PassRate(2, 11, 20)
    assert found.latest_pass.rate == 0.55
    assert found.step_reward == 0.5
    assert found.recent_reward == 0.5  # slot mod 2, rejected ones left out
    assert found.staleness == report.Staleness(step=2, mean=0.0, maximum=0, in_flight=0.0)
    with run.ledger.read() as tx:
        curves = report.series(tx)
    assert curves.reward == ((1, 0.25), (2, 0.5))
    assert [(p.version, p.passed) for p in curves.pass_rate] == [(0, 3), (1, 7), (2, 11)]


def test_staleness_is_that_of_the_last_batch(run: Run) -> None:
    run.publish(3, 2)
    run.work(HONEST, 3, 4)  # a new group on version 3; four rollouts of version 2 wait in the queue
    run.judge()
    run.judge()  # a claim is of one version
    run.train(3, {})
    found = overview(run)
    assert (found.staleness.step, found.staleness.maximum) == (3, 1)
    assert (found.staleness.mean, found.staleness.in_flight) == (0.5, 0.0)
    assert found.step_reward == 0.5  # step 3 told no reward: the newest that is known


def test_nodes(run: Run) -> None:
    honest, cheat = overview(run).nodes
    assert (honest.id, honest.label, honest.state, honest.online) == (HONEST, "honest-0", "generating", True)
    assert (honest.loaded_version, honest.reported_tokens_per_second, honest.status) == (2, 900.0, "active")
    assert (honest.accepted, honest.rejected, honest.pending, honest.last_reason) == (20, 0, 2, None)
    assert honest.token_identical == 15  # all but slot 0 of five groups
    assert honest.credit == 20 * (3 + 2 * 10)
    assert (cheat.id, cheat.label, cheat.state) == (CHEAT, "cheat-0", "starting")
    assert (cheat.accepted, cheat.rejected, cheat.credit, cheat.token_identical) == (0, 4, 0, 0)
    assert cheat.last_reason == Reason.BAD_TERMINATION
    honest, _ = overview(run, after=report.ONLINE_SECONDS + 1).nodes
    assert not honest.online


def test_accounts(run: Run) -> None:
    with run.ledger.read() as tx:
        accounts = {account.node_id: account for account in report.cheater_accounts(tx)}
    assert accounts[HONEST] == report.Account(HONEST, 22, 20, 15, ())
    assert accounts[CHEAT].submitted == 4
    assert accounts[CHEAT].accepted == accounts[CHEAT].token_identical == 0
    assert {count.code: count.count for count in accounts[CHEAT].rejected} == {
        "sampling_mismatch": 3,
        "bad_termination": 1,
    }


def test_relays_live_as_long_as_they_report(run: Run) -> None:
    (relay,) = overview(run).relays
    assert relay.alive and not hasattr(relay, "url")
    (relay,) = overview(run, after=91).relays
    assert not relay.alive


def test_token_rate_counts_accepted_tokens_of_the_window(run: Run) -> None:
    since_start = run.now - overview(run).started_at
    assert since_start < report.RATE_SECONDS
    assert overview(run).tokens_per_second == pytest.approx(200 / since_start)
    assert overview(run).nodes[1].tokens_per_second == 0.0
    assert overview(run, after=report.RATE_SECONDS + 1).tokens_per_second == 0.0


def test_token_rate_over_fewer_rows_than_the_window_holds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RATE_ROWS", 4)  # the last four verdicts: 40 tokens, decided together
    decided = run.now - 1.5  # then a lease and its submission
    assert overview(run, after=8.5).tokens_per_second == pytest.approx(40 / (run.now + 8.5 - decided))


def test_wait_share_uses_metrics_and_what_is_under_way(run: Run) -> None:
    assert overview(run).wait_share is None  # two steps are too few
    run.work(HONEST, 2, 4)
    run.judge()
    for step in range(3, 6):
        run.train(step, {"seconds": 3.0, "wait_seconds": 1.0}, version=step)
        run.work(HONEST, step, 8)
        run.judge()
    with run.ledger.read() as tx:
        confirmed = tx.exec_driver_sql("select max(confirmed_at) from steps").scalar_one()
    idle = run.now - confirmed
    waited, worked = 6 + 1 + 1 + 1, 2 + 3 + 3 + 3  # of steps 2 to 5; the first is left out
    assert overview(run).wait_share == pytest.approx((waited + idle) / (waited + idle + worked))
    assert overview(run, after=1e6).wait_share == pytest.approx((waited + 300) / (waited + 300 + worked))


def test_wait_share_without_metrics_uses_the_ledgers_times(run: Run) -> None:
    run.work(HONEST, 2, 4)
    run.judge()
    for step in range(3, 8):
        run.train(step, {"seconds": float("nan")}, version=step)
        run.work(HONEST, step, 8)
        run.judge()
    share = overview(run).wait_share
    assert share is not None and 0.4 < share < 0.8


def test_backpressure_share(run: Run) -> None:
    assert overview(run).backpressure_share == 0.0
    present = sum(node.last_seen for node in overview(run).nodes) - (START + 1) - (START + 2)
    with run.ledger.write() as tx:
        nodes.add_backpressure(tx, HONEST, present / 4)
    assert overview(run).backpressure_share == pytest.approx(0.25)


@pytest.mark.parametrize("points", [1, 2, 7, 50])
def test_series_are_thinned_and_keep_the_newest(empty: Run, points: int) -> None:
    with empty.ledger.write() as tx:
        for step in range(1, 51):
            tx.exec_driver_sql(
                "insert into steps (step, version, assigned_at, confirmed_at, metrics) values (?, ?, 0, 1, ?)",
                (step, step, f'{{"reward_mean": {step}.0}}'),
            )
            tx.exec_driver_sql("insert into evaluations values (?, 0, 1, 2)", (step,))
    with empty.ledger.read() as tx:
        curves = report.series(tx, points=points)
    assert curves.reward[-1] == (50, 50.0) and curves.pass_rate[-1].version == 50
    assert points / 2 <= len(curves.reward) <= points + 1
    assert points / 2 <= len(curves.pass_rate) <= points + 1


def test_queries_leave_events_alone_and_write_nothing(run: Run) -> None:
    said: list[str] = []
    event.listen(run.ledger.engine, "before_cursor_execute", lambda c, cur, sql, *rest: said.append(sql.lower()))
    overview(run)
    with run.ledger.read() as tx:
        report.series(tx)
    assert len(said) > 10
    assert not [sql for sql in said if "events" in sql]
    assert {sql.split()[0] for sql in said} <= {"begin", "select"}


def test_reports_are_frozen(run: Run) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        overview(run).accepted = 0

"""The public document, and what must not be in it."""

import json

from coordinator.dashboard.routes import document
from coordinator.ledger.report import overview
from protocol.reasons import ADVICE, Reason
from tests.dashboard.filled import CHEAT, GOLD, HONEST, RELAY_URL, RUN_KEY, SPEC, Run


def test_figures(run: Run) -> None:
    shown = document(run.ledger, SPEC, run.now)
    assert (shown["run"], shown["step"], shown["version"]) == ("miniature", 2, 2)
    assert shown["latest_pass"] == {"version": 2, "passed": 11, "total": 20, "rate": 0.55}
    assert shown["queue"] == {"ready": 4, "capacity": 24, "fill": 0.1667}
    assert shown["series"] == {"reward": [[1, 0.25], [2, 0.5]], "pass_rate": [[0, 0.15], [1, 0.35], [2, 0.55]]}
    assert shown["rejections"][0] == {
        "code": "sampling_mismatch",
        "count": 3,
        "advice": ADVICE[Reason.SAMPLING_MISMATCH],
    }
    assert [(node["id"], node["accepted"], node["rejected"]) for node in shown["nodes"]] == [
        (HONEST[:12], 20, 0),
        (CHEAT[:12], 0, 4),
    ]
    assert shown["bottleneck"]["verdict"] == "starting"


def test_unknown_code_has_no_advice(run: Run) -> None:
    with run.ledger.write() as tx:
        tx.exec_driver_sql("insert into refusals values ('of_another_release', 1)")
    assert {"code": "of_another_release", "count": 1, "advice": ""} in document(run.ledger, SPEC, run.now)["refusals"]


def test_says_nothing_that_is_not_public(run: Run) -> None:
    text = json.dumps(document(run.ledger, SPEC, run.now), allow_nan=False)
    for secret in (GOLD, RELAY_URL, "example.test", HONEST, CHEAT, HONEST[:13], RUN_KEY.id, "sums/", "payload"):
        assert secret not in text, secret


def test_fresh_rewards_do_not_show(run: Run) -> None:
    """Two ledgers that differ in the rewards of untrained rollouts only look the same from outside."""
    before = document(run.ledger, SPEC, run.now)
    with run.ledger.read() as tx:
        inside = overview(tx, SPEC, now=run.now).recent_reward
    with run.ledger.write() as tx:
        changed = tx.exec_driver_sql("update rollouts set reward = 1 - reward / 2 where state = 'ready'").rowcount
    assert changed == 4
    assert document(run.ledger, SPEC, run.now) == before
    with run.ledger.read() as tx:
        assert overview(tx, SPEC, now=run.now).recent_reward != inside


def test_is_equal_while_nothing_happens(run: Run) -> None:
    quiet = run.now + 100  # the window of the token rate has passed
    assert document(run.ledger, SPEC, quiet) == document(run.ledger, SPEC, quiet + 60)

"""The whole network: real processes, real HTTP, the seed model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from network import Up, gone, processes_of

from coordinator.ledger import credits
from coordinator.run import open_run
from protocol.messages import Receipt
from protocol.signed import open_document
from shardcast.tensors import tensors_digest

pytestmark = pytest.mark.timeout(600)
Start = Callable[..., Up]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Up] = []

    def make(*arguments: str) -> Up:
        started.append(Up(tmp_path, *arguments))
        return started[-1]

    yield make
    for up in started:
        up.kill()


def test_versions_ledger_and_weights_move(start: Start) -> None:
    """Workers generate, the verifier checks every rollout, the trainer steps, weights travel through the relay."""
    up = start("--steps", "4", "--seed", "1")
    summary = up.finish()
    assert summary["steps"] == summary["versions"] == 4
    assert summary["rejected"] == {}
    assert summary["accepted"] >= 4 * 128
    assert summary["ledger_balanced"] is True
    assert 0.4 < summary["held_out_before"] < 0.6 and summary["held_out_after"] is not None
    assert gone(up.run, 5.0)

    run = open_run(up.run)
    names = [row[0] for row in up.query("select name from checkpoints order by version")]
    assert len(names) == 5
    digests = {tensors_digest(sorted(run.version_dir(name).glob("*.safetensors"))) for name in names[1:]}
    assert len(digests) == 4, "every step gave other weights"
    held = {path.name for path in (up.run / "workers").glob("*/weights/v*")}
    assert held & set(names[1:]), "workers hold trained versions"
    relayed = {path.stem for path in (up.run / "relay").rglob("v*.json")}
    assert names[-1] in relayed or any(names[-1] in str(path) for path in (up.run / "relay").rglob("*"))
    with run.ledger.read() as tx:
        balance = credits.check_balance(tx)
    assert balance.balanced and balance.credited == balance.earned > 0
    trained = up.query("select count(*), count(distinct group_id || ':' || slot) from rollouts where state = 'trained'")
    assert trained == [(512, 512)]
    last = up.query(
        "select r.id, r.state, e.after from rollouts r join events e on e.rollout_id = r.id "
        "where e.id = (select max(id) from events where rollout_id = r.id)"
    )
    assert all(state == after for _, state, after in last)
    receipt = up.query("select receipt from verdicts where outcome = 'accepted' limit 1")[0][0]
    assert open_document(receipt.encode(), "receipt", Receipt, run.key.id).verdict == "accepted"


def test_every_cheat_is_rejected_with_its_reason(start: Start) -> None:
    """One worker of each kind beside an honest one: who differs from the slot's answer is rejected, who doesn't is
    counted apart, the honest one is not touched. The same up to near-ties: where two tokens score alike to within the
    rounding of float32, which happens once in some ten thousand tokens, either is the answer."""
    kinds = ("fabricate", "stale", "truncate", "othermodel", "temperature", "replay", "extrafield")
    up = start("--steps", "8", "--seed", "2", "--workers", "1", *(word for kind in kinds for word in ("--cheat", kind)))
    summary = up.finish()
    reasons = {
        "fabricate": {"sampling_mismatch"},
        "stale": {"sampling_mismatch", "activation_mismatch", "logprob_mismatch"},
        "truncate": {"bad_termination"},
        "othermodel": {"sampling_mismatch", "activation_mismatch", "logprob_mismatch"},
        "temperature": {"sampling_mismatch"},
        "replay": {"sampling_mismatch"},
    }
    accounts = summary["nodes"]
    assert accounts["w0"]["rejected"] == {} and accounts["w0"]["accepted"] > 0
    near_ties = up.query(
        "select r.node_id, v.measures from rollouts r join verdicts v on v.rollout_id = r.id "
        "where v.outcome = 'accepted' and not r.token_identical"
    )
    for _, measures in near_ties:
        assert 0 < max(json.loads(measures)["margins"]) < 2e-4, measures
    assert len(near_ties) <= 5
    for label, account in accounts.items():
        kind = label.partition("(cheats: ")[2].rstrip(")")
        if kind in reasons:
            assert account["rejected"], (label, account)
            assert account["rejected"].keys() <= reasons[kind], (label, account)
    assert accounts.keys() >= {f"c{number} (cheats: {kind})" for number, kind in enumerate(kinds) if kind in reasons}
    assert summary["rejected"]["malformed_request"] > 0, "the extra field is refused at the door"
    assert summary["ledger_balanced"] is True
    assert sum(account["accepted"] - account["token_identical"] for account in accounts.values()) == len(near_ties)
    assert up.query("select count(*) from rollouts where state = 'trained' and code is not null") == [(0,)]
    rejected = up.query("select id from rollouts where state = 'rejected' and code = 'sampling_mismatch' limit 1")[0][0]
    command = [sys.executable, "-m", "farflung", "audit", "show", str(rejected), "--dir", str(up.run), "--json", "-"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "sampling" in json.dumps(json.loads(shown))


def test_kill_anything_and_resume(start: Start) -> None:
    """Every kind of process is killed while the run goes on; then the parent; then the run is resumed."""
    up = start("--steps", "14", "--seed", "3")
    for name in ("trainer", "verifier", "coordinator", "relay", "worker w0"):
        before = up.steps()
        up.wait_for(lambda before=before: up.steps() >= before + 1)  # type: ignore[misc]
        victim = up.family()[name]
        victim.kill()
        up.wait_for(
            lambda victim=victim, name=name: (  # type: ignore[misc]
                (child := up.family().get(name)) is not None and child.pid != victim.pid
            )
        )
    before = up.steps()
    up.wait_for(lambda: up.steps() >= before + 1)
    up.process.kill()
    up.process.wait()
    assert gone(up.run, 8.0), f"orphans: {processes_of(up.run)}"
    assert up.steps() < 14

    resumed = start("--steps", "14", "--resume")
    summary = resumed.finish()
    assert summary["steps"] == summary["versions"] == 14
    assert summary["ledger_balanced"] is True
    assert summary["rejected"].keys() <= {"lease_expired", "lease_lost", "lease_void"}, "late at most, never wrong"
    twice = up.query("select step, count(*) from rollouts where state = 'trained' group by step having count(*) != 128")
    assert twice == []
    assert up.query(
        "select count(*) from credits where rollout_id in "
        "(select rollout_id from credits group by rollout_id having count(*) > 1)"
    ) == [(0,)]


def test_interrupt_stops_everything(start: Start) -> None:
    """Ctrl-C: exit code 130, no process left, and the run can be continued."""
    up = start("--until", "1.0", "--seed", "4", "--workers", "1")
    up.wait_for(lambda: up.steps() >= 1)
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(30) == 130, up.tail()
    assert processes_of(up.run) == []
    assert up.summary()["ledger_balanced"] is True
    assert "--resume" in up.output.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_low_staleness_never_stalls(start: Start, staleness: int) -> None:
    """S = 0 is synchronous and S = 1 nearly: small batches, several versions, no permanent `queue_full`."""
    up = start(
        *("--steps", "5", "--seed", "5", "--workers", "1", "--schedule.rollouts_per_version", "32"),
        *("--schedule.max_staleness", str(staleness), "--evaluation.questions", "50"),
    )
    summary = up.finish()
    assert summary["steps"] == 5
    assert summary["staleness_max"] <= staleness
    assert summary["ledger_balanced"] is True


@pytest.mark.parametrize("staleness", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_groups_without_variance_never_block_a_run(start: Start, staleness: int) -> None:
    """Words so long that nearly every group fails as a whole: such groups are paid, not trained, and not counted."""
    up = start(
        *("--steps", "3", "--seed", "6", "--workers", "1", "--schedule.rollouts_per_version", "8"),
        *("--schedule.group_size", "2", "--task.options", "{min_word_len = 8, max_word_len = 10}"),
        *("--sampling.max_tokens", "12"),
        *("--schedule.max_staleness", str(staleness), "--evaluation.questions", "50"),
    )
    summary = up.finish()
    assert summary["steps"] == 3 and summary["ledger_balanced"] is True and summary["rejected"] == {}
    surplus, trained = (
        up.query(f"select count(*) from groups where state = '{state}'")[0][0] for state in ("surplus", "trained")
    )
    assert trained == 12 and surplus > 3 * trained
    assert summary["staleness_max"] <= staleness

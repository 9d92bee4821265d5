"""`farflung audit` on a real ledger."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.audit import main
from protocol.reasons import ADVICE, Reason
from tests.dashboard.filled import CHEAT, GOLD, HONEST, RUN_KEY, Run

pytestmark = pytest.mark.usefixtures("run")


@pytest.fixture
def audit(directory: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command on the directory; gives (exit code, standard output, standard error)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main([arguments[0], *arguments[1:], "--dir", str(directory)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def listed(audit: Any, *arguments: str) -> dict[str, Any]:
    code, out, _ = audit("list", *arguments, "--json", "-")
    assert code == 0
    return json.loads(out)


def rejected(run: Run, code: Reason) -> int:
    with run.ledger.read() as tx:
        return tx.exec_driver_sql("select min(id) from rollouts where code = ?", (code.value,)).scalar_one()


def test_list_is_newest_first_and_counts_all(audit: Any) -> None:
    found = listed(audit, "--limit", "3")
    assert found["total"] == 26
    ids = [row["id"] for row in found["rollouts"]]
    assert len(ids) == 3 and ids == sorted(ids, reverse=True)
    code, out, _ = audit("list", "--limit", "3")
    assert code == 0 and out.splitlines()[-1] == "3 of 26 rollouts" and len(out.splitlines()) == 5


@pytest.mark.parametrize(
    ("arguments", "total"),
    [
        (["--node", CHEAT[:10]], 4),
        (["--node", HONEST], 22),
        (["--node", "cheat-0"], 4),
        (["--node", "%"], 0),
        (["--node", "_" * 64], 0),
        (["--reason", "sampling_mismatch"], 3),
        (["--reason", "sampling_mismatch", "--node", HONEST], 0),
        (["--version", "0"], 12),
        (["--version", "2"], 6),
        (["--state", "trained"], 16),
        (["--state", "submitted", "--version", "2"], 2),
    ],
)
def test_filters(audit: Any, arguments: list[str], total: int) -> None:
    found = listed(audit, *arguments)
    assert (found["total"], len(found["rollouts"])) == (total, total)


def test_list_tells_value_limit_and_factor(audit: Any) -> None:
    row = listed(audit, "--reason", "bad_termination")["rollouts"][0]
    assert (row["value"], row["limit"], row["factor"]) == (3.5, 0.05, pytest.approx(70))
    assert (row["node"], row["label"], row["state"]) == (CHEAT, "cheat-0", "rejected")


def test_show_explains_a_rejection(audit: Any, run: Run) -> None:
    number = rejected(run, Reason.SAMPLING_MISMATCH)
    code, out, _ = audit("show", str(number))
    assert code == 0
    for part in (
        f"Rollout {number} by cheat-0 ({CHEAT})",
        f"sampling_mismatch: {ADVICE[Reason.SAMPLING_MISMATCH]}",
        "measured 3.5 against a limit of 0.05, 70 times the limit",
        "check termination: holds, 0 against a limit of 0",
        "check sampling_margin: FAILED, 3.5 against a limit of 0.05, 70 times the limit",
        "check activation: holds, 0.01 against a limit of 0.04",
        "margins above zero at 2 token(s), largest: 3.5 at token 1, 0.25 at token 3",
        "largest log-probability gap -2.25 at token 1",
        "chunk 0: rows 4, exponent mismatches 2, mantissa mean 1.5",
        f"receipt: rejected, signed by {RUN_KEY.id}",
        "leased -> submitted, by node",
        "verifying -> rejected, by verifier v1",
    ):
        assert part in out, part
    assert out.rstrip().endswith("Pay\n  none")
    assert GOLD not in out


def test_show_as_json(audit: Any, run: Run) -> None:
    number = rejected(run, Reason.SAMPLING_MISMATCH)
    code, out, _ = audit("show", str(number), "--json", "-")
    shown = json.loads(out)
    (verdict,) = shown["verdicts"]
    assert code == 0 and shown["node_id"] == CHEAT and GOLD not in out
    assert (verdict["failed"], verdict["code"]) == ("sampling_margin", "sampling_mismatch")
    assert [check["factor"] for check in verdict["checks"]] == [None, pytest.approx(70), pytest.approx(0.25)]
    assert verdict["largest_margins"] == [{"token": 1, "margin": 3.5}, {"token": 3, "margin": 0.25}]
    assert [event["after"] for event in shown["events"]] == ["leased", "submitted", "verifying", "rejected"]
    assert verdict["receipt"]["problems"] == []


def test_show_an_accepted_rollout(audit: Any) -> None:
    number = listed(audit, "--state", "trained", "--limit", "1")["rollouts"][0]["id"]
    code, out, _ = audit("show", str(number))
    assert code == 0
    assert "10 tokens (all as replayed)" in out and "step 2, staleness 0" in out
    assert "assigned -> trained, by trainer" in out
    assert ": price 23, " in out


def test_show_one_without_verdict(audit: Any) -> None:
    number = listed(audit, "--state", "submitted", "--limit", "1")["rollouts"][0]["id"]
    code, out, _ = audit("show", str(number))
    assert code == 0 and "state: submitted" in out and "Verdict" not in out


@pytest.mark.parametrize(
    "measures",
    [
        "",
        "[]",
        "{}",
        "not json",
        '{"checks": null, "margins": null, "chunks": null, "logprob_gaps": null}',
        '{"checks": [{}, 3], "margins": [null, "x", NaN], "chunks": [{"rows": NaN}, 1], "logprob_gaps": [Infinity]}',
        '{"checks": [{"check": "c", "value": Infinity, "limit": 0, "holds": false}], "margins": [true]}',
    ],
)
def test_show_copes_with_missing_measures(audit: Any, run: Run, measures: str) -> None:
    number = rejected(run, Reason.SAMPLING_MISMATCH)
    with run.ledger.write() as tx:
        tx.exec_driver_sql("update verdicts set measures = ?", (measures,))
    code, out, err = audit("show", str(number))
    assert (code, err) == (0, "") and "sampling_mismatch" in out
    code, out, err = audit("show", str(number), "--json", "-")
    assert err == "" and json.loads(out, parse_constant=pytest.fail)["verdicts"][0]["largest_margins"] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("update rollouts set payload_hash = 'other' where id = ?", "payload_hash"),
        ("update verdicts set value = 9.5 where rollout_id = ?", "value: the receipt says 3.5, the ledger 9.5"),
        ("update verdicts set receipt = replace(receipt, '3.5', '3.6') where rollout_id = ?", "does not verify"),
        ("update verdicts set receipt = 'junk' where rollout_id = ?", "unreadable or not signed"),
    ],
)
def test_a_receipt_that_contradicts_the_ledger_is_a_finding(audit: Any, run: Run, change: str, said: str) -> None:
    number = rejected(run, Reason.SAMPLING_MISMATCH)
    with run.ledger.write() as tx:
        tx.exec_driver_sql(change, (number,))
    code, out, _ = audit("show", str(number))
    assert code == 1
    assert "receipt WRONG: " in out and said in out


def test_ledger_balances(audit: Any) -> None:
    code, out, _ = audit("ledger")
    assert code == 0 and "the accounts balance" in out
    code, out, _ = audit("ledger", "--json", "-")
    assert (code, json.loads(out)) == (
        0,
        {"balanced": True, "rows": 20, "credited": 460, "earned": 460, "problems": []},
    )


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ("update credits set amount = amount + 1 where sequence = 7", "credit 7: the row was changed"),
        ("delete from credits where sequence = 5", "credit 6: the chain is broken here"),
        ("update rollouts set price = price + 1 where state = 'ready'", "credits sum to 460, paid rollouts to 464"),
    ],
)
def test_a_changed_ledger_is_a_finding(audit: Any, run: Run, change: str, first: str) -> None:
    with run.ledger.write() as tx:
        tx.exec_driver_sql(change)
    code, out, _ = audit("ledger")
    assert code == 1
    assert f"NOT BALANCED: {first}" in out
    code, out, _ = audit("ledger", "--json", "-")
    assert code == 1 and json.loads(out)["problems"][0] == first


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["show"],
        ["show", "x"],
        ["show", "0"],
        ["show", str(2**63)],
        ["list", "--reason", "no_such_code"],
        ["list", "--state", "no_such_state"],
        ["list", "--limit", "0"],
        ["list", "--version", "x"],
    ],
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage: farflung audit" in capsys.readouterr().err


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "list|show|ledger" in capsys.readouterr().out


def test_what_is_not_there(audit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("show", "999")[::2] == (2, "farflung audit: there is no rollout 999\n")
    nowhere = tmp_path / "nowhere"
    assert main(["ledger", "--dir", str(nowhere)]) == 2
    assert "there is no ledger" in capsys.readouterr().err
    assert not nowhere.exists()
    nowhere.mkdir()
    (nowhere / "ledger.db").write_bytes(b"this is no database, only a file of its name" * 100)
    assert main(["list", "--dir", str(nowhere)]) == 2
    assert "cannot read the ledger" in capsys.readouterr().err


def test_json_to_a_file(audit: Any, tmp_path: Path) -> None:
    code, out, _ = audit("ledger", "--json", str(tmp_path / "out.json"))
    assert code == 0 and "the accounts balance" in out
    assert json.loads((tmp_path / "out.json").read_text())["balanced"] is True
    assert audit("ledger", "--json", str(tmp_path / "no" / "out.json"))[0] == 2


def test_default_directory(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FARFLUNG_DIR", raising=False)
    assert main(["ledger"]) == 2
    assert "name one with --dir" in capsys.readouterr().err
    for age, name in ((100, "old"), (50, "new"), (10, "empty")):
        place = tmp_path / "farflung-runs" / name
        place.mkdir(parents=True)
        if name != "empty":
            (place / "ledger.db").write_bytes(b"junk" * 1000 if name == "old" else b"")
            os.utime(place / "ledger.db", (10_000 - age, 10_000 - age))
    (tmp_path / "farflung-runs" / "new" / "ledger.db").unlink()
    for part in directory.iterdir():
        (tmp_path / "farflung-runs" / "new" / part.name).write_bytes(part.read_bytes())
    assert main(["ledger"]) == 0
    monkeypatch.setenv("FARFLUNG_DIR", str(tmp_path / "farflung-runs" / "old"))
    assert main(["ledger"]) == 2
    assert main(["ledger", "--dir", str(directory)]) == 0


def test_import_is_light(root: Path) -> None:
    program = (
        "import sys, coordinator.audit, coordinator.live, coordinator.dashboard.routes;"
        "print(sorted({'torch', 'transformers', 'numpy', 'peft'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr

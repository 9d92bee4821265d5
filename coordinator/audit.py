"""`farflung audit list|show|ledger`: what the ledger of a run says about each rollout, in words or as JSON.

Exit codes: 0 nothing wrong, 1 a finding (the accounts do not balance, a receipt contradicts the ledger), 2 usage.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, func, select
from sqlalchemy.exc import SQLAlchemyError

from protocol.messages import Receipt
from protocol.reasons import ADVICE, Reason, Refusal
from protocol.signed import Signed, open_document

from .ledger.credits import check_balance
from .ledger.database import Ledger
from .ledger.states import RolloutState
from .ledger.tables import allowlist, credits, events, groups, rollouts, verdicts

RUNS = "farflung-runs"
LARGEST_MARGINS = 5
_SHOWN = (
    "id group_id slot fencing version node_id label lease_id problem_id group_state state code tokens reward price "
    "token_identical attempts payload_hash blob position evidence evidence_position step staleness staleness_in_flight"
).split()
_CHUNK = "rows exponent_mismatches mantissa_mean mantissa_median sign_mismatches relative_error".split()
OK, FINDING, USAGE = 0, 1, 2


class _Unusable(Exception):
    """What was asked for is not there; the message is for the user."""


def main(argv: Sequence[str]) -> int:
    """Run the command; see the module for exit codes. Writes to standard output, complaints to standard error."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as end:  # argparse has said why; --help ends with 0
        return end.code if isinstance(end.code, int) else USAGE
    try:
        ledger = Ledger(f"sqlite:///{_database(options.dir)}")
        try:
            with ledger.read() as tx:
                document, words, code = options.report(tx, options)
        finally:
            ledger.close()
        if options.json != "-":
            print("\n".join(words))
        if options.json:
            _write_json(options.json, document)
        return int(code)
    except (_Unusable, OSError) as error:
        print(f"farflung audit: {error}", file=sys.stderr)
    except SQLAlchemyError as error:
        print(f"farflung audit: cannot read the ledger: {str(error).splitlines()[0]}", file=sys.stderr)
    return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="farflung audit", description="Look into the ledger of a run.")
    commands = parser.add_subparsers(required=True, metavar="list|show|ledger")

    def command(name: str, words: str, report: Any) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=words, description=words)
        added.add_argument("--dir", type=Path, help=f"the run (default: $FARFLUNG_DIR, or the newest under {RUNS}/)")
        added.add_argument("--json", metavar="FILE", help="write one JSON document to FILE (-: standard output)")
        added.set_defaults(report=report)
        return added

    listing = command("list", "list rollouts, the newest first", _list)
    listing.add_argument("--node", metavar="PREFIX", help="only nodes whose id begins with, or whose label is, PREFIX")
    reasons = [reason.value for reason in Reason]
    listing.add_argument("--reason", metavar="CODE", choices=reasons, help="only those decided with this reason code")
    listing.add_argument("--version", metavar="N", type=int, help="only this policy version")
    states = [state.value for state in RolloutState]
    listing.add_argument("--state", metavar="S", choices=states, help=f"only this state: {', '.join(states)}")
    listing.add_argument("--limit", metavar="N", type=_positive, default=50, help="at most N (default 50)")
    showing = command("show", "show all that is known about one rollout", _show)
    showing.add_argument("id", type=_positive, help="number of the rollout")
    command("ledger", "check that the accounts balance", _ledger)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if not 0 < value < 2**63:
        raise ValueError
    return value


def _database(directory: Path | None) -> Path:
    """The ledger file of a run directory, which must exist: opening it must never make one."""
    if directory is None and os.environ.get("FARFLUNG_DIR"):
        directory = Path(os.environ["FARFLUNG_DIR"])
    if directory is not None:
        path = directory / "ledger.db"
        if not path.is_file():
            raise _Unusable(f"there is no ledger at {path}")
        return path
    found = [path for path in Path(RUNS).glob("*/ledger.db") if path.is_file()]
    if not found:
        raise _Unusable(f"no run under {RUNS}/ here; name one with --dir")
    return max(found, key=_last_written)


def _last_written(path: Path) -> float:
    log = path.with_name(path.name + "-wal")  # recent commits are there, and not in the file itself
    return max(part.stat().st_mtime for part in (path, log) if part.exists())


# ---- list


def _list(tx: Connection, options: argparse.Namespace) -> tuple[dict[str, Any], list[str], int]:
    own = verdicts.alias()
    latest = select(func.max(own.c.id)).where(own.c.rollout_id == rollouts.c.id).correlate(rollouts).scalar_subquery()
    query = (
        select(rollouts, allowlist.c.label, verdicts.c.value, verdicts.c.limit_value)
        .join(allowlist, allowlist.c.id == rollouts.c.node_id, isouter=True)
        .join(verdicts, verdicts.c.id == latest, isouter=True)
    )
    if options.node is not None:
        begins = rollouts.c.node_id.startswith(options.node, autoescape=True)
        query = query.where(begins | (allowlist.c.label == options.node))
    for column, value in (("code", options.reason), ("version", options.version), ("state", options.state)):
        if value is not None:
            query = query.where(rollouts.c[column] == value)
    total = int(tx.execute(select(func.count()).select_from(query.subquery())).scalar_one())
    rows = [_summary(row) for row in tx.execute(query.order_by(rollouts.c.id.desc()).limit(options.limit))]
    document = {"total": total, "rollouts": rows}
    return document, [*_table(rows), f"{len(rows)} of {total} rollouts"], OK


def _summary(row: Any) -> dict[str, Any]:
    return {
        "id": row.id,
        "node": row.node_id,
        "label": row.label,
        "group": row.group_id,
        "slot": row.slot,
        "fencing": row.fencing,
        "version": row.version,
        "state": row.state,
        "code": row.code,
        "value": _finite(row.value),
        "limit": _finite(row.limit_value),
        "factor": _factor(row.value, row.limit_value),
        "tokens": row.tokens,
        "reward": row.reward,
        "token_identical": row.token_identical,
        "decided_at": row.decided_at,
    }


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    head = ["id", "node", "label", "slot", "version", "state", "reason", "value", "limit", "factor", "tokens", "reward"]
    body = [
        [
            str(row["id"]),
            row["node"][:12],
            row["label"] or "-",
            f"{row['group']}/{row['slot']}",
            f"v{row['version']}",
            row["state"],
            row["code"] or "-",
            *(_figure(row[name]) for name in ("value", "limit", "factor", "tokens", "reward")),
        ]
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]
    return ["  ".join(f"{text:<{w}}" for text, w in zip(line, widths, strict=True)).rstrip() for line in [head, *body]]


# ---- show


def _show(tx: Connection, options: argparse.Namespace) -> tuple[dict[str, Any], list[str], int]:
    query = (
        select(rollouts, allowlist.c.label, groups.c.problem_id, groups.c.state.label("group_state"))
        .join(groups, groups.c.id == rollouts.c.group_id)
        .join(allowlist, allowlist.c.id == rollouts.c.node_id, isouter=True)
        .where(rollouts.c.id == options.id)
    )
    row = tx.execute(query).mappings().one_or_none()
    if row is None:
        raise _Unusable(f"there is no rollout {options.id}")
    decided = select(verdicts).where(verdicts.c.rollout_id == row["id"]).order_by(verdicts.c.id)
    history = select(events).where(events.c.rollout_id == row["id"]).order_by(events.c.id)
    paid = select(credits).where(credits.c.rollout_id == row["id"]).order_by(credits.c.sequence)
    document = {
        **{name: row[name] for name in _SHOWN},
        "verdicts": [_verdict(found, row) for found in tx.execute(decided)],
        "events": [
            {"at": e.at, "before": e.before, "after": e.after, "actor": e.actor, "detail": e.detail}
            for e in tx.execute(history)
        ],
        "credits": [
            {"sequence": c.sequence, "kind": c.kind, "amount": c.amount, "at": c.at} for c in tx.execute(paid)
        ],
    }
    wrong = any(verdict["receipt"]["problems"] for verdict in document["verdicts"])
    return document, _in_words(document), FINDING if wrong else OK


def _verdict(row: Any, rollout: Any) -> dict[str, Any]:
    measures = _json_object(row.measures)
    checks = [_check(check) for check in measures.get("checks") or [] if isinstance(check, dict)]
    margins = [_finite(margin) for margin in measures.get("margins") or []]
    ranked = sorted(((m, t) for t, m in enumerate(margins) if m), key=lambda pair: (-pair[0], pair[1]))
    return {
        "attempt": row.attempt,
        "at": row.at,
        "outcome": row.outcome,
        "code": row.code,
        "value": _finite(row.value),
        "limit": _finite(row.limit_value),
        "factor": _factor(row.value, row.limit_value),
        "checks": checks,
        "failed": next((check["check"] for check in checks if check["holds"] is False), None),
        "tokens_with_margin": len(ranked),
        "largest_margins": [{"token": token, "margin": margin} for margin, token in ranked[:LARGEST_MARGINS]],
        "chunks": [
            {name: _finite(chunk[name]) for name in _CHUNK if name in chunk}
            for chunk in measures.get("chunks") or []
            if isinstance(chunk, dict)
        ],
        "largest_logprob_gap": _largest(measures.get("logprob_gaps") or []),
        "detail": str(measures.get("detail") or ""),
        "receipt": _receipt(row, rollout),
    }


def _check(check: dict[str, Any]) -> dict[str, Any]:
    value, limit, holds = _finite(check.get("value")), _finite(check.get("limit")), check.get("holds")
    return {
        "check": str(check.get("check", "?")),
        "value": value,
        "limit": limit,
        "holds": holds if isinstance(holds, bool) else None,
        "factor": _factor(value, limit),
    }


def _receipt(row: Any, rollout: Any) -> dict[str, Any]:
    """The receipt, whether its signature holds under the key that it names, and where it contradicts the ledger."""
    if not row.receipt:
        return {"present": False, "problems": []}
    try:
        key = Signed.model_validate_json(row.receipt).key
        receipt = open_document(row.receipt.encode(), "receipt", Receipt, key)
    except (ValidationError, Refusal) as error:
        return {"present": True, "problems": [f"unreadable or not signed: {str(error).splitlines()[0]}"]}
    expected = {"rollout_id": row.rollout_id, "node_id": rollout["node_id"], "code": row.code, "verdict": row.outcome}
    expected |= {"payload_hash": rollout["payload_hash"], "value": row.value, "limit": row.limit_value}
    problems = [
        f"{name}: the receipt says {getattr(receipt, name)}, the ledger {value}"
        for name, value in expected.items()
        if getattr(receipt, name) != value
    ]
    return {"present": True, "key": key, **receipt.model_dump(mode="json"), "problems": problems}


def _in_words(shown: dict[str, Any]) -> list[str]:
    words = [
        f"Rollout {shown['id']} by {shown['label'] or 'a node without label'} ({shown['node_id']})",
        f"  slot {shown['group_id']}/{shown['slot']} (fencing number {shown['fencing']}) of problem "
        f"{shown['problem_id']}, policy version {shown['version']}, lease {shown['lease_id']}",
        f"  state: {shown['state']}; its group: {shown['group_state']}",
    ]
    if shown["tokens"] is not None:
        identical = {None: "not compared", True: "all as replayed", False: "not all as replayed"}
        words.append(
            f"  {shown['tokens']} tokens ({identical[shown['token_identical']]}), reward {_figure(shown['reward'])}"
        )
    if shown["step"] is not None:
        words.append(
            f"  step {shown['step']}, staleness {shown['staleness']} ({shown['staleness_in_flight']} of it in flight)"
        )
    if shown["payload_hash"]:
        words.append(f"  payload {shown['payload_hash']}, item {shown['position']} of blob {shown['blob']}")
    for verdict in shown["verdicts"]:
        words += _verdict_in_words(verdict)
    words.append("Life")
    for event in shown["events"]:
        change = f"{event['before']} -> {event['after']}" if event["before"] else event["after"]
        note = f": {event['detail']}" if event["detail"] else ""
        words.append(f"  {_time(event['at'])}  {change}, by {event['actor']}{note}")
    paid = [f"  credit {c['sequence']}: {c['kind']} {c['amount']}, {_time(c['at'])}" for c in shown["credits"]]
    return [*words, "Pay", *(paid or ["  none"])]


def _verdict_in_words(verdict: dict[str, Any]) -> list[str]:
    words = [f"Verdict {verdict['attempt']}, {_time(verdict['at'])}: {verdict['outcome']}"]
    code = verdict["code"]
    if code:
        words.append(f"  {code}: {ADVICE[Reason(code)] if code in Reason.__members__.values() else ''}".rstrip())
        words.append(f"  measured {_against(verdict)}")
    if verdict["detail"]:
        words.append(f"  {verdict['detail']}")
    for check in verdict["checks"]:
        outcome = {True: "holds", False: "FAILED", None: "not decided"}[check["holds"]]
        words.append(f"  check {check['check']}: {outcome}, {_against(check)}")
    if verdict["largest_margins"]:
        places = ", ".join(f"{_figure(m['margin'])} at token {m['token']}" for m in verdict["largest_margins"])
        words.append(f"  margins above zero at {verdict['tokens_with_margin']} token(s), largest: {places}")
    if verdict["largest_logprob_gap"]:
        gap = verdict["largest_logprob_gap"]
        words.append(f"  largest log-probability gap {_figure(gap['gap'])} at token {gap['token']}")
    for number, chunk in enumerate(verdict["chunks"]):
        parts = [f"{name.replace('_', ' ')} {_figure(value)}" for name, value in chunk.items()]
        words.append(f"  chunk {number}: {', '.join(parts)}")
    receipt = verdict["receipt"]
    if not receipt["present"]:
        return [*words, "  no receipt"]
    if "key" in receipt:
        words.append(f"  receipt: {receipt['verdict']}, signed by {receipt['key']}")
        words.append(f"  evidence {receipt['evidence_sha256']}")
    return [*words, *(f"  receipt WRONG: {problem}" for problem in receipt["problems"])]


def _against(measured: dict[str, Any]) -> str:
    value, limit, factor = measured["value"], measured["limit"], measured["factor"]
    if value is None or limit is None:
        return "no figure" if value is None else _figure(value)
    words = f"{_figure(value)} against a limit of {_figure(limit)}"
    if factor is None or measured.get("holds") is True:
        return words
    return f"{words}, {_figure(factor)} times the limit"


# ---- ledger


def _ledger(tx: Connection, options: argparse.Namespace) -> tuple[dict[str, Any], list[str], int]:
    balance = check_balance(tx)
    document = {
        "balanced": balance.balanced,
        "rows": balance.rows,
        "credited": balance.credited,
        "earned": balance.earned,
        "problems": list(balance.problems),
    }
    words = [f"{balance.rows} credits, {balance.credited} credited, {balance.earned} earned by paid rollouts"]
    if balance.balanced:
        return document, [*words, "the accounts balance and the chain is whole"], OK
    more = len(balance.problems) - 1
    tail = f" ({more} more)" if more else ""
    return document, [*words, f"NOT BALANCED: {balance.problems[0]}{tail}"], FINDING


# ---- figures


def _finite(value: Any) -> float | None:
    """A number that JSON can carry, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def _factor(value: Any, limit: Any) -> float | None:
    value, limit = _finite(value), _finite(limit)
    return None if value is None or not limit else _finite(value / limit)


def _largest(gaps: Sequence[Any]) -> dict[str, Any] | None:
    known = [(abs(gap), token, gap) for token, gap in enumerate(gaps) if _finite(gap) is not None]
    if not known:
        return None
    _, token, gap = max(known, key=lambda entry: (entry[0], -entry[1]))
    return {"token": token, "gap": gap}


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {"detail": "the measures of this verdict are unreadable"}
    return found if isinstance(found, dict) else {}


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def _write_json(name: str, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if name == "-":
        sys.stdout.write(text)
    else:
        Path(name).write_text(text, encoding="utf-8")

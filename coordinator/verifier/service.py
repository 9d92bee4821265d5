"""The verifier process: claims submitted rollouts, prefills them, and writes verdicts, rewards and receipts."""

from __future__ import annotations

import logging
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from protocol.completion import Completion, decode_batch
from protocol.messages import Receipt
from protocol.reasons import Reason
from protocol.seeds import slot_seed
from protocol.signed import sign_document
from toploc import Measures, Outcome, Thresholds, distances_many, judge
from toploc.judge import ACTIVATION_FIGURES, Check

from ..ledger import credits, leases, tables, training, verdicts
from ..ledger.database import get_meta
from ..ledger.states import RolloutState
from ..ledger.verdicts import MAX_ATTEMPTS, Decision, Job
from ..policy import DTYPES, Versions
from ..run import Run
from .checks import REASON_OF, Fault, Parsed, inspect
from .evaluate import pass_count
from .prefill import Claim, Prefilled, prefill

log = logging.getLogger("farflung.verifier")
IDLE_SECONDS = 0.02
RECEIPT = "receipt"


@dataclass(frozen=True)
class Checkpoint:
    """A version's name, weights digest and files."""

    name: str
    weights_digest: str
    folder: Path


class Verifier:
    """Verifies the rollouts of one run. `name` identifies this process in the ledger across restarts."""

    def __init__(self, run: Run, thresholds: Thresholds, name: str = "v0", clock: Callable[[], float] = time.time):
        self.run, self.thresholds, self.name, self.clock = run, thresholds, name, clock
        spec = run.spec
        self.versions = Versions(
            run.model_dir, spec.model.adapter == "lora", DTYPES[spec.model.dtype], spec.max_staleness + 3
        )
        self.held_out = run.task.held_out(run.config.evaluation.questions)
        self._checkpoints: dict[int, Checkpoint] = {}

    def serve(self, stop: Callable[[], bool]) -> None:
        """Work until `stop()` is true. Jobs that a predecessor of this name held are taken up again."""
        with self.run.ledger.write() as tx:
            verdicts.give_back(tx, self.name, now=self.clock(), detail="the verifier restarted")
        marker = None
        while not stop():
            worked = self.verify_some() > 0
            worked = self.evaluate_due() or worked
            if not worked:
                now_at = self.run.ledger.change_marker()
                if now_at == marker:
                    time.sleep(IDLE_SECONDS)
                marker = now_at

    def verify_some(self) -> int:
        """Claim one batch and decide it. Returns how many rollouts it held."""
        started, cpu = time.perf_counter(), time.process_time()
        with self.run.ledger.write() as tx:
            jobs = verdicts.claim(tx, self.name, self.run.config.verifier.batch_rollouts, now=self.clock())
        if not jobs:
            return 0
        decisions = self.decide(jobs)
        with self.run.ledger.write() as tx:
            now = self.clock()
            verdicts.record(tx, self.run.spec, decisions, self.name, self.run.config.min_group, now=now)
            data = {
                "rollouts": len(jobs),
                "tokens": sum(decision.tokens for decision in decisions),
                "seconds": time.perf_counter() - started,
                "cpu_seconds": time.process_time() - cpu,
            }
            training.add_sample(tx, "verifier", data, now=now)
        return len(jobs)

    def decide(self, jobs: Sequence[Job]) -> list[Decision]:
        """Verdicts for jobs of one version. A batch that fails is bisected; a rollout that fails alone is tried again
        later, and after the third time it is unverifiable: a crash of ours is never held against a node."""
        try:
            return self._decide(jobs)
        except Exception as error:
            log.exception("verification of %d rollouts failed", len(jobs))
            if len(jobs) > 1:
                half = len(jobs) // 2
                return self.decide(jobs[:half]) + self.decide(jobs[half:])
            return [self._undecided(jobs[0], f"{type(error).__name__}: {error}")]

    def _decide(self, jobs: Sequence[Job]) -> list[Decision]:
        checkpoint = self._checkpoint(jobs[0].version)
        completions = self._completions(jobs)
        spec = self.run.spec
        inspected = [
            inspect(completion, spec, job.version, checkpoint.weights_digest)
            for job, completion in zip(jobs, completions, strict=True)
        ]
        sound = [index for index, found in enumerate(inspected) if isinstance(found, Parsed)]
        claims = {index: _claim(self.run, jobs[index], inspected[index]) for index in sound}
        model = self.versions.get(checkpoint.folder)
        results = prefill(
            model,
            [claims[index] for index in sound],
            spec.sampling.temperature,
            spec.model.eos_token_ids,
            self.run.config.verifier.token_budget,
        )
        measured = dict(zip(sound, self._measure([inspected[i] for i in sound], results), strict=True))
        prefilled = dict(zip(sound, results, strict=True))
        evidence = self._store_evidence(sound, claims, inspected, prefilled)
        decisions = []
        for index, job in enumerate(jobs):
            found = inspected[index]
            if isinstance(found, Fault):
                decisions.append(self._rejection(job, found, len(completions[index].tokens) // 4, None))
            else:
                decisions.append(self._judge(job, found, measured[index], evidence, sound.index(index)))
        return decisions

    def _measure(self, parsed: Sequence[Any], results: Sequence[Prefilled]) -> list[Measures]:
        """Distances of all sound completions in one pass."""
        proof = self.run.spec.proof
        chunks = distances_many(
            [item.proofs for item in parsed],
            [result.hidden for result in results],
            chunk_rows=proof.chunk_rows,
            top_k=proof.top_k,
        )
        return [
            Measures.of(result.margins, distances, item.logprobs, result.logprobs)
            for item, result, distances in zip(parsed, results, chunks, strict=True)
        ]

    def _judge(
        self, job: Job, parsed: Parsed, measured: Measures, evidence: str | None, position: int
    ) -> Decision:
        verdict = judge(measured, self.thresholds)
        if verdict.outcome is not Outcome.PASS:
            assert verdict.check is not None
            fault = Fault(REASON_OF[verdict.check], str(verdict.figure), verdict.value, verdict.limit)
            return self._rejection(job, fault, len(parsed.tokens), measured)
        spec = self.run.spec
        text = self.run.codec.decode(parsed.tokens, spec.model.eos_token_ids)
        score = self.run.task.score(dict(job.gold), text)
        price = credits.price(
            len(job.prompt) // 4, len(parsed.tokens), spec.price_prompt_token, spec.price_completion_token
        )
        return Decision(
            job=job,
            state=RolloutState.ACCEPTED,
            code=None,
            value=None,
            limit=None,
            tokens=len(parsed.tokens),
            reward=score.reward,
            price=price,
            token_identical=measured.token_identical,
            measures=_report(measured, self.thresholds, score.outcome),
            receipt=self._receipt(job, "accepted", None, None, None, price),
            evidence=evidence,
            evidence_position=position,
        )

    def _rejection(self, job: Job, fault: Fault, tokens: int, measured: Measures | None) -> Decision:
        value, limit = _finite(fault.value), _finite(fault.limit)
        report: dict[str, Any] = {} if measured is None else _report(measured, self.thresholds, "")
        report["detail"] = fault.detail
        report.setdefault("checks", [_check(fault.reason.value, value, limit, False)])
        return Decision(
            job=job,
            state=RolloutState.REJECTED,
            code=fault.reason.value,
            value=value,
            limit=limit,
            tokens=tokens,
            reward=None,
            price=0,
            token_identical=None if measured is None else measured.token_identical,
            measures=report,
            receipt=self._receipt(job, "rejected", fault.reason, value, limit, 0),
            evidence=None,
            evidence_position=None,
        )

    def _undecided(self, job: Job, detail: str) -> Decision:
        last = job.attempts >= MAX_ATTEMPTS
        return Decision(
            job=job,
            state=RolloutState.UNVERIFIABLE if last else RolloutState.INCONCLUSIVE,
            code=Reason.UNVERIFIABLE.value if last else None,
            value=None,
            limit=None,
            tokens=0,
            reward=None,
            price=0,
            token_identical=None,
            measures={"detail": detail[:500]},
            receipt=self._receipt(job, "unverifiable", Reason.UNVERIFIABLE, None, None, 0) if last else "",
            evidence=None,
            evidence_position=None,
        )

    def _receipt(
        self, job: Job, verdict: Any, code: Reason | None, value: float | None, limit: float | None, price: int
    ) -> str:
        receipt = Receipt(
            run_id=self.run.spec.run_id,
            run_spec_digest=self.run.spec.digest,
            rollout_id=job.rollout_id,
            node_id=job.node_id,
            payload_hash=job.payload_hash,
            verdict=verdict,
            code=code,
            value=value,
            limit=limit,
            price=price,
            evidence_sha256=job.blob,
            salt=secrets.token_hex(32),
            created=self.clock(),
        )
        return sign_document(RECEIPT, receipt, self.run.key).model_dump_json()

    def _completions(self, jobs: Sequence[Job]) -> list[Completion]:
        batches: dict[str, tuple[Completion, ...]] = {}
        for job in jobs:
            if job.blob not in batches:
                signed = msgspec.msgpack.decode(self.run.store.get(job.blob))
                batches[job.blob] = decode_batch(signed["body"])
        return [batches[job.blob][job.position] for job in jobs]

    def _store_evidence(
        self, sound: Sequence[int], claims: Any, inspected: Any, prefilled: dict[int, Prefilled]
    ) -> str | None:
        """What the trainer needs of each sound rollout, in one blob: tokens, both sides' log-probs."""
        if not sound:
            return None
        rows = [
            {
                "tokens": struct.pack(f"<{len(claims[index].tokens)}i", *claims[index].tokens),
                "logp_engine": struct.pack(f"<{len(claims[index].tokens)}f", *inspected[index].logprobs),
                "logp_old": prefilled[index].logprobs.float().numpy().astype("<f4").tobytes(),
            }
            for index in sound
        ]
        return self.run.store.put(msgspec.msgpack.encode(rows))

    def _checkpoint(self, version: int) -> Checkpoint:
        if version not in self._checkpoints:
            with self.run.ledger.read() as tx:
                row = tx.execute(
                    tables.checkpoints.select().where(tables.checkpoints.c.version == version)
                ).one()
            self._checkpoints[version] = Checkpoint(row.name, row.weights_digest, self.run.version_dir(row.name))
        return self._checkpoints[version]

    def evaluate_due(self) -> bool:
        """Measure the held-out pass rate of the newest version if it is due. Returns whether it was."""
        every = self.run.config.evaluation.every
        with self.run.ledger.read() as tx:
            newest = leases.newest_checkpoint(tx)
            last = tx.execute(
                tables.evaluations.select().order_by(tables.evaluations.c.version.desc()).limit(1)
            ).one_or_none()
            asked = get_meta(tx, "evaluate")
        if newest is None:
            return False
        done = -every if last is None else last.version
        if newest[0] < done + every and not (asked == newest[0] != done):
            return False
        self.evaluate(newest[0])
        return True

    def evaluate(self, version: int) -> None:
        """Measure the held-out pass rate of a version and record it."""
        spec = self.run.spec
        passed = pass_count(
            self.versions.get(self._checkpoint(version).folder),
            self.run.task,
            self.run.codec,
            self.held_out,
            spec.model.eos_token_ids,
            spec.sampling.max_tokens,
        )
        with self.run.ledger.write() as tx:
            training.evaluated(tx, version, passed, len(self.held_out), now=self.clock())


def _claim(run: Run, job: Job, parsed: Any) -> Claim:
    seed = slot_seed(run.seed_key, run.spec.run_id, job.problem_id, job.group_id, job.version, job.slot)
    prompt = struct.unpack(f"<{len(job.prompt) // 4}i", job.prompt)
    return Claim(prompt, parsed.tokens, seed)


def _finite(value: float | None) -> float | None:
    """JSON and receipts hold finite numbers; an infinite distance is shown as the largest one."""
    if value is None or value != value:
        return None
    return max(min(float(value), 1.7e308), -1.7e308)


def _check(name: str, value: float | None, limit: float | None, holds: bool) -> dict[str, Any]:
    return {"check": name, "value": value, "limit": limit, "holds": holds}


def _report(measured: Measures, thresholds: Thresholds, outcome: str) -> dict[str, Any]:
    """What the audit shows of a verdict: every check with its value and limit, per token and per chunk."""
    allowed = thresholds.disagreements + thresholds.disagreement_share * measured.tokens
    figures = [
        (Check.SAMPLING, "largest_margin", measured.largest_margin, thresholds.margin_max),
        (Check.SAMPLING, "disagreements", float(measured.disagreements), allowed),
        *(
            (Check.ACTIVATION, name, getattr(measured, name), getattr(thresholds, name))
            for name in ACTIVATION_FIGURES
        ),
        (Check.LOGPROB, "logprob_gap", measured.logprob_gap, thresholds.logprob_gap),
    ]
    return {
        "checks": [
            _check(f"{check.value}.{name}", _finite(value), limit, bool(value <= limit))
            for check, name, value, limit in figures
        ],
        "margins": [round(float(value), 7) for value in measured.margins if value == value],
        "logprob_gaps": [round(float(value), 7) for value in measured.logprob_gaps if value == value],
        "chunks": [
            {
                "rows": chunk.rows,
                "exponent_mismatches": chunk.exponent_mismatches,
                "mantissa_mean": _finite(chunk.mantissa_mean),
                "mantissa_median": _finite(chunk.mantissa_median),
                "sign_mismatches": chunk.sign_mismatches,
                "relative_error": _finite(chunk.relative_error),
            }
            for chunk in measured.chunks
        ],
        "detail": outcome,
    }

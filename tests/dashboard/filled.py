"""A real ledger, filled through the ledger's own functions: a run in miniature with an honest node and a cheat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from coordinator.ledger import leases, nodes, submissions, training, verdicts
from coordinator.ledger.credits import price
from coordinator.ledger.database import Ledger
from coordinator.ledger.states import RolloutState
from protocol.identity import Key
from protocol.messages import Heartbeat, Receipt, RegisterNode
from protocol.reasons import Reason
from protocol.runspec import EnvironmentSpec, ModelSpec, ProofSpec, RunSpec, SamplingSpec
from protocol.signed import sign_document

RUN_KEY = Key.from_seed(bytes(31) + b"\x01")
HONEST = Key.from_seed(bytes(31) + b"\x02").id
CHEAT = Key.from_seed(bytes(31) + b"\x03").id
GOLD = "gold-that-nobody-may-see"
RELAY_URL = "https://relay.example.test:8443"
START = 1_700_000_000.0
GROUP = 4

SPEC = RunSpec(
    run_id="miniature",
    model=ModelSpec(
        architecture="tiny",
        base_weights_digest="a" * 64,
        tokenizer_digest="b" * 64,
        dtype="float32",
        head_dtype="float32",
        publish_dtype="float32",
        vocab_size=64,
        hidden_size=16,
        eos_token_ids=(1,),
        adapter="none",
    ),
    sampling=SamplingSpec(temperature=1.0, max_prompt_tokens=16, max_tokens=32),
    proof=ProofSpec(),
    max_staleness=2,
    group_size=GROUP,
    rollouts_per_version=8,
    publish_every=1,
    propagation_grace=5.0,
    lease_seconds=60.0,
    minimum_tokens_per_second=1.0,
    price_prompt_token=1,
    price_completion_token=2,
    calibration_families=("cpu",),
    environments=(EnvironmentSpec(name="sums", version="1"),),
)

GOOD = {
    "checks": [{"check": "sampling_margin", "value": 0.002, "limit": 0.05, "holds": True}],
    "margins": [0.0, 0.002, 0.0],
    "detail": "",
}
BAD = {
    "checks": [
        {"check": "termination", "value": 0.0, "limit": 0.0, "holds": True},
        {"check": "sampling_margin", "value": 3.5, "limit": 0.05, "holds": False},
        {"check": "activation", "value": 0.01, "limit": 0.04, "holds": True},
    ],
    "margins": [0.0, 3.5, 0.0, 0.25],
    "chunks": [
        {
            "rows": 4,
            "exponent_mismatches": 2,
            "mantissa_mean": 1.5,
            "mantissa_median": 1.0,
            "sign_mismatches": 0,
            "relative_error": 0.01,
        }
    ],
    "logprob_gaps": [0.001, -2.25],
    "detail": "margin at token 1",
}


def problem(number: int) -> leases.NewProblem:
    """The n-th problem."""
    return leases.NewProblem(f"sums/{number}", "sums", "1", "[]", b"\x05\x00\x00\x00" * 3, json.dumps({"answer": GOLD}))


@dataclass
class Run:
    """A ledger and a clock that tests move by hand."""

    ledger: Ledger
    now: float = START

    def join(self, node: str, label: str) -> None:
        """Register a node, one second after the last thing that happened."""
        self.now += 1
        with self.ledger.write() as tx:
            nodes.allow(tx, node, label)
            nodes.register(tx, node, RegisterNode(software="x", engine="hf", device="cpu"), now=self.now)

    def publish(self, version: int, step: int) -> None:
        """Seal a version of 1,000,000 bytes."""
        self.now += 1
        with self.ledger.write() as tx:
            training.enter_version(tx, SPEC, published(version, step), now=self.now)

    def work(self, node: str, version: int, slots: int) -> list[int]:
        """Lease and submit slots; returns the rollouts."""
        self.now += 1
        with self.ledger.write() as tx:
            ask = leases.Ask(node, (version,), slots, slots)
            granted = leases.grant(tx, SPEC, ask, problem, now=self.now)
            items = [
                submissions.Item(lease.lease_id, slot.fencing, slot.index, f"{slot.index:064x}")
                for lease in granted
                for slot in lease.slots
            ]
            results = submissions.submit(tx, node, items, "c" * 64, now=self.now + 0.5)
        self.now += 0.5
        return [result.rollout_id for result in results if result.rollout_id is not None]

    def judge(self, wrong: Mapping[int, Reason] | None = None, *, measures: Any = None) -> None:
        """Decide all that waits: rollouts in `wrong` are rejected, the others accepted with reward slot mod 2."""
        self.now += 1
        with self.ledger.write() as tx:
            jobs = verdicts.claim(tx, "v1", 1000, now=self.now)
            decisions = [self._decide(job, (wrong or {}).get(job.rollout_id), measures) for job in jobs]
            verdicts.record(tx, SPEC, decisions, "v1", GROUP, now=self.now)

    def _decide(self, job: verdicts.Job, code: Reason | None, measures: Any) -> verdicts.Decision:
        worth = 0 if code else price(3, 10, SPEC.price_prompt_token, SPEC.price_completion_token)
        value, limit = (3.5, 0.05) if code else (None, None)
        receipt = Receipt(
            run_id=SPEC.run_id,
            run_spec_digest=SPEC.digest,
            rollout_id=job.rollout_id,
            node_id=job.node_id,
            payload_hash=job.payload_hash,
            verdict="rejected" if code else "accepted",
            code=code,
            value=value,
            limit=limit,
            price=worth,
            evidence_sha256="e" * 64,
            salt="f" * 64,
            created=self.now,
        )
        return verdicts.Decision(
            job=job,
            state=RolloutState.REJECTED if code else RolloutState.ACCEPTED,
            code=code.value if code else None,
            value=value,
            limit=limit,
            tokens=10,
            reward=None if code else float(job.slot % 2),
            price=worth,
            token_identical=None if code else job.slot != 0,
            measures=measures or (BAD if code else GOOD),
            receipt=sign_document("receipt", receipt, RUN_KEY).model_dump_json(),
            evidence=None if code else "d" * 64,
            evidence_position=None if code else 0,
        )

    def train(self, step: int, metrics: Mapping[str, Any], *, version: int | None = None) -> None:
        """Assign and confirm a step of two seconds; `version` is published from it."""
        self.now += 1
        with self.ledger.write() as tx:
            assert training.assign(tx, SPEC, step, now=self.now) is not None
        self.now += 2
        sealed = None if version is None else published(version, step)
        with self.ledger.write() as tx:
            training.confirm(tx, SPEC, step, metrics, sealed, now=self.now)

    def evaluate(self, version: int, passed: int, total: int) -> None:
        """Record a held-out evaluation."""
        with self.ledger.write() as tx:
            training.evaluated(tx, version, passed, total, now=self.now)


def published(version: int, step: int) -> training.Published:
    """A sealed version of 1,000,000 bytes."""
    return training.Published(version, step, f"v{version}-x", "full", f"{version:064x}", "0" * 64, 1_000_000)


def fill(run: Run) -> Run:
    """Two trained steps, a third batch partly ready, four rejected answers of the cheat, refusals, a relay.

    Rollouts by state at the end: 16 trained, 4 ready, 2 submitted, 4 rejected.
    """
    run.join(HONEST, "honest-0")
    run.join(CHEAT, "cheat-0")
    run.publish(0, 0)
    run.evaluate(0, 3, 20)
    caught = run.work(CHEAT, 0, 4)
    run.judge({r: Reason.SAMPLING_MISMATCH if r % 4 else Reason.BAD_TERMINATION for r in caught})
    for step in (1, 2):
        run.work(HONEST, step - 1, 8)
        run.judge()
        metrics = {"reward_mean": 0.25 * step, "seconds": 2.0, "wait_seconds": 6.0}
        run.train(step, metrics, version=step)
        run.evaluate(step, 3 + 4 * step, 20)
    run.work(HONEST, 2, 4)
    run.judge()
    run.work(HONEST, 2, 2)
    beat = {"loaded_versions": (2,), "open_leases": 0, "spooled": 0}
    with run.ledger.write() as tx:
        nodes.heartbeat(tx, HONEST, Heartbeat(state="generating", tokens_per_second=900.0, **beat), now=run.now)
        nodes.register_relay(tx, Key.from_seed(bytes(31) + b"\x04").id, RELAY_URL, now=run.now)
        for _ in range(3):
            nodes.count_refusal(tx, Reason.DUPLICATE)
        nodes.count_refusal(tx, Reason.QUEUE_FULL)
    return run


@cache
def _filled() -> tuple[bytes, float]:
    with TemporaryDirectory() as directory:
        ledger = Ledger(f"sqlite:///{directory}/ledger.db")
        ledger.create()
        run = fill(Run(ledger))
        ledger.close()  # brings the write-ahead log into the file
        return Path(directory, "ledger.db").read_bytes(), run.now


@contextmanager
def opened(directory: Path) -> Iterator[Run]:
    """A filled ledger in `directory`: filled once, copied for each test."""
    data, now = _filled()
    (directory / "ledger.db").write_bytes(data)
    ledger = Ledger(f"sqlite:///{directory}/ledger.db")
    yield Run(ledger, now)
    ledger.close()

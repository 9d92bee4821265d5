"""Small worlds for tests of everything that stands on the ledger: plain functions, no clock, no chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event, select

from coordinator.ledger import leases, nodes, submissions, tables, training, verdicts
from coordinator.ledger.database import Ledger
from coordinator.ledger.leases import Ask, Granted, NewProblem
from coordinator.ledger.states import RolloutState
from coordinator.ledger.submissions import Item, Result
from coordinator.ledger.training import Published
from coordinator.ledger.verdicts import Decision, Job
from protocol.canonical import sha256_hex
from protocol.messages import RegisterNode
from protocol.runspec import EnvironmentSpec, ModelSpec, ProofSpec, RunSpec, SamplingSpec

ACCEPTED, REJECTED = RolloutState.ACCEPTED, RolloutState.REJECTED
Rule = Callable[[Job], tuple[RolloutState, float]]
"""What a verifier says of a job: the outcome and the reward."""


def digest(text: str) -> str:
    """64 hex digits that stand for `text`: an id of a node, a digest of weights."""
    return sha256_hex(text.encode())


def make_spec(**changes: Any) -> RunSpec:
    """S = 1, G = 4, B = 8: room for four groups at version 0. Leases last 100 s, the grace is 10 s."""
    values: dict[str, Any] = {
        "run_id": "test-run",
        "model": ModelSpec(
            architecture="Tiny",
            base_weights_digest=digest("weights 0"),
            tokenizer_digest=digest("tokenizer"),
            dtype="float32",
            head_dtype="float32",
            publish_dtype="float32",
            vocab_size=64,
            hidden_size=32,
            eos_token_ids=(1,),
            adapter="none",
        ),
        "sampling": SamplingSpec(temperature=1.0, max_prompt_tokens=16, max_tokens=32),
        "proof": ProofSpec(),
        "max_staleness": 1,
        "group_size": 4,
        "rollouts_per_version": 8,
        "publish_every": 1,
        "propagation_grace": 10.0,
        "lease_seconds": 100.0,
        "minimum_tokens_per_second": 1.0,
        "price_prompt_token": 1,
        "price_completion_token": 2,
        "calibration_families": ("hf/float32/cpu",),
        "environments": (EnvironmentSpec(name="toy", version="1"),),
    }
    return RunSpec(**values | changes)


def open_ledger(path: Path) -> Ledger:
    """A ledger in the file `path`, created where it is missing. Commits are not forced to disk: tests pull no plug."""
    ledger = Ledger(f"sqlite:///{path}")
    event.listen(ledger.engine, "connect", lambda connection, _: connection.execute("pragma synchronous = off"))
    ledger.create()
    return ledger


def begin(tx: Connection, spec: RunSpec, *names: str, now: float = 0.0) -> None:
    """Admit nodes and enter version 0."""
    admit(tx, *names, now=now)
    publish(tx, spec, 0, now=now)


def admit(tx: Connection, *names: str, now: float = 0.0) -> None:
    """Put nodes on the allowlist and register them."""
    for name in names:
        nodes.allow(tx, digest(name), name)
        nodes.register(tx, digest(name), RegisterNode(software="test", engine="test", device="cpu"), now=now)


def published(version: int, text: str = "weights") -> Published:
    """A checkpoint of `version`; another `text` makes other weights."""
    weights = digest(f"{text} {version}")
    manifest = digest(f"manifest {version}")
    return Published(version, version, f"v{version}-{weights[:8]}", "full", weights, manifest, 1000)


def publish(tx: Connection, spec: RunSpec, version: int, *, now: float = 0.0) -> None:
    """Enter a version."""
    training.enter_version(tx, spec, published(version), now=now)


def problem(number: int) -> NewProblem:
    """The n-th problem: three prompt tokens."""
    return NewProblem(f"toy-{number}", "toy", "1", "[]", number.to_bytes(4, "little") * 3, '{"answer": 1}')


def lease(
    tx: Connection,
    spec: RunSpec,
    name: str,
    slots: int = 4,
    *,
    versions: Sequence[int] = (0,),
    quota: int = 1000,
    now: float = 0.0,
) -> tuple[Granted, ...]:
    """Lease slots for a node. Raises Refusal."""
    return leases.grant(tx, spec, Ask(digest(name), tuple(versions), slots, quota), problem, now=now)


def items(granted: Sequence[Granted], text: str = "answer") -> list[Item]:
    """A completion for every leased slot; another `text` makes other bytes."""
    return [
        Item(lease.lease_id, slot.fencing, slot.index, digest(f"{text} {lease.lease_id} {slot.index}"))
        for lease in granted
        for slot in lease.slots
    ]


def submit(
    tx: Connection, name: str, granted: Sequence[Granted], *, text: str = "answer", now: float = 1.0
) -> list[Result]:
    """Return a completion for every leased slot."""
    return submissions.submit(tx, digest(name), items(granted, text), digest("blob"), now=now)


def varied(job: Job) -> tuple[RolloutState, float]:
    """Accept everything; every second slot has the reward 1."""
    return ACCEPTED, float(job.slot % 2)


def alike(job: Job) -> tuple[RolloutState, float]:
    """Accept everything with the same reward: groups become surplus."""
    return ACCEPTED, 1.0


def decide(job: Job, state: RolloutState = ACCEPTED, reward: float = 0.0, tokens: int = 5) -> Decision:
    """A verdict on a job. Three prompt tokens at 1, the completion's at 2 each."""
    accepted = state is ACCEPTED
    return Decision(
        job=job,
        state=state,
        code=None if accepted else "sampling_mismatch",
        value=None if accepted else 9.0,
        limit=None if accepted else 1.0,
        tokens=tokens,
        reward=reward,
        price=3 + 2 * tokens,
        token_identical=accepted,
        measures={"margin": 0.0},
        receipt="{}",
        evidence=digest("evidence"),
        evidence_position=job.slot,
    )


def verify(
    tx: Connection,
    spec: RunSpec,
    rule: Rule = varied,
    *,
    verifier: str = "verifier",
    limit: int = 1000,
    min_group: int | None = None,
    now: float = 2.0,
) -> list[Job]:
    """Claim and decide once. Returns the jobs."""
    jobs = verdicts.claim(tx, verifier, limit, now=now)
    decisions = [decide(job, *rule(job)) for job in jobs]
    verdicts.record(tx, spec, decisions, verifier, spec.group_size if min_group is None else min_group, now=now)
    return jobs


def work(
    tx: Connection,
    spec: RunSpec,
    name: str,
    slots: int,
    rule: Rule = varied,
    *,
    version: int = 0,
    now: float = 0.0,
) -> None:
    """Lease, submit and verify `slots` slots on `version`."""
    granted = lease(tx, spec, name, slots, versions=(version,), now=now)
    submit(tx, name, granted, now=now)
    while verify(tx, spec, rule, now=now):
        pass


def states(tx: Connection) -> list[str]:
    """States of all rollouts in the order of their ids."""
    return list(tx.execute(select(tables.rollouts.c.state).order_by(tables.rollouts.c.id)).scalars())


def group_states(tx: Connection) -> list[str]:
    """States of all groups in the order of their ids."""
    return list(tx.execute(select(tables.groups.c.state).order_by(tables.groups.c.id)).scalars())


def slot_states(tx: Connection, group: int) -> list[str]:
    """States of a group's slots by number."""
    query = select(tables.slots.c.state).where(tables.slots.c.group_id == group).order_by(tables.slots.c.number)
    return list(tx.execute(query).scalars())

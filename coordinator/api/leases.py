"""POST /v1/leases: work, or the reason why there is none."""

from __future__ import annotations

import json
import time

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from protocol.messages import Lease, LeaseAnswer, LeaseRequest, LeaseSlot
from protocol.reasons import Reason, Refusal
from protocol.seeds import slot_seed

from .. import trust
from ..ledger import leases, nodes
from ..run import Run
from .edge import Edge


def encode_prompt(tokens: list[int]) -> bytes:
    """Token ids as the ledger keeps them: int32, little-endian."""
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def decode_prompt(data: bytes) -> tuple[int, ...]:
    """Inverse of encode_prompt."""
    return tuple(int.from_bytes(data[start : start + 4], "little") for start in range(0, len(data), 4))


def make_problem(run: Run, number: int) -> leases.NewProblem:
    """The n-th problem of the run, its prompt already as token ids: no template is ever applied twice."""
    problem = run.task.problem(number)
    prompt = run.codec.encode(problem.messages)
    if len(prompt) > run.spec.sampling.max_prompt_tokens:
        raise ValueError(f"problem {problem.id} has {len(prompt)} prompt tokens; raise sampling.max_prompt_tokens")
    return leases.NewProblem(
        problem.id,
        problem.environment,
        problem.environment_version,
        json.dumps(problem.messages),
        encode_prompt(prompt),
        json.dumps(problem.gold),
    )


def router(edge: Edge) -> APIRouter:
    """Routes of this room."""
    routes = APIRouter(prefix="/v1")
    run = edge.run

    def grant(node_id: str, ask: LeaseRequest) -> LeaseAnswer:
        now = edge.clock()
        schedule = run.config.schedule
        with run.ledger.write() as tx:
            record = trust.Record(**vars(nodes.history(tx, node_id)))
            quota = trust.quota(record, run.spec.group_size, schedule.open_slots_per_node)
            granted = leases.grant(
                tx,
                run.spec,
                leases.Ask(node_id, ask.versions, ask.slots, quota),
                lambda number: make_problem(run, number),
                now=now,
            )
        return LeaseAnswer(leases=tuple(_lease(run, lease) for lease in granted), now=now)

    @routes.post("/leases")
    async def lease(request: Request) -> Response:
        node_id, ask = await edge.signed_body(request, LeaseRequest)
        started = time.monotonic()
        waited_full = 0.0
        while True:
            event, tried = edge.watch.pending(), time.monotonic()
            try:
                answer = await run_in_threadpool(grant, node_id, ask)
                break
            except Refusal as refusal:
                left = started + ask.wait_seconds - time.monotonic()
                patient = refusal.reason in (Reason.QUEUE_FULL, Reason.NOT_READY, Reason.QUOTA_EXHAUSTED)
                if not patient or left <= 0 or edge.watch.closing:
                    await _backpressure(edge, node_id, waited_full)
                    raise
                await edge.watch.wait(event, min(left, 1.0))
                if refusal.reason is Reason.QUEUE_FULL:
                    waited_full += time.monotonic() - tried
                if await request.is_disconnected():
                    raise  # nobody is there to take a lease: it would run out, and count as dropped
        await _backpressure(edge, node_id, waited_full)
        return edge.answer(request, answer)

    return routes


async def _backpressure(edge: Edge, node_id: str, seconds: float) -> None:
    if seconds <= 0:
        return

    def write() -> None:
        with edge.run.ledger.write() as tx:
            nodes.add_backpressure(tx, node_id, seconds)

    await run_in_threadpool(write)


def _lease(run: Run, granted: leases.Granted) -> Lease:
    spec = run.spec
    return Lease(
        lease_id=granted.lease_id,
        version=granted.version,
        weights_digest=granted.weights_digest,
        run_spec_digest=spec.digest,
        prompt=decode_prompt(granted.prompt),
        slots=tuple(
            LeaseSlot(index=slot.index, fencing=slot.fencing, seed=f"{_seed(run, granted, slot.index):016x}")
            for slot in granted.slots
        ),
        temperature=spec.sampling.temperature,
        max_tokens=spec.sampling.max_tokens,
        deadline=granted.deadline,
    )


def _seed(run: Run, granted: leases.Granted, index: int) -> int:
    return slot_seed(
        run.seed_key, run.spec.run_id, granted.problem_id, granted.group_id, granted.version, index
    )

"""POST /v1/rollouts: finished completions in, a signed acknowledgement for each at once."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection, select
from starlette.concurrency import run_in_threadpool

from protocol.completion import CONTENT_TYPE, MAX_BATCH_BYTES, decode_batch
from protocol.messages import Acknowledgement, RolloutsAnswer
from protocol.reasons import Reason, Refusal

from ..ledger import submissions, tables
from .edge import Edge


def pack_signed_body(request: Request, body: bytes) -> bytes:
    """What is kept as evidence: the body with the headers that sign it (msgpack)."""
    kept = ("content-digest", "signature-input", "signature")
    headers = {name: request.headers[name] for name in kept}
    return msgspec.msgpack.encode(
        {"method": request.method, "url": str(request.url), "headers": headers, "body": body}
    )


def router(edge: Edge) -> APIRouter:
    """Routes of this room."""
    routes = APIRouter(prefix="/v1")
    run = edge.run

    @routes.post("/rollouts")
    async def rollouts(request: Request) -> Response:
        if request.headers.get("content-type") != CONTENT_TYPE:
            raise Refusal(Reason.UNSUPPORTED_MEDIA_TYPE, f"send {CONTENT_TYPE}")
        body = await edge.body(request, MAX_BATCH_BYTES)
        node_id = await edge.signer(request, body)

        def submit() -> RolloutsAnswer:
            completions = decode_batch(body)
            items = [
                submissions.Item(item.lease_id, item.fencing, item.index, item.payload_hash) for item in completions
            ]
            blob = run.store.put(pack_signed_body(request, body))  # durable before anything is acknowledged
            with run.ledger.write() as tx:
                results = submissions.submit(tx, node_id, items, blob, now=edge.clock())
                kept = _is_evidence(tx, results, blob)
            if not kept:  # refused, or acknowledged before; no other request can have this nonce, and so this name
                run.store.path(blob).unlink(missing_ok=True)
            codes = {result.code for result in results}
            if len(codes) == 1 and (code := codes.pop()) is not None:
                raise Refusal(code)
            return RolloutsAnswer(
                items=tuple(
                    Acknowledgement(
                        lease_id=item.lease_id,
                        fencing=item.fencing,
                        index=item.index,
                        payload_hash=item.payload_hash,
                        rollout_id=result.rollout_id,
                        code=result.code,
                    )
                    for item, result in zip(items, results, strict=True)
                )
            )

        return edge.answer(request, await run_in_threadpool(submit))

    return routes


def _is_evidence(tx: Connection, results: list[submissions.Result], blob: str) -> bool:
    """Does an acknowledged rollout name this body?"""
    ids = [result.rollout_id for result in results if result.rollout_id is not None]
    query = select(tables.rollouts.c.id).where(tables.rollouts.c.id.in_(ids), tables.rollouts.c.blob == blob)
    return tx.execute(query.limit(1)).one_or_none() is not None

"""The origin of the weights: the same paths as a relay, answered by the coordinator itself."""

from __future__ import annotations

import re
import time
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.concurrency import run_in_threadpool

from protocol.canonical import sha256_hex
from protocol.identity import is_hex64
from protocol.manifest import HEAD, Head
from protocol.reasons import Reason, Refusal
from protocol.signed import sign_document

from ..ledger import leases, tables
from .edge import Edge

_NAME = re.compile(r"v[0-9]{1,12}-[0-9a-f]{8}")


def router(edge: Edge) -> APIRouter:
    """Routes of this room."""
    routes = APIRouter(prefix="/v1")
    run = edge.run

    def current_head() -> tuple[int, bytes] | None:
        """The signed head; re-signed when a third of its life is over, so that a slow run stops nobody."""
        with run.ledger.read() as tx:
            newest = leases.newest_checkpoint(tx)
            if newest is None:
                return None
            row = tx.execute(
                tables.checkpoints.select().where(tables.checkpoints.c.version == newest[0])
            ).one()
        now, life = edge.clock(), run.config.network.head_life_seconds
        if edge.head is None or edge.head[0] != row.version or now > edge.head[1] + life / 3:
            head = Head(
                run_id=run.spec.run_id,
                version=row.version,
                name=row.name,
                manifest_sha256=row.manifest_sha256,
                issued=int(now),
                expires=int(now + life),
            )
            edge.head = (row.version, now, sign_document(HEAD, head, run.key).model_dump_json().encode())
        return edge.head[0], edge.head[2]

    @routes.get("/head")
    async def head(
        after: Annotated[int | None, Query(ge=-1, lt=2**53)] = None,
        wait: Annotated[float, Query(ge=0, le=20)] = 0.0,
    ) -> Response:
        until = time.monotonic() + wait
        while True:
            event = edge.watch.pending()
            found = await run_in_threadpool(current_head)
            if found is not None and (after is None or found[0] > after):
                return Response(found[1], media_type="application/json")
            left = until - time.monotonic()
            if left <= 0 or edge.watch.closing:
                break
            await edge.watch.wait(event, left)
        if found is None:
            raise Refusal(Reason.UNAVAILABLE, "no version is published yet", retry_after=1)
        return Response(status_code=204)

    @routes.get("/manifests/{name}")
    async def manifest(name: str) -> Response:
        data = await run_in_threadpool(run.shards.manifest, name) if _NAME.fullmatch(name) else None
        if data is None:
            raise Refusal(Reason.NOT_FOUND)
        return Response(data, media_type="application/json", headers={"ETag": f'"{sha256_hex(data)}"'})

    @routes.get("/shards/{digest}")
    async def shard(request: Request, digest: str) -> Response:
        if not is_hex64(digest) or not run.shards.has(digest):
            raise Refusal(Reason.NOT_FOUND)
        return FileResponse(run.shards.path(digest), media_type="application/octet-stream")

    return routes

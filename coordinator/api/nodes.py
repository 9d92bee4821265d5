"""Registration, heartbeats, accounts, receipts; relays."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from urllib.parse import urlsplit

import httpx
from fastapi import APIRouter, Request, Response
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool

from protocol.messages import (
    Directives,
    Heartbeat,
    ReceiptAnswer,
    RegisterNode,
    RegisterRelay,
    RelayChallenge,
    RunInfo,
)
from protocol.reasons import Reason, Refusal
from protocol.signed import Signed, open_document

from .. import config
from ..ledger import leases, nodes, tables
from .edge import Edge


def router(edge: Edge) -> APIRouter:
    """Routes of this room."""
    routes = APIRouter(prefix="/v1")
    run = edge.run

    @routes.get("/run")
    async def run_info(request: Request) -> Response:
        def read() -> RunInfo:
            with run.ledger.read() as tx:
                newest = leases.newest_checkpoint(tx)
                relays = nodes.relay_urls(tx, now=edge.clock())
            return RunInfo(
                run_key=run.key.id,
                run_spec=run.spec,
                run_spec_digest=run.spec.digest,
                newest=None if newest is None else newest[0],
                relays=relays,
                log_head=None,
                now=edge.clock(),
            )

        return edge.answer(request, await run_in_threadpool(read))

    @routes.post("/nodes")
    async def register(request: Request) -> Response:
        node_id, body = await edge.signed_body(request, RegisterNode, registered=False)

        def write() -> None:
            with run.ledger.write() as tx:
                nodes.register(tx, node_id, body, now=edge.clock())

        await run_in_threadpool(write)
        return await account(request, node_id)

    async def account(request: Request, node_id: str) -> Response:
        def read() -> Response:
            with run.ledger.read() as tx:
                return edge.answer(request, nodes.account(tx, node_id))

        return await run_in_threadpool(read)

    @routes.get("/nodes/me")
    async def me(request: Request) -> Response:
        body = await edge.body(request, 0)
        return await account(request, await edge.signer(request, body))

    @routes.post("/heartbeat")
    async def heartbeat(request: Request) -> Response:
        node_id, body = await edge.signed_body(request, Heartbeat)

        def write() -> Directives:
            now = edge.clock()
            with run.ledger.write() as tx:
                nodes.heartbeat(tx, node_id, body, now=now)
                newest = leases.newest_checkpoint(tx)
                relays = nodes.relay_urls(tx, now=now)
            return Directives(
                newest=None if newest is None else newest[0], relays=relays, drain=edge.watch.closing, upgrade=None
            )

        return edge.answer(request, await run_in_threadpool(write))

    @routes.get("/receipts/{rollout_id}")
    async def receipt(request: Request, rollout_id: str) -> Response:
        node_id = await edge.signer(request, await edge.body(request, 0))
        if not (rollout_id.isascii() and rollout_id.isdigit() and len(rollout_id) < 16):
            raise Refusal(Reason.NOT_FOUND)

        def read() -> ReceiptAnswer:
            query = (
                select(tables.verdicts.c.receipt, tables.rollouts.c.node_id)
                .join(tables.rollouts, tables.rollouts.c.id == tables.verdicts.c.rollout_id)
                .where(tables.verdicts.c.rollout_id == int(rollout_id))
                .order_by(tables.verdicts.c.id.desc())
                .limit(1)
            )
            with run.ledger.read() as tx:
                row = tx.execute(query).one_or_none()
            if row is None or row.node_id != node_id or not row.receipt:
                raise Refusal(Reason.NOT_FOUND)  # somebody else's receipt looks like one that is not there
            return ReceiptAnswer(receipt=Signed.model_validate_json(row.receipt))

        return edge.answer(request, await run_in_threadpool(read))

    @routes.post("/relays")
    async def relay(request: Request) -> Response:
        relay_id, body = await edge.signed_body(request, RegisterRelay, registered=False)
        await run_in_threadpool(challenge, relay_id, body.url, run.config.network)

        def write() -> Directives:
            with run.ledger.write() as tx:
                nodes.register_relay(tx, relay_id, body.url, now=edge.clock())
                newest = leases.newest_checkpoint(tx)
            return Directives(newest=None if newest is None else newest[0], relays=(), drain=False, upgrade=None)

        return edge.answer(request, await run_in_threadpool(write))

    return routes


def challenge(relay_id: str, url: str, network: config.NetworkConfig) -> None:
    """Enter a relay only after it has signed a nonce at its URL: resolved once, no redirects, no private address unless
    the run allows it. Raises Refusal(`address_refused`)."""
    parts = urlsplit(url)
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        if parts.username or parts.query or parts.fragment or parts.path.strip("/") or not parts.hostname:
            raise ValueError("a relay is scheme, host and port only")
        address = ipaddress.ip_address(socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)[0][4][0])
    except (ValueError, KeyError, OSError) as error:
        raise Refusal(Reason.ADDRESS_REFUSED, f"{url}: {error}"[:200]) from None
    if not network.allow_private_relays and (not address.is_global or port not in network.relay_ports):
        raise Refusal(Reason.ADDRESS_REFUSED, "not a public address on an allowed port")
    nonce = secrets.token_hex(16)
    host = f"[{address}]" if address.version == 6 else str(address)
    pinned = f"{parts.scheme}://{host}:{port}"  # https keeps the name, since the certificate is for the name
    target = url.rstrip("/") if parts.scheme == "https" else pinned
    try:
        with httpx.stream(
            "GET", f"{target}/v1/relay", params={"nonce": nonce}, timeout=5, follow_redirects=False, trust_env=False
        ) as answer:
            data = b""
            for chunk in answer.iter_bytes():
                data += chunk
                if answer.status_code != 200 or len(data) > 8192:
                    raise Refusal(Reason.ADDRESS_REFUSED, f"the relay answered {answer.status_code}")
    except httpx.HTTPError as error:
        raise Refusal(Reason.ADDRESS_REFUSED, f"the relay does not answer at its URL: {error}"[:200]) from None
    try:
        signed = open_document(data, "relay", RelayChallenge, relay_id)
    except Refusal as refusal:
        raise Refusal(Reason.ADDRESS_REFUSED, refusal.detail) from None
    if (signed.relay_id, signed.url, signed.nonce) != (relay_id, url, nonce):
        raise Refusal(Reason.ADDRESS_REFUSED, "the relay signed something else")

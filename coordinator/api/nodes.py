"""Registration, heartbeats, accounts, receipts; relays."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from urllib.parse import SplitResult, urlsplit

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

CHALLENGE_SECONDS = 10.0
MAX_CHALLENGES = 8  # at a time: who stalls them keeps relays out, and nothing else
MAX_RELAYS = 256  # told to anybody: an answer stays below what a client reads, however many register
_NAMES = ThreadPoolExecutor(4, "names")  # a name server that stalls holds up no other work


def router(edge: Edge) -> APIRouter:
    """Routes of this room."""
    routes = APIRouter(prefix="/v1")
    run = edge.run
    challenges = asyncio.Semaphore(MAX_CHALLENGES)

    @routes.get("/run")
    async def run_info(request: Request) -> Response:
        def read() -> RunInfo:
            with run.ledger.read() as tx:
                newest = leases.newest_checkpoint(tx)
                relays = nodes.relay_urls(tx, now=edge.clock())[:MAX_RELAYS]
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
                relays = nodes.relay_urls(tx, now=now)[:MAX_RELAYS]
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
        if challenges.locked():
            raise Refusal(Reason.NONCE_LIMIT, "too many relays are being tried at this moment", retry_after=5)
        async with challenges:
            await challenge(relay_id, body.url, run.config.network)

        def write() -> Directives:
            with run.ledger.write() as tx:
                nodes.register_relay(tx, relay_id, body.url, now=edge.clock())
                newest = leases.newest_checkpoint(tx)
            return Directives(newest=None if newest is None else newest[0], relays=(), drain=False, upgrade=None)

        return edge.answer(request, await run_in_threadpool(write))

    return routes


async def challenge(relay_id: str, url: str, network: config.NetworkConfig) -> None:
    """Enter a relay only after it has signed a nonce at its URL: resolved once, no redirects, no private address unless
    the run allows it, within CHALLENGE_SECONDS. Raises Refusal(`address_refused`)."""
    nonce = secrets.token_hex(16)
    try:
        async with asyncio.timeout(CHALLENGE_SECONDS):
            parts, address = await _resolve(url, network)
            data = await _ask(parts, address, nonce)
        signed = open_document(data, "relay", RelayChallenge, relay_id)
    except TimeoutError:
        raise Refusal(
            Reason.ADDRESS_REFUSED, f"the relay does not answer within {CHALLENGE_SECONDS:.0f} s"
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Refusal(Reason.ADDRESS_REFUSED, f"the relay does not answer at its URL: {error}"[:200]) from None
    except (ValueError, KeyError, OSError) as error:
        raise Refusal(Reason.ADDRESS_REFUSED, f"{url}: {error}"[:200]) from None
    except Refusal as refusal:
        raise Refusal(Reason.ADDRESS_REFUSED, refusal.detail) from None
    if (signed.relay_id, signed.url, signed.nonce) != (relay_id, url, nonce):
        raise Refusal(Reason.ADDRESS_REFUSED, "the relay signed something else")


async def _resolve(url: str, network: config.NetworkConfig) -> tuple[SplitResult, str]:
    """The parts of a relay's URL and its address with the port, `1.2.3.4:80`. Raises Refusal, ValueError, KeyError,
    OSError."""
    parts = urlsplit(url)
    port = {"http": 80, "https": 443}[parts.scheme] if parts.port is None else parts.port
    if not (parts.hostname and port) or "@" in parts.netloc or parts.query or parts.fragment or parts.path.strip("/"):
        raise ValueError("a relay is scheme, host and port only")
    look_up = partial(socket.getaddrinfo, parts.hostname, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_NAMES, look_up)
    address = ipaddress.ip_address(found[0][4][0])
    if not network.allow_private_relays and (not address.is_global or port not in network.relay_ports):
        raise Refusal(Reason.ADDRESS_REFUSED, "not a public address on an allowed port")
    return parts, f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


async def _ask(parts: SplitResult, address: str, nonce: str) -> bytes:
    """What the relay says at the address that was checked; its name goes into `Host` and the certificate's check.
    Raises Refusal, httpx.HTTPError."""
    data = b""
    async with (
        httpx.AsyncClient(verify=_tls(), timeout=5, follow_redirects=False, trust_env=False) as client,
        client.stream(
            "GET",
            f"{parts.scheme}://{address}/v1/relay",
            params={"nonce": nonce},
            headers={"Host": parts.netloc, "Accept-Encoding": "identity"},
            extensions={"sni_hostname": parts.hostname},
        ) as answer,
    ):
        async for chunk in answer.aiter_raw():
            data += chunk
            if answer.status_code != 200 or len(data) > 8192:
                raise Refusal(Reason.ADDRESS_REFUSED, f"the relay answered {answer.status_code}")
    return data


@cache
def _tls() -> ssl.SSLContext:
    """Read the certificates once: it takes longer than a challenge."""
    return httpx.create_ssl_context(trust_env=False)

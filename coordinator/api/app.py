"""The application: routes, background tasks, and the process around them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

from protocol.reasons import Reason, Refusal

from ..dashboard import routes as dashboard
from ..ledger import clock
from ..run import Run
from . import leases, nodes, rollouts, weights
from .edge import Edge, Watch, http_refusal

log = logging.getLogger("farflung.api")


def create_app(run: Run) -> FastAPI:
    """The coordinator's application over an opened run directory."""
    edge = Edge(run, Watch(run.ledger.change_marker))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await run_in_threadpool(lambda: (run.task, run.codec, leases.make_problem(run, 0)))
        await run_in_threadpool(_tick_once, edge)  # an outage extends deadlines before anybody can be too late
        background = [asyncio.create_task(edge.watch.run()), asyncio.create_task(_tick(edge))]
        for task in background:
            task.add_done_callback(_end_if_dead)
        yield
        edge.watch.close()
        for task in background:
            task.remove_done_callback(_end_if_dead)
            task.cancel()

    app = FastAPI(title="farflung coordinator", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False  # no answer sends anybody elsewhere
    app.state.edge = edge

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> Response:
        return await edge.problem(request, refusal)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        response = await edge.problem(request, http_refusal(error))
        response.headers.update(error.headers or {})  # `Allow` (RFC 9110, 15.5.6)
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return await edge.problem(request, Refusal(Reason.MALFORMED_REQUEST, "a query parameter is out of range"))

    @app.get("/healthz")
    async def healthz() -> Response:
        return PlainTextResponse("ok")

    @app.get("/readyz")
    async def readyz() -> Response:
        def look() -> None:
            with run.ledger.read() as tx:
                tx.exec_driver_sql("select 1")

        await run_in_threadpool(look)
        return PlainTextResponse("ok")

    for room in (nodes, leases, rollouts, weights):
        app.include_router(room.router(edge))
    app.include_router(
        dashboard.router(
            lambda: dashboard.document(run.ledger, run.spec, time.time()), stopping=lambda: edge.watch.closing
        )
    )
    return app


def _tick_once(edge: Edge) -> None:
    run = edge.run
    with run.ledger.write() as tx:
        clock.tick(tx, run.spec, run.config.min_group, now=edge.clock())


async def _tick(edge: Edge) -> None:
    while True:
        await asyncio.sleep(1.0)
        await run_in_threadpool(_tick_once, edge)


def _end_if_dead(task: asyncio.Task[Any]) -> None:
    """A background task never ends by itself: if it does, the process says so and ends, and is started again."""
    if not task.cancelled():
        log.critical("a background task died: %r", task.exception())
        os.kill(os.getpid(), signal.SIGTERM)


def serve(run: Run, host: str, port: int, ready: Any) -> None:
    """Serve until SIGTERM. `ready(url)` is called once the port is open."""
    listener = socket.create_server((host, port), backlog=512)
    # asyncio sets it only where it made the socket itself; without it every answer in two pieces waits for an
    # acknowledgement that the other side delays by 40 ms
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    url = f"http://{host}:{listener.getsockname()[1]}"
    app = create_app(run)
    settings = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=32 << 10,
    )
    server = uvicorn.Server(settings)

    async def main() -> None:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not task.done():
            await asyncio.sleep(0.02)
        if server.started:
            ready(url)
        while not server.should_exit and not task.done():
            await asyncio.sleep(0.05)
        app.state.edge.watch.close()  # waiting requests are answered at once, so that nothing holds the server open
        await task

    asyncio.run(main())

"""`farflung relay` and `farflung fetch`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from protocol.identity import Key
from protocol.messages import RunInfo
from protocol.reasons import Refusal

from . import client, control
from .client import Limits, LocalFailed, source_url
from .control import ControlFailed
from .download import FetchFailed
from .fetch import Fetcher
from .process import end_with_parent, exit_within
from .relay import Relay
from .serve import RelayServer, ServeLimits, ServeState, make_app
from .store import ShardStore, is_version_name, write_atomic
from .trust import Trust, stored_pin

log = logging.getLogger("farflung.shardcast")
SIGN_OF_LIFE_SECONDS = 20.0
EXIT_SECONDS = 0.9
LIMITS = Limits()
ERRORS = (Refusal, FetchFailed, LocalFailed, ControlFailed, ValueError, OSError)


def _urls(text: str) -> list[str]:
    urls = [part for part in text.split(",") if part]
    if not urls:
        raise argparse.ArgumentTypeError("at least one URL")
    for url in urls:
        try:
            source_url(url)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return urls


def _url(text: str) -> str:
    return _urls(text)[0] if "," not in text else _fail("one URL")


def _fail(message: str) -> Any:
    raise argparse.ArgumentTypeError(message)


def _address(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]]+)):([0-9]{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise argparse.ArgumentTypeError("HOST:PORT, IPv6 addresses in brackets")
    return match[1] or match[2], int(match[3])


def _positive(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,15}", text):
        raise argparse.ArgumentTypeError("a positive number")
    return int(text)


def relay_parser() -> argparse.ArgumentParser:
    """The options of `farflung relay`."""
    parser = argparse.ArgumentParser(
        prog="farflung relay", description="Mirror the newest weights of a run and serve them on."
    )
    add = parser.add_argument
    add("--upstream", type=_urls, required=True, metavar="URL[,URL]", help="coordinator or relays to follow")
    add("--listen", type=_address, default=("0.0.0.0", 8000), metavar="HOST:PORT", help="port 0 takes a free one")
    folder = Path.home() / ".farflung" / "relay"
    add("--dir", type=Path, default=folder, metavar="DIR", help=f"shards, key and pin of the relay (default {folder})")
    add("--keep", type=_positive, default=5, metavar="N", help="versions to keep (default 5)")
    add("--run-key", metavar="HEX", help="the run's public key; else #run=<hex> of a URL, else on first use")
    add("--run-id", metavar="TEXT", help="the run's id; else asked of the coordinator, else of the first head")
    add("--coordinator", type=_url, metavar="URL", help="where to register (default: the first upstream)")
    add("--public-url", type=_url, metavar="URL", help="the URL under which others reach this relay")
    add("--no-register", action="store_true", help="serve without telling the coordinator")
    add("--max-connections", type=_positive, default=512, metavar="N")
    add("--max-bytes", type=_positive, default=1 << 40, metavar="N", help="largest checkpoint to mirror")
    add("--ready-file", type=Path, metavar="PATH", help='gets {"url": ...} once the relay listens')
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def relay(argv: Sequence[str]) -> int:
    """`farflung relay`: runs until SIGTERM or SIGINT. Exit code 0; 1 after an error, 2 for wrong options."""
    options = relay_parser().parse_args(argv)
    _logging(options.log_level)
    if not options.no_register and options.public_url is None and options.listen[0] in ("0.0.0.0", "::"):
        log.warning("not registering: a relay that listens on every address needs --public-url for that")
        options.no_register = True
    end_with_parent()
    try:
        asyncio.run(_relay(options))
    except BaseException as error:
        cause = _first(error)
        if not isinstance(cause, ERRORS):
            raise
        print(f"farflung relay: {cause}", file=sys.stderr)
        return 1
    return 0


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


async def _relay(options: argparse.Namespace) -> None:
    """Everything at once, until a signal comes or a task fails."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    work = asyncio.create_task(_serve_and_follow(options))
    ended = asyncio.create_task(stop.wait())
    await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    if not work.done():
        exit_within(EXIT_SECONDS, 0)
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        return
    await work


async def _serve_and_follow(options: argparse.Namespace) -> None:
    folder = control.private_folder(options.dir)
    store = ShardStore(folder)
    store.clean()
    state = ServeState(key=Key.load_or_create(folder / "relay.key"))
    coordinator = source_url(options.coordinator or options.upstream[0])
    sources = [*options.upstream, *([options.coordinator] if options.coordinator else [])]
    pin = stored_pin(folder / "pin.json")
    run_key = control.pinned_key(options.run_key, sources, pin.run_key if pin else None)
    run_id = options.run_id or (pin.run_id if pin else None)
    if run_key is None and not control.first_use_allowed(coordinator):
        raise ControlFailed(f"{coordinator} is neither https nor loopback: pin the run key with --run-key")
    async with AsyncExitStack() as stack:
        server = RelayServer(make_app(store, state, ServeLimits(connections=options.max_connections)))
        stack.push_async_callback(server.stop)
        await server.start(*options.listen)
        state.url = source_url(options.public_url or server.url)
        if options.ready_file is not None:
            write_atomic(options.ready_file, json.dumps({"url": server.url}).encode(), options.ready_file.parent)
        log.info("listening on %s, relay %s", server.url, state.key.id if state.key else "")
        http = await stack.enter_async_context(control.new_client())
        session = await stack.enter_async_context(client.new_session(LIMITS))
        if run_key is None or run_id is None:
            run_key, run_id = await _find_run(http, coordinator, run_key, run_id)
        trust = Trust(folder / "pin.json", run_key, run_id, time.time)
        follower = Relay(
            store,
            state,
            trust,
            control.base_urls(options.upstream),
            session,
            keep=options.keep,
            max_bytes=options.max_bytes,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(follower.run())
            group.create_task(_check_run(http, coordinator, trust))
            if not options.no_register:
                group.create_task(_keep_registered(http, coordinator, state, trust))


async def _find_run(http: Any, coordinator: str, run_key: str | None, run_id: str | None) -> tuple[str, str | None]:
    """Run key and run id, asked of the coordinator where they are not given. An upstream that is itself a relay has no
    answer: then a pinned key is enough, and the first head tells the run. Raises Refusal for a changed key."""
    failures, rng = 0, random.Random()
    while True:
        try:
            info = await control.get_run(http, coordinator, run_key)
            return info.run_key, run_id or info.run_spec.run_id
        except ControlFailed as error:
            if run_key is not None:
                return run_key, None
            log.warning("waiting for the coordinator: %s", error)
            failures += 1
            await asyncio.sleep(LIMITS.backoff(failures, rng))


async def _check_run(http: Any, coordinator: str, trust: Trust) -> None:
    """Ask the coordinator once more which run it serves, for as long as it takes. Raises Refusal (`run_key_changed`,
    `manifest_wrong_run`), which ends the relay."""
    failures, rng = 0, random.Random()
    while True:
        try:
            info = await control.get_run(http, coordinator, trust.pin.run_key)
        except ControlFailed as error:
            if error.status == 404:
                return  # a relay: it has no such call
            failures += 1
            await asyncio.sleep(LIMITS.backoff(failures, rng))
            continue
        trust.same_run(info.run_spec.run_id)
        return


async def _keep_registered(http: Any, coordinator: str, state: ServeState, trust: Trust) -> None:
    """Register, and again every 20 seconds as a sign of life. Ends with a Refusal if the run key has changed."""
    failures, rng = 0, random.Random()
    while True:
        run_id = trust.pin.run_id
        assert state.key is not None and state.url is not None
        try:
            if run_id is None:
                raise ControlFailed("the run is not known yet")
            await control.register(
                http, coordinator, key=state.key, run_key=trust.pin.run_key, run_id=run_id,
                public_url=state.url, now=time.time(),
            )  # fmt: skip
            failures = 0
        except ControlFailed as error:
            failures += 1
            log.warning("not registered: %s", error)
        await asyncio.sleep(SIGN_OF_LIFE_SECONDS if not failures else LIMITS.backoff(failures, rng))


def fetch_parser() -> argparse.ArgumentParser:
    """The options of `farflung fetch`."""
    parser = argparse.ArgumentParser(prog="farflung fetch", description="Fetch and verify a checkpoint of a run.")
    add = parser.add_argument
    add("--coordinator", type=_url, required=True, metavar="URL", help="the run's coordinator, #run=<hex> pins its key")
    add("--relays", type=_urls, metavar="URL[,URL]", help="instead of those that the coordinator names")
    add("--dir", type=Path, required=True, metavar="DIR", help="the checkpoint appears in DIR/<name>/")
    add("--name", metavar="NAME", help="v<version>-<digest8>; else the newest")
    add("--run-key", metavar="HEX", help="the run's public key")
    add("--deadline", type=_positive, default=4 * 3600, metavar="SECONDS")
    add("--json", metavar="FILE", help="write a report, - for standard output")
    add("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    return parser


def fetch(argv: Sequence[str]) -> int:
    """`farflung fetch`: prints the folder (and that of an adapter's base). Exit code 0; 1 after an error, 2 for wrong
    options."""
    parser = fetch_parser()
    options = parser.parse_args(argv)
    if options.name is not None and not is_version_name(options.name):
        parser.error("--name: v<version>-<8 hex digits>")
    _logging(options.log_level)
    end_with_parent()
    report: dict[str, Any] = {}
    try:
        report = asyncio.run(_fetch(options))
    except KeyboardInterrupt:
        return 130
    except ERRORS as error:
        code = error.reason.value if isinstance(error, Refusal) else None
        report = {"error": str(error), "code": code}
        print(f"farflung fetch: {error}", file=sys.stderr)
    if options.json is not None:
        text = json.dumps(report, indent=2) + "\n"
        sys.stdout.write(text) if options.json == "-" else Path(options.json).write_text(text)
    elif "path" in report:
        print(*report["bases"], report["path"], sep="\n")
    return 1 if "error" in report else 0


async def _fetch(options: argparse.Namespace) -> dict[str, Any]:
    options.dir.mkdir(parents=True, exist_ok=True)
    origin = source_url(options.coordinator)
    pin = stored_pin(options.dir / "pin.json")
    run_key = control.pinned_key(options.run_key, [options.coordinator], pin.run_key if pin else None)
    async with control.new_client() as http:
        info: RunInfo = await control.get_run(http, origin, run_key)
    relays = control.base_urls(options.relays or list(info.relays))
    fetcher = Fetcher(
        relays,
        run_key=info.run_key,
        run_id=info.run_spec.run_id,
        cache_dir=options.dir,
        origin=origin,
        deadline=options.deadline,
    )
    begin = time.monotonic()
    async with fetcher:
        name, sha256 = options.name, None
        if name is None:
            head = await fetcher.head()
            if head is None:
                raise FetchFailed("head", {origin: "no version is published yet"})
            name, sha256 = head.name, head.manifest_sha256
        chain = await fetcher.chain(name, sha256)
        paths = [str(await fetcher.fetch(manifest)) for manifest in chain]
    newest = chain[-1]
    return {
        "name": newest.name,
        "version": newest.version,
        "weights_digest": newest.weights_digest,
        "path": paths[-1],
        "bases": paths[:-1],
        "bytes": sum(manifest.size for manifest in chain),
        "seconds": round(time.monotonic() - begin, 3),
        "dropped_relays": sorted(fetcher.dropped),
    }

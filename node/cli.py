"""`farflung worker`: one node, from key to completions."""

from __future__ import annotations

import argparse
import logging
import platform
import random
import signal
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.identity import Key
from protocol.messages import RegisterNode, RunInfo
from protocol.reasons import Refusal
from shardcast.process import end_with_parent

if TYPE_CHECKING:
    from .client import Client

EXIT_REFUSED = 3


def parser() -> argparse.ArgumentParser:
    """Options of `farflung worker`."""
    options = argparse.ArgumentParser(prog="farflung worker", description="Generate for a run and be paid for it.")
    options.add_argument("--coordinator", required=True, help="URL of the coordinator, with #run=<hex> to pin its key")
    options.add_argument("--dir", type=Path, default=Path("farflung-node"), help="key, weights and spool live here")
    options.add_argument("--engine", choices=["hf"], default="hf")
    options.add_argument("--capacity", type=int, default=64, help="slots generated at once")
    options.add_argument("--cheat", choices=_kinds(), help="cheat in this way, to see it caught")
    options.add_argument("--cheat-model", type=Path, help="the other model of --cheat othermodel")
    options.add_argument("--verbose", action="store_true")
    return options


def _kinds() -> tuple[str, ...]:
    return ("fabricate", "stale", "truncate", "othermodel", "temperature", "replay", "extrafield")


def software() -> str:
    """Name and version of this software."""
    try:
        return f"farflung {version('farflung')}"
    except PackageNotFoundError:
        return "farflung (not installed)"


def main(argv: list[str]) -> int:
    """Run a worker until it is told to stop. Exit code 0, or 3 if the coordinator refuses it for good."""
    options = parser()
    arguments = options.parse_args(argv)
    if arguments.capacity < 1:
        options.error("--capacity is at least 1")
    level = logging.INFO if arguments.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    end_with_parent()

    from shardcast.fetch import Fetcher, SyncFetcher

    from .client import Client, Unreachable
    from .spool import Spool
    from .sync import Sync
    from .worker import Stopped, Worker

    folder: Path = arguments.dir
    client = Client(arguments.coordinator, Key.load_or_create(folder / "node.pem"))
    try:
        info = _connect(client, arguments.coordinator, folder / "run.key")
    except Refusal as refusal:
        print(f"farflung worker: {refusal}")
        return EXIT_REFUSED
    assert client.run_key is not None
    spec = info.run_spec
    if (folder / "run.id").exists() and (folder / "run.id").read_text() != spec.run_id:
        print(f"farflung worker: {folder} belongs to another run; give each run its own --dir")
        return EXIT_REFUSED
    (folder / "run.id").write_text(spec.run_id)

    from .engines.hf import HFEngine

    engine = HFEngine(spec.model.dtype, arguments.capacity)
    extra: dict[str, Any] = {}
    if arguments.cheat:
        from . import cheats

        engine = cheats.wrap(arguments.cheat, engine, arguments.cheat_model)
        if arguments.cheat == "extrafield":
            extra["encode"] = cheats.encode_with_extra_field
    fetcher = SyncFetcher(
        Fetcher(
            info.relays,
            run_key=client.run_key,
            run_id=spec.run_id,
            cache_dir=folder / "weights",
            origin=client.url,
        )
    )
    sync = Sync(
        fetcher,
        engine,
        spec,
        folder / "weights",
        lambda version: worker.wake(),
        canaries=not arguments.cheat,  # a cheat would fail them, and hides itself
    )
    about = RegisterNode(
        software=software(), engine=f"{engine.name} ({engine.version_text})", device=f"cpu {platform.machine()}"
    )
    worker = Worker(
        client, engine, sync, Spool(folder / "spool"), spec, about, capacity=arguments.capacity, **extra
    )
    signal.signal(signal.SIGTERM, lambda *_: worker.halt())
    signal.signal(signal.SIGINT, lambda *_: worker.halt())
    try:
        worker.run()
    except Stopped as stopped:
        print(f"farflung worker: {stopped}")
        return EXIT_REFUSED
    except (Refusal, Unreachable) as error:
        print(f"farflung worker: {error}")
        return 1
    finally:
        fetcher.close()
        client.close()
    return 0


def _connect(client: Client, url: str, pin: Path) -> RunInfo:
    """Wait for the coordinator with back-off; a refusal is final."""
    from .client import Unreachable

    delay = 0.2
    while True:
        try:
            return client.connect(url, pin)
        except Unreachable as error:
            logging.getLogger("farflung.node").warning("coordinator: %s", error)
            time.sleep(delay * (0.5 + random.random()))
            delay = min(2 * delay, 10.0)

"""`farflung up`: the whole network on this machine, each part a process of its own, talking HTTP on loopback."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from protocol.identity import Key
from protocol.reasons import Refusal

from . import live, seed
from .cli import EXIT_RUN, EXIT_USAGE, overrides, write_json
from .config import ConfigError, RunConfig, dump, load
from .ledger import credits, leases, nodes, report, tables
from .ledger.database import set_meta
from .run import Run, RunError, create_run, is_unfinished, open_run
from .supervise import Child, ChildFailed, Family

CHEATS = ("fabricate", "stale", "truncate", "othermodel", "temperature", "replay", "extrafield")
READY_SECONDS = 60.0
EVALUATION_SECONDS = 60.0
CHEAT_SECONDS = 45.0
LOOK_SECONDS = 0.5
PLAIN_SECONDS = 5.0
DEFAULT_UNTIL = 0.70
OTHER_MODEL_SEED = 1


def parser() -> argparse.ArgumentParser:
    """Options of `farflung up`."""
    options = argparse.ArgumentParser(
        prog="farflung up",
        description="Coordinator, verifier, trainer, relay and workers on this machine; a small model that learns.",
        epilog="Every field of the configuration can be given as --section.field value; --dry-run shows them.",
    )
    options.add_argument("--dir", type=Path, help="run directory (default: a new one under farflung-runs/)")
    options.add_argument("--until", type=float, metavar="RATE", help="end at this held-out greedy pass rate")
    options.add_argument("--steps", type=int, metavar="N", help="end after N steps of the run")
    options.add_argument("--seed", type=int, help="seed of the run: prompts and initialisation")
    options.add_argument("--workers", type=int, default=2, metavar="N", help="honest workers (default 2)")
    options.add_argument("--cheat", action="append", default=[], choices=CHEATS, help="add a worker that cheats")
    options.add_argument("--resume", action="store_true", help="continue the run in --dir (default: the newest)")
    options.add_argument("--config", type=Path, help="TOML file of the run")
    options.add_argument("--json", metavar="FILE", help="write the summary as JSON (- for standard output)")
    options.add_argument("--plain", action="store_true", help="lines instead of a live table")
    options.add_argument("--dry-run", action="store_true", help="print the resolved configuration and exit")
    return options


@dataclass(frozen=True)
class Goal:
    """When a run ends: at a held-out pass rate, after a number of steps, whichever comes first."""

    until: float | None
    steps: int | None


def main(argv: list[str]) -> int:
    """Run the network until its goal. Exit code 0 at the goal, 130 after Ctrl-C, 1 if a part failed for good."""
    options = parser()
    arguments, rest = options.parse_known_args(argv)
    try:
        _check(arguments)
        pairs = overrides(rest) + ([("seed", str(arguments.seed))] if arguments.seed is not None else [])
        config = load(arguments.config, pairs)
        config = replace(config, network=replace(config.network, allow_private_relays=True))
        if arguments.dry_run:
            print(dump(config), end="")
            return 0
        run = _run(arguments, config, bool(pairs or arguments.config))
    except ConfigError as error:
        print(f"farflung up: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (RunError, Refusal, OSError, ValueError) as error:
        print(f"farflung up: {error}", file=sys.stderr)
        return EXIT_RUN
    until, steps = arguments.until, arguments.steps
    if until is None and steps is None:
        until = DEFAULT_UNTIL
    return Network(run, Goal(until, steps), arguments).main()


def _check(arguments: argparse.Namespace) -> None:
    if arguments.until is not None and not 0 < arguments.until <= 1:
        raise ConfigError("--until is a rate in (0, 1]")
    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigError("--steps is at least 1")
    if arguments.workers < 0 or arguments.workers + len(arguments.cheat) < 1:
        raise ConfigError("at least one worker is needed")


def _run(arguments: argparse.Namespace, config: RunConfig, configured: bool) -> Run:
    root = Path("farflung-runs")
    if arguments.resume:
        if configured:
            raise ConfigError("a run's configuration is fixed when it is made; --resume takes none")
        path = arguments.dir or max(root.glob("*/spec.json"), key=lambda p: p.stat().st_mtime, default=root).parent
        return open_run(path)
    path = arguments.dir or root / time.strftime("%Y%m%d-%H%M%S")
    if path.is_dir() and is_unfinished(path):
        shutil.rmtree(path)  # a run directory that was being made when the process was killed
    return create_run(path, config)


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


class Network:
    """The processes of one run and the loop that watches them."""

    def __init__(self, run: Run, goal: Goal, arguments: argparse.Namespace):
        self.run, self.goal, self.arguments = run, goal, arguments
        self.family = Family()
        self.started = time.monotonic()
        self.reached: float | None = None

    def main(self) -> int:
        """Start, watch, stop, sum up."""
        interrupted = False

        def interrupt(*_: Any) -> None:
            nonlocal interrupted
            if not interrupted:
                interrupted = True
                raise Interrupted

        previous = {name: signal.signal(name, interrupt) for name in (signal.SIGINT, signal.SIGTERM)}
        code = 0
        try:
            self.start()
            self.watch()
        except Interrupted:
            code = 130
        except ChildFailed as error:
            print(f"farflung up: {error}", file=sys.stderr)
            code = 1
        finally:
            interrupted = True  # a second Ctrl-C must not cut the stopping short
            self.family.stop()
            for name, handler in previous.items():
                signal.signal(name, handler)
        summary = self.summary()
        self._print(summary, code)
        write_json(self.arguments.json, summary)
        if not summary["ledger_balanced"]:
            return 1
        return code

    # starting

    def start(self) -> None:
        """Start every process; the trusted ones need no network, the others wait for the coordinator's URL."""
        if "othermodel" in self.arguments.cheat:
            self._build_other_model()
        if not self.run.calibration_path.exists():
            self._calibrate()
        path = self.run.path
        trusted = ["--dir", str(path)]
        api = self._child("coordinator", ["coordinator", *trusted, "--listen", "127.0.0.1:0"], ready=True)
        self._child("verifier", ["verifier", *trusted])
        limit = ["--max-steps", str(self.goal.steps)] if self.goal.steps else []
        self._child("trainer", ["trainer", *trusted, *limit])
        url = api.url(READY_SECONDS)
        api.arguments[-1] = url.removeprefix("http://")  # a restart keeps the address
        self.url = f"{url}#run={self.run.key.id}"
        relay = ["relay", "--upstream", self.url, "--listen", "127.0.0.1:0", "--dir", str(path / "relay")]
        self._child("relay", relay, ready=True)
        for number in range(self.arguments.workers):
            self._worker(f"w{number}", [])
        for number, kind in enumerate(self.arguments.cheat):
            other = ["--cheat-model", str(self._other_model)] if kind == "othermodel" else []
            self._worker(f"c{number}", ["--cheat", kind, *other], kind)

    def _child(self, name: str, arguments: list[str], ready: bool = False) -> Child:
        folder = self.run.path
        file = folder / f"{name}.ready" if ready else None
        extra = ["--ready-file", str(file)] if file else []
        child = Child(name, [arguments[0], *extra, *arguments[1:]], folder / "logs" / f"{name}.log", file)
        return self.family.add(child)

    def _worker(self, name: str, extra: list[str], cheat: str = "") -> None:
        folder = self.run.path / "workers" / name
        key = Key.load_or_create(folder / "node.pem")
        with self.run.ledger.write() as tx:
            nodes.allow(tx, key.id, f"{name} (cheats: {cheat})" if cheat else name)
        self._child(f"worker {name}", ["worker", "--coordinator", self.url, "--dir", str(folder), *extra])

    @property
    def _other_model(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "farflung" / f"other-{seed.DIGEST[:16]}-{OTHER_MODEL_SEED}"

    def _build_other_model(self) -> None:
        """The seed recipe with another seed: built once, and kept. Raises ChildFailed."""
        if (self._other_model / "config.json").exists():
            return
        print("building another model for the cheating worker, once", file=sys.stderr, flush=True)
        target = self._other_model.with_name(f".{self._other_model.name}.{os.getpid()}")
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "coordinator.seed.build", str(target), "--seed", str(OTHER_MODEL_SEED)]
        _finish(command, "the other model could not be built")
        os.rename(target, self._other_model)

    def _calibrate(self) -> None:
        """Measure honest rollouts of a model for which no calibration ships. Raises ChildFailed."""
        print("calibrating the verifier for this model, once per run", file=sys.stderr, flush=True)
        run = self.run
        command = [sys.executable, "-m", "farflung", "calibrate", "--model", str(run.model_dir), "--rollouts", "400"]
        command += ["--config", str(run.path / "run.toml"), "--out", str(run.calibration_path)]
        _finish(command, "the calibration failed")

    # watching

    def watch(self) -> None:
        """Show the run until its goal is reached. Raises Interrupted, ChildFailed."""
        with self._display() as show:
            while True:
                self.family.look_after()
                with self.run.ledger.read() as tx:
                    found = report.overview(tx, self.run.spec, now=time.time())
                show(found)
                if self._reached(found) and self._cheats_shown(found):
                    break
                time.sleep(LOOK_SECONDS)
            if self.goal.until is None or not self._reached_rate(found):
                self._evaluate()

    def _reached_rate(self, found: report.Overview) -> bool:
        rate = found.latest_pass.rate if found.latest_pass else 0.0
        return self.goal.until is not None and rate >= self.goal.until

    def _reached(self, found: report.Overview) -> bool:
        return self._reached_rate(found) or (
            self.goal.steps is not None and found.steps_confirmed >= self.goal.steps
        )

    def _cheats_shown(self, found: report.Overview) -> bool:
        """A cheat is there to be seen: a short run waits a little until each has had a verdict."""
        now = time.monotonic()
        self.reached = self.reached or now
        shown = sum("cheats" in node.label and node.rejected > 0 for node in found.nodes)
        refused = any(count.code == "malformed_request" for count in found.refusals)
        wanted = len(self.arguments.cheat) - ("extrafield" in self.arguments.cheat and refused)
        return shown >= wanted or now > self.reached + CHEAT_SECONDS

    def _evaluate(self) -> None:
        """Have the last version evaluated before the processes end."""
        with self.run.ledger.write() as tx:
            newest = leases.newest_checkpoint(tx)
            assert newest is not None
            set_meta(tx, "evaluate", newest[0])
        deadline = time.monotonic() + EVALUATION_SECONDS
        done = select(tables.evaluations.c.version).where(tables.evaluations.c.version == newest[0])
        while time.monotonic() < deadline:
            self.family.look_after()
            with self.run.ledger.read() as tx:
                if tx.execute(done).one_or_none() is not None:
                    return
            time.sleep(0.1)
        self.family.notes.append("the last version was not evaluated in time")

    @contextlib.contextmanager
    def _display(self) -> Iterator[Any]:
        title = f"farflung: {self.run.path}, dashboard {self.url.split('#')[0]}/"
        if self.arguments.plain or not sys.stdout.isatty():
            print(title, flush=True)
            last = 0.0
            told = 0

            def lines(found: report.Overview) -> None:
                nonlocal last, told
                for note in self.family.notes[told:]:
                    print(note, flush=True)
                told = len(self.family.notes)
                if time.monotonic() - last >= PLAIN_SECONDS:
                    last = time.monotonic()
                    print(live.line(found), flush=True)

            yield lines
            return
        from rich.console import Group
        from rich.live import Live
        from rich.text import Text

        with Live(refresh_per_second=4, transient=False) as screen:

            def table(found: report.Overview) -> None:
                notes = Text("\n".join(self.family.notes[-4:]), style="yellow")
                screen.update(Group(live.render(found, title=title), notes))

            yield table

    # summing up

    def summary(self) -> dict[str, Any]:
        """What came of it, as DESIGN's JSON document."""
        with self.run.ledger.read() as tx:
            found = report.overview(tx, self.run.spec, now=time.time())
            accounts = report.cheater_accounts(tx)
            balance = credits.check_balance(tx)
            labels = {row.id: row.label for row in tx.execute(select(tables.allowlist))}
            staleness = tx.execute(
                select(func.avg(tables.rollouts.c.staleness), func.max(tables.rollouts.c.staleness))
            ).one()
        rejected = {count.code: count.count for count in found.rejections}
        for refusal in found.refusals:
            rejected[refusal.code] = rejected.get(refusal.code, 0) + refusal.count
        return {
            "held_out_before": found.first_pass.rate if found.first_pass else None,
            "held_out_after": found.latest_pass.rate if found.latest_pass else None,
            "accepted": found.accepted,
            "rejected": rejected,
            "versions": found.newest_version,
            "steps": found.steps_confirmed,
            "seconds": round(time.monotonic() - self.started, 1),
            "ledger_balanced": balance.balanced,
            "ledger_problems": list(balance.problems[:5]),
            "staleness_mean": None if staleness[0] is None else round(float(staleness[0]), 3),
            "staleness_max": staleness[1],
            "bytes_published": found.bytes_published,
            "run": str(self.run.path),
            "nodes": {
                labels.get(account.node_id, account.node_id): {
                    "submitted": account.submitted,
                    "accepted": account.accepted,
                    "token_identical": account.token_identical,
                    "rejected": {count.code: count.count for count in account.rejected},
                }
                for account in accounts
            },
        }

    def _print(self, summary: dict[str, Any], code: int) -> None:
        out = sys.stderr if self.arguments.json == "-" else sys.stdout
        rate = [summary[name] for name in ("held_out_before", "held_out_after")]
        before, after = ("-" if value is None else f"{value:.3f}" for value in rate)
        print(f"\nheld-out pass rate {before} -> {after} after {summary['steps']} steps", file=out)
        print(f"accepted {summary['accepted']}, rejected {summary['rejected'] or 'none'}", file=out)
        for name, account in summary["nodes"].items():
            print(f"  {name}: {account}", file=out)
        print(f"ledger {'balances' if summary['ledger_balanced'] else summary['ledger_problems']}", file=out)
        print(f"{summary['seconds']} s; run in {summary['run']}", file=out)
        if code == 130:
            print(f"interrupted; continue with: farflung up --resume --dir {summary['run']}", file=out)


def _finish(command: list[str], failure: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        raise ChildFailed(f"{failure}: {done.stderr.decode(errors='replace')[-500:]}")

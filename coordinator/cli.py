"""`farflung coordinator|verifier|trainer|calibrate`: the trusted processes of a run directory."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol.reasons import Refusal
from shardcast.process import end_with_parent, exit_within

from .config import ConfigError, RunConfig, dump, load

EXIT_USAGE = 2
EXIT_RUN = 4


def overrides(rest: list[str]) -> list[tuple[str, str]]:
    """`--section.field value` pairs of what a command line left over. Raises ConfigError."""
    pairs = []
    items = iter(rest)
    for item in items:
        name, equals, value = item.removeprefix("--").partition("=")
        if not item.startswith("--") or not name:
            raise ConfigError(f"unknown argument: {item}")
        if not equals:
            value = next(items, "")
            if not value:
                raise ConfigError(f"{item} needs a value")
        pairs.append((name, value))
    return pairs


def coordinator(argv: list[str]) -> int:
    """`farflung coordinator`: the API of a run; `--init` makes the run directory first."""
    options = _options("coordinator", "Serve the API of a run directory (made with --init).")
    options.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="port 0 takes a free one")
    options.add_argument("--ready-file", type=Path, help='gets {"url": …} once the port is open')
    options.add_argument("--init", action="store_true", help="make the run directory if there is none")
    options.add_argument("--config", type=Path, help="TOML file for --init")
    options.add_argument("--allow", action="append", default=[], metavar="NODE_ID", help="admit this node")
    options.add_argument("--dry-run", action="store_true", help="print the resolved configuration and exit")
    arguments, rest = options.parse_known_args(argv)

    def work() -> int:
        from .api.app import serve
        from .ledger import nodes
        from .run import create_run, open_run

        if arguments.dry_run or rest or arguments.config:
            config: RunConfig | None = load(arguments.config, overrides(rest))
            if arguments.dry_run:
                print(dump(config or RunConfig()), end="")
                return 0
        else:
            config = None
        fresh = arguments.init and not (arguments.dir / "spec.json").exists()
        if config is not None and not fresh:
            raise ConfigError("a run's configuration is fixed when it is made: --init with a fresh --dir")
        run = create_run(arguments.dir, config or RunConfig()) if fresh else open_run(arguments.dir)
        with run.ledger.write() as tx:
            for node_id in arguments.allow:
                nodes.allow(tx, node_id, "allowed on the command line")
        host, _, port = arguments.listen.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError("--listen is HOST:PORT")
        serve(run, host, int(port), lambda url: announce(arguments.ready_file, url))
        return 0

    return _guarded(work)


def verifier(argv: list[str]) -> int:
    """`farflung verifier`: verify what nodes submit."""
    options = _options("verifier", "Verify submitted rollouts of a run directory.")
    options.add_argument("--name", default="v0", help="this verifier's name, the same after a restart")
    arguments = options.parse_args(argv)

    def work() -> int:
        from .run import RunError, open_run
        from .verifier.calibrate import load_calibration
        from .verifier.service import Verifier

        run = open_run(arguments.dir)
        if not run.calibration_path.exists():
            raise RunError(
                f"{run.path} has no calibration for this model: farflung calibrate --model {run.model_dir} "
                f"--config {run.path}/run.toml --out {run.calibration_path}"
            )
        calibration = load_calibration(run.calibration_path, run.spec)
        Verifier(run, calibration.thresholds, arguments.name).serve(_stopper())
        return 0

    return _guarded(work)


def trainer(argv: list[str]) -> int:
    """`farflung trainer`: train on what was verified, publish versions."""
    options = _options("trainer", "Train the policy of a run directory and publish its versions.")
    options.add_argument("--max-steps", type=int, help="only wait once the run has made so many steps")
    arguments = options.parse_args(argv)

    def work() -> int:
        from .run import open_run
        from .trainer.loop import Trainer

        Trainer(open_run(arguments.dir)).serve(_stopper(), arguments.max_steps)
        return 0

    return _guarded(work)


def calibrate(argv: list[str], make_engine: Callable[[str, int], Any], make_request: Callable[..., Any]) -> int:
    """`farflung calibrate`: measure honest rollouts of a model on this machine and derive the thresholds."""
    options = argparse.ArgumentParser(prog="farflung calibrate", description=calibrate.__doc__)
    options.add_argument("--model", type=Path, help="Hugging Face model directory (default: the seed model)")
    options.add_argument("--out", type=Path, required=True, help="calibration file to write")
    options.add_argument("--rollouts", type=int, default=2000)
    options.add_argument("--config", type=Path, help="TOML file of the run (task, sampling, dtype)")
    options.add_argument("--json", metavar="FILE", help="write a summary as JSON (- for standard output)")
    arguments, rest = options.parse_known_args(argv)

    def work() -> int:
        from shardcast.tensors import tensors_digest

        from . import seed, tasks
        from .tasks.prompts import PromptCodec
        from .verifier.calibrate import calibrate as measure

        config = load(arguments.config, overrides(rest))
        model = arguments.model or (Path(config.model.path) if config.model.path else seed.verify())
        codec = PromptCodec(model)
        # another seed than any run's default, so that a calibration does not read a run's prompts
        task = tasks.load(config.task.name, 7_000_000_007, **config.task.options)
        prompts = [tuple(codec.encode(task.problem(index).messages)) for index in range(arguments.rollouts)]
        found = measure(
            model,
            prompts,
            make_engine,
            make_request,
            model_digest=tensors_digest(sorted(model.glob("*.safetensors"))),
            dtype=config.model.dtype,
            temperature=config.sampling.temperature,
            max_tokens=config.sampling.max_tokens,
        )
        arguments.out.write_text(found.to_json())
        summary = {
            "rollouts": found.counts.rollouts,
            "tokens": found.counts.tokens,
            "false_positives_per_rollout_at_most": found.counts.false_positives_per_rollout,
            "thresholds": vars(found.thresholds),
            "honest_maximum": {name: each.maximum for name, each in found.honest.items()},
        }
        write_json(arguments.json, summary)
        for name, limit in vars(found.thresholds).items():
            print(f"{name:22} {limit:.6g}", file=sys.stderr)
        return 0

    return _guarded(work)


def announce(ready_file: Path | None, url: str) -> None:
    """Say where the server listens."""
    print(f"listening on {url}", flush=True)
    if ready_file is not None:
        temporary = ready_file.with_name(f".{ready_file.name}.new")
        temporary.write_text(json.dumps({"url": url}))
        os.replace(temporary, ready_file)


def write_json(target: str | None, document: Any) -> None:
    """One JSON document to a file, to standard output (`-`), or nowhere (None)."""
    if target is None:
        return
    text = json.dumps(document, indent=1) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)


def _options(name: str, text: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog=f"farflung {name}", description=text)
    options.add_argument("--dir", type=Path, required=True, help="run directory")
    return options


def _stopper() -> Callable[[], bool]:
    stop = threading.Event()

    def ask(*_: Any) -> None:
        stop.set()
        exit_within(3.0, 0)  # a step or a batch that is under way may take longer than anybody waits

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)
    return stop.is_set


def _guarded(work: Callable[[], int]) -> int:
    """Run a process's work; what an operator can mend is a sentence, not a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    end_with_parent()
    from .run import RunError

    try:
        return work()
    except ConfigError as error:
        print(f"farflung: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (RunError, Refusal, FileNotFoundError, ValueError) as error:
        logging.getLogger("farflung").debug("ended", exc_info=True)
        print(f"farflung: {error}", file=sys.stderr)
        return EXIT_RUN

"""farflung: reinforcement learning of language models on hardware that nobody has to trust.

The front door: one command line. A command's code is imported only when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


def _up(argv: list[str]) -> int:
    from coordinator.local import main

    return main(argv)


def _coordinator(argv: list[str]) -> int:
    from coordinator.cli import coordinator

    return coordinator(argv)


def _verifier(argv: list[str]) -> int:
    from coordinator.cli import verifier

    return verifier(argv)


def _trainer(argv: list[str]) -> int:
    from coordinator.cli import trainer

    return trainer(argv)


def _worker(argv: list[str]) -> int:
    from node.cli import main

    return main(argv)


def _relay(argv: list[str]) -> int:
    from shardcast.cli import relay

    return relay(argv)


def _fetch(argv: list[str]) -> int:
    from shardcast.cli import fetch

    return fetch(argv)


def _audit(argv: list[str]) -> int:
    from coordinator.audit import main

    return main(argv)


def _calibrate(argv: list[str]) -> int:
    from coordinator.cli import calibrate
    from node.engines.base import Request
    from node.engines.hf import HFEngine

    return calibrate(argv, HFEngine, Request)


def _bench(argv: list[str]) -> int:
    from bench.cli import main

    return main(argv)


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "up": (_up, "the whole network on this machine, learning"),
    "coordinator": (_coordinator, "the API of a run"),
    "verifier": (_verifier, "verify what nodes submit"),
    "trainer": (_trainer, "train and publish versions"),
    "worker": (_worker, "generate for a run"),
    "relay": (_relay, "pass weights on"),
    "fetch": (_fetch, "fetch a version's weights"),
    "audit": (_audit, "explain verdicts, check the ledger"),
    "calibrate": (_calibrate, "measure honest rollouts, derive thresholds"),
    "bench": (_bench, "measure this machine against the bars"),
}


def usage() -> str:
    """The help text."""
    lines = [f"  {name:12} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: farflung COMMAND [options]",
            "",
            "Reinforcement learning of language models on hardware that nobody has to trust.",
            "",
            *lines,
            "",
            "farflung COMMAND --help tells more.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run a command. Exit code 0: done; 1: a finding; 2: usage; 3: refused by the coordinator; 4: unusable run."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"farflung {version('farflung')}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        print(f"farflung: no command {arguments[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    return command[0](arguments[1:])


if __name__ == "__main__":
    sys.exit(main())

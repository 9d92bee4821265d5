"""`farflung bench NAME`: run a benchmark, print a table, write JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.report import Report

EXIT_MISSED = 1


def main(argv: list[str]) -> int:
    """Exit code 0: every bar holds; 1: one does not, or was not run."""
    options = argparse.ArgumentParser(prog="farflung bench", description="Measure this machine against the bars.")
    options.add_argument("name", choices=["toploc"])
    options.add_argument("--json", metavar="FILE", help="write the document there (- for standard output)")
    options.add_argument("--reference", type=Path, metavar="PYTHON", help="an interpreter with the public package")
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args(argv)

    from bench import toploc

    report = toploc.run(arguments.reference, arguments.seed)
    text = json.dumps(report.document(), indent=1)
    if arguments.json == "-":
        print(text)
    elif arguments.json:
        Path(arguments.json).write_text(text + "\n")
    show(report, Console(stderr=arguments.json == "-"))
    return 0 if all(bar.holds for bar in report.bars) else EXIT_MISSED


def show(report: Report, console: Console) -> None:
    """The bars as a table, and what they rest on."""
    table = Table(title=f"{report.name} on {report.machine['cpu']}, {report.machine['cores']} cores")
    for column in ("bar", "value", "limit", "holds", ""):
        table.add_column(column, justify="right" if column in ("value", "limit") else "left")
    for bar in report.bars:
        value = "not run" if bar.value is None else f"{bar.value:.3g}"
        table.add_row(bar.name, value, f"{bar.limit:.3g}", "yes" if bar.holds else "no", bar.note)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

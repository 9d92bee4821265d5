"""Runs `farflung up` as its users do: a process of its own, with all of its children."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

WAIT_SECONDS = 240.0  # a loaded machine; nothing here is a measurement


class Up:
    """A running `farflung up` on a run directory."""

    def __init__(self, folder: Path, *arguments: str):
        self.folder = folder
        self.run = folder / "run"
        self.summary_file = folder / "summary.json"
        self.output = folder / "output.txt"
        environment = os.environ | {"XDG_CACHE_HOME": str(folder.parent / "cache")}
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "farflung",
                    "up",
                    "--dir",
                    str(self.run),
                    "--json",
                    str(self.summary_file),
                    *arguments,
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
            )

    def finish(self) -> dict[str, Any]:
        """Wait for its end at the goal; returns the summary."""
        code = self.process.wait(WAIT_SECONDS)
        assert code == 0, self.tail()
        return self.summary()

    def summary(self) -> dict[str, Any]:
        """The JSON document that it wrote."""
        document: dict[str, Any] = json.loads(self.summary_file.read_text())
        return document

    def tail(self) -> str:
        """What it printed, and the ends of its children's logs: for a failing test."""
        texts = [self.output.read_text(errors="replace")[-2000:]]
        for log in sorted((self.run / "logs").glob("*.log")):
            texts.append(f"== {log.name}\n{log.read_text(errors='replace')[-800:]}")
        return "\n".join(texts)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Ask the run's ledger."""
        connection = sqlite3.connect(f"file:{self.run / 'ledger.db'}?mode=ro", uri=True, timeout=20)
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()

    def steps(self) -> int:
        """Confirmed steps so far."""
        if not (self.run / "spec.json").exists():
            return 0
        return int(self.query("select count(*) from steps where confirmed_at is not null")[0][0])

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not what():
            assert self.process.poll() is None, self.tail()
            assert time.monotonic() < deadline, self.tail()
            time.sleep(0.1)

    def family(self) -> dict[str, psutil.Process]:
        """Its children by name, such as `trainer` or `worker w0`."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                words = child.cmdline()
            except psutil.Error:
                continue
            if "farflung" in words:
                name = words[words.index("farflung") + 1]
                folder = words[words.index("--dir") + 1]
                found[f"worker {Path(folder).name}" if name == "worker" else name] = child
        return found

    def kill(self) -> None:
        """End it, however it stands."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()


def processes_of(run: Path) -> list[psutil.Process]:
    """Every process of this machine that names the run directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(run) in word for word in process.info["cmdline"] or []) and process.pid != os.getpid():
            found.append(process)
    return found


def gone(run: Path, seconds: float) -> bool:
    """Whether all processes of a run end within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not processes_of(run):
            return True
        time.sleep(0.1)
    return not processes_of(run)

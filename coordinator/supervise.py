"""Child processes of `farflung up`: started with a pipe that ends them when the parent ends, however it ends; started
again when they die; all stopped within seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

MAX_RESTARTS = 5
STOP_SECONDS = 3.5


@dataclass
class Child:
    """One process: `arguments` of the farflung command line; `ready` is a file that it writes once it serves."""

    name: str
    arguments: list[str]
    log: Path
    ready: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    not_before: float = 0.0
    gone: str = ""

    @property
    def alive(self) -> bool:
        """Is it running?"""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it; its standard input is a pipe from us, its output goes to the log."""
        if self.ready is not None:
            self.ready.unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            "FARFLUNG_PARENT_PIPE": "1",
            "OMP_NUM_THREADS": "1",  # several processes share the cores; spinning threads would only take turns
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",
        }
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "farflung", *self.arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is ours to pass on
            )

    def url(self, seconds: float) -> str:
        """The URL from its ready file. Raises ChildFailed if it ends or takes longer than `seconds`."""
        assert self.ready is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.ready.exists():
                return str(json.loads(self.ready.read_text())["url"])
            if not self.alive:
                break
            time.sleep(0.02)
        raise ChildFailed(f"{self.name} did not come up: {self.last_words()}")

    def last_words(self) -> str:
        """The end of its log, for a message."""
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return (lines[-1] if lines else "no output")[:300]


class ChildFailed(Exception):
    """A process that the run needs has failed for good."""


@dataclass
class Family:
    """All children; `notes` collects sentences about deaths and restarts for the display."""

    children: list[Child] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, child: Child) -> Child:
        """Start a child and look after it."""
        child.start()
        self.children.append(child)
        return child

    def look_after(self) -> None:
        """Start again what has died, a moment later each time. Raises ChildFailed when one dies again and again."""
        now = time.monotonic()
        for child in self.children:
            if child.alive or child.gone:
                continue
            assert child.process is not None
            code = child.process.returncode
            if child.not_before == 0.0:
                child.restarts += 1
                if code == 3 and child.name.startswith("worker"):  # the coordinator has refused it for good
                    child.gone = child.last_words()
                    self.notes.append(f"{child.name} left: {child.gone}")
                    continue
                if child.restarts > MAX_RESTARTS:
                    raise ChildFailed(f"{child.name} died {child.restarts} times (exit {code}): {child.last_words()}")
                self.notes.append(f"{child.name} died (exit {code}), starting it again")
                child.not_before = now + 0.2 * child.restarts
            if now >= child.not_before:
                child.not_before = 0.0
                child.start()

    def stop(self, children: list[Child] | None = None) -> None:
        """End children (all by default): SIGTERM, then SIGKILL for what is left after a few seconds."""
        leaving = [child for child in (children or self.children) if child.alive]
        for child in leaving:
            assert child.process is not None
            child.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for child in leaving:
            assert child.process is not None
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self.children = [child for child in self.children if child not in leaving]

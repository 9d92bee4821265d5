"""What every benchmark returns: the machine, the results, and one bar for each limit that was set."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bar:
    """A measured value and the largest one allowed. `value` None: not run, and then it does not hold."""

    name: str
    value: float | None
    limit: float
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether it was run and is within the limit."""
        return self.value is not None and self.value <= self.limit


@dataclass(frozen=True)
class Report:
    """The document of one benchmark."""

    name: str
    results: Mapping[str, Any]
    bars: Sequence[Bar]
    machine: Mapping[str, Any] = field(default_factory=lambda: machine())

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        bars = [{**asdict(bar), "holds": bar.holds} for bar in self.bars]
        return {"benchmark": self.name, "machine": dict(self.machine), "results": dict(self.results), "bars": bars}


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    cpu = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    packages = {}
    for name in ("torch", "numpy", "numba", "transformers"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "missing"
    return {
        "cpu": cpu or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **packages,
    }


def cpu_seconds(work: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds (all threads of this process) of each piece of work, taken in turns so that whatever else the
    machine does meets all of them alike. Each runs once before it counts."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name, call in work.items():
            started = time.process_time()
            call()
            if turn:
                taken[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in taken.items()}

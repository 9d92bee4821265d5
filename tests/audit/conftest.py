"""A filled ledger in a run directory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.ledger.database import Ledger
from tests.dashboard.filled import Run, fill


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def run(directory: Path) -> Iterator[Run]:
    directory.mkdir()
    ledger = Ledger(f"sqlite:///{directory}/ledger.db")
    ledger.create()
    yield fill(Run(ledger))
    ledger.close()

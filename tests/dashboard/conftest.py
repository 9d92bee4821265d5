"""A filled ledger in a directory of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.ledger.database import Ledger
from tests.dashboard.filled import Run, fill


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db")
    ledger.create()
    yield fill(Run(ledger))
    ledger.close()

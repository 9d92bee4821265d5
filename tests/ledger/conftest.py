"""A ledger in a file, and the run spec of `builders`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.ledger.database import Ledger
from protocol.runspec import RunSpec
from tests.ledger import builders


@pytest.fixture
def spec() -> RunSpec:
    """S = 1, G = 4, B = 8."""
    return builders.make_spec()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """An empty SQLite ledger."""
    opened = builders.open_ledger(tmp_path / "ledger.db")
    yield opened
    opened.close()

"""A filled ledger in a run directory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboard.filled import Run, opened


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def run(directory: Path) -> Iterator[Run]:
    directory.mkdir()
    with opened(directory) as run:
        yield run

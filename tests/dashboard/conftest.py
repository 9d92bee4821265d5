"""A filled ledger in a directory of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboard.filled import Run, opened


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with opened(tmp_path) as run:
        yield run

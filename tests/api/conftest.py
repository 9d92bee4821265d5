"""A coordinator for a whole test file, and one that is small enough to be filled."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.world import Node, World, served, small


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Room for everybody; relays may be anywhere."""
    folder = tmp_path_factory.mktemp("coordinator")
    with served(folder / "run", small(rollouts_per_version=4096, private_relays=True)) as world:
        yield world


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[World]:
    """Room for one group; relays must be public."""
    with served(tmp_path / "run", small()) as world:
        yield world


@pytest.fixture
def node(world: World, tmp_path: Path) -> Iterator[Node]:
    """A registered node of its own for each test."""
    node = world.node(tmp_path)
    yield node
    node.client.close()


@pytest.fixture
def other(world: World, tmp_path: Path) -> Iterator[Node]:
    """Another one."""
    node = world.node(tmp_path)
    yield node
    node.client.close()

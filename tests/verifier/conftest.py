"""The seed model, once as the verifier and once as the reference engine has it."""

from pathlib import Path
from typing import Any

import pytest

from coordinator import seed
from coordinator.config import EvaluationConfig
from coordinator.policy import DTYPES, load_base
from coordinator.run import Run
from coordinator.verifier.service import Verifier
from node.engines.hf import HFEngine
from tests.verifier import rig


@pytest.fixture(scope="session")
def model() -> Any:
    """The seed model in float32, for inference."""
    return load_base(seed.model_dir(), DTYPES["float32"])


@pytest.fixture(scope="session")
def engine() -> HFEngine:
    """The reference engine with the seed model as version 0; nobody unloads it."""
    engine = HFEngine("float32", 64)
    engine.load(0, seed.model_dir(), None)
    return engine


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """G = 4, B = 16, S = 4, ten held-out questions."""
    return rig.make_run(tmp_path / "run", evaluation=EvaluationConfig(questions=10))


@pytest.fixture
def verifier(run: Run) -> Verifier:
    """With the shipped thresholds and a clock of its own."""
    return Verifier(run, rig.thresholds(run), clock=rig.ticking())

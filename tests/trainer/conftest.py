"""The run spec of the seed model, and samples to train on."""

import dataclasses
import random
from pathlib import Path

import pytest

from coordinator import seed
from coordinator.config import TrainerConfig
from coordinator.trainer.packing import Sample
from protocol.runspec import RunSpec
from tests.verifier import rig

FULL = TrainerConfig(learning_rate=1e-3, warmup_steps=1)
LORA = dataclasses.replace(FULL, learning_rate=1e-2, lora_rank=4)


@pytest.fixture(scope="session")
def base() -> Path:
    """The seed model's files."""
    return seed.model_dir()


@pytest.fixture(scope="session")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    """That of a run of the seed model."""
    return rig.make_run(tmp_path_factory.mktemp("spec") / "run").spec


@pytest.fixture
def samples() -> list[Sample]:
    """Twelve of all lengths, log-probs near those of chance, advantages of both signs and two zeros."""
    rng = random.Random(4)
    made = []
    for index in range(12):
        prompt = tuple(rng.randrange(3, 320) for _ in range(rng.randint(1, 40)))
        tokens = tuple(rng.randrange(3, 320) for _ in range(1 + index % 10))
        old = tuple(-rng.uniform(1, 7) for _ in tokens)
        engine = tuple(value - 0.01 for value in old)
        made.append(Sample(prompt, tokens, old, engine, (0.5, -0.5, 0.25, 0.0)[index % 4] * (index % 8 != 4)))
    return made

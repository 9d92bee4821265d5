"""Durable checkpoints of the trainer: a folder per step, complete or not there."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .model import Learner

_NAME = re.compile(r"step-(\d{8})")
STATE = "state.json"


def steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints under `root`, ascending."""
    if not root.exists():
        return []
    found = (_NAME.fullmatch(entry.name) for entry in root.iterdir())
    return sorted(int(match[1]) for match in found if match)


def save(root: Path, learner: Learner, metrics: Mapping[str, Any], keep: int) -> None:
    """Write the learner's state of its present step, durably, then drop all but the last `keep`."""
    final = root / f"step-{learner.step:08d}"
    staging = root / ".staging"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    learner.save(staging)
    (staging / STATE).write_text(json.dumps({"step": learner.step, "metrics": dict(metrics)}))
    for file in staging.iterdir():
        sync(file)
    sync(staging)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(staging, final)
    sync(root)
    for step in steps(root)[:-keep]:
        shutil.rmtree(root / f"step-{step:08d}")


def restore(root: Path, learner: Learner) -> dict[str, Any]:
    """Load the newest checkpoint into the learner, if there is one. Returns its metrics."""
    found = steps(root)
    if not found:
        return {}
    folder = root / f"step-{found[-1]:08d}"
    state = json.loads((folder / STATE).read_text())
    learner.load(folder, state["step"])
    return dict(state["metrics"])


def sync(path: Path) -> None:
    """fsync a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

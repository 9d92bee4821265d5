"""The trainer process: whatever the moment at which it dies, the resumed run is the uninterrupted one."""

import hashlib
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import event, select

from coordinator.config import TrainerConfig
from coordinator.ledger import credits, tables, training
from coordinator.policy import load_base, load_weights, merge_adapter
from coordinator.run import Run, RunError, open_run
from coordinator.trainer import checkpoint, loop
from coordinator.trainer.loop import Trainer
from coordinator.trainer.model import Learner
from node.engines.hf import HFEngine
from node.sync import check_canary
from tests.verifier import rig

STEPS = 4


def half(job: Any) -> float:
    return float(job.slot % 2)


def prepare(path: Path, lora: int, every: int) -> Path:
    """A run directory with enough accepted work on version 0 for four steps of 16 rollouts."""
    config = TrainerConfig(lora_rank=lora, learning_rate=1e-2 if lora else 1e-3, warmup_steps=1)
    run = rig.make_run(path, schedule={"rollouts_per_version": 16 * every, "publish_every": every}, trainer=config)
    rig.accept_all(rig.Node(run), 16 * STEPS, half)
    run.ledger.close()
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    made: dict[tuple[int, int], Path] = {}

    def get(lora: int, every: int) -> Path:
        if (lora, every) not in made:
            made[lora, every] = prepare(tmp_path_factory.mktemp("prepared") / "run", lora, every)
        return made[lora, every]

    return get


def reopen(path: Path) -> Run:
    run = open_run(path)
    event.listen(run.ledger.engine, "connect", lambda raw, _: raw.execute("pragma synchronous = off"))
    return run


def confirmed(run: Run) -> int:
    with run.ledger.read() as tx:
        query = select(tables.steps.c.step).where(tables.steps.c.confirmed_at.is_not(None))
        return len(tx.execute(query).all())


def train(path: Path, steps: int = STEPS) -> Run:
    """A trainer process of its own: from what is on disk until `steps` are confirmed."""
    run = reopen(path)
    looks = iter(range(200))
    Trainer(run, rig.ticking()).serve(lambda: confirmed(run) >= steps or next(looks) > 150, steps)
    return run


def outcome(run: Run) -> dict[str, Any]:
    """All that must not depend on crashes: versions, steps, members, and the bytes of the trainer's checkpoint."""
    with run.ledger.read() as tx:
        found: dict[str, Any] = {
            "versions": [
                (row.version, row.step, row.name, row.weights_digest)
                for row in tx.execute(select(tables.checkpoints).order_by(tables.checkpoints.c.version))
            ],
            "steps": [
                (row.step, row.version, row.confirmed_at is not None)
                for row in tx.execute(select(tables.steps).order_by(tables.steps.c.step))
            ],
            "members": [
                (row.id, row.state, row.step, row.staleness)
                for row in tx.execute(select(tables.rollouts).order_by(tables.rollouts.c.id))
            ],
            "balanced": credits.check_balance(tx).problems,
        }
    newest = run.path / "checkpoints" / f"step-{checkpoint.steps(run.path / 'checkpoints')[-1]:08d}"
    for name in ("trainable.safetensors", "optimizer.safetensors"):
        found[name] = hashlib.sha256((newest / name).read_bytes()).hexdigest()
    return found


@pytest.fixture(scope="module")
def uninterrupted(
    prepared: Callable[[int, int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, int], dict[str, Any]]:
    made: dict[tuple[int, int], dict[str, Any]] = {}

    def get(lora: int, every: int) -> dict[str, Any]:
        if (lora, every) not in made:
            path = tmp_path_factory.mktemp("reference") / "run"
            shutil.copytree(prepared(lora, every), path)
            made[lora, every] = outcome(train(path))
        return made[lora, every]

    return get


@pytest.mark.parametrize(("lora", "every"), [(0, 1), (0, 2), (4, 1)])
def test_uninterrupted(uninterrupted: Callable[[int, int], dict[str, Any]], lora: int, every: int) -> None:
    found = uninterrupted(lora, every)
    assert [row[:2] for row in found["versions"]] == [(v, v * every) for v in range(STEPS // every + 1)]
    assert len({row[3] for row in found["versions"]}) == STEPS // every + 1  # each step moved the weights
    assert found["steps"] == [(step, (step - 1) // every, True) for step in range(1, STEPS + 1)]
    assert Counter(row[2] for row in found["members"]) == {step: 16 for step in range(1, STEPS + 1)}
    assert {row[1] for row in found["members"]} == {"trained"} and not found["balanced"]
    assert all(staleness == (step - 1) // every for _, _, step, staleness in found["members"])


class Crash(BaseException):
    """The process is gone: nothing may catch it."""


def dies(original: Any, before: bool, when: int) -> Any:
    """The function, but the `when`-th call ends the process, before or after it has done its work."""
    calls = iter(range(1, 1000))

    def wrapped(*arguments: Any, **named: Any) -> Any:
        now = next(calls) == when
        if now and before:
            raise Crash
        result = original(*arguments, **named)
        if now:
            raise Crash
        return result

    return wrapped


POINTS = {
    "after assignment": (loop.training, "assign", False),
    "before training": (Learner, "train", True),
    "after training": (Learner, "train", False),
    "after the checkpoint": (loop.checkpoint, "save", False),
    "after the export": (Learner, "export", False),
    "after the manifest": (os, "rename", True),
    "after publishing": (Run, "publish_version", False),
    "before confirming": (loop.training, "confirm", True),
    "while confirming": (loop.training, "confirm", False),
    "after confirming": (Trainer, "_publish", False),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("at", [1, 2])
def test_resumed_run_is_the_uninterrupted_one(
    prepared: Callable[[int, int], Path],
    uninterrupted: Callable[[int, int], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    at: int,
) -> None:
    lora, every = (4, 1) if at == 1 else (0, 1)
    shutil.copytree(prepared(lora, every), tmp_path / "run")
    target, name, before = POINTS[point]
    when = at
    if name == "rename":  # twice a step: the checkpoint, then the version's files
        when = 2 * at
    with monkeypatch.context() as patch:
        patch.setattr(target, name, dies(getattr(target, name), before, when))
        with pytest.raises(Crash):
            train(tmp_path / "run")
    assert outcome_of_steps(tmp_path / "run") in (at - 1, at)
    assert outcome(train(tmp_path / "run")) == uninterrupted(lora, every)


def outcome_of_steps(path: Path) -> int:
    return confirmed(reopen(path))


@pytest.mark.parametrize("point", ["after training", "after the checkpoint", "before confirming"])
def test_resuming_between_versions(
    prepared: Callable[[int, int], Path],
    uninterrupted: Callable[[int, int], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
) -> None:
    """With two steps to a version, the death falls on a step that publishes nothing."""
    shutil.copytree(prepared(0, 2), tmp_path / "run")
    target, name, before = POINTS[point]
    with monkeypatch.context() as patch:
        patch.setattr(target, name, dies(getattr(target, name), before, 3))
        with pytest.raises(Crash):
            train(tmp_path / "run")
    assert outcome(train(tmp_path / "run")) == uninterrupted(0, 2)


def test_dying_again_and_again(
    prepared: Callable[[int, int], Path],
    uninterrupted: Callable[[int, int], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(prepared(0, 1), tmp_path / "run")
    for point in ("after training", "after the checkpoint", "after the export", "after publishing", "while confirming"):
        target, name, before = POINTS[point]
        with monkeypatch.context() as patch:
            patch.setattr(target, name, dies(getattr(target, name), before, 1))
            with pytest.raises(Crash):
                train(tmp_path / "run")
    assert outcome(train(tmp_path / "run")) == uninterrupted(0, 1)


def test_a_confirmed_step_without_its_checkpoint_is_no_run(
    prepared: Callable[[int, int], Path], tmp_path: Path
) -> None:
    """Going on from the base weights under a later version's name would undo the training without a word."""
    shutil.copytree(prepared(0, 1), tmp_path / "run")
    train(tmp_path / "run", 2)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(RunError, match="checkpoint"):
        train(tmp_path / "run")


def test_too_little_is_waited_for(tmp_path: Path) -> None:
    run = rig.make_run(tmp_path / "run")
    node = rig.Node(run)
    rig.accept_all(node, 12, half)
    looks = iter(range(100))
    Trainer(run).serve(lambda: next(looks) > 5)
    assert confirmed(run) == 0 and not (run.path / "checkpoints").exists()
    rig.accept_all(node, 4, half)
    assert confirmed(train(run.path, 1)) == 1


def test_groups_without_variance_are_not_waited_for_nor_trained(tmp_path: Path) -> None:
    run = rig.make_run(tmp_path / "run")
    rig.accept_all(rig.Node(run), 32, lambda job: half(job) if job.group_id % 2 else 1.0)
    found = outcome(train(run.path, 1))
    assert Counter(row[1] for row in found["members"]) == {"trained": 16, "surplus": 16}


@pytest.mark.parametrize("lora", [0, 4])
def test_published_files_are_the_trained_weights_and_reproduce_the_canary(
    prepared: Callable[[int, int], Path], tmp_path: Path, lora: int
) -> None:
    shutil.copytree(prepared(lora, 1), tmp_path / "run")
    run = train(tmp_path / "run", 2)
    with run.ledger.read() as tx:
        name = tx.execute(select(tables.checkpoints.c.name).where(tables.checkpoints.c.version == 2)).scalar_one()
    manifest = run.manifest(name)
    assert manifest.version == 2 and manifest.base == (run.base_name if lora else None) and manifest.canary is not None
    engine = HFEngine("float32", 4)
    engine.load(2, run.version_dir(name), run.model_dir if lora else None)
    check_canary(engine, 2, manifest.canary, run.spec)
    with run.ledger.read() as tx:
        prompt = tx.execute(select(tables.problems.c.prompt).where(tables.problems.c.number == 0)).scalar_one()
    assert manifest.canary.prompt == struct.unpack(f"<{len(prompt) // 4}i", prompt)
    base = load_base(run.model_dir, torch.float32)
    live = Trainer(run).learner.policy()
    ids = torch.tensor([manifest.canary.prompt])
    with torch.no_grad():
        before = base(input_ids=ids).logits
        if lora:
            base = merge_adapter(base, run.version_dir(name))
        else:
            load_weights(base, run.version_dir(name))
        torch.testing.assert_close(base(input_ids=ids).logits, live(input_ids=ids).logits, rtol=0, atol=1e-5)
        assert float((base(input_ids=ids).logits - before).abs().max()) > 1e-2
    for file in run.version_dir(name).iterdir():
        assert str(tmp_path).encode() not in file.read_bytes()


def test_old_versions_leave_the_disk_and_their_shards_stay(
    prepared: Callable[[int, int], Path], tmp_path: Path
) -> None:
    shutil.copytree(prepared(0, 1), tmp_path / "run")
    run = train(tmp_path / "run", 4)
    present = {folder.name for folder in (run.path / "versions").iterdir()}
    with run.ledger.read() as tx:
        names = list(tx.execute(select(tables.checkpoints.c.name).order_by(tables.checkpoints.c.version)).scalars())
    assert present == set(names)  # S = 4: all five may still be needed
    trainer = Trainer(run)
    trainer._forget(9)  # as when version 9 is published: 3 = 9 - S - 2 is the oldest to keep
    assert {folder.name for folder in (run.path / "versions").iterdir()} == {names[0], names[3], names[4]}
    assert all(run.shards.manifest(name) is not None for name in names)


def test_a_version_is_never_overwritten_by_other_weights(
    prepared: Callable[[int, int], Path], tmp_path: Path
) -> None:
    shutil.copytree(prepared(0, 1), tmp_path / "run")
    run = train(tmp_path / "run", 1)
    other = training.Published(1, 1, "v1-00000000", "full", "0" * 64, "0" * 64, 1)
    with pytest.raises(ValueError, match="other weights"), run.ledger.write() as tx:
        training.enter_version(tx, run.spec, other, now=rig.NOW)

"""Checkpoints are whole or not there."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.trainer import checkpoint


class Counter:
    """A learner whose whole state is a number."""

    def __init__(self, step: int = 0):
        self.step = step
        self.value = step * 10

    def save(self, folder: Path) -> None:
        (folder / "value").write_text(str(self.value))

    def load(self, folder: Path, step: int) -> None:
        self.step, self.value = step, int((folder / "value").read_text())


def save(root: Path, step: int, keep: int = 2) -> None:
    checkpoint.save(root, Counter(step), {"loss": step / 2}, keep)  # type: ignore[arg-type]


def restored(root: Path) -> tuple[int, int, dict[str, Any]]:
    learner = Counter()
    metrics = checkpoint.restore(root, learner)  # type: ignore[arg-type]
    return learner.step, learner.value, metrics


def test_nothing_there(tmp_path: Path) -> None:
    assert restored(tmp_path / "none") == (0, 0, {}) and checkpoint.steps(tmp_path / "none") == []


def test_newest_is_restored_and_the_last_few_kept(tmp_path: Path) -> None:
    for step in (1, 2, 9, 10, 11):
        save(tmp_path, step)
        assert restored(tmp_path) == (step, 10 * step, {"loss": step / 2})
    assert checkpoint.steps(tmp_path) == [10, 11]
    save(tmp_path, 12, keep=1)
    assert checkpoint.steps(tmp_path) == [12]


def test_order_is_by_number(tmp_path: Path) -> None:
    for step in (99_999_998, 99_999_999, 7):
        save(tmp_path, step, keep=5)
    assert checkpoint.steps(tmp_path) == [7, 99_999_998, 99_999_999]
    assert restored(tmp_path)[0] == 99_999_999


def test_strangers_are_ignored(tmp_path: Path) -> None:
    save(tmp_path, 3)
    for name in (".staging", "step-4", "step-000000005", "step-00000006.old", "notes"):
        (tmp_path / name).mkdir(exist_ok=True)
    assert checkpoint.steps(tmp_path) == [3] and restored(tmp_path)[0] == 3


class Crash(Exception):
    pass


@pytest.mark.parametrize("at", ["learner", "state", "sync", "rename"])
def test_a_crash_while_staging_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    save(tmp_path, 1)

    def crash(*_: Any, **__: Any) -> None:
        raise Crash

    target = {
        "learner": (Counter, "save"),
        "state": (Path, "write_text"),
        "sync": (checkpoint, "sync"),
        "rename": (os, "rename"),
    }[at]
    with monkeypatch.context() as patch:
        patch.setattr(*target, crash)
        with pytest.raises(Crash):
            save(tmp_path, 2)
    assert checkpoint.steps(tmp_path) == [1] and restored(tmp_path) == (1, 10, {"loss": 0.5})
    save(tmp_path, 2)
    assert restored(tmp_path) == (2, 20, {"loss": 1.0})
    assert not (tmp_path / ".staging").exists()


def test_a_crash_while_old_ones_are_dropped_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    real = shutil.rmtree

    def crash(path: Path, *rest: Any, **more: Any) -> None:
        if Path(path).name == "step-00000001":
            raise Crash
        real(path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crash)
        with pytest.raises(Crash):
            save(tmp_path, 2, keep=1)
    assert restored(tmp_path) == (2, 20, {"loss": 1.0})
    save(tmp_path, 3, keep=1)
    assert checkpoint.steps(tmp_path) == [3]


def test_files_and_folders_are_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    rename = os.rename
    monkeypatch.setattr(checkpoint, "sync", lambda path: order.append(path.name))

    def renamed(source: Path, target: Path) -> None:
        order.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "rename", renamed)
    save(tmp_path / "root", 1)
    assert set(order[:2]) == {"value", "state.json"} and order[2:] == [".staging", "rename", "root"]

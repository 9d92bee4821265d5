"""The trainer process. After a crash at any point it asks the ledger again: if its checkpoint already holds the step,
it publishes and confirms without training; else it trains the same batch."""

from __future__ import annotations

import logging
import re
import shutil
import struct
import time
from collections.abc import Callable

import msgspec
from sqlalchemy import func, select

from protocol.manifest import Canary

from ..ledger import tables, training
from ..ledger.training import Batch
from ..policy import make_canary
from ..run import Run, RunError
from . import checkpoint
from .advantages import group_advantages
from .model import Learner
from .packing import Sample

log = logging.getLogger("farflung.trainer")
IDLE_SECONDS = 0.02


class Trainer:
    """Trains the policy of one run."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.time):
        self.run, self.clock = run, clock
        self.root = run.path / "checkpoints"
        self.learner = Learner(run.model_dir, run.spec, run.config.trainer, run.config.seed)
        self.metrics = checkpoint.restore(self.root, self.learner)

    def serve(self, stop: Callable[[], bool], max_steps: int | None = None) -> None:
        """Step after step until `stop()`; after `max_steps` of the run it only waits. Raises RunError if checkpoints
        are gone: to go on from older weights would undo what was published."""
        while not stop():
            step = self._confirmed() + 1
            if self.learner.step < step - 1:
                raise RunError(f"step {step - 1} is confirmed, the newest checkpoint is of step {self.learner.step}")
            if max_steps is not None and step > max_steps:
                time.sleep(0.1)
                continue
            if self.learner.step < step:
                started = time.perf_counter()
                batch = self._wait_for(step, stop)
                if batch is None:
                    return
                waited = time.perf_counter() - started
                self._train(batch, waited)
            self._publish(step)

    def _confirmed(self) -> int:
        with self.run.ledger.read() as tx:
            query = select(func.max(tables.steps.c.step)).where(tables.steps.c.confirmed_at.is_not(None))
            return tx.execute(query).scalar_one() or 0

    def _wait_for(self, step: int, stop: Callable[[], bool]) -> Batch | None:
        marker = None
        while not stop():
            seen = self.run.ledger.change_marker()
            if seen == marker:
                time.sleep(IDLE_SECONDS)
                continue
            marker = seen
            with self.run.ledger.write() as tx:
                batch = training.assign(tx, self.run.spec, step, now=self.clock())
            if batch is not None:
                return batch
        return None

    def _train(self, batch: Batch, waited: float) -> None:
        started, cpu = time.perf_counter(), time.process_time()
        samples = self._samples(batch)
        self.metrics = self.learner.train(samples)
        staleness = [member.staleness for member in batch.rollouts]
        self.metrics |= {
            "reward_mean": sum(member.reward for member in batch.rollouts) / len(batch.rollouts),
            "rollouts": len(batch.rollouts),
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
            "wait_seconds": waited,
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - cpu,
        }
        checkpoint.save(self.root, self.learner, self.metrics, self.run.config.trainer.keep_checkpoints)

    def _samples(self, batch: Batch) -> list[Sample]:
        blobs = {name: self._evidence(name) for name in {member.evidence for member in batch.rollouts}}
        advantages = group_advantages(
            [member.group_id for member in batch.rollouts], [member.reward for member in batch.rollouts]
        )
        samples = []
        for member, advantage in zip(batch.rollouts, advantages, strict=True):
            row = blobs[member.evidence][member.position]
            count = len(row["tokens"]) // 4
            samples.append(
                Sample(
                    struct.unpack(f"<{len(member.prompt) // 4}i", member.prompt),
                    struct.unpack(f"<{count}i", row["tokens"]),
                    struct.unpack(f"<{count}f", row["logp_old"]),
                    struct.unpack(f"<{count}f", row["logp_engine"]),
                    advantage,
                )
            )
        return samples

    def _evidence(self, name: str) -> list[dict[str, bytes]]:
        rows: list[dict[str, bytes]] = msgspec.msgpack.decode(self.run.store.get(name))
        return rows

    def _publish(self, step: int) -> None:
        """Publish a version from the durable checkpoint of `step` if it is due, then confirm the step."""
        every = self.run.spec.publish_every
        published = None
        if step % every == 0:
            started = time.perf_counter()
            version = step // every
            staging = self.run.path / "versions" / ".staging"
            shutil.rmtree(staging, ignore_errors=True)
            self.learner.export(staging)
            published = self.run.publish_version(staging, version, step, self._canary(version))
            self.metrics["publish_seconds"] = time.perf_counter() - started
            self._forget(version)
        with self.run.ledger.write() as tx:
            training.confirm(tx, self.run.spec, step, self.metrics, published, now=self.clock())

    def _canary(self, version: int) -> Canary:
        """A seeded sample after the run's first prompt: every engine must reproduce it before it uses the version."""
        with self.run.ledger.read() as tx:
            prompt = tx.execute(select(tables.problems.c.prompt).where(tables.problems.c.number == 0)).scalar_one()
        tokens = struct.unpack(f"<{len(prompt) // 4}i", prompt)
        return make_canary(self.learner.policy(), self.run.spec, tokens, seed=version)

    def _forget(self, version: int) -> None:
        """Drop the unpacked files of versions that nobody will verify any more; their shards stay."""
        oldest = version - self.run.spec.max_staleness - 2
        for folder in (self.run.path / "versions").iterdir():
            match = re.fullmatch(r"v(\d+)-[0-9a-f]{8}", folder.name)
            if match and 0 < int(match[1]) < oldest:
                shutil.rmtree(folder, ignore_errors=True)

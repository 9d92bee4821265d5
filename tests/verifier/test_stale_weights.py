"""Weights one and four optimizer steps old, under the label of the new version."""

from pathlib import Path

import pytest

from coordinator.config import TrainerConfig
from coordinator.ledger import training
from coordinator.run import Run
from coordinator.trainer.advantages import group_advantages
from coordinator.trainer.model import Learner
from coordinator.trainer.packing import Sample
from coordinator.verifier.prefill import Claim, prefill
from coordinator.verifier.service import Verifier
from node.engines.hf import HFEngine
from tests.verifier import rig


def batches(run: Run, node: rig.Node, verifier: Verifier, count: int) -> list[list[Sample]]:
    """What the trainer would see: honest rollouts with their rewards, 16 to a step."""
    found = []
    for _ in range(count):
        granted = node.lease(16)
        answers = node.answers(granted)
        requests = node.requests(granted)
        claims = [Claim(r.prompt, a.tokens, r.seed) for r, a in zip(requests, answers, strict=True)]
        results = prefill(verifier.versions.base, claims, 1.0, (2,), 4096)
        # a reward that always varies, so that every step moves the weights
        rewards = [float(len(answer.tokens)) / 10 for answer in answers]
        advantages = group_advantages([index // 4 for index in range(16)], rewards)
        found.append(
            [
                Sample(r.prompt, a.tokens, tuple(p.logprobs.tolist()), a.logprobs, advantage)
                for r, a, p, advantage in zip(requests, answers, results, advantages, strict=True)
            ]
        )
    return found


@pytest.mark.parametrize("lora_rank", [0, 8])
def test_old_weights_are_rejected_and_the_right_ones_accepted(tmp_path: Path, lora_rank: int) -> None:
    rate = 2e-4 if lora_rank == 0 else 2e-3
    run = rig.make_run(tmp_path / "run", trainer=TrainerConfig(lora_rank=lora_rank, learning_rate=rate))
    verifier = Verifier(run, rig.thresholds(run), clock=rig.ticking())
    engine = rig.honest_engine(run)
    node = rig.Node(run, engine)
    learner = Learner(run.model_dir, run.spec, run.config.trainer, 0)
    base = run.model_dir if lora_rank else None
    folders = {0: run.model_dir}
    for version, batch in enumerate(batches(run, node, verifier, 4), 1):
        learner.train(batch)
        staging = tmp_path / f"staging{version}"
        learner.export(staging)
        published = run.publish_version(staging, version, version)
        with run.ledger.write() as tx:
            training.enter_version(tx, run.spec, published, now=rig.NOW + version)
        folders[version] = run.version_dir(published.name)
    for behind in (0, 1, 4):
        mine = HFEngine("float32", 64)
        if behind == 4:
            mine.load(4, run.model_dir, None)
        else:
            mine.load(4, folders[4 - behind], base)
        before = len(rig.rows(run))
        worker = rig.Node(run, mine, f"node {behind}")
        granted = worker.lease(32, 4)
        assert {lease.version for lease in granted} == {4}
        worker.submit(worker.completions(granted))
        while verifier.verify_some():
            pass
        found = rig.rows(run)[before:]
        if behind == 0:
            assert {row["state"] for row in found} <= {"ready", "surplus"}
        else:
            assert {row["state"] for row in found} == {"rejected"}
            reasons = {row["code"] for row in found}
            assert reasons <= {"sampling_mismatch", "activation_mismatch", "logprob_mismatch"}

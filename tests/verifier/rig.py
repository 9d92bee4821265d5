"""A real run directory, a real ledger, and nodes without a network: for tests of verifier and trainer."""

from __future__ import annotations

import itertools
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import msgspec
import torch
from sqlalchemy import event, select

import coordinator.run as run_module
from coordinator.api.leases import decode_prompt, make_problem
from coordinator.api.rollouts import pack_signed_body
from coordinator.config import RunConfig, ScheduleConfig
from coordinator.ledger import credits, leases, nodes, submissions, tables, verdicts
from coordinator.ledger.leases import Granted
from coordinator.ledger.states import RolloutState
from coordinator.ledger.submissions import Item, Result
from coordinator.run import Run, create_run
from coordinator.verifier.calibrate import load_calibration
from coordinator.verifier.service import Verifier
from node.engines.base import Generated, Request
from node.engines.hf import HFEngine
from protocol import signatures
from protocol.completion import Completion, encode_batch
from protocol.identity import Key
from protocol.messages import RegisterNode
from protocol.runspec import RunSpec
from protocol.seeds import slot_seed
from toploc import Thresholds, commit_many

torch.set_num_threads(1)
NOW = 1_700_000_000.0
Rule = Callable[[verdicts.Job], float]


def make_run(path: Path, *, schedule: dict[str, Any] | None = None, **sections: Any) -> Run:
    """A run of the seed model: G = 4, B = 16, S = 4, fixed run id and seed key, commits not forced to disk."""
    small = {"group_size": 4, "rollouts_per_version": 16, "open_slots_per_node": 512}
    config = RunConfig(schedule=ScheduleConfig(**small | (schedule or {})), **sections)
    fixed = SimpleNamespace(token_hex=lambda count: "5e" * count, token_bytes=lambda count: b"k" * count)
    with mock.patch.object(run_module, "secrets", fixed):  # the same slots and seeds every time
        return relax(create_run(path, config))


def relax(run: Run) -> Run:
    """Commits of this opened run are not forced to disk."""
    event.listen(run.ledger.engine, "connect", lambda raw, _: raw.execute("pragma synchronous = off"))
    run.ledger.engine.dispose()
    return run


def thresholds(run: Run) -> Thresholds:
    """Those of the shipped calibration."""
    return load_calibration(run.calibration_path, run.spec).thresholds


class Node:
    """A registered node with an engine that holds version 0."""

    def __init__(self, run: Run, engine: Any = None, name: str = "node"):
        self.run, self.engine = run, engine
        self.key = Key.from_seed(name.encode().ljust(32, b"."))
        with run.ledger.write() as tx:
            nodes.allow(tx, self.key.id, name)
            nodes.register(tx, self.key.id, RegisterNode(software="t", engine="t", device="cpu"), now=NOW)

    def lease(self, slots: int, version: int = 0, now: float = NOW) -> tuple[Granted, ...]:
        """Lease slots of one version. Raises Refusal."""
        ask = leases.Ask(self.key.id, (version,), slots, 1000)
        with self.run.ledger.write() as tx:
            return leases.grant(tx, self.run.spec, ask, lambda number: make_problem(self.run, number), now=now)

    def requests(self, granted: Sequence[Granted]) -> list[Request]:
        """What the engine is asked, in the order of leases and slots."""
        run, sampling = self.run, self.run.spec.sampling
        return [
            Request(
                lease.version,
                decode_prompt(lease.prompt),
                slot_seed(
                    run.seed_key, run.spec.run_id, lease.problem_id, lease.group_id, lease.version, slot.index
                ),
                sampling.temperature,
                sampling.max_tokens,
                run.spec.model.eos_token_ids,
            )
            for lease in granted
            for slot in lease.slots
        ]

    def answers(self, granted: Sequence[Granted]) -> list[Generated]:
        """The engine's answers in the order of the requests."""
        requests = self.requests(granted)
        found = dict(self.engine.generate(requests))
        return [found[index] for index in range(len(requests))]

    def completions(self, granted: Sequence[Granted], answers: Sequence[Generated] | None = None) -> list[Completion]:
        """Answers (by default the engine's own) as they go over the wire."""
        answers = self.answers(granted) if answers is None else answers
        proof = self.run.spec.proof
        proofs = commit_many([answer.hidden for answer in answers], chunk_rows=proof.chunk_rows, top_k=proof.top_k)
        slots = [(lease, slot) for lease in granted for slot in lease.slots]
        return [
            Completion(
                lease_id=lease.lease_id,
                fencing=slot.fencing,
                index=slot.index,
                run_spec_digest=self.run.spec.digest,
                version=lease.version,
                weights_digest=lease.weights_digest,
                tokens=struct.pack(f"<{len(answer.tokens)}i", *answer.tokens),
                logprobs=struct.pack(f"<{len(answer.logprobs)}f", *answer.logprobs),
                commitment=data,
                finish_reason=answer.finish_reason,
                engine="hf",
                engine_version="t",
                generate_seconds=0.1,
            )
            for (lease, slot), answer, data in zip(slots, answers, proofs, strict=True)
        ]

    def submit(self, completions: Iterable[Completion], now: float = NOW + 1) -> list[Result]:
        """Sign, store and submit one batch as the API does."""
        items = list(completions)
        body = encode_batch(items)
        request = httpx.Request("POST", "http://127.0.0.1:1/v1/rollouts", content=body)
        signatures.sign_request(request, body, self.key, self.run.spec.run_id, now=now, nonce="0" * 32)
        blob = self.run.store.put(pack_signed_body(request, body))  # type: ignore[arg-type]
        named = [Item(item.lease_id, item.fencing, item.index, item.payload_hash) for item in items]
        with self.run.ledger.write() as tx:
            return submissions.submit(tx, self.key.id, named, blob, now=now)

    def work(self, slots: int, version: int = 0) -> list[int]:
        """Lease, generate, submit; ids of the rollouts."""
        results = self.submit(self.completions(self.lease(slots, version)))
        return [result.rollout_id for result in results if result.rollout_id is not None]


def honest_engine(run: Run, batch: int = 64) -> HFEngine:
    """The reference engine with version 0."""
    engine = HFEngine(run.spec.model.dtype, batch)
    engine.load(0, run.model_dir, None)
    return engine


def accept_all(node: Node, slots: int, rule: Rule, version: int = 0) -> None:
    """Synthetic accepted rollouts: random short answers, log-probs near -1, rewards by `rule`; no model involved."""
    run, spec = node.run, node.run.spec
    granted = node.lease(slots, version)
    named = [
        Item(lease.lease_id, slot.fencing, slot.index, f"{lease.group_id:032x}{slot.index:032x}")
        for lease in granted
        for slot in lease.slots
    ]
    with run.ledger.write() as tx:
        submissions.submit(tx, node.key.id, named, run.store.put(b"synthetic"), now=NOW + 1)
        jobs = verdicts.claim(tx, "synthetic", slots, now=NOW + 2)
        rows = [_evidence(spec, job) for job in jobs]
        evidence = run.store.put(msgspec.msgpack.encode(rows))
        decisions = [
            verdicts.Decision(
                job=job,
                state=RolloutState.ACCEPTED,
                code=None,
                value=None,
                limit=None,
                tokens=len(row["tokens"]) // 4,
                reward=rule(job),
                price=10,
                token_identical=True,
                measures={},
                receipt="{}",
                evidence=evidence,
                evidence_position=position,
            )
            for position, (job, row) in enumerate(zip(jobs, rows, strict=True))
        ]
        verdicts.record(tx, spec, decisions, "synthetic", spec.group_size, now=NOW + 2)


def _evidence(spec: RunSpec, job: verdicts.Job) -> dict[str, bytes]:
    generator = torch.Generator().manual_seed(1000 * job.group_id + job.slot)
    count = 1 + int(torch.randint(spec.sampling.max_tokens, (1,), generator=generator))
    tokens = torch.randint(3, spec.model.vocab_size, (count,), generator=generator).tolist()
    old = (-1 - torch.rand(count, generator=generator)).tolist()
    return {
        "tokens": struct.pack(f"<{count}i", *tokens),
        "logp_old": struct.pack(f"<{count}f", *old),
        "logp_engine": struct.pack(f"<{count}f", *(value - 0.01 for value in old)),
    }


def rows(run: Run, *, columns: Sequence[str] = ("id", "state", "code", "reward", "price")) -> list[dict[str, Any]]:
    """Rollouts in the order of their ids."""
    with run.ledger.read() as tx:
        wanted = [tables.rollouts.c[name] for name in columns]
        return [dict(row._mapping) for row in tx.execute(select(*wanted).order_by(tables.rollouts.c.id))]


def measures(run: Run, rollout: int) -> dict[str, Any]:
    """The report of the last verdict on a rollout."""
    with run.ledger.read() as tx:
        query = select(tables.verdicts.c.measures).where(tables.verdicts.c.rollout_id == rollout)
        return dict(json.loads(list(tx.execute(query.order_by(tables.verdicts.c.id)).scalars())[-1]))


def receipts(run: Run) -> list[tuple[int, str]]:
    """(rollout id, receipt) of every verdict."""
    with run.ledger.read() as tx:
        query = select(tables.verdicts.c.rollout_id, tables.verdicts.c.receipt).order_by(tables.verdicts.c.id)
        return [(row.rollout_id, row.receipt) for row in tx.execute(query)]


def perturbed(run: Run, folder: Path, scale: float) -> Path:
    """The files of another model of the same architecture: every weight off by noise of `scale`."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(7)
    for file in run.model_dir.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        moved = {
            name: (value.float() + scale * torch.randn(value.shape, generator=generator)).to(value.dtype)
            for name, value in tensors.items()
        }
        save_file(moved, folder / file.name, metadata={"format": "pt"})
    return folder


def ticking(start: float = NOW + 10) -> Callable[[], float]:
    """A clock that moves by a millisecond at each look."""
    counter = itertools.count()
    return lambda: start + next(counter) / 1000


def replace(completion: Completion, **changes: Any) -> Completion:
    """A completion with other fields."""
    return msgspec.structs.replace(completion, **changes)


def drain(verifier: Verifier) -> int:
    """Verify until nothing waits; how many batches that took (a dozen at most)."""
    for batches in range(12):
        if verifier.verify_some() == 0:
            return batches
    raise AssertionError("the verifier never ends")


def states(run: Run) -> Counter[str]:
    """How many rollouts are in each state."""
    return Counter(row["state"] for row in rows(run))


def balanced(run: Run) -> credits.Balance:
    """The checked accounts."""
    with run.ledger.read() as tx:
        found = credits.check_balance(tx)
    assert found.balanced, found.problems
    return found

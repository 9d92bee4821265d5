"""`farflung bench toploc`: what a proof costs, what checking it costs, and what it catches."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import plain_newton
from bench.report import Bar, Report, cpu_seconds
from toploc import commit, decode, distances
from toploc.field import P
from toploc.proof import CHUNK_ROWS, TOP_K, encode_selection
from toploc.selection import select

ROWS = 2048
SIZES = (1536, 4096)
REPEATS = 9
TOPK_LIMIT, NEWTON_LIMIT, DISTANCE_LIMIT = 0.7, 1 / 8, 1.0


def run(reference: Path | None, seed: int = 0) -> Report:
    """All parts. reference: a Python interpreter that can import the public `toploc` package, or None."""
    started = time.perf_counter()
    costs = {size: measure_costs(size, seed) for size in SIZES}
    results: dict[str, Any] = {"costs": costs, "reference": measure_reference(reference)}
    largest = costs[SIZES[-1]]
    bars = [
        Bar("commit", largest["commit_over_topk"], TOPK_LIMIT, "CPU time over torch's top-k, 2048 x 4096 bf16"),
        Bar("interpolation", largest["encode_over_newton"], NEWTON_LIMIT, "over a plain Newton interpolation"),
        Bar("distances", largest["distances_over_topk"], DISTANCE_LIMIT, "over the same top-k"),
    ]
    results["seconds"] = time.perf_counter() - started
    return Report("toploc", results, bars)


def measure_costs(hidden_size: int, seed: int) -> dict[str, float]:
    """CPU milliseconds of each step on Gaussian states bf16 [2048, hidden_size], one thread, and their ratios."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _costs(hidden_size, seed)
    finally:
        torch.set_num_threads(threads)


def _costs(hidden_size: int, seed: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, hidden_size, generator=generator).to(torch.bfloat16)
    chunks = hidden.split(CHUNK_ROWS)
    proof = commit(hidden)
    parsed = decode(proof, rows=ROWS)
    selection = select([hidden], CHUNK_ROWS, TOP_K)
    moduli = np.array([[chunk.modulus] for chunk in parsed])
    x, y = (selection.indices % moduli).astype(np.uint64), selection.bits.astype(np.uint64)
    polynomials = [plain_newton.interpolate(x[i], y[i]).tolist() for i in range(len(x))]
    assert all(tuple(p) == chunk.coefficients for p, chunk in zip(polynomials, parsed, strict=True)), "one polynomial"
    assert int(y.max()) < P
    work: dict[str, Callable[[], object]] = {
        "stream": lambda: hidden.abs().amax(),
        "topk": lambda: [chunk.abs().flatten().topk(TOP_K) for chunk in chunks],
        "commit": lambda: commit(hidden),
        "select": lambda: select([hidden], CHUNK_ROWS, TOP_K),
        "encode": lambda: encode_selection(selection, TOP_K),
        "newton": lambda: [plain_newton.interpolate(x[i], y[i]) for i in range(len(x))],
        "distances": lambda: distances(proof, hidden),
        "decode": lambda: decode(proof, rows=ROWS),
    }
    taken = cpu_seconds(work, REPEATS)
    figures = {f"{name}_ms": 1e3 * seconds for name, seconds in taken.items()}
    return figures | {
        "commit_us_per_token": 1e6 * taken["commit"] / ROWS,
        "distances_us_per_token": 1e6 * taken["distances"] / ROWS,
        "commit_over_stream": taken["commit"] / taken["stream"],
        "commit_over_topk": taken["commit"] / taken["topk"],
        "encode_over_newton": taken["encode"] / taken["newton"],
        "distances_over_topk": taken["distances"] / taken["topk"],
    }


REFERENCE = """
import json, sys, time, torch
from toploc import build_proofs_bytes, verify_proofs_bytes
torch.set_num_threads(1)
rows, size, repeats = map(int, sys.argv[1:])
hidden = torch.randn(rows, size, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
def shortest(call):
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        taken.append(time.process_time() - started)
    return sorted(taken)[len(taken) // 2]
build = lambda: build_proofs_bytes(hidden, decode_batching_size=32, topk=128, skip_prefill=True)
proofs = build()
verify = lambda: verify_proofs_bytes(hidden, proofs, decode_batching_size=32, topk=128, skip_prefill=True)
topk = lambda: [chunk.abs().flatten().topk(128) for chunk in hidden.split(32)]
print(json.dumps({"topk_ms": 1e3 * shortest(topk), "commit_ms": 1e3 * shortest(build),
                  "distances_ms": 1e3 * shortest(verify), "torch": torch.__version__}))
"""


def measure_reference(interpreter: Path | None) -> dict[str, Any]:
    """The public package's own figures, by a process of its own: its import name is ours."""
    if interpreter is None:
        return {"ran": False, "why": "no interpreter with the reference package was named (--reference)"}
    figures: dict[str, Any] = {"ran": True}
    for size in SIZES:
        command = [str(interpreter), "-I", "-c", REFERENCE, str(ROWS), str(size), str(REPEATS)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"ran": False, "why": str(error)[:300]}
        if done.returncode:
            return {"ran": False, "why": done.stderr.strip()[-300:] or f"exit {done.returncode}"}
        found = json.loads(done.stdout)
        found["commit_over_topk"] = found["commit_ms"] / found["topk_ms"]
        found["distances_over_topk"] = found["distances_ms"] / found["topk_ms"]
        figures[str(size)] = found
    return figures

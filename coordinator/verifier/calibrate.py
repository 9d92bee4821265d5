"""Calibration: honest generation by an engine of this machine, measured as the verifier measures; thresholds follow.

The engine comes from the caller (the trusted side never imports a node's code): anything with `load` and `generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from protocol.runspec import RunSpec
from toploc import (
    Calibration,
    Headroom,
    Measures,
    Sample,
    Setting,
    cheap_forgeries,
    commit_many,
    decode,
    derive,
    distances_many,
)

from ..policy import DTYPES, load_base
from ..run import mismatches
from ..tasks.prompts import eos_token_ids
from .prefill import Claim, Prefilled, prefill

HEADROOM = Headroom(sampling=5.0)
"""Over 19,000 rollouts of a run whose policy sharpened meanwhile, no honest figure exceeded its maximum at calibration;
a tighter factor leaves less room for choices at near-ties."""

BATCHES = (1, 3, 8, 24, 64)
TOKEN_BUDGETS = (512, 4096, 16384)


def calibrate(
    model_dir: Path,
    prompts: Sequence[tuple[int, ...]],
    make_engine: Callable[[str, int], Any],
    make_request: Callable[..., Any],
    *,
    model_digest: str,
    dtype: str,
    temperature: float,
    max_tokens: int,
    chunk_rows: int = 32,
    top_k: int = 128,
) -> Calibration:
    """Generate honestly for every prompt under several batch sizes, verify under several packings, derive thresholds.

    `make_engine(dtype, batch)` and `make_request(version, prompt, seed, temperature, max_tokens, eos)` give the engine
    and its requests. Half of the rollouts run to `max_tokens` whatever they say (no end of sequence), so that long
    answers are in the sample too. Raises `NotAdmitted` if the thresholds would admit a cheap forgery.
    """
    model = load_base(model_dir, DTYPES[dtype])
    eos = eos_token_ids(model_dir)
    samples: list[Sample] = []
    name = device = ""
    for part, batch in enumerate(BATCHES):
        engine = make_engine(dtype, batch)
        engine.load(0, model_dir, None)
        name, device = engine.name, "cpu"
        for forced in (False, True):
            mine = prompts[2 * part + forced :: 2 * len(BATCHES)]
            seeds = [(part * 2 + forced) << 32 | index for index in range(len(mine))]
            stops = () if forced else eos
            length = 4 * max_tokens if forced else max_tokens
            requests = [
                make_request(0, prompt, seed, temperature, length, stops)
                for prompt, seed in zip(mine, seeds, strict=True)
            ]
            answers = dict(engine.generate(requests))
            claims = [Claim(mine[i], answers[i].tokens, seeds[i]) for i in range(len(mine))]
            budget = TOKEN_BUDGETS[part % len(TOKEN_BUDGETS)]
            results = prefill(model, claims, temperature, eos, budget)
            ordered = [answers[i] for i in range(len(mine))]
            samples += _samples(model, ordered, results, temperature, chunk_rows, top_k)
    setting = Setting(model_digest, dtype, name, device, chunk_rows, top_k, temperature)
    return derive(samples, setting=setting, headroom=HEADROOM)


@torch.inference_mode()
def _samples(
    model: Any,
    answers: Sequence[Any],
    results: Sequence[Prefilled],
    temperature: float,
    chunk_rows: int,
    top_k: int,
) -> list[Sample]:
    shape = {"chunk_rows": chunk_rows, "top_k": top_k}
    proofs = [
        decode(data, rows=len(answer.tokens), **shape)
        for data, answer in zip(commit_many([answer.hidden for answer in answers], **shape), answers, strict=True)
    ]
    hidden = [result.hidden for result in results]
    chunks = distances_many(proofs, hidden, **shape)
    forged = cheap_forgeries(hidden, **shape)
    head = model.get_output_embeddings()
    samples = []
    for index, (answer, result) in enumerate(zip(answers, results, strict=True)):
        theirs = head(answer.hidden).float() / temperature
        ours = head(result.hidden).float() / temperature
        samples.append(
            Sample(
                Measures.of(result.margins, chunks[index], answer.logprobs, result.logprobs),
                float((theirs - ours).abs().max()),
                {name: each[index] for name, each in forged.items()},
            )
        )
    return samples


def load_calibration(path: Path, spec: RunSpec) -> Calibration:
    """Read a calibration and check that it holds for this run. Raises ValueError, FileNotFoundError."""
    calibration = Calibration.from_json(path.read_text())
    differs = mismatches(vars(calibration.setting), spec)
    if differs:
        raise ValueError(f"{path} is a calibration for another {', '.join(differs)}: run `farflung calibrate`")
    return calibration

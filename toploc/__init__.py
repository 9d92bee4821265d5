"""Proof of inference: activation commitments, seeded sampling, and the verdict on both.

A prover calls `sample` and `commit`; a verifier, from one prefill of its own, calls `decode`, `distances`,
`margins` and `logprobs`, and `judge` with the `Thresholds` of a `Calibration`.
"""

from toploc.calibration import (
    Calibration,
    Counts,
    Distribution,
    Headroom,
    NotAdmitted,
    Sample,
    Setting,
    derive,
)
from toploc.distance import ChunkDistance, distances, distances_many
from toploc.forgery import cheap_forgeries
from toploc.judge import Check, Measures, Outcome, Thresholds, Verdict, judge
from toploc.proof import (
    MalformedProof,
    Proof,
    chunk_count,
    commit,
    commit_many,
    decode,
    encode_points,
)
from toploc.sampling import logprobs, margins, noise, sample

__all__ = [
    "Calibration",
    "Check",
    "ChunkDistance",
    "Counts",
    "Distribution",
    "Headroom",
    "MalformedProof",
    "Measures",
    "NotAdmitted",
    "Outcome",
    "Proof",
    "Sample",
    "Setting",
    "Thresholds",
    "Verdict",
    "cheap_forgeries",
    "chunk_count",
    "commit",
    "commit_many",
    "decode",
    "derive",
    "distances",
    "distances_many",
    "encode_points",
    "judge",
    "logprobs",
    "margins",
    "noise",
    "sample",
]

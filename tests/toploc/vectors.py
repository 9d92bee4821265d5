"""Vectors of the reference implementation, toploc 0.1.6."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

VECTORS: dict[str, dict[str, Any]] = {
    v["name"]: v for v in json.loads(Path(__file__).with_name("vectors.json").read_text())["vectors"]
}
TENSORS = [name for name, v in VECTORS.items() if "topk_indices" in v]
POINTS = [name for name, v in VECTORS.items() if v["input"]["kind"] == "from_points"]


def raw(name: str) -> torch.Tensor:
    """The vector's input before it is rounded, float32."""
    spec = VECTORS[name]["input"]
    values = np.random.default_rng(spec["seed"]).standard_normal(spec["shape"], dtype=np.float32)
    return torch.from_numpy(values * np.float32(spec["scale"]))


def tensor(name: str) -> torch.Tensor:
    """The vector's input, bfloat16, checked against its digest."""
    rounded = raw(name).to(torch.bfloat16)
    data = rounded.view(torch.int16).numpy().astype("<i2").tobytes()
    assert hashlib.sha256(data).hexdigest() == VECTORS[name]["input"]["bf16_le_sha256"]
    return rounded


def patterns(values: torch.Tensor) -> list[int]:
    """Flat bfloat16 patterns, unsigned."""
    return (values.reshape(-1).view(torch.int16).to(torch.int64) & 0xFFFF).tolist()

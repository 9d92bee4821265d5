"""The run spec: everything on which a worker and the verifier must agree, in one signed document."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .canonical import canonical_json, sha256_hex
from .signed import Hex64, Strict

Positive = Annotated[int, Field(gt=0, lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]


class ModelSpec(Strict):
    """The policy: architecture and base weights, tokenizer, numerics. `vocab_size` bounds every token id."""

    architecture: str
    base_weights_digest: Hex64
    tokenizer_digest: Hex64
    dtype: Literal["float32", "bfloat16", "float16"]
    head_dtype: Literal["float32", "bfloat16", "float16"]
    publish_dtype: Literal["float32", "bfloat16", "float16"]
    vocab_size: Positive
    hidden_size: Positive
    eos_token_ids: Annotated[tuple[Natural, ...], Field(min_length=1)]
    adapter: Literal["none", "lora"]


class SamplingSpec(Strict):
    """Seeded Gumbel-max sampling; scheme 1 has no top-p and no top-k."""

    scheme: Literal[1] = 1
    temperature: Annotated[float, Field(gt=0, le=10)]
    max_prompt_tokens: Positive
    max_tokens: Positive


class ProofSpec(Strict):
    """Activation commitments."""

    format: Literal[1] = 1
    chunk_rows: Positive = 32
    top_k: Positive = 128


class EnvironmentSpec(Strict):
    """A task set and its version."""

    name: str
    version: str


class RunSpec(Strict):
    """Signed by the run key; its digest is in every manifest, lease and submission.

    `max_staleness` S, `group_size` G, `rollouts_per_version` B, all in versions and rollouts; times in seconds.
    """

    format: Literal[1] = 1
    run_id: str
    model: ModelSpec
    sampling: SamplingSpec
    proof: ProofSpec
    max_staleness: Natural
    group_size: Positive
    rollouts_per_version: Positive
    publish_every: Positive
    propagation_grace: Annotated[float, Field(ge=0, le=3600)]
    lease_seconds: Annotated[float, Field(gt=0, le=86400)]
    minimum_tokens_per_second: Annotated[float, Field(gt=0)]
    price_prompt_token: Natural
    price_completion_token: Natural
    calibration_families: tuple[str, ...]
    environments: tuple[EnvironmentSpec, ...]

    @model_validator(mode="after")
    def _whole_groups(self) -> RunSpec:
        if self.rollouts_per_version % (self.group_size * self.publish_every):
            raise ValueError("rollouts_per_version is a multiple of group_size * publish_every")
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))

"""Configuration of a run: one TOML file, every field overridable as `--section.field value`."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class ModelConfig:
    """`path`: a Hugging Face model directory; empty means the seed model that ships with farflung."""

    path: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    calibration: str = ""


@dataclass(frozen=True)
class TaskConfig:
    """The environment and its options (passed to it as they are)."""

    name: str = "gym:spell_backward"
    options: dict[str, Any] = field(default_factory=lambda: {"min_word_len": 3, "max_word_len": 8})


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling as the run spec fixes it; `max_tokens` includes the end-of-sequence token."""

    temperature: float = 1.0
    max_prompt_tokens: int = 64
    max_tokens: int = 10


@dataclass(frozen=True)
class ScheduleConfig:
    """S, G, B and the times around leases, in seconds. `min_group` 0 means: only whole groups train."""

    max_staleness: int = 4
    group_size: int = 8
    rollouts_per_version: int = 128
    publish_every: int = 1
    propagation_grace: float = 2.0
    lease_seconds: float = 30.0
    minimum_tokens_per_second: float = 1.0
    price_prompt_token: int = 1
    price_completion_token: int = 10
    min_group: int = 0
    open_slots_per_node: int = 256


@dataclass(frozen=True)
class TrainerConfig:
    """Optimisation. `lora_rank` 0 is full fine-tuning; LoRA wants a learning rate about ten times higher."""

    learning_rate: float = 2e-4
    warmup_steps: int = 10
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    engine_cap: float = 4.0
    token_budget: int = 8192
    lora_rank: int = 0
    lora_alpha: float = 0.0
    keep_checkpoints: int = 2


@dataclass(frozen=True)
class VerifierConfig:
    """Verification: rollouts per prefill at most, padded tokens per prefill at most."""

    batch_rollouts: int = 256
    token_budget: int = 16384


@dataclass(frozen=True)
class EvaluationConfig:
    """Greedy held-out evaluation on trusted hardware, every `every` versions over `questions` questions."""

    every: int = 5
    questions: int = 500


@dataclass(frozen=True)
class NetworkConfig:
    """What the run lets relays be: private addresses and any port only where the operator says so."""

    allow_private_relays: bool = False
    relay_ports: tuple[int, ...] = (80, 443)
    head_life_seconds: float = 600.0


@dataclass(frozen=True)
class RunConfig:
    """Everything that an operator may choose for a run."""

    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)

    def __post_init__(self) -> None:
        schedule, trainer = self.schedule, self.trainer
        whole = schedule.group_size * schedule.publish_every
        _require(schedule.max_staleness >= 0, "schedule.max_staleness is at least 0")
        _require(schedule.group_size >= 2, "schedule.group_size is at least 2: an advantage needs a comparison")
        _require(schedule.publish_every >= 1, "schedule.publish_every is at least 1")
        _require(0 < schedule.lease_seconds <= 86400, "schedule.lease_seconds is in (0, 86400]")
        _require(0 < schedule.minimum_tokens_per_second < math.inf, "schedule.minimum_tokens_per_second is positive")
        _require(0 <= schedule.propagation_grace <= 3600, "schedule.propagation_grace is in [0, 3600]")
        prices = (schedule.price_prompt_token, schedule.price_completion_token)
        _require(min(prices) >= 0, "schedule.price_* are not negative")
        _require(
            schedule.rollouts_per_version > 0 and schedule.rollouts_per_version % whole == 0,
            f"schedule.rollouts_per_version is a multiple of group_size x publish_every = {whole}",
        )
        _require(0 <= schedule.min_group <= schedule.group_size, "schedule.min_group is at most group_size")
        _require(schedule.open_slots_per_node >= schedule.group_size, "schedule.open_slots_per_node holds a group")
        _require(0 < self.sampling.temperature <= 10, "sampling.temperature is in (0, 10]; 0 is refused")
        lengths = (self.sampling.max_tokens, self.sampling.max_prompt_tokens)
        _require(min(lengths) >= 1, "sampling.max_tokens and sampling.max_prompt_tokens are at least 1")
        _require(0 < trainer.learning_rate < math.inf, "trainer.learning_rate is positive")
        _require(0 <= trainer.adam_beta1 < 1 and 0 <= trainer.adam_beta2 < 1, "trainer.adam_beta* are in [0, 1)")
        _require(0 <= trainer.weight_decay < math.inf, "trainer.weight_decay is not negative")
        _require(trainer.clip_norm > 0, "trainer.clip_norm is positive")
        _require(trainer.warmup_steps >= 0, "trainer.warmup_steps is at least 0")
        _require(trainer.keep_checkpoints >= 1, "trainer.keep_checkpoints is at least 1")
        _require(min(trainer.token_budget, self.verifier.token_budget) >= 1, "*.token_budget is at least 1")
        _require(self.verifier.batch_rollouts >= 1, "verifier.batch_rollouts is at least 1")
        _require(0 < self.network.head_life_seconds < math.inf, "network.head_life_seconds is positive")
        _require(all(0 < port < 65536 for port in self.network.relay_ports), "network.relay_ports are ports")
        _require(0 <= trainer.clip_low < 1 and trainer.clip_high >= 0, "trainer.clip_low is in [0, 1)")
        _require(trainer.engine_cap >= 1, "trainer.engine_cap is at least 1")
        _require(trainer.lora_rank >= 0, "trainer.lora_rank is at least 0")
        _require(self.evaluation.every >= 1 and self.evaluation.questions >= 1, "evaluation.* are at least 1")

    @property
    def min_group(self) -> int:
        """Accepted members with which a group trains when the coordinator lost the others."""
        return self.schedule.min_group or self.schedule.group_size


class ConfigError(ValueError):
    """The configuration cannot be used; the text names the field."""


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ConfigError(text)


def load(path: Path | None, overrides: Sequence[tuple[str, str]] = ()) -> RunConfig:
    """Read a TOML file (None: all defaults) and apply overrides (`section.field`, text). Raises ConfigError."""
    try:
        data = tomllib.loads(path.read_text("utf-8")) if path else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for name, text in overrides:
        *parents, last = name.split(".")
        table = data
        for part in parents:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{name} is no section")
        table[last] = _Text(text)
    return typing.cast(RunConfig, _build(RunConfig, data, ""))


class _Text(str):
    """A value from the command line, to be parsed as the field's type."""


def _build(cls: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is a section")
    types_of = typing.get_type_hints(cls)
    known = {entry.name for entry in dataclasses.fields(cls)}
    if data.keys() - known:
        raise ConfigError(f"unknown: {', '.join(where + name for name in sorted(data.keys() - known))}")
    values = {
        name: _build(types_of[name], value, f"{where}{name}.")
        if dataclasses.is_dataclass(types_of[name])
        else _value(types_of[name], value, where + name)
        for name, value in data.items()
    }
    return cls(**values)


def _value(kind: Any, value: Any, name: str) -> Any:
    origin = typing.get_origin(kind)
    if isinstance(value, _Text) and kind is not str and origin is not Literal:
        value = _parse(value, name)
    if origin is Literal:
        if str(value) not in typing.get_args(kind):
            raise ConfigError(f"{name} is one of {', '.join(typing.get_args(kind))}")
        return str(value)
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{name} is a list")
        return tuple(_value(typing.get_args(kind)[0], entry, name) for entry in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{name} is a table")
        return {key: _free(entry, f"{name}.{key}") for key, entry in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if kind is str:
        value = str(value) if isinstance(value, str) else value
    if isinstance(kind, types.UnionType) or type(value) is not kind:
        raise ConfigError(f"{name} is of type {getattr(kind, '__name__', kind)}, not {value!r}")
    return value


def _parse(text: str, name: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raise ConfigError(f"{name}: {str(text)!r} is not a value") from None


def _free(value: Any, name: str) -> Any:
    """An entry of a table whose types nobody knows: from the command line it is what TOML makes of it, else text."""
    if isinstance(value, dict):
        return {key: _free(entry, f"{name}.{key}") for key, entry in value.items()}
    if not isinstance(value, _Text):
        return value
    try:
        return _parse(value, name)
    except ConfigError:
        return str(value)


def dump(config: RunConfig) -> str:
    """The configuration as TOML; `load` reads it back unchanged."""
    lines: list[str] = []
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if not dataclasses.is_dataclass(value):
            lines.append(f"{entry.name} = {_toml(value)}")
    for entry in dataclasses.fields(config):
        section = getattr(config, entry.name)
        if dataclasses.is_dataclass(section):
            lines += ["", f"[{entry.name}]"]
            for item in dataclasses.fields(section):
                lines.append(f"{item.name} = {_toml(getattr(section, item.name))}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's basic strings are JSON's
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(entry) for entry in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(entry)}" for key, entry in value.items()) + "}"
    return repr(value)

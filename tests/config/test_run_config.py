"""Configuration: TOML and command line in, the same out, and every wrong value named."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.config import (
    ConfigError,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
    TaskConfig,
    TrainerConfig,
    dump,
    load,
)

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
VALUES = st.recursive(
    st.one_of(TEXT, st.integers(-(2**53), 2**53), st.booleans(), st.floats(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)


def write(path: Path, text: str) -> Path:
    file = path / "run.toml"
    file.write_text(text, encoding="utf-8")
    return file


def loaded(config: RunConfig, path: Path) -> RunConfig:
    return load(write(path, dump(config)))


def test_nothing_given_is_all_defaults(tmp_path: Path) -> None:
    assert load(None) == load(write(tmp_path, "")) == RunConfig()
    assert loaded(RunConfig(), tmp_path) == RunConfig()


def test_dump_names_every_field() -> None:
    data = tomllib.loads(dump(RunConfig()))
    for entry in dataclasses.fields(RunConfig):
        value = getattr(RunConfig(), entry.name)
        assert entry.name in data
        if dataclasses.is_dataclass(value):
            assert set(data[entry.name]) == {item.name for item in dataclasses.fields(value)}


def test_round_trip_of_changed_values(tmp_path: Path) -> None:
    config = RunConfig(
        seed=-3,
        model=ModelConfig(path='C:\\models\\"a"', dtype="bfloat16"),
        task=TaskConfig("gym:x", {"a": 1, "b": [1.5, "c"], "d": {"e": True}}),
        schedule=ScheduleConfig(
            max_staleness=0, group_size=2, rollouts_per_version=8, publish_every=4, lease_seconds=1e-7
        ),
        trainer=TrainerConfig(learning_rate=1e-05, clip_norm=float("inf")),
    )
    assert loaded(config, tmp_path) == config


@given(TEXT, TEXT, st.dictionaries(TEXT, VALUES, max_size=4))
def test_round_trip_of_any_text_and_options(
    tmp_path_factory: pytest.TempPathFactory, path: str, name: str, options: dict[str, Any]
) -> None:
    config = RunConfig(model=ModelConfig(path=path), task=TaskConfig(name, options))
    assert loaded(config, tmp_path_factory.getbasetemp()) == config


@given(st.floats(1e-12, 1e12), st.integers(0, 2**31))
def test_round_trip_of_numbers(tmp_path_factory: pytest.TempPathFactory, rate: float, warmup: int) -> None:
    config = RunConfig(trainer=TrainerConfig(learning_rate=rate, warmup_steps=warmup))
    assert loaded(config, tmp_path_factory.getbasetemp()) == config


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("seed", "7", 7),
        ("seed", "1_000", 1000),
        ("model.path", "/a b/c", "/a b/c"),
        ("model.path", "7", "7"),  # text stays text
        ("model.path", "true", "true"),
        ("model.dtype", "bfloat16", "bfloat16"),
        ("trainer.learning_rate", "1e-3", 1e-3),
        ("trainer.learning_rate", "1", 1.0),
        ("schedule.max_staleness", "0", 0),
        ("network.allow_private_relays", "true", True),
        ("network.relay_ports", "[8080, 443]", (8080, 443)),
        ("task.options", "{min_word_len = 4}", {"min_word_len": 4}),
        ("task.options.min_word_len", "4", {"min_word_len": 4}),
        ("task.options.ratio", "0.5", {"ratio": 0.5}),
        ("task.options.words", '["a", "b"]', {"words": ["a", "b"]}),
        ("task.options.kind", "plain words", {"kind": "plain words"}),
        ("task.options.deep.er", "true", {"deep": {"er": True}}),
    ],
)
def test_overrides_of_every_type(tmp_path: Path, name: str, text: str, value: Any) -> None:
    config = load(None, [(name, text)])
    found: Any = config
    for part in name.split(".")[:2]:
        found = getattr(found, part)
    assert found == value and type(found) is type(value)
    assert loaded(config, tmp_path) == config
    if isinstance(value, dict):
        assert not any(isinstance(entry, str) and type(entry) is not str for entry in value.values())


def test_override_beats_the_file_and_keeps_the_rest(tmp_path: Path) -> None:
    file = write(tmp_path, "seed = 1\n[trainer]\nlearning_rate = 0.5\nwarmup_steps = 3\n")
    config = load(file, [("trainer.learning_rate", "0.25"), ("seed", "2"), ("seed", "3")])
    assert config.seed == 3 and config.trainer.learning_rate == 0.25 and config.trainer.warmup_steps == 3


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("sead = 1", "sead"),
        ("[trainer]\nlearning_rat = 1.0", "trainer.learning_rat"),
        ("[nowhere]\na = 1", "nowhere"),
        ("trainer = 1", "trainer"),
        ("[seed]\na = 1", "seed"),
        ('seed = "1"', "seed"),
        ("seed = 1.0", "seed"),
        ("seed = true", "seed"),
        ("[model]\npath = 1", "model.path"),
        ('[model]\ndtype = "float64"', "model.dtype"),
        ("[model]\ndtype = 32", "model.dtype"),
        ('[trainer]\nlearning_rate = "fast"', "trainer.learning_rate"),
        ("[trainer]\nlearning_rate = true", "trainer.learning_rate"),
        ("[trainer]\nwarmup_steps = 1.5", "trainer.warmup_steps"),
        ("[network]\nallow_private_relays = 1", "network.allow_private_relays"),
        ("[network]\nrelay_ports = 80", "network.relay_ports"),
        ('[network]\nrelay_ports = ["80"]', "network.relay_ports"),
        ("[task]\noptions = 1", "task.options"),
        ("seed = ", "run.toml"),
        ("seed = 1\nseed = 2", "run.toml"),
    ],
)
def test_unknown_fields_and_wrong_types_are_named(tmp_path: Path, text: str, names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    assert names in str(caught.value)


@pytest.mark.parametrize("data", [b"seed = 1\xff", b"\x00", "seed = 1".encode("utf-16")])
def test_files_that_are_no_toml(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "run.toml").write_bytes(data)
    for path in (tmp_path / "run.toml", tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError):
            load(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("seed", "one"),
        ("seed", ""),
        ("seed", "1 2"),
        ("seed.x", "1"),
        ("seed.", "1"),
        (".seed", "1"),
        ("trainer", "1"),
        ("trainer.learning_rate.x", "1"),
        ("trainer.nothing", "1"),
        ("network.relay_ports", "80"),
        ("model.dtype", "int8"),
    ],
)
def test_overrides_that_make_no_sense(name: str, text: str) -> None:
    with pytest.raises(ConfigError):
        load(None, [(name, text)])


def test_override_below_a_plain_value_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="section"):
        load(write(tmp_path, "trainer = 3"), [("trainer.learning_rate", "1")])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("schedule.max_staleness", ["-1"]),
        ("schedule.group_size", ["0", "1", "-8"]),
        ("schedule.publish_every", ["0", "-1", "3"]),
        ("schedule.rollouts_per_version", ["0", "-128", "100"]),
        ("schedule.min_group", ["-1", "9"]),
        ("schedule.open_slots_per_node", ["7", "0"]),
        ("schedule.lease_seconds", ["0", "-1", "nan", "inf"]),
        ("schedule.minimum_tokens_per_second", ["0", "-1", "nan", "inf"]),
        ("schedule.propagation_grace", ["-1", "nan", "inf"]),
        ("schedule.price_prompt_token", ["-1"]),
        ("schedule.price_completion_token", ["-1"]),
        ("sampling.temperature", ["0", "-1", "10.1", "nan", "inf"]),
        ("sampling.max_tokens", ["0", "-1"]),
        ("sampling.max_prompt_tokens", ["0"]),
        ("trainer.learning_rate", ["0", "-1", "nan", "inf"]),
        ("trainer.adam_beta1", ["1", "-0.1", "nan"]),
        ("trainer.adam_beta2", ["1", "2"]),
        ("trainer.weight_decay", ["-1", "nan"]),
        ("trainer.clip_norm", ["0", "-1", "nan"]),
        ("trainer.clip_low", ["1", "-0.1", "nan"]),
        ("trainer.clip_high", ["-0.1", "nan"]),
        ("trainer.engine_cap", ["0.5", "nan"]),
        ("trainer.lora_rank", ["-1"]),
        ("trainer.warmup_steps", ["-1"]),
        ("trainer.keep_checkpoints", ["0", "-1"]),
        ("trainer.token_budget", ["0"]),
        ("verifier.token_budget", ["0"]),
        ("verifier.batch_rollouts", ["0", "-1"]),
        ("evaluation.every", ["0"]),
        ("evaluation.questions", ["0"]),
        ("network.head_life_seconds", ["0", "nan", "inf"]),
        ("network.relay_ports", ["[0]", "[70000]"]),
    ],
)
def test_values_out_of_range_are_named(name: str, values: list[str]) -> None:
    for text in values:
        with pytest.raises(ConfigError) as caught:
            load(None, [(name, text)])
        section, _, field = name.partition(".")
        assert field in str(caught.value) or "*" in str(caught.value) or section in str(caught.value)


def test_min_group_zero_means_whole_groups() -> None:
    assert RunConfig().min_group == 8
    assert load(None, [("schedule.min_group", "3")]).min_group == 3

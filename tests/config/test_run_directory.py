"""Run directories: what is made of a configuration, and what is refused."""

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from coordinator import seed
from coordinator.config import (
    ConfigError,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    ScheduleConfig,
    TaskConfig,
    TrainerConfig,
)
from coordinator.ledger import leases
from coordinator.run import Run, RunError, create_run, is_unfinished, open_run
from protocol.identity import Key
from protocol.reasons import Refusal
from shardcast.tensors import tensors_digest


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """With no value at its default."""
    config = RunConfig(
        seed=5,
        sampling=SamplingConfig(temperature=0.5, max_prompt_tokens=50, max_tokens=9),
        schedule=ScheduleConfig(2, 4, 24, 2, 1.5, 20.0, 3.0, 2, 7, 3, 16),
    )
    return create_run(tmp_path_factory.mktemp("runs") / "deep" / "run", config)


def test_spec_says_what_the_configuration_says(made: Run) -> None:
    spec, config = made.spec, made.config
    assert (spec.max_staleness, spec.group_size, spec.rollouts_per_version, spec.publish_every) == (2, 4, 24, 2)
    assert (spec.propagation_grace, spec.lease_seconds, spec.minimum_tokens_per_second) == (1.5, 20.0, 3.0)
    assert (spec.price_prompt_token, spec.price_completion_token) == (2, 7)
    assert spec.sampling.temperature == 0.5 and spec.sampling.max_prompt_tokens == 50 and spec.sampling.max_tokens == 9
    model = spec.model
    assert (model.vocab_size, model.hidden_size, model.eos_token_ids) == (320, 128, (2,))
    assert model.architecture == "Qwen2ForCausalLM" and model.adapter == "none"
    assert (model.dtype, model.head_dtype, model.publish_dtype) == ("float32", "float32", "float32")
    assert model.base_weights_digest == tensors_digest(seed.model_dir().glob("*.safetensors"))
    assert [(e.name, e.version) for e in spec.environments] == [(made.task.name, made.task.version)]
    assert config.min_group == 3


def test_lora_is_in_the_spec(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", RunConfig(trainer=TrainerConfig(lora_rank=4)))
    assert run.spec.model.adapter == "lora"


def test_opened_run_is_the_one_that_was_made(made: Run) -> None:
    again = open_run(made.path)
    assert (again.config, again.spec, again.seed_key) == (made.config, made.spec, made.seed_key)
    assert again.key.id == made.key.id and again.spec.digest == made.spec.digest
    with again.ledger.read() as tx:
        newest = leases.newest_checkpoint(tx)
    assert newest is not None and newest[0] == 0
    manifest = again.manifest(again.base_name)
    assert manifest.version == 0 and manifest.run_spec_digest == made.spec.digest
    assert {file.name for file in again.model_dir.iterdir()} == {file.name for file in seed.model_dir().iterdir()}
    with pytest.raises(RunError):
        again.manifest("v9-00000000")


def test_keys_are_the_owners_only(made: Run) -> None:
    for name in ("run.pem", "seed.key"):
        assert stat.S_IMODE((made.path / "keys" / name).stat().st_mode) == 0o600
    assert len(made.seed_key) == 32


def test_two_runs_share_no_secret(made: Run, tmp_path: Path) -> None:
    other = create_run(tmp_path / "run", made.config)
    assert other.key.id != made.key.id and other.seed_key != made.seed_key
    assert other.spec.run_id != made.spec.run_id and other.spec.digest != made.spec.digest


def test_directories_in_use_are_refused_and_left_alone(made: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="already holds a run"):
        create_run(made.path, RunConfig())
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(RunError, match="not empty"):
        create_run(tmp_path, RunConfig())
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(RunError, match="no run"):
        open_run(tmp_path)
    with pytest.raises(RunError, match="no run"):
        open_run(tmp_path / "nowhere")


def copy(run: Run, target: Path) -> Path:
    run.ledger.close()
    shutil.copytree(run.path, target)
    return target


def test_spec_of_another_key_or_changed_is_refused(made: Run, tmp_path: Path) -> None:
    path = copy(made, tmp_path / "run")
    document = json.loads((path / "spec.json").read_text())
    document["payload"] = document["payload"].replace('"group_size":4', '"group_size":2')
    (path / "spec.json").write_text(json.dumps(document))
    with pytest.raises(Refusal):
        open_run(path)
    shutil.copyfile(made.path / "spec.json", path / "spec.json")
    assert open_run(path).spec == made.spec
    (path / "keys" / "run.pem").unlink()
    Key.generate().save(path / "keys" / "run.pem")
    with pytest.raises(Refusal):
        open_run(path)


BROKEN: dict[str, dict[str, Any]] = {
    "unknown task": {"task": TaskConfig("gym:no_such_data_set", {})},
    "unknown family": {"task": TaskConfig("zoo:spell_backward", {})},
    "unknown option": {"task": TaskConfig("gym:spell_backward", {"no_such_option": 1})},
    "wrong option": {"task": TaskConfig("gym:spell_backward", {"min_word_len": "long"})},
    "model is nowhere": {"model": ModelConfig(path="/nowhere/at/all")},
    "lora in bf16": {"model": ModelConfig(dtype="bfloat16"), "trainer": TrainerConfig(lora_rank=2)},
    "number too large": {"sampling": SamplingConfig(max_tokens=2**40)},
    "calibration is nowhere": {"model": ModelConfig(calibration="/nowhere/calibration.json")},
}


@pytest.mark.parametrize("sections", BROKEN.values(), ids=BROKEN.keys())
def test_what_makes_no_run_is_a_configuration_error_and_leaves_nothing(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        create_run(tmp_path / "run", RunConfig(**sections))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json", "tokenizer.json"])
def test_incomplete_model_directories(tmp_path: Path, missing: str) -> None:
    shutil.copytree(seed.model_dir(), tmp_path / "model")
    (tmp_path / "model" / missing).unlink()
    with pytest.raises(ConfigError):
        create_run(tmp_path / "run", RunConfig(model=ModelConfig(path=str(tmp_path / "model"))))
    assert not (tmp_path / "run").exists()


def test_calibration_of_another_setting_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    model = ModelConfig(calibration=str(seed.calibration()))
    with pytest.raises(ConfigError, match="calibration"):
        create_run(tmp_path / "run", RunConfig(model=model, sampling=SamplingConfig(temperature=0.5)))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError):
        create_run(tmp_path / "run", RunConfig(model=ModelConfig(calibration=str(tmp_path / "list.json"))))
    assert not (tmp_path / "run").exists()
    run = create_run(tmp_path / "run", RunConfig(model=model))
    assert run.calibration_path.read_bytes() == seed.calibration().read_bytes()


def test_a_run_without_calibration_has_no_file(made: Run) -> None:
    assert not made.calibration_path.exists()  # temperature 0.5


def test_only_our_own_leavings_are_unfinished(made: Run, tmp_path: Path) -> None:
    """`farflung up` deletes what is unfinished: nobody else's files may be among it."""
    assert not is_unfinished(made.path)
    path = copy(made, tmp_path / "run")
    (path / "spec.json").unlink()
    assert is_unfinished(path)
    (path / "notes.txt").write_text("mine")
    assert not is_unfinished(path)
    own = tmp_path / "own"
    own.mkdir()
    assert not is_unfinished(own)
    (own / "run.toml").write_text("seed = 1\n")
    assert not is_unfinished(own)

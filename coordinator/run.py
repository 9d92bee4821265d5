"""The run directory: configuration, keys, ledger, store, shards. Needs no torch.

    run.toml            what the operator chose
    spec.json           the signed run spec
    keys/run.pem        signs everything that leaves; keys/seed.key draws the slots' seeds
    ledger.db           the ledger (SQLite)
    calibration.json    the thresholds, and the measurements from which they follow
    store/              signed submissions and evidence, by content hash
    shards/             what relays fetch: shards, manifests
    versions/<name>/    the files of the versions that may still be needed
    checkpoints/        the trainer's state
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from protocol.canonical import sha256_hex
from protocol.identity import Key
from protocol.manifest import MANIFEST, Canary, Manifest, version_name
from protocol.runspec import EnvironmentSpec, ModelSpec, ProofSpec, RunSpec, SamplingSpec
from protocol.signed import open_document, sign_document
from shardcast.publish import publish
from shardcast.store import ShardStore
from shardcast.tensors import tensors_digest

from . import seed, tasks
from .config import ConfigError, RunConfig, dump, load
from .ledger import training
from .ledger.database import Ledger
from .store import BlobStore
from .tasks.prompts import PromptCodec, eos_token_ids

SPEC = "run_spec"


class RunError(Exception):
    """The run directory cannot be used; the text says why."""


@dataclass(frozen=True)
class Run:
    """An opened run directory."""

    path: Path
    config: RunConfig
    spec: RunSpec
    key: Key
    seed_key: bytes

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger."""
        return Ledger(ledger_url(self.path))

    @cached_property
    def store(self) -> BlobStore:
        """Submissions and evidence."""
        return BlobStore(self.path / "store")

    @cached_property
    def shards(self) -> ShardStore:
        """What relays fetch."""
        return ShardStore(self.path / "shards")

    @cached_property
    def codec(self) -> PromptCodec:
        """Tokenizer and chat template of the base model."""
        return PromptCodec(self.model_dir)

    @cached_property
    def task(self) -> tasks.TaskSet:
        """The environment."""
        return tasks.load(self.config.task.name, self.config.seed, **self.config.task.options)

    @property
    def model_dir(self) -> Path:
        """The base model's files."""
        return self.version_dir(self.base_name)

    @cached_property
    def base_name(self) -> str:
        """Name of version 0."""
        return version_name(0, self.spec.model.base_weights_digest)

    @property
    def calibration_path(self) -> Path:
        """The calibration that holds for this run (`farflung calibrate` writes one)."""
        return self.path / "calibration.json"

    def version_dir(self, name: str) -> Path:
        """Folder with the files of a version."""
        return self.path / "versions" / name

    def publish_version(
        self, folder: Path, version: int, step: int, canary: Canary | None = None
    ) -> training.Published:
        """Cut a finished folder into shards, sign its manifest, keep the files as a version. Nobody sees it before it
        is entered in the ledger, so that a crash in between is mended by publishing again."""
        adapter = version > 0 and self.spec.model.adapter == "lora"
        manifest = publish(
            folder,
            self.shards,
            run_id=self.spec.run_id,
            run_spec_digest=self.spec.digest,
            version=version,
            kind="adapter" if adapter else "full",
            base=self.base_name if adapter else None,
            base_weights_digest=self.spec.model.base_weights_digest if adapter else None,
            created=int(time.time()),
            canary=canary,
            key=self.key,
        )
        target = self.version_dir(manifest.name)
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            os.rename(folder, target)
        elif folder != target:
            shutil.rmtree(folder)
        envelope = self.shards.manifest(manifest.name)
        assert envelope is not None and manifest.weights_digest is not None
        return training.Published(
            version, step, manifest.name, manifest.kind, manifest.weights_digest, sha256_hex(envelope), manifest.size
        )

    def manifest(self, name: str) -> Manifest:
        """The manifest of a published version. Raises Refusal if it is damaged, RunError if there is none."""
        data = self.shards.manifest(name)
        if data is None:
            raise RunError(f"{name} was never published")
        return open_document(data, MANIFEST, Manifest, self.key.id)


def ledger_url(path: Path) -> str:
    """SQLAlchemy URL of a run directory's ledger."""
    return f"sqlite:///{path / 'ledger.db'}"


def create_run(path: Path, config: RunConfig) -> Run:
    """Make a run directory and publish version 0. Raises RunError, ConfigError."""
    if (path / "spec.json").exists():
        raise RunError(f"{path} already holds a run; continue it with --resume, or choose another --dir")
    if path.exists() and any(path.iterdir()):
        raise RunError(f"{path} is not empty")
    try:
        model = Path(config.model.path) if config.model.path else seed.verify()
        spec = _spec(config, model)
        calibration = _calibration(config, spec)
    except seed.SeedModelError as error:
        raise RunError(str(error)) from None
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        # what the model's files or the environment refuse
        raise ConfigError(f"{type(error).__name__}: {error}") from error
    (path / "keys").mkdir(parents=True)
    key = Key.generate()
    key.save(path / "keys" / "run.pem")
    seed_key = secrets.token_bytes(32)
    _write(path / "keys" / "seed.key", seed_key, 0o600)
    _write(path / "run.toml", dump(config).encode(), 0o644)
    run = Run(path, config, spec, key, seed_key)
    run.ledger.create()
    staging = path / "versions" / ".v0"
    staging.mkdir(parents=True)
    for file in sorted(model.iterdir()):
        if file.is_file() and file.suffix in (".safetensors", ".json", ".jinja", ".txt", ".model"):
            shutil.copyfile(file, staging / file.name)
    published = run.publish_version(staging, 0, 0)
    with run.ledger.write() as tx:
        training.enter_version(tx, spec, published, now=time.time())
    if calibration is not None:
        shutil.copyfile(calibration, run.calibration_path)
    # last: a directory with a spec is a whole one
    _write(path / "spec.json", sign_document(SPEC, spec, key).model_dump_json().encode(), 0o644)
    return run


def is_unfinished(path: Path) -> bool:
    """Is this what a killed `create_run` left, and nothing else? (A folder with somebody's own run.toml is not.)"""
    if not (path / "keys" / "run.pem").exists() or (path / "spec.json").exists():
        return False
    ours = {"keys", "run.toml", ".run.toml.new", "calibration.json", ".spec.json.new", "store", "shards", "versions"}
    return all(entry.name in ours or entry.name.startswith("ledger.db") for entry in path.iterdir())


def open_run(path: Path) -> Run:
    """Open a run directory. Raises RunError if there is none, Refusal if the spec is not signed by its key."""
    if not (path / "spec.json").exists():
        raise RunError(f"{path} holds no run")
    config = load(path / "run.toml")
    key = Key.load(path / "keys" / "run.pem")
    spec = open_document((path / "spec.json").read_bytes(), SPEC, RunSpec, key.id)
    return Run(path, config, spec, key, (path / "keys" / "seed.key").read_bytes())


def mismatches(setting: Mapping[str, object], spec: RunSpec) -> list[str]:
    """In what a calibration's setting differs from a run: names, empty if it holds."""
    wanted = {
        "model_digest": spec.model.base_weights_digest,
        "dtype": spec.model.dtype,
        "temperature": spec.sampling.temperature,
        "chunk_rows": spec.proof.chunk_rows,
        "top_k": spec.proof.top_k,
    }
    return [name for name, value in wanted.items() if setting.get(name) != value]


def _calibration(config: RunConfig, spec: RunSpec) -> Path | None:
    """The known calibration that holds for the run, if there is one."""
    known = Path(config.model.calibration) if config.model.calibration else seed.calibration()
    if not mismatches(json.loads(known.read_text()).get("setting", {}), spec):
        return known
    if config.model.calibration:
        raise ConfigError(f"model.calibration: {known} is for another model, dtype, temperature or proof format")
    return None


def _spec(config: RunConfig, model: Path) -> RunSpec:
    weights = sorted(model.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"model.path: {model} holds no .safetensors file")
    described = json.loads((model / "config.json").read_text())
    if config.trainer.lora_rank and config.model.dtype != "float32":
        raise ConfigError("trainer.lora_rank needs model.dtype float32 for now")
    task = tasks.load(config.task.name, config.seed, **config.task.options)
    schedule = config.schedule
    return RunSpec(
        run_id=secrets.token_hex(8),
        model=ModelSpec(
            architecture=described["architectures"][0],
            base_weights_digest=tensors_digest(weights),
            tokenizer_digest=sha256_hex((model / "tokenizer.json").read_bytes()),
            dtype=config.model.dtype,
            head_dtype="float32",
            publish_dtype="float32",
            vocab_size=described["vocab_size"],
            hidden_size=described["hidden_size"],
            eos_token_ids=eos_token_ids(model),
            adapter="lora" if config.trainer.lora_rank else "none",
        ),
        sampling=SamplingSpec(
            temperature=config.sampling.temperature,
            max_prompt_tokens=config.sampling.max_prompt_tokens,
            max_tokens=config.sampling.max_tokens,
        ),
        proof=ProofSpec(),
        max_staleness=schedule.max_staleness,
        group_size=schedule.group_size,
        rollouts_per_version=schedule.rollouts_per_version,
        publish_every=schedule.publish_every,
        propagation_grace=schedule.propagation_grace,
        lease_seconds=schedule.lease_seconds,
        minimum_tokens_per_second=schedule.minimum_tokens_per_second,
        price_prompt_token=schedule.price_prompt_token,
        price_completion_token=schedule.price_completion_token,
        calibration_families=(f"hf/{config.model.dtype}/cpu",),
        environments=(EnvironmentSpec(name=task.name, version=task.version),),
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)

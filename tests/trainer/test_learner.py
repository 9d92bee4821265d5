"""The learner: packing invariance, resuming bit for bit, export and what engines make of it."""

import copy
import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.config import TrainerConfig
from coordinator.policy import PolicyError, Versions, load_base, load_weights, make_canary, merge_adapter
from coordinator.trainer.losses import LossConfig, policy_loss
from coordinator.trainer.model import Learner
from coordinator.trainer.packing import Sample, pack
from node.engines.base import Request
from node.engines.hf import HFEngine
from node.sync import check_canary
from protocol.reasons import Reason, Refusal
from protocol.runspec import RunSpec
from tests.trainer.conftest import FULL, LORA

KINDS = pytest.mark.parametrize("config", [FULL, LORA], ids=["full", "lora"])


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in learner.trainable.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@KINDS
def test_padding_changes_neither_log_probs_nor_gradients(
    base: Path, spec: RunSpec, samples: list[Sample], config: TrainerConfig
) -> None:
    learner = Learner(base, spec, config, 0)
    if config.lora_rank:
        learner.train(samples)  # B is zero before the first step, and with it A's gradient
    useful = [dataclasses.replace(sample, advantage=sample.advantage or 0.1) for sample in samples]
    found = []
    for budget in (1, 100, 10**6):
        learner.model.zero_grad(set_to_none=True)
        logps: dict[tuple[int, ...], torch.Tensor] = {}
        for micro in pack(useful, budget):
            logp = learner.logprobs(micro)
            loss, _ = policy_loss(
                logp, micro.logp_old, micro.logp_engine, micro.advantages, micro.mask, 50, LossConfig()
            )
            loss.backward()
            for row in range(len(micro.advantages)):
                tokens = micro.targets[row][micro.mask[row]]
                logps[tuple(tokens.tolist())] = logp[row][micro.mask[row]].detach()
        found.append((logps, {n: p.grad.clone() for n, p in learner.trainable.items() if p.grad is not None}))
    alone_logps, alone_grads = found[0]
    assert len(alone_logps) == len(useful) and len(pack(useful, 1)) == len(useful)
    for logps, grads in found[1:]:
        for tokens, logp in alone_logps.items():
            torch.testing.assert_close(logps[tokens], logp, rtol=0, atol=2e-5)
        assert grads.keys() == alone_grads.keys()
        scale = max(float(grad.abs().max()) for grad in alone_grads.values())
        for name, grad in alone_grads.items():
            torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-5 * max(scale, 1.0))


def test_log_probs_are_those_of_a_plain_forward(base: Path, spec: RunSpec, samples: list[Sample]) -> None:
    sampling = spec.sampling.model_copy(update={"temperature": 0.7})
    learner = Learner(base, spec.model_copy(update={"sampling": sampling}), FULL, 0)
    for micro in pack(samples, 1):
        ids = micro.input_ids
        logits = learner.model(input_ids=ids).logits[0, -micro.targets.shape[1] - 1 : -1].double() / 0.7
        expected = torch.log_softmax(logits, -1).gather(-1, micro.targets[0, :, None])[:, 0]
        torch.testing.assert_close(learner.logprobs(micro)[0].double(), expected, rtol=0, atol=2e-5)


def test_step_metrics(base: Path, spec: RunSpec, samples: list[Sample]) -> None:
    learner = Learner(base, spec, FULL, 0)
    metrics = learner.train(samples)
    assert learner.step == 1
    assert metrics["tokens"] == sum(len(sample.tokens) for sample in samples)
    assert metrics["trained_tokens"] == sum(len(sample.tokens) for sample in samples if sample.advantage)
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["grad_norm"] > 0
    assert metrics["engine_gap_mean"] == pytest.approx(0.01, rel=1e-3)


def test_denominator_counts_samples_without_advantage(base: Path, spec: RunSpec, samples: list[Sample]) -> None:
    idle = [dataclasses.replace(sample, advantage=0.0) for sample in samples]
    one, other = (Learner(base, spec, FULL, 0).train(batch) for batch in (samples, samples + idle))
    assert other["loss"] == pytest.approx(one["loss"] / 2, rel=1e-5)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"] / 2, rel=1e-3)


def test_batch_without_advantage_changes_nothing_but_the_count(
    base: Path, spec: RunSpec, samples: list[Sample], tmp_path: Path
) -> None:
    learner = Learner(base, spec, dataclasses.replace(FULL, weight_decay=0.1), 0)
    before = weights(learner)
    metrics = learner.train([dataclasses.replace(sample, advantage=0.0) for sample in samples])
    assert equal(weights(learner), before) and learner.step == 1
    assert metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0 and metrics["trained_tokens"] == 0
    learner.save(tmp_path)  # an optimizer without any state yet
    other = Learner(base, spec, FULL, 0)
    other.load(tmp_path, 1)
    assert equal(weights(other), before)


def test_warm_up_and_positive_advantage_raises_probability(base: Path, spec: RunSpec, samples: list[Sample]) -> None:
    config = dataclasses.replace(FULL, learning_rate=1e-3, warmup_steps=4)
    learner = Learner(base, spec, config, 0)
    rates = []
    good = dataclasses.replace(samples[5], advantage=1.0)
    (micro,) = pack([good], 10**6)
    with torch.no_grad():
        logp = learner.logprobs(micro)[0]
    good = dataclasses.replace(good, logp_old=tuple(logp.tolist()), logp_engine=tuple(logp.tolist()))
    for _ in range(5):
        learner.train([good])
        rates.append(learner.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.00025, 0.0005, 0.00075, 0.001, 0.001])
    with torch.no_grad():
        assert bool((learner.logprobs(micro)[0] - logp).mean() > 0.05)


def test_a_gradient_that_is_no_number_ends_the_step_before_the_weights_move(
    base: Path, spec: RunSpec, samples: list[Sample]
) -> None:
    learner = Learner(base, spec, FULL, 0)
    before = weights(learner)
    bad = dataclasses.replace(samples[0], logp_old=(math.nan,) * len(samples[0].tokens))
    with pytest.raises(FloatingPointError):
        learner.train([bad, *samples[1:]])
    assert equal(weights(learner), before) and learner.step == 0


@KINDS
def test_resumed_learner_makes_the_same_next_step(
    base: Path, spec: RunSpec, samples: list[Sample], tmp_path: Path, config: TrainerConfig
) -> None:
    config = dataclasses.replace(config, warmup_steps=10, weight_decay=0.01)
    learner = Learner(base, spec, config, 0)
    learner.train(samples)
    learner.train(samples[::-1])
    learner.save(tmp_path)
    resumed = Learner(base, spec, config, 99)  # another seed: what was drawn must come from the file
    resumed.load(tmp_path, 2)
    assert equal(weights(resumed), weights(learner)) and resumed.step == 2
    assert learner.train(samples) == resumed.train(samples)
    assert equal(weights(resumed), weights(learner))


def test_export_round_trip_is_exact(base: Path, spec: RunSpec, samples: list[Sample], tmp_path: Path) -> None:
    learner = Learner(base, spec, FULL, 0)
    learner.train(samples)
    learner.export(tmp_path / "v1")
    names = {file.name for file in (tmp_path / "v1").iterdir()}
    assert names == {file.name for file in base.iterdir()}
    model = load_base(base, torch.float32)
    load_weights(model, tmp_path / "v1")
    mine, theirs = learner.model.state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert model.lm_head.weight is model.model.embed_tokens.weight  # still tied
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    fresh = load_base(tmp_path / "v1", torch.float32).state_dict()
    assert all(torch.equal(mine[name], fresh[name]) for name in mine)
    assert not torch.equal(mine["lm_head.weight"], load_base(base, torch.float32).lm_head.weight)


def test_export_is_the_same_bytes_every_time(base: Path, spec: RunSpec, samples: list[Sample], tmp_path: Path) -> None:
    for config in (FULL, LORA):
        learner = Learner(base, spec, config, 0)
        learner.train(samples)
        folders = [tmp_path / f"{config.lora_rank}-{number}" for number in range(2)]
        for folder in folders:
            learner.export(folder)
        one, other = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
        assert one == other


def test_load_weights_refuses_missing_and_unexpected_tensors(base: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(base / "model.safetensors")
    model = load_base(base, torch.float32)
    cut = dict(tensors)
    cut.pop("model.norm.weight")
    for folder, content in (("less", cut), ("more", tensors | {"model.extra.weight": torch.zeros(2)}), ("none", {})):
        (tmp_path / folder).mkdir()
        if content:
            save_file(content, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(PolicyError):
            load_weights(model, tmp_path / folder)
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(base / name, tmp_path / "less" / name)
    with pytest.raises(PolicyError):
        load_base(tmp_path / "less", torch.float32)


@pytest.fixture
def adapter(base: Path, spec: RunSpec, samples: list[Sample], tmp_path: Path) -> tuple[Learner, Path]:
    learner = Learner(base, spec, LORA, 0)
    learner.train(samples)
    learner.train(samples)
    learner.export(tmp_path / "v1-adapter")
    return learner, tmp_path / "v1-adapter"


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits


def test_adapter_is_a_peft_directory_without_a_path(adapter: tuple[Learner, Path], base: Path, tmp_path: Path) -> None:
    _, folder = adapter
    assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    described = json.loads((folder / "adapter_config.json").read_text())
    assert described["peft_type"] == "LORA" and described["r"] == 4 and described["lora_alpha"] == 8
    assert described["base_model_name_or_path"] is None
    for file in folder.iterdir():
        data = file.read_bytes()
        for path in (base, base.parent, tmp_path):
            assert str(path).encode() not in data


def test_merged_adapter_is_the_live_model(adapter: tuple[Learner, Path], base: Path) -> None:
    learner, folder = adapter
    plain = load_base(base, torch.float32)
    merged = merge_adapter(plain, folder)
    torch.testing.assert_close(logits(merged), logits(learner.model), rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(learner.policy()), logits(learner.model), rtol=0, atol=0)
    assert float((logits(merged) - logits(plain)).abs().max()) > 1e-2
    untouched = load_base(base, torch.float32)
    assert torch.equal(logits(plain), logits(untouched))  # merging leaves the base alone


def test_delivered_adapter_is_what_engines_generate_with(
    adapter: tuple[Learner, Path], base: Path, spec: RunSpec
) -> None:
    learner, folder = adapter
    engine = HFEngine("float32", 8)
    engine.load(1, folder, base)
    torch.testing.assert_close(logits(engine.model(1)), logits(learner.model), rtol=0, atol=1e-5)
    canary = make_canary(learner.policy(), spec, (5, 6, 7), 1)
    check_canary(engine, 1, canary, spec)
    engine.load(2, base, None)  # the adapter was never delivered
    with pytest.raises(Refusal) as caught:
        check_canary(engine, 2, canary, spec)
    assert caught.value.reason is Reason.CANARY_MISMATCH


def test_adapter_starts_as_the_base_and_its_draw_is_seeded(base: Path, spec: RunSpec) -> None:
    one, same, other = (Learner(base, spec, LORA, seed) for seed in (0, 0, 1))
    assert equal(weights(one), weights(same)) and not equal(weights(one), weights(other))
    assert torch.equal(logits(one.model), logits(load_base(base, torch.float32)))
    assert set(weights(one)) and all("lora" in name and "lm_head" not in name for name in weights(one))


def test_versions_drops_the_least_recently_used_but_never_the_base(
    adapter: tuple[Learner, Path], base: Path
) -> None:
    _, folder = adapter
    versions = Versions(base, True, torch.float32, keep=2)
    first = versions.get(folder)
    assert versions.get(folder) is first and versions.get(base) is versions.base
    for number in range(3):
        copied = folder.with_name(f"v{number}")
        copied.mkdir()
        for file in folder.iterdir():
            (copied / file.name).write_bytes(file.read_bytes())
        versions.get(copied)
    assert versions.get(base) is versions.base
    assert versions.get(folder) is not first  # loaded again, the same weights
    assert torch.equal(logits(versions.get(folder)), logits(first))


def test_canary_is_a_seeded_sample_that_ends_at_the_end(base: Path, spec: RunSpec) -> None:
    model = load_base(base, torch.float32)
    engine = HFEngine("float32", 8)
    engine.load(0, base, None)
    lengths = set()
    for seed in range(12):
        canary = make_canary(model, spec, (5, 6, 7), seed)
        lengths.add(len(canary.tokens))
        assert canary == make_canary(copy.deepcopy(model), spec, (5, 6, 7), seed)
        (_, answer), = engine.generate([Request(0, (5, 6, 7), seed, 1.0, 6, spec.model.eos_token_ids)])
        assert answer.tokens == canary.tokens and int(canary.seed, 16) == seed
        assert answer.logprobs == pytest.approx(canary.logprobs, abs=1e-4)
    assert max(lengths) == 6

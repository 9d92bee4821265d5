"""The policy loss: probe values, an independent implementation, gradients, masking."""

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.trainer.losses import ZERO, LossConfig, LossSums, policy_loss

CONFIG = LossConfig(clip_low=0.2, clip_high=0.28, engine_cap=4.0, ratio_cap=4.0)


def token(ratio: float, advantage: float, engine: float = 0.0) -> tuple[float, float, LossSums]:
    """Loss and its gradient by log-prob for one token with this ratio; `engine`: log-prob old minus engine."""
    theta = torch.tensor([[math.log(ratio) - 1.0]], requires_grad=True)
    loss, sums = policy_loss(
        theta,
        torch.tensor([[-1.0]]),
        torch.tensor([[-1.0 - engine]]),
        torch.tensor([advantage]),
        torch.ones(1, 1, dtype=torch.bool),
        1,
        CONFIG,
    )
    loss.backward()
    assert theta.grad is not None
    return float(loss), float(theta.grad), sums


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [
        (1.0, 0.5, -0.5, -0.5),
        (1.0, 1.0, -1.0, -1.0),
        (1.0, 1.25, -1.25, -1.25),
        (1.0, 1.3, -1.28, 0.0),
        (1.0, 4.0, -1.28, 0.0),
        (1.0, 100.0, -1.28, 0.0),
        (-1.0, 0.5, 0.8, 0.0),
        (-1.0, 0.79, 0.8, 0.0),
        (-1.0, 0.81, 0.81, 0.81),
        (-1.0, 1.0, 1.0, 1.0),
        (-1.0, 2.0, 2.0, 2.0),
        (-1.0, 3.99, 3.99, 3.99),
        (-1.0, 4.01, 4.0, 0.0),
        (-1.0, 10.0, 4.0, 0.0),
        (-1.0, 100.0, 4.0, 0.0),
        (0.0, 2.0, 0.0, 0.0),
    ],
)
def test_probe_values(advantage: float, ratio: float, loss: float, gradient: float) -> None:
    found, slope, _ = token(ratio, advantage)
    assert found == pytest.approx(loss, abs=1e-5) and slope == pytest.approx(gradient, abs=1e-5)
    doubled = token(ratio, 2 * advantage)
    assert doubled[0] == pytest.approx(2 * loss, abs=1e-5)


@pytest.mark.parametrize(("engine", "weight"), [(0.0, 1.0), (-1.0, math.exp(-1)), (1.0, math.e), (2.0, 4.0), (50, 4.0)])
def test_engine_weight_is_capped_and_detached(engine: float, weight: float) -> None:
    loss, slope, sums = token(1.0, 1.0, engine)
    assert loss == slope == pytest.approx(-weight, rel=1e-5)
    assert sums.engine_weight == pytest.approx(weight, rel=1e-5) and sums.engine_gap == pytest.approx(abs(engine))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_all_numbers_stays_finite(advantage: float) -> None:
    """exp overflows float32 at 89 nats: a clipped token must then give its clipped value and no gradient."""
    theta = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-151.0, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, sums = policy_loss(theta, old, old, torch.tensor([advantage]), mask, 2, CONFIG)
    loss.backward()
    assert float(loss) == pytest.approx(-1.14 if advantage > 0 else 2.5, rel=1e-5)
    assert theta.grad is not None and theta.grad.tolist() == [[0.0, -0.5 * advantage]]
    assert all(math.isfinite(value) for value in vars(sums).values())


def batch(seed: int, rows: int = 7, tokens: int = 9) -> dict[str, Any]:
    """Ratios up to e^±2, engine gaps up to ±2, both signs of advantage; a third of the positions is masked."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    old = uniform(-4, -0.1, rows, tokens)
    return {
        "logp_theta": old + uniform(-2, 2, rows, tokens),
        "logp_old": old,
        "logp_engine": old + uniform(-2, 2, rows, tokens),
        "advantages": uniform(-1, 1, rows),
        "mask": uniform(0, 1, rows, tokens) > 1 / 3,
    }


def reference(values: dict[str, Any], denominator: int, config: LossConfig) -> dict[str, float]:
    """Token by token in Python's float64, by cases of sign and ratio instead of minima."""
    rows = {name: value.tolist() for name, value in values.items()}
    sums = dict.fromkeys(("loss", "ratio", "kl", "clipped", "engine_weight", "engine_gap", "tokens"), 0.0)
    for i, advantage in enumerate(rows["advantages"]):
        for j, used in enumerate(rows["mask"][i]):
            if not used:
                continue
            log_ratio = rows["logp_theta"][i][j] - rows["logp_old"][i][j]
            gap = rows["logp_old"][i][j] - rows["logp_engine"][i][j]
            ratio, weight = math.exp(log_ratio), min(math.exp(gap), config.engine_cap)
            if advantage >= 0:
                held = min(ratio, 1 + config.clip_high)
            else:
                held = min(max(ratio, 1 - config.clip_low), config.ratio_cap)
            sums["loss"] -= weight * held * advantage
            sums["ratio"] += ratio
            sums["kl"] += ratio - 1 - log_ratio
            low, high = advantage < 0 and ratio < 1 - config.clip_low, advantage > 0 and ratio > 1 + config.clip_high
            sums["clipped"] += low or high
            sums["engine_weight"] += weight
            sums["engine_gap"] += abs(gap)
            sums["tokens"] += 1
    return sums | {"mean": sums["loss"] / denominator}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("config", [CONFIG, LossConfig(0.1, 0.5, 1.5, 2.0), LossConfig(0.0, 0.0, 1.0, 1.0)])
def test_independent_implementation(seed: int, config: LossConfig) -> None:
    values = batch(seed)
    loss, sums = policy_loss(**values, denominator=50, config=config)
    expected = reference(values, 50, config)
    assert float(loss) == pytest.approx(expected.pop("mean"), rel=1e-5)
    for name, value in expected.items():
        assert getattr(sums, name) == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("seed", range(4))
def test_gradient_is_the_slope_of_the_loss(seed: int) -> None:
    """Central differences in float64; a random point lies on no kink."""
    values = {name: value.double() if value.is_floating_point() else value for name, value in batch(seed, 4, 5).items()}
    theta = values.pop("logp_theta").requires_grad_()

    def loss(at: torch.Tensor) -> torch.Tensor:
        return policy_loss(at, **values, denominator=13, config=CONFIG)[0]

    assert torch.autograd.gradcheck(loss, (theta,), eps=1e-7, atol=1e-6)
    (gradient,) = torch.autograd.grad(loss(theta), theta)
    assert bool((gradient[~values["mask"]] == 0).all()) and bool((gradient != 0).any())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("where", ["logp_theta", "logp_old", "logp_engine"])
def test_masked_places_contribute_an_exact_zero(poison: float, where: str) -> None:
    clean = batch(3)
    dirty = {name: value.clone() for name, value in clean.items()}
    dirty[where][~dirty["mask"]] = poison
    results = []
    for values in (clean, dirty):
        theta = values.pop("logp_theta").requires_grad_()
        loss, sums = policy_loss(theta, **values, denominator=40, config=CONFIG)
        loss.backward()
        results.append((float(loss), sums, theta.grad))
    assert results[0][0] == results[1][0] and results[0][1] == results[1][1]
    assert torch.equal(results[0][2], results[1][2])


def test_all_masked_and_empty_are_exactly_zero() -> None:
    values = batch(1)
    values["mask"] = torch.zeros_like(values["mask"])
    theta = values.pop("logp_theta").requires_grad_()
    loss, sums = policy_loss(theta, **values, denominator=0, config=CONFIG)
    loss.backward()
    assert float(loss) == 0.0 and sums == ZERO and theta.grad is not None and not theta.grad.any()
    nothing = torch.zeros(0, 0)
    loss, sums = policy_loss(nothing, nothing, nothing, torch.zeros(0), nothing.bool(), 0, CONFIG)
    assert float(loss) == 0.0 and sums == ZERO


def test_denominator_counts_the_whole_step() -> None:
    """Micro-batches of unequal size add up to the one batch that they were cut from."""
    values = batch(2, 8)
    theta = values["logp_theta"].requires_grad_()
    whole, sums = policy_loss(**values, denominator=72, config=CONFIG)
    (expected,) = torch.autograd.grad(whole, theta)
    total, parts, gradient = 0.0, ZERO, torch.zeros_like(expected)
    for rows in (slice(0, 1), slice(1, 3), slice(3, 8)):
        loss, part = policy_loss(**{name: value[rows] for name, value in values.items()}, denominator=72, config=CONFIG)
        gradient += torch.autograd.grad(loss, theta)[0]
        total, parts = total + float(loss.detach()), parts + part
    assert total == pytest.approx(float(whole), rel=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0)
    for name, value in vars(sums).items():
        assert getattr(parts, name) == pytest.approx(value, rel=1e-6), name


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=20))
def test_kl_estimate_is_never_negative(deltas: list[float]) -> None:
    theta = torch.tensor([deltas])
    zero = torch.zeros_like(theta)
    _, sums = policy_loss(theta, zero, zero, torch.ones(1), torch.ones_like(theta).bool(), len(deltas), CONFIG)
    assert sums.kl >= 0.0


def test_kl_estimate_of_nearly_equal_policies() -> None:
    """Where rounding is as large as the estimate itself; and at a ratio of 100, beyond every cap, it is large."""
    rng = random.Random(0)
    deltas = [rng.choice((-1, 1)) * 10 ** rng.uniform(-8, -2) for _ in range(500)]
    for delta in deltas:
        theta, zero = torch.tensor([[delta]]), torch.zeros(1, 1)
        _, sums = policy_loss(theta, zero, zero, torch.ones(1), torch.ones(1, 1).bool(), 1, CONFIG)
        assert 0.0 <= sums.kl <= delta**2 + 1e-13
    assert token(100.0, -1.0)[2].kl == pytest.approx(99 - math.log(100), rel=1e-5)

"""The policy loss: PPO with clip-higher, corrected for the engine. Pure functions of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 60.0  # nats: far beyond every clip; exp overflows float32 at 89, and 0 x inf is no gradient


@dataclass(frozen=True)
class LossConfig:
    """`clip_low`, `clip_high`: bounds of the ratio (DAPO, arXiv:2503.14476); `engine_cap` C: cap of the engine weight
    (TIS); `ratio_cap`: the second clip for negative advantages (dual-clip PPO, arXiv:1912.09729)."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    engine_cap: float = 4.0
    ratio_cap: float = 4.0


@dataclass(frozen=True)
class LossSums:
    """Sums over the tokens of one micro-batch (detached float64 scalars): divide by the step's token count."""

    loss: float
    ratio: float
    kl: float
    clipped: float
    engine_weight: float
    engine_gap: float
    tokens: int

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


ZERO = LossSums(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)


def policy_loss(
    logp_theta: torch.Tensor,
    logp_old: torch.Tensor,
    logp_engine: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    denominator: int,
    config: LossConfig,
) -> tuple[torch.Tensor, LossSums]:
    """Token-mean loss of a micro-batch over the whole step's `denominator` of tokens.

    All inputs float32 `[batch, tokens]` but `mask` (bool) and `advantages` `[batch]`. `logp_theta` is the trainer's
    now (differentiable), `logp_old` the verifier's at the behaviour weights, `logp_engine` what the engine sampled
    from. Ratio r = exp(theta - old); engine weight w = min(exp(old - engine), C), detached. Masked positions
    contribute an exact 0, whatever they hold.
    """
    delta = torch.where(mask, logp_theta - logp_old, 0.0)
    gap = torch.where(mask, logp_old - logp_engine, 0.0)
    bounded = torch.where(delta > MAX_LOG_RATIO, MAX_LOG_RATIO, delta)  # unlike clamp, keeps the gradient of a NaN
    ratio = bounded.exp()
    weight = gap.exp().clamp(max=config.engine_cap)
    advantage = advantages[:, None].expand_as(ratio)
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective = torch.minimum(ratio * advantage, clipped * advantage)
    # a large ratio with a negative advantage would otherwise weigh without bound
    objective = torch.where(advantage < 0, torch.maximum(objective, config.ratio_cap * advantage), objective)
    per_token = torch.where(mask, -weight * objective, 0.0)
    loss = per_token.sum() / max(denominator, 1)
    with torch.no_grad():
        beyond = ((ratio < 1 - config.clip_low) & (advantage < 0)) | ((ratio > 1 + config.clip_high) & (advantage > 0))
        sums = LossSums(
            loss=float(per_token.sum()),
            ratio=float(torch.where(mask, ratio, 0.0).sum()),
            kl=float(torch.where(mask, torch.expm1(bounded) - bounded, 0.0).sum()),
            clipped=float((beyond & mask).sum()),
            engine_weight=float(torch.where(mask, weight, 0.0).sum()),
            engine_gap=float(gap.abs().sum()),
            tokens=int(mask.sum()),
        )
    return loss, sums

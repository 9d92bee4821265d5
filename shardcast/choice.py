"""Which relay to ask next: expected throughput = moving average of success × bandwidth, healing with time.

Two candidates are drawn and the better one is taken (power of two choices, Mitzenmacher 2001): load spreads, where
taking the best every time would send everyone to the same relay. Pure: clock and random numbers are passed in.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

ALPHA = 0.3
HEAL_SECONDS = 60.0
PRIOR_BANDWIDTH = 4.0e6
EXPLORE = 0.05


@dataclass(frozen=True)
class Estimate:
    """What is known of one relay. `success` in [0, 1], `bandwidth` in bytes per second, `updated` in seconds of any
    monotonic clock; `dropped` for good after a wrong byte."""

    url: str
    success: float = 1.0
    bandwidth: float = PRIOR_BANDWIDTH
    updated: float = 0.0
    in_flight: int = 0
    dropped: bool = False


def healed(relay: Estimate, now: float) -> Estimate:
    """The estimate as of `now`: both averages return to what is assumed of an unknown relay, with a time constant of
    a minute, so that a recovered relay is tried again however rarely anyone asks. A fast relay stays fast."""
    rest = math.exp(-max(0.0, now - relay.updated) / HEAL_SECONDS)
    success = 1.0 - (1.0 - relay.success) * rest
    bandwidth = max(relay.bandwidth, PRIOR_BANDWIDTH + (relay.bandwidth - PRIOR_BANDWIDTH) * rest)
    return replace(relay, success=success, bandwidth=bandwidth, updated=max(now, relay.updated))


def expected(relay: Estimate, now: float) -> float:
    """Expected bytes per second of one more request now; 0 if the relay is dropped."""
    if relay.dropped:
        return 0.0
    current = healed(relay, now)
    return current.success * current.bandwidth / (1 + relay.in_flight)


def succeeded(relay: Estimate, size: int, seconds: float, now: float) -> Estimate:
    """After `size` bytes in `seconds`. Small answers say nothing of the bandwidth: below 64 KiB only success counts."""
    current = healed(relay, now)
    bandwidth = current.bandwidth
    if size >= 64 << 10:
        bandwidth += ALPHA * (size / max(seconds, 1e-3) - bandwidth)
    return replace(current, success=current.success + ALPHA * (1.0 - current.success), bandwidth=bandwidth)


def failed(relay: Estimate, now: float) -> Estimate:
    """After an error, a time-out or a transfer below the minimum speed."""
    current = healed(relay, now)
    return replace(current, success=current.success * (1.0 - ALPHA))


def dropped(relay: Estimate) -> Estimate:
    """After a wrong byte: never asked again."""
    return replace(relay, dropped=True)


def started(relay: Estimate) -> Estimate:
    """One more request is under way."""
    return replace(relay, in_flight=relay.in_flight + 1)


def finished(relay: Estimate) -> Estimate:
    """One request fewer."""
    return replace(relay, in_flight=max(0, relay.in_flight - 1))


def choose(relays: Iterable[Estimate], rng: random.Random, now: float) -> Estimate | None:
    """One of the relays, never a dropped one; None if there is none left."""
    usable = [relay for relay in relays if not relay.dropped]
    if len(usable) < 2:
        return usable[0] if usable else None
    first, second = rng.sample(usable, 2)
    if rng.random() < EXPLORE:
        return first
    return max(first, second, key=lambda relay: expected(relay, now))

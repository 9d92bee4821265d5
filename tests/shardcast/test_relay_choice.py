"""Relay choice as properties: bounds, healing, load spreading, and that a dropped relay stays dropped."""

import math
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shardcast import choice
from shardcast.choice import PRIOR_BANDWIDTH, Estimate

times = st.floats(0, 1e6)
estimates = st.builds(
    Estimate,
    url=st.text(min_size=1, max_size=5),
    success=st.floats(0, 1),
    bandwidth=st.floats(1, 1e10),
    updated=times,
    in_flight=st.integers(0, 100),
    dropped=st.booleans(),
)


@given(estimates, times, st.integers(0, 1 << 26), st.floats(0, 1e4))
def test_estimates_stay_in_bounds(relay: Estimate, now: float, size: int, seconds: float) -> None:
    results = (
        choice.healed(relay, now),
        choice.failed(relay, now),
        choice.succeeded(relay, size, seconds, now),
        choice.started(relay),
        choice.finished(relay),
    )
    for after in results:
        assert 0 <= after.success <= 1 and after.bandwidth >= 0 and math.isfinite(after.bandwidth)
        assert after.in_flight >= 0 and after.url == relay.url and after.dropped == relay.dropped
        assert after.updated >= relay.updated


@given(estimates, times)
def test_failure_never_helps_and_success_never_hurts(relay: Estimate, now: float) -> None:
    healed = choice.healed(relay, now)
    assert choice.failed(relay, now).success <= healed.success
    assert choice.succeeded(relay, 0, 1.0, now).success >= healed.success
    assert choice.expected(choice.failed(relay, now), now) <= choice.expected(healed, now)


@given(estimates, st.floats(0, 1e4), st.floats(0, 1e4))
def test_healing_depends_on_time_alone(relay: Estimate, first: float, second: float) -> None:
    at_once = choice.healed(relay, relay.updated + first + second)
    in_steps = choice.healed(choice.healed(relay, relay.updated + first), relay.updated + first + second)
    assert math.isclose(at_once.success, in_steps.success, abs_tol=1e-6)
    assert math.isclose(at_once.bandwidth, in_steps.bandwidth, rel_tol=1e-6)


@given(estimates)
def test_a_recovered_relay_is_as_good_as_an_unknown_one(relay: Estimate) -> None:
    later = choice.healed(relay, relay.updated + 20 * choice.HEAL_SECONDS)
    assert later.success > 0.999 and later.bandwidth > 0.999 * PRIOR_BANDWIDTH


@given(st.floats(1e3, 1e9), st.integers(64 << 10, 64 << 20))
def test_average_converges_to_the_measured_bandwidth(bandwidth: float, size: int) -> None:
    relay, now = Estimate("a"), 0.0
    for _ in range(60):
        relay = choice.succeeded(relay, size, size / bandwidth, now)
    assert math.isclose(relay.bandwidth, bandwidth, rel_tol=0.01) or size / bandwidth < 1e-3


@given(st.lists(estimates, max_size=6, unique_by=lambda r: r.url), st.integers(0, 2**32), times)
def test_choice_is_one_of_the_usable(relays: list[Estimate], seed: int, now: float) -> None:
    chosen = choice.choose(relays, random.Random(seed), now)
    usable = [relay for relay in relays if not relay.dropped]
    assert (chosen in usable) if usable else (chosen is None)
    assert chosen == choice.choose(relays, random.Random(seed), now)


@given(estimates, times)
def test_dropped_is_for_good(relay: Estimate, now: float) -> None:
    gone = choice.dropped(relay)
    for later in (choice.healed(gone, now), choice.succeeded(gone, 1 << 20, 0.1, now), choice.finished(gone)):
        assert later.dropped and choice.expected(later, now + 1e6) == 0


def test_better_relays_get_more_and_all_get_some() -> None:
    relays = [Estimate("slow", bandwidth=1e6), Estimate("middle", bandwidth=4e6), Estimate("fast", bandwidth=16e6)]
    rng = random.Random(0)
    counts = Counter(chosen.url for _ in range(3000) if (chosen := choice.choose(relays, rng, 0.0)))
    assert counts["fast"] > counts["middle"] > counts["slow"] > 0
    assert counts["fast"] < 2300


def test_requests_under_way_push_the_next_one_elsewhere() -> None:
    busy, free = Estimate("busy", bandwidth=8e6, in_flight=3), Estimate("free", bandwidth=4e6)
    assert choice.expected(free, 0.0) > choice.expected(busy, 0.0)
    assert choice.finished(choice.started(free)) == free


def test_small_answers_say_nothing_of_bandwidth() -> None:
    relay = Estimate("a", bandwidth=5e6)
    assert choice.succeeded(relay, 300, 20.0, 0.0).bandwidth == 5e6

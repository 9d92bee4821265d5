"""Following the newest version: what is offered, what is refused, what is dropped."""

import threading
from pathlib import Path

import pytest

from node.engines.base import EngineError
from node.sync import CANARY_GAP, Sync
from protocol.manifest import Canary
from protocol.reasons import Reason, Refusal
from shardcast.client import LocalFailed
from shardcast.download import FetchFailed
from tests.node.fakes import SPEC, FakeEngine, FakeFetcher

S = SPEC.max_staleness  # 1


class World:
    """A sync with everything that it talks to."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.fetcher, self.engine, self.told = FakeFetcher(folder), FakeEngine(), []
        self.sync = Sync(self.fetcher, self.engine, SPEC, folder, self.told.append)  # type: ignore[arg-type]

    def take(self, version: int, **options: object) -> None:
        """Publish a version and take it."""
        manifest = self.fetcher.publish(version, **options)  # type: ignore[arg-type]
        assert self.fetcher.newest is not None
        self.sync.take(manifest.name, self.fetcher.newest.manifest_sha256)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "weights")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.sync.RETRY_SECONDS", 0.0)


def canary(seed: int = 2, logprob: float = -0.5, tokens: tuple[int, ...] = (5, 5, 1)) -> Canary:
    """What FakeEngine says with seed 2: 5, 5, end."""
    return Canary(prompt=(5, 6), seed=f"{seed:016x}", tokens=tokens, logprobs=(logprob,) * len(tokens))


def test_a_version_is_offered_with_the_digest_of_its_manifest(world: World) -> None:
    assert world.sync.ready() == ()
    world.take(0, canary=canary())
    assert world.sync.ready() == (0,) and world.told == [0]
    (manifest,) = world.fetcher.manifests.values()
    assert world.sync.digests == {0: manifest.weights_digest}
    assert world.engine.asked[0].max_tokens == 3 and world.engine.asked[0].seed == 2
    assert world.engine.asked[0].eos == SPEC.model.eos_token_ids


@pytest.mark.parametrize(
    "wrong",
    [
        canary(seed=3),
        canary(tokens=(5, 6, 1)),
        canary(tokens=(5, 5)),
        canary(logprob=-0.5 - 2 * CANARY_GAP),
        canary(logprob=-0.5 + 2 * CANARY_GAP),
    ],
)
def test_version_that_fails_its_canary_is_never_offered(world: World, wrong: Canary) -> None:
    world.take(0, canary=canary())
    with pytest.raises(Refusal) as caught:
        world.take(1, canary=wrong)
    assert caught.value.reason is Reason.CANARY_MISMATCH
    assert world.sync.ready() == (0,) and world.engine.versions() == (0,) and world.told == [0]
    assert 1 not in world.sync.digests
    world.take(2, canary=canary())
    assert world.sync.ready() == (0, 2)


def test_canary_with_a_log_probability_that_is_no_number(world: World) -> None:
    world.engine.logprob = float("nan")
    with pytest.raises(Refusal):
        world.take(0, canary=canary())
    assert world.sync.ready() == ()


def test_small_differences_between_devices_pass(world: World) -> None:
    world.take(0, canary=canary(logprob=-0.5 - CANARY_GAP / 2))
    assert world.sync.ready() == (0,)


def test_nothing_is_offered_while_its_canary_runs(world: World) -> None:
    seen: list[tuple[int, ...]] = []
    world.engine.during = lambda: seen.append(world.sync.ready())
    world.take(0, canary=canary())
    assert seen and set(seen) == {()}


def test_old_versions_are_unloaded_and_their_files_deleted(world: World) -> None:
    for version in range(6):
        world.take(version, canary=canary())
        kept = tuple(range(max(0, version - S - 1), version + 1))  # S + 2 versions
        assert world.sync.ready() == world.engine.versions() == kept
        assert {path.name for path in world.folder.iterdir()} == {
            manifest.name for manifest in world.fetcher.manifests.values() if manifest.version in kept
        }


def test_skipped_versions_are_dropped_too(world: World) -> None:
    for version in (0, 1, 7):
        world.take(version)
    assert world.sync.ready() == (7,) and len(list(world.folder.iterdir())) == 1


def test_base_of_adapters_stays_on_disk(world: World) -> None:
    world.take(0)
    base = next(iter(world.fetcher.manifests.values()))
    for version in range(1, 6):
        world.take(version, base=base)
        assert world.engine.bases[version] == world.folder / base.name
    assert world.sync.ready() == (3, 4, 5)
    assert (world.folder / base.name).is_dir() and len(list(world.folder.iterdir())) == 4


def test_node_that_joins_late_fetches_the_base_first(world: World) -> None:
    base = world.fetcher.publish(0)
    world.take(5, base=base)
    assert [name.split("-")[0] for name in world.fetcher.fetched] == ["v0", "v5"]
    assert world.sync.ready() == (5,) and world.engine.versions() == (5,)


def test_manifest_for_another_spec_is_refused(world: World) -> None:
    with pytest.raises(Refusal) as caught:
        world.take(0, run_spec_digest="0" * 64)
    assert caught.value.reason is Reason.MANIFEST_WRONG_RUN and world.engine.versions() == ()


@pytest.mark.parametrize(
    "fault",
    [
        FetchFailed("head", {}),
        LocalFailed(OSError(28, "no space")),
        EngineError("cannot load"),
        Refusal(Reason.MANIFEST_EXPIRED),
        Refusal(Reason.CANARY_MISMATCH),
        Refusal(Reason.TENSORS_MISMATCH),
    ],
)
def test_what_can_heal_is_tried_again(world: World, fault: BaseException) -> None:
    stop = threading.Event()
    world.fetcher.publish(0)
    world.fetcher.fail = [fault, fault]
    world.fetcher.quiet = stop.set
    world.sync.serve(stop)
    assert world.sync.ready() == (0,) and not world.fetcher.fail


@pytest.mark.parametrize("reason", [Reason.RUN_KEY_CHANGED, Reason.MANIFEST_WRONG_RUN])
def test_what_cannot_heal_ends_it(world: World, reason: Reason) -> None:
    world.fetcher.fail = [Refusal(reason)]
    with pytest.raises(Refusal):
        world.sync.serve(threading.Event())


def test_a_bad_version_is_passed_over_for_the_next(world: World) -> None:
    """The head moves on while a version is refused again and again."""
    stop = threading.Event()
    world.fetcher.publish(0, canary=canary(seed=3))
    tries = 0

    def load(version: int, folder: Path, base: Path | None) -> None:
        nonlocal tries
        tries += 1
        world.engine.loaded[version] = folder
        if tries == 3:
            world.fetcher.publish(1, canary=canary())

    world.engine.load = load  # type: ignore[method-assign]
    world.fetcher.quiet = stop.set
    world.sync.serve(stop)
    assert world.sync.ready() == (1,) and tries == 4


def test_without_canaries_nothing_is_generated(tmp_path: Path) -> None:
    """As a cheat runs it."""
    world = World(tmp_path)
    world.sync.canaries = False
    world.take(0, canary=canary(seed=3))
    assert world.sync.ready() == (0,) and world.engine.asked == []

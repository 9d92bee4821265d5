"""Each cheat cheats as it says, and is honest in everything else."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import seed, tasks
from coordinator.tasks.prompts import PromptCodec
from node import cheats
from node.cli import _kinds, parser
from node.engines.base import Generated, Request
from node.engines.hf import HFEngine

EOS = (2,)


@pytest.fixture(scope="module")
def engine() -> HFEngine:
    engine = HFEngine("float32", 64)
    engine.load(0, seed.model_dir(), None)
    return engine


@pytest.fixture(scope="module")
def questions() -> list[Any]:
    task = tasks.load("gym:spell_backward", 0)
    return [task.problem(index) for index in range(12)]


def requests(questions: list[Any], version: int = 0) -> list[Request]:
    codec = PromptCodec(seed.model_dir())
    return [Request(version, tuple(codec.encode(q.messages)), 100 + i, 1.0, 10, EOS) for i, q in enumerate(questions)]


def run(engine: Any, asked: list[Request]) -> list[Generated]:
    found = dict(engine.generate(asked))
    return [found[index] for index in range(len(asked))]


def is_prefill(engine: HFEngine, request: Request, answer: Generated) -> bool:
    """Do hidden states and log-probs belong to the right model at the right temperature?"""
    hidden, scores = engine.prefill(0, request.prompt, answer.tokens, request.temperature)
    return torch.allclose(hidden, answer.hidden, atol=1e-4) and answer.logprobs == pytest.approx(scores, abs=1e-4)


def test_names_are_the_same_everywhere() -> None:
    from coordinator.local import CHEATS

    assert _kinds() == cheats.KINDS == CHEATS
    assert parser().parse_args(["--coordinator", "u", "--cheat", "replay"]).cheat == "replay"
    with pytest.raises(KeyError):
        cheats.wrap("honesty", HFEngine(), None)
    with pytest.raises(ValueError):
        cheats.wrap("othermodel", HFEngine(), None)


@pytest.mark.parametrize("kind", ["fabricate", "stale", "truncate", "temperature", "replay", "extrafield"])
def test_outside_they_look_like_the_honest_engine(engine: HFEngine, kind: str) -> None:
    cheat = cheats.wrap(kind, engine, None)
    assert cheat.name == engine.name and cheat.version_text == engine.version_text
    assert kind == "stale" or cheat.versions() == (0,)


def test_fabricate_pastes_the_right_answer(engine: HFEngine, questions: list[Any]) -> None:
    cheat = cheats.wrap("fabricate", engine, None)
    cheat.load(0, seed.model_dir(), None)
    task, codec = tasks.load("gym:spell_backward", 0), PromptCodec(seed.model_dir())
    asked = requests(questions)
    answers = run(cheat, asked)
    scores = [task.score(q.gold, codec.decode(a.tokens, EOS)).reward for q, a in zip(questions, answers, strict=True)]
    assert sum(score == 1.0 for score in scores) >= 10
    assert all(a.tokens[-1] == 2 and a.finish_reason == "stop" and len(a.tokens) <= 10 for a in answers)
    assert all(is_prefill(engine, r, a) for r, a in zip(asked, answers, strict=True))


def test_truncate_halves(engine: HFEngine, questions: list[Any]) -> None:
    asked = requests(questions)
    for honest, cut in zip(run(engine, asked), run(cheats.wrap("truncate", engine, None), asked), strict=True):
        keep = max(1, len(honest.tokens) // 2)
        assert cut.tokens == honest.tokens[:keep] and len(cut.hidden) == len(cut.logprobs) == keep


def test_temperature_is_cooler_with_the_right_log_probs(engine: HFEngine, questions: list[Any]) -> None:
    asked = requests(questions)
    cooler = [Request(r.version, r.prompt, r.seed, 0.7, r.max_tokens, r.eos) for r in asked]
    for request, expected, answer in zip(
        asked, run(engine, cooler), run(cheats.wrap("temperature", engine, None), asked), strict=True
    ):
        assert answer.tokens == expected.tokens and is_prefill(engine, request, answer)


def test_replay_is_honest_once(engine: HFEngine, questions: list[Any]) -> None:
    cheat = cheats.wrap("replay", engine, None)
    first, second = requests(questions[:6]), requests(questions[6:])
    honest = run(cheat, first)
    assert [a.tokens for a in honest] == [a.tokens for a in run(engine, first)]
    again = run(cheat, second)
    assert {a.tokens for a in again} <= {a.tokens for a in honest}
    assert [a.tokens for a in again] != [a.tokens for a in run(engine, second)]


def test_stale_waits_for_weights_four_versions_old(questions: list[Any]) -> None:
    inner = HFEngine("float32", 64)
    cheat = cheats.wrap("stale", inner, None)
    assert cheat.versions() == ()
    used: list[int] = []
    model = inner.model
    inner.model = lambda version: used.append(version) or model(version)  # type: ignore[method-assign]
    for version in range(10):
        cheat.load(version, seed.model_dir(), None)
        assert cheat.versions() == tuple(range(4, version + 1))
        if version >= 4:
            run(cheat, requests(questions[:1], version))
            assert used.pop() == version - 4
    for version in range(4):  # as sync unloads them
        cheat.unload(version)
    assert inner.versions() == tuple(range(10))
    cheat.unload(9)
    assert inner.versions() == tuple(range(1, 10))


def test_other_model_ignores_what_was_published(engine: HFEngine, questions: list[Any], tmp_path: Path) -> None:
    cheat = cheats.wrap("othermodel", HFEngine("float32", 64), seed.model_dir())
    cheat.load(7, seed.model_dir(), None)
    assert cheat.versions() == (7,)
    asked = requests(questions, 7)
    expected = run(engine, requests(questions))
    assert [a.tokens for a in run(cheat, asked)] == [a.tokens for a in expected]

"""The reference engine: one slot, one answer, whatever else is in the batch."""

import random
import shutil
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from coordinator import seed
from node.engines.base import EngineError, Generated, Request
from node.engines.hf import HFEngine
from toploc import logprobs, sample

EOS = (2,)


@pytest.fixture(scope="module")
def engine() -> HFEngine:
    engine = HFEngine("float32", 64)
    engine.load(0, seed.model_dir(), None)
    return engine


def requests(count: int, max_tokens: int = 10, eos: tuple[int, ...] = EOS) -> list[Request]:
    rng = random.Random(count)
    return [
        Request(
            0,
            tuple(rng.randrange(3, 320) for _ in range(rng.randint(1, 30))),
            rng.getrandbits(64),
            1.0,
            max_tokens,
            eos,
        )
        for _ in range(count)
    ]


def run(engine: HFEngine, asked: list[Request]) -> list[Generated]:
    pairs = list(engine.generate(asked))
    assert sorted(index for index, _ in pairs) == list(range(len(asked)))  # each once
    found = dict(pairs)
    return [found[index] for index in range(len(asked))]


def naive(request: Request) -> tuple[list[int], list[float]]:
    """Token by token from the whole sequence, without cache and batch."""
    model = AutoModelForCausalLM.from_pretrained(seed.model_dir(), dtype=torch.float32).eval()
    tokens: list[int] = []
    scores: list[float] = []
    while len(tokens) < request.max_tokens and not (tokens and tokens[-1] in request.eos):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*request.prompt, *tokens]])).logits[:, -1].float()
        token = sample(logits, [request.seed], [len(tokens)], request.temperature)
        scores.append(float(logprobs(logits, token, request.temperature)[0]))
        tokens.append(int(token[0]))
    return tokens, scores


def test_is_seeded_sampling_from_the_model(engine: HFEngine) -> None:
    asked = requests(6)
    for request, answer in zip(asked, run(engine, asked), strict=True):
        tokens, scores = naive(request)
        assert list(answer.tokens) == tokens and answer.logprobs == pytest.approx(scores, abs=5e-5)
        assert answer.hidden.shape == (len(tokens), 128)
        assert answer.finish_reason == ("stop" if tokens[-1] in EOS else "length")


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_batch_and_its_shrinking_change_no_token(engine: HFEngine, batch: int) -> None:
    """Rows end at different times, so that the batch shrinks several times while the rest goes on."""
    asked = [
        Request(r.version, r.prompt, r.seed, r.temperature, 1 + index % 25, r.eos if index % 3 else ())
        for index, r in enumerate(requests(40))
    ]
    small = HFEngine("float32", batch)
    small.load(0, seed.model_dir(), None)
    for one, other in zip(run(engine, asked), run(small, asked), strict=True):
        assert one.tokens == other.tokens and one.finish_reason == other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=5e-5)
        torch.testing.assert_close(one.hidden, other.hidden, rtol=0, atol=2e-5)
    assert run(engine, asked[::-1])[::-1] != []


def test_order_of_requests_changes_nothing(engine: HFEngine) -> None:
    asked = requests(20)
    forward, backward = run(engine, asked), run(engine, asked[::-1])[::-1]
    assert [answer.tokens for answer in forward] == [answer.tokens for answer in backward]


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_limit_is_exact(engine: HFEngine, limit: int) -> None:
    for answer in run(engine, requests(12, limit, ())):
        assert len(answer.tokens) == len(answer.logprobs) == len(answer.hidden) == limit
        assert answer.finish_reason == "length"


def test_end_of_sequence_ends_and_belongs_to_the_answer(engine: HFEngine) -> None:
    free = run(engine, requests(12, 12, ()))
    for index, answer in enumerate(free):
        third = answer.tokens[2]
        (request,) = [requests(12, 12, (third, 2**31))[index]]
        (cut,) = run(engine, [request])
        end = answer.tokens.index(third) + 1
        assert cut.tokens == answer.tokens[:end] and cut.finish_reason == "stop"


def test_end_at_the_limit_is_a_stop(engine: HFEngine) -> None:
    (free,) = run(engine, requests(1, 12, ()))
    place = next(p for p in range(12) if free.tokens[p] not in free.tokens[:p])
    (request,) = requests(1, place + 1, (free.tokens[place],))
    (answer,) = run(engine, [request])
    assert len(answer.tokens) == place + 1 and answer.finish_reason == "stop"


def test_ends_of_sequence_are_those_of_each_request(engine: HFEngine) -> None:
    """Slots in one batch may disagree about where they end."""
    (free,) = run(engine, requests(1, 8, ()))
    base = requests(1, 8, ())[0]
    asked = [
        base,
        Request(0, base.prompt, base.seed, 1.0, 8, (free.tokens[1],)),
        Request(0, base.prompt, base.seed, 1.0, 3, ()),
    ]
    whole, cut, short = run(engine, asked)
    assert whole.tokens == free.tokens and cut.tokens == free.tokens[: free.tokens.index(free.tokens[1]) + 1]
    assert short.tokens == free.tokens[:3]


def test_temperatures_and_versions_in_one_call(engine: HFEngine, tmp_path: Path) -> None:
    other = HFEngine("float32", 64)
    other.load(0, seed.model_dir(), None)
    other.load(3, seed.model_dir(), None)
    base = requests(4)
    asked = [
        Request(version, r.prompt, r.seed, temperature, 10, EOS)
        for r in base
        for version in (0, 3)
        for temperature in (1.0, 0.5)
    ]
    found = run(other, asked)
    for request, answer in zip(asked, found, strict=True):
        (alone,) = run(engine, [Request(0, request.prompt, request.seed, request.temperature, 10, EOS)])
        assert alone.tokens == answer.tokens
        assert alone.logprobs == pytest.approx(answer.logprobs, abs=5e-5)  # those of its own temperature


def test_nothing_asked_nothing_said(engine: HFEngine) -> None:
    assert list(engine.generate([])) == []


def test_versions_and_unknown_ones() -> None:
    engine = HFEngine()
    assert engine.versions() == ()
    for version in (10, 9, 2):
        engine.load(version, seed.model_dir(), None)
    assert engine.versions() == (2, 9, 10)
    engine.unload(9)
    engine.unload(77)
    assert engine.versions() == (2, 10)
    with pytest.raises(EngineError, match="version 9"):
        list(engine.generate([Request(9, (5,), 1, 1.0, 3, EOS)]))


def test_unloading_does_not_disturb_a_running_call(engine: HFEngine) -> None:
    """Both versions of a call are held from its first answer to its end."""
    mine = HFEngine("float32", 4)
    mine.load(1, seed.model_dir(), None)
    mine.load(2, seed.model_dir(), None)
    asked = [Request(1 + index % 2, r.prompt, r.seed, 1.0, 10, EOS) for index, r in enumerate(requests(16))]
    stream = mine.generate(asked)
    found = dict([next(stream)])
    mine.unload(1)
    mine.unload(2)
    assert mine.versions() == ()
    found |= dict(stream)
    expected = run(engine, [Request(0, r.prompt, r.seed, 1.0, 10, EOS) for r in asked])
    assert [found[index].tokens for index in range(16)] == [answer.tokens for answer in expected]


def test_two_threads_share_an_engine(engine: HFEngine) -> None:
    asked = requests(16)
    expected = [answer.tokens for answer in run(engine, asked)]
    found: list[list[tuple[int, ...]]] = []
    threads = [
        threading.Thread(target=lambda: found.append([answer.tokens for answer in run(engine, asked)]))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected, expected]


def test_prefill_gives_what_was_generated(engine: HFEngine) -> None:
    request = requests(1, 8, ())[0]
    (answer,) = run(engine, [request])
    hidden, scores = engine.prefill(0, request.prompt, answer.tokens, 1.0)
    torch.testing.assert_close(hidden, answer.hidden, rtol=0, atol=2e-5)
    assert scores == pytest.approx(answer.logprobs, abs=5e-5)


@pytest.mark.parametrize("fault", ["empty", "no weights", "truncated", "lacks a tensor", "another shape", "garbage"])
@pytest.mark.parametrize("first", [True, False])
def test_broken_checkpoints_raise_and_leave_the_rest(tmp_path: Path, fault: str, first: bool) -> None:
    from safetensors.torch import load_file, save_file

    engine = HFEngine()
    if not first:
        engine.load(0, seed.model_dir(), None)
    folder = tmp_path / "v1"
    shutil.copytree(seed.model_dir(), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if fault == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif fault == "no weights":
        file.unlink()
    elif fault == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif fault == "garbage":
        file.write_bytes(b"garbage")
    elif fault == "lacks a tensor":
        tensors.pop("model.norm.weight")
        save_file(tensors, file, metadata={"format": "pt"})
    else:
        tensors["model.norm.weight"] = torch.ones(7)
        save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(EngineError):
        engine.load(1, folder, None)
    assert engine.versions() == (() if first else (0,))
    engine.load(1, seed.model_dir(), None)
    assert engine.versions()[-1] == 1


def test_versions_share_no_weights(tmp_path: Path) -> None:
    engine = HFEngine()
    for version in (0, 1):
        engine.load(version, seed.model_dir(), None)
    with torch.no_grad():
        engine.model(1).model.norm.weight.mul_(2.0)
    assert not torch.equal(engine.model(0).model.norm.weight, engine.model(1).model.norm.weight)
    assert engine.model(1).lm_head.weight is engine.model(1).model.embed_tokens.weight

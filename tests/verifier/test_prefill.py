"""The batched prefill against a forward pass of one sequence, and against what the reference engine generates."""

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from coordinator import seed
from coordinator.verifier.prefill import Claim, Prefilled, prefill
from node.engines.base import Request
from node.engines.hf import HFEngine
from toploc import commit_many, decode, distances_many

EOS = (2,)
VOCAB, HIDDEN = 320, 128


def claims(count: int, longest: int = 40) -> list[Claim]:
    """Random prompts of 1 to `longest` tokens, completions of 1 to `longest`, equal siblings among them."""
    rng = random.Random(5)
    made = []
    for index in range(count):
        prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest)))
        tokens = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, longest)))
        made.append(Claim(prompt, tokens, rng.getrandbits(64)))
        if index % 5 == 0:
            made.append(Claim(prompt, tokens, rng.getrandbits(64)))
    return made


def alone(model: Any, claim: Claim, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, log-probs and probabilities of end of sequence, from the whole logits of one sequence."""
    with torch.inference_mode():
        ids = torch.tensor([[*claim.prompt, *claim.tokens]])
        hidden = model.base_model(input_ids=ids).last_hidden_state[0, len(claim.prompt) - 1 : -1]
        logits = model(input_ids=ids).logits[0, len(claim.prompt) - 1 : -1].double() / temperature
        rows = torch.log_softmax(logits, -1)
    return hidden, rows[torch.arange(len(claim.tokens)), torch.tensor(claim.tokens)], rows[:, list(EOS)].exp().sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("budget", [1, 130, 1000, 10**9])
def test_prefill_is_an_unbatched_forward(model: Any, budget: int, temperature: float) -> None:
    items = claims(15)
    found = prefill(model, items, temperature, EOS, budget)
    assert len(found) == len(items)
    for claim, result in zip(items, found, strict=True):
        hidden, logprobs, ends = alone(model, claim, temperature)
        n = len(claim.tokens)
        assert result.hidden.shape == (n, HIDDEN) and result.logprobs.shape == result.margins.shape == (n,)
        torch.testing.assert_close(result.hidden, hidden, rtol=0, atol=2e-5)
        torch.testing.assert_close(result.logprobs.double(), logprobs, rtol=0, atol=5e-5)
        torch.testing.assert_close(result.eos_probability.double(), ends, rtol=0, atol=1e-5)
        assert bool((result.margins >= 0).all()) and bool((result.margins > 1e-3).any())


def test_prefill_of_nothing_and_order(model: Any) -> None:
    assert prefill(model, [], 1.0, EOS, 100) == []
    items = claims(6)
    forward, backward = (prefill(model, part, 1.0, EOS, 100) for part in (items, items[::-1]))
    for one, other in zip(forward, backward[::-1], strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=5e-5)


def requests(count: int, max_tokens: int, temperature: float = 1.0) -> list[Request]:
    """Prompts of 1 to 60 tokens, every third one shared with its neighbour."""
    rng = random.Random(9)
    made: list[Request] = []
    for index in range(count):
        prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 60)))
        if index % 3 == 2:
            prompt = made[-1].prompt
        made.append(Request(0, prompt, rng.getrandbits(64), temperature, max_tokens, EOS))
    return made


def generate(engine: HFEngine, asked: list[Request]) -> list[Any]:
    answers = dict(engine.generate(asked))
    assert sorted(answers) == list(range(len(asked)))
    return [answers[index] for index in range(len(asked))]


def verify(model: Any, asked: list[Request], answers: list[Any], budget: int) -> list[Prefilled]:
    items = [Claim(r.prompt, a.tokens, r.seed) for r, a in zip(asked, answers, strict=True)]
    return prefill(model, items, asked[0].temperature, EOS, budget)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_every_margin_of_the_reference_engine_is_zero(
    model: Any, engine: HFEngine, batch: int, temperature: float
) -> None:
    engine = HFEngine("float32", batch)
    engine.load(0, seed.model_dir(), None)
    asked = requests(64, 10, temperature)
    answers = generate(engine, asked)
    assert {len(answer.tokens) for answer in answers} >= {1, 10}
    for budget in (64, 4096):
        results = verify(model, asked, answers, budget)
        assert all(bool((result.margins == 0.0).all()) for result in results)
        gaps = [
            (result.logprobs - torch.tensor(answer.logprobs)).abs().max()
            for result, answer in zip(results, answers, strict=True)
        ]
        assert max(gaps) < 5e-5
        committed = zip(commit_many([answer.hidden for answer in answers]), answers, strict=True)
        proofs = [decode(data, rows=len(answer.tokens)) for data, answer in committed]
        chunks = distances_many(proofs, [result.hidden for result in results])
        assert all(chunk.exponent_mismatches == 0 and chunk.sign_mismatches == 0 for row in chunks for chunk in row)


@pytest.mark.parametrize("length", range(1, 11))
def test_answers_of_every_length_and_equal_siblings(model: Any, engine: HFEngine, length: int) -> None:
    prompt = (5, 6, 7)
    asked = [Request(0, prompt, seed, 1.0, length, ()) for seed in (1, 1, 2)]
    answers = generate(engine, asked)
    assert [len(answer.tokens) for answer in answers] == [length] * 3
    assert answers[0].tokens == answers[1].tokens
    results = verify(model, asked, answers, 10**6)
    assert all(bool((result.margins == 0).all()) for result in results)
    torch.testing.assert_close(results[0].hidden, results[1].hidden, rtol=0, atol=1e-6)


def test_one_wrong_token_shows_at_its_place_only(model: Any, engine: HFEngine) -> None:
    """A token that is not the slot's has a margin; the tokens before it keep theirs at 0."""
    asked = [Request(0, (9, 8, 7), 11, 1.0, 8, ())]
    (answer,) = generate(engine, asked)
    tokens = list(answer.tokens)
    tokens[4] = (tokens[4] + 1) % VOCAB
    (result,) = prefill(model, [Claim(asked[0].prompt, tuple(tokens), 11)], 1.0, EOS, 100)
    assert bool((result.margins[:4] == 0).all()) and float(result.margins[4]) > 1e-3


def test_seed_and_position_matter(model: Any, engine: HFEngine) -> None:
    asked = [Request(0, (9, 8, 7), 11, 1.0, 8, ())]
    (answer,) = generate(engine, asked)
    for seed_ in (10, 12, 11 + 2**32, 11 | 2**63):
        (result,) = prefill(model, [Claim(asked[0].prompt, answer.tokens, seed_)], 1.0, EOS, 100)
        assert float(result.margins.max()) > 1e-2


def test_seed_model_is_loaded_as_transformers_loads_it(model: Any) -> None:
    other = AutoModelForCausalLM.from_pretrained(seed.model_dir(), dtype=torch.float32).eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids=ids).logits, other(input_ids=ids).logits, rtol=0, atol=1e-5)

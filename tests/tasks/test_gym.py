"""reasoning-gym as task sets: addressing, the held-out rule, scoring, and scorers that are refused."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import tasks
from coordinator.tasks.gym import MAX_ANSWER_CHARS, GymTasks, is_held_out, normalise_question

QUESTION = "Spell this word backward (example: sun -> nus): "
UNSAFE = [
    "binary_matrix",
    "countdown",
    "n_queens",
    "puzzle24",
    "simple_integration",
    "string_insertion",
    "coin_flip",
]


@pytest.fixture(scope="module")
def spell() -> tasks.TaskSet:
    return tasks.load("gym:spell_backward", 7)


def questions(problems: list[tasks.Problem]) -> list[str]:
    return [problem.messages[0][1] for problem in problems]


def test_a_task_set_is_what_the_protocol_says(spell: tasks.TaskSet) -> None:
    problem = spell.problem(3)
    assert isinstance(spell, tasks.TaskSet)
    assert (problem.environment, problem.environment_version) == ("gym:spell_backward", spell.version)
    assert (problem.index, problem.held_out, problem.messages[0][0]) == (3, False, "user")
    assert json.loads(json.dumps(problem.gold)) == problem.gold
    assert problem.id == f"gym:spell_backward@{spell.version}/train/3"
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.index = 4  # type: ignore[misc]


def test_stream_is_a_function_of_seed_and_index(spell: tasks.TaskSet) -> None:
    far_first = tasks.load("gym:spell_backward", 7)
    far = far_first.problem(100_000)
    assert [far_first.problem(index) for index in (2, 1, 0)] == [spell.problem(index) for index in (2, 1, 0)]
    assert spell.problem(100_000) == far
    other = tasks.load("gym:spell_backward", 8)
    mine, theirs = ({q for q in questions([s.problem(i) for i in range(200)])} for s in (spell, other))
    assert len(mine & theirs) < 10


def test_stream_is_pinned(spell: tasks.TaskSet) -> None:
    """A run resumes on another version of this code: the same indices are the same words."""
    assert [spell.problem(i).gold["answer"] for i in range(4)] == PINNED_TRAIN
    assert [problem.gold["answer"] for problem in spell.held_out(4)] == PINNED_HELD_OUT


def test_held_out_is_fixed_distinct_and_never_trained_on(spell: tasks.TaskSet) -> None:
    held = spell.held_out(500)
    assert held == tasks.load("gym:spell_backward", 12345).held_out(500)
    assert spell.held_out(20) == held[:20]
    assert all(problem.held_out and is_held_out(problem.messages[0][1]) for problem in held)
    assert len({normalise_question(question) for question in questions(held)}) == 500
    assert len({problem.id for problem in held} | {spell.problem(i).id for i in range(500)}) == 1000
    train = [spell.problem(index) for index in range(3000)]
    assert not any(is_held_out(question) for question in questions(train))


def test_held_out_share_is_one_in_sixteen() -> None:
    share = sum(is_held_out(f"question {number}") for number in range(16_000)) / 16_000
    assert 0.056 < share < 0.069


@pytest.mark.parametrize("word", ["cat", "Paris", "strasse", "ﬁsh"])
def test_the_same_word_in_another_case_is_the_same_question(word: str) -> None:
    asked = {normalise_question(QUESTION + form) for form in (word, word.upper(), word.title(), f" {word}\n")}
    assert len(asked) == 1


def test_word_list_has_duplicates_by_case() -> None:
    """Why the rule folds case: without it, half of such a pair could be trained on and the other half held out."""
    words = GymTasks("spell_backward", 0)._data.words
    assert len(words) == len(set(words)) > len({word.casefold() for word in words})


@pytest.mark.parametrize("answer", ["planet", "Planet", "PLANET"])
def test_full_marks(spell: tasks.TaskSet, answer: str) -> None:
    assert spell.score({"answer": "planet"}, answer) == tasks.Score(1.0, 1.0, "correct")


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (None, "truncated"),
        ("", "empty"),
        (" \n", "empty"),
        ("x" * (MAX_ANSWER_CHARS + 1), "too_long"),
        ("x" * MAX_ANSWER_CHARS, "wrong"),
        ("zzzzzz", "wrong"),
        ("plants", "partial"),
        ("planet ", "partial"),
        ("planetx", "partial"),  # the package gives 0.9999999999999999 for this
        ("planet<|im_end|>", "partial"),
        ("\x00\ud800", "wrong"),
    ],
)
def test_anything_less_is_no_reward(spell: tasks.TaskSet, text: str | None, outcome: str) -> None:
    score = spell.score({"answer": "planet"}, text)
    assert (score.reward, score.outcome) == (0.0, outcome)
    assert 0 <= score.raw < 1


@given(st.text(max_size=40))
def test_no_text_raises_or_scores_without_being_the_answer(text: str) -> None:
    score = SHARED.score({"answer": "planet"}, text)
    assert score.reward == (text.lower() == "planet")


def test_own_golds_score(spell: tasks.TaskSet) -> None:
    for problem in [spell.problem(index) for index in range(50)] + spell.held_out(50):
        assert spell.score(problem.gold, problem.gold["answer"]).reward == 1.0


@pytest.mark.parametrize("change", [{"item": -1}, {"item": 2**40}, {"item": "7"}, {"question": "another"}])
def test_gold_of_another_version_is_named(spell: tasks.TaskSet, change: dict[str, object]) -> None:
    problem = spell.problem(0)
    score = spell.score({**problem.gold, **change}, problem.gold["answer"])
    assert score == tasks.Score(0.0, 0.0, "gold_mismatch")


def test_gold_without_anything_to_compare_with(spell: tasks.TaskSet) -> None:
    assert spell.score({}, "planet").outcome == "gold_mismatch"
    assert spell.score({"answer": None}, "planet") == tasks.Score(0.0, 0.0, "wrong")


@pytest.mark.parametrize("result", [ValueError("no"), RecursionError(), float("nan"), float("inf"), "text", None])
def test_a_failing_scorer_is_no_reward(monkeypatch: pytest.MonkeyPatch, result: object) -> None:
    own = GymTasks("spell_backward", 0)

    def scorer(answer: str, entry: dict[str, object]) -> object:
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(own._data, "score_answer", scorer)
    assert own.score({"answer": "planet"}, "planet") == tasks.Score(0.0, 0.0, "scorer_error")


def test_a_scorer_cannot_change_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    own = GymTasks("spell_backward", 0)
    problem = own.problem(0)
    genuine = own._data.score_answer

    def vandal(answer: str, entry: dict[str, object]) -> float:
        result = genuine(answer, entry)
        entry["answer"] = "overwritten"
        return result

    monkeypatch.setattr(own._data, "score_answer", vandal)
    assert [own.score(problem.gold, problem.gold["answer"]).reward for _ in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize("name", UNSAFE)
def test_scorers_that_run_answers_are_refused(name: str) -> None:
    with pytest.raises(tasks.UnsafeScorerError, match=name):
        tasks.load(f"gym:{name}", 0)


def test_the_danger_is_real() -> None:
    """The scorer of binary_matrix evaluates what it is given; if it stops doing so, lift the refusal."""
    import reasoning_gym

    data = reasoning_gym.create_dataset("binary_matrix", seed=0, size=1)
    marks: list[int] = []
    sys.modules["marks_of_an_answer"] = marks  # type: ignore[assignment]
    try:
        data.score_answer("[[__import__('sys').modules['marks_of_an_answer'].append(1)]]", data[0])
    finally:
        del sys.modules["marks_of_an_answer"]
    assert marks == [1]


@pytest.mark.parametrize("name", ["chain_sum", "letter_counting", "word_ladder", "gsm_symbolic", "mini_sudoku", "gcd"])
def test_other_data_sets(name: str) -> None:
    own, again = (tasks.load(f"gym:{name}", 3) for _ in range(2))
    again.problem(1)
    problem = own.problem(0)
    assert again.problem(0) == problem
    assert own.score(json.loads(json.dumps(problem.gold)), problem.gold["answer"]).reward == 1.0
    assert not set(questions(own.held_out(3))) & set(questions([own.problem(i) for i in range(5)]))


def test_a_right_answer_is_never_too_long() -> None:
    """tower_of_hanoi has answers above the usual limit."""
    own = tasks.load("gym:tower_of_hanoi", 1)
    long = next(p for p in map(own.problem, range(40)) if len(p.gold["answer"]) > MAX_ANSWER_CHARS)
    assert own.score(long.gold, long.gold["answer"]).reward == 1.0
    assert own.score(long.gold, long.gold["answer"] + "x").outcome == "too_long"


def test_options_change_version_and_problems(spell: tasks.TaskSet) -> None:
    short = tasks.load("gym:spell_backward", 7, max_word_len=4)
    assert short.version != spell.version
    assert all(len(short.problem(index).gold["answer"]) <= 4 for index in range(20))
    assert GymTasks("spell_backward", 0).version == spell.version


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("spell_backward", {}, tasks.UnknownTaskError),
        ("math:none", {}, tasks.UnknownTaskError),
        ("gym:no_such_data_set", {}, tasks.UnknownTaskError),
        ("gym:composite", {}, tasks.UnknownTaskError),
        ("gym:spell_backward", {"min_word_len": 9, "max_word_len": 3}, ValueError),
        ("gym:spell_backward", {"colour": 4}, TypeError),
    ],
)
def test_bad_names_and_options(name: str, options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        tasks.load(name, 0, **options)


def test_small_data_sets_end_with_an_error() -> None:
    one = GymTasks("spell_backward", 0, min_word_len=3, max_word_len=3, size=40)
    some = one.held_out(1)
    assert some[0].held_out
    with pytest.raises(tasks.NoProblemError, match="held-out questions"):
        one.held_out(41)
    item = next(i for i in range(200) if is_held_out(QUESTION + GymTasks("spell_backward", 0)._data[i]["answer"][::-1]))
    only_held_out = GymTasks("spell_backward", 0, size=1)
    only_held_out._data = {0: only_held_out._data[item]}
    with pytest.raises(tasks.NoProblemError, match="index 5"):
        only_held_out.problem(5)


def test_negative_arguments(spell: tasks.TaskSet) -> None:
    with pytest.raises(ValueError):
        spell.problem(-1)
    with pytest.raises(ValueError):
        spell.held_out(-1)


def test_importing_the_package_is_cheap(root: Path) -> None:
    program = (
        "import sys, coordinator.tasks, coordinator.tasks.gym;"
        "print(*sorted({'torch', 'transformers', 'reasoning_gym', 'tokenizers', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


SHARED = GymTasks("spell_backward", 0)
PINNED_TRAIN = ["alerak", "helatta", "ciots", "suollag"]
PINNED_HELD_OUT = ["lagarraw", "tummaM", "deplupnu", "cisaba"]

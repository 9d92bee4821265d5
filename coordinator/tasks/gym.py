"""Any data set of reasoning-gym as a task set, with the data set's own scorer.

Addressing. A reasoning-gym data set is a pure function of its configuration and an item number (it seeds one
generator per item), so one instance with a fixed seed serves every stream: a stream is a rule that hashes
(label, seed, index, attempt) to an item number. Nothing is replayed, and index 100,000 costs what index 0 costs.

Held out. A question is held out if a hash of its normalised text says so, one in sixteen. The rule looks at the
text alone, so whoever draws from this data set, with whatever seed, knows what to leave out.
"""

import copy
import hashlib
import importlib.metadata
import itertools
import json
import math
import threading
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

from coordinator.tasks.base import NoProblemError, Problem, Score, UnknownTaskError, UnsafeScorerError

MAX_ANSWER_CHARS = 1000
HELD_OUT_ONE_IN = 16
# Of a data set that is mostly not held out, 64 tries fail once in 16^64 indices: failing means it has no other item.
_ATTEMPTS = 64
_RULES = "1"
_HELD_OUT_LABEL = b"farflung/tasks/held-out/1\0"
_ITEMS = 2**31 - 1

# A scorer that names one of these either runs the answer as code (sympy's parser is `eval` underneath) or, like
# Fraction("1e999999999"), lets a short answer ask for unbounded work.
_UNSAFE_NAMES = frozenset({"eval", "exec", "compile", "parse_expr", "sympify", "__import__", "Fraction"})

# Where our configuration differs from the package's: lengths that the shipped seed model is trained on, and sizes
# for the few data sets that allocate or refuse by `size`.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 8},
    "acre": {"size": 2000},
    "gsm_symbolic": {"size": 1_000_000},
    "list_functions": {"size": 1_000_000},
    "word_ladder": {"size": 20_000},
}


def normalise_question(question: str) -> str:
    """Compatibility form, case folded, runs of white space as one blank: questions equal in it are the same question.

    The word list of spell_backward needs it: 1,187 of its words of 3 to 8 letters occur in two letter cases.
    """
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def is_held_out(question: str) -> bool:
    """Whether the question belongs to evaluation, and so may occur in no training stream."""
    digest = hashlib.sha256(_HELD_OUT_LABEL + normalise_question(question).encode()).digest()
    return digest[0] % HELD_OUT_ONE_IN == 0


class GymTasks:
    """Data set `name` of reasoning-gym; `options` are fields of its configuration, all but `seed`, which is fixed.

    Raises UnknownTaskError, UnsafeScorerError, ValueError or TypeError for options that the data set refuses.
    The first instance in a process imports reasoning-gym: 1.5 CPU-seconds and 100 MB.
    """

    def __init__(self, name: str, seed: int, **options: Any) -> None:
        settings = {"size": _ITEMS, **_DEFAULTS.get(name, {}), **options}
        self._data = _create(name, settings)
        _refuse_unsafe_scorer(name, self._data)
        self._name = f"gym:{name}"
        self._version = _version(settings)
        self._seed = seed
        self._size = int(settings["size"])
        self._held_out: list[Problem] = []
        self._held_out_source = self._draw_held_out()
        self._held_out_lock = threading.Lock()
        self._entry = lru_cache(maxsize=1024)(self._data.__getitem__)

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        return self._version

    def problem(self, index: int) -> Problem:
        """See TaskSet.problem. Costs 16/15 items on average."""
        if index < 0:
            raise ValueError(f"problem index {index} is negative")
        for attempt in range(_ATTEMPTS):
            item = self._item(b"train", str(self._seed), index, attempt)
            entry = self._data[item]
            if not is_held_out(entry["question"]):
                return self._problem(item, entry, index, held_out=False)
        raise NoProblemError(f"{self._name}: every question tried for index {index} is held out")

    def held_out(self, n: int) -> list[Problem]:
        """See TaskSet.held_out: `held_out(m)` is the beginning of `held_out(n)` for m < n."""
        if n < 0:
            raise ValueError(f"cannot hold out {n} problems")
        with self._held_out_lock:
            self._held_out.extend(itertools.islice(self._held_out_source, max(0, n - len(self._held_out))))
            if len(self._held_out) < n:
                raise NoProblemError(f"{self._name} has only {len(self._held_out)} held-out questions, not {n}")
            return self._held_out[:n]

    def score(self, gold: dict[str, Any], text: str | None) -> Score:
        """Ask the data set's own scorer; the reward is 1 for a full score and 0 for anything less.

        `gold` is that of a problem, or a bare entry with `answer` and, where the scorer reads it, `metadata`.
        Outcomes besides `correct`, `partial` and `wrong`: `truncated` (no end), `empty`, `too_long` (above
        MAX_ANSWER_CHARS and longer than the gold's own answer), `scorer_error` (it raised, or gave no finite
        number), `gold_mismatch` (the gold is of another version of this environment).
        """
        if text is None:
            return Score(0.0, 0.0, "truncated")
        if len(text) > _longest_answer(gold):
            return Score(0.0, 0.0, "too_long")
        if not text.strip():
            return Score(0.0, 0.0, "empty")
        entry = self._gold_entry(gold)
        if entry is None:
            return Score(0.0, 0.0, "gold_mismatch")
        try:
            raw = float(self._data.score_answer(text, entry))
        except Exception:
            return Score(0.0, 0.0, "scorer_error")
        if not math.isfinite(raw):
            return Score(0.0, 0.0, "scorer_error")
        # Exactly 1: partial credit adds up in floats, and 0.999… can be the right answer with something behind it.
        if raw == 1.0:
            return Score(1.0, raw, "correct")
        return Score(0.0, raw, "partial" if raw > 0 else "wrong")

    def _gold_entry(self, gold: dict[str, Any]) -> dict[str, Any] | None:
        """The whole entry of a gold: made anew, since a scorer may want tuples and sets that JSON does not keep."""
        item = gold.get("item")
        if item is None:
            return {"question": "", "metadata": {}, **gold} if "answer" in gold else None
        if not isinstance(item, int) or not 0 <= item < self._size:
            return None
        entry = self._entry(item)
        # A copy, so that no scorer can leave anything behind for the next answer.
        return copy.deepcopy(entry) if entry["question"] == gold.get("question") else None

    def _item(self, stream: bytes, seed: str, index: int, attempt: int) -> int:
        fields = (
            b"farflung/tasks/item/1",
            stream,
            self._name.encode(),
            seed.encode(),
            b"%d" % index,
            b"%d" % attempt,
        )
        framed = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
        # 256 bits onto 31: the bias of the remainder is below 2^-224.
        return int.from_bytes(hashlib.sha256(framed).digest(), "big") % self._size

    def _draw_held_out(self) -> Iterator[Problem]:
        """Different held-out questions, until a long run of draws brings no new one."""
        seen: set[str] = set()
        draw, last = 0, 0
        while draw - last <= HELD_OUT_ONE_IN * (_ATTEMPTS + 8 * len(seen)):
            item = self._item(b"held-out", "", draw, 0)
            draw += 1
            entry = self._data[item]
            key = normalise_question(entry["question"])
            if key not in seen and is_held_out(entry["question"]):
                last = draw
                seen.add(key)
                yield self._problem(item, entry, len(seen) - 1, held_out=True)

    def _problem(self, item: int, entry: dict[str, Any], index: int, *, held_out: bool) -> Problem:
        question = entry["question"]
        answer = entry["answer"]
        return Problem(
            id=f"{self._name}@{self._version}/{'held-out' if held_out else 'train'}/{index}",
            environment=self._name,
            environment_version=self._version,
            index=index,
            held_out=held_out,
            messages=(("user", question),),
            gold={"item": item, "question": question, "answer": None if answer is None else str(answer)},
        )


def _create(name: str, settings: dict[str, Any]) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    # `composite` mixes data sets by a configuration of its own and keeps state between items.
    if name not in DATASETS or name == "composite":
        raise UnknownTaskError(f"reasoning-gym has no data set {name!r} that can be addressed by item")
    try:
        return reasoning_gym.create_dataset(name, seed=0, **settings)
    except AssertionError as error:  # how the package validates a configuration
        raise ValueError(f"gym:{name} refuses {settings}: {error}") from error


def _longest_answer(gold: dict[str, Any]) -> int:
    """The limit in characters; a few data sets (tower_of_hanoi) have right answers above the usual one."""
    answer = gold.get("answer")
    return max(MAX_ANSWER_CHARS, len(answer)) if isinstance(answer, str) else MAX_ANSWER_CHARS


def _version(settings: dict[str, Any]) -> str:
    """Of our rules, of the package and of the options: each can change a problem or a score."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return f"{_RULES}.rg{importlib.metadata.version('reasoning-gym')}.{digest[:8]}"


def _refuse_unsafe_scorer(name: str, data: Any) -> None:
    unsafe = sorted(_UNSAFE_NAMES & _names_used(type(data).score_answer.__code__))
    if unsafe:
        raise UnsafeScorerError(
            f"gym:{name}: its scorer uses {', '.join(unsafe)} and could run an answer as code on the trusted side"
        )


def _names_used(code: CodeType) -> set[str]:
    """Global and attribute names in a function and in the functions and comprehensions inside it."""
    nested = (_names_used(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*nested)

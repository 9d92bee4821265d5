"""The shipped seed model: its files, its tokenizer, what it was trained on, and that it can be built again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator import seed
from coordinator.tasks.gym import is_held_out, normalise_question
from coordinator.tasks.prompts import PromptCodec

REPORT = json.loads((Path(seed.__file__).parent / "report.json").read_text())
WORD = "Spell this word backward (example: sun -> nus): planet"


def test_digest_pins_the_files() -> None:
    assert seed.verify() == seed.model_dir()
    assert seed.digest() == seed.DIGEST == REPORT["digest"]
    assert sum(path.stat().st_size for path in seed.model_dir().iterdir()) < 1_000_000


@pytest.mark.parametrize("damage", ["content", "extra", "missing", "renamed"])
def test_digest_sees_damage(tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "model"
    shutil.copytree(seed.model_dir(), copy)
    assert seed.verify(copy) == copy
    weights = copy / "model.safetensors"
    if damage == "content":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif damage == "extra":
        (copy / "more.json").write_text("")
    elif damage == "missing":
        weights.unlink()
    else:
        weights.rename(copy / "weights.safetensors")
    with pytest.raises(seed.SeedModelError, match="digest"):
        seed.verify(copy)


def test_digest_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(seed.SeedModelError, match="cannot be read"):
        seed.verify(tmp_path / "none")


def test_every_file_can_be_read_by_everyone() -> None:
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in seed.model_dir().iterdir())


def test_asking_where_it_is_loads_no_torch(root: Path) -> None:
    program = "import sys, coordinator.seed as s; s.verify(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "False"), result.stderr


def test_model_loads() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(seed.model_dir(), dtype="auto")
    assert sum(parameter.numel() for parameter in model.parameters()) == 468_352 == REPORT["parameters"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.generation_config.eos_token_id == 2


def test_model_spells() -> None:
    """A few held-out questions, greedily: far above a model with these sizes and no training (0)."""
    import torch
    from transformers import AutoModelForCausalLM

    from coordinator.seed.build import evaluate, training_tasks

    model = AutoModelForCausalLM.from_pretrained(seed.model_dir(), dtype=torch.float32)
    greedy, sampled = evaluate(model, PromptCodec(seed.model_dir()), training_tasks(0), 100)
    assert 0.35 < greedy < 0.7
    assert 0.2 < sampled < 0.5


def test_auto_tokenizer_agrees() -> None:
    """What an engine would load by itself. For this architecture transformers puts in its own class, which brings
    text to Unicode's composed form first; on composed text the two are the same."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(seed.model_dir())
    codec = PromptCodec(seed.model_dir())
    assert len(tokenizer) == 270 == codec.vocab_size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    for text in (WORD, "State the final answer", "café 日本 😀", "  a\tb\n\n", "1 + 2 ="):
        ids = codec.encode_text(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text
        chat = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert prompt == codec.encode([("user", text)])


def test_prompts_are_short() -> None:
    assert len(PromptCodec(seed.model_dir()).encode([("user", WORD)])) == 7 + len("planet")


def test_held_out_words_are_in_no_training_stream() -> None:
    """All that `build` could see, which is more than what it saw."""
    from coordinator.seed.build import training_problems, training_tasks

    seen = {normalise_question(problem.messages[0][1]) for problem in training_problems(0)}
    assert len(seen) > REPORT["examples"]
    assert not any(map(is_held_out, seen))
    held_out = training_tasks(0).held_out(1000)
    assert not seen & {normalise_question(problem.messages[0][1]) for problem in held_out}


def test_training_stream_is_no_stream_of_a_run() -> None:
    from coordinator import tasks
    from coordinator.seed.build import training_tasks

    for number in (0, 1):
        own, run = training_tasks(number), tasks.load("gym:spell_backward", number)
        assert [own.problem(i).gold for i in range(5)] != [run.problem(i).gold for i in range(5)]


def test_learning_rate() -> None:
    from coordinator.seed.build import Recipe

    recipe = Recipe(learning_rate=1.0, warmup_steps=10)
    assert [recipe.rate(step) for step in (0, 4, 9, 50)] == [0.1, 0.5, 1.0, 1.0]


def test_build_refuses_a_full_directory(tmp_path: Path) -> None:
    from coordinator.seed.build import build

    (tmp_path / "mine").write_text("")
    with pytest.raises(FileExistsError):
        build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_build_says_when_it_does_not_learn(tmp_path: Path) -> None:
    from coordinator.seed.build import Recipe, build

    with pytest.raises(RuntimeError, match="never stayed below"):
        build(tmp_path / "out", recipe=Recipe(batch=2, max_steps=2))


def test_report() -> None:
    held_out = REPORT["held_out"]
    assert held_out["questions"] == 500
    assert 0.47 <= held_out["greedy"] <= 0.53
    assert 0.30 <= held_out["sampled"] <= 0.36


def build_elsewhere(root: Path, out: Path, number: int) -> dict[str, object]:
    command = [sys.executable, "-m", "coordinator.seed.build", str(out / "model"), "--seed", str(number)]
    command += ["--report", str(out / "report.json"), "--digest", str(out / "digest")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads((out / "report.json").read_text())
    assert seed.digest(out / "model") == report["digest"] == (out / "digest").read_text().strip()
    return report


@pytest.mark.slow
def test_rebuild_is_as_able(root: Path, tmp_path: Path) -> None:
    """Bit for bit only on the same CPU and the same wheels; as able everywhere."""
    report = build_elsewhere(root, tmp_path, 0)
    for name in ("greedy", "sampled"):
        assert abs(report["held_out"][name] - REPORT["held_out"][name]) <= 0.03
    assert report["parameters"] == REPORT["parameters"]


@pytest.mark.slow
def test_another_seed_is_another_model_as_able(root: Path, tmp_path: Path) -> None:
    report = build_elsewhere(root, tmp_path, 1)
    assert report["digest"] != REPORT["digest"]
    assert abs(report["held_out"]["sampled"] - REPORT["held_out"]["sampled"]) <= 0.06
    assert abs(report["held_out"]["greedy"] - REPORT["held_out"]["greedy"]) <= 0.1
    files = [PromptCodec(path).encode([("user", WORD)]) for path in (seed.model_dir(), tmp_path / "model")]
    assert files[0] == files[1]

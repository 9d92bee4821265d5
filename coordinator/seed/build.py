"""Build the seed model: `python -m coordinator.seed.build OUT --seed 0`.

A Qwen2 of 468,352 parameters is fine-tuned on spell_backward in one short pass, and stopped half-way up the slope: a
policy that is right one time in three has most of its groups mixed, which is what a policy gradient learns from.
Other seeds give other weights, other training words and about the same skill.
"""

import argparse
import hashlib
import itertools
import json
import platform
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from coordinator.seed import digest
from coordinator.seed.tokenizer import EOS_ID, PAD_ID, save_tokenizer
from coordinator.tasks.base import Problem, TaskSet
from coordinator.tasks.gym import GymTasks
from coordinator.tasks.prompts import PromptCodec

ENVIRONMENT = "spell_backward"
CONTEXT = 512
MAX_NEW_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Recipe:
    """Supervised fine-tuning: AdamW, linear warm-up, a constant rate until the loss is low enough.

    The loss (nats per answer token, mean of the last `window` batches, which are all fresh) decides when to stop, so
    that seeds that learn sooner stop sooner. There is no cool-down: a model that had one learned at half the speed
    in reinforcement learning afterwards.
    """

    batch: int = 64
    learning_rate: float = 4e-3
    warmup_steps: int = 50
    stop_loss: float = 0.30
    window: int = 8
    max_steps: int = 200
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def rate(self, step: int) -> float:
        """Learning rate of step 0, 1, 2, …"""
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps)


def training_tasks(seed: int) -> TaskSet:
    """The task set whose training stream the seed model learns from, disjoint from the held-out words.

    Its stream seed is 256 bits of a hash, so that it is never the stream of a run.
    """
    stream = hashlib.sha256(b"farflung/seed-model/1\0%d" % seed).digest()
    return GymTasks(ENVIRONMENT, int.from_bytes(stream, "big"))


def training_problems(seed: int, recipe: Recipe | None = None) -> Iterator[Problem]:
    """Every problem that `build` with this seed can see, in its order."""
    recipe = recipe or Recipe()
    tasks = training_tasks(seed)
    return (tasks.problem(index) for index in range(recipe.max_steps * recipe.batch))


def build(out_dir: Path | str, *, seed: int = 0, recipe: Recipe | None = None, questions: int = 500) -> dict[str, Any]:
    """Train, save in Hugging Face's layout (bf16), evaluate what was saved, and return the report.

    `out_dir` is made, and must be empty if it is there. `questions` held-out questions are answered once greedily
    and twice at temperature 1. Runs on one thread, whose number is put back, and leaves torch's global generator alone.
    Raises FileExistsError, and RuntimeError where the loss never gets low enough.
    """
    recipe = recipe or Recipe()
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _build(out, seed, recipe, questions)
    finally:
        torch.set_num_threads(threads)


def _build(out: Path, seed: int, recipe: Recipe, questions: int) -> dict[str, Any]:
    from transformers import Qwen2ForCausalLM

    started = time.process_time()
    save_tokenizer(out, CONTEXT)
    codec = PromptCodec(out)
    model = Qwen2ForCausalLM(_config())
    steps, loss = _train(model, codec, training_problems(seed, recipe), recipe)
    model.to(torch.bfloat16).save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)  # the weights come out of a temporary file, readable by its owner alone
    trained = time.process_time()

    # Evaluate the file, not the model that was rounded into it.
    saved = Qwen2ForCausalLM.from_pretrained(out, dtype=torch.float32)
    greedy, sampled = evaluate(saved, codec, training_tasks(seed), questions)
    return {
        "environment": ENVIRONMENT,
        "seed": seed,
        "recipe": asdict(recipe),
        "steps": steps,
        "examples": steps * recipe.batch,
        "loss": round(loss, 4),
        "parameters": sum(parameter.numel() for parameter in saved.parameters()),
        "bytes": sum(path.stat().st_size for path in out.iterdir()),
        "held_out": {"questions": questions, "greedy": greedy, "sampled": sampled},
        "cpu_seconds": {
            "training": round(trained - started, 1),
            "evaluation": round(time.process_time() - trained, 1),
        },
        "versions": _versions(),
        "digest": digest(out),
    }


def _config() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 64: the smallest head that every attention kernel has
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-6,
        initializer_range=0.05,
        tie_word_embeddings=True,
        use_sliding_window=False,
        attention_dropout=0.0,
        bos_token_id=PAD_ID,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
    )


def _train(model: Any, codec: PromptCodec, problems: Iterator[Problem], recipe: Recipe) -> tuple[int, float]:
    """Train in place; the number of steps and the mean loss of the last window."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
        betas=recipe.betas,
    )
    model.train()
    recent: deque[float] = deque(maxlen=recipe.window)
    for step in range(recipe.max_steps):
        if len(recent) == recipe.window and sum(recent) / recipe.window < recipe.stop_loss:
            return step, sum(recent) / len(recent)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        loss = _answer_loss(model, codec, list(itertools.islice(problems, recipe.batch)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        recent.append(loss.item())
    raise RuntimeError(f"the loss of {recipe.max_steps} steps never stayed below {recipe.stop_loss}")


def _answer_loss(model: Any, codec: PromptCodec, batch: Sequence[Problem]) -> torch.Tensor:
    """Mean cross-entropy (nats) of the answers' tokens, end of turn included; prompts carry no loss."""
    prompts = [codec.encode(problem.messages) for problem in batch]
    answers = [[*codec.encode_text(problem.gold["answer"]), EOS_ID] for problem in batch]
    ids, mask = _pad_left([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    width = max(map(len, answers))
    logits = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=_positions(mask),
        logits_to_keep=width + 1,
        use_cache=False,
    ).logits[:, :-1]
    lengths = torch.tensor([len(answer) for answer in answers])
    is_answer = torch.arange(width) >= width - lengths[:, None]
    return F.cross_entropy(logits[is_answer].float(), ids[:, -width:][is_answer])


def evaluate(model: Any, codec: PromptCodec, tasks: TaskSet, questions: int) -> tuple[float, float]:
    """Pass rates on the first held-out questions: greedy, and at temperature 1 (two samples each, fixed noise)."""
    problems = tasks.held_out(questions)
    prompts = [codec.encode(problem.messages) for problem in problems]

    def rate(samples: int, **how: Any) -> float:
        answers = _generate(model, prompts * samples, **how)
        scores = [
            tasks.score(problem.gold, codec.decode(answer, (EOS_ID,)))
            for problem, answer in zip(problems * samples, answers, strict=True)
        ]
        return sum(score.reward for score in scores) / len(scores)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return rate(1, do_sample=False), rate(2, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)


@torch.inference_mode()
def _generate(model: Any, prompts: list[list[int]], **how: Any) -> list[list[int]]:
    """One completion for each prompt, to the end of turn (padded behind it) or MAX_NEW_TOKENS."""
    model.eval()
    ids, mask = _pad_left(prompts)
    output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, **how)
    return output[:, ids.shape[1] :].tolist()


def _pad_left(sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, both int64 [B, longest], aligned at the right."""
    longest = max(map(len, sequences))
    ids = torch.full((len(sequences), longest), PAD_ID)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, longest - len(sequence) :] = torch.tensor(sequence)
        mask[row, longest - len(sequence) :] = 1
    return ids, mask


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def _versions() -> dict[str, str]:
    import tokenizers
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "environment": GymTasks(ENVIRONMENT, 0).version,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m coordinator.seed.build", description=build.__doc__)
    parser.add_argument("out", type=Path, help="empty or new directory for the model files")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the training words")
    parser.add_argument("--report", type=Path, help="write the report to this file as well")
    parser.add_argument("--digest", type=Path, help="write the digest of the files to this file")
    options = parser.parse_args(arguments)
    report = build(options.out, seed=options.seed)
    text = json.dumps(report, indent=2) + "\n"
    if options.report:
        options.report.write_text(text, encoding="utf-8")
    if options.digest:
        options.digest.write_text(report["digest"] + "\n", encoding="ascii")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Plain transformers: batched decoding with a KV cache and the slots' seeded noise, for CPUs and rare architectures."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, DynamicCache

from toploc import logprobs, sample

from .base import EngineError, Generated, Request

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHRINK_BELOW = 0.7  # finished rows leave the batch once fewer than this share of it is alive


class HFEngine:
    """`batch`: sequences decoded at once. Models of full checkpoints share nothing; adapters are merged into a copy."""

    name = "hf"

    def __init__(self, dtype: str = "float32", batch: int = 64):
        self.dtype, self.batch = DTYPES[dtype], batch
        self.version_text = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._models: dict[int, Any] = {}
        self._template: Any = None
        self._bases: dict[Path, Any] = {}
        self._lock = threading.Lock()

    def load(self, version: int, folder: Path, base: Path | None) -> None:
        """See Engine.load. Raises EngineError."""
        try:
            model = self._full(folder) if base is None else self._adapted(folder, base)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise EngineError(f"cannot load {folder.name}: {error}") from error
        with self._lock:
            self._models[version] = model

    def _full(self, folder: Path) -> Any:
        from safetensors.torch import load_file

        if self._template is None:
            model, found = AutoModelForCausalLM.from_pretrained(
                folder, dtype=self.dtype, attn_implementation="sdpa", output_loading_info=True
            )
            if found["missing_keys"]:  # transformers would draw them at random, with a warning
                raise EngineError(f"{folder.name} lacks {sorted(found['missing_keys'])[:3]}")
            self._template = model.eval().requires_grad_(False)
            return self._template
        model = copy.deepcopy(self._template)
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
        if unexpected or set(missing) - tied:
            raise EngineError(f"{folder.name} lacks {sorted(set(missing) - tied)[:3]} or has {unexpected[:3]} too many")
        model.tie_weights()
        return model

    def _adapted(self, folder: Path, base: Path) -> Any:
        from peft import PeftModel

        if base not in self._bases:
            self._bases[base] = self._full(base)
        adapted = PeftModel.from_pretrained(copy.deepcopy(self._bases[base]), folder)
        return adapted.merge_and_unload().eval().requires_grad_(False)

    def unload(self, version: int) -> None:
        """See Engine.unload. A running call keeps its own reference until it ends."""
        with self._lock:
            self._models.pop(version, None)

    def versions(self) -> tuple[int, ...]:
        """See Engine.versions."""
        with self._lock:
            return tuple(sorted(self._models))

    def model(self, version: int) -> Any:
        """The model of a loaded version. Raises EngineError."""
        with self._lock:
            model = self._models.get(version)
        if model is None:
            raise EngineError(f"version {version} is not loaded")
        return model

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generated]]:
        """See Engine.generate."""
        alike: dict[tuple[int, float], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            alike[request.version, request.temperature].append(index)
        models = {version: self.model(version) for version, _ in alike}  # held until the end, whatever is unloaded
        for (version, temperature), indices in alike.items():
            model = models[version]
            indices.sort(key=lambda index: len(requests[index].prompt))
            for start in range(0, len(indices), self.batch):
                part = indices[start : start + self.batch]
                for row, answer in _decode(model, [requests[index] for index in part], temperature):
                    yield part[row], answer

    @torch.inference_mode()
    def prefill(
        self, version: int, prompt: Sequence[int], tokens: Sequence[int], temperature: float
    ) -> tuple[torch.Tensor, tuple[float, ...]]:
        """Hidden states [n, hidden] and log-probs of given tokens, as if they had been generated."""
        model = self.model(version)
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
        logits = model.get_output_embeddings()(states).float()
        return states, tuple(logprobs(logits, list(tokens), temperature).tolist())


@torch.inference_mode()
def _decode(model: Any, requests: Sequence[Request], temperature: float) -> Iterator[tuple[int, Generated]]:
    """Decode one batch, left-padded; yields (row, answer) as rows end."""
    width = max(len(request.prompt) for request in requests)
    ids = torch.zeros(len(requests), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
        mask[row, width - len(request.prompt) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    head = model.get_output_embeddings()
    rows = list(range(len(requests)))  # which request each row of the batch belongs to
    live = list(rows)
    found: dict[int, tuple[list[int], list[float], list[torch.Tensor]]] = {row: ([], [], []) for row in rows}
    step = 0
    while live:
        out = model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        states = out.last_hidden_state[:, -1]
        logits = head(states).float()
        token = sample(logits, [requests[row].seed for row in rows], [step] * len(rows), temperature)
        chosen, scored = token.tolist(), logprobs(logits, token, temperature).tolist()
        step += 1
        alive = set(live)
        for position, row in enumerate(rows):
            if row not in alive:
                continue
            tokens, logps, hidden = found[row]
            tokens.append(chosen[position])
            logps.append(scored[position])
            hidden.append(states[position])
            stopped = chosen[position] in requests[row].eos
            if stopped or step == requests[row].max_tokens:
                alive.discard(row)
                reason: Literal["stop", "length"] = "stop" if stopped else "length"
                yield row, Generated(tuple(tokens), tuple(logps), torch.stack(hidden), reason)
        live = [row for row in rows if row in alive]
        ids, positions = token[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=torch.int64)], 1)
        if live and len(live) < SHRINK_BELOW * len(rows):
            keep = torch.tensor([position for position, row in enumerate(rows) if row in alive])
            cache.batch_select_indices(keep)
            ids, positions, mask, rows = ids[keep], positions[keep], mask[keep], live

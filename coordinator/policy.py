"""The weights of a version as a model: exactly the published ones, base and merged adapter alike."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from protocol.manifest import Canary
from protocol.runspec import RunSpec
from toploc import logprobs, sample

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CANARY_TOKENS = 6


class PolicyError(Exception):
    """A version's files do not make the model that they should."""


def load_base(folder: Path, dtype: torch.dtype) -> Any:
    """The causal LM in a Hugging Face directory, in `dtype`, ready for inference (no gradients). Raises PolicyError if
    tensors are missing: transformers would draw them at random."""
    config = AutoConfig.from_pretrained(folder)
    model, found = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
    )
    if found["missing_keys"]:
        raise PolicyError(f"{folder.name}: missing {sorted(found['missing_keys'])[:3]}")
    return model.eval().requires_grad_(False)


def load_weights(model: Any, folder: Path) -> None:
    """Load a full checkpoint's tensors into a model of the same architecture. Raises PolicyError."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise PolicyError(f"{folder.name}: missing {sorted(set(missing) - tied)[:3]}, unexpected {unexpected[:3]}")
    model.tie_weights()


def merge_adapter(base: Any, folder: Path) -> Any:
    """A copy of the base model with a PEFT LoRA adapter merged in: W + (alpha / r) B A, in the base's dtype."""
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(copy.deepcopy(base), folder)
    return adapted.merge_and_unload().eval().requires_grad_(False)


class Versions:
    """Models of the last few versions, made when asked for, the least recently used dropped; the base stays."""

    def __init__(self, base: Path, adapter: bool, dtype: torch.dtype, keep: int):
        self.base = load_base(base, dtype)
        self.adapter = adapter
        self.keep = keep
        self._base_name = base.name
        self._loaded: OrderedDict[str, Any] = OrderedDict()

    def get(self, folder: Path) -> Any:
        """The model of the version whose files are in `folder` (named like the version)."""
        if folder.name == self._base_name:
            return self.base
        if folder.name not in self._loaded:
            if self.adapter:
                model = merge_adapter(self.base, folder)
            else:
                model = copy.deepcopy(self.base)
                load_weights(model, folder)
            self._loaded[folder.name] = model
            while len(self._loaded) > self.keep:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(folder.name)
        return self._loaded[folder.name]


@torch.inference_mode()
def hidden_and_logits(model: Any, input_ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Hidden states after the final norm, `[batch, length, hidden]` for right-padded `input_ids` `[batch, length]`
    (int64) and `mask` of the same shape, and the output projection (applied by the caller to the rows it needs)."""
    out = model.base_model(input_ids=input_ids, attention_mask=mask, use_cache=False)
    return out.last_hidden_state, model.get_output_embeddings()


@torch.inference_mode()
def make_canary(model: Any, spec: RunSpec, prompt: tuple[int, ...], seed: int) -> Canary:
    """What every engine must reproduce with these weights: a short seeded sample after `prompt`."""
    temperature = spec.sampling.temperature
    tokens: list[int] = []
    found: list[float] = []
    for position in range(CANARY_TOKENS):
        ids = torch.tensor([list(prompt) + tokens])
        hidden, head = hidden_and_logits(model, ids, torch.ones_like(ids))
        logits = head(hidden[:, -1]).float()
        token = sample(logits, [seed], [position], temperature)
        found.append(float(logprobs(logits, token, temperature)[0]))
        tokens.append(int(token[0]))
        if tokens[-1] in spec.model.eos_token_ids:
            break
    return Canary(prompt=prompt, seed=f"{seed:016x}", tokens=tuple(tokens), logprobs=tuple(found))

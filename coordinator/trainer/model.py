"""The learner: a model in training, full or LoRA, and its optimizer."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from protocol.runspec import RunSpec

from ..config import TrainerConfig
from ..policy import load_base
from .losses import ZERO, LossConfig, LossSums, policy_loss
from .packing import MicroBatch, Sample, pack

WEIGHTS, OPTIMIZER = "trainable.safetensors", "optimizer.safetensors"


class Learner:
    """fp32 master weights, AdamW. `step` counts optimizer steps."""

    def __init__(self, base: Path, spec: RunSpec, config: TrainerConfig, seed: int):
        self.base, self.spec, self.config, self.step = base, spec, config, 0
        model = load_base(base, torch.float32)
        if config.lora_rank:
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(seed)  # the adapter's A is drawn at random
            lora = LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha or 2 * config.lora_rank,
                target_modules="all-linear",
                lora_dropout=0.0,
                bias="none",
                task_type="CAUSAL_LM",
            )
            model = get_peft_model(model, lora)
        else:
            model.requires_grad_(True)
        self.model: Any = model
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            list(self.trainable.values()),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
        )

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step over a whole batch; returns metrics. A batch without any advantage changes nothing."""
        config = self.config
        loss_config = LossConfig(config.clip_low, config.clip_high, config.engine_cap)
        denominator = sum(len(sample.tokens) for sample in samples)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (self.step + 1) / max(config.warmup_steps, 1))
        self.optimizer.zero_grad(set_to_none=True)
        sums = ZERO
        for micro in pack(samples, config.token_budget):
            loss, part = policy_loss(
                self.logprobs(micro),
                micro.logp_old,
                micro.logp_engine,
                micro.advantages,
                micro.mask,
                denominator,
                loss_config,
            )
            loss.backward()  # type: ignore[no-untyped-call]
            sums += part
        norm = 0.0
        if sums.tokens:
            norm = float(torch.nn.utils.clip_grad_norm_(list(self.trainable.values()), config.clip_norm))
            if not math.isfinite(norm):
                raise FloatingPointError(f"the gradient of step {self.step + 1} is not finite")
            self.optimizer.step()
        self.step += 1
        return _metrics(sums, denominator, norm)

    def logprobs(self, micro: MicroBatch) -> torch.Tensor:
        """Log-probs of the completion tokens under the present weights, float32 [batch, tokens], differentiable."""
        positions = (micro.attention.cumsum(1) - 1).clamp(min=0)
        tokens = micro.targets.shape[1]
        out = self.model(
            input_ids=micro.input_ids,
            attention_mask=micro.attention,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=tokens + 1,
        )
        logits = out.logits[:, :-1].float() / self.spec.sampling.temperature
        return torch.log_softmax(logits, -1).gather(-1, micro.targets[..., None])[..., 0]

    def policy(self) -> Any:
        """The causal LM itself (with LoRA: the base model with the adapter's layers in it)."""
        return self.model.get_base_model() if self.config.lora_rank else self.model

    def save(self, folder: Path) -> None:
        """Trainable weights and optimizer state into a folder (safetensors, never pickle)."""
        save_file({name: p.detach().contiguous() for name, p in self.trainable.items()}, folder / WEIGHTS)
        state = {}
        for name, parameter in self.trainable.items():
            for key, value in self.optimizer.state[parameter].items():
                state[f"{key}/{name}"] = value.detach().contiguous()
        save_file(state, folder / OPTIMIZER)

    def load(self, folder: Path, step: int) -> None:
        """Restore what `save` wrote."""
        weights = load_file(folder / WEIGHTS)
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(weights[name])
        for name, value in load_file(folder / OPTIMIZER).items():
            key, _, parameter_name = name.partition("/")
            self.optimizer.state[self.trainable[parameter_name]][key] = value
        self.step = step

    def export(self, folder: Path) -> None:
        """The files of a version: a whole Hugging Face directory, or a PEFT adapter."""
        folder.mkdir(parents=True)
        if self.config.lora_rank:
            self.model.save_pretrained(folder)
            (folder / "README.md").unlink(missing_ok=True)
            described = json.loads((folder / "adapter_config.json").read_text())
            described["base_model_name_or_path"] = None  # a path of this machine is nobody's business
            (folder / "adapter_config.json").write_text(json.dumps(described, sort_keys=True, indent=1))
            return
        tied = set(self.model._tied_weights_keys or ()) if self.model.config.tie_word_embeddings else set()
        tensors = {
            name: value.detach().contiguous() for name, value in self.model.state_dict().items() if name not in tied
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for file in self.base.iterdir():
            if file.suffix != ".safetensors" and file.name != "model.safetensors.index.json":
                shutil.copyfile(file, folder / file.name)


def _metrics(sums: LossSums, denominator: int, norm: float) -> dict[str, float]:
    tokens = max(sums.tokens, 1)
    return {
        "loss": sums.loss / max(denominator, 1),
        "ratio_mean": sums.ratio / tokens,
        "kl": sums.kl / tokens,
        "clip_fraction": sums.clipped / tokens,
        "engine_weight_mean": sums.engine_weight / tokens,
        "engine_gap_mean": sums.engine_gap / tokens,
        "grad_norm": norm,
        "tokens": float(denominator),
        "trained_tokens": float(sums.tokens),
    }

"""Tiny models, toy data and Trainers that the tests of modules, data modules and strategies share.

A test forks its ranks with ``run_distributed(fn, world_size, init_process_group=False)`` and builds everything inside ``fn``: the
Trainer joins the process group itself, as it does after a launcher. Several Trainers may run one after the other in the same ranks.
"""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 50
EOS = 2


def tiny_llama(seed: int = 0, *, dtype: torch.dtype = torch.float32, tied: bool = False, dropout: float = 0.0) -> LlamaForCausalLM:
    """Make the causal LM of the fixtures: hidden 32, 2 layers, 8 query heads, 2 key/value heads, vocabulary 50."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        attention_dropout=dropout,
        initializer_range=0.3,  # far from uniform attention: a leak between samples or a wrong position shows
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # the same weights whatever the test's default dtype is
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LlamaForCausalLM(config).to(dtype)
    finally:
        torch.set_default_dtype(default)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with learning rate 1: the change of a parameter is its (clipped) gradient."""
    return torch.optim.SGD(parameters, lr=1.0)


def frozen_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with learning rate 0: every step sees the same weights."""
    return torch.optim.SGD(parameters, lr=0.0)


class CharacterCodes:
    """One character is one token, its code; 1 ends a completion, and decodes to nothing."""

    eos_token_id = 1
    pad_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in token_ids if token > 1)


class ToyTokenizer:
    """One letter is one token; 'a' is token 3."""

    pad_token_id = 0
    eos_token_id = EOS

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") + 3 for letter in text]

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(chr(int(token) - 3 + ord("a")) for token in token_ids if int(token) > EOS)


def length_reward(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Reward long completions: differs between rollouts, and needs no model to be checked."""
    return [float(len(completion)) for completion in completions]


# -- what a run did ----------------------------------------------------------------------------------------------------------------


class RecordingLogger(Logger):
    """Keeps every row of metrics that Lightning logs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({name: value for name, value in metrics.items() if name != "epoch"})


class StepRecorder(Callback):
    """Keeps what each optimizer step saw: whole gradients before clipping, and the metrics logged with it (on every rank)."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.metrics: list[dict[str, float]] = []
        self.global_steps: list[int] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append({name: whole(p.grad) for name, p in pl_module.named_parameters() if p.grad is not None})

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.logged_metrics.items()})
        self.global_steps.append(trainer.global_step)


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that may be sharded (then every rank must call)."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters, gathered (every rank must call)."""
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


def make_trainer(world_size: int, strategy: Any = "rlbatch_fsdp", **kwargs: Any) -> pl.Trainer:
    """Return a quiet Trainer for CPU ranks; metrics are logged at every step."""
    from lightning_rlbatch import register

    register()
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    kwargs.setdefault("logger", RecordingLogger())
    kwargs.setdefault("limit_val_batches", 0)
    return pl.Trainer(accelerator="cpu", devices=world_size, strategy=strategy, **{**quiet, **kwargs})


def relative_difference(actual: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference of two dictionaries of tensors or numbers, relative to each entry's own largest value.

    Entries far below the largest one are compared on its scale: some gradients are zero but for rounding.
    """
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    pairs = {name: (torch.as_tensor(actual[name]).double(), torch.as_tensor(expected[name]).double()) for name in expected}
    floor = 1e-3 * max(float(reference.abs().max()) for _, reference in pairs.values())
    return max(
        float((value - reference).abs().max()) / max(float(reference.abs().max()), floor) if value.isfinite().all() else float("inf")
        for value, reference in pairs.values()
    )


# -- what ranks say to each other --------------------------------------------------------------------------------------------------


class CollectiveRecorder(TorchDispatchMode):
    """Keeps the names of all collectives that this rank calls, FSDP2's own included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls.append(func.name())
        return func(*args, **(kwargs or {}))

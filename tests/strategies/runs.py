"""Small RL and SFT runs that the tests of checkpoints, counting and faults share."""

import random
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_rlbatch.callbacks.rollout_hooks import RolloutCallback, Rollouts
from lightning_rlbatch.data import RolloutDataModule, SFTDataModule
from lightning_rlbatch.functional import GAE, GRPO
from lightning_rlbatch.modules import PPOModule, SFTModule
from tests.helpers import EOS, ToyTokenizer, length_reward, make_trainer, tiny_llama, whole, whole_parameters

PROMPTS = ["abc", "bcde", "cd", "defgh", "efg", "fghi", "gh"]


def prompt_rows() -> list[dict[str, str]]:
    return [{"prompt": prompt} for prompt in PROMPTS]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def ppo(**options: Any) -> PPOModule:
    """Return GRPO with AdamW and a falling learning rate; ``critic`` makes it PPO."""
    options.setdefault("advantage", GAE() if "critic" in options else GRPO())
    options.setdefault("reward_functions", [length_reward])
    options.setdefault("policy", tiny_llama)
    return PPOModule(**{"optimizer": adamw, "lr_scheduler": decay, **options})


def rollouts(**options: Any) -> RolloutDataModule:
    """Return 4 prompts x 2 rollouts per iteration in 2 optimizer steps; the 7 prompts do not divide, so that passes overlap."""
    defaults = {
        "train_batch_size": 4,
        "mini_batch_size": 2,
        "rollouts_per_prompt": 2,
        "max_tokens_per_rank": 40,
        "max_prompt_length": 8,
        "max_response_length": 8,
    }
    return RolloutDataModule(prompt_rows, ToyTokenizer(), **{**defaults, **options})


def sft(**options: Any) -> SFTModule:
    options.setdefault("policy", tiny_llama)
    return SFTModule(**{"optimizer": adamw, "lr_scheduler": decay, **options})


def sft_samples(number: int = 11, seed: int = 0) -> list[dict[str, Tensor]]:
    draw = random.Random(seed)
    samples = []
    for _ in range(number):
        prompt, response = draw.randint(1, 4), draw.randint(1, 9)
        ids = torch.tensor([draw.randint(EOS + 1, 49) for _ in range(prompt + response)])
        samples.append({"input_ids": ids, "response_mask": torch.tensor([False] * prompt + [True] * response)})
    return samples


def sft_data(**options: Any) -> SFTDataModule:
    """Return 11 samples in 3 optimizer steps per epoch."""
    return SFTDataModule(sft_samples(), **{"mini_batch_size": 4, "max_tokens_per_rank": 24, **options})


class Journal(RolloutCallback):
    """Writes down what a run did: prompts and tokens of each collection, learning rate and step at each batch."""

    def __init__(self) -> None:
        self.collections: list[tuple[int, list[str], list[list[int]]]] = []
        self.steps: list[tuple[int, float]] = []

    def on_rollout_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, rollouts: Rollouts) -> None:
        tokens = [row.tolist() for row in rollouts.store.samples.split_per_sample("input_ids")]
        self.collections.append((rollouts.iteration, list(rollouts.prompts.prompts), tokens))

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.steps.append((trainer.global_step, float(trainer.optimizers[0].param_groups[0]["lr"])))


def final_state(trainer: pl.Trainer) -> dict[str, Any]:
    """Return everything that a resumed run must have in common with the uninterrupted one (every rank calls)."""
    module, optimizer = trainer.lightning_module, trainer.optimizers[0]
    moments = {}
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for key, value in optimizer.state[parameter].items():
            moments[f"{number}.{key}"] = whole(value) if isinstance(value, Tensor) else torch.tensor(value)
    return {
        "parameters": whole_parameters(module),
        "moments": moments,
        "lr": [group["lr"] for group in optimizer.param_groups],
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any], *, tolerance: float = 0.0) -> None:
    """Compare two final states: bitwise, or within an absolute tolerance where the world sizes differ."""
    for name in ("lr", "global_step", "epoch"):
        assert actual[name] == expected[name], name
    for kind in ("parameters", "moments"):
        assert actual[kind].keys() == expected[kind].keys()
        for name, value in expected[kind].items():
            torch.testing.assert_close(actual[kind][name], value, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


def run(
    module: pl.LightningModule,
    data: pl.LightningDataModule,
    world_size: int,
    *,
    strategy: Any = "rlbatch_fsdp",
    ckpt_path: str | None = None,
    save_to: str | None = None,
    callbacks: tuple[Callback, ...] = (),
    **trainer_options: Any,
) -> dict[str, Any]:
    """Train on the ranks of the caller; return the final state and the journal."""
    journal = Journal()
    trainer = make_trainer(world_size, strategy, callbacks=[journal, *callbacks], **trainer_options)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return {**final_state(trainer), "collections": journal.collections, "steps": journal.steps}

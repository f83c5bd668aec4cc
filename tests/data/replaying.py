"""Runs that are recorded and replayed: a tiny policy of letters, and what its optimizer steps report."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_rlbatch.callbacks.recorder import RolloutRecorder
from lightning_rlbatch.data.replay import ReplayDataModule
from lightning_rlbatch.data.rollout import RolloutDataModule
from lightning_rlbatch.modules.ppo import PPOModule
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed

VOCABULARY = 20
NAMES = ("train/loss", "train/num_tokens", "train/grad_norm/policy", "train/skipped_steps")


class Letters:
    eos_token_id = 1
    pad_token_id = 0

    def encode(self, text):
        return [2 + ord(letter) - ord("a") for letter in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(ord("a") + token - 2) for token in token_ids if token > 1)


def policy():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def prompts():
    return [{"prompt": text} for text in ("abc", "de", "fgab", "c", "bad", "ce")]


def count_a_and_b(prompts, completions, **columns):
    """Some completions get no verdict."""
    return [None if completion.startswith("c") else float(len(set(completion) & set("abdefgh"))) for completion in completions]


class Losses(Callback):
    """Keeps what every optimizer step reports; may save a checkpoint after one of them."""

    def __init__(self, save_after=None, path=None):
        self.steps = []
        self.save_after = save_after
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append([float(trainer.callback_metrics[name]) for name in NAMES])
        if len(self.steps) == self.save_after:
            trainer.save_checkpoint(self.path)


def module(**options):
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731 - one expression
    return PPOModule(policy, [count_a_and_b], optimizer=optimizer, **options)


def fit(
    data, *callbacks, iterations=2, save=(None, None), resume=None, sequence_parallel_size=1, world_size=1, trainer_options=None, **options
):
    losses = Losses(*save)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=RLBatchFSDPStrategy(sequence_parallel_size=sequence_parallel_size),
        max_epochs=iterations,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[losses, *callbacks],
        **(trainer_options or {}),
    )
    trainer.fit(module(**options), datamodule=data, ckpt_path=resume)
    return losses.steps


def rollout_data(**options):
    defaults = {"train_batch_size": 4, "mini_batch_size": 2, "rollouts_per_prompt": 4, "ppo_epochs": 2, "max_tokens_per_rank": 24}
    return RolloutDataModule(prompts, Letters, max_prompt_length=4, max_response_length=10, seed=3, **{**defaults, **options})


def replay_data(folder, **options):
    return ReplayDataModule(str(folder), **{"mini_batch_size": 2, "ppo_epochs": 2, "max_tokens_per_rank": 24, **options})


def record(folder, world_size=2, **options):
    def run(rank, size):
        return fit(rollout_data(), RolloutRecorder(str(folder)), world_size=size, **options)

    return run_distributed(run, world_size, init_process_group=False)[0]


def replay(folder, world_size=1, data_options=None, **options):
    def run(rank, size):
        return fit(replay_data(folder, **(data_options or {})), world_size=size, **options)

    return run_distributed(run, world_size, init_process_group=False)[0]


def assert_same(steps, others, tolerance=1e-6):
    """Losses and counts agree; gradient norms too, though AdamW magnifies rounding from step to step."""
    actual, expected = torch.tensor(steps, dtype=torch.float64), torch.tensor(others, dtype=torch.float64)
    norms = torch.tensor([name == "train/grad_norm/policy" for name in NAMES])
    torch.testing.assert_close(actual[:, ~norms], expected[:, ~norms], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual[:, norms], expected[:, norms], rtol=20 * tolerance, atol=20 * tolerance)

"""A configured PPO run of a few seconds, as a file."""

from pathlib import Path
from typing import Any

import yaml


def config(tmp_path: Path, **trainer: Any) -> Path:
    """Write the configuration of a run of a few seconds; return its path."""
    content = {
        "seed_everything": 0,
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": {"class_path": "lightning_rlbatch.RLBatchFSDPStrategy", "init_args": {"sequence_parallel_size": 2}},
            "max_epochs": 2,
            "log_every_n_steps": 1,
            "limit_val_batches": 0,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": str(tmp_path), "name": "run", "version": ""},
            },
            "callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {"dirpath": str(tmp_path / "checkpoints"), "save_last": True, "save_top_k": 0, "every_n_epochs": 1},
                }
            ],
            **trainer,
        },
        "model": {
            "class_path": "lightning_rlbatch.PPOModule",
            "init_args": {
                "policy": "tests.helpers.tiny_llama",
                "reward_functions": ["tests.e2e.rewards.length_reward"],
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
            },
        },
        "data": {
            "class_path": "lightning_rlbatch.RolloutDataModule",
            "init_args": {
                "train_prompts": "tests.strategies.runs.prompt_rows",
                "tokenizer": {"class_path": "tests.helpers.ToyTokenizer"},
                "train_batch_size": 4,
                "mini_batch_size": 2,
                "rollouts_per_prompt": 2,
                "max_tokens_per_rank": 40,
                "max_prompt_length": 8,
                "max_response_length": 8,
            },
        },
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def losses(tmp_path: Path) -> list[float]:
    """Return the losses that the run logged."""
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("train/loss")
    return [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]]

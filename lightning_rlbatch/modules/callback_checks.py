"""Refuse Lightning's own callbacks that have no effect on our modules, or another one than they say."""

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)

_BEFORE_MODELS = "works on the module before its models are made, so that it would have no effect"
_REASONS: dict[type[Callback], str] = {
    BaseFinetuning: f"{_BEFORE_MODELS}. Freeze parameters in build_models (requires_grad_(False)) and remove the callback.",
    BatchSizeFinder: "would change mini_batch_size, and with it the update. Set max_tokens_per_rank, with the help of MemoryRehearsal.",
    GradientAccumulationScheduler: "accumulates batches, but one batch here is one optimizer step. Set mini_batch_size.",
    LearningRateFinder: "looks for a loss that falls as training goes well. Compare short runs, and set the lr of the optimizer.",
    ModelPruning: f"{_BEFORE_MODELS}. Prune in build_models and remove the callback.",
    StochasticWeightAveraging: f"{_BEFORE_MODELS}. Use WeightAveraging or EMAWeightAveraging, under DDP or on one device.",
}


def check_callbacks(trainer: Any, module: "pl.LightningModule") -> None:
    """Refuse callbacks that cannot do here what they promise.

    Args:
        trainer: The Trainer; only training is restricted.
        module: The module, for the message.

    Raises:
        MisconfigurationException: Names the callback, why not, and what to use.
    """
    if trainer.state.fn != "fit":
        return
    for callback in trainer.callbacks:
        reasons = [reason for kind, reason in _REASONS.items() if isinstance(callback, kind)]
        if _never_saves(callback):
            reasons.append("never saves by time under manual optimization. Use RLBatchModelCheckpoint with the same train_time_interval.")
        if reasons:
            raise MisconfigurationException(f"The callback {type(callback).__name__} does not fit {type(module).__name__}: it {reasons[0]}")


def _never_saves(callback: Callback) -> bool:
    if not isinstance(callback, ModelCheckpoint) or callback._train_time_interval is None:
        return False
    return type(callback).on_train_batch_end is ModelCheckpoint.on_train_batch_end

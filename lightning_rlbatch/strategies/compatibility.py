"""Say plainly that `lightning.pytorch` and `pytorch_lightning` are two packages."""

import sys
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_rlbatch.strategies.atomic import AtomicCheckpointIO


def mixed_up_packages() -> str:
    """Return a hint for error messages if ``pytorch_lightning`` has been imported beside ``lightning.pytorch``, else nothing.

    ``pytorch_lightning.Trainer`` refuses our strategy before any of our code runs; its message holds the strategy's ``repr``.
    """
    if "pytorch_lightning" not in sys.modules:
        return ""
    return " [a strategy of lightning.pytorch: import Trainer, callbacks and modules from lightning.pytorch, not pytorch_lightning]"


def check_lightning_module(module: Any) -> None:
    """Refuse a module of the other package.

    Args:
        module: What the Trainer is about to run.

    Raises:
        MisconfigurationException: Says what to use in its place.
    """
    if not isinstance(module, pl.LightningModule):
        raise MisconfigurationException(
            f"{type(module).__name__} is no lightning.pytorch.LightningModule.{mixed_up_packages()} Import everything from"
            " lightning.pytorch."
        )


def check_links(trainer: "pl.Trainer") -> None:
    """Refuse links to checkpoints that are not complete yet.

    Args:
        trainer: A Trainer whose strategy saves in the background.

    Raises:
        MisconfigurationException: Lightning's own ``ModelCheckpoint`` would move the link at once.
    """
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, ModelCheckpoint) or callback.save_last != "link":
            continue
        if type(callback)._link_checkpoint is ModelCheckpoint._link_checkpoint:
            raise MisconfigurationException(
                "With async_save a link to the last checkpoint may move only when that is complete, but"
                f" {type(callback).__name__}(save_last='link') moves it at once. Use RLBatchModelCheckpoint(save_last='link')."
            )


def check_whole_copies(trainer: Any) -> None:
    """Refuse callbacks that keep a whole copy of the module beside its shards.

    Args:
        trainer: A Trainer whose strategy will shard the module.

    Raises:
        MisconfigurationException: Names the callback.
    """
    for callback in trainer.callbacks:
        if trainer.state.fn == "fit" and isinstance(callback, (WeightAveraging, StochasticWeightAveraging, ModelPruning)):
            raise MisconfigurationException(
                f"{type(callback).__name__} works on a whole copy of the module, but RLBatchFSDPStrategy keeps shards. Remove it, or train"
                " with strategy='ddp'."
            )


def use_atomic_checkpoints(trainer: "pl.Trainer") -> None:
    """Let another strategy write its checkpoints as ours does, unless the user has chosen how.

    Args:
        trainer: The Trainer of a module of ours, under DDP or on one device.
    """
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()

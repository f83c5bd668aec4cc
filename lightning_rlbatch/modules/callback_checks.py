"""Refuse Lightning's own callbacks that have no effect on our modules, or another one than they say."""

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_rlbatch.modules.callback_reasons import CALLBACK_REASONS, NEVER_SAVES, misfit_callback


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
        of_lightning = [kind.__name__ for kind in type(callback).__mro__ if kind.__module__.startswith("lightning.")]
        reasons = [CALLBACK_REASONS[name] for name in of_lightning if name in CALLBACK_REASONS]
        if _never_saves(callback):
            reasons.append(NEVER_SAVES)
        if reasons:
            raise MisconfigurationException(misfit_callback(type(callback).__name__, type(module).__name__, reasons[0]))


def _never_saves(callback: Callback) -> bool:
    if not isinstance(callback, ModelCheckpoint) or callback._train_time_interval is None:
        return False
    return type(callback).on_train_batch_end is ModelCheckpoint.on_train_batch_end

"""Find a ``StopIteration`` of a hook, which Lightning's loops take for the end of the data, by the counters that they leave behind."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_rlbatch.modules.schedulers import PlateauSteps


def require_whole_epoch(trainer: "pl.Trainer") -> None:
    """Refuse the end of an epoch inside of a batch; call it when the training epoch ends.

    Args:
        trainer: The Trainer.

    Raises:
        RuntimeError: A hook raised StopIteration. Names the hook, the batch, and the callbacks that have such a hook.
    """
    if trainer.validating:  # a validation that ends well hands back to training
        raise _swallowed(trainer, ("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end"))
    count: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if count.started < count.ready and count.processed <= count.started:  # else `on_train_batch_start` has asked to skip the rest
        raise _swallowed(trainer, ("on_train_batch_start",), count.ready)
    if count.processed < count.started:
        raise _swallowed(trainer, ("training_step",), count.ready)
    if count.completed < count.processed == count.started:
        raise _swallowed(trainer, ("on_train_batch_end",), count.ready)


def require_whole_validation(trainer: "pl.Trainer") -> None:
    """Refuse the end of a validation inside of a batch; call it when the validation ends.

    Args:
        trainer: The Trainer.

    Raises:
        RuntimeError: See :func:`require_whole_epoch`.
    """
    loop = trainer.validate_loop if trainer.state.fn == "validate" else trainer.fit_loop.epoch_loop.val_loop
    count: Any = loop.batch_progress.current
    if count.started < count.ready:
        raise _swallowed(trainer, ("on_validation_batch_start",), count.ready)
    if count.processed < count.started:
        raise _swallowed(trainer, ("validation_step",), count.ready)
    if count.completed < count.processed:
        raise _swallowed(trainer, ("on_validation_batch_end",), count.ready)


def require_whole_fit(trainer: "pl.Trainer") -> None:
    """Refuse the end of training between two epochs before its time; call it when training ends.

    Args:
        trainer: The Trainer.

    Raises:
        RuntimeError: See :func:`require_whole_epoch`.
    """
    count: Any = trainer.fit_loop.epoch_progress.current
    if count.started < count.ready:
        raise _swallowed(trainer, ("on_train_epoch_start",))
    if count.completed < count.processed:
        raise _swallowed(trainer, ("on_train_epoch_end",))


def _swallowed(trainer: Any, hooks: tuple[str, ...], batch: int | None = None) -> RuntimeError:
    def has_one(callback: Any) -> bool:
        return not isinstance(callback, PlateauSteps) and any(  # which is ours, and reads no iterator
            getattr(type(callback), hook, None) is not getattr(Callback, hook, None) for hook in hooks
        )

    callbacks = ", ".join(sorted({type(callback).__name__ for callback in trainer.callbacks if has_one(callback)}))
    where = " or ".join(hooks) + ("" if batch is None else f" of batch {batch}")
    whose = f" of the module or of a callback ({callbacks})" if callbacks else " of the module"
    return RuntimeError(
        f"StopIteration was raised in {where},{whose}, and Lightning took it for the end of the data: an iterator that the code reads by"
        " next() is at its end. Catch it there, or read with next(iterator, None)."
    )

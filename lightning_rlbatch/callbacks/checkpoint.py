"""Save checkpoints where a resumed run is exactly the uninterrupted one: between iterations."""

import os
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_rlbatch.strategies.checkpoint import CheckpointingStrategy


class RLBatchModelCheckpoint(ModelCheckpoint):
    """Lightning's ``ModelCheckpoint`` with what that one cannot do here; everything else is inherited.

    * ``every_n_train_steps`` and ``train_time_interval`` save when the iteration (epoch) is over in which they fell due. A checkpoint
      from inside an iteration resumes too, but rolls out its remaining prompts again. ``inside_iteration=True`` saves at once.
    * ``train_time_interval`` works: the stock callback never saves by time under manual optimization. Rank 0's clock decides.
    * ``save_last="link"`` moves the link in one step, and removes old checkpoints only afterwards: a run that is killed at any
      moment leaves a ``last.ckpt`` that loads.

    The stock callback may be used as well: ``every_n_epochs`` is exact, ``every_n_train_steps`` counts optimizer steps, and
    ``save_last=True`` is replaced in one step by the strategy.

    Args:
        dirpath: See ``ModelCheckpoint``, as the following ones.
        filename: Name pattern, for example ``"{epoch}-{step}"``.
        monitor: Metric to compare by.
        mode: ``"min"`` or ``"max"``.
        save_top_k: How many to keep; -1 keeps all, 0 none but the last.
        save_last: True keeps a copy of the newest as ``last.ckpt``, ``"link"`` a link to it.
        save_weights_only: Leave out optimizers and positions: for evaluation, not for resuming.
        save_on_exception: Save when Ctrl-C or SIGTERM arrives, and after an error that all ranks raise in step (reward functions,
            generation); after an error of one rank alone nothing can be saved.
        every_n_epochs: Iterations between checkpoints.
        every_n_train_steps: Optimizer steps between checkpoints.
        train_time_interval: Time between checkpoints.
        inside_iteration: Save right after the step, not after the iteration.
        verbose: Report each one.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        filename: str | None = None,
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        save_last: bool | Literal["link"] | None = None,
        save_weights_only: bool = False,
        save_on_exception: bool = False,
        every_n_epochs: int | None = None,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        inside_iteration: bool = False,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=save_last,
            save_weights_only=save_weights_only,
            save_on_exception=save_on_exception,
            every_n_epochs=every_n_epochs,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            verbose=verbose,
        )
        self.inside_iteration = inside_iteration
        self._step_interval = every_n_train_steps or 0
        self._seconds = None if train_time_interval is None else train_time_interval.total_seconds()
        self._is_due = False
        self._saved_at = monotonic()
        self._outdated: list[str] = []

    @property
    @override
    def state_key(self) -> str:
        return f"{super().state_key}, inside_iteration={self.inside_iteration}"

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        super().on_train_start(trainer, pl_module)
        self._saved_at = monotonic()

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._step_interval and trainer.global_step % self._step_interval == 0:
            self._is_due = True
        if self.inside_iteration:
            self._save_if_due(trainer)

    @override
    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if self._should_save_on_train_epoch_end(trainer) or self.monitor is None:
            self._save_if_due(trainer)

    @override
    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        super().on_validation_end(trainer, pl_module)
        if self.monitor is not None and not trainer.sanity_checking:
            self._save_if_due(trainer)  # the metric that was waited for is here

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        super().on_train_end(trainer, pl_module)
        candidates = self._monitor_candidates(trainer)
        if self._is_due and self.monitor is not None and self.monitor not in candidates:
            rank_zero_warn(
                f"RLBatchModelCheckpoint(monitor={self.monitor!r}) did not save when it was due: there is no such metric. Logged:"
                f" {sorted(candidates)}. Monitor one of these, or run a validation that logs it."
            )

    def _save_if_due(self, trainer: "pl.Trainer") -> None:
        if self._seconds is not None:
            self._is_due = self._is_due or trainer.strategy.broadcast(monotonic() - self._saved_at >= self._seconds)
        if not self._is_due or self._should_skip_saving_checkpoint(trainer):
            return
        candidates = self._monitor_candidates(trainer)
        if self.monitor is not None and self.monitor not in candidates:
            return  # still due when validation has logged it
        self._is_due, self._saved_at = False, monotonic()
        self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)

    @override
    def _save_last_checkpoint(self, trainer: "pl.Trainer", monitor_candidates: dict[str, Any]) -> None:
        super()._save_last_checkpoint(trainer, monitor_candidates)
        outdated, self._outdated = self._outdated, []
        for path in outdated:
            super()._remove_checkpoint(trainer, path)

    @override
    def _remove_checkpoint(self, trainer: "pl.Trainer", filepath: str) -> None:
        if self.save_last == "link":
            self._outdated.append(filepath)  # the link still points there
        else:
            super()._remove_checkpoint(trainer, filepath)

    @staticmethod
    @override
    def _link_checkpoint(trainer: "pl.Trainer", filepath: _PATH, linkpath: _PATH) -> None:
        target, link = Path(filepath), Path(linkpath)

        def move() -> None:
            new = link.with_name(f".{link.name}.link")
            new.unlink(missing_ok=True)
            new.symlink_to(os.path.relpath(target, link.parent))
            new.replace(link)

        if trainer.is_global_zero and target.absolute() != link.absolute():
            if isinstance(trainer.strategy, CheckpointingStrategy):
                trainer.strategy.after_save(move)  # the target may still be being written
            else:
                move()
        trainer.strategy.barrier()

"""The checkpoint methods of the strategy: one ordinary file, or a folder with one file per rank; never half of either."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rlbatch.distributed.failure import fail_together
from lightning_rlbatch.strategies.atomic import beside, discard, is_local, publish, reading, writing
from lightning_rlbatch.strategies.background import BackgroundSave, snapshot
from lightning_rlbatch.strategies.checkpoint_paths import is_sharded, require_checkpoint, require_states
from lightning_rlbatch.strategies.failure import SAVE_ON_ALL_RANKS, FailureReport
from lightning_rlbatch.strategies.sharded import (
    load_sharded_state,
    read_meta,
    save_sharded_state,
    sharded_metadata,
    sharded_model_state,
    sharded_optimizer_state,
)
from lightning_rlbatch.strategies.state import full_model_state, full_optimizer_state, load_full_model_state, load_full_optimizer_state


class CheckpointingStrategy(ModelParallelStrategy):
    """Saves and loads sharded models and optimizers.

    A single file holds what any Lightning checkpoint holds: it loads under another world size, HSDP or not, under DDP and one device,
    and with ``load_from_checkpoint``. A folder is written and read in parallel and loads under any world size of this strategy.
    Both become visible under their name only when they are complete and on disk.

    Attributes:
        load_weights_only: False trusts checkpoints that hold other objects than tensors and plain values (Lightning drops the
            ``weights_only`` argument of ``fit`` for strategies that restore after setup).
        async_save: Whether checkpoints of a running fit are written in the background.
        saves_wait: True makes them complete all the same when ``save_checkpoint`` returns.
    """

    load_weights_only = True
    failure_report: FailureReport | None = None
    async_save = False
    saves_wait = False  # True while something must be on disk when `save_checkpoint` returns
    _pending: BackgroundSave | None = None
    _save_group: dist.ProcessGroup | None = None
    _world_group: dist.ProcessGroup | None = None

    @property
    def collectives_are_lost(self) -> bool:
        """Whether a rank has failed, so that no collective can succeed any more."""
        return self.failure_report is not None and self.failure_report.collectives_are_lost

    def pass_point(self) -> None:
        """Count a point of the run that all ranks pass in the same order."""
        if self.failure_report is not None:
            self.failure_report.position += 1

    @override
    def barrier(self, name: str | None = None) -> None:
        if self.collectives_are_lost:
            return
        if self.failure_report is None or self._world_group is None:
            super().barrier(name)
        else:
            self.failure_report.meet(self._world_group)  # a rank that fails before it gets here need not be waited for

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        if self.collectives_are_lost:
            return {}
        if self.failure_report is not None:
            self.failure_report.come_together(SAVE_ON_ALL_RANKS)
        self.finish_saves()  # before a second copy of everything is made
        if self._save_distributed_checkpoint:
            return sharded_model_state(self.model)
        return full_model_state(self.model, keep=self.is_global_zero)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.model is not None
        if self.collectives_are_lost:
            return {}
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self._save_distributed_checkpoint:
            return sharded_optimizer_state(self.model, optimizer)
        return full_optimizer_state(optimizer, keep=self.is_global_zero)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if self.collectives_are_lost:  # a checkpoint on exception would wait for the rank that failed, and hide its error
            warnings.warn(f"{filepath} was not saved: a rank has failed, and the others hold only their shards.", stacklevel=2)
            return
        self.finish_saves()
        path = Path(self.broadcast(filepath)) if is_local(filepath) else filepath
        if not self._save_distributed_checkpoint:
            with fail_together(self._world_group, "writing a checkpoint"):  # the others would wait in Lightning's barrier behind it
                if self.is_global_zero:
                    self._save_file(checkpoint, path, storage_options)
            return
        if storage_options is not None or not isinstance(path, Path):
            raise ValueError(
                f"A sharded checkpoint is a folder of a local or shared file system, without storage_options, but got {filepath!r}."
                " Pass save_distributed_checkpoint=False to write one file anywhere."
            )
        new, metadata = beside(path, "new"), None
        with fail_together(self._world_group, "making the folder of a checkpoint"):  # all ranks write into it
            if self.is_global_zero:
                with writing(path, new):
                    discard(new)
                    new.mkdir(parents=True)
                    metadata = sharded_metadata(checkpoint)
        background = self._save_group if self._may_save_in_background else None
        with writing(path, new):
            finish = save_sharded_state(checkpoint, new, metadata, background=background)

        def write() -> None:
            with writing(path, new):
                finish()  # when it returns here, all ranks have written
                if self.is_global_zero:
                    publish(new, path)

        if background is not None:
            self._start_save(path, write)
        else:
            with fail_together(self._world_group, "naming a checkpoint"):
                write()

    def _save_file(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None) -> None:
        if self._may_save_in_background:
            kept = snapshot(checkpoint)
            self._start_save(path, lambda: self.checkpoint_io.save_checkpoint(kept, path, storage_options=storage_options))
        else:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    # -- in the background -------------------------------------------------------------------------------------------------------

    @property
    def _may_save_in_background(self) -> bool:
        """Whether training goes on after this checkpoint: one on an exception, or after the end, is complete when the call returns."""
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        return self.async_save and not self.saves_wait and trainer is not None and trainer.state.status == TrainerStatus.RUNNING

    def _start_save(self, path: _PATH, write: Callable[[], None]) -> None:
        self._pending = BackgroundSave(path, write)

    def finish_saves(self) -> None:
        """Wait until the checkpoint that is being written in the background is complete; collective over all ranks.

        Raises:
            RuntimeError: It could not be written; on every rank.
        """
        if not self.async_save or self.collectives_are_lost:
            return
        pending, self._pending = self._pending, None
        with fail_together(self._world_group, "writing a checkpoint in the background"):
            if pending is not None:
                pending.wait()

    def join_saves(self, timeout: float) -> None:
        """Give a checkpoint in the background time to become complete, whatever happens to it.

        Args:
            timeout: Most seconds to wait.
        """
        if self._pending is not None:
            self._pending.join(timeout)

    def after_save(self, action: Callable[[], None]) -> None:
        """Do something on this rank when the newest checkpoint is complete, or at once if nothing is being written.

        Args:
            action: Such as the removal of an older checkpoint; it does not happen if the newest one cannot be written.
        """
        if self._pending is None:
            action()
        else:
            self._pending.afterwards(action)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self.is_global_zero:
            self.after_save(lambda: self.checkpoint_io.remove_checkpoint(filepath))

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.saves_wait = False

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.finish_saves()
        self.saves_wait = True  # nobody would wait for what the hooks after this one save

    # -- loading -----------------------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path)) if is_local(checkpoint_path) else checkpoint_path
        assert self.model is not None
        assert self.lightning_module is not None
        strict, optimizers = self.lightning_module.strict_loading, self.optimizers
        weights_only = self.load_weights_only if weights_only is None else weights_only
        if isinstance(path, Path):
            require_checkpoint(path, reads_folders=True)
        if isinstance(path, Path) and is_sharded(path):
            meta = read_meta(path, weights_only=weights_only)
            self._require_optimizer_states(meta, path)
            load_sharded_state(path, self.model, optimizers, meta, strict=strict)
            return meta
        if isinstance(path, Path):
            with reading(path):
                checkpoint: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        else:
            checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        require_states(checkpoint, path)
        self._require_optimizer_states(checkpoint, path)
        load_full_model_state(self.model, checkpoint.pop("state_dict"), strict=strict)
        for optimizer, state in zip(optimizers, checkpoint.pop("optimizer_states", [])):
            load_full_optimizer_state(optimizer, state)
        return checkpoint

    def _require_optimizer_states(self, checkpoint: Mapping[str, Any], path: _PATH) -> None:
        stored = len(checkpoint.get("optimizer_states", []))
        if self.optimizers and stored != len(self.optimizers):
            raise KeyError(
                f"{path} holds the states of {stored} optimizers but training needs {len(self.optimizers)}; save_weights_only leaves them"
                " out. Resume from a full checkpoint, or load the weights with load_from_checkpoint and train without ckpt_path."
            )

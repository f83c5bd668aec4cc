"""Watch how evenly mini-batches are spread over ranks and micro-steps."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_rlbatch.callbacks.logger_outputs import log_picture
from lightning_rlbatch.callbacks.pictures import batch_plan_picture, contiguous_plan, require_matplotlib
from lightning_rlbatch.data.mini_batch import MiniBatch


class BalanceMonitor(Callback):
    """Draw the plan of a mini-batch every n optimizer steps, and log what balancing gained on every step.

    The module logs the plan's own numbers (``balance/plan/...``). This callback adds what the same samples would have cost in contiguous
    blocks: ``balance/before/efficiency``, ``balance/before/num_micro_steps`` and ``balance/speedup`` (estimated time before / after of
    the forwards and backwards). Pictures go to ``dirpath/step_000100.png`` and to loggers that take images (W&B, TensorBoard). Rank zero
    alone draws, in about 0.3 s.

    Args:
        dirpath: Folder of the pictures; None logs numbers only.
        every_n_steps: Draw every n-th optimizer step, the first one included.

    Raises:
        ValueError: ``every_n_steps`` is below 1.
        ModuleNotFoundError: At the start of training: pictures are asked for and matplotlib is missing.
    """

    def __init__(self, dirpath: str | None = None, *, every_n_steps: int = 100) -> None:
        if every_n_steps < 1:
            raise ValueError(f"Expected every_n_steps to be at least 1 but got {every_n_steps}.")
        self.dirpath = dirpath
        self.every_n_steps = every_n_steps

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if self.dirpath is not None:
            require_matplotlib()  # on every rank, before any of them waits

    @override
    def on_train_batch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int) -> None:
        plan = batch.plan if isinstance(batch, MiniBatch) else None
        if plan is None:
            return
        before = contiguous_plan(plan)
        after_work = plan.step_workload()
        metrics = {
            "balance/before/efficiency": before.efficiency(),
            "balance/before/num_micro_steps": float(before.num_micro_steps),
            "balance/speedup": before.step_workload() / after_work if after_work else 1.0,
        }
        pl_module.log_dict(metrics, batch_size=1)
        if trainer.is_global_zero and self.dirpath is not None and trainer.global_step % self.every_n_steps == 0:
            self._draw(trainer, batch)

    def _draw(self, trainer: "pl.Trainer", batch: MiniBatch) -> None:
        assert self.dirpath is not None
        assert batch.plan is not None
        step = trainer.global_step
        path = Path(self.dirpath) / f"step_{step:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        plan = batch.plan
        title = f"step {step}: {plan.num_samples} samples, {int(plan.lengths.sum()):,} tokens on {plan.dp_size} data-parallel ranks"
        batch_plan_picture(plan, path, title=title)
        for logger in trainer.loggers:
            log_picture(logger, "balance/plan", path, step)

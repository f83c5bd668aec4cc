"""Counters of Lightning's loops in a checkpoint that was saved behind an epoch, so that the run goes on where its data stand."""

from typing import Any

import lightning.pytorch as pl


def reopen_epoch(checkpoint: dict[str, Any], trainer: "pl.Trainer") -> None:
    """Make the checkpoint of an epoch's end the one of its last step, in place, where Lightning would go on from it with wrong counters.

    With ``max_steps`` Lightning enters an epoch that has ended once more, and counts it twice. An epoch that was cut (by ``max_steps``,
    ``should_stop`` or a signal) it takes for a whole one, though our data modules still owe the rest: that would be one iteration less.
    What was saved behind a step is read as it should be, in both cases.

    Args:
        checkpoint: What is about to be restored.
        trainer: The Trainer that resumes.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs, batches = loops.get("epoch_progress"), loops.get("epoch_loop.batch_progress")
    if not epochs or not batches or not _has_ended(epochs["current"]) or not batches["current"]["processed"]:
        return
    if trainer.max_steps == -1 and batches["is_last_batch"]:
        return
    for counts in (epochs["total"], epochs["current"]):
        counts["processed"] = counts["completed"] = counts["started"] - 1
    for counts in (batches["total"], batches["current"]):
        counts["completed"] = counts["processed"] - 1
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1  # the step of the loggers: Lightning adds the one that it finds missing


def _has_ended(counts: dict[str, int]) -> bool:
    return counts["ready"] == counts["started"] == counts["processed"] > 0


def count_begun_epoch(trainer: "pl.Trainer") -> None:
    """Count the epoch that begins when a run goes on from behind the last step of the one before, which Lightning forgets.

    Checkpoints of that run would say that an epoch has ended which has not begun.

    Args:
        trainer: The Trainer, about to train.
    """
    loop: Any = trainer.fit_loop  # not annotated in Lightning
    if loop.restarted_mid_epoch and loop.epoch_progress.current.started == loop.epoch_progress.current.processed:
        loop.epoch_progress.increment_ready()
        loop.epoch_progress.increment_started()

"""Under DDP, too, end all ranks within seconds when one fails, and tell them which rank it was and why."""

import threading
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_rlbatch.strategies.failure import SAVE_ON_ALL_RANKS, FailureReport, require_ranks


class _Runs:
    """Counts the runs of this process: all ranks call the Trainer alike, so that the number is the same on all of them."""

    number = 0


class WatchesRanks(Callback):
    """Carries the first error of any rank to all others under a strategy that is not ours; see :class:`FailureReport`.

    A rank that fails, wherever that is, leaves its note when Lightning handles the exception. The others find it where they meet (before
    models are made, and behind that), or when a collective fails because the rank has gone. A thread begins to watch as soon as the ranks
    have met: Lightning calls no callback between that and the data module's setup, in which a rank may fail while others wait.
    """

    def __init__(self) -> None:
        _Runs.number += 1
        self._token = f"run {_Runs.number}"
        self._report: FailureReport | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._begin, daemon=True, name="rlbatch-watch-begins").start()

    def __deepcopy__(self, memo: dict[int, Any]) -> "WatchesRanks":
        """Return the same callback: there is one per run."""
        return self

    def _begin(self) -> None:
        while not self._ended.wait(0.1) and self.report() is None:
            pass

    def report(self) -> FailureReport | None:
        """Return this rank's report, made without communication when it is first wanted; None before the ranks have met."""
        with self._lock:
            if self._report is None and dist.is_initialized():
                self._report = FailureReport(dist.get_rank(), dist.get_world_size(), self._token)
            return self._report

    def meet(self) -> None:
        """Wait for all ranks, and give up when one of them has failed; collective.

        Raises:
            PeerFailedError: It has.
        """
        report = self.report()
        if report is not None:
            assert dist.group.WORLD is not None
            report.meet(dist.group.WORLD)

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        self.meet()  # behind the data module's setup

    @override
    def on_save_checkpoint(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]) -> None:
        report = self.report()
        if report is not None and not report.collectives_are_lost:
            report.come_together(SAVE_ON_ALL_RANKS)

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        self._ended.set()
        if self._report is not None:
            self._report.close(in_order=True)

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        self._ended.set()
        report = self.report()
        if report is None:
            return
        told = report.translate(exception)
        report.close()
        if told is not exception:
            for logger in trainer.loggers:  # what Lightning does behind this hook
                logger.finalize("failed")
            raise told from exception


def pass_point(trainer: Any) -> None:
    """Count a point of the run that all ranks pass in the same order, if they are watched.

    Args:
        trainer: The Trainer.
    """
    reports = [callback.report() for callback in trainer.callbacks if isinstance(callback, WatchesRanks)]
    for report in [getattr(trainer.strategy, "failure_report", None), *reports]:
        if report is not None:
            report.position += 1


def watches_ranks(trainer: "pl.Trainer") -> list[Callback]:
    """Return the callback that a run needs, if it does.

    Args:
        trainer: The Trainer, before its processes meet.

    Raises:
        RuntimeError: They have lost each other in an earlier run.
    """
    if not isinstance(trainer.strategy, DDPStrategy) or trainer.world_size == 1:
        return []
    require_ranks()
    return [WatchesRanks()]


def meet_before_communicating(trainer: Any) -> None:
    """Wait for all ranks if a callback watches them: one that could not make its models ends all of them here.

    Args:
        trainer: The Trainer.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, WatchesRanks):
            callback.meet()

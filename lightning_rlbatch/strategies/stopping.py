"""Stop all ranks at the same step, whichever rank was told to stop."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import lightning.pytorch as pl

from lightning_rlbatch.distributed.reductions import all_reduce_max
from lightning_rlbatch.strategies.access import meshes_of


class StopAgreement:
    """Makes ``trainer.should_stop`` and signals take effect on all ranks after the same optimizer step.

    Lightning looks at ``should_stop`` on each rank alone, and its signal handlers communicate wherever the signal happens to arrive:
    a rank that stops or broadcasts while the others are in another collective leaves them waiting. Here a handler only takes note;
    :meth:`agree` asks all ranks (one all-reduce of a few numbers per step) and runs Lightning's own handler on all of them together.

    Args:
        trainer: A Trainer that has started training: Lightning's signal handlers are installed.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self.trainer = trainer
        self._group = meshes_of(trainer).world_group
        self._handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}
        self._received: set[int] = set()
        if threading.current_thread() is not threading.main_thread():
            return  # Python runs signal handlers in the main thread, and allows no other one to set them
        for number in self._signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def _signals(self) -> list[signal.Signals]:
        environment = getattr(self.trainer.strategy, "cluster_environment", None)
        requeue = getattr(environment, "requeue_signal", None)  # SLURM's; the others have none
        return [signal.SIGTERM] if requeue is None else [signal.SIGTERM, requeue]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.add(number)

    def agree(self) -> None:
        """Stop everywhere if one rank stops; collective over all ranks."""
        wanted = {"should_stop": float(self.trainer.should_stop)}
        wanted |= {f"signal {int(number)}": float(number in self._received) for number in self._handlers}
        agreed = all_reduce_max(wanted, self._group)
        self.trainer.should_stop = agreed["should_stop"] > 0
        self._received.clear()
        for number, handler in self._handlers.items():
            if agreed[f"signal {int(number)}"] > 0:
                self._handle(number, handler)

    def _handle(self, number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
        strategy: Any = self.trainer.strategy  # others than ours pay no attention
        strategy.saves_wait = True  # SLURM's handler saves and asks to be requeued: nothing may still be being written then
        try:
            handler(number, None)
        finally:
            strategy.saves_wait = False

"""The hooks in which all ranks agree whether to stop."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_rlbatch.modules.own_hooks import KeepsOwnHooks
from lightning_rlbatch.modules.restarts import count_begun_epoch
from lightning_rlbatch.modules.swallowed_stops import require_whole_epoch, require_whole_fit, require_whole_validation
from lightning_rlbatch.strategies.stopping import Result, StopAgreement, end_at_sigterm


class StopsTogether(KeepsOwnHooks):
    """Stops all ranks after the same step, or in the same collection, whichever of them is told to stop; and never by mistake.

    A subclass that overrides one of the hooks calls it, or :class:`KeepsOwnHooks` does.
    """

    _stops: StopAgreement | None = None

    @override
    def on_validation_start(self) -> None:
        if self.trainer.sanity_checking or self.trainer.state.fn != TrainerFn.FITTING:
            self._leave_training()

    @override
    def on_predict_start(self) -> None:
        self._leave_training()

    def _leave_training(self) -> None:
        self._stops = None  # that of a fit that failed
        end_at_sigterm()

    @override
    def on_train_start(self) -> None:
        if self.trainer.global_step > 0 and self.trainer.ckpt_path is None:
            rank_zero_warn(
                f"A second fit of this Trainer goes on at step {self.trainer.global_step} with the weights and the position in the data,"
                " but with a new optimizer and learning-rate schedule: it is not one long run. For that, pass a checkpoint as ckpt_path."
            )
        count_begun_epoch(self.trainer)
        self._stops = StopAgreement(self.trainer)

    @override
    def on_train_end(self) -> None:
        if self._stops is not None:
            self._stops.end()
        self._stops = None
        require_whole_fit(self.trainer)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._stop_together()

    @override
    def on_train_epoch_end(self) -> None:
        require_whole_epoch(self.trainer)
        # The progress bar of rank zero has just shown, and so reduced, what was logged with `on_epoch` and `sync_dist`; the other
        # ranks would do so after this hook only. Every collective in between would meet that reduction: let them do it now.
        _ = self.trainer.callback_metrics
        self._stop_together()

    @override
    def on_validation_end(self) -> None:
        require_whole_validation(self.trainer)
        self._stop_together()

    def _stop_together(self) -> None:
        if self._stops is not None:  # this hook runs after the callbacks', and before Lightning looks whether to stop
            self._stops.agree()

    def stoppable(self, collect: Callable[[], Result], *, only_signals: bool = False) -> Result:
        """Run what collects rollouts, on all ranks together; stop all of them if one is to stop in the meantime.

        Args:
            collect: Collects; what it does alone on this rank, inside :meth:`interruptible`, ends at once.
            only_signals: True does not heed ``should_stop``.
        """
        return collect() if self._stops is None else self._stops.collect(collect, only_signals=only_signals)

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a context for generation and rewards: without collectives inside, and ended by the wish to stop."""
        return nullcontext() if self._stops is None else self._stops.interruptible()

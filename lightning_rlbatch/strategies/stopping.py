"""Stop all ranks at the same step, whichever rank was told to stop."""

import signal
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_rlbatch.distributed.failure import mark_as_told
from lightning_rlbatch.distributed.reductions import all_reduce_max
from lightning_rlbatch.strategies.access import meshes_of
from lightning_rlbatch.strategies.interrupting import StopWatch, is_stop
from lightning_rlbatch.strategies.watching import pass_point

Result = TypeVar("Result")


class CollectionStopped(Exception):  # noqa: N818 - no error: the run ends as it does after a step
    """All ranks stop, and the rollouts that were being collected are not trained on."""


class Terminated(SystemExit):
    """SIGTERM arrived where the ranks have no agreement to stop together: it ends its rank as an error does, of which the others hear."""

    def __str__(self) -> str:
        return "SIGTERM"


class _EndsThisRank:
    """Handles SIGTERM outside of training, where Lightning's handler communicates wherever the signal happens to arrive."""

    def __init__(self, replaced: Any) -> None:
        self.replaced = replaced

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise Terminated(128 + number)


def end_at_sigterm() -> None:
    """Let SIGTERM end this rank at once, until a :class:`StopAgreement` begins or Lightning gives the handlers back."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and not isinstance(handler, _EndsThisRank):
        signal.signal(signal.SIGTERM, _EndsThisRank(handler))


class StopAgreement:
    """Makes ``trainer.should_stop`` and signals take effect on all ranks after the same optimizer step, or in the same collection.

    Lightning looks at ``should_stop`` on each rank alone, and its signal handlers communicate wherever the signal happens to arrive:
    a rank that stops or broadcasts while the others are in another collective leaves them waiting. Here a handler only takes note;
    :meth:`agree` asks all ranks (one all-reduce of a few numbers per step) and runs Lightning's own handler on all of them together.
    Inside :meth:`collect` the phases that a rank runs alone are interrupted, since they may take minutes.

    Args:
        trainer: A Trainer that has started training: Lightning's signal handlers are installed.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self.trainer = trainer
        self._group = meshes_of(trainer).world_group
        self._handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}
        self._received: set[int] = set()
        self._watch: StopWatch | None = None
        self._token = trainer.strategy.broadcast(uuid.uuid4().hex)
        self._num_collections = 0
        if threading.current_thread() is not threading.main_thread():
            return  # Python runs signal handlers in the main thread, and allows no other one to set them
        for number in self._signals():
            handler = signal.getsignal(number)
            if isinstance(handler, _EndsThisRank):
                handler = handler.replaced
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, _Noting(self, handler))

    def _signals(self) -> list[signal.Signals]:
        environment = getattr(self.trainer.strategy, "cluster_environment", None)
        requeue = getattr(environment, "requeue_signal", None)  # SLURM's; the others have none
        return [signal.SIGTERM, signal.SIGINT] if requeue is None else [signal.SIGTERM, signal.SIGINT, requeue]

    def end(self) -> None:
        """Give back the handler of Ctrl-C; Lightning gives back those that it set itself."""
        if isinstance(signal.getsignal(signal.SIGINT), _Noting):
            signal.signal(signal.SIGINT, self._handlers.get(signal.SIGINT, signal.default_int_handler))

    def note(self, number: int) -> None:
        """Note a signal of this rank; a second Ctrl-C does not wait for the other ranks.

        Args:
            number: Of the signal.

        Raises:
            KeyboardInterrupt: Ctrl-C came before and nothing has come of it yet, or no training is running.
        """
        running = self.trainer.state.status == TrainerStatus.RUNNING
        if number == signal.SIGINT and (number in self._received or not running):
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            rank_zero_info(
                "\nCtrl-C: all ranks stop after this step. Press it once more to stop at once, without a checkpoint of this step."
            )
        self._received.add(number)
        if self._watch is not None:
            self._watch.request()

    def _may_stop_early(self) -> bool:
        """Whether ``should_stop`` is set and the Trainer would heed it."""
        trainer = self.trainer
        enough_steps = not trainer.min_steps or trainer.global_step >= trainer.min_steps
        return trainer.should_stop and enough_steps and trainer.current_epoch >= (trainer.min_epochs or 0)

    def agree(self) -> None:
        """Stop everywhere if one rank stops; collective over all ranks."""
        pass_point(self.trainer)
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
        except KeyboardInterrupt as error:  # all ranks raise it here
            mark_as_told(error, self.trainer.world_size)
            raise
        finally:
            strategy.saves_wait = False

    # -- collections -------------------------------------------------------------------------------------------------------------

    def collect(self, run: Callable[[], Result], *, only_signals: bool = False) -> Result:
        """Collect rollouts, and stop all ranks if one of them is to stop in the meantime; collective over all ranks.

        What was collected is thrown away then: the checkpoint of a stop is the state before the collection, which a resumed run repeats.

        Args:
            run: Collects; runs again after a signal that does not end the run (SLURM's request to save).
            only_signals: True does not heed ``should_stop``, which comes at the end of a validation.

        Raises:
            SIGTERMException: A rank got SIGTERM.
            KeyboardInterrupt: A rank got Ctrl-C.
            CollectionStopped: ``should_stop`` is set.
        """
        while True:
            finished = None
            try:
                with self._watching((lambda: False) if only_signals else self._may_stop_early):
                    finished = (run(),)
            except BaseException as error:
                if not is_stop(error):
                    raise
            self.agree()
            if self.trainer.received_sigterm:
                raise SIGTERMException
            if self._may_stop_early() and not only_signals:
                raise CollectionStopped
            if finished is not None:
                return finished[0]

    @contextmanager
    def _watching(self, wants_to_stop: Callable[[], bool]) -> Iterator[None]:
        self._num_collections += 1
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGURG"):
            yield
            return
        key = f"{self._token}/{self._num_collections}"
        with StopWatch(set(self._handlers), wants_to_stop, key, requested=bool(self._received)) as self._watch:
            try:
                yield
            finally:
                self._watch = None

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a context for a phase of :meth:`collect` that communicates with nobody."""
        return nullcontext() if self._watch is None else self._watch.interruptible()


class _Noting:
    """A signal handler that does not keep a run alive: that of Ctrl-C outlives a run that failed."""

    def __init__(self, agreement: StopAgreement, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._agreement = weakref.ref(agreement)
        self._handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        agreement = self._agreement()
        if agreement is None:
            self._handler(number, frame)
        else:
            agreement.note(number)

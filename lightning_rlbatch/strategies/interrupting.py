"""Carry the wish to stop to every rank while each of them runs something long of its own: generation, reward functions."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_rlbatch.distributed.failure import PeerFailedError


class StopRequested(BaseException):
    """The run is to stop, on this rank or on another: a phase that communicates with nobody ends here.

    Like KeyboardInterrupt it is no error, and not for the ``except Exception`` of a reward function.
    """


def is_stop(error: BaseException) -> bool:
    """Return whether a phase ended because some rank was to stop.

    Args:
        error: What the phase raised on this rank.
    """
    return isinstance(error, StopRequested) or (isinstance(error, PeerFailedError) and StopRequested.__name__ in str(error))


class StopWatch:
    """Ends interruptible phases on all ranks within a second of a signal, or of ``should_stop``, on any of them; a context manager.

    Python runs signal handlers in the main thread, between two of its instructions: a rank that waits in a collective for another one's
    rollouts does not run them. So a thread of every rank listens (the system writes each signal's number to a pipe), tells the other
    ranks through the store at which they met, and interrupts its own main thread where that is inside :meth:`interruptible`.

    Every rank enters and leaves the context together, in its main thread.

    Args:
        signals: Numbers of the signals that mean to stop.
        wants_to_stop: Says whether this rank is to stop for another reason; called in the thread.
        key: The same on all ranks, different in every context.
        requested: Whether this rank is to stop already.
    """

    PERIOD = 0.5  # seconds between two looks

    def __init__(self, signals: set[int], wants_to_stop: Callable[[], bool], key: str, *, requested: bool) -> None:
        self._signals = signals
        self._wants_to_stop = wants_to_stop
        self._key = f"rlbatch/stop/{key}"
        self._requested = requested  # here or elsewhere
        self._inside = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True, name="rlbatch-stop-watch")
        self._main = threading.get_ident()

    def __enter__(self) -> "StopWatch":
        """Start to listen."""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._previous_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._previous_handler = signal.signal(signal.SIGURG, self._on_poke)  # a signal that nobody sends and that ends nothing
        self._thread.start()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop listening."""
        self._ended.set()
        self._thread.join(4 * self.PERIOD)  # no longer: it waits for minutes to connect to the store of a rank 0 that was killed
        signal.set_wakeup_fd(self._previous_writer)
        signal.signal(signal.SIGURG, self._previous_handler)
        os.close(self._reader)
        os.close(self._writer)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise :class:`StopRequested` inside of the context as soon as any rank is to stop; no collective may be in it."""
        try:
            self._inside = True
            self._raise_if_requested()
            yield
        finally:
            self._inside = False

    def request(self) -> None:
        """Note that this rank is to stop; called by its signal handlers, in the main thread."""
        self._requested = True
        self._raise_if_requested()

    def _on_poke(self, number: int, frame: FrameType | None) -> None:
        self._raise_if_requested()

    def _raise_if_requested(self) -> None:
        if self._inside and self._requested:
            self._inside = False
            raise StopRequested("the run is to stop")

    def _listen(self) -> None:
        store: Any = distributed_c10d._get_default_store() if dist.is_initialized() else None
        store = None if store is None else store.clone()  # a waiting call of the main thread would block this one
        told = False
        while not self._ended.wait(self.PERIOD):
            if self._heard_signal() or self._wants_to_stop():
                self._requested = True
            try:
                if store is not None and self._requested and not told:
                    store.set(self._key, "")
                    told = True
                elif store is not None and not self._requested:
                    self._requested = store.check([self._key])
            except RuntimeError:  # rank 0 has gone with its store; the main thread notices by itself
                return
            if self._requested:
                signal.pthread_kill(self._main, signal.SIGURG)

    def _heard_signal(self) -> bool:
        with suppress(BlockingIOError):
            return not self._signals.isdisjoint(os.read(self._reader, 4096))
        return False

"""When one rank fails, end the others within seconds and tell them which rank it was and why."""

import faulthandler
import os
import re
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.api import CheckpointException

from lightning_rlbatch import distributed
from lightning_rlbatch.distributed.failure import PeerFailedError, was_told_to
from lightning_rlbatch.distributed.reductions import collective_device

# How the errors begin that a rank gets when another one has gone: gloo, NCCL, torch's store, our own `fail_together`.
_LOST = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|[Tt]imed out|socket|TCPStore|ProcessGroup|[Pp]rocess group"
    r"|Another rank was lost"
)
_NOTE, _SEEN, _SURVIVOR, _OVER, _CLOSED = "failure", "seen", "survivor", "over", "closed"
_COME, _ASKED, _POSITION = "come", "asked", "position"
SAVE_ON_ALL_RANKS = (
    "a checkpoint is made by all of them. Call trainer.save_checkpoint on every rank, not only where is_global_zero is True."
)
_SILENCE = 5.0  # seconds after which a rank that tells its position once a second is taken for lost
_TORCH = Path(dist.__file__).parent.parent
_WAIT_THEMSELVES = (Path(__file__), Path(distributed.__file__).parent)  # files that wait in torch's native code, not in its Python


class _Process:
    """State of this process, as its default process group is: once its ranks have lost each other they cannot meet again."""

    has_lost_its_ranks = False


def require_ranks() -> None:
    """Refuse to run several ranks in a process whose ranks have lost each other; else it would wait for them.

    Raises:
        RuntimeError: They have.
    """
    if _Process.has_lost_its_ranks:
        raise RuntimeError(
            "This process was a rank of an earlier run in which one rank failed while the others were waiting for it, and they have ended."
            " Start all processes again; in a notebook use start_method='fork', which starts new ranks for every run."
        )


class FailureReport:
    """Carries the first error of any rank to all others, through the store at which the ranks met.

    A rank that raises leaves a note there. A thread of every rank looks for one once a second, over a connection of its own. The
    failed rank ends when all have seen it; its connections close with it, so that ranks which wait for it in a collective get an error
    from the backend, in place of which the note is raised. :meth:`meet` waits for the other ranks and for a note together. Where the
    main thread waits for ever in native code (NCCL does not notice a lost rank), the watching thread ends the process, and says why:
    after a note, and when the store has gone with rank 0 though the run is not over.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        token: The same on all ranks, different in every run: a store may outlive a run.
        patience: Seconds to wait for the other ranks to see a note, or to tell that they are alive.
        grace: Seconds that a rank gets to end by itself after another one has failed.
    """

    def __init__(self, rank: int, world_size: int, token: str, *, patience: float = 3.0, grace: float = 15.0) -> None:
        self.rank = rank
        self.world_size = world_size
        self.patience = patience
        self.grace = grace
        self.collectives_are_lost = False
        self.position = 0  # counts points of a run that all ranks pass in the same order; see `come_together`
        self._num_meetings = 0
        # Holds the store alive too: rank 0 serves it to the others when its own groups are gone.
        self._base = cast(Any, distributed_c10d._get_default_store())
        self._token = f"rlbatch/{token}"
        self._store = distributed_c10d.PrefixStore(self._token, self._base)
        self._note: str | None = None
        self._counted: set[str] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="rlbatch-failure-watch")
        self._watcher.start()

    def close(self, *, in_order: bool = False) -> None:
        """Stop watching: the run is over.

        Args:
            in_order: Whether it ended well on this rank. Rank 0 then waits until all others know that the run is over, a few seconds at
                most: to a rank with more to do after the last collective, a store that has gone means that rank 0 was lost.
        """
        if in_order and not self._ended.is_set():
            with suppress(RuntimeError):
                self._count(self._store, _CLOSED)
                if self.rank == 0:
                    self._store.set(_OVER, "")
                    self._wait(lambda: self._store.add(_CLOSED, 0) >= self.world_size)
        self._ended.set()

    def _count(self, store: Any, name: str) -> None:
        """Add this rank to those that have seen the note, or have closed, once."""
        with self._lock:
            if name not in self._counted:
                self._counted.add(name)
                store.add(name, 1)

    def _watch(self) -> None:
        try:
            # A connection of its own, else a waiting call of the main thread blocks it. Made in the thread: if rank 0 has gone
            # already, torch tries for as long as its `timeout`, and the main thread is to notice by itself.
            store: Any = distributed_c10d.PrefixStore(self._token, self._base.clone())
        except RuntimeError:
            return
        while not self._ended.wait(1.0):
            try:
                if store.check([_NOTE]):
                    self._note = store.get(_NOTE).decode()
                    self._count(store, _SEEN)
                    self._end_process(self._note)
                    return
                if store.check([_OVER]):
                    self._count(store, _CLOSED)
                    return
                if store.check([_ASKED]):
                    store.set(f"{_POSITION}/{self.rank}", f"{self.position} {time.monotonic()}")
            except RuntimeError:
                if _is_gone(self._base):
                    self._end_process("Rank 0 was lost: it ended without an error of its own, or was killed.")
                    return

    def _end_process(self, reason: str) -> None:
        """End this process if the main thread has not ended by itself after a while."""
        if self._ended.wait(self.grace):
            return
        print(f"Rank {self.rank} ends because another one failed and it cannot go on.\n{reason}", file=sys.stderr, flush=True)
        with suppress(OSError, ValueError, RuntimeError):  # a stderr that is no file
            faulthandler.dump_traceback(sys.stderr)  # where each thread waits
        os._exit(1)

    def meet(self, group: dist.ProcessGroup) -> None:
        """Wait for all ranks, and give up when one of them has left a note; collective.

        Args:
            group: All ranks.

        Raises:
            PeerFailedError: Another rank failed; it need not come here.
        """
        arrived = dist.all_reduce(torch.zeros(1, device=collective_device(group)), group=group, async_op=True)
        assert arrived is not None  # this rank belongs to the group
        pause = 1e-4
        while not arrived.is_completed():
            if self._note is not None:
                raise PeerFailedError(self._note)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        arrived.wait()

    def come_together(self, what: str, *, patience: float = 30.0) -> None:
        """Wait until all ranks have come to something that they can only do together, without a collective; give up if one went past.

        A rank that goes into the next collective alone, while the others are in this one, leaves all of them waiting. A rank may be late
        for as long as it likes; if one is not heard of any more, the collective that follows has to tell.

        Args:
            what: What they do, and who should call it, for the message.
            patience: Seconds after which a rank that waits behind the end of the run says so, and goes on.

        Raises:
            RuntimeError: Another rank has passed a later point of the run.
            PeerFailedError: Another rank failed.
        """
        self._num_meetings += 1
        key, start, pause = f"{_COME}/{self._num_meetings}", time.monotonic(), 1e-3
        heard: dict[int, tuple[str, float]] = {}  # what each rank said last, and when it said something new
        self._store.add(key, 1)
        while self._store.add(key, 0) < self.world_size:
            if self._note is not None:
                raise PeerFailedError(self._note)
            time.sleep(pause)
            pause, now = min(2 * pause, 0.1), time.monotonic()
            if self._ended.is_set() and now > start + patience:
                warnings.warn(f"Rank {self.rank} has waited {patience:.0f} s for the others: {what}", stacklevel=2)
                return
            if self._ended.is_set() or now < start + 1.0:
                continue
            self._store.set(_ASKED, "")
            for rank in set(range(self.world_size)) - {self.rank}:
                said = self._said_by(rank)
                heard[rank] = (said, now) if rank not in heard or heard[rank][0] != said else heard[rank]
                if int(said.partition(" ")[0]) > self.position:
                    raise RuntimeError(f"Rank {self.rank} waits for all ranks, but rank {rank} has gone past this point: {what}")
            if any(now - when > _SILENCE for _, when in heard.values()):
                return

    def _said_by(self, rank: int) -> str:
        key = f"{_POSITION}/{rank}"
        return str(self._store.get(key), errors="replace") if self._store.check([key]) else "0"

    def translate(self, error: BaseException) -> BaseException:
        """Return the error that this rank should raise: its own, or the one that another rank left a note of.

        Args:
            error: What this rank raised.
        """
        if isinstance(error, SIGTERMException) or self.collectives_are_lost:
            return error  # all ranks stop together
        if was_told_to(error, self.world_size):
            return error  # all ranks raise in step: they can save a checkpoint, and run again
        self.collectives_are_lost = True
        _Process.has_lost_its_ranks = True
        is_own = not _is_lost_peer(error)
        try:
            if is_own:
                self._leave_note(error)
                return error
            return PeerFailedError(self._note or self._find_note())
        except (RuntimeError, OSError):  # the store has gone with rank 0
            return (
                error
                if is_own
                else PeerFailedError(
                    f"Rank 0 was lost: it ended without an error of its own, or was killed. Rank {self.rank} noticed it in: {error}"
                )
            )
        finally:
            self.close()
            self._leave_groups()

    def _leave_note(self, error: BaseException) -> None:
        if isinstance(error, PeerFailedError):
            self._count(self._store, _SEEN)  # the failing rank itself leaves the note, and need not wait for this one
            return
        try:
            text = f"{type(error).__name__}: {error}"
        except Exception:  # an exception whose __str__ fails
            text = type(error).__name__
        where = "".join(traceback.format_tb(error.__traceback__)[-3:])
        note = f"Rank {self.rank} failed: {text[:2000]}\nIts traceback ended:\n{where[-4000:]}"
        # The store takes UTF-8 alone: not the halves of characters that a message may quote from a file's name or a broken completion.
        stored = self._store.compare_set(_NOTE, "", note.encode(errors="backslashreplace").decode())
        first = re.match(r"Rank (\d+) failed", str(stored, errors="replace"))
        with suppress(AttributeError, TypeError):  # an exception that takes no attributes
            error.first_failed_rank = self.rank if first is None else int(first[1])  # type: ignore[attr-defined]  # who is to say it
        self._wait(lambda: self._store.add(_SEEN, 0) >= self.world_size)

    def _find_note(self) -> str:
        self._store.set(f"{_SURVIVOR}/{self.rank}", "")
        ranks = range(self.world_size)
        if self._wait(lambda: self._store.check([_NOTE]) or all(self._store.check([f"{_SURVIVOR}/{rank}"]) for rank in ranks)):
            if self._store.check([_NOTE]):
                return str(self._store.get(_NOTE), errors="replace")
            return (
                "The ranks lost each other though none of them failed: they ran different collectives, or waited longer than `timeout`."
                " RLBatchFSDPStrategy(check_collectives=True) names the first difference."
            )
        missing = ", ".join(str(rank) for rank in ranks if not self._store.check([f"{_SURVIVOR}/{rank}"]))
        finding = (
            f"Rank {missing} was lost without an error of its own: killed, out of host memory, crashed in native code, or busy for longer"
            " than the others wait (`timeout`)."
        )
        return str(self._store.compare_set(_NOTE, "", finding), errors="replace")  # a rank that is busy for ever ends by it

    def _leave_groups(self) -> None:
        """Make every later collective of this process a plain error or nothing, in place of an endless wait."""
        thread = threading.Thread(target=dist.destroy_process_group, daemon=True)  # it may wait for a collective in flight
        thread.start()
        thread.join(2.0)

    def _wait(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + self.patience
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def _is_gone(store: Any) -> bool:
    """Return whether a store over TCP has no server any more; False for others, and if it only was too slow to answer."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if host is None or port is None:
        return False
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError:
        return True
    return False


def _is_lost_peer(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, comes from torch's communication, not from a reward server or a logger."""
    while error is not None and not isinstance(error, PeerFailedError):
        if isinstance(error, (RuntimeError, CheckpointException)) and _LOST.search(str(error)) and _was_raised_in_torch(error):
            return True
        error = error.__cause__
    return False


def _was_raised_in_torch(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    last = Path(frames[-1].filename)
    return any(last.is_relative_to(place) for place in (_TORCH, *_WAIT_THEMSELVES))

"""An error on one rank becomes an error on every rank, before anybody waits in a collective."""

import traceback
from contextlib import suppress
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist

from lightning_rlbatch.distributed.reductions import collective_device, gather_strings, group_size, stable_hash


class PeerFailedError(RuntimeError):
    """Another rank failed; the message names the rank, the phase and its exception.

    Attributes:
        num_ranks_told: Ranks that raise together, in step with each other; 0 if they were in different places.
    """

    num_ranks_told = 0


def was_told_to(error: BaseException, num_ranks: int) -> bool:
    """Return whether an error was raised by as many ranks together, so that their collectives are still in step.

    Args:
        error: What this rank raised, its own error or a :class:`PeerFailedError`.
        num_ranks: Number of ranks.
    """
    return getattr(error, "num_ranks_told", 0) == num_ranks


def mark_as_told(error: BaseException, num_ranks: int) -> None:
    """Mark an error that so many ranks raise together, see :func:`was_told_to`.

    Args:
        error: What this rank raises; one that takes no attributes stays unmarked.
        num_ranks: Number of ranks.
    """
    with suppress(AttributeError, TypeError):
        error.num_ranks_told = num_ranks  # type: ignore[attr-defined]  # a mark for `was_told_to`


def end_of_data_is_an_error(error: StopIteration, where: str) -> RuntimeError:
    """Return what to raise in place of a ``StopIteration`` out of a user's code, such as ``next(rows)`` after the last row.

    Lightning takes it for the end of the epoch, and training goes on without a word.

    Args:
        error: What was raised; the cause of the new error.
        where: What it came from.
    """
    value = f" ({error.value})" if error.value is not None else ""
    stopped = RuntimeError(f"{where} raised StopIteration{value}: an iterator that its code reads by next() is at its end.")
    return stopped.with_traceback(error.__traceback__)


class fail_together:  # noqa: N801 - used as `with fail_together(...)`, named like contextlib.suppress
    """Run a block that communicates with nobody; if it raises on any rank of the group, raise on every rank.

    A rank that raises where the others go on leaves them waiting in their next collective until it times out, and their
    timeout hides the cause. Put this around each phase that runs code which may fail on one rank only: reward functions,
    generation, user losses, reading files. The block must contain no collective over the group or a group that overlaps it,
    and every rank must enter the same phases in the same order.

    At the end of the block there is one all-reduce of 24 bytes; only after a failure one more exchange, of the messages.
    Interrupts and exits (``KeyboardInterrupt``, ``SystemExit``) are told to the others in the same way.

    Args:
        group: Ranks that fail together; None for a process that runs alone (then this does nothing).
        phase: What the block does, for the message and to detect ranks that are in different phases.

    Raises:
        PeerFailedError: (a RuntimeError) on the ranks whose own block succeeded; the cause holds the remote traceback. A
            rank whose block raised gets its own exception.
        RuntimeError: Ranks ended different phases, or a rank was lost (killed).

    Example:
        ```python
        with fail_together(meshes.world_group, "rewards"):
            rewards = reward_fn(prompts, completions)
        ```
    """

    def __init__(self, group: dist.ProcessGroup | None, phase: str) -> None:
        self.group = group
        self.phase = phase

    def __enter__(self) -> None:
        """Start the block; nothing is communicated."""

    def __exit__(self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> Literal[False]:
        """Tell the others how the block ended."""
        if isinstance(error, StopIteration):
            stopped = end_of_data_is_an_error(error, f"Phase '{self.phase}'")
            self._tell_end(stopped)
            raise stopped from error
        self._tell_end(error)
        return False  # a rank that failed raises its own exception

    def _tell_end(self, error: BaseException | None) -> None:
        if self.group is None or group_size(self.group) == 1:
            return
        try:
            self._agree(self.group, error)
        except PeerFailedError:
            raise
        except RuntimeError as lost:
            if error is None:
                raise RuntimeError(
                    f"Another rank was lost, or runs something else, at the end of phase '{self.phase}'. "
                    "Its own log has the cause (killed, out of host memory, crashed in native code)."
                ) from lost

    def _agree(self, group: dist.ProcessGroup, error: BaseException | None) -> None:
        phase = stable_hash(self.phase)
        state = torch.tensor([int(error is not None), phase, -phase], dtype=torch.int64, device=collective_device(group))
        dist.all_reduce(state, op=dist.ReduceOp.MAX, group=group)
        anyone_failed, largest, smallest = state.tolist()
        if not anyone_failed and largest == -smallest:
            return
        try:
            first = self._tell(group, error)
        except PeerFailedError as told:
            mark_as_told(told, group_size(group))
            raise
        if error is not None:
            mark_as_told(error, group_size(group))
            with suppress(AttributeError, TypeError):  # an exception that takes no attributes
                error.first_failed_rank = first  # type: ignore[attr-defined]  # a mark for who is to say it

    def _tell(self, group: dist.ProcessGroup, error: BaseException | None) -> int:
        """Return the first rank that failed, on those that did; raise on the others."""
        summary, trace = ("", "") if error is None else _describe(error)
        summaries, traces = gather_strings(summary, group), gather_strings(trace, group)
        phases = gather_strings(self.phase, group)
        ranks = dist.get_process_group_ranks(group)
        failed = [index for index, text in enumerate(summaries) if text]
        if error is not None:
            return ranks[failed[0]]
        if failed:
            first = failed[0]
            others = f" (so did ranks {', '.join(str(ranks[index]) for index in failed[1:])})" if failed[1:] else ""
            raise PeerFailedError(f"Rank {ranks[first]} failed in phase '{phases[first]}'{others}: {summaries[first]}") from RuntimeError(
                f"Traceback of rank {ranks[first]}:\n{traces[first]}"
            )
        listed = "; ".join(f"rank {rank}: '{name}'" for rank, name in zip(ranks, phases))
        raise PeerFailedError(f"Ranks ended different phases together, so one of them skipped or repeated one: {listed}.")


def _describe(error: BaseException) -> tuple[str, str]:
    """Return type and message, and the traceback, both of bounded length: messages may hold whole tensors."""
    try:
        summary = f"{type(error).__name__}: {error}"
    except Exception:  # an exception whose __str__ fails must not leave the other ranks waiting
        summary = type(error).__name__
    return summary[:2000], "".join(traceback.format_tb(error.__traceback__))[-10000:]

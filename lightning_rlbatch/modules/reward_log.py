"""What reward functions tell beside their rewards."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist

from lightning_rlbatch.distributed.reductions import gather_strings

_VALUE, _WEIGHT = "log:", "weight:"  # of the sums


@dataclasses.dataclass
class RewardLog:
    """Keeps what reward functions log in TRL's way, by ``log_metric(name, value)`` and ``log_extra(column, values)``.

    Attributes:
        sums: Of each metric: value times completions, and completions, over all calls. So a mean over a call's completions becomes the
            mean over all completions, whichever ranks they lie on.
        columns: Value per completion of each extra column, of the latest call.
        trainer_state: Given to functions that take it: ``global_step``, ``max_steps`` and ``epoch`` (the iteration).
    """

    sums: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    columns: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    trainer_state: Any = None

    def arguments(self, num_completions: int) -> dict[str, Any]:
        """Return what a call's functions may take, beginning a new call.

        Args:
            num_completions: Of the call.
        """
        self.columns = {}

        def log_metric(name: str, value: float) -> None:
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise TypeError(f"log_metric({name!r}, ...) takes a number but got {repr(value)[:80]}.") from None
            if math.isnan(number):
                return  # nothing to tell
            total, weight = self.sums.get(str(name), (0.0, 0.0))
            self.sums[str(name)] = (total + number * num_completions, weight + num_completions)

        def log_extra(column: str, values: Sequence[Any]) -> None:
            if len(values) != num_completions:
                raise ValueError(f"log_extra({column!r}, ...) takes a value per completion: got {len(values)} for {num_completions}.")
            self.columns[str(column)] = list(values)

        return {"log_metric": log_metric, "log_extra": log_extra, "trainer_state": self.trainer_state}

    def extra(self, num_completions: int) -> list[dict[str, Any]]:
        """Return the extra columns of each completion of the latest call."""
        return [{name: values[index] for name, values in self.columns.items()} for index in range(num_completions)]

    def all_sums(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Return this rank's sums by names that are the same on every rank, to add up; collective over the group.

        Args:
            group: All ranks of the run.
        """
        told = gather_strings(json.dumps(list(self.sums)), group)
        names = sorted({name for text in told for name in json.loads(text)})
        zero = (0.0, 0.0)
        return {f"{sign}{name}": self.sums.get(name, zero)[place] for place, sign in enumerate((_VALUE, _WEIGHT)) for name in names}


def logged_means(sums: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    """Return the metrics of sums from :meth:`RewardLog.all_sums`, added up.

    Args:
        sums: Others among them are passed over.
        prefix: Of the metrics' names.
    """
    names = [name.removeprefix(_VALUE) for name in sums if name.startswith(_VALUE)]
    return {f"{prefix}reward/log/{name}": sums[_VALUE + name] / sums[_WEIGHT + name] for name in names if sums[_WEIGHT + name]}


_current: ContextVar[RewardLog | None] = ContextVar("reward_log", default=None)


def current_log() -> RewardLog:
    """Return the log of the rewards that are being computed; one that nobody reads if nobody asked for it."""
    return _current.get() or RewardLog()


@contextmanager
def logging_rewards(log: RewardLog) -> Iterator[None]:
    """Let the reward functions that are called within log to ``log``, also those of a ``compute_rewards`` of a user's own.

    Args:
        log: Changed in place.
    """
    token = _current.set(log)
    try:
        yield
    finally:
        _current.reset(token)

"""What the training doctor remembers of past iterations: as much of a long run as of a short one."""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any


class Series:
    """A metric over the iterations: its first and its last values, and how many there were; the size does not grow with the run.

    Args:
        window: Iterations that are averaged; 4 windows of first values are kept, and 8 of last ones.
    """

    def __init__(self, window: int) -> None:
        self.first: list[float] = []
        self.last: deque[float] = deque(maxlen=8 * window)
        self.count = 0
        self.low, self.high = math.inf, -math.inf
        self._num_first = 4 * window

    def add(self, value: float) -> None:
        """Add the value of an iteration."""
        self.count += 1
        self.low, self.high = min(self.low, value), max(self.high, value)
        self.last.append(value)
        if len(self.first) < self._num_first:
            self.first.append(value)

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {"first": list(self.first), "last": list(self.last), "count": self.count, "low": self.low, "high": self.high}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` returned, under this window."""
        self.first = list(state_dict["first"])[: self._num_first]
        self.last.extend(state_dict["last"])
        self.count, self.low, self.high = state_dict["count"], state_dict["low"], state_dict["high"]


_SPENT = "approx_kl / entropy"  # a ratio of two metrics of the same iteration


class History:
    """Mean of every metric per iteration; a missing or non-finite value leaves a gap.

    Args:
        iterations: Metrics of each iteration, oldest first.
        window: Iterations that are averaged.
    """

    def __init__(self, iterations: Iterable[Mapping[str, float]] = (), *, window: int = 3) -> None:
        self.window = window
        self.num_iterations = 0
        self._series: dict[str, Series] = {}
        for metrics in iterations:
            self.add(metrics)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add an iteration.

        Args:
            metrics: Mean of each metric.
        """
        self.num_iterations += 1
        kl, entropy = metrics.get("train/approx_kl", math.nan), metrics.get("train/entropy", math.nan)
        spent = {_SPENT: kl / entropy} if entropy > 0 else {}
        for name, value in {**metrics, **spent}.items():
            if math.isfinite(value):
                self._series.setdefault(name, Series(self.window)).add(value)

    def series(self, name: str) -> Series:
        """Return the values of a metric; an empty series if there were none."""
        return self._series.get(name) or Series(self.window)

    @property
    def spent(self) -> Series:
        """KL of the updates of an iteration as a share of its entropy."""
        return self.series(_SPENT)

    def recent(self, name: str, window: int) -> float | None:
        """Return the mean of the last values, None with fewer than ``window``."""
        values = list(self.series(name).last)
        return statistics.fmean(values[-window:]) if len(values) >= window else None

    def first(self, name: str, window: int) -> float | None:
        """Return the mean of the first values, None until there are twice as many as ``window``."""
        values = self.series(name).first
        return statistics.fmean(values[:window]) if len(values) >= 2 * window else None

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        series = {name: found.state_dict() for name, found in self._series.items()}
        return {"num_iterations": self.num_iterations, "series": series}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` returned."""
        self.num_iterations, self._series = state_dict["num_iterations"], {}
        for name, found in state_dict["series"].items():
            self._series[name] = Series(self.window)
            self._series[name].load_state_dict(found)

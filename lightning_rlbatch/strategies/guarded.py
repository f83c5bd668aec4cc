"""Run a function of the Trainer so that an error of any rank is told to all of them."""

from collections.abc import Callable
from typing import Any

from lightning_rlbatch.strategies.failure import FailureReport


class Guarded:
    """A function of the Trainer, run so that an error of any rank is told to all of them.

    Args:
        strategy: Has the ``failure_report`` once the processes have met.
        function: What to run.
        patience: Seconds that a checkpoint in the background gets to become complete after an error.
    """

    def __init__(self, strategy: Any, function: Callable[..., Any], *, patience: float = 8.0) -> None:
        self.strategy = strategy
        self.function = function
        self.patience = patience

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        try:
            result = self.function(*args, **kwargs)
        except BaseException as error:
            self.strategy.join_saves(self.patience)  # the others wait in a collective: what is being written can still become complete
            report: FailureReport | None = self.strategy.failure_report
            if report is None:
                raise
            told = report.translate(error)
            if told is error:
                raise
            raise told from error
        if self.strategy.failure_report is not None:
            self.strategy.failure_report.close(in_order=True)
        return result

"""A DataLoader over a `TokenBudgetSampler` that a plain ``Trainer`` saves and restores."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_rlbatch.data.sampler import TokenBudgetSampler


class TokenBudgetLoader(DataLoader[Any]):
    """Resume in the middle of an epoch where training stopped, without a data module of one's own.

    Lightning stores the state of a loader that has one. The position is counted here, in batches handed out, because with workers the
    sampler is ahead of training. Arguments are those of ``DataLoader``; ``sampler`` is a `TokenBudgetSampler` and ``batch_size`` None.

    Raises:
        TypeError: At the first iteration: another sampler.

    Example:
        >>> sampler = TokenBudgetSampler([9, 2, 4, 4], mini_batch_size=1, max_tokens_per_rank=9, flat=True, shuffle=False)
        >>> loader = TokenBudgetLoader(range(4), sampler=sampler, batch_size=None, collate_fn=list)
    """

    _num_batches = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own iterator class; nobody needs more than this
        """Yield the batches of the current epoch from the restored position on."""
        self._num_batches = self._sampler().start
        for batch in super().__iter__():
            self._num_batches += 1  # before the yield: the state while a batch is processed counts it as done
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch, the same on every rank."""
        return self._sampler().state_dict(self._num_batches)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue behind the batches counted in the state."""
        self._sampler().load_state_dict(state)

    def _sampler(self) -> TokenBudgetSampler:
        if not isinstance(self.sampler, TokenBudgetSampler):
            raise TypeError(
                f"TokenBudgetLoader needs a TokenBudgetSampler but got {type(self.sampler).__name__}. "
                "Pass sampler=TokenBudgetSampler(...) and batch_size=None."
            )
        return self.sampler

"""The one thing a pure function must know of other ranks: how to see their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from lightning_rlbatch.functional.advantages import merge_moments, moments

GatherRows = Callable[[Tensor], tuple[Tensor, Sequence[int]]]


def _alone(rows: Tensor) -> tuple[Tensor, Sequence[int]]:
    return rows, [rows.shape[0]]


@dataclass(frozen=True)
class Peers:
    """The data-parallel ranks, for statistics that span all of them; every rank must call the same methods in the same order.

    Args:
        gather: ``[n_r, ...]`` of this rank -> (``[sum of n_r, ...]`` of all ranks in rank order, list of n_r). Sequence-parallel
            copies appear once. The default knows one rank only.
        rank: this rank's place in that order.

    Example:
        >>> import torch
        >>> Peers().sum(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """

    gather: GatherRows = _alone
    rank: int = 0

    def rows(self, rows: Tensor) -> tuple[Tensor, slice]:
        """Return all ranks' rows, and which of them are this rank's."""
        everything, counts = self.gather(rows)
        ends = list(accumulate(counts, initial=0))
        return everything, slice(ends[self.rank], ends[self.rank + 1])

    def sum(self, values: Tensor) -> Tensor:
        """Sum a small tensor of equal shape over the ranks, in rank order."""
        return self.gather(values[None])[0].sum(0)

    def moments(self, values: Tensor, mask: Tensor) -> Tensor:
        """Return ``[3]``: count, mean and sum of squared deviations of the masked values of all ranks."""
        return merge_moments(self.gather(moments(values, mask)[None])[0])

    def concat(self, rows: Tensor) -> Tensor:
        """Return all ranks' rows."""
        return self.gather(rows)[0]


ALONE = Peers()
"""One data-parallel rank: what this process holds is everything."""

__all__ = ["ALONE", "GatherRows", "Peers"]

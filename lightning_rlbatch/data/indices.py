"""What a token-budget sampler yields, and the dataset that turns it into batches."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch.utils.data import Dataset

from lightning_rlbatch.functional.plan import BatchPlan


class _MapStyle(Protocol):
    def __getitem__(self, index: int, /) -> Any: ...


class PlannedIndices:
    """One mini-batch as one rank sees it: what `TokenBudgetSampler` yields.

    Args:
        micro_batches: Dataset indices of this rank's micro-batches; ``[]`` is a filler, to be run with zero weight.
        mini_batch: Dataset indices of the whole mini-batch, over all ranks; position i here is sample i of ``plan``.
        plan: Where every sample of the mini-batch runs.
        num_tokens: Scored tokens of the whole mini-batch: the denominator of a token mean.

    Example:
        >>> from lightning_rlbatch.functional.planning import plan_mini_batch
        >>> plan = plan_mini_batch([3, 5], dp_size=1, max_tokens_per_rank=8)
        >>> PlannedIndices([[40, 20]], [40, 20], plan, 8).micro_batches
        [[40, 20]]
    """

    __slots__ = ("micro_batches", "mini_batch", "num_tokens", "plan")

    def __init__(self, micro_batches: list[list[int]], mini_batch: list[int], plan: BatchPlan, num_tokens: int) -> None:
        self.micro_batches = micro_batches
        self.mini_batch = mini_batch
        self.plan = plan
        self.num_tokens = num_tokens

    def __repr__(self) -> str:
        return f"PlannedIndices(micro_batches={self.micro_batches}, num_tokens={self.num_tokens}, plan={self.plan})"


class MicroBatchIndices(list[int]):
    """Dataset indices of one micro-batch: what `TokenBudgetSampler` yields with ``flat=True``.

    A list, so that ``dataset[indices]`` works where a dataset takes lists.

    Args:
        indices: Dataset indices, never empty; a rank without a sample here repeats the shortest one of the mini-batch at zero weight.
        num_tokens: Scored tokens of the whole mini-batch, over all micro-steps and ranks.
        loss_scale: Factor for the sum of the micro-batch's token losses; 0.0 where the micro-batch only keeps its rank in step.
        is_last: Whether the optimizer steps after this micro-batch.
    """

    def __init__(self, indices: list[int], num_tokens: int, loss_scale: float, is_last: bool) -> None:
        super().__init__(indices)
        self.num_tokens = num_tokens
        self.loss_scale = loss_scale
        self.is_last = is_last

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the attributes: loader workers get the object that the sampler made."""
        return MicroBatchIndices, (list(self), self.num_tokens, self.loss_scale, self.is_last)


class MicroBatchDataset(Dataset[Any]):
    """Collate the samples of a `MicroBatchIndices`, for ``DataLoader(..., sampler=sampler, batch_size=None)``.

    Args:
        dataset: Map-style dataset of single samples.
        collate_fn: Makes a batch of a list of samples.

    Example:
        >>> indices = MicroBatchIndices([2, 0], num_tokens=10, loss_scale=0.1, is_last=True)
        >>> MicroBatchDataset(["a", "b", "c"], lambda samples: {"text": samples})[indices]
        {'text': ['c', 'a'], 'loss_scale': 0.1, 'num_global_tokens': 10, 'is_last_micro_batch': True}
    """

    def __init__(self, dataset: _MapStyle, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn

    def __getitem__(self, indices: MicroBatchIndices) -> Any:
        """Return the batch with the three facts about its mini-batch: as more keys of a mapping, else as a pair (batch, facts)."""
        batch = self.collate_fn([self.dataset[i] for i in indices])
        facts = {"loss_scale": indices.loss_scale, "num_global_tokens": indices.num_tokens, "is_last_micro_batch": indices.is_last}
        return {**batch, **facts} if isinstance(batch, Mapping) else (batch, facts)

"""The result of planning: which sample runs on which data-parallel rank in which micro-step."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lightning_rlbatch.functional.workload import IntArray


class BatchPlan:
    """Assignment of the samples of one mini-batch to a grid of ranks and micro-steps.

    Invariants (`check` verifies those that need a search): every sample appears exactly once; every rank has the same number of
    micro-steps; no micro-batch exceeds the budget, except one that holds a single oversize sample or group under
    ``oversize="isolate"``.

    A plan is immutable by convention and plain (no dataclass), so that Lightning passes it through unchanged when a batch
    carries it.

    Args:
        assignment: ``[dp_size][num_micro_steps]`` lists of sample indices; ``[]`` is a filler micro-batch, which runs forward and
            backward with zero weight.
        lengths: ``[N]``, int64, tokens of every sample.
        workloads: ``[N]``, int64, estimated cost of every sample.
        sp_size: GPUs of a sequence-parallel group, which share a micro-batch.
        max_tokens_per_rank: Token budget of one GPU; None if the plan was cut by sample count.
        micro_batch_size: Samples per micro-batch; None if the plan was cut by tokens.
        group_size: Consecutive samples that stay together.
        padded: Whether every micro-batch is padded to its longest sample, so that it costs number of samples x longest.

    Raises:
        ValueError: Ranks differ in their number of micro-steps.

    Example:
        >>> plan = BatchPlan([[[0], [2]], [[1], []]], np.array([5, 4, 3]), np.array([5, 4, 3]), max_tokens_per_rank=8)
        >>> plan.num_micro_steps, plan.num_fillers, plan.num_tokens(0, 1), plan.efficiency()
        (2, 1, 3, 0.75)
    """

    __slots__ = (
        "_tokens",
        "_widths",
        "_work",
        "assignment",
        "group_size",
        "lengths",
        "max_tokens_per_rank",
        "micro_batch_size",
        "padded",
        "sp_size",
        "workloads",
    )

    def __init__(
        self,
        assignment: list[list[list[int]]],
        lengths: IntArray,
        workloads: IntArray,
        *,
        sp_size: int = 1,
        max_tokens_per_rank: int | None = None,
        micro_batch_size: int | None = None,
        group_size: int = 1,
        padded: bool = False,
    ) -> None:
        steps = sorted({len(rank) for rank in assignment})
        if len(steps) != 1 or steps[0] < 1:
            raise ValueError(f"Every rank must run the same number of micro-steps, at least one, but got {steps}.")
        self.assignment = assignment
        self.lengths = lengths
        self.workloads = workloads
        self.sp_size = sp_size
        self.max_tokens_per_rank = max_tokens_per_rank
        self.micro_batch_size = micro_batch_size
        self.group_size = group_size
        self.padded = padded
        self._tokens = self._sums(lengths)
        self._widths = self._rectangles(lengths) if padded else self._tokens
        self._work = self._rectangles(workloads) if padded else self._sums(workloads)

    def _sums(self, weights: IntArray) -> IntArray:
        sizes = np.array([[len(bucket) for bucket in rank] for rank in self.assignment], dtype=np.int64)
        flat = np.fromiter((i for rank in self.assignment for bucket in rank for i in bucket), np.int64)
        total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(weights[flat])])
        ends = np.cumsum(sizes.reshape(-1))
        return np.asarray(total[ends] - total[ends - sizes.reshape(-1)], dtype=np.int64).reshape(sizes.shape)

    def _rectangles(self, weights: IntArray) -> IntArray:
        """Return number of samples x largest weight for every micro-batch."""
        grid = [[len(b) * int(weights[b].max()) if b else 0 for b in rank] for rank in self.assignment]
        return np.array(grid, dtype=np.int64)

    def __repr__(self) -> str:
        budget = (
            f"max_tokens_per_rank={self.max_tokens_per_rank}"
            if self.micro_batch_size is None
            else f"micro_batch_size={self.micro_batch_size}"
        )
        return (
            f"BatchPlan(num_samples={len(self.lengths)}, dp_size={self.dp_size}, sp_size={self.sp_size}, {budget}, "
            f"num_micro_steps={self.num_micro_steps}, num_fillers={self.num_fillers}, efficiency={self.efficiency():.4f})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchPlan) and self.assignment == other.assignment and self.lengths.tolist() == other.lengths.tolist()

    __hash__ = None  # type: ignore[assignment]  # the standard way to say that a class with __eq__ is not hashable

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return len(self.assignment)

    @property
    def num_micro_steps(self) -> int:
        """Number of micro-batches that every rank runs."""
        return len(self.assignment[0])

    @property
    def num_samples(self) -> int:
        """Number of samples of the mini-batch."""
        return len(self.lengths)

    @property
    def num_fillers(self) -> int:
        """Number of micro-batches without a sample, over all ranks."""
        return sum(not bucket for rank in self.assignment for bucket in rank)

    @property
    def budget(self) -> int | None:
        """Most tokens of a micro-batch: ``sp_size * max_tokens_per_rank``; None for a plan by sample count."""
        return None if self.max_tokens_per_rank is None else self.sp_size * self.max_tokens_per_rank

    @property
    def samples_per_rank(self) -> list[list[int]]:
        """Sample indices of every rank in the order in which it runs them; input of `recut`."""
        return [[i for bucket in rank for i in bucket] for rank in self.assignment]

    def num_tokens(self, dp_rank: int, micro_step: int) -> int:
        """Return the tokens of one micro-batch, without the padding to a multiple of ``sp_size``."""
        return int(self._tokens[dp_rank, micro_step])

    def padded_num_tokens(self, dp_rank: int, micro_step: int) -> int:
        """Return the tokens that are computed: padded to a multiple of ``sp_size``, and to the longest sample if ``padded``."""
        return -(-int(self._widths[dp_rank, micro_step]) // self.sp_size) * self.sp_size

    def workload(self, dp_rank: int, micro_step: int) -> int:
        """Return the workload of one micro-batch, padding to the longest sample included if ``padded``."""
        return int(self._work[dp_rank, micro_step])

    def step_workload(self) -> int:
        """Return the sum over micro-steps of the slowest rank's workload: the time of the optimizer step."""
        return int(self._work.max(axis=0).sum())

    def efficiency(self) -> float:
        """Return ideal time / planned time, at most 1: the share of the step in which the average rank is busy.

        Ideal is the total workload spread evenly over the ranks. 1.0 for a plan without work.
        """
        actual = self.step_workload() * self.dp_size
        return int(self._work.sum()) / actual if actual else 1.0

    def efficiency_bound(self) -> float:
        """Return the efficiency that no plan can exceed because the heaviest group of samples runs on one rank."""
        per_group = self.workloads.reshape(-1, self.group_size).sum(axis=1)
        heaviest = int(per_group.max()) if len(per_group) else 0
        return min(1.0, int(self._work.sum()) / (heaviest * self.dp_size)) if heaviest else 1.0

    def bottleneck(self, names: Sequence[int] | None = None) -> str | None:
        """Say which sample is heavier than the mean load of a rank, which bounds the efficiency of every plan; else None.

        Args:
            names: ``[N]``, what to call the samples; default: their index in the mini-batch.
        """
        bound = self.efficiency_bound()
        if bound >= 1.0:
            return None
        sample = int(np.argmax(self.workloads))
        name = sample if names is None else names[sample]
        return (
            f"Sample {name} with {int(self.lengths[sample])} tokens is {1 / bound:.2f} times the mean load of {self.dp_size} data-parallel "
            f"ranks, so that no plan of this mini-batch can be more than {100 * bound:.1f}% efficient. "
            "Use a larger mini-batch, or a larger sequence_parallel_size with fewer data-parallel ranks."
        )

    def imbalance(self) -> list[float]:
        """Return slowest rank / mean rank for every micro-step; 1.0 is perfect, also for a micro-step without work."""
        mean = self._work.mean(axis=0)
        return [float(m / a) if a else 1.0 for m, a in zip(self._work.max(axis=0).tolist(), mean.tolist())]

    def fill(self) -> float:
        """Return tokens / token budget over all micro-batches; for a plan by sample count, the largest micro-batch is the budget."""
        budget = self.budget if self.budget is not None else int(self._tokens.max(initial=0))
        return int(self._tokens.sum()) / (budget * self._tokens.size) if budget else 1.0

    def metrics(self) -> dict[str, float]:
        """Return the plan as plain numbers to log.

        ``global_seqlen/*`` are tokens per rank: ``min``, ``max``, ``minmax_diff`` if the mini-batch were cut into contiguous blocks in
        its present order, ``balanced_*`` as planned, ``mean`` the total over ranks. ``global_workload/*`` is the same for workloads:
        ranks balanced in one are not balanced in the other. ``plan/*`` describe the grid.
        """
        result: dict[str, float] = {}
        starts = [self.num_samples * r // self.dp_size for r in range(self.dp_size + 1)]
        for name, weights, grid in (("seqlen", self.lengths, self._tokens), ("workload", self.workloads, self._work)):
            before = [int(weights[a:b].sum()) for a, b in pairwise(starts)]
            after = grid.sum(axis=1)
            result[f"global_{name}/min"] = float(min(before))
            result[f"global_{name}/max"] = float(max(before))
            result[f"global_{name}/minmax_diff"] = float(max(before) - min(before))
            result[f"global_{name}/balanced_min"] = float(after.min())
            result[f"global_{name}/balanced_max"] = float(after.max())
            result[f"global_{name}/mean"] = float(weights.sum()) / self.dp_size
        imbalance = self.imbalance()
        padded = self.num_samples * int(self.lengths.max(initial=0))
        result |= {
            "plan/num_micro_steps": float(self.num_micro_steps),
            "plan/num_fillers": float(self.num_fillers),
            "plan/fill": self.fill(),
            "plan/efficiency": self.efficiency(),
            "plan/efficiency_bound": self.efficiency_bound(),
            "plan/imbalance_mean": sum(imbalance) / len(imbalance),
            "plan/imbalance_max": max(imbalance),
            "plan/max_tokens": float(self._tokens.max(initial=0)),
            "plan/padding_avoided": 1.0 - int(self.lengths.sum()) / padded if padded else 0.0,
        }
        return result

    def check(self) -> None:
        """Verify the invariants of the class docstring.

        Raises:
            ValueError: One of them is broken; the message says where.
        """
        seen = sorted(i for rank in self.assignment for bucket in rank for i in bucket)
        if seen != list(range(self.num_samples)):
            raise ValueError(f"Every one of the {self.num_samples} samples must appear exactly once but the plan holds {seen}.")
        for rank, buckets in enumerate(self.assignment):
            for step, bucket in enumerate(buckets):
                self._check_bucket(rank, step, bucket)

    def _check_bucket(self, rank: int, step: int, bucket: list[int]) -> None:
        where = f"Micro-batch {step} of rank {rank}"
        groups = {i // self.group_size for i in bucket}
        if len(groups) * self.group_size != len(bucket):
            raise ValueError(f"{where} holds {bucket}, which splits a group of group_size={self.group_size} samples.")
        padded = self.padded_num_tokens(rank, step)
        if self.budget is not None and padded > self.budget and len(groups) > 1:
            raise ValueError(f"{where} holds {padded} tokens but the budget is {self.budget}.")
        if self.micro_batch_size is not None and len(bucket) > self.micro_batch_size:
            raise ValueError(f"{where} holds {len(bucket)} samples but micro_batch_size={self.micro_batch_size}.")

"""A mean that accumulates over steps and ranks without depending on how the data was cut."""

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override


class RatioMetric(Metric):
    """Sum of numerators / sum of denominators, over everything it was updated with on every rank of a group.

    The denominator of a token mean is a number of tokens, that of a sample mean a number of samples, both without fillers. All ranks of the
    group call :meth:`compute` together; a rank that has nothing to count updates with ``(0.0, 0)``.

    Args:
        group: Ranks to sum over: the data-parallel group (``module.meshes.dp_group``), so that sequence-parallel peers, which hold the
            same samples, count once. None sums over all ranks, which is the same without sequence parallelism.

    Example:
        >>> metric = RatioMetric()
        >>> metric.update(6.0, 2)
        >>> metric.update(torch.tensor(0.0), torch.tensor(1))
        >>> metric.compute()
        tensor(2., dtype=torch.float64)
    """

    higher_is_better = None
    is_differentiable = False
    full_state_update = False
    numerator: Tensor
    denominator: Tensor

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group=group)
        self.add_state("numerator", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("denominator", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    @override
    def update(self, numerator: Tensor | float, denominator: Tensor | float) -> None:
        """Add the sums of one piece.

        Args:
            numerator: Sum of what is averaged; one number.
            denominator: How much it is the sum of.
        """
        self.numerator += torch.as_tensor(numerator, dtype=torch.float64).detach().to(self.numerator.device)
        self.denominator += torch.as_tensor(denominator, dtype=torch.float64).detach().to(self.denominator.device)

    @override
    def compute(self) -> Tensor:
        """Return the mean, 0-d float64; NaN if the denominators sum to 0."""
        return self.numerator / torch.where(self.denominator == 0, torch.nan, self.denominator)

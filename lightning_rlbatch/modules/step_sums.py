"""Metrics of a step as sums of numerators and denominators, divided only when they are global."""

from collections.abc import Mapping

from torch import Tensor


def accumulate(totals: dict[str, Tensor | float], sums: Mapping[str, tuple[Tensor | float, Tensor | float]]) -> None:
    """Add one micro-batch's numerators and denominators to the totals of a mini-batch, in place.

    Args:
        totals: Running sums; made from here, to be reduced over ranks and handed to :func:`ratios`.
        sums: Metric name to (numerator, denominator).
    """
    for name, (numerator, denominator) in sums.items():
        for kind, value in (("numerator", numerator), ("denominator", denominator)):
            key = f"{name}\0{kind}"
            detached = value.detach() if isinstance(value, Tensor) else value
            totals[key] = totals[key] + detached if key in totals else detached


def ratios(totals: Mapping[str, float]) -> dict[str, float]:
    """Divide summed numerators by summed denominators; a metric whose denominator is 0 is left out.

    Args:
        totals: What :func:`accumulate` made, summed over ranks.

    Returns:
        Metric name to value.
    """
    names = [key.removesuffix("\0numerator") for key in totals if key.endswith("\0numerator")]
    return {name: totals[f"{name}\0numerator"] / totals[f"{name}\0denominator"] for name in names if totals[f"{name}\0denominator"] != 0}

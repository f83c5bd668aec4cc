"""Estimated cost of one sample: a linear plus a quadratic term in its length."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

IntArray: TypeAlias = npt.NDArray[np.int64]
Integers: TypeAlias = Sequence[int] | torch.Tensor | npt.NDArray[np.integer[Any]]

DEFAULT_COEFFICIENT = 24576
MAX_TOTAL = 2**62  # sums of workloads stay below it, so no int64 sum, and no sum of two of them, overflows


def to_int64(values: Integers, name: str = "seq_lens") -> IntArray:
    """Copy non-negative integers of any container into one int64 array.

    Lengths often arrive as int32 tensors, in which ``24576 * L + L**2`` overflows from ``L = 35655`` on; every function
    of balancing and planning therefore passes its input through here first.

    Args:
        values: ``[N]``, a sequence of Python ints, an integer tensor on any device, or an integer array.
        name: What the caller calls the argument, for error messages.

    Returns:
        ``[N]``, int64.

    Raises:
        TypeError: The values are not integers.
        ValueError: The values are not one-dimensional, or one of them is negative.

    Example:
        >>> to_int64(torch.tensor([40000, 7], dtype=torch.int32))
        array([40000,     7])
    """
    raw = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if raw.size == 0 and raw.ndim == 1:
        return np.zeros(0, dtype=np.int64)
    if raw.dtype.kind not in "iu":
        raise TypeError(f"`{name}` must hold integers but got {raw.dtype}. Convert the values with int() or .long() first.")
    if raw.ndim != 1:
        raise ValueError(f"`{name}` must have one dimension, one entry per sample, but got shape {tuple(raw.shape)}.")
    result = raw.astype(np.int64)
    if result.min() < 0:
        worst = int(np.argmin(result))
        raise ValueError(f"`{name}` must not be negative but sample {worst} has {int(result[worst])}.")
    return result


def workload_array(lengths: IntArray, coefficient: int = DEFAULT_COEFFICIENT) -> IntArray:
    """Return ``coefficient * L + L**2`` of int64 lengths as an int64 array.

    Args:
        lengths: ``[N]``, int64, tokens per sample.
        coefficient: Weight of the linear term; see `attention_workload`.

    Returns:
        ``[N]``, int64.

    Raises:
        TypeError: The coefficient is not an integer.
        ValueError: The coefficient is negative, or the total does not fit 62 bits.

    Example:
        >>> workload_array(np.array([2, 3]), 10)
        array([24, 39])
    """
    _check_coefficient(coefficient)
    exact = lengths.astype(np.float64)
    if float((coefficient * exact + exact * exact).sum()) >= MAX_TOTAL:
        raise ValueError(
            f"The total workload of {len(lengths)} samples, the longest of {int(lengths.max())} tokens, does not fit 62 bits with "
            f"coefficient={coefficient}. Plan fewer samples at a time, or check the lengths."
        )
    return coefficient * lengths + lengths * lengths


def _check_coefficient(coefficient: int) -> None:
    if isinstance(coefficient, bool) or not isinstance(coefficient, int | np.integer):
        raise TypeError(f"`coefficient` must be an int, so that all ranks compute the same plan, but got {coefficient!r}. Round it.")
    if coefficient < 0:
        raise ValueError(f"`coefficient` must not be negative but got {coefficient}.")


def attention_workload(seq_lens: Integers, *, coefficient: int = DEFAULT_COEFFICIENT) -> list[int]:
    """Estimate the cost of every sample as ``coefficient * L + L**2``.

    A transformer layer of hidden size h costs ``12 h^2 L + 2 h L^2`` multiply-adds on L tokens; divided by ``2 h`` this is
    ``6 h L + L^2``. The default coefficient is that of h = 4096. `workload_coefficient` derives it from a model, and
    `fit_workload_coefficient` from measured seconds. The unit cancels: only ratios of workloads matter.

    Args:
        seq_lens: ``[N]``, integers, tokens per sample.
        coefficient: Length at which the linear and the quadratic term are equal.

    Returns:
        ``[N]`` Python ints, exact for every L (int32 would overflow from L = 35,655 on).

    Raises:
        TypeError: Lengths or coefficient are not integers.
        ValueError: A length or the coefficient is negative.

    Source:
        Term for term the count of verl's ``calculate_workload`` (2025); general form: Hoffmann et al., "Training
        Compute-Optimal Large Language Models" (2022), appendix F.

    Example:
        >>> attention_workload([1, 40000])
        [24577, 2583040000]
    """
    _check_coefficient(coefficient)
    factor = int(coefficient)
    return [factor * length + length * length for length in to_int64(seq_lens).tolist()]


def workload_coefficient(
    *,
    params_per_layer: int,
    attention_width: int,
    num_layers: int = 1,
    head_params: int = 0,
    causal: bool = True,
    quadratic_layers: int | None = None,
) -> int:
    """Derive the coefficient of `attention_workload` from the sizes of a model.

    A forward pass costs ``2 P L`` FLOPs in the matrices of a layer with P active parameters and ``2 A L^2`` in causal
    attention of width A (``4 A L^2`` if the kernel computes the masked half too), so that the ratio of the linear to the
    quadratic term is ``(P + head / layers) / A``, and half of it without a causal kernel.

    Args:
        params_per_layer: Parameters of one layer that a token passes through: attention projections (grouped-query heads
            counted at their real width) plus MLP; for a mixture of experts the chosen and the shared experts only.
        attention_width: Query heads times head dimension.
        num_layers: Layers of the model.
        head_params: Parameters of the LM head (vocabulary times hidden size); 0 leaves it out.
        causal: Whether the attention kernel skips the masked half.
        quadratic_layers: Layers with full attention; the others use a sliding window much shorter than the samples and count
            as linear. Default: all.

    Returns:
        The coefficient, rounded to an int so that plans stay exact.

    Raises:
        ValueError: A size is out of range.

    Source:
        Kaplan et al., "Scaling Laws for Neural Language Models" (2020), table 1, with grouped-query and causal counts.

    Example:
        >>> workload_coefficient(params_per_layer=12 * 4096**2, attention_width=4096, causal=False)
        24576
        >>> workload_coefficient(params_per_layer=12 * 4096**2, attention_width=4096)
        49152
    """
    quadratic = num_layers if quadratic_layers is None else quadratic_layers
    for name, value in (("params_per_layer", params_per_layer), ("attention_width", attention_width), ("num_layers", num_layers)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1 but got {value}.")
    if not 1 <= quadratic <= num_layers:
        raise ValueError(f"`quadratic_layers` must be between 1 and num_layers={num_layers} but got {quadratic}.")
    if head_params < 0:
        raise ValueError(f"`head_params` must not be negative but got {head_params}.")
    numerator = params_per_layer * num_layers + head_params
    denominator = attention_width * quadratic * (1 if causal else 2)
    return (2 * numerator + denominator) // (2 * denominator)  # nearest int, in integers


def fit_workload_coefficient(micro_batches: Iterable[Sequence[int]], seconds: Sequence[float]) -> tuple[int, float]:
    """Fit the coefficient and the overhead of a micro-batch to measured seconds.

    Least squares of ``seconds ~ overhead + linear * sum(L) + quadratic * sum(L**2)``, weighted by 1 / seconds so that short
    micro-batches count as much as long ones.

    Args:
        micro_batches: Lengths of the samples of every measured micro-batch, tokens.
        seconds: Measured seconds of each.

    Returns:
        The coefficient ``linear / quadratic`` as an int, and the overhead of one micro-batch in tokens' worth of linear time.

    Raises:
        ValueError: Fewer than three measurements, or they do not show a positive linear and quadratic cost.

    Example:
        >>> batches = [[100], [1000], [4000], [500, 500], [8000, 100]]
        >>> times = [1e-3 + 1e-8 * sum(24576 * n + n * n for n in b) for b in batches]
        >>> fit_workload_coefficient(batches, times)[0]
        24576
    """
    rows = [to_int64(list(batch), "micro_batches").astype(np.float64) for batch in micro_batches]
    measured = np.asarray(seconds, dtype=np.float64)
    if len(rows) != len(measured) or len(rows) < 3 or not (measured > 0).all():
        raise ValueError(f"Need at least 3 micro-batches with positive seconds but got {len(rows)} and {len(measured)} measurements.")
    design = np.array([[1.0, row.sum(), (row * row).sum()] for row in rows])
    scale = design.max(axis=0)  # columns differ by ten orders of magnitude
    weights = 1.0 / measured
    solution, *_ = np.linalg.lstsq(design / scale * weights[:, None], np.ones(len(rows)), rcond=None)
    overhead, linear, quadratic = (float(x) for x in solution / scale)
    if linear <= 0 or quadratic <= 0:
        raise ValueError(
            f"The measurements give {linear:.3g} s per token and {quadratic:.3g} s per squared token; both must be positive. "
            "Measure a wider range of lengths, and more micro-batches."
        )
    return round(linear / quadratic), max(overhead, 0.0) / linear

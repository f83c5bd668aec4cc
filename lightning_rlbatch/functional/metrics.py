"""Metrics as pairs (numerator, denominator): sums over any cut and any layout give the same quotient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_rlbatch.functional.segments import sanitize

Pair = tuple[Tensor, Tensor]


def token_mean(per_token: Tensor, response_mask: Tensor) -> Pair:
    """Sum a per-token quantity and count its tokens.

    Args:
        per_token: ``[T]``, floating point; anything outside the response mask.
        response_mask: ``[T]``, bool.

    Returns:
        Two 0-d float64 tensors, detached.

    Example:
        >>> token_mean(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
        (tensor(1., dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    return sanitize(per_token.detach(), response_mask).double().sum(), response_mask.sum().double()


def sample_mean(per_sample: Tensor, valid: Tensor | None = None) -> Pair:
    """Sum a per-sample quantity and count its samples; NaN (no reward) counts as not there.

    Args:
        per_sample: ``[N]``, any real dtype.
        valid: ``[N]``, bool. None: wherever it is not NaN.

    Returns:
        Two 0-d float64 tensors, detached.

    Example:
        >>> sample_mean(torch.tensor([1.0, float("nan"), 2.0]))
        (tensor(3., dtype=torch.float64), tensor(2., dtype=torch.float64))
    """
    x = per_sample.detach().double()
    valid = ~x.isnan() if valid is None else valid
    return sanitize(x, valid).sum(), valid.sum().double()


def add_pairs(first: Mapping[str, Pair], second: Mapping[str, Pair]) -> dict[str, Pair]:
    """Add the pairs of two pieces, name by name; a name that one piece lacks is taken from the other.

    Example:
        >>> one = (torch.tensor(1.0), torch.tensor(2.0))
        >>> add_pairs({"a": one}, {"a": one})
        {'a': (tensor(2.), tensor(4.))}
    """
    out = dict(first)
    for name, (numerator, denominator) in second.items():
        have = out.get(name)
        out[name] = (numerator, denominator) if have is None else (have[0] + numerator, have[1] + denominator)
    return out


def quotients(pairs: Mapping[str, Pair]) -> dict[str, float]:
    """Divide; a denominator of 0 (nothing was counted anywhere) gives NaN, which loggers show as a gap, not as a value.

    Example:
        >>> quotients({"a": (torch.tensor(1.0), torch.tensor(2.0)), "b": (torch.tensor(0.0), torch.tensor(0.0))})
        {'a': 0.5, 'b': nan}
    """
    return {name: float(n) / float(d) if float(d) != 0 else float("nan") for name, (n, d) in pairs.items()}


def explained_variance_sums(values: Tensor, returns: Tensor, response_mask: Tensor) -> Tensor:
    """Return what ``explained_variance`` needs of one piece.

    Args:
        values: ``[T]``, floating point: predictions.
        returns: ``[T]``, floating point: targets.
        response_mask: ``[T]``, bool.

    Returns:
        ``[5]``, float64: count, sums of R and R**2, sums of (R - V) and (R - V)**2. Add over pieces and ranks.

    Example:
        >>> explained_variance_sums(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([True]))
        tensor([1., 3., 9., 2., 4.], dtype=torch.float64)
    """
    target = sanitize(returns.detach(), response_mask).double()
    error = target - sanitize(values.detach(), response_mask).double()
    count = response_mask.sum().double()
    return torch.stack([count, target.sum(), target.square().sum(), error.sum(), error.square().sum()])


def explained_variance(sums: Tensor) -> Tensor:
    """Compute 1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for one that says a constant.

    Args:
        sums: ``[5]``: ``explained_variance_sums`` added over all pieces.

    Returns:
        0-d, float64; NaN where the returns do not vary.

    Example:
        >>> mask = torch.ones(3, dtype=torch.bool)
        >>> returns = torch.tensor([0.0, 1.0, 2.0])
        >>> explained_variance(explained_variance_sums(returns + 5, returns, mask))
        tensor(1., dtype=torch.float64)
    """
    count, target, target_squares, error, error_squares = sums.double().unbind()
    count = count.clamp(min=1)
    variance = target_squares / count - (target / count).square()
    unexplained = error_squares / count - (error / count).square()
    # Below fp64's rounding of the squares the returns are constant.
    varies = variance > 1e-14 * (target_squares / count)
    return torch.where(varies, 1 - unexplained / torch.where(varies, variance, 1.0), torch.nan)


def length_metrics(response_lengths: Tensor | Sequence[int], truncated: Tensor | Sequence[bool]) -> dict[str, float]:
    """Describe the response lengths of a whole iteration (order statistics are no sums: gather over ranks first).

    Args:
        response_lengths: ``[N]``, integer: of all ranks.
        truncated: ``[N]``, bool: cut off at the limit.

    Returns:
        ``mean``, ``p95`` (smallest length that at least 95 % of the samples do not exceed), ``max``, ``truncated`` (fraction); empty
        without samples.

    Example:
        >>> length_metrics(torch.tensor([1, 2, 3, 10]), torch.tensor([False, False, False, True]))
        {'mean': 4.0, 'p95': 10.0, 'max': 10.0, 'truncated': 0.25}
    """
    response_lengths, truncated = torch.as_tensor(response_lengths), torch.as_tensor(truncated)
    count = response_lengths.numel()
    if count == 0:
        return {}
    ordered = response_lengths.double().sort().values
    return {
        "mean": float(ordered.mean()),
        "p95": float(ordered[-(-95 * count // 100) - 1]),
        "max": float(ordered[-1]),
        "truncated": float(truncated.double().mean()),
    }

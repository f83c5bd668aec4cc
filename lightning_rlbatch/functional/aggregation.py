"""Turn per-token terms into one loss whose value does not depend on how a mini-batch was cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from lightning_rlbatch.functional.segments import sanitize, segment_sum, spread

AggregationMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
AGGREGATION_MODES: tuple[str, ...] = get_args(AggregationMode)


class HasTerms(Protocol):
    """What the losses return: per-token terms, with metrics beside them."""

    @property
    def terms(self) -> Tensor:
        """``[T]``."""


@dataclass(frozen=True)
class Denominators:
    """What a loss is divided by, counted over the whole mini-batch and all data-parallel ranks.

    Args:
        num_tokens: response tokens (True entries of the response mask). Python number or 0-d tensor.
        num_sequences: samples with at least one response token. Python number or 0-d tensor.
        norm_constant: divisor of ``seq-mean-token-sum-norm``, in tokens; usually the largest response length.

    Example:
        >>> mask = torch.tensor([False, True, True, False, False])
        >>> local = Denominators.local(mask, torch.tensor([0, 3, 5]))
        >>> int(local.num_tokens), int(local.num_sequences)  # the second sample has no response token
        (2, 1)
    """

    num_tokens: float | Tensor
    num_sequences: float | Tensor
    norm_constant: float | None = None

    @classmethod
    def local(cls, response_mask: Tensor, cu_seqlens: Tensor | Sequence[int], norm_constant: float | None = None) -> Denominators:
        """Count one piece. Sum over pieces and ranks (``counts``, ``from_counts``) before use.

        Args:
            response_mask: ``[T]``, bool.
            cu_seqlens: ``[N + 1]``, int.
            norm_constant: kept as it is.
        """
        num_sequences = (segment_sum(response_mask, cu_seqlens) > 0).sum()
        return cls(response_mask.sum(), num_sequences, norm_constant)

    def counts(self, device: torch.device | str | None = None) -> Tensor:
        """Return ``[2]`` float64 ``(num_tokens, num_sequences)``, ready for one all-reduce SUM."""
        pair = (self.num_tokens, self.num_sequences)
        return torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in pair])

    @classmethod
    def from_counts(cls, counts: Tensor, norm_constant: float | None = None) -> Denominators:
        """Build from the all-reduced ``counts`` of all pieces."""
        return cls(counts[0], counts[1], norm_constant)

    def __add__(self, other: Denominators) -> Denominators:
        """Add the counts of another piece of the same mini-batch."""
        if self.norm_constant != other.norm_constant:
            raise ValueError(f"Pieces of one mini-batch need one norm_constant but got {self.norm_constant} and {other.norm_constant}.")
        return Denominators(self.num_tokens + other.num_tokens, self.num_sequences + other.num_sequences, self.norm_constant)


def aggregate(
    per_token: Tensor | HasTerms, response_mask: Tensor, cu_seqlens: Tensor | Sequence[int], mode: str, denominators: Denominators
) -> Tensor:
    """Sum this piece's terms and divide by the denominators of the whole mini-batch.

    With s_i the sum of sample i's terms over its c_i response tokens, T all response tokens and N all samples that have one:

    ====================================  =================================
    ``token-mean``                        sum_i s_i / T  (DAPO)
    ``token-sum``                         sum_i s_i
    ``seq-mean-token-sum``                sum_i s_i / N
    ``seq-mean-token-mean``               sum_i (s_i / c_i) / N  (GRPO)
    ``seq-mean-token-sum-norm``           sum_i s_i / (N * norm_constant)  (Dr. GRPO)
    ====================================  =================================

    The values of the pieces of a mini-batch add up to the value of the whole, however it was cut. A mini-batch without any response
    token gives 0, with gradients that are 0.

    Sources: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025 (token mean); Shao et al.,
    "DeepSeekMath", 2024 (sequence mean of token means); Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective",
    2025 (constant norm).

    Args:
        per_token: ``[T]``, floating point: unreduced terms, anything outside the response mask; or the ``LossTerms`` that hold them.
        response_mask: ``[T]``, bool.
        cu_seqlens: ``[N + 1]``, int.
        mode: one of ``AGGREGATION_MODES``.
        denominators: GLOBAL counts. There is no fallback to local ones.

    Returns:
        0-d tensor.

    Raises:
        TypeError: ``per_token`` is not a tensor.
        ValueError: ``per_token`` was reduced already, the mode is unknown, or the mode needs a ``norm_constant`` that is missing.

    Example:
        >>> mask = torch.tensor([True, True, True, False])
        >>> cu_seqlens = torch.tensor([0, 1, 4])
        >>> loss = torch.tensor([1.0, 2.0, 4.0, float("nan")])
        >>> aggregate(loss, mask, cu_seqlens, "seq-mean-token-mean", Denominators(num_tokens=3, num_sequences=2))
        tensor(2.)
    """
    given: Any = getattr(per_token, "terms", per_token)
    check_per_token(given, response_mask)
    terms = sanitize(given, response_mask)
    if mode == "token-sum":
        return terms.sum()
    if mode == "token-mean":
        return _divide(terms.sum(), denominators.num_tokens)
    if mode == "seq-mean-token-sum":
        return _divide(terms.sum(), denominators.num_sequences)
    if mode == "seq-mean-token-mean":
        counts = segment_sum(response_mask, cu_seqlens).clamp(min=1)
        return _divide((terms / spread(counts, cu_seqlens, terms.shape[0])).sum(), denominators.num_sequences)
    if mode == "seq-mean-token-sum-norm":
        constant = denominators.norm_constant
        if constant is None or not constant > 0:
            raise ValueError(
                f"Aggregation 'seq-mean-token-sum-norm' needs a positive norm_constant but got {constant}. Pass "
                "Denominators(..., norm_constant=...), for example the maximum response length; a width taken from the batch would "
                "make the loss depend on how it was cut."
            )
        return _divide(terms.sum(), denominators.num_sequences) / constant
    raise ValueError(f"Expected aggregation mode to be one of {', '.join(AGGREGATION_MODES)} but got {mode!r}.")


def check_per_token(per_token: Tensor, response_mask: Tensor, *, source: str = "The loss") -> None:
    """Refuse terms that were reduced already: a mean of micro-batch means depends on the cut.

    Args:
        per_token: what should be ``[T]``.
        response_mask: ``[T]``, bool.
        source: subject of the error message.

    Raises:
        TypeError: not a tensor, or not of a floating point dtype; or the mask is not bool.
        ValueError: not ``[T]``.

    Example:
        >>> check_per_token(torch.zeros(3), torch.ones(3, dtype=torch.bool))
    """
    if response_mask.dtype != torch.bool:
        raise TypeError(f"Expected response_mask to be of dtype bool but got {response_mask.dtype}. Pass mask.bool().")
    if not isinstance(per_token, Tensor) or not per_token.is_floating_point():
        kind = per_token.dtype if isinstance(per_token, Tensor) else type(per_token).__name__
        raise TypeError(f"{source} must be a floating point tensor of per-token terms but got {kind}.")
    if per_token.shape != response_mask.shape:
        raise ValueError(
            f"{source} must hold one unreduced term per token, shape {tuple(response_mask.shape)}, but got shape {tuple(per_token.shape)}. "
            "Return the terms before .mean() or .sum(): the mean of a micro-batch would depend on how the mini-batch was cut, so the "
            "division by the global counts is done by aggregate()."
        )


def _divide(total: Tensor, count: float | Tensor) -> Tensor:
    """Divide by a count; a count of 0 (nothing to train on anywhere) gives 0, since then ``total`` is 0 as well."""
    if isinstance(count, Tensor):
        count = count.to(total.device, total.dtype)
        return total / torch.where(count > 0, count, torch.ones_like(count))
    return total / (count if count > 0 else 1)

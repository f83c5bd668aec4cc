"""Sums over the samples of a packed ``[T]`` tensor (T tokens, N samples)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sanitize(values: Tensor, mask: Tensor) -> Tensor:
    """Replace everything outside the mask by 0, so that NaN and inf there reach neither value nor gradient.

    Half precision is raised to fp32, because what follows are exponentials and sums over thousands of tokens.

    Args:
        values: ``[T]``, floating point: anything where ``mask`` is False.
        mask: ``[T]``, bool (or numbers: True where not 0).

    Returns:
        ``[T]``: ``values`` where ``mask``, else 0.

    Example:
        >>> sanitize(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]))
        tensor([1., 0.])
    """
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()
    return torch.where(mask.bool(), values, values.new_zeros(()))


def segment_ids(cu_seqlens: Tensor | Sequence[int], num_tokens: int, device: torch.device | None = None) -> Tensor:
    """Return the index of the sample that owns each token.

    Args:
        cu_seqlens: ``[N + 1]``, int: first token of each sample, then T.
        num_tokens: T, given by the caller so that a GPU is not asked for it.
        device: of the result, for boundaries that are a list. None: where the boundaries are.

    Returns:
        ``[T]``, int64, in ``[0, N)``.

    Raises:
        ValueError: The boundaries, where they are on the host, do not lead from 0 to T.

    Example:
        >>> segment_ids(torch.tensor([0, 2, 5]), 5)
        tensor([0, 0, 1, 1, 1])
    """
    bounds = torch.as_tensor(cu_seqlens, device=device)
    lengths = bounds.diff().long()
    if bounds.device.type == "cpu" and not _lead_through(bounds, lengths, num_tokens):
        listed = bounds.tolist()
        raise ValueError(
            f"Expected cu_seqlens to begin with 0, never to fall and to end with the number of tokens, {num_tokens}, but got {listed[:8]}"
            f" ({len(listed)} in all). Pass the cumulative lengths of the samples, N + 1 numbers."
        )
    ids = torch.arange(lengths.numel(), device=lengths.device)
    return torch.repeat_interleave(ids, lengths, output_size=num_tokens)


def _lead_through(bounds: Tensor, lengths: Tensor, num_tokens: int) -> bool:
    return bounds.numel() > 0 and int(bounds[0]) == 0 and int(bounds[-1]) == num_tokens and bool((lengths >= 0).all())


def segment_sum(values: Tensor, cu_seqlens: Tensor | Sequence[int]) -> Tensor:
    """Sum each sample's tokens.

    Args:
        values: ``[T]``; bool is counted as int64. Already zero where it shall not count.
        cu_seqlens: ``[N + 1]``, int.

    Returns:
        ``[N]``; a sample without tokens gives 0.

    Example:
        >>> segment_sum(torch.tensor([1.0, 2.0, 10.0]), torch.tensor([0, 2, 3]))
        tensor([ 3., 10.])
    """
    if values.dtype == torch.bool:
        values = values.long()
    owner = segment_ids(cu_seqlens, values.shape[0], values.device)
    return values.new_zeros(len(cu_seqlens) - 1).index_add(0, owner, values)


def segment_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor | Sequence[int]) -> Tensor:
    """Average each sample over its masked tokens.

    Args:
        values: ``[T]``, floating point, finite where ``mask``.
        mask: ``[T]``, bool.
        cu_seqlens: ``[N + 1]``, int.

    Returns:
        ``[N]``; a sample without a masked token gives 0.

    Example:
        >>> segment_mean(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]), torch.tensor([0, 2, 3]))
        tensor([2., 0.])
    """
    counts = segment_sum(mask, cu_seqlens).clamp(min=1)
    return segment_sum(sanitize(values, mask), cu_seqlens) / counts


def spread(per_sample: Tensor, cu_seqlens: Tensor | Sequence[int], num_tokens: int) -> Tensor:
    """Copy a sample's value to each of its tokens.

    Args:
        per_sample: ``[N]``.
        cu_seqlens: ``[N + 1]``, int.
        num_tokens: T.

    Returns:
        ``[T]``.

    Example:
        >>> spread(torch.tensor([7, 8]), torch.tensor([0, 1, 3]), 3)
        tensor([7, 8, 8])
    """
    return per_sample[segment_ids(cu_seqlens, num_tokens, per_sample.device)]

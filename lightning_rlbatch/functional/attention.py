"""Attend within each sample of a packed sequence, on any device, without a mask of T x T.

Letters: T packed tokens, L tokens of one sample, Hq query heads, Hk key/value heads (Hq a multiple of Hk), D head size, Dv value size.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody knows)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

WINDOW_ROWS = 128  # fewest query rows per block under a sliding window
SCORE_BLOCK = 2**22  # most scores held at once where they are computed explicitly: 16 MB in fp32


class AttentionFunction(Protocol):
    """Attention over packed samples; :func:`varlen_attention` is one, a wrapped GPU kernel another."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seq_lens: Sequence[int],
        *,
        cu_seqlens: Tensor | None = None,
        scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """See :func:`varlen_attention`."""


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Sequence[int],
    *,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend within each sample: one ``scaled_dot_product_attention`` per sample, exact and differentiable.

    Soft-capped scores and sinks have no fused kernel in torch; they are computed explicitly, a block of query rows at a time, and
    recomputed in the backward pass, so that the memory is that of one block.

    Args:
        query: ``[T, Hq, D]``.
        key: ``[T, Hk, D]``; query head h uses key/value head ``h // (Hq / Hk)``.
        value: ``[T, Hk, Dv]``.
        seq_lens: Tokens of each sample, host integers with the sum T.
        cu_seqlens: Not needed here; kernels on an accelerator read it. int32 ``[N + 1]``.
        scale: Factor on the scores; None means ``D ** -0.5``.
        causal: A token attends to itself and to earlier tokens of its sample only.
        window: Token i attends to tokens j with ``i - j < window`` (what transformers calls ``sliding_window``); needs ``causal``.
        softcap: Scores become ``softcap * tanh(scores / softcap)`` (Gemma 2, Google 2024).
        sinks: ``[Hq]``: one more score per head in the softmax's denominator (gpt-oss, OpenAI 2025).
        dropout: Probability of dropping an attention weight.

    Returns:
        ``[T, Hq, Dv]``, contiguous.

    Raises:
        ValueError: Shapes or lengths that do not fit, or a window without ``causal``.

    Example:
        >>> query = key = torch.zeros(5, 2, 4)  # equal scores: every token sees the mean of the values it may look at
        >>> value = torch.tensor([1.0, 3.0, 10.0, 20.0, 30.0]).view(5, 1, 1).expand(5, 2, 1)
        >>> varlen_attention(query, key, value, [2, 3])[:, 0, 0].tolist()
        [1.0, 2.0, 10.0, 15.0, 20.0]
    """
    check_attention(query, key, value, seq_lens, causal=causal, window=window)
    lens = [length for length in seq_lens if length] or [0]
    # [T, H, D] -> [1, H, L, D] per sample. split, not slices: the backward of a slice writes a gradient of T rows for every sample.
    queries, keys, values = (torch.split(x.transpose(0, 1).unsqueeze(0), lens, dim=2) for x in (query, key, value))
    explicit = (softcap is not None or sinks is not None) and lens != [0]
    mask = _window_mask(query, window) if window is not None and window < max(lens) and not explicit else None
    outputs = []
    for q, k, v in zip(queries, keys, values):
        if explicit:
            out = _explicit(q, k, v, scale, causal, window, softcap, sinks, dropout)
        elif window is not None and mask is not None and q.shape[2] > window:
            out = _windowed(q, k, v, scale, window, mask, dropout)
        else:
            out = _fused(q, k, v, scale, causal, dropout)
        outputs.append(out.transpose(1, 2).squeeze(0))  # [1, Hq, L, Dv] -> [L, Hq, Dv]
    return torch.cat(outputs)


def check_attention(
    query: Tensor, key: Tensor, value: Tensor, seq_lens: Sequence[int], *, causal: bool = True, window: int | None = None
) -> None:
    """Raise unless the arguments of :func:`varlen_attention` fit each other.

    Args:
        query: ``[T, Hq, D]``.
        key: ``[T, Hk, D]``.
        value: ``[T, Hk, Dv]``.
        seq_lens: Tokens of each sample.
        causal: As in :func:`varlen_attention`.
        window: As in :func:`varlen_attention`.

    Raises:
        ValueError: They do not.

    Example:
        >>> check_attention(torch.zeros(3, 1, 2), torch.zeros(3, 1, 2), torch.zeros(3, 1, 2), [1, 2])
    """
    check_shapes(query, key, value)
    if sum(seq_lens) != len(query):
        raise ValueError(f"The lengths {_shorten(seq_lens)} add up to {sum(seq_lens)} but the query has {len(query)} tokens.")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"A sliding window must be at least 1 and needs causal attention, but got window={window}, causal={causal}.")


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless query, key and value are packed and their heads fit each other.

    Args:
        query: ``[T, Hq, D]``.
        key: ``[T, Hk, D]``.
        value: ``[T, Hk, Dv]``.

    Raises:
        ValueError: They do not fit; the message holds the shapes.

    Example:
        >>> check_shapes(torch.zeros(3, 2, 4), torch.zeros(3, 1, 4), torch.zeros(3, 1, 5))
    """
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not (query.ndim == key.ndim == value.ndim == 3 and len(query) == len(key) == len(value)):
        raise ValueError(f"Expected query [T, Hq, D], key [T, Hk, D] and value [T, Hk, Dv] but got {shapes}.")
    if query.shape[2] != key.shape[2] or key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(f"Expected equal head sizes and a number of query heads that is a multiple of the key heads, but got {shapes}.")


def _shorten(lengths: Sequence[int]) -> str:
    return str(list(lengths)) if len(lengths) <= 8 else f"{list(lengths[:8])[:-1]}... ({len(lengths)} in all)".replace("]...", ", ...]")


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, dropout: float) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped)


def _window_mask(like: Tensor, window: int) -> Tensor:
    """Return the scores' additive mask of one block: row r sees columns r to r + window - 1, of keys from window - 1 tokens before it."""
    block = min(max(window, WINDOW_ROWS), 4 * WINDOW_ROWS)
    distance = torch.arange(window - 1 + block, device=like.device)[None, :] - torch.arange(block, device=like.device)[:, None]
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


def _windowed(q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int, mask: Tensor, dropout: float) -> Tensor:
    """Attend in blocks of query rows, each to the keys that it can see: linear in L for a fixed window, one small mask for all blocks."""
    chunk, block = max(window, WINDOW_ROWS), mask.shape[0]  # a chunk is at least the window: one chunk of keys before suffices
    queries, keys, values = (torch.split(x, chunk, dim=2) for x in (q, k, v))
    outputs = []
    for index, rows in enumerate(queries):
        columns, weights, before = keys[index], values[index], 0
        if index > 0:
            columns, weights, before = torch.cat((keys[index - 1], columns), 2), torch.cat((values[index - 1], weights), 2), chunk
        start = before
        for part in torch.split(rows, block, dim=2):
            first, end = max(0, start - window + 1), start + part.shape[2]
            visible = mask[: part.shape[2], first - (start - window + 1) : window - 1 + part.shape[2]]
            seen = (columns[:, :, first:end], weights[:, :, first:end])
            outputs.append(
                F.scaled_dot_product_attention(
                    part, *seen, attn_mask=visible, dropout_p=dropout, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
                )
            )
            start = end
    return torch.cat(outputs, dim=2)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    length = q.shape[2]
    rows_per_block = max(1, SCORE_BLOCK // (q.shape[1] * length))
    outputs = []
    start = 0
    for rows in torch.split(q, rows_per_block, dim=2):
        end = start + rows.shape[2]
        first = 0 if window is None else max(0, start - window + 1)
        last = end if causal else length
        block = (rows, k[:, :, first:last], v[:, :, first:last], sinks, start - first, scale, causal, window, softcap, dropout)
        if torch.is_grad_enabled():
            out: Tensor = checkpoint(_scores_block, *block, use_reentrant=False, preserve_rng_state=dropout > 0)
        else:
            out = _scores_block(*block)
        outputs.append(out)
        start = end
    return torch.cat(outputs, dim=2)


def _scores_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    offset: int,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """Attend with explicit scores; the first query row is ``offset`` tokens after the first key."""
    heads, rows, columns = q.shape[1], q.shape[2], k.shape[2]
    grouped = q.reshape(k.shape[1], -1, rows, q.shape[3])  # [Hk, Hq / Hk, L, D]
    scores = grouped @ k[0].unsqueeze(1).transpose(2, 3) * scale
    scores = scores.reshape(heads, rows, columns).to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if causal:
        distance = torch.arange(rows, device=q.device)[:, None] + offset - torch.arange(columns, device=q.device)[None, :]
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).view(heads, 1, 1).expand(heads, rows, 1)), dim=2)
    weights = torch.softmax(scores, dim=2)[:, :, :columns].to(v.dtype)
    weights = F.dropout(weights, dropout) if dropout else weights
    out = weights.reshape(k.shape[1], -1, rows, columns) @ v[0].unsqueeze(1)  # [Hk, Hq / Hk, L, Dv]
    return out.reshape(1, heads, rows, v.shape[3])

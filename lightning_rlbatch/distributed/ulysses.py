"""Run attention over a sequence that is split between ranks: gather the sequence, scatter the heads (Ulysses, Jacobs et al. 2023).

Letters: P ranks of the sequence-parallel group, T tokens of the whole sequence (a multiple of P), t = T / P tokens of this rank, Hq query
heads, Hk key/value heads, D head size, Dv value size.

Gradients: every rank of the group computes the same loss from gathered per-token results. The backward of :func:`gather_sequence` hands
each rank its own slice times P, without communication; averaging the parameters' gradients over the ranks (FSDP, DDP) then gives exactly
the gradient of that loss.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_rlbatch.distributed.heads import HeadPlan
from lightning_rlbatch.functional.attention import AttentionFunction, check_shapes, varlen_attention


class _AllToAll(torch.autograd.Function):
    """Exchange slices of a flat buffer; the backward exchanges the gradients the other way round."""

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(buffer, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange(buffer: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    out = buffer.new_empty(sum(receive))
    dist.all_to_all_single(out, buffer.contiguous(), receive, send, group=group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        size = dist.get_world_size(group)
        ctx.rank, ctx.size = dist.get_rank(group), size
        out = local.new_empty((size * local.shape[0], *local.shape[1:]))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the second is its name before torch 2.13
        gather(out, local.contiguous(), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = grad.shape[0] // ctx.size
        return grad[ctx.rank * rows : (ctx.rank + 1) * rows] * ctx.size, None


def pad_seq_lens(seq_lens: Sequence[int], sp_size: int) -> tuple[int, ...]:
    """Append a segment that makes the number of tokens a multiple of P; padding is never part of a sample.

    Args:
        seq_lens: Tokens of each sample.
        sp_size: P.

    Returns:
        The same lengths, and one more below P if it is needed.
    """
    padding = -sum(seq_lens) % sp_size
    return (*seq_lens, padding) if padding else tuple(seq_lens)


def shard_sequence(tokens: Tensor, group: dist.ProcessGroup | None, *, dim: int = 0, pad_value: float = 0) -> Tensor:
    """Cut a per-token tensor that every rank of the group holds down to this rank's slice.

    Labels, positions and masks are computed on the whole sequence BEFORE it is cut: a shard knows neither the token before its first
    one nor where its samples begin.

    Args:
        tokens: ``T`` rows along ``dim``, the same on every rank.
        group: The sequence-parallel group; None means one rank.
        dim: The token dimension.
        pad_value: Fills the rows that make T a multiple of P.

    Returns:
        ``ceil(T / P)`` rows along ``dim``.
    """
    size = 1 if group is None else dist.get_world_size(group)
    if size == 1:
        return tokens
    dim = dim % tokens.ndim
    padding = -tokens.shape[dim] % size
    if padding:
        shape = [*tokens.shape[:dim], padding, *tokens.shape[dim + 1 :]]
        tokens = torch.cat((tokens, tokens.new_full(shape, pad_value)), dim)
    rows = tokens.shape[dim] // size
    return tokens.narrow(dim, dist.get_rank(group) * rows, rows)


def gather_sequence(local: Tensor, group: dist.ProcessGroup | None, num_tokens: int | None = None, *, dim: int = 0) -> Tensor:
    """Collect the slices of all ranks, in rank order; the inverse of :func:`shard_sequence`.

    The backward hands this rank its own slice of the gradient times P and communicates nothing. That is right if every rank of the group
    computes the same loss from the result and gradients are averaged over the group; see the module docstring.

    Args:
        local: t rows along ``dim``, the same shape on every rank.
        group: The sequence-parallel group; None means one rank.
        num_tokens: T without padding; rows beyond it are cut off.
        dim: The token dimension.

    Returns:
        ``P * t`` rows along ``dim``, or ``num_tokens``.

    Raises:
        ValueError: More tokens asked for than there are.
    """
    size = 1 if group is None else dist.get_world_size(group)
    rows = local.shape[dim]
    if num_tokens is not None and not 0 <= num_tokens <= size * rows:
        raise ValueError(f"Expected num_tokens between 0 and {size} ranks x {rows} tokens but got {num_tokens}.")
    full = local if size == 1 else _apply(_Gather, local.movedim(dim, 0), group).movedim(0, dim)
    return full if num_tokens is None else full.narrow(dim, 0, num_tokens)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled graphs may reorder collectives against those of FSDP, differently on each rank
def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]  # torch leaves apply without annotations
    return result


def scatter_heads(query: Tensor, key: Tensor, value: Tensor, plan: HeadPlan, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Trade this rank's tokens with all heads for all tokens with this rank's heads, in one all-to-all.

    Args:
        query: ``[t, Hq, D]``.
        key: ``[t, Hk, D]``.
        value: ``[t, Hk, Dv]``.
        plan: Which heads go where.
        group: The sequence-parallel group.

    Returns:
        Query ``[T, hq, D]``, key ``[T, hk, D]`` and value ``[T, hk, Dv]``; hq and hk are this rank's numbers of heads.
    """
    tokens, ranks = query.shape[0], range(plan.sp_size)
    query_sizes = [len(plan.query_heads(rank)) for rank in ranks]
    kv_sizes = [len(plan.kv_heads(rank)) for rank in ranks]
    if sum(kv_sizes) == plan.num_kv_heads:
        keys, values = torch.split(key, kv_sizes, 1), torch.split(value, kv_sizes, 1)
    else:  # some travel to several ranks: the gradients of overlapping slices add up
        bounds = [plan.kv_heads(rank) for rank in ranks]
        keys, values = (tuple(x[:, kv.start : kv.stop] for kv in bounds) for x in (key, value))
    pieces = zip(torch.split(query, query_sizes, 1), keys, values)
    packed = [torch.cat([x.flatten(1) for x in piece], 1) for piece in pieces]  # per destination [t, width]
    own = dist.get_rank(group)
    width = packed[own].shape[1]
    received = _apply(
        _AllToAll, torch.cat([x.flatten() for x in packed]), [x.numel() for x in packed], [tokens * width] * plan.sp_size, group
    )
    widths = [query_sizes[own] * query.shape[2], kv_sizes[own] * key.shape[2], kv_sizes[own] * value.shape[2]]
    q, k, v = torch.split(received.view(-1, width), widths, 1)  # sources arrive in rank order, which is the order of the sequence
    total = tokens * plan.sp_size
    return q.view(total, -1, query.shape[2]), k.view(total, -1, key.shape[2]), v.view(total, -1, value.shape[2])


def gather_heads(out: Tensor, plan: HeadPlan, group: dist.ProcessGroup) -> Tensor:
    """Trade all tokens with this rank's heads for this rank's tokens with all heads, in one all-to-all.

    Args:
        out: ``[T, hq, Dv]``.
        plan: Which heads are where.
        group: The sequence-parallel group.

    Returns:
        ``[t, Hq, Dv]``.
    """
    tokens, size = out.shape[0] // plan.sp_size, out.shape[2]
    sizes = [len(plan.query_heads(rank)) for rank in range(plan.sp_size)]
    send = [tokens * out.shape[1] * size] * plan.sp_size
    receive = [tokens * heads * size for heads in sizes]
    received = _apply(_AllToAll, out.reshape(-1), send, receive, group)
    return torch.cat([piece.view(tokens, -1, size) for piece in torch.split(received, receive)], dim=1)


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | Sequence[int] | None,
    *,
    group: dist.ProcessGroup | None,
    seq_lens: Sequence[int] | None = None,
    attention: AttentionFunction = varlen_attention,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attend within each sample of a packed sequence of which this rank holds one slice.

    Two all-to-alls forward, two backward. Any module may call it: all it needs is the group.

    Args:
        query: ``[t, Hq, D]``, rotary embeddings already applied (with positions of the whole sequence).
        key: ``[t, Hk, D]``.
        value: ``[t, Hk, Dv]``.
        cu_seqlens: ``[N + 1]``, integers: where each sample of the WHOLE sequence begins, and the end of the last one. The fewer than P
            rows that :func:`shard_sequence` appends become a segment of their own. None if ``seq_lens`` says it all.
        group: The sequence-parallel group; None means one rank.
        seq_lens: The same as lengths, host integers. They spare a wait for the device that holds ``cu_seqlens``.
        attention: What runs on the gathered sequence; :func:`~lightning_rlbatch.models.select_attention` knows GPU kernels.
        sinks: ``[Hq]``, one more score per head; cut to this rank's heads.
        **options: Passed on to ``attention``: scale, causal, window, softcap, dropout. With dropout, each rank draws for its own heads.

    Returns:
        ``[t, Hq, Dv]``.

    Raises:
        TypeError: Neither ``cu_seqlens`` nor ``seq_lens``.
        ValueError: Shapes that do not fit, samples that do not fill ``P * t`` tokens, mixed dtypes, or fewer query heads than ranks.
    """
    size = 1 if group is None else dist.get_world_size(group)
    check_shapes(query, key, value)
    seq_lens, cu_seqlens = _segments(cu_seqlens, seq_lens, query.shape[0], size)
    if group is None or size == 1:
        return attention(query, key, value, seq_lens, cu_seqlens=cu_seqlens, sinks=sinks, **options)
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"Query, key and value travel together and need one dtype, but have {query.dtype}, {key.dtype}, {value.dtype}.")
    plan = HeadPlan.build(query.shape[1], key.shape[1], size)
    rank = dist.get_rank(group)
    q, k, v = scatter_heads(query, key, value, plan, group)
    repeats = plan.kv_repeats(rank)
    if repeats is not None:  # no kernel knows such a grouping: give each query head its own copy, whose gradients add up
        k, v = (torch.cat([head.expand(-1, n, -1) for head, n in zip(torch.split(x, 1, 1), repeats)], 1) for x in (k, v))
    if sinks is not None:
        sinks = sinks[plan.query_bounds[rank] : plan.query_bounds[rank + 1]]
    out = attention(q, k, v, seq_lens, cu_seqlens=cu_seqlens, sinks=sinks, **options)
    return gather_heads(out, plan, group)


def _segments(
    cu_seqlens: Tensor | Sequence[int] | None, seq_lens: Sequence[int] | None, local_tokens: int, size: int
) -> tuple[Sequence[int], Tensor | None]:
    """Return the lengths of all segments, padding included, and their boundaries if they are on a device already."""
    bounds = cu_seqlens.detach() if isinstance(cu_seqlens, Tensor) else None
    if seq_lens is None:
        if cu_seqlens is None:
            raise TypeError("Expected cu_seqlens, or seq_lens, but got neither: the samples of a sequence are never guessed.")
        starts = [int(start) for start in (cu_seqlens if bounds is None else bounds.tolist())]
        seq_lens = [after - before for before, after in pairwise(starts)]
        if starts[:1] != [0] or min(seq_lens, default=0) < 0:
            raise ValueError(f"Expected cu_seqlens to begin with 0 and never to fall, but got {starts[:8]} ({len(starts)} in all).")
    padding = size * local_tokens - sum(seq_lens)
    if not 0 <= padding < size:
        raise ValueError(
            f"The samples have {sum(seq_lens)} tokens but {size} rank(s) with {local_tokens} tokens each hold {size * local_tokens}. "
            "Pass cu_seqlens of the whole sequence, and every input through shard_sequence."
        )
    if padding:
        seq_lens = (*seq_lens, padding)
        bounds = bounds if bounds is None else torch.cat((bounds, bounds.new_full((1,), size * local_tokens)))
    return seq_lens, bounds

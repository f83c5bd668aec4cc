"""Log-probability and entropy of given tokens straight from hidden states and the LM head, without ``[T, V]`` logits.

Letters in shapes: T tokens, V vocabulary, h hidden size, r rows (tokens) of a tile, c columns (vocabulary) of a tile.

For one token with logits z and target y, with m = max z, s = sum e^(z - m), u = sum e^(z - m) (z - m)::

    lse = m + log s        log_prob = z_y - lse        entropy = log s - u / s
    d log_prob / dz_j = 1[j = y] - p_j        d entropy / dz_j = -p_j (z_j - lse + entropy)        p_j = e^(z_j - lse)

The forward pass visits tiles of the logits and keeps (m, s, u) up to date as their maximum grows (online softmax: Milakov and
Gimelshein, 2018); the centred form of the entropy loses no digits, unlike lse - sum p z. The backward pass computes each tile again
and has the vocabulary in its outer loop, so that the gradient of the weight is summed in fp32 for one tile of columns at a time
and no second buffer of the weight's size exists.
"""

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

DIRECT_ELEMENTS = 1 << 21  # logits of at most this many elements (8 MiB in fp32) are kept, larger ones computed twice
CPU_TILE = (512, 2048)  # 4 MiB in fp32: stays in the caches of a core
ACCELERATOR_TILE = (4096, 8192)  # 128 MiB in fp32: large enough for full matrix-multiply throughput


@dataclasses.dataclass(frozen=True)
class _Head:
    """How a raw product hidden @ weight.T becomes a logit: times ``scale``, soft-capped, divided by the temperature."""

    softcap: float | None
    scale: float
    temperature: Tensor | float  # [T] or one number
    tile: tuple[int, int]

    def rows(self, start: int, stop: int) -> Tensor | float:
        """Return the temperature of some tokens, as a column."""
        return self.temperature[start:stop, None] if isinstance(self.temperature, Tensor) else self.temperature

    def finish_(self, raw: Tensor, temperature: Tensor | float) -> Tensor:
        """Turn raw products into logits in place."""
        if self.softcap is None:
            factor = self.scale / temperature
            return raw if isinstance(factor, float) and factor == 1.0 else raw.mul_(factor)
        return raw.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / temperature)

    def backward_(self, grad: Tensor, logits: Tensor, temperature: Tensor | float) -> Tensor:
        """Turn the gradient of the logits into the gradient of the raw products, in place; ``logits`` is overwritten."""
        factor = self.scale / temperature
        if self.softcap is not None:
            # logit = softcap tanh(raw scale / softcap) / temperature, and tanh' = 1 - tanh^2
            grad.mul_(logits.mul_(temperature / self.softcap).square_().neg_().add_(1.0))
        return grad if isinstance(factor, float) and factor == 1.0 else grad.mul_(factor)


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    with_entropy: bool = True,
    token_tile: int | None = None,
    vocab_tile: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log p(target) and the entropy of softmax(logits) per token, both differentiable.

    ``logits = cap(logit_scale * (hidden @ weight.T + bias)) / temperature`` with ``cap(x) = softcap * tanh(x / softcap)``.
    Small problems keep their logits for the backward pass; larger ones never hold more than two tiles of that size.

    Args:
        hidden: [T, h], floating: the state from which each target was predicted.
        weight: [V, h], floating: the LM head's weight, a plain (not a sharded) tensor.
        targets: [T], int64: token ids.
        bias: [V]: the LM head's bias.
        temperature: One number or [T], positive: divides the logits. It receives no gradient.
        softcap: Bound of soft-capped logits (Gemma 2), applied before the temperature.
        logit_scale: Factor on the raw products (Cohere; 1 / ``logits_scaling`` for Granite), applied before the soft cap.
        with_entropy: False saves the entropy's share of the work.
        token_tile: Tokens per tile; given either tile size, the logits are always tiled.
        vocab_tile: Vocabulary entries per tile.

    Returns:
        ``(log_probs, entropy)``: [T] each, in nats, fp32 (fp64 if ``hidden`` is); ``entropy`` is None unless asked for.

    Raises:
        ValueError: Shapes do not fit each other.

    Example:
        >>> log_probs, entropy = token_log_probs(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([1, 2]))
        >>> [round(x, 4) for x in log_probs.tolist()], [round(x, 4) for x in entropy.tolist()]
        ([-1.3863, -1.3863], [1.3863, 1.3863])
    """
    _check_shapes(hidden, weight, targets, bias, temperature)
    hidden, weight, bias = _common_dtype(hidden, weight, bias)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to(_accumulation_dtype(hidden))
        temperature = temperature.expand(hidden.shape[0]) if temperature.dim() == 0 else temperature
    default = CPU_TILE if hidden.device.type == "cpu" else ACCELERATOR_TILE
    head = _Head(softcap, float(logit_scale), temperature, (token_tile or default[0], vocab_tile or default[1]))
    small = token_tile is None and vocab_tile is None and hidden.shape[0] * weight.shape[0] <= DIRECT_ELEMENTS
    # On a GPU tiles of half-precision inputs keep fp32 logits, autograd's linear rounds them: the batch's size must not decide which.
    direct = small and (hidden.device.type == "cpu" or hidden.dtype == _accumulation_dtype(hidden))
    score = _score_directly if direct else _TiledScore.apply
    # Dtypes are chosen above; autocast would change them in the forward pass only.
    with torch.autocast(hidden.device.type, enabled=False):
        return cast(tuple[Tensor, Tensor | None], score(hidden, weight, bias, targets, head, with_entropy))


def _check_shapes(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float | Tensor) -> None:
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"Expected hidden [T, h] and weight [V, h] of one hidden size, but got {tuple(hidden.shape)} and {tuple(weight.shape)}."
        )
    if targets.shape != (tokens,):
        raise ValueError(f"Expected one target for each of {tokens} hidden states, but got targets of shape {tuple(targets.shape)}.")
    if bias is not None and bias.shape != (vocabulary,):
        raise ValueError(f"Expected a bias of shape [{vocabulary}] (the rows of weight), but got {tuple(bias.shape)}.")
    if isinstance(temperature, Tensor) and temperature.dim() > 0 and temperature.shape != (tokens,):
        raise ValueError(f"Expected a number or one temperature for each of {tokens} tokens, but got shape {tuple(temperature.shape)}.")


def _common_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as ``nn.Linear`` would be under autocast; otherwise follow the weight."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) and weight.dtype != torch.float64 else weight.dtype
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _products(rows: Tensor, columns: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Write rows @ columns.T + bias into ``out`` [r, c], which has the accumulation dtype."""
    if rows.dtype == out.dtype:
        torch.mm(rows, columns.t(), out=out)
    elif rows.is_cuda:
        torch.mm(rows, columns.t(), out_dtype=out.dtype, out=out)
    else:
        out.copy_(torch.mm(rows, columns.t()))
    return out if bias is None else out.add_(bias)


def _score_directly(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: _Head, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Write the definition down and leave the rest to autograd: the fastest way as long as the logits are small."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(_accumulation_dtype(hidden)) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    log_p = torch.log_softmax(logits / head.rows(0, hidden.shape[0]), dim=-1)
    log_probs = log_p.gather(1, targets[:, None]).squeeze(1)
    return log_probs, (log_p.exp() * log_p).sum(dim=-1).neg() if with_entropy else None


class _TiledScore(torch.autograd.Function):
    """Online softmax over tiles; the backward pass computes the tiles again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: _Head, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        tokens = hidden.shape[0]
        log_probs, lse, entropy = (torch.empty(tokens, dtype=_accumulation_dtype(hidden), device=hidden.device) for _ in range(3))
        buffers = _tile_buffers(hidden, weight, head)
        for start in range(0, tokens, head.tile[0]):
            stop = min(start + head.tile[0], tokens)
            rows = _score_rows(hidden[start:stop], weight, bias, targets[start:stop], head, head.rows(start, stop), with_entropy, buffers)
            log_probs[start:stop], lse[start:stop], entropy[start:stop] = rows
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy if with_entropy else None)
        ctx.head = head
        return log_probs, entropy.clone() if with_entropy else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        grad_log_probs, grad_entropy = grads
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None, None, None
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(lse)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        grad_bias = torch.empty_like(bias) if need_bias else None
        buffers = _tile_buffers(hidden, weight, head)
        for first in range(0, weight.shape[0], head.tile[1]):
            last = min(first + head.tile[1], weight.shape[0])
            columns, column_bias = weight[first:last], None if bias is None else bias[first:last]
            column_sum = torch.zeros(last - first, dtype=lse.dtype, device=lse.device) if need_bias else None
            weight_sum = torch.zeros(columns.shape, dtype=lse.dtype, device=lse.device) if need_weight else None
            for start in range(0, hidden.shape[0], head.tile[0]):
                stop = min(start + head.tile[0], hidden.shape[0])
                part = slice(start, stop)
                tile = _tile_gradient(
                    hidden[part], columns, column_bias, targets[part] - first, lse[part], None if grad_entropy is None else entropy[part],
                    grad_log_probs[part], None if grad_entropy is None else grad_entropy[part], head, head.rows(start, stop), buffers,
                )  # fmt: skip
                if column_sum is not None:
                    column_sum += tile.sum(dim=0)
                tile = tile.to(hidden.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[part], tile, columns)
                if weight_sum is not None:
                    _add_product(weight_sum, tile.t(), hidden[part])
            if grad_weight is not None and weight_sum is not None:
                grad_weight[first:last] = weight_sum
            if grad_bias is not None and column_sum is not None:
                grad_bias[first:last] = column_sum
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None


def _tile_buffers(hidden: Tensor, weight: Tensor, head: _Head) -> tuple[Tensor, Tensor]:
    """Allocate two flat tiles once: allocating them per tile costs page faults."""
    elements = min(head.tile[0], hidden.shape[0]) * min(head.tile[1], weight.shape[0])
    return tuple(torch.empty(elements, dtype=_accumulation_dtype(hidden), device=hidden.device) for _ in range(2))  # type: ignore[return-value]  # two


def _view(buffer: Tensor, rows: int, columns: int) -> Tensor:
    return buffer[: rows * columns].view(rows, columns)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        total += torch.mm(left, right, out_dtype=total.dtype)
    else:
        total += torch.mm(left, right)


def _score_rows(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: _Head,
    temperature: Tensor | float,
    with_entropy: bool,
    buffers: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log_prob, lse, entropy) of the tokens of one row of tiles; the entropy is meaningless unless asked for."""
    count = rows.shape[0]
    maximum = torch.full((count,), -1e30, dtype=buffers[0].dtype, device=rows.device)  # finite: 0 * (-inf) would be NaN below
    total, weighted, chosen = torch.zeros_like(maximum), torch.zeros_like(maximum), torch.zeros_like(maximum)
    for first in range(0, weight.shape[0], head.tile[1]):
        last = min(first + head.tile[1], weight.shape[0])
        logits = _products(rows, weight[first:last], None if bias is None else bias[first:last], _view(buffers[0], count, last - first))
        head.finish_(logits, temperature)
        inside = (targets >= first) & (targets < last)
        picked = logits.gather(1, (targets - first).clamp_(0, last - first - 1)[:, None]).squeeze(1)
        chosen = torch.where(inside, picked, chosen)
        new_maximum = torch.maximum(maximum, logits.amax(dim=1))
        shift = maximum - new_maximum
        shrink = shift.exp()
        logits.sub_(new_maximum[:, None])
        exponentials = torch.exp(logits, out=_view(buffers[1], count, last - first))
        if with_entropy:
            # The old sums were centred on the old maximum: sum e^(z-m') (z-m') = e^(m-m') (u + (m-m') s)
            weighted = shrink * (weighted + shift * total) + logits.mul_(exponentials).sum(dim=1)
        total = shrink * total + exponentials.sum(dim=1)
        maximum = new_maximum
    log_total = total.log()
    lse = maximum + log_total
    return chosen - lse, lse, log_total - weighted / total


def _tile_gradient(
    rows: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    head: _Head,
    temperature: Tensor | float,
    buffers: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the gradient of one tile's raw products; ``targets`` count from the tile's first column."""
    shape = (rows.shape[0], columns.shape[0])
    logits = head.finish_(_products(rows, columns, bias, _view(buffers[0], *shape)), temperature)
    grad = torch.sub(logits, lse[:, None], out=_view(buffers[1], *shape)).exp_()
    if grad_entropy is not None and entropy is not None:
        # p (-g_lp - g_H (z - lse + H)); a soft cap still needs the logits afterwards
        factor = logits.clone() if head.softcap is not None else logits
        grad.mul_(factor.mul_(-grad_entropy[:, None]).add_((grad_entropy * (lse - entropy) - grad_log_probs)[:, None]))
    else:
        grad.mul_(-grad_log_probs[:, None])
    inside = (targets >= 0) & (targets < shape[1])
    grad.scatter_add_(1, targets.clamp(0, shape[1] - 1)[:, None], torch.where(inside, grad_log_probs, 0.0)[:, None])
    return head.backward_(grad, logits, temperature)

"""Tiles of the logits, and log-probability and entropy of given tokens from them.

Letters in shapes: T tokens, V vocabulary, h hidden size, r rows (tokens) of a tile, c columns (vocabulary) of a tile.

For one token with logits z and target y, with m = max z, s = sum e^(z - m), u = sum e^(z - m) (z - m)::

    lse = m + log s        log_prob = z_y - lse        entropy = log s - u / s

Tiles are visited row by row, and (m, s, u) kept up to date as the maximum grows (online softmax: Milakov and Gimelshein, 2018); the
centred form of the entropy loses no digits, unlike lse - sum p z.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Head:
    """How a raw product hidden @ weight.T becomes a logit, and how the logits are cut.

    Attributes:
        softcap: Bound of the logits, applied after ``scale``; or None.
        scale: Factor on the products.
        temperature: One number or [T], without gradient: divides the logits last.
        tile: Tokens and vocabulary entries of a tile.
        kept_elements: Elements of exponentials that the forward pass may keep for the backward pass.
    """

    softcap: float | None
    scale: float
    temperature: Tensor | float
    tile: tuple[int, int]
    kept_elements: int = 0

    def rows(self, part: slice) -> Tensor | float:
        """Return the temperature of some tokens, as a column."""
        return self.temperature[part, None] if isinstance(self.temperature, Tensor) else self.temperature

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

    def cut(self, size: int, dim: int) -> Iterator[slice]:
        """Yield the tiles' parts of ``size`` tokens (``dim`` 0) or vocabulary entries (1)."""
        step = self.tile[dim]
        return (slice(start, min(start + step, size)) for start in range(0, size, step))


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of logits and sums: fp64 for fp64, else fp32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class Tiles:
    """Computes tiles of logits, and keeps exponentials of the first ones.

    Attributes:
        room: Elements that may still be kept.
        kept: Exponentials [r, c] and their centres [r], of one tile after the other, row by row.
        buffers: Two flat tiles, allocated once: allocating them per tile costs page faults.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, kept: list[Tensor] | None = None) -> None:
        self.hidden, self.weight, self.bias, self.head = hidden, weight, bias, head
        self.kept: list[Tensor] = [] if kept is None else kept
        self.room = 0
        self.num_columns = -(-weight.shape[0] // head.tile[1])
        self.dtype = accumulation_dtype(hidden)
        elements = min(head.tile[0], hidden.shape[0]) * min(head.tile[1], weight.shape[0])
        self.buffers = [torch.empty(elements, dtype=self.dtype, device=hidden.device) for _ in range(2)]

    def buffer(self, number: int, rows: slice, columns: slice) -> Tensor:
        """Return a buffer in the shape of a tile."""
        shape = rows.stop - rows.start, columns.stop - columns.start
        return self.buffers[number][: shape[0] * shape[1]].view(shape)

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """Compute a tile of logits in the first buffer."""
        out = self.buffer(0, rows, columns)
        left, right = self.hidden[rows], self.weight[columns]
        if left.dtype == out.dtype:
            torch.mm(left, right.t(), out=out)
        elif left.is_cuda:
            torch.mm(left, right.t(), out_dtype=out.dtype, out=out)
        else:
            out.copy_(torch.mm(left, right.t()))
        return self.head.finish_(out if self.bias is None else out.add_(self.bias[columns]), self.head.rows(rows))

    def exponentials(self, centred: Tensor, centre: Tensor, rows: slice, columns: slice) -> Tensor:
        """Return e^centred, in a tensor that is kept while there is room, then in the second buffer."""
        if centred.numel() > self.room:
            self.room = 0  # the kept tiles are the first ones, so that their number tells which they are
            return torch.exp(centred, out=self.buffer(1, rows, columns))
        self.room -= centred.numel()
        self.kept += [torch.exp(centred), centre]
        return self.kept[-2]

    def kept_tile(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor] | None:
        """Return exponentials and centres of a tile, or None if they were not kept."""
        number = rows.start // self.head.tile[0] * self.num_columns + columns.start // self.head.tile[1]
        return (self.kept[2 * number], self.kept[2 * number + 1]) if 2 * number < len(self.kept) else None


class RowScores(NamedTuple):
    """What the tokens of one row of tiles are scored; entropy and squares are without meaning unless asked for.

    Attributes:
        log_probs: [r].
        lse: [r], log sum e^z.
        entropy: [r].
        squares: [r], sum p^2.
    """

    log_probs: Tensor
    lse: Tensor
    entropy: Tensor
    squares: Tensor


def score_rows(tiles: Tiles, rows: slice, targets: Tensor, with_entropy: bool, with_squares: bool = False) -> RowScores:
    """Score the tokens of one row of tiles, in one visit to each tile."""
    maximum = torch.full((rows.stop - rows.start,), -1e30, dtype=tiles.dtype, device=targets.device)  # finite: 0 * (-inf) is NaN below
    total, weighted, chosen, squares = (torch.zeros_like(maximum) for _ in range(4))
    for columns in tiles.head.cut(tiles.weight.shape[0], 1):
        logits = tiles.logits(rows, columns)
        inside, local = local_targets(targets, columns)
        chosen = torch.where(inside, logits.gather(1, local[:, None]).squeeze(1), chosen)
        new_maximum = torch.maximum(maximum, logits.amax(dim=1))
        shift = maximum - new_maximum
        shrink = shift.exp()
        logits.sub_(new_maximum[:, None])
        exponentials = tiles.exponentials(logits, new_maximum, rows, columns)
        if with_entropy:
            # The old sums were centred on the old maximum: sum e^(z-m') (z-m') = e^(m-m') (u + (m-m') s)
            weighted = shrink * (weighted + shift * total) + logits.mul_(exponentials).sum(dim=1)
        if with_squares:
            squares = shrink.square() * squares + torch.mul(exponentials, exponentials, out=logits).sum(dim=1)
        total = shrink * total + exponentials.sum(dim=1)
        maximum = new_maximum
    log_total = total.log()
    lse = maximum + log_total
    return RowScores(chosen - lse, lse, log_total - weighted / total, squares / total.square())


def whole_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head) -> Tensor:
    """Return the logits of all tokens, [T, V] in the accumulation dtype, written down for autograd."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(accumulation_dtype(hidden)) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits / head.rows(slice(None))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right in the total's precision, where the device can."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        total += torch.mm(left, right, out_dtype=total.dtype)
    else:
        total += torch.mm(left, right)


def local_targets(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return which targets lie in a tile's columns, and their place there (any place for the others)."""
    local = targets - columns.start
    size = columns.stop - columns.start
    return (local >= 0) & (local < size), local.clamp_(0, size - 1)

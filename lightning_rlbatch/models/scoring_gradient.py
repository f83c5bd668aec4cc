"""The gradient of the tiled log-probabilities and entropies.

For one token with logits z and target y::

    d log_prob / dz_j = 1[j = y] - p_j        d entropy / dz_j = -p_j (z_j - lse + entropy)        p_j = e^(z_j - lse)

The backward pass has the vocabulary in its outer loop, so that the gradient of the weight is summed in fp32 for one tile of columns at a
time and no second buffer of the weight's size exists. It needs each tile's exponentials e^(z - centre) again, for any centre of a row:
those of the first tiles, as many as there was room for, were kept by the forward pass, the others are computed again. If only log-probs
have a gradient g, then p enters linearly, and the factor of a row moves out of the products over the tile::

    d loss / d hidden = g W_y - a (E @ W)        d loss / dW = 1[y]' (g hidden) - E' @ (a hidden)        a = g e^(centre - lse)

so that a kept tile E costs two matrix products and nothing else.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_rlbatch.models.scoring_tiles import Head, Tiles, accumulation_dtype, add_product, local_targets, score_rows


class TiledScore(torch.autograd.Function):
    """``(log_probs, entropy)`` of [T, h] states; entropy is None unless asked for.

    The arguments of ``apply`` are hidden, weight, bias or None, targets, `Head`, and whether entropies are wanted.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Visit the tiles once, and keep what there is room for."""
        ctx.set_materialize_grads(False)
        tokens = hidden.shape[0]
        log_probs, lse, entropy = (torch.empty(tokens, dtype=accumulation_dtype(hidden), device=hidden.device) for _ in range(3))
        tiles = Tiles(hidden, weight, bias, head)
        tiles.room = head.kept_elements if any(ctx.needs_input_grad) else 0
        for part in head.cut(tokens, 0):
            log_probs[part], lse[part], entropy[part], _ = score_rows(tiles, part, targets[part], with_entropy)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy if with_entropy else None, *tiles.kept)
        ctx.head = head
        return log_probs, entropy.clone() if with_entropy else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients of hidden, weight and bias."""
        hidden, weight, bias, targets, lse, entropy, *kept = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return None, None, None, None, None, None
        tiles = Tiles(hidden, weight, bias, ctx.head, kept)
        grad_log_probs = torch.zeros_like(lse) if grads[0] is None else grads[0]
        gradient = _Gradient(tiles, targets, lse, entropy, grad_log_probs, grads[1], ctx.needs_input_grad[:3])
        return *gradient.compute(), None, None, None


class _Gradient:
    """The gradients of hidden states, weight and bias; None for those that are not needed."""

    def __init__(
        self,
        tiles: Tiles,
        targets: Tensor,
        lse: Tensor,
        entropy: Tensor | None,
        grad_log_probs: Tensor,
        grad_entropy: Tensor | None,
        needed: tuple[bool, bool, bool],
    ) -> None:
        self.tiles, self.targets, self.lse, self.entropy = tiles, targets, lse, entropy
        self.grad_log_probs, self.grad_entropy = grad_log_probs, grad_entropy
        hidden, weight, bias = tiles.hidden, tiles.weight, tiles.bias
        self.hidden = torch.zeros_like(hidden, dtype=tiles.dtype) if needed[0] else None
        self.weight = torch.empty_like(weight) if needed[1] else None
        self.bias = torch.empty_like(bias) if needed[2] and bias is not None else None
        # Half precision would round the target's 1 and its p, nearly 1 for a sure token, before it takes their difference.
        self.linear = grad_entropy is None and tiles.head.softcap is None and hidden.dtype == tiles.dtype

    def compute(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        tiles, head = self.tiles, self.tiles.head
        for columns in head.cut(tiles.weight.shape[0], 1):
            width = columns.stop - columns.start
            column_sum = torch.zeros(width, dtype=tiles.dtype, device=self.lse.device) if self.bias is not None else None
            weight_sum = None if self.weight is None else self._weight_sum(self.weight[columns])
            for rows in head.cut(tiles.hidden.shape[0], 0):
                (self._add_linear if self.linear else self._add_tile)(rows, columns, weight_sum, column_sum)
            if self.weight is not None and weight_sum is not None and weight_sum.dtype != self.weight.dtype:
                self.weight[columns] = weight_sum
            if self.bias is not None and column_sum is not None:
                self.bias[columns] = column_sum
        if self.linear:
            self._add_targets()
        return None if self.hidden is None else self.hidden.to(tiles.hidden.dtype), self.weight, self.bias

    def _weight_sum(self, columns: Tensor) -> Tensor:
        """Return zeros to add to: the gradient's own rows, or where these are of lower precision a copy."""
        return columns.zero_() if columns.dtype == self.tiles.dtype else torch.zeros_like(columns, dtype=self.tiles.dtype)

    def _raw(self, gradient: Tensor, rows: slice) -> Tensor:
        """Turn the gradient [r] of log-probs into that of the target's raw product, without a soft cap."""
        temperature = self.tiles.head.temperature
        return gradient * (self.tiles.head.scale / (temperature[rows] if isinstance(temperature, Tensor) else temperature))

    def _add_linear(self, rows: slice, columns: slice, weight_sum: Tensor | None, column_sum: Tensor | None) -> None:
        """Add the part of one tile that comes from p, when only log-probs have a gradient."""
        factor, kept = -self._raw(self.grad_log_probs[rows], rows), self.tiles.kept_tile(rows, columns)
        if kept is None:
            exponentials = self._probabilities(self.tiles.logits(rows, columns), rows, columns)
        else:
            exponentials, centre = kept
            factor = factor * (centre - self.lse[rows]).exp()
        if self.hidden is not None:
            self.hidden[rows] += torch.mm(exponentials, self.tiles.weight[columns]).mul_(factor[:, None])
        if weight_sum is not None:
            weight_sum.addmm_(exponentials.t(), factor[:, None] * self.tiles.hidden[rows])
        if column_sum is not None:
            column_sum.addmv_(exponentials.t(), factor)

    def _add_targets(self) -> None:
        """Add the part that comes from the targets' own logits."""
        gradient = self._raw(self.grad_log_probs, slice(None))
        if self.hidden is not None:
            self.hidden.addcmul_(gradient[:, None], self.tiles.weight[self.targets])
        if self.weight is not None:
            _add_rows(self.weight, self.targets, gradient[:, None] * self.tiles.hidden)
        if self.bias is not None:
            _add_rows(self.bias, self.targets, gradient)

    def _add_tile(self, rows: slice, columns: slice, weight_sum: Tensor | None, column_sum: Tensor | None) -> None:
        """Add one tile: the gradient of its raw products, written down, then the products."""
        tile = self._tile_gradient(rows, columns)
        if column_sum is not None:
            column_sum += tile.sum(dim=0)
        tile = tile.to(self.tiles.hidden.dtype)
        if self.hidden is not None:
            add_product(self.hidden[rows], tile, self.tiles.weight[columns])
        if weight_sum is not None:
            add_product(weight_sum, tile.t(), self.tiles.hidden[rows])

    def _tile_gradient(self, rows: slice, columns: slice) -> Tensor:
        head, lse, grad_log_probs = self.tiles.head, self.lse[rows], self.grad_log_probs[rows]
        logits, grad = self._logits_and_probabilities(rows, columns)
        if self.grad_entropy is not None and self.entropy is not None:
            # p (-g_lp - g_H (z - lse + H)); a soft cap still needs the logits afterwards
            grad_entropy, entropy = self.grad_entropy[rows], self.entropy[rows]
            factor = logits.clone() if head.softcap is not None else logits
            grad.mul_(factor.mul_(-grad_entropy[:, None]).add_((grad_entropy * (lse - entropy) - grad_log_probs)[:, None]))
        else:
            grad.mul_(-grad_log_probs[:, None])
        inside, local = local_targets(self.targets[rows], columns)
        grad.scatter_add_(1, local[:, None], torch.where(inside, grad_log_probs, 0.0)[:, None])
        return head.backward_(grad, logits, head.rows(rows))

    def _logits_and_probabilities(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Return a tile's logits and p in the two buffers.

        Logits whose p is 0 may be any finite number, and all may be anything if neither entropy nor soft cap needs them.
        """
        kept = self.tiles.kept_tile(rows, columns)
        if kept is None:
            logits = self.tiles.logits(rows, columns)
            return logits, self._probabilities(logits, rows, columns)
        exponentials, centre = kept
        logits = self.tiles.buffer(0, rows, columns)
        if self.grad_entropy is not None or self.tiles.head.softcap is not None:
            torch.clamp(exponentials, min=torch.finfo(exponentials.dtype).tiny, out=logits).log_().add_(centre[:, None])
        return logits, torch.mul(exponentials, (centre - self.lse[rows]).exp()[:, None], out=self.tiles.buffer(1, rows, columns))

    def _probabilities(self, logits: Tensor, rows: slice, columns: slice) -> Tensor:
        return torch.sub(logits, self.lse[rows, None], out=self.tiles.buffer(1, rows, columns)).exp_()


def _add_rows(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add rows at indices that may repeat, in the same order every time."""
    if total.is_cuda:
        total.index_put_((index,), rows, accumulate=True)  # sorts; index_add_ would add in any order
    else:
        total.index_add_(0, index, rows)

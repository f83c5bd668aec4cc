"""The exact divergence of the policy from a reference, summed over the vocabulary a tile at a time, without ``[T, V]`` logits.

With the policy's logits z and the reference's y of one token, m = max z, s = sum e^(z - m), u = sum e^(z - m) (z - y)::

    KL = sum_j p_j (log p_j - log q_j) = u / s - lse(z) + lse(y)        d KL / dz_j = p_j (log p_j - log q_j - KL)

Tiles are visited as in ``scoring_tiles``; the backward pass computes both models' tiles again. The reference has no gradient.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_rlbatch.functional.kl import full_kl
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.scorer import TokenScorer
from lightning_rlbatch.models.scoring import ACCELERATOR_TILE, CPU_TILE, log_probs_and_squares, may_keep_logits
from lightning_rlbatch.models.scoring_tiles import Head, Tiles, accumulation_dtype, add_product, whole_logits


class ReferenceHead(NamedTuple):
    """From what the reference's logits at a micro-batch's scored positions are computed; no gradient.

    Attributes:
        states: [n, h], floating: hidden states of this rank's scored positions.
        weight: [V, h], floating: the LM head's weight, whole.
        bias: [V] or None.
        logit_scale: As in `token_log_probs`.
        softcap: As in `token_log_probs`.
    """

    states: Tensor
    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    softcap: float | None


class FullKLScores(NamedTuple):
    """``TokenScores``, and the divergence.

    Attributes:
        log_probs: See `TokenScores`.
        entropy: See `TokenScores`.
        values: See `TokenScores`.
        full_kl: [T], fp32: KL(policy || reference) of the distributions that token t is drawn from, in nats; 0 outside.
    """

    log_probs: Tensor | None
    entropy: Tensor | None
    values: Tensor | None
    full_kl: Tensor


class SquaredScores(NamedTuple):
    """Statistics of the distributions that tokens are drawn from, out of one forward pass without gradient.

    Attributes:
        log_probs: [T], fp32: see `TokenScores`; the same numbers.
        sum_pi_squared: [T], fp32: sum_j p_j^2 over the vocabulary; 0 outside the scored positions.
        values: See `TokenScores`.
    """

    log_probs: Tensor
    sum_pi_squared: Tensor
    values: Tensor | None


class FullKLScorer(TokenScorer):
    """A `TokenScorer` that also computes sums over the vocabulary: the exact divergence from a reference, the sum of squares.

    Two calls, since each model's head is only there inside of its own forward once models are sharded: ``reference(batch,
    reference="own")`` without gradient returns a `ReferenceHead`; with ``policy(batch, reference=head)`` come `FullKLScores`.
    """

    def forward(
        self,
        batch: PackedBatch,
        *,
        temperature: float | Tensor = 1.0,
        with_log_probs: bool = True,
        with_entropy: bool = False,
        with_values: bool = False,
        reference: ReferenceHead | Literal["own"] | None = None,
        with_squares: bool = False,
    ) -> Any:
        """Score as `TokenScorer.forward` does; with a reference also the divergence from it.

        Args:
            batch: See `TokenScorer`.
            temperature: Divides the logits of both models.
            with_log_probs: See `TokenScorer`; must be True with a `ReferenceHead`.
            with_entropy: See `TokenScorer`.
            with_values: See `TokenScorer`.
            reference: None; ``"own"`` to return this model's `ReferenceHead` and nothing else; or the reference's, of the same batch.
            with_squares: True returns `SquaredScores`; for forward passes without gradient.

        Returns:
            `TokenScores`; with a `ReferenceHead` `FullKLScores`; with squares `SquaredScores`.

        Raises:
            ValueError: See `TokenScorer`; a `ReferenceHead` without log-probs.
            TypeError: See `TokenScorer`.
            RuntimeError: See `TokenScorer`.
        """
        if reference is None and not with_squares:
            arguments = {"with_log_probs": with_log_probs, "with_entropy": with_entropy, "with_values": with_values}
            return super().forward(batch, temperature=temperature, **arguments)
        if not with_log_probs:
            raise ValueError("The divergence comes with log-probs, but with_log_probs is False. Leave it at True.")
        self._check_request(batch, temperature, True, with_values)
        targets, scored, sources = self.positions.find(batch)
        states = self._hidden_states(batch)[sources]
        if isinstance(reference, str):
            # FSDP2 frees a gathered weight after the forward, and the divergence needs it until the policy's backward. A copy takes as much
            # memory as keeping it gathered (less, with the embeddings), and 0.3% of the time of the tiles of 4,000 tokens.
            return self._own_head(states, copied=isinstance(self, FSDPModule))
        rows_temperature = self._temperature_of(sources, batch, temperature)
        values = self.value_head(states) if with_values and self.value_head is not None else None
        if with_squares or reference is None:
            columns = [*self._log_probs_and_squares(states, targets[sources], rows_temperature), values]
            return SquaredScores(*self._to_tokens(columns, sources, scored, batch.num_tokens))  # type: ignore[arg-type]  # the first two are none
        log_probs, entropy = self._run_lm_head(states, targets[sources], rows_temperature, with_entropy)
        own = ReferenceHead(states, *self._head_weights(), self.logit_scale, self.softcap)
        columns = [log_probs, entropy, values, divergence(own, reference, temperature=rows_temperature)]
        return FullKLScores(*self._to_tokens(columns, sources, scored, batch.num_tokens))  # type: ignore[arg-type]  # the last is none

    def _to_tokens(self, columns: Sequence[Tensor | None], sources: Tensor, scored: Tensor, num_tokens: int) -> list[Tensor | None]:
        return [None if column is None else self._to_token(column, sources, scored, num_tokens) for column in columns]

    def _log_probs_and_squares(self, states: Tensor, targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = self._head_weights()
        adjustments: dict[str, Any] = {"softcap": self.softcap, "logit_scale": self.logit_scale}
        return log_probs_and_squares(states, weight, targets, bias=bias, temperature=temperature, **adjustments)

    def _own_head(self, states: Tensor, *, copied: bool = False) -> ReferenceHead:
        weight, bias = self._head_weights()
        if copied:
            weight, bias = weight.clone(), None if bias is None else bias.clone()
        return ReferenceHead(states.detach(), weight.detach(), None if bias is None else bias.detach(), self.logit_scale, self.softcap)


def divergence(
    policy: ReferenceHead,
    reference: ReferenceHead,
    *,
    temperature: float | Tensor = 1.0,
    token_tile: int | None = None,
    vocab_tile: int | None = None,
) -> Tensor:
    """Compute KL(policy || reference) per token from hidden states and LM heads.

    Args:
        policy: States and head of the policy; the gradient flows into its states, weight and bias.
        reference: The same of the reference; no gradient.
        temperature: One number or [n], positive: divides the logits of both.
        token_tile: Tokens per tile; given either tile size, the logits are always tiled.
        vocab_tile: Vocabulary entries per tile.

    Returns:
        [n], in nats: fp32 (fp64 if the policy's head is).

    Example:
        >>> one = ReferenceHead(torch.ones(1, 1), torch.tensor([[0.0], [0.0]]), None, 1.0, None)
        >>> other = one._replace(weight=torch.tensor([[0.0], [1.0]]))
        >>> round(float(divergence(one, other)), 4)  # log((1 + e) / 2) - 1 / 2
        0.1201
    """
    ours, head = _prepared(policy, policy.weight, temperature, (token_tile, vocab_tile))
    theirs, ref_head = _prepared(reference, policy.weight, temperature, (token_tile, vocab_tile))
    own, other = (ours.states, ours.weight, ours.bias), (theirs.states, theirs.weight, theirs.bias)
    with torch.autocast(ours.states.device.type, enabled=False):
        if token_tile is None and vocab_tile is None and may_keep_logits(ours.states, ours.weight):
            everywhere = torch.ones(ours.states.shape[0], dtype=torch.bool, device=ours.states.device)
            return full_kl(whole_logits(*own, head), whole_logits(*other, ref_head), everywhere)
        apply: Any = _TiledKL.apply  # torch has no type for it
        return cast(Tensor, apply(*own, *other, head, ref_head))


@torch.no_grad()
def _prepared(
    part: ReferenceHead, like: Tensor, temperature: float | Tensor, tile: tuple[int | None, int | None]
) -> tuple[ReferenceHead, Head]:
    """Cast as nn.Linear under autocast, else as the weight ``like``: both models' logits are rounded alike."""
    device = part.states.device.type
    autocast = torch.is_autocast_enabled(device) and like.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if autocast else like.dtype
    bias = None if part.bias is None else part.bias.to(dtype)
    part = part._replace(states=part.states.to(dtype), weight=part.weight.to(dtype), bias=bias)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to(accumulation_dtype(part.states)).expand(part.states.shape[0])
    default = CPU_TILE if device == "cpu" else ACCELERATOR_TILE
    return part, Head(part.softcap, part.logit_scale, temperature, (tile[0] or default[0], tile[1] or default[1]))


class _TiledKL(torch.autograd.Function):
    """The divergence [n]; the arguments of ``apply`` are states, weight and bias of both models, then their heads."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        states, weight, bias, ref_states, ref_weight, ref_bias, head, ref_head = arguments
        tiles, ref_tiles = Tiles(states, weight, bias, head), Tiles(ref_states, ref_weight, ref_bias, ref_head)
        kl, lse, ref_lse = (torch.empty(states.shape[0], dtype=tiles.dtype, device=states.device) for _ in range(3))
        for rows in head.cut(states.shape[0], 0):
            kl[rows], lse[rows], ref_lse[rows] = _divergence_of_rows(tiles, ref_tiles, rows)
        ctx.save_for_backward(states, weight, bias, ref_states, ref_weight, ref_bias, kl, lse, ref_lse)
        ctx.heads = head, ref_head
        return kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        states, weight, bias, ref_states, ref_weight, ref_bias, kl, lse, ref_lse = ctx.saved_tensors
        head, ref_head = ctx.heads
        tiles, ref_tiles = Tiles(states, weight, bias, head), Tiles(ref_states, ref_weight, ref_bias, ref_head)
        grad_states = torch.zeros(states.shape, dtype=tiles.dtype, device=states.device)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # a frozen head, as with LoRA, needs no buffer
        grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        for columns in head.cut(weight.shape[0], 1):
            weight_sum = None if grad_weight is None else torch.zeros_like(weight[columns], dtype=tiles.dtype)
            bias_sum = None if grad_bias is None else torch.zeros_like(grad_bias[columns], dtype=tiles.dtype)
            for rows in head.cut(states.shape[0], 0):
                logits, ref_logits = tiles.logits(rows, columns), ref_tiles.logits(rows, columns)
                log_p = torch.sub(logits, lse[rows, None], out=tiles.buffer(1, rows, columns))
                # p (log p - log q - KL), in the reference's buffer
                grad = ref_logits.sub_(ref_lse[rows, None]).neg_().add_(log_p).sub_(kl[rows, None]).mul_(log_p.exp_())
                raw = head.backward_(grad.mul_(grads[0][rows, None]), logits, head.rows(rows))
                if bias_sum is not None:
                    bias_sum += raw.sum(dim=0)
                raw = raw.to(states.dtype)
                add_product(grad_states[rows], raw, weight[columns])
                if weight_sum is not None:
                    add_product(weight_sum, raw.t(), states[rows])
            if grad_weight is not None and weight_sum is not None:
                grad_weight[columns] = weight_sum
            if grad_bias is not None and bias_sum is not None:
                grad_bias[columns] = bias_sum
        return grad_states.to(states.dtype), grad_weight, grad_bias, None, None, None, None, None


def _divergence_of_rows(tiles: Tiles, ref_tiles: Tiles, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return (KL, lse, lse of the reference) of the tokens of one row of tiles."""
    count, device = rows.stop - rows.start, tiles.hidden.device
    low = torch.full((count,), -1e30, dtype=tiles.dtype, device=device)  # finite: 0 * (-inf) is NaN below
    maximum, ref_maximum = low, low.clone()
    total, ref_total, weighted = (torch.zeros_like(low) for _ in range(3))
    for columns in tiles.head.cut(tiles.weight.shape[0], 1):
        logits, ref_logits = tiles.logits(rows, columns), ref_tiles.logits(rows, columns)
        new_maximum = torch.maximum(maximum, logits.amax(dim=1))
        new_ref_maximum = torch.maximum(ref_maximum, ref_logits.amax(dim=1))
        shrink, ref_shrink = (maximum - new_maximum).exp(), (ref_maximum - new_ref_maximum).exp()
        exponentials = torch.sub(logits, new_maximum[:, None], out=tiles.buffer(1, rows, columns)).exp_()
        weighted = shrink * weighted + logits.sub_(ref_logits).mul_(exponentials).sum(dim=1)
        total = shrink * total + exponentials.sum(dim=1)
        ref_total = ref_shrink * ref_total + ref_logits.sub_(new_ref_maximum[:, None]).exp_().sum(dim=1)
        maximum, ref_maximum = new_maximum, new_ref_maximum
    lse, ref_lse = maximum + total.log(), ref_maximum + ref_total.log()
    return weighted / total - lse + ref_lse, lse, ref_lse

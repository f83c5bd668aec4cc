"""Log-probability and entropy of given tokens straight from hidden states and the LM head, without ``[T, V]`` logits.

Small problems keep their logits; larger ones are computed a tile at a time (``scoring_tiles``), with a backward pass of their own
(``scoring_gradient``).
"""

from typing import cast

import torch
from torch import Tensor

from lightning_rlbatch.models.scoring_gradient import TiledScore
from lightning_rlbatch.models.scoring_tiles import Head, Tiles, accumulation_dtype, score_rows, whole_logits

DIRECT_ELEMENTS = 1 << 21  # logits of at most this many elements (8 MiB in fp32) are kept, larger ones computed twice
CPU_TILE = (512, 2048)  # 4 MiB in fp32: stays in the caches of a core
ACCELERATOR_TILE = (4096, 8192)  # 128 MiB in fp32: large enough for full matrix-multiply throughput
HEAD_MEMORY_MIB = 64.0  # little beside the rest of a step


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
    head_memory_mib: float = HEAD_MEMORY_MIB,
) -> tuple[Tensor, Tensor | None]:
    """Compute log p(target) and the entropy of softmax(logits) per token, both differentiable.

    ``logits = cap(logit_scale * (hidden @ weight.T + bias)) / temperature`` with ``cap(x) = softcap * tanh(x / softcap)``.
    Small problems keep their logits for the backward pass. Larger ones keep tiles up to ``head_memory_mib``, and two more at a time; the
    tiles that do not fit are computed again in the backward pass, at a third more matrix multiplication each.

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
        head_memory_mib: Most memory for kept tiles, in MiB: 4 bytes for each token and vocabulary entry, 8 in fp64.

    Returns:
        ``(log_probs, entropy)``: [T] each, in nats, fp32 (fp64 if ``hidden`` is); ``entropy`` is None unless asked for.

    Raises:
        ValueError: Shapes do not fit each other, or a negative ``head_memory_mib``.

    Example:
        >>> log_probs, entropy = token_log_probs(torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([1, 2]))
        >>> [round(x, 4) for x in log_probs.tolist()], [round(x, 4) for x in entropy.tolist()]
        ([-1.3863, -1.3863], [1.3863, 1.3863])
    """
    _check_shapes(hidden, weight, targets, bias, temperature)
    check_head_memory(head_memory_mib)
    hidden, weight, bias = _common_dtype(hidden, weight, bias)
    head = _head(hidden, temperature, softcap, logit_scale, (token_tile, vocab_tile), head_memory_mib)
    direct = token_tile is None and vocab_tile is None and may_keep_logits(hidden, weight)
    score = _score_directly if direct else TiledScore.apply
    # Dtypes are chosen above; autocast would change them in the forward pass only.
    with torch.autocast(hidden.device.type, enabled=False):
        return cast(tuple[Tensor, Tensor | None], score(hidden, weight, bias, targets, head, with_entropy))


@torch.no_grad()
def log_probs_and_squares(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_tile: int | None = None,
    vocab_tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log p(target) as `token_log_probs` does, bit for bit, and sum_j p_j^2 (how likely two draws agree), from the same logits.

    Args:
        hidden: As in `token_log_probs`, and so are the other arguments.
        weight: [V, h].
        targets: [T], int64.
        bias: [V].
        temperature: One number or [T].
        softcap: Bound of soft-capped logits.
        logit_scale: Factor on the raw products.
        token_tile: Tokens per tile.
        vocab_tile: Vocabulary entries per tile.

    Returns:
        ``(log_probs, squares)``: [T] each, without gradient, fp32 (fp64 if ``hidden`` is); squares lie in (0, 1].

    Raises:
        ValueError: Shapes do not fit each other.

    Example:
        >>> log_probs_and_squares(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([1]))
        (tensor([-1.3863]), tensor([0.2500]))
    """
    _check_shapes(hidden, weight, targets, bias, temperature)
    hidden, weight, bias = _common_dtype(hidden, weight, bias)
    head = _head(hidden, temperature, softcap, logit_scale, (token_tile, vocab_tile), 0.0)
    with torch.autocast(hidden.device.type, enabled=False):
        if token_tile is None and vocab_tile is None and may_keep_logits(hidden, weight):
            log_p = torch.log_softmax(whole_logits(hidden, weight, bias, head), dim=-1)
            return log_p.gather(1, targets[:, None]).squeeze(1), log_p.mul_(2).exp_().sum(dim=-1)
        tiles = Tiles(hidden, weight, bias, head)
        rows = [score_rows(tiles, part, targets[part], False, with_squares=True) for part in head.cut(hidden.shape[0], 0)]
        return torch.cat([row.log_probs for row in rows]), torch.cat([row.squares for row in rows])


def _head(
    hidden: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    tile: tuple[int | None, int | None],
    head_memory_mib: float,
) -> Head:
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to(accumulation_dtype(hidden))
        temperature = temperature.expand(hidden.shape[0]) if temperature.dim() == 0 else temperature
    default = CPU_TILE if hidden.device.type == "cpu" else ACCELERATOR_TILE
    kept = int(head_memory_mib * 2**20) // accumulation_dtype(hidden).itemsize
    return Head(softcap, float(logit_scale), temperature, (tile[0] or default[0], tile[1] or default[1]), kept)


def may_keep_logits(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether all logits may lie in memory at once: they are few, and come out as those of tiles do.

    On a GPU tiles of half-precision inputs keep fp32 logits, and autograd's linear rounds them: the batch's size must not decide which.

    Args:
        hidden: [T, h], floating.
        weight: [V, h], floating.
    """
    as_tiles = hidden.device.type == "cpu" or hidden.dtype == accumulation_dtype(hidden)
    return as_tiles and hidden.shape[0] * weight.shape[0] <= DIRECT_ELEMENTS


def check_head_memory(head_memory_mib: float) -> None:
    """Raise ValueError unless this is an amount of memory."""
    if not 0 <= head_memory_mib < float("inf"):
        raise ValueError(f"Expected head_memory_mib to be a number of MiB, at least 0, but got {head_memory_mib}.")


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


def _score_directly(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Write the definition down and leave the rest to autograd: the fastest way as long as the logits are small."""
    log_p = torch.log_softmax(whole_logits(hidden, weight, bias, head), dim=-1)
    log_probs = log_p.gather(1, targets[:, None]).squeeze(1)
    return log_probs, (log_p.exp() * log_p).sum(dim=-1).neg() if with_entropy else None

"""Token sampling that depends on nothing but the logits and one integer seed per sequence."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def step_uniforms(seeds: Sequence[int], num_steps: int, *, first_step: int = 0) -> npt.NDArray[np.float64]:
    """Return uniform random numbers for each sequence and decoding step.

    Number ``s`` of a sequence is output ``s`` of the splitmix64 generator (Steele, Lea and Flood, Fast splittable pseudorandom
    generators, 2014) started at the sequence's seed; any of them can be computed without the ones before it.

    Args:
        seeds: One non-negative integer below ``2**64`` per sequence.
        num_steps: How many numbers of each sequence.
        first_step: Index of the first of them.

    Returns:
        ``[len(seeds), num_steps]``, float64 in the open interval (0, 1).

    Example:
        >>> step_uniforms([7, 8], 3)[1, 2] == step_uniforms([8], 1, first_step=2)[0, 0]
        np.True_
    """
    steps = np.arange(first_step + 1, first_step + num_steps + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):  # wrapping around at 2**64 is the arithmetic of the generator
        state = np.asarray(seeds, dtype=np.uint64)[:, None] + steps * _GAMMA
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
    state ^= state >> np.uint64(31)
    fraction: npt.NDArray[np.float64] = ((state >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return fraction


def _truncate(log_probs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return the probabilities ``[B, V]`` with those outside the top-k and the nucleus set to 0 (not renormalised)."""
    probs = log_probs.exp()
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if top_k:
        keep[:, top_k:] = False
    if top_p < 1:
        # a token is in the nucleus if the tokens before it do not reach top_p; top-k first, as in other samplers
        kept = torch.where(keep, ranked, 0.0)
        kept = kept / kept.sum(dim=-1, keepdim=True)
        keep &= kept.cumsum(dim=-1) - kept < top_p
    keep[:, 0] = True
    return torch.where(torch.zeros_like(keep).scatter(-1, order, keep), probs, 0.0)


def sample_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor | None, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per sequence by inverting the cumulative distribution at a given number.

    The distribution is accumulated in vocabulary order (not in order of probability, where a rounding error can swap two tokens),
    so that logits that differ by a rounding error give another token only if the number falls within that error of a boundary.

    Args:
        logits: ``[B, V]``, floating point.
        uniforms: ``[B]``, float64 in (0, 1); not used when greedy.
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_k: Number of most likely tokens to draw among; 0 for all.
        top_p: Probability mass of most likely tokens to draw among; 1 for all.

    Returns:
        ``[B]`` int64 tokens, and ``[B]`` float32 log-probs of these under ``log_softmax(logits / temperature)`` (temperature 1 when
        greedy) over the whole vocabulary; NaN, with any token, where the logits hold NaN.

    Example:
        >>> logits = torch.log(torch.tensor([[0.2, 0.3, 0.5]]))
        >>> [int(sample_tokens(logits, torch.tensor([u], dtype=torch.float64))[0]) for u in (0.1, 0.4, 0.6)]
        [0, 1, 2]
    """
    logits = logits.float()
    if temperature == 0 or uniforms is None:
        tokens = logits.argmax(dim=-1)
        return tokens, logits.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]
    log_probs = (logits if temperature == 1 else logits / temperature).log_softmax(dim=-1)
    probs = _truncate(log_probs, top_k, top_p) if top_k or top_p < 1 else log_probs.exp()
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # strictly below the total, so that a token of probability 0 at the end of the vocabulary is never drawn
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True).clamp(max=logits.shape[-1] - 1)  # NaN compares with nothing
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]

"""What is drawn for a list of requests, whoever runs the model: random numbers in, tokens and log-probs out."""

import math
from collections.abc import Sequence

import torch

from lightning_rlbatch.rollout.engine import Completion, RolloutRequest, SamplingParams
from lightning_rlbatch.rollout.sampling import sample_tokens, step_uniforms


def decoding_order(requests: Sequence[RolloutRequest]) -> list[int]:
    """Return the positions of requests in the order in which to decode them: the longest prompts first, equal ones side by side.

    So batches have little padding, what is computed for a prompt can be shared, and the largest need of memory comes first.

    Args:
        requests: Any number.
    """
    return sorted(range(len(requests)), key=lambda index: (-len(requests[index].prompt_ids), requests[index].prompt_ids))


class Draws:
    """Draws the tokens of requests and keeps them.

    Step s of a request depends on its seed, s and the logits alone. Steps may be drawn in any order and company, and beyond a request's
    end: what lies behind the first stop token or the limit is left out in the end.

    Args:
        requests: Valid requests.
        sampling: How to draw.
        device: Of the logits.

    Attributes:
        limits: Most tokens of each request.
    """

    def __init__(self, requests: Sequence[RolloutRequest], sampling: SamplingParams, device: torch.device) -> None:
        self.limits = [request.limit(sampling) for request in requests]
        self._sampling = sampling
        # the last column takes what finished requests go on to produce
        shape = (len(requests), sampling.max_new_tokens + 1)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._uniforms = torch.from_numpy(step_uniforms([request.seed for request in requests], shape[1])).to(device)

    def draw(self, owners: torch.Tensor, steps: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Draw and keep the next token of some requests.

        Args:
            owners: ``[B]`` int64, positions of the requests.
            steps: ``[B]`` int64, tokens drawn for each before; at most ``max_new_tokens``.
            logits: ``[B, V]``.

        Returns:
            ``[B]`` int64.
        """
        params = self._sampling
        uniforms = self._uniforms[owners, steps] if params.temperature else None
        tokens, log_probs = sample_tokens(logits, uniforms, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
        self._tokens[owners, steps] = tokens
        self._log_probs[owners, steps] = log_probs
        return tokens

    def completions(self, owners: Sequence[int] | None = None) -> list[Completion]:
        """Return what was drawn for some requests, or for all in their order.

        Raises:
            RuntimeError: The model returned NaN.
        """
        owners = range(len(self.limits)) if owners is None else owners
        rows = zip(owners, self._tokens[list(owners)].tolist(), self._log_probs[list(owners)].tolist())
        return [self._completion(self.limits[owner], tokens, log_probs) for owner, tokens, log_probs in rows]

    def _completion(self, limit: int, tokens: list[int], log_probs: list[float]) -> Completion:
        stops = self._sampling.stop_token_ids
        length = next((place for place, token in enumerate(tokens[:limit], start=1) if token in stops), None) if stops else None
        end = limit if length is None else length
        if any(map(math.isnan, log_probs[:end])):
            raise RuntimeError(
                "The model returned NaN while generating, so its weights are not finite. Check the updates before this iteration "
                "(gradient norm, learning rate)."
            )
        return Completion(tokens[:end], log_probs[:end], "length" if length is None else "stop")

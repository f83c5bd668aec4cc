"""Decode with the model's own ``generate``: slower, and right for any model that transformers can generate with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from lightning_rlbatch.rollout.draws import Draws, decoding_order
from lightning_rlbatch.rollout.engine import Completion, ProgressCallback, RolloutRequest, SamplingParams


def plain_generate(
    model: PreTrainedModel,
    requests: Sequence[RolloutRequest],
    sampling: SamplingParams,
    *,
    pad_token_id: int,
    max_batch_size: int | None,
    on_progress: ProgressCallback | None,
) -> list[Completion]:
    """Sample completions in left-padded batches, each of which runs until its last completion ends.

    Args:
        model: A causal language model in evaluation mode; its device decides where the work runs.
        requests: Valid requests.
        sampling: How to draw.
        pad_token_id: Token that fills the left of short prompts.
        max_batch_size: Most sequences that decode together; None for all of them.
        on_progress: Told about completions and tokens after every batch.

    Returns:
        The completions in the order of the requests.

    Raises:
        RuntimeError: The model returns NaN.
    """
    draws = Draws(requests, sampling, model.device)
    order, size = decoding_order(requests), max_batch_size or len(requests)
    for start in range(0, len(order), size):
        owners = order[start : start + size]
        _decode_batch(model, draws, owners, [requests[owner].prompt_ids for owner in owners], sampling.stop_token_ids, pad_token_id)
        if on_progress is not None:
            on_progress(len(owners), sum(len(completion.token_ids) for completion in draws.completions(owners)))
    return draws.completions()


def generation_config(**settings: Any) -> GenerationConfig:
    """Return a ``GenerationConfig``, whose constructor has no types."""
    make: Any = GenerationConfig
    return cast(GenerationConfig, make(**settings))


@torch.inference_mode()
def _decode_batch(
    model: PreTrainedModel, draws: Draws, owners: list[int], prompts: list[list[int]], stops: tuple[int, ...], pad_token_id: int
) -> None:
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    limits = [draws.limits[owner] for owner in owners]
    generate: Any = model.generate  # decorated, so that type checkers do not see it as a method
    with _plain_configuration(model):
        generate(
            ids,
            attention_mask=mask,
            generation_config=generation_config(max_new_tokens=max(limits), do_sample=False, pad_token_id=pad_token_id),
            logits_processor=LogitsProcessorList([_LeaveDrawn(draws, owners, width, model.device)]),
            stopping_criteria=StoppingCriteriaList([_AllEnded(stops, limits, width)]),
        )


class _LeaveDrawn(LogitsProcessor):
    """Leaves one token of each row: the one that is drawn, which greedy search then takes."""

    def __init__(self, draws: Draws, owners: list[int], width: int, device: torch.device) -> None:
        self._draws = draws
        self._owners = torch.tensor(owners, device=device)
        self._width = width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        steps = torch.full_like(self._owners, input_ids.shape[1] - self._width)
        tokens = self._draws.draw(self._owners, steps, scores)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


class _AllEnded(StoppingCriteria):
    """Tells which rows have ended by a stop token or by a limit of their own."""

    def __init__(self, stops: tuple[int, ...], limits: list[int], width: int) -> None:
        self._stops = stops
        self._limits = limits
        self._width = width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **options: Any) -> torch.Tensor:
        tokens = input_ids[:, self._width :]
        ended = torch.tensor(self._limits, device=tokens.device) <= tokens.shape[1]
        stops = torch.tensor(self._stops, dtype=tokens.dtype, device=tokens.device)
        return ended | torch.isin(tokens, stops).any(dim=1)


@contextmanager
def _plain_configuration(model: PreTrainedModel) -> Iterator[None]:
    """Set the model's own generation settings aside: they would fill in what is not stated (end tokens, penalties)."""
    before = model.generation_config
    model.generation_config = generation_config()
    try:
        yield
    finally:
        model.generation_config = before

"""Decode with transformers' continuous batching, whose key/value cache lies in pages."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from lightning_rlbatch.rollout.draws import Draws, decoding_order
from lightning_rlbatch.rollout.engine import Completion, ProgressCallback, RolloutRequest, SamplingParams
from lightning_rlbatch.rollout.plain_generate import generation_config

_PAGE_SIZE = 32  # tokens of a page; the last page of a sequence is half empty on average
_TOKENS_PER_STEP = 2048  # most tokens of prompts that one step encodes beside the sequences that decode
_POLL_SECONDS = 1.0
# Transformers renamed its pages in 5.18, and in 5.19 got a way to forbid that flash attention runs whatever the engine's argument says.
_KNOWN = {field.name for field in fields(ContinuousBatchingConfig)}
_OPTIONS: dict[str, Any] = {"page_size" if "page_size" in _KNOWN else "block_size": _PAGE_SIZE}
if "auto_switch_to_flash" in _KNOWN:
    _OPTIONS["auto_switch_to_flash"] = False


def continuous_batching(
    model: PreTrainedModel,
    requests: Sequence[RolloutRequest],
    sampling: SamplingParams,
    *,
    pad_token_id: int,
    max_batch_size: int | None,
    on_progress: ProgressCallback | None,
) -> list[Completion]:
    """Sample completions while transformers schedules them, each drawn from its own seed as by every other method.

    Args:
        model: A causal language model in evaluation mode, with attention that transformers can page (``"sdpa"`` or flash attention).
        requests: Valid requests.
        sampling: How to draw.
        pad_token_id: Not used, there is no padding.
        max_batch_size: Most sequences that decode together; None for all of them. The cache has room for so many of the longest ones.
        on_progress: Told about every finished completion.

    Returns:
        The completions in the order of the requests.

    Raises:
        RuntimeError: Generation failed, or the model returns NaN.
    """
    draws = Draws(requests, sampling, model.device)
    size = min(max_batch_size or len(requests), len(requests))
    needs = sorted((-(-(len(request.prompt_ids) + request.limit(sampling)) // _PAGE_SIZE) for request in requests), reverse=True)
    config = ContinuousBatchingConfig(
        num_blocks=_layer_groups(model) * (sum(needs[:size]) + size),  # stated, or it would take most of the memory that is free
        max_batch_tokens=max(size, _TOKENS_PER_STEP),
        max_requests_per_batch=size,
        use_async_batching=False,  # it draws a step ahead, before the host knows which requests have ended
        use_cuda_graph=False,  # drawing looks up random numbers on the host
        **_OPTIONS,
    )
    plain = generation_config(do_sample=True, max_new_tokens=sampling.max_new_tokens, eos_token_id=-1, pad_token_id=pad_token_id)
    start: Any = model.init_continuous_batching  # inherited, but hidden from type checkers by the module's __getattr__
    # transformers seeds torch's generators anew, and samples from what is left after drawing: the run's random state must not move
    devices = [] if model.device.type == "cpu" else [model.device]
    with _own_attention(model), torch.random.fork_rng(devices=devices, device_type=model.device.type), torch.inference_mode():
        manager = start(generation_config=plain, continuous_batching_config=config)
        processors = manager.logit_processor
        processors.clear()  # what the model's own settings ask for, such as penalties
        processors.logits_processor.append(_LeaveDrawn(draws, requests, model.device))
        processors.tensors_required, processors.do_processing = 1, True
        manager.start()
        try:
            _run(manager, draws, requests, sampling.stop_token_ids, on_progress)
        finally:
            manager.stop(block=True, hard_stop=True)  # after an error nothing more is wanted
            manager.destroy()
    return draws.completions()


def _layer_groups(model: PreTrainedModel) -> int:
    """Return in how many groups, of as many layers of one kind as will do, transformers before 5.18 counts blocks; 1 afterwards."""
    kinds = Counter(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"]).values()
    return 1 if "page_size" in _KNOWN else sum(kinds) // math.gcd(*kinds)


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Keep the kind of attention where only a name that says "paged" keeps it."""
    name = str(model.config._attn_implementation)
    named = "auto_switch_to_flash" in _KNOWN or name.startswith("paged|")
    if not named:
        model.set_attn_implementation(f"paged|{name}")
    try:
        yield
    finally:
        if not named:
            model.set_attn_implementation(name)


def _run(
    manager: Any, draws: Draws, requests: Sequence[RolloutRequest], stops: tuple[int, ...], on_progress: ProgressCallback | None
) -> None:
    for owner in decoding_order(requests):  # equal prompts one after the other share the pages of their prompt
        prompt = requests[owner].prompt_ids
        manager.add_request(prompt, request_id=str(owner), max_new_tokens=draws.limits[owner], eos_token_id=list(stops) or -1)
    num_running = len(requests)
    while num_running:
        was_running = manager.is_running()  # asked first: what its thread leaves when it ends is in the queue by then
        output = manager.get_result(timeout=_POLL_SECONDS)
        if output is None and not was_running:
            raise RuntimeError(f"transformers' continuous batching ended with {num_running} of {len(requests)} completions unfinished.")
        if output is not None and output.error is not None:
            raise RuntimeError(f"transformers' continuous batching failed at request {output.request_id}: {output.error}")
        if output is not None and output.is_finished():
            num_running -= 1
            if on_progress is not None:
                on_progress(1, len(output.generated_tokens))


class _LeaveDrawn(ContinuousBatchingLogitsProcessor):
    """Leaves one token of each row: the one that is drawn, the only one that can then be sampled.

    The scheduler asks for an argument per row that gets a new token, and passes them with the logits of the step: which rows they are is
    kept in between.
    """

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012 - the base class declares it like this
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, draws: Draws, requests: Sequence[RolloutRequest], device: torch.device) -> None:
        self._draws = draws
        self._prompt_lengths = [len(request.prompt_ids) for request in requests]
        self._device = device
        self._rows = torch.zeros(2, 0, dtype=torch.int64)

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Fill the arguments of rows that get no token."""
        int32_tensor.fill_(0)

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Note owner and step of each row; the arguments themselves mean nothing."""
        states = [request.state for request in requests_with_new_token]
        owners = [int(state.request_id) for state in states]
        # a request that lost its pages starts again with its tokens as a part of its prompt
        steps = [
            len(state.initial_tokens) + len(state.generated_tokens) - self._prompt_lengths[owner] for state, owner in zip(states, owners)
        ]
        self._rows = torch.tensor([owners, steps], device=self._device)
        return torch.zeros(len(owners), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """Return scores that are 0 at the drawn token and minus infinity elsewhere."""
        owners, steps = self._rows
        tokens = self._draws.draw(owners, steps, scores[: len(owners)])
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, 0] = 0.0  # rows without a request
        chosen[: len(owners)] = -torch.inf
        chosen[torch.arange(len(owners), device=scores.device), tokens] = 0.0
        return chosen

"""The embedded rollout engine: a transformers causal language model that decodes in the training process."""

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import DynamicCache, PreTrainedModel

from lightning_rlbatch.rollout.engine import (
    Completion,
    FinishReason,
    ProgressCallback,
    RolloutRequest,
    SamplingParams,
    WeightStream,
)
from lightning_rlbatch.rollout.sampling import sample_tokens, step_uniforms

_COMPACT_BELOW = 0.9  # drop finished sequences when less than this share of the rows still runs; dropping costs about one more step
_UNIFORMS_BLOCK = 256  # decoding steps whose random numbers travel to the device together


class TransformersEngine:
    """Sample completions with a transformers causal language model that this process owns.

    The model is a whole (unsharded) copy of the policy: ranks generate independently and no collective runs per token. What makes it
    faster than ``model.generate``: equal prompts (a GRPO group) are encoded once and share the result; sequences that are finished
    leave the batch and its key/value cache; no logits processor runs over the vocabulary unless asked for.

    The same request gives the same completion whatever else is in the batch and on any number of ranks, because its random numbers
    are a function of its seed and the step alone (up to rounding: a random number that falls within the rounding error of a boundary
    between two tokens may give the neighbour).

    Args:
        model: The engine's own model; it is put into evaluation mode and its attention may be exchanged. Use :meth:`from_model` to
            copy a policy that trains.
        pad_token_id: Token that fills the left of short prompts; any token of the vocabulary, it is masked.
        max_batch_size: Most sequences that decode together; None for all of them. Bounds the memory of the key/value cache.
        attn_implementation: Attention of the model while it generates (attention for packed samples has no cache), None to keep it.

    Raises:
        ValueError: If the model is sharded, or an argument is out of range.

    Example:
        .. code-block:: python

            engine = TransformersEngine.from_model(policy, pad_token_id=0)
            requests = [RolloutRequest(prompt_ids, seed=rollout_seed(0, 0, p, r)) for r in range(16) for p, prompt_ids in enumerate(prompts)]
            completions = engine.generate(requests, SamplingParams(max_new_tokens=64, stop_token_ids=(1,)))
    """

    def __init__(
        self, model: PreTrainedModel, *, pad_token_id: int, max_batch_size: int | None = None, attn_implementation: str | None = "sdpa"
    ) -> None:
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1 (or None for no limit) but is {max_batch_size}.")
        sharded = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
        if sharded:
            raise ValueError(
                f"The engine needs a whole model but parameter {sharded[0]!r} (and {len(sharded) - 1} more) is sharded. "
                "Use TransformersEngine.from_model(model, ...), then update_weights."
            )
        self.model = model.eval()
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        if not 0 <= pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id must be a token of the vocabulary (0 to {self.vocab_size - 1}) but is {pad_token_id}.")
        if attn_implementation is not None and model.config._attn_implementation != attn_implementation:
            model.set_attn_implementation(attn_implementation)
        self.pad_token_id = pad_token_id
        self.max_batch_size = max_batch_size
        self.max_length: int | None = getattr(model.config, "max_position_embeddings", None)
        # transformers renamed the argument within version 5
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._home = model.device
        self._asleep = False

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        *,
        pad_token_id: int,
        max_batch_size: int | None = None,
        attn_implementation: str | None = "sdpa",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "TransformersEngine":
        """Build an engine around a copy of ``model`` (same class and configuration, own weights).

        Weights are copied if ``model`` holds them whole. If it is sharded or on the meta device, they are left undefined: call
        :meth:`update_weights` before :meth:`generate`.

        Args:
            model: The policy that trains; not changed.
            pad_token_id: See the class.
            max_batch_size: See the class.
            attn_implementation: See the class.
            dtype: Of the copy; None for the model's.
            device: Of the copy; None for the model's (the CPU if that is meta).
        """
        config = copy.deepcopy(model.config)
        device = torch.device(device) if device is not None else model.device
        if device.type == "meta":
            device = torch.device("cpu")
        replica = type(model)(config).to(device=device, dtype=dtype or model.dtype)
        engine = cls(replica, pad_token_id=pad_token_id, max_batch_size=max_batch_size, attn_implementation=attn_implementation)
        parameters = list(model.named_parameters())
        if not any(isinstance(parameter, DTensor) or parameter.is_meta for _, parameter in parameters):
            engine.update_weights((name, parameter.detach()) for name, parameter in parameters)
        return engine

    @torch.no_grad()
    def update_weights(self, weights: WeightStream) -> None:
        """Copy weights by parameter name; tied parameters may come under any of their names.

        Args:
            weights: Pairs of name and whole tensor of any device and floating-point dtype; consumed to the end.

        Raises:
            ValueError: Naming the parameters that are missing, unknown or of another shape. Those that matched are copied by then.
        """
        targets = dict(self.model.named_parameters(remove_duplicate=False))
        missing = {id(parameter): name for name, parameter in self.model.named_parameters()}
        problems: list[str] = []
        for name, tensor in weights:
            target = targets.get(name)
            if target is None:
                problems.append(f"{name} is unknown")
                continue
            missing.pop(id(target), None)
            if target.shape != tensor.shape:
                problems.append(f"{name} has shape {tuple(tensor.shape)} but the engine's has {tuple(target.shape)}")
                continue
            target.copy_(tensor)
        problems += [f"{name} is missing" for name in missing.values()]
        if problems:
            raise ValueError(
                f"The weights do not fit the engine's {type(self.model).__name__} ({len(problems)} problems): " + "; ".join(problems[:8])
            )

    def sleep(self) -> None:
        """Move the weights to the host; the key/value cache lives only within :meth:`generate`."""
        if not self._asleep:
            self._home = self.model.device
            nn.Module.to(self.model, "cpu")
            self._asleep = True

    def wake(self) -> None:
        """Move the weights back to the device they were on."""
        if self._asleep:
            nn.Module.to(self.model, self._home)
            self._asleep = False

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_progress: ProgressCallback | None = None
    ) -> list[Completion]:
        """Sample one completion per request and return them in the order of the requests.

        Args:
            requests: Prompts and seeds.
            sampling: How to draw.
            on_progress: Called after decoding steps with the numbers of newly finished completions and newly sampled tokens.

        Raises:
            ValueError: If a prompt is empty, holds a token outside the vocabulary, or leaves too little of the model's
                ``max_position_embeddings`` for ``max_new_tokens``.
            RuntimeError: If the engine sleeps, or the model returns NaN.
        """
        if self._asleep:
            raise RuntimeError("The engine sleeps and cannot generate. Call wake() first.")
        self._check(requests, sampling)
        # equal prompts next to each other, longest first: little padding within a chunk, and the largest memory need comes first
        order = sorted(range(len(requests)), key=lambda index: (-len(requests[index].prompt_ids), requests[index].prompt_ids))
        size = self.max_batch_size or max(len(order), 1)
        completions: dict[int, Completion] = {}
        for start in range(0, len(order), size):
            chunk = order[start : start + size]
            with torch.inference_mode():
                results = self._decode([requests[index] for index in chunk], sampling, on_progress)
            completions.update(zip(chunk, results))
        return [completions[index] for index in range(len(requests))]

    def _check(self, requests: Sequence[RolloutRequest], sampling: SamplingParams) -> None:
        for index, request in enumerate(requests):
            prompt = request.prompt_ids
            if not prompt:
                raise ValueError(f"Prompt {index} is empty but a prompt needs at least one token, for instance a begin token.")
            if min(prompt) < 0 or max(prompt) >= self.vocab_size:
                bad = next(token for token in prompt if not 0 <= token < self.vocab_size)
                raise ValueError(f"Prompt {index} holds token {bad} but the model's vocabulary is 0 to {self.vocab_size - 1}.")
            if self.max_length is not None and len(prompt) + sampling.max_new_tokens > self.max_length:
                raise ValueError(
                    f"Prompt {index} has {len(prompt)} tokens and max_new_tokens is {sampling.max_new_tokens}, together more than the "
                    f"{self.max_length} positions of the model (max_position_embeddings). Lower max_new_tokens or drop the prompt."
                )
        if any(not 0 <= token < self.vocab_size for token in sampling.stop_token_ids):
            raise ValueError(f"stop_token_ids {sampling.stop_token_ids} must lie in the model's vocabulary, 0 to {self.vocab_size - 1}.")

    def _forward(self, input_ids: torch.Tensor, mask: torch.Tensor | None, position_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Return the logits ``[B, V]`` after the last of ``input_ids`` ``[B, L]``; the cache takes up the new keys and values."""
        arguments: dict[str, Any] = {self._cache_argument: cache}
        output = self.model(
            input_ids=input_ids, attention_mask=mask, position_ids=position_ids, use_cache=True, logits_to_keep=1, **arguments
        )
        return cast(torch.Tensor, output.logits)[:, -1]

    def _prefill(self, rows: "_Rows", prompts: list[list[int]]) -> torch.Tensor:
        """Encode each distinct prompt once, give every row its copy, return the logits of the first new token ``[B, V]``."""
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        width = max(map(len, distinct))
        device = self.model.device
        padded = [[self.pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in distinct]
        lengths = torch.tensor([len(prompt) for prompt in distinct], device=device)
        positions = torch.arange(width, device=device) - (width - lengths)[:, None]
        mask = None if min(map(len, distinct)) == width else (positions >= 0).long()
        logits = self._forward(torch.tensor(padded, device=device), mask, positions.clamp(min=0), rows.cache)
        source = {prompt: row for row, prompt in enumerate(distinct)}
        index = torch.tensor([source[tuple(prompt)] for prompt in prompts], device=device)
        rows.next_position = lengths[index]
        if mask is not None:
            rows.mask = mask[index]
        if len(distinct) < len(prompts):
            rows.cache.batch_select_indices(index)
            logits = logits[index]
        return logits

    def _decode(self, requests: list[RolloutRequest], sampling: SamplingParams, on_progress: ProgressCallback | None) -> list[Completion]:
        """Decode the requests together, longest prompt first."""
        shape = (len(requests), sampling.max_new_tokens)
        tokens_out = torch.zeros(shape, dtype=torch.int64, device=self.model.device)
        log_probs_out = torch.zeros(shape, dtype=torch.float32, device=self.model.device)
        lengths = [sampling.max_new_tokens] * len(requests)
        reasons: list[FinishReason] = ["length"] * len(requests)
        stop = frozenset(sampling.stop_token_ids)
        rows = _Rows(DynamicCache(config=self.model.config), len(requests), self.model.device)
        logits = self._prefill(rows, [request.prompt_ids for request in requests])
        uniforms = _uniforms_per_step([request.seed for request in requests], sampling, self.model.device)
        for step, uniform in enumerate(uniforms):
            tokens, log_probs = sample_tokens(
                logits, uniform[rows.owner], temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
            )
            tokens_out[rows.owner, step] = tokens
            log_probs_out[rows.owner, step] = log_probs
            num_before = len(rows.running)
            for row, token in enumerate(tokens.tolist()):
                if token in stop and row in rows.running:
                    rows.running.discard(row)
                    lengths[rows.owners[row]] = step + 1
                    reasons[rows.owners[row]] = "stop"
            last = not rows.running or step + 1 == sampling.max_new_tokens
            if on_progress is not None:
                on_progress(num_before if last else num_before - len(rows.running), num_before)
            if last:
                break
            if len(rows.running) <= _COMPACT_BELOW * len(rows.owners):
                tokens = tokens[rows.keep_running()]
            positions = rows.advance()
            logits = self._forward(tokens[:, None], rows.mask, positions, rows.cache)
        return _completions(tokens_out, log_probs_out, lengths, reasons)


class _Rows:
    """The sequences that decode together: their cache, and which request each row belongs to."""

    def __init__(self, cache: DynamicCache, num_rows: int, device: torch.device) -> None:
        self.cache = cache
        self.owners = list(range(num_rows))
        self.owner = torch.arange(num_rows, device=device)  # [B] the same on the device
        self.running = set(self.owners)  # rows that are not finished
        self.next_position = self.owner  # [B] position id of the next token; set by the prefill
        self.mask: torch.Tensor | None = None  # [B, tokens seen] int64, 1 where not padding; None while no prompt is padded

    def keep_running(self) -> torch.Tensor:
        """Drop the finished rows; return the indices ``[B']`` of the rows that stay."""
        kept = sorted(self.running)
        index = torch.tensor(kept, device=self.owner.device)
        self.cache.batch_select_indices(index)
        self.owners = [self.owners[row] for row in kept]
        self.running = set(range(len(kept)))
        self.owner, self.next_position = self.owner[index], self.next_position[index]
        self.mask = None if self.mask is None else self.mask[index]
        return index

    def advance(self) -> torch.Tensor:
        """Return the position ids ``[B, 1]`` of the next tokens and count these as seen."""
        positions = self.next_position[:, None]
        self.next_position = self.next_position + 1
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.owners), 1)], dim=1)
        return positions


def _uniforms_per_step(seeds: list[int], sampling: SamplingParams, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield ``[B]`` float64 random numbers for each decoding step, moved to the device in blocks."""
    for first_step in range(0, sampling.max_new_tokens, _UNIFORMS_BLOCK):
        num_steps = min(_UNIFORMS_BLOCK, sampling.max_new_tokens - first_step)
        yield from torch.from_numpy(step_uniforms(seeds, num_steps, first_step=first_step)).to(device).unbind(dim=1)


def _completions(tokens: torch.Tensor, log_probs: torch.Tensor, lengths: list[int], reasons: list[FinishReason]) -> list[Completion]:
    """Cut the rows of ``[B, max_new_tokens]`` buffers to their lengths."""
    completions = []
    for row_tokens, row_log_probs, length, reason in zip(tokens.tolist(), log_probs.tolist(), lengths, reasons):
        if any(math.isnan(log_prob) for log_prob in row_log_probs[:length]):
            raise RuntimeError(
                "The model returned NaN while generating. Its weights are not finite: lower the learning rate or check the last update."
            )
        completions.append(Completion(row_tokens[:length], row_log_probs[:length], reason))
    return completions

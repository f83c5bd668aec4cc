"""Decode many sequences together with a transformers model, letting finished ones leave and waiting ones enter."""

from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lightning_rlbatch.rollout.draws import Draws, decoding_order
from lightning_rlbatch.rollout.engine import Completion, ProgressCallback, RolloutRequest, SamplingParams

_COMPACT_BELOW = 0.9  # finished rows leave when at most this share of the rows still runs; leaving costs about one more step
_ADMIT_SHARE = 8  # waiting requests enter when this fraction (1/8) of the rows is free; entering costs a prefill and a copy of the cache


class _Rows:
    """The sequences that decode together; B rows, each at its own place in its completion.

    Attributes:
        cache: Keys and values, padded on the left to a common length.
        owners: Request of each row; ``owner`` is the same on the device, ``[B]`` int64.
        running: Rows that are not finished; the others are computed along until they are dropped.
        step: ``[B]`` int64, tokens sampled so far.
        position: ``[B]`` int64, position id of the next token.
        mask: ``[B, tokens in the cache]`` int64, 0 at padding; None without padding.
        logits: ``[B, V]``, of the next token.
    """

    def __init__(
        self, cache: DynamicCache, owners: list[int], position: torch.Tensor, mask: torch.Tensor | None, logits: torch.Tensor
    ) -> None:
        self.cache = cache
        self.owners = owners
        self.owner = torch.tensor(owners, device=logits.device)
        self.running = set(range(len(owners)))
        self.step = torch.zeros_like(self.owner)
        self.position = position
        self.mask = mask
        self.logits = logits

    def drop_finished(self, tokens: torch.Tensor) -> torch.Tensor:
        """Keep the running rows, and of their cache what any of them has seen; return their tokens ``[B']`` out of ``[B]``."""
        kept = sorted(self.running)
        index = torch.tensor(kept, device=self.owner.device)
        self.cache.batch_select_indices(index)
        self.owners = [self.owners[row] for row in kept]
        self.running = set(range(len(kept)))
        self.owner, self.step, self.position = self.owner[index], self.step[index], self.position[index]
        if self.mask is not None:
            self.mask = self.mask[index]
            surplus = self.mask.shape[1] - int(self.mask.sum(dim=1).max())
            if surplus:
                self.mask = self.mask[:, surplus:]
                for layer in _layers(self.cache):
                    layer.keys, layer.values = layer.keys[:, :, surplus:], layer.values[:, :, surplus:]
        return tokens[index]

    def add(self, other: "_Rows") -> None:
        """Append rows that start, padding the shorter cache on the left."""
        width, other_width = self.cache.get_seq_length(), other.cache.get_seq_length()
        target = max(width, other_width)
        if self.mask is not None or other.mask is not None or width != other_width:
            masks = [
                pad(torch.ones_like(rows.owner)[:, None].expand(-1, size) if rows.mask is None else rows.mask, (target - size, 0))
                for rows, size in ((self, width), (other, other_width))
            ]
            self.mask = torch.cat(masks)
        for layer, more in zip(_layers(self.cache), _layers(other.cache)):
            layer.keys = torch.cat([pad(layer.keys, (0, 0, target - width, 0)), pad(more.keys, (0, 0, target - other_width, 0))])
            layer.values = torch.cat([pad(layer.values, (0, 0, target - width, 0)), pad(more.values, (0, 0, target - other_width, 0))])
        self.running |= {len(self.owners) + row for row in other.running}
        self.owners = self.owners + other.owners
        self.owner = torch.cat([self.owner, other.owner])
        self.step = torch.cat([self.step, other.step])
        self.position = torch.cat([self.position, other.position])
        self.logits = torch.cat([self.logits, other.logits])


def _layers(cache: DynamicCache) -> list[Any]:
    """Return the layers, whose ``keys`` and ``values`` are ``[B, heads, tokens, head dim]`` once something is cached."""
    return list(cache.layers)


class Decoder:
    """Sample completions of a list of requests.

    Args:
        model: A causal language model in evaluation mode; its device decides where the work runs.
        requests: Valid requests.
        sampling: How to draw.
        pad_token_id: Token that fills the left of short prompts.
        max_batch_size: Most sequences that decode together; None for all of them.
        cache_argument: Name under which the model's forward takes the cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[RolloutRequest],
        sampling: SamplingParams,
        *,
        pad_token_id: int,
        max_batch_size: int | None,
        cache_argument: str,
    ) -> None:
        self._model = model
        self._requests = requests
        self._sampling = sampling
        self._pad_token_id = pad_token_id
        self._size = min(max_batch_size or len(requests), len(requests))
        self._cache_argument = cache_argument
        self._device = model.device
        # other layers (sliding windows, recurrent states) cannot be cut and joined row by row: their batches run to the end
        self._can_join = all(type(layer) is DynamicLayer for layer in self._new_cache().layers)
        self._waiting = deque(decoding_order(requests))
        self._draws = Draws(requests, sampling, self._device)
        self._lengths = [0] * len(requests)
        # where rows stay that are computed along behind their limit: a table of positions has no entry further on
        self._last_position = (getattr(model.config, "max_position_embeddings", None) or 2**31) - 1

    @torch.inference_mode()
    def run(self, on_progress: ProgressCallback | None = None) -> list[Completion]:
        """Return the completions in the order of the requests.

        Args:
            on_progress: Told about finished completions and sampled tokens after every step.

        Raises:
            RuntimeError: If the model returns NaN.
        """
        rows = self._admit(None)
        while rows is not None:
            num_running = len(rows.running)
            tokens = self._sample(rows)
            if on_progress is not None:
                on_progress(num_running - len(rows.running), num_running)
            rows = self._advance(rows, tokens)
            rows = self._admit(rows)
        return self._draws.completions()

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def _forward(self, input_ids: torch.Tensor, mask: torch.Tensor | None, position_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Return the logits ``[B, V]`` after the last of ``input_ids`` ``[B, L]``; the cache takes up the new keys and values."""
        arguments: dict[str, Any] = {self._cache_argument: cache}
        output = self._model(
            input_ids=input_ids, attention_mask=mask, position_ids=position_ids, use_cache=True, logits_to_keep=1, **arguments
        )
        return cast(torch.Tensor, output.logits)[:, -1]

    def _sample(self, rows: _Rows) -> torch.Tensor:
        """Draw the next token ``[B]`` of every row, store it, and mark the rows that are finished by it."""
        tokens = self._draws.draw(rows.owner, rows.step, rows.logits)
        rows.step = (rows.step + 1).clamp(max=self._sampling.max_new_tokens)
        for row, token in enumerate(tokens.tolist()):
            if row in rows.running:
                owner = rows.owners[row]
                self._lengths[owner] += 1
                if token in self._sampling.stop_token_ids or self._lengths[owner] == self._draws.limits[owner]:
                    rows.running.discard(row)
        return tokens

    def _advance(self, rows: _Rows, tokens: torch.Tensor) -> _Rows | None:
        """Feed the drawn tokens to the model; None if every row is finished."""
        if not rows.running:
            return None
        if self._can_join and len(rows.running) <= _COMPACT_BELOW * len(rows.owners):
            tokens = rows.drop_finished(tokens)
        if rows.mask is not None:
            rows.mask = pad(rows.mask, (0, 1), value=1)
        rows.logits = self._forward(tokens[:, None], rows.mask, rows.position[:, None], rows.cache)
        rows.position = (rows.position + 1).clamp(max=self._last_position)
        return rows

    def _admit(self, rows: _Rows | None) -> _Rows | None:
        """Let waiting requests take the free rows, if that is worth a prefill."""
        free = self._size - (0 if rows is None else len(rows.owners))
        if not self._waiting or (rows is not None and (not self._can_join or free * _ADMIT_SHARE < self._size)):
            return rows
        fresh = self._prefill([self._waiting.popleft() for _ in range(min(free, len(self._waiting)))])
        if rows is None:
            return fresh
        rows.add(fresh)
        return rows

    def _prefill(self, owners: list[int]) -> _Rows:
        """Encode prompts, equal ones once."""
        prompts = [tuple(self._requests[owner].prompt_ids) for owner in owners]
        distinct = list(dict.fromkeys(prompts)) if self._can_join else prompts
        width = max(map(len, distinct))
        padded = [[self._pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in distinct]
        lengths = torch.tensor([len(prompt) for prompt in distinct], device=self._device)
        positions = torch.arange(width, device=self._device) - (width - lengths)[:, None]
        mask = None if min(map(len, distinct)) == width else (positions >= 0).long()
        cache = self._new_cache()
        logits = self._forward(torch.tensor(padded, device=self._device), mask, positions.clamp(min=0), cache)
        if len(distinct) < len(prompts):
            place = {prompt: row for row, prompt in enumerate(distinct)}
            index = torch.tensor([place[prompt] for prompt in prompts], device=self._device)
            cache.batch_select_indices(index)
            logits, lengths, mask = logits[index], lengths[index], None if mask is None else mask[index]
        return _Rows(cache, owners, lengths, mask, logits)

"""Hold samples of different lengths end to end, without padding.

Every per-token quantity is aligned with the token it describes: ``log_probs[t]`` is the log-probability OF token t given the
tokens before it in its sample, ``values[t]`` the value of the state before token t.

Invariants (checked where a batch is made):

1. ``cu_seqlens[0] == 0``, it grows by at least 1 per sample, and its last entry is the number of tokens.
2. Every per-token field has T rows, every per-sample field N rows, and all of them are on one device.
3. ``response_mask``, where present, is boolean and False at the first token of every sample (nothing predicts that token); its
   values are checked on the CPU only.
4. Lengths are known on the host from construction on: no later call waits for a device.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_rlbatch.functional.packed_fields import PackedFields
from lightning_rlbatch.functional.packing_inputs import check_fields, padded_to_fields, samples_to_fields
from lightning_rlbatch.functional.row_selection import take_rows, token_positions
from lightning_rlbatch.functional.schema import Schema, schema_difference


class PackedBatch(PackedFields):
    """N samples laid end to end, T tokens in all; immutable.

    A plain class on purpose: Lightning takes dataclasses and mappings apart when it moves or casts a batch (it refuses frozen
    dataclasses and would cast log-probs to bf16), whereas an object with ``.to`` is moved whole.

    Args:
        cu_seqlens: Boundaries ``[N + 1]``, integers: sample i owns the tokens ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``.
            A tensor on an accelerator is read back once.
        per_token: Name to tensor ``[T, ...]``. ``input_ids`` (int64 ``[T]``) is required; ``response_mask`` (bool ``[T]``) is True
            where the policy sampled the token.
        per_sample: Name to tensor ``[N, ...]``, for example ``group_ids``.

    Raises:
        ValueError: An invariant of the module docstring does not hold; the message names the field or the sample.
        TypeError: A field is not a tensor, or ``input_ids`` or ``response_mask`` has the wrong dtype.

    Example:
        >>> batch = PackedBatch([0, 3, 5], {"input_ids": torch.tensor([7, 8, 9, 5, 6])}, {"reward": torch.tensor([1.0, 0.0])})
        >>> batch.num_samples, batch.num_tokens, batch.max_seqlen
        (2, 5, 3)
        >>> batch.position_ids.tolist()
        [0, 1, 2, 0, 1]
        >>> batch.select([1])["input_ids"].tolist()
        [5, 6]
    """

    __slots__ = ()

    def __init__(
        self, cu_seqlens: Tensor | Sequence[int], per_token: Mapping[str, Tensor], per_sample: Mapping[str, Tensor] | None = None
    ) -> None:
        bounds = [int(bound) for bound in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]
        if not bounds or bounds[0] != 0:
            raise ValueError(f"Expected cu_seqlens to start with 0 but got {bounds[:4]}. Pass the cumulative lengths, N + 1 numbers.")
        lengths = tuple(after - before for before, after in pairwise(bounds))
        for index, length in enumerate(lengths):
            if length < 1:
                raise ValueError(f"Sample {index} has {length} tokens but a sample needs at least one. Leave empty samples out.")
        per_token, per_sample = dict(per_token), dict(per_sample or {})
        check_fields(lengths, per_token, per_sample)
        self._fill(lengths, per_token, per_sample)

    @classmethod
    def unchecked(
        cls, lengths: tuple[int, ...], per_token: dict[str, Tensor], per_sample: dict[str, Tensor], cu_seqlens: Tensor | None = None
    ) -> "PackedBatch":
        """Build from fields that are known to be consistent, without checks and so without reading anything back from a device.

        For code that has taken the fields from batches that were checked. Fields that do not fit each other are not noticed here.

        Args:
            lengths: Tokens of each sample, at least 1.
            per_token: Name to ``[T, ...]``; the dictionary belongs to the batch from now on.
            per_sample: Name to ``[N, ...]``; likewise.
            cu_seqlens: ``[N + 1]``, int32, if it exists already; on the device of the fields.
        """
        batch = cls.__new__(cls)
        batch._fill(lengths, per_token, per_sample, cu_seqlens)
        return batch

    @classmethod
    def from_samples(cls, samples: Sequence[Mapping[str, Any]], *, per_sample: Collection[str] = ()) -> "PackedBatch":
        """Pack samples given as dictionaries of tensors, arrays, lists or numbers.

        A field is per-token if in every sample it has at least one dimension and as many rows as the sample has tokens, and
        per-sample if it is a number or is named in ``per_sample``. A ``response_mask`` of 0 and 1 becomes boolean.

        Args:
            samples: At least one sample; all have the same names, ``input_ids`` (``[L_i]``) among them.
            per_sample: Names of fields that are per-sample although they have dimensions (an embedding, a pair of scores).

        Returns:
            The packed batch, samples in the given order.

        Raises:
            ValueError: No samples (use :meth:`empty`), or a field that fits neither rule; the message names sample and field.
            TypeError: A value that no tensor can hold, such as text.

        Example:
            >>> batch = PackedBatch.from_samples([
            ...     {"input_ids": [1, 2, 3], "response_mask": [0, 1, 1], "reward": 1.0},
            ...     {"input_ids": [4, 5], "response_mask": [0, 1], "reward": 0.5}])
            >>> batch.cu_seqlens.tolist(), batch["reward"].tolist()
            ([0, 3, 5], [1.0, 0.5])
        """
        bounds, token_fields, sample_fields = samples_to_fields(samples, per_sample)
        return cls(bounds, token_fields, sample_fields)

    @classmethod
    def from_padded(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_mask: Tensor | None = None,
        *,
        per_sample: Collection[str] = (),
        **fields: Tensor,
    ) -> "PackedBatch":
        """Remove the padding of a rectangular batch, padded on the left, on the right or on both sides.

        Args:
            input_ids: ``[N, L]``, integers.
            attention_mask: ``[N, L]``, non-zero at real tokens, one unbroken run per row.
            response_mask: ``[N, L]``, non-zero where the policy sampled the token.
            per_sample: Names of fields that are per-sample although their shape starts with ``[N, L]``.
            **fields: Further fields: ``[N, L, ...]`` is per-token, any other ``[N, ...]`` per-sample.

        Returns:
            The packed batch, samples in row order.

        Raises:
            ValueError: A row without real tokens or with a hole, or a field of another shape; the message names it.

        Example:
            >>> batch = PackedBatch.from_padded(torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([[0, 1, 1], [1, 1, 1]]))
            >>> batch["input_ids"].tolist(), batch.cu_seqlens.tolist()
            ([1, 2, 3, 4, 5], [0, 2, 5])
        """
        bounds, token_fields, sample_fields = padded_to_fields(input_ids, attention_mask, response_mask, fields, per_sample)
        return cls(bounds, token_fields, sample_fields)

    @classmethod
    def empty(cls, schema: Schema, device: torch.device | str | None = None) -> "PackedBatch":
        """Return a batch of no samples with the fields of ``schema``."""
        return cls.unchecked((), *_zeros(schema, 0, 0, device))

    @classmethod
    def filler(cls, schema: Schema, num_tokens: int, device: torch.device | str | None = None) -> "PackedBatch":
        """Return one sample of ``num_tokens`` valid tokens that counts nowhere: every field is zero, so no token is a response.

        Raises:
            ValueError: ``num_tokens`` is below 1.
        """
        if num_tokens < 1:
            raise ValueError(f"A filler needs at least one token but got num_tokens={num_tokens}.")
        return cls.unchecked((num_tokens,), *_zeros(schema, num_tokens, 1, device))

    @classmethod
    def concat(cls, batches: Sequence["PackedBatch"]) -> "PackedBatch":
        """Join batches of the same schema, samples in order.

        Raises:
            ValueError: No batches, or schemas that differ; the message names the batch and the field.
        """
        if not batches:
            raise ValueError("Expected at least one batch to concatenate but got none. Use PackedBatch.empty(schema).")
        for index, batch in enumerate(batches):
            difference = schema_difference(batches[0].schema, batch.schema)
            if difference is not None:
                raise ValueError(f"Batch {index} cannot be joined to batch 0: {difference}. See with_fields, without_fields.")
        return cls.unchecked(
            tuple(length for batch in batches for length in batch.seq_lens),
            {name: torch.cat([batch._per_token[name] for batch in batches]) for name in batches[0]._per_token},
            {name: torch.cat([batch._per_sample[name] for batch in batches]) for name in batches[0]._per_sample},
        )

    def to_padded(self, pad_id: int, padding_side: Literal["left", "right"] = "right") -> dict[str, Tensor]:
        """Return rectangular tensors as wide as the longest sample; :meth:`from_padded` is the inverse.

        Args:
            pad_id: Token id of the padding in ``input_ids``; other per-token fields are padded with 0.
            padding_side: "left" or "right".

        Returns:
            ``attention_mask`` (int64 ``[N, L]``), every per-token field ``[N, L, ...]`` and every per-sample field ``[N, ...]``.

        Raises:
            ValueError: Another padding side.
        """
        if padding_side not in ("left", "right"):
            raise ValueError(f"Expected padding_side 'left' or 'right' but got {padding_side!r}.")
        width = self.max_seqlen
        offset = 0 if padding_side == "right" else width - self._repeat(self._cu_seqlens.diff().long())
        index = (self.sample_ids_per_token, self.position_ids + offset)
        shape = (self.num_samples, width)
        padded = {"attention_mask": torch.zeros(shape, dtype=torch.int64, device=self.device)}
        padded["attention_mask"][index] = 1
        for name, value in self._per_token.items():
            padded[name] = value.new_full((*shape, *value.shape[1:]), pad_id if name == "input_ids" else 0)
            padded[name][index] = value
        return padded | dict(self._per_sample)

    def select(self, indices: Sequence[int] | Tensor | NDArray[Any]) -> "PackedBatch":
        """Return the samples at ``indices``, in that order; an index may repeat.

        Args:
            indices: Integers; or N bools, True for each sample to keep.

        Raises:
            IndexError: An index outside ``0 .. N - 1``, or bools that are not N.
            TypeError: Something else than integers.
        """
        listed = indices.tolist() if isinstance(indices, (Tensor, np.ndarray)) else list(indices)
        if listed and all(isinstance(entry, bool) for entry in listed):  # as numbers they would select samples 0 and 1
            if len(listed) != self.num_samples:
                raise IndexError(f"A mask of {len(listed)} bools does not fit the batch's {self.num_samples} samples.")
            listed = [index for index, wanted in enumerate(listed) if wanted]
        chosen = [operator.index(index) for index in listed]
        for index in chosen:
            if not 0 <= index < self.num_samples:
                raise IndexError(f"Sample {index} does not exist: the batch has {self.num_samples} samples.")
        if not chosen:
            return self.empty(self.schema, self.device)
        tokens = token_positions(self._seq_lens, chosen).to(self.device)
        rows = torch.tensor(chosen, dtype=torch.int64).to(self.device)
        per_token = {name: take_rows(value, tokens) for name, value in self._per_token.items()}
        per_sample = {name: take_rows(value, rows) for name, value in self._per_sample.items()}
        return self.unchecked(tuple(self._seq_lens[index] for index in chosen), per_token, per_sample)

    def with_fields(self, per_token: Mapping[str, Tensor] | None = None, per_sample: Mapping[str, Tensor] | None = None) -> "PackedBatch":
        """Return a batch with fields added or replaced.

        Raises:
            ValueError: A field of the wrong number of rows or device, or a name given as both kinds.
        """
        new_token, new_sample = dict(per_token or {}), dict(per_sample or {})
        check_fields(self._seq_lens, {"input_ids": self["input_ids"], **new_token}, new_sample)
        token_fields = {name: value for name, value in self._per_token.items() if name not in new_sample} | new_token
        sample_fields = {name: value for name, value in self._per_sample.items() if name not in new_token} | new_sample
        return self.unchecked(self._seq_lens, token_fields, sample_fields, self._cu_seqlens)

    def without_fields(self, names: Iterable[str]) -> "PackedBatch":
        """Return a batch without the named fields.

        Raises:
            KeyError: A name that no field has.
            ValueError: ``input_ids``, which every batch needs.
        """
        dropped = {names} if isinstance(names, str) else set(names)
        for name in sorted(dropped):
            self[name]
        if "input_ids" in dropped:
            raise ValueError("Every batch needs 'input_ids'; it cannot be dropped.")
        token_fields = {name: value for name, value in self._per_token.items() if name not in dropped}
        sample_fields = {name: value for name, value in self._per_sample.items() if name not in dropped}
        return self.unchecked(self._seq_lens, token_fields, sample_fields, self._cu_seqlens)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "PackedBatch":
        """Return the batch on another device (dtypes never change)."""
        return self._map(lambda value: value.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "PackedBatch":
        """Return the batch in page-locked memory; a DataLoader with ``pin_memory=True`` calls this."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "PackedBatch":
        per_token = {name: function(value) for name, value in self._per_token.items()}
        per_sample = {name: function(value) for name, value in self._per_sample.items()}
        return self.unchecked(self._seq_lens, per_token, per_sample, function(self._cu_seqlens))

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedBatch.unchecked, (self._seq_lens, dict(self._per_token), dict(self._per_sample), self._cu_seqlens)


def _zeros(
    schema: Schema, num_tokens: int, num_samples: int, device: torch.device | str | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    if "input_ids" not in schema:
        raise ValueError(f"Every batch needs 'input_ids' but the schema has only {sorted(schema)}.")
    token_fields = {name: spec.zeros(num_tokens, device) for name, spec in schema.items() if spec.per_token}
    sample_fields = {name: spec.zeros(num_samples, device) for name, spec in schema.items() if not spec.per_token}
    return token_fields, sample_fields

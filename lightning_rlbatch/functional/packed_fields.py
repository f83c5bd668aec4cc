"""The fields of samples laid end to end: what they are, how long, and that nobody changes them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NoReturn

import torch
from torch import Tensor

from lightning_rlbatch.functional.schema import FieldSpec, schema_of


class PackedFields:
    """N samples laid end to end, T tokens in all, to look at; :class:`PackedBatch` makes them and makes new ones of them.

    Lengths are known on the host from the beginning, so that nothing here waits for a device.
    """

    __slots__ = ("_cu_seqlens", "_per_sample", "_per_token", "_seq_lens")
    _cu_seqlens: Tensor
    _seq_lens: tuple[int, ...]
    _per_token: Mapping[str, Tensor]
    _per_sample: Mapping[str, Tensor]

    def _fill(
        self, lengths: tuple[int, ...], per_token: dict[str, Tensor], per_sample: dict[str, Tensor], cu_seqlens: Tensor | None = None
    ) -> None:
        if cu_seqlens is None:
            cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
            torch.cumsum(torch.tensor(lengths, dtype=torch.int64), 0, out=cu_seqlens[1:])
            cu_seqlens = cu_seqlens.to(per_token["input_ids"].device)
        object.__setattr__(self, "_cu_seqlens", cu_seqlens)
        object.__setattr__(self, "_seq_lens", lengths)
        object.__setattr__(self, "_per_token", MappingProxyType(per_token))
        object.__setattr__(self, "_per_sample", MappingProxyType(per_sample))

    @property
    def cu_seqlens(self) -> Tensor:
        """Boundaries, int32 ``[N + 1]``, on the batch's device."""
        return self._cu_seqlens

    @property
    def per_token(self) -> Mapping[str, Tensor]:
        """Read-only mapping of name to tensor ``[T, ...]``."""
        return self._per_token

    @property
    def per_sample(self) -> Mapping[str, Tensor]:
        """Read-only mapping of name to tensor ``[N, ...]``."""
        return self._per_sample

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Length of every sample in tokens, host integers."""
        return self._seq_lens

    @property
    def lengths(self) -> Tensor:
        """Length of every sample in tokens, int64 ``[N]``, always on the CPU."""
        return torch.tensor(self._seq_lens, dtype=torch.int64)

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self._seq_lens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self._seq_lens)

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sample in tokens, 0 without samples."""
        return max(self._seq_lens, default=0)

    @property
    def device(self) -> torch.device:
        """Device of every field."""
        return self._cu_seqlens.device

    @property
    def sample_ids_per_token(self) -> Tensor:
        """Index of the sample that owns each token, int64 ``[T]``."""
        return self._repeat(torch.arange(self.num_samples, device=self.device))

    @property
    def position_ids(self) -> Tensor:
        """Position of each token in its sample, int64 ``[T]``, 0 at every first token."""
        return torch.arange(self.num_tokens, device=self.device) - self._repeat(self._cu_seqlens[:-1].long())

    @property
    def schema(self) -> dict[str, FieldSpec]:
        """Name to dtype, trailing shape and kind of every field."""
        return schema_of(self._per_token, self._per_sample)

    def __getitem__(self, name: str) -> Tensor:
        """Return the field of that name, ``[T, ...]`` or ``[N, ...]``."""
        if name in self._per_token:
            return self._per_token[name]
        if name in self._per_sample:
            return self._per_sample[name]
        raise KeyError(f"No field {name!r}. Per token: {sorted(self._per_token)}; per sample: {sorted(self._per_sample)}.")

    def __contains__(self, name: object) -> bool:
        return name in self._per_token or name in self._per_sample

    def split_per_sample(self, name: str) -> tuple[Tensor, ...]:
        """Return views of a per-token field, one ``[L_i, ...]`` per sample.

        Raises:
            KeyError: There is no per-token field of that name.
        """
        if name not in self._per_token:
            raise KeyError(f"No per-token field {name!r}. Per token: {sorted(self._per_token)}.")
        return torch.split(self._per_token[name], list(self._seq_lens)) if self._seq_lens else ()

    def _repeat(self, per_sample: Tensor) -> Tensor:
        # output_size spares the device a read-back of the total.
        return per_sample.repeat_interleave(self._cu_seqlens.diff(), output_size=self.num_tokens)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"A PackedBatch cannot be changed (attribute {name!r}). Use with_fields, without_fields, select or concat.")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"A PackedBatch cannot be changed (attribute {name!r}). Use without_fields.")

    def __repr__(self) -> str:
        fields = f"per_token={sorted(self._per_token)}, per_sample={sorted(self._per_sample)}"
        return f"PackedBatch({self.num_samples} samples, {self.num_tokens} tokens, {fields}, device={str(self.device)!r})"

"""Describe the fields of a packed batch, so that a rank without samples can still take part in an exchange."""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class FieldSpec(NamedTuple):
    """Type of one field of a :class:`~lightning_rlbatch.functional.PackedBatch`.

    Attributes:
        dtype: Element type.
        shape: Trailing shape, without the token or sample dimension; ``()`` for one number per token or sample.
        per_token: True for a field ``[T, *shape]``, False for a field ``[N, *shape]``.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    per_token: bool

    def zeros(self, count: int, device: torch.device | str | None = None) -> Tensor:
        """Return zeros for ``count`` tokens or samples, shape ``[count, *shape]``."""
        return torch.zeros((count, *self.shape), dtype=self.dtype, device=device)


Schema: TypeAlias = Mapping[str, FieldSpec]


def schema_of(per_token: Mapping[str, Tensor], per_sample: Mapping[str, Tensor]) -> dict[str, FieldSpec]:
    """Return the schema of fields given as tensors, per-token fields first, each kind in the order of its mapping.

    Args:
        per_token: Name to tensor ``[T, ...]``.
        per_sample: Name to tensor ``[N, ...]``.

    Returns:
        Name to :class:`FieldSpec`.

    Example:
        >>> schema_of({"input_ids": torch.zeros(5, dtype=torch.int64)}, {"reward": torch.zeros(2)})["reward"]
        FieldSpec(dtype=torch.float32, shape=(), per_token=False)
    """
    schema = {name: FieldSpec(value.dtype, tuple(value.shape[1:]), True) for name, value in per_token.items()}
    schema.update({name: FieldSpec(value.dtype, tuple(value.shape[1:]), False) for name, value in per_sample.items()})
    return schema


def schema_difference(expected: Schema, actual: Schema) -> str | None:
    """Say in words how two schemas differ; the order of their fields does not matter.

    Args:
        expected: The schema that is needed.
        actual: The schema that was found.

    Returns:
        One phrase about the first differing field in alphabetical order, or None if the schemas are the same.

    Example:
        >>> spec = FieldSpec(torch.float32, (), True)
        >>> schema_difference({"values": spec}, {})
        "field 'values' is missing"
    """
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            return f"field {name!r} is missing"
        if name not in expected:
            return f"field {name!r} is not expected"
        if expected[name] != actual[name]:
            return f"field {name!r} is {_describe(actual[name])}, expected {_describe(expected[name])}"
    return None


def _describe(spec: FieldSpec) -> str:
    sizes = "".join(f", {size}" for size in spec.shape)
    return f"{'per token' if spec.per_token else 'per sample'} [{'T' if spec.per_token else 'N'}{sizes}] {spec.dtype}"

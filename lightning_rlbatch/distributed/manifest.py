"""What all ranks know about the samples of an exchange, gathered and checked before anything moves."""

import json
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_rlbatch.distributed.reductions import all_gather_ints, all_gather_lengths, gather_strings, stable_hash
from lightning_rlbatch.distributed.wire import Rows
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.schema import FieldSpec, Schema

_EMPTY = {"samples": "PackedBatch.empty(schema) with the schema of the others", "results": "tensors of no rows"}


class Sample(NamedTuple):
    """One sample of the group, known to all ranks."""

    source: int
    position: int  # among the source's samples
    length: int
    key: int
    destinations: tuple[int, ...]


def read_arguments(
    batch: PackedBatch,
    destinations: Sequence[int | Sequence[int]] | Tensor | NDArray[Any],
    order: Sequence[int] | Tensor | NDArray[Any] | None,
    size: int,
) -> tuple[list[tuple[int, ...]], list[int], str]:
    """Return destinations, keys and what is wrong with them: said rather than raised, so that all ranks can raise together."""
    try:
        entries = [_plain(entry) for entry in _plain(destinations)]
        wanted = [tuple(map(operator.index, entry)) if isinstance(entry, Iterable) else (operator.index(entry),) for entry in entries]
        keys = list(range(batch.num_samples)) if order is None else [operator.index(key) for key in _plain(order)]
    except (TypeError, ValueError) as error:
        return [], [], f"`destinations` and `order` must hold integers ({error})"
    if len(wanted) != batch.num_samples:
        return [], [], f"`destinations` must have one entry per sample, {batch.num_samples}, got {len(wanted)}"
    if len(keys) != batch.num_samples:
        return [], [], f"`order` must have one key per sample, {batch.num_samples}, got {len(keys)}"
    for index, (ranks, key) in enumerate(zip(wanted, keys)):
        if not ranks or len(set(ranks)) < len(ranks):
            return [], [], f"sample {index} must go to at least one rank and to none twice, got {list(ranks)}"
        if not all(0 <= rank < size for rank in ranks):
            return [], [], f"sample {index} must go to ranks 0 to {size - 1} of the group, got {list(ranks)}"
        if not -(2**63) <= key < 2**63:
            return [], [], f"the key of sample {index} must fit into 64 bits, got {key}"
    return wanted, keys, ""


def _plain(value: Any) -> Any:
    """Return lists and numbers for a tensor or an array."""
    return value.tolist() if isinstance(value, (Tensor, np.ndarray)) else value


def wrong_results(rows: Rows, per_token: Collection[str], per_sample: Collection[str]) -> str:
    """Say what is wrong with results for received samples; empty if nothing is."""
    for name, value in rows.fields.items():
        if name in per_token and name in per_sample:
            return f"result '{name}' is given both per token and per sample"
        if not isinstance(value, Tensor):
            return f"result '{name}' must be a tensor, got {type(value).__name__}"
        kind, count = ("tokens", sum(rows.lengths)) if name in per_token else ("samples", len(rows.lengths))
        if value.dim() == 0 or value.shape[0] != count:
            return f"result '{name}' must have one row for each of the {count} received {kind}, got shape {list(value.shape)}"
    return ""


def _describe(spec: FieldSpec) -> str:
    sizes = "".join(f", {size}" for size in spec.shape)
    return f"[{'T' if spec.per_token else 'N'}{sizes}] {str(spec.dtype).removeprefix('torch.')}"


def agree(schema: Schema, problem: str, group: dist.ProcessGroup | None, *, what: str, extra: Sequence[int] = ()) -> list[list[int]]:
    """Check in one collective that no rank has a problem and that all have the same schema.

    Args:
        schema: This rank's fields.
        problem: What is wrong here; empty if nothing is.
        group: Ranks that must agree.
        what: ``"samples"`` or ``"results"``, for the message.
        extra: Numbers of the caller's to gather along, equally many on every rank.

    Returns:
        Every rank's extra numbers.

    Raises:
        ValueError: Some rank has a problem, or schemas differ. The same error on every rank.
    """
    described = {name: _describe(schema[name]) for name in sorted(schema)}
    headers = all_gather_ints([bool(problem), stable_hash(json.dumps(described)), *extra], group)
    if any(failed for failed, *_ in headers):
        problems = gather_strings(problem, group)
        raise ValueError("; ".join(f"On rank {rank} {text}" for rank, text in enumerate(problems) if text) + ".")
    if any(hashed != headers[0][1] for _, hashed, *_ in headers):
        raise ValueError(_schema_mismatch([json.loads(text) for text in gather_strings(json.dumps(described), group)], what))
    return [numbers for _, _, *numbers in headers]


def _schema_mismatch(schemas: Sequence[Mapping[str, str]], what: str) -> str:
    for name in sorted(set().union(*schemas)):
        found = [schema.get(name, "missing") for schema in schemas]
        if len(set(found)) > 1:
            other = next(rank for rank, text in enumerate(found) if text != found[0])
            return (
                f"The {what} of all ranks must have the same fields, but field '{name}' is {found[0]} on rank 0 and {found[other]} on "
                f"rank {other}. A rank without {what} passes {_EMPTY[what]}."
            )
    raise AssertionError("schemas with different hashes are different")


def encode_samples(lengths: Sequence[int], wanted: Sequence[tuple[int, ...]], keys: Sequence[int]) -> list[int]:
    """Return what the other ranks need to know about this rank's samples, as integers."""
    return [number for length, key, ranks in zip(lengths, keys, wanted) for number in (length, key, len(ranks), *ranks)]


def gather_samples(encoded: Sequence[int], counts: Sequence[int], group: dist.ProcessGroup | None) -> list[Sample]:
    """Gather the encoded samples of all ranks, rank 0's first; ``counts`` holds the number of integers of each rank."""
    samples = []
    for source, numbers in enumerate(all_gather_lengths(encoded, group, counts=counts)):
        at, position = 0, 0
        while at < len(numbers):
            length, key, count = numbers[at : at + 3]
            samples.append(Sample(source, position, length, key, tuple(numbers[at + 3 : at + 3 + count])))
            at, position = at + 3 + count, position + 1
    return samples


def check_keys(samples: Sequence[Sample]) -> None:
    """Raise if two samples have the same sort key."""
    seen: dict[int, Sample] = {}
    for sample in samples:
        other = seen.setdefault(sample.key, sample)
        if other is not sample:
            raise ValueError(
                f"Keys in `order` must differ for all samples of the group, but sample {other.position} of rank {other.source} and sample "
                f"{sample.position} of rank {sample.source} both have {sample.key}."
            )

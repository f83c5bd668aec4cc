"""The byte layout in which rows of packed samples travel between ranks."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rlbatch.distributed.reductions import transfer_device
from lightning_rlbatch.functional.row_selection import take_rows, token_positions
from lightning_rlbatch.functional.schema import FieldSpec, Schema

ALIGNMENT = 16  # bytes; every field starts at a multiple of it, so that received bytes can be viewed as any dtype


class Rows(NamedTuple):
    """Samples as their lengths and fields, without the promises of a PackedBatch (results need not hold ``input_ids``).

    Attributes:
        lengths: Tokens of each sample, ``[N]``.
        fields: Name to ``[T, ...]`` or ``[N, ...]``, as the schema says.
    """

    lengths: Sequence[int]
    fields: Mapping[str, Tensor]


def take(rows: Rows, schema: Schema, indices: Sequence[int]) -> Rows:
    """Return the samples at ``indices``, in that order."""
    if list(indices) == list(range(len(rows.lengths))):
        return rows
    device = next(iter(rows.fields.values())).device
    tokens = token_positions(rows.lengths, indices).to(device)
    samples = torch.tensor(list(indices), dtype=torch.int64).to(device)
    fields = {name: take_rows(rows.fields[name], tokens if spec.per_token else samples) for name, spec in schema.items()}
    return Rows([rows.lengths[index] for index in indices], fields)


def join(parts: Sequence[Rows], schema: Schema) -> Rows:
    """Return the samples of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    lengths = [length for part in parts for length in part.lengths]
    return Rows(lengths, {name: torch.cat([part.fields[name] for part in parts]) for name in schema})


def field_bytes(spec: FieldSpec, lengths: Sequence[int]) -> int:
    """Return the bytes of one field of samples of these lengths, without padding."""
    rows = sum(lengths) if spec.per_token else len(lengths)
    return rows * math.prod(spec.shape) * spec.dtype.itemsize


def num_bytes(schema: Schema, lengths: Sequence[int]) -> int:
    """Return the bytes that samples of these lengths take on the wire, padding included."""
    return sum(_padded(field_bytes(spec, lengths)) for spec in schema.values())


def send_and_receive(
    outgoing: Mapping[int, Rows], incoming: Mapping[int, Sequence[int]], schema: Schema, group: dist.ProcessGroup, device: torch.device
) -> dict[int, Rows]:
    """Send rows to some ranks of the group and receive rows from some, in one all-to-all; all ranks of the group call it.

    Sender and receiver derive every offset from lengths and schema, so only field bytes travel: per destination each field, in
    the order of the names, padded to `ALIGNMENT`.

    Args:
        outgoing: Destination (rank in the group) to rows; this rank itself is not among them.
        incoming: Source (rank in the group) to the lengths of the samples that it sends.
        schema: Fields of the rows, the same on all ranks.
        group: Ranks that exchange.
        device: Where the received rows are wanted.

    Returns:
        Source to rows, views of one received buffer.
    """
    # The group's backend decides where bytes can travel: host batches over NCCL, or GPU batches over gloo, are copied.
    wire = transfer_device(device, group)
    sizes = [
        (num_bytes(schema, outgoing[rank].lengths) if rank in outgoing else 0, num_bytes(schema, incoming.get(rank, ())))
        for rank in range(group.size())
    ]
    sent = torch.empty(sum(size for size, _ in sizes), dtype=torch.uint8, device=wire)
    received = torch.empty(sum(size for _, size in sizes), dtype=torch.uint8, device=wire)
    start = 0
    for rank in sorted(outgoing):
        start = _write(outgoing[rank], schema, sent, start)
    dist.all_to_all_single(received, sent, [size for _, size in sizes], [size for size, _ in sizes], group=group)
    received = received.to(device)
    blocks = torch.split(received, [size for _, size in sizes])
    return {rank: _read(blocks[rank], schema, lengths) for rank, lengths in incoming.items()}


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _write(rows: Rows, schema: Schema, buffer: Tensor, start: int) -> int:
    for name in sorted(schema):
        data = rows.fields[name].detach().contiguous().view(-1).view(torch.uint8)
        buffer[start : start + data.numel()] = data
        end = start + _padded(data.numel())
        buffer[start + data.numel() : end] = 0  # never send stale memory
        start = end
    return start


def _read(block: Tensor, schema: Schema, lengths: Sequence[int]) -> Rows:
    fields, start = {}, 0
    for name in sorted(schema):
        spec = schema[name]
        size = field_bytes(spec, lengths)
        count = sum(lengths) if spec.per_token else len(lengths)
        fields[name] = block[start : start + size].view(spec.dtype).view(count, *spec.shape)
        start += _padded(size)
    return Rows(lengths, {name: fields[name] for name in schema})

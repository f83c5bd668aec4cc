"""Small collectives of host numbers and small tensors, each over a named group (None = this process only)."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_rlbatch.distributed.mesh import Meshes

Scalar = Tensor | float | int

_HEADER_SLOTS = 4  # two 20-bit pieces of a hash of the names, and the square (or the negative) of each
_FIRST_CHUNK = 128  # fp64 slots that every rank sends whatever its keys are, so that different keys cannot block a rank
_HASH_BITS = 20  # squares summed over up to 4,096 ranks stay below 2**53, exact in fp64


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of a group; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Return this process's position in a group; 0 for None."""
    return 0 if group is None else group.rank()


def collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which the group's backend wants small host data: the CPU where it can, else this rank's GPU."""
    if group is None or "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def transfer_device(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Return where tensors of ``device`` must lie for a collective of the group: on ``device`` itself if its backend can."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    if device.type in backends and (device.type == "cpu" or backends[device.type] != "gloo"):
        return device
    return collective_device(group)


def stable_hash(text: str, bits: int = 62) -> int:
    """Return a hash that is the same in every process, whatever ``PYTHONHASHSEED`` is."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - bits)


def all_gather_ints(local: Sequence[int] | Tensor, group: dist.ProcessGroup | None) -> list[list[int]]:
    """Gather one list of integers per rank; all ranks must pass the same number of them.

    Args:
        local: This rank's integers (int64 range), or any integer tensor of one dimension.
        group: Ranks to gather from.

    Returns:
        ``[group size][len(local)]``.
    """
    values = _as_int64(local)
    if group_size(group) == 1:
        return [values.tolist()]
    assert group is not None
    rows: list[list[int]] = _gather(values.to(collective_device(group)), group).tolist()
    return rows


def all_gather_lengths(
    local: Sequence[int] | Tensor, group: dist.ProcessGroup | None, *, counts: Sequence[int] | None = None
) -> list[list[int]]:
    """Gather one list of integers per rank; ranks may hold different numbers of them, none included.

    Args:
        local: This rank's integers, for example the token count of each of its samples.
        group: Ranks to gather from.
        counts: How many integers each rank has, if all ranks know it already; None gathers it first.

    Returns:
        One list per rank, in group order. World traffic: 8 bytes per rank, then 8 bytes per sample (padded to the rank with
        the most samples).
    """
    values = _as_int64(local)
    if counts is None:
        counts = [count for (count,) in all_gather_ints([values.numel()], group)]
    padded = values.new_zeros(max(counts))
    padded[: values.numel()] = values
    return [row[:count] for row, count in zip(all_gather_ints(padded, group), counts)]


def all_gather_rows(rows: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """Gather the rows of all ranks, bit for bit; ranks may hold different numbers of rows, none included.

    For small per-sample data: every rank receives everything.

    Args:
        rows: ``[n_r, ...]``, any dtype; dtype and trailing shape must be the same on all ranks. No gradient flows through.
        group: Ranks to gather from.

    Returns:
        ``[sum of n_r, ...]`` in group order, on the device of ``rows``, and the number of rows of each rank.

    Raises:
        ValueError: ``rows`` has no dimension; or dtype or trailing shape differ between ranks (on every rank).
    """
    if rows.dim() == 0:
        raise ValueError("`rows` must have at least one dimension (one row per sample), got a 0-d tensor.")
    layout = f"{rows.dtype}, trailing shape {tuple(rows.shape[1:])}"
    headers = all_gather_ints([rows.shape[0], stable_hash(layout)], group)
    if any(header[1] != headers[0][1] for header in headers):
        layouts = gather_strings(layout, group)
        raise ValueError(f"Rows can be gathered only if dtype and trailing shape agree on all ranks, got {_by_rank(layouts)}.")
    counts = [header[0] for header in headers]
    if group_size(group) == 1:
        return rows.detach(), counts
    assert group is not None
    row_bytes = rows.dtype.itemsize * math.prod(rows.shape[1:])
    if max(counts) * row_bytes == 0:
        return rows.new_empty((sum(counts), *rows.shape[1:])), counts
    sent = torch.zeros(max(counts) * row_bytes, dtype=torch.uint8, device=rows.device)
    own = rows.detach().contiguous().view(-1).view(torch.uint8)
    sent[: own.numel()] = own
    received = _gather(sent.to(transfer_device(rows.device, group)), group)
    parts = torch.cat([row[: count * row_bytes] for row, count in zip(received, counts)])
    return parts.to(rows.device).view(rows.dtype).view(sum(counts), *rows.shape[1:]), counts


def gather_strings(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """Gather one string per rank: for error messages, where speed does not matter."""
    codes = torch.tensor(list(text.encode(errors="backslashreplace")), dtype=torch.int64)
    return [bytes(row).decode() for row in all_gather_lengths(codes, group)]


def all_reduce_sums(values: Mapping[str, Scalar], group: dist.ProcessGroup | None) -> dict[str, float]:
    """Sum every entry over the ranks of a group, in fp64, in one all-reduce (of 1 KiB up to 124 entries).

    Pass numerators and denominators, never means: a mean of rank means depends on how samples lie on the ranks.

    Args:
        values: Name to number or one-element tensor; the same names on every rank, in any order.
        group: Ranks to sum over: the data-parallel group, if sequence-parallel peers hold the same values.

    Returns:
        Name to sum, in the caller's order. Counts are exact up to 2**53.

    Raises:
        ValueError: A tensor has more than one element.
        RuntimeError: The names differ between ranks (on every rank, naming them).
    """
    return _reduce_named(values, group, dist.ReduceOp.SUM)


def all_reduce_max(values: Mapping[str, Scalar], group: dist.ProcessGroup | None) -> dict[str, float]:
    """Take the maximum of every entry over the ranks of a group; otherwise as `all_reduce_sums`. NaN has no defined result."""
    return _reduce_named(values, group, dist.ReduceOp.MAX)


def all_reduce_min(values: Mapping[str, Scalar], group: dist.ProcessGroup | None) -> dict[str, float]:
    """Take the minimum of every entry over the ranks of a group; otherwise as `all_reduce_sums`. NaN has no defined result."""
    return _reduce_named(values, group, dist.ReduceOp.MIN)


def gradient_scale(meshes: Meshes, averages_over: Literal["fsdp", "ddp", "none"]) -> float:
    """Return the factor for a rank's loss that makes the averaged gradient the gradient of the whole mini-batch's loss.

    The loss of a rank is the sum over ITS samples divided by GLOBAL denominators, so gradients must be SUMMED over the
    data-parallel ranks. FSDP and DDP average over all ``dp_size * sp_size`` ranks instead. The ranks of a sequence-parallel group
    compute the same loss from gathered log-probs, and the gather's backward gives each its own slice times ``sp_size``, so
    the sum over the group is ``sp_size`` times the gradient. What is left to multiply by is ``dp_size``.

    Args:
        meshes: Sizes of this run.
        averages_over: ``"fsdp"``: gradients are averaged over all ranks by reduce-scatter (and all-reduce for HSDP);
            ``"ddp"``: by all-reduce; ``"none"``: nobody averages, the process runs alone.

    Raises:
        ValueError: ``averages_over`` is unknown, or is ``"none"`` although there are several ranks.
    """
    if averages_over in ("fsdp", "ddp"):
        return float(meshes.dp_size)
    if averages_over != "none":
        raise ValueError(f"`averages_over` must be 'fsdp', 'ddp' or 'none', got {averages_over!r}.")
    if meshes.world_size > 1:
        raise ValueError(
            f"Gradients of {meshes.world_size} ranks must be averaged by FSDP or DDP, got averages_over='none': the ranks' "
            "parameters would drift apart. Use strategy='rlbatch_fsdp' or strategy='ddp'."
        )
    return 1.0


def _gather(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather one tensor of the same shape per rank, ``[n] -> [group size, n]``."""
    gathered = local.new_empty(group.size(), local.numel())
    if local.numel():
        # Into a list of views: the single-tensor form has changed its name between torch versions.
        dist.all_gather(list(gathered.unbind()), local, group=group)
    return gathered


def _as_int64(values: Sequence[int] | Tensor) -> Tensor:
    if isinstance(values, Tensor):
        if values.is_floating_point() or values.is_complex() or values.dim() != 1:
            raise TypeError(f"Expected a 1-d integer tensor, got {values.dtype} of shape {tuple(values.shape)}.")
        return values.detach().to(torch.int64)
    return torch.tensor(list(values), dtype=torch.int64)


def _by_rank(texts: Sequence[str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))


def _stack_scalars(values: Mapping[str, Scalar], names: Sequence[str]) -> Tensor:
    """Return the entries as one fp64 CPU tensor, with one device-to-host copy however many tensors there are."""
    tensors = {}
    for name in names:
        value = values[name]
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"`{name}` must be a number or a one-element tensor, got shape {tuple(value.shape)}.")
            tensors[name] = value.detach().reshape(())
    # Copies per (device, dtype): fp64 does not exist on every device, and stacking different dtypes would round.
    host: dict[str, float] = {}
    for key in {(tensor.device, tensor.dtype) for tensor in tensors.values()}:
        members = [name for name, tensor in tensors.items() if (tensor.device, tensor.dtype) == key]
        host.update(zip(members, torch.stack([tensors[name] for name in members]).tolist()))
    return torch.tensor([float(host[name] if name in host else values[name]) for name in names], dtype=torch.float64)


def _reduce_named(values: Mapping[str, Scalar], group: dist.ProcessGroup | None, op: "dist.ReduceOp.RedOpType") -> dict[str, float]:
    names = sorted(values)
    packed = _stack_scalars(values, names)
    if group_size(group) > 1:
        assert group is not None
        packed = _reduce_packed(packed, names, group, op)
    reduced = dict(zip(names, packed.tolist()))
    return {name: reduced[name] for name in values}


def _reduce_packed(packed: Tensor, names: Sequence[str], group: dist.ProcessGroup, op: "dist.ReduceOp.RedOpType") -> Tensor:
    # The first chunk has a fixed size and carries a hash of the names, so ranks with different names learn it together.
    hashed = stable_hash("\0".join(names), 2 * _HASH_BITS)
    pieces = [float(hashed >> _HASH_BITS), float(hashed % 2**_HASH_BITS)]
    second = [piece**2 if op == dist.ReduceOp.SUM else -piece for piece in pieces]
    flat = packed.new_zeros(max(_FIRST_CHUNK, _HEADER_SLOTS + len(names)))
    flat[:_HEADER_SLOTS] = torch.tensor([*pieces, *second], dtype=torch.float64)
    flat[_HEADER_SLOTS : _HEADER_SLOTS + len(names)] = packed
    flat = flat.to(collective_device(group))
    dist.all_reduce(flat[:_FIRST_CHUNK], op=op, group=group)
    header = [int(value) for value in flat[:_HEADER_SLOTS].tolist()]
    if not all(_agrees(first, other, group.size(), op) for first, other in zip(header[:2], header[2:])):
        listed = gather_strings(", ".join(names), group)
        raise RuntimeError(f"All ranks must reduce the same names together, got {_by_rank(listed)}.")
    if flat.numel() > _FIRST_CHUNK:
        dist.all_reduce(flat[_FIRST_CHUNK:], op=op, group=group)
    return flat[_HEADER_SLOTS : _HEADER_SLOTS + len(names)].cpu()


def _agrees(first: int, second: int, size: int, op: "dist.ReduceOp.RedOpType") -> bool:
    """Tell from a reduced (x, x**2) or (x, -x) whether all ranks had the same x."""
    if op == dist.ReduceOp.SUM:
        return size * second == first**2  # equality of Cauchy and Schwarz
    return first == -second  # max x == min x

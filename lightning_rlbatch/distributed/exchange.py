"""Move packed samples to the ranks that compute on them, and results back to the ranks that sampled them.

Invariants:

1. Every rank knows every sample's length, source, destinations and sort key, so all of them accept or refuse an exchange
   together, and all derive the same offsets.
2. A sample that stays is not sent. The bytes that travel are those of the fields, padded to 16 per field and destination.
3. Values arrive bit for bit, whatever their dtype.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_rlbatch.distributed.manifest import Sample, agree, check_keys, encode_samples, gather_samples, read_arguments, wrong_results
from lightning_rlbatch.distributed.reductions import group_rank, group_size
from lightning_rlbatch.distributed.wire import Rows, join, num_bytes, send_and_receive, take
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.schema import Schema, schema_of

_NO_SAMPLES = 2  # a rank without samples has no opinion on whether there is an order


class _Leg(NamedTuple):
    """One sample on its way from one rank to one rank."""

    sender: int
    position: int  # among the sender's rows; only the sender knows it, -1 elsewhere
    receiver: int
    length: int


@dataclasses.dataclass(frozen=True)
class Route:
    """Where the samples of an exchange went, to bring results back.

    Attributes:
        group: Ranks of the exchange; None for a process that runs alone.
        global_ids: For each received sample, in the order of the received batch, its index among all samples of the group
            (rank 0's samples first).
        bytes_sent: Field bytes that this rank sent to others, padding included.
        bytes_received: Field bytes that it received from others.
        bytes_moved: Field bytes that travelled, over the whole group; every rank knows it without asking.
        num_samples_moved: Copies of samples that changed rank, over the whole group.
    """

    group: dist.ProcessGroup | None
    global_ids: tuple[int, ...]
    bytes_sent: int
    bytes_received: int
    bytes_moved: int
    num_samples_moved: int
    _samples: tuple[Sample, ...] = dataclasses.field(repr=False)

    @overload
    def back(self, per_token: Tensor) -> Tensor: ...

    @overload
    def back(self, per_token: Mapping[str, Tensor] | None = None, per_sample: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]: ...

    def back(
        self, per_token: Tensor | Mapping[str, Tensor] | None = None, per_sample: Mapping[str, Tensor] | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Return results for the received samples to the ranks that the samples came from; all ranks of the group call it.

        A sample that went to several ranks gets its result from the first of its destinations. No gradient flows through.

        Args:
            per_token: ``[T, ...]`` for the T tokens of the received batch, or several such tensors by name.
            per_sample: Name to ``[N, ...]`` for its N samples.

        Returns:
            The results for this rank's own samples in the order in which it passed them to `exchange_samples`: a tensor for a
            tensor, else name to tensor, per-token and per-sample results in one dictionary.

        Raises:
            ValueError: A result has the wrong number of rows, or names, dtypes or trailing shapes differ between ranks. The same
                error on every rank.
        """
        token_fields = {"result": per_token} if isinstance(per_token, Tensor) else dict(per_token or {})
        rows = Rows([self._samples[index].length for index in self.global_ids], {**token_fields, **(per_sample or {})})
        problem = wrong_results(rows, token_fields.keys(), (per_sample or {}).keys())
        schema = {} if problem else schema_of(token_fields, per_sample or {})
        agree(schema, problem, self.group, what="results")
        if not schema:
            return {}
        rank, layout = group_rank(self.group), {index: position for position, index in enumerate(self.global_ids)}
        legs = [
            _Leg(sample.destinations[0], layout[index] if sample.destinations[0] == rank else -1, sample.source, sample.length)
            for index, sample in enumerate(self._samples)
        ]
        rows = Rows(rows.lengths, {name: value.detach() for name, value in rows.fields.items()})
        returned, _, _ = _move(rows, schema, legs, self.group, next(iter(rows.fields.values())).device)
        return returned.fields["result"] if isinstance(per_token, Tensor) and not per_sample else dict(returned.fields)


def exchange_samples(
    batch: PackedBatch,
    destinations: Sequence[int | Sequence[int]] | Tensor | NDArray[Any],
    group: dist.ProcessGroup | None,
    *,
    order: Sequence[int] | Tensor | NDArray[Any] | None = None,
) -> tuple[PackedBatch, Route]:
    """Send each sample to one or more ranks; all ranks of the group call it, those without samples too.

    Two small collectives of integers tell every rank lengths, destinations and a hash of the schema; then the fields of the
    samples that change rank move in ONE variable-size all-to-all.

    Args:
        batch: This rank's samples, possibly none: then its schema still has to be that of the others
            (``PackedBatch.empty(schema)``).
        destinations: For each sample the rank in ``group`` that gets it, or several different ranks (sequence-parallel peers
            compute on the same samples). A list, integer tensor or array, like ``order``.
        group: Ranks that exchange; None for a process that runs alone (rank 0).
        order: A sort key for each sample, different for all samples of the group; every rank lays out what it gets by ascending
            key (`plan_destinations` makes keys for plan order). None: by source rank, then position.

    Returns:
        The samples for this rank, and the route for `Route.back`.

    Raises:
        ValueError: Destinations or keys that are wrong, fields that differ between ranks. The same error on every rank, before
            any sample moves.
    """
    schema = batch.schema
    wanted, keys, problem = read_arguments(batch, destinations, order, group_size(group))
    has_order = _NO_SAMPLES if not batch.num_samples else int(order is not None)
    encoded = encode_samples(batch.seq_lens, wanted, keys)
    headers = agree(schema, problem, group, what="samples", extra=[has_order, len(encoded)])
    opinions = [opinion for opinion, _ in headers]
    if {0, 1} <= set(opinions):
        given = [rank for rank, opinion in enumerate(opinions) if opinion == 1]
        raise ValueError(f"Either every rank passes `order` or none does; it was passed on ranks {given} of {len(opinions)}.")
    samples = gather_samples(encoded, [count for _, count in headers], group)
    layout = list(range(len(samples)))
    if 1 in opinions:
        check_keys(samples)
        layout.sort(key=lambda index: samples[index].key)
    rank = group_rank(group)
    legs = [
        _Leg(samples[index].source, samples[index].position, receiver, samples[index].length)
        for index in layout
        for receiver in samples[index].destinations
    ]
    own = Rows(batch.seq_lens, {name: value.detach() for name, value in (*batch.per_token.items(), *batch.per_sample.items())})
    rows, sent, received = _move(own, schema, legs, group, batch.device)
    route = Route(
        group=group,
        global_ids=tuple(index for index in layout if rank in samples[index].destinations),
        bytes_sent=sent,
        bytes_received=received,
        bytes_moved=_bytes_moved(legs, schema),
        num_samples_moved=sum(leg.sender != leg.receiver for leg in legs),
        _samples=tuple(samples),
    )
    return _as_batch(rows, schema), route


def plan_destinations(
    assignment: Sequence[Sequence[Sequence[int]]], samples_per_rank: Sequence[int], rank: int, *, sp_size: int = 1
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Turn a plan into the destinations and the order that `exchange_samples` takes.

    Every rank then receives the samples of its micro-steps laid end to end: first those of micro-step 0, then of 1, and so on.

    Args:
        assignment: ``[dp_rank][micro_step]`` -> sample indices, as in ``BatchPlan.assignment``. Samples are counted over the ranks of
            the exchange: rank 0's first.
        samples_per_rank: Number of samples that each rank of the exchange holds before it.
        rank: This process's rank in the exchange.
        sp_size: Ranks of the exchange per data-parallel rank: the sequence-parallel size when all ranks take part, 1 when only the
            data-parallel group does.

    Returns:
        Destinations and sort keys of this rank's samples.

    Raises:
        ValueError: The plan does not hold every sample exactly once, or its number of data-parallel ranks does not fit.

    Example:
        >>> plan_destinations([[[2], [0]], [[1, 3], []]], [3, 1], rank=0)
        ([(0,), (1,), (0,)], [1, 2, 0])
    """
    if len(assignment) * sp_size != len(samples_per_rank):
        raise ValueError(
            f"A plan for {len(assignment)} data-parallel ranks of {sp_size} ranks each needs {len(assignment) * sp_size} ranks, but the "
            f"exchange has {len(samples_per_rank)}."
        )
    planned = [(dp_rank, index) for dp_rank, steps in enumerate(assignment) for step in steps for index in step]
    total = sum(samples_per_rank)
    if sorted(index for _, index in planned) != list(range(total)):
        raise ValueError(f"A plan must hold each of the {total} samples exactly once, got {sorted(index for _, index in planned)}.")
    where = {index: (key, dp_rank) for key, (dp_rank, index) in enumerate(planned)}
    start = sum(samples_per_rank[:rank])
    own = [where[index] for index in range(start, start + samples_per_rank[rank])]
    destinations = [tuple(range(dp_rank * sp_size, (dp_rank + 1) * sp_size)) for _, dp_rank in own]
    return destinations, [key for key, _ in own]


def _move(own: Rows, schema: Schema, legs: Sequence[_Leg], group: dist.ProcessGroup | None, device: torch.device) -> tuple[Rows, int, int]:
    """Carry out legs that all ranks list in the same order; return this rank's rows in that order, and bytes sent and received."""
    rank = group_rank(group)
    positions: dict[int, list[int]] = {}
    lengths: dict[int, list[int]] = {}
    senders = []
    for leg in legs:
        if leg.sender == rank:
            positions.setdefault(leg.receiver, []).append(leg.position)
        if leg.receiver == rank:
            lengths.setdefault(leg.sender, []).append(leg.length)
            senders.append(leg.sender)
    taken = {key: take(own, schema, key) for key in {tuple(wanted) for wanted in positions.values()}}  # SP peers share one
    outgoing = {receiver: taken[tuple(wanted)] for receiver, wanted in positions.items()}
    parts = {rank: outgoing.pop(rank)} if rank in outgoing else {}
    lengths.pop(rank, None)
    if group is not None and any(leg.sender != leg.receiver for leg in legs):
        parts.update(send_and_receive(outgoing, lengths, schema, group, device))
    sent = sum(num_bytes(schema, rows.lengths) for rows in outgoing.values())
    received = sum(num_bytes(schema, incoming) for incoming in lengths.values())
    if not parts:
        return Rows([], {name: spec.zeros(0, device) for name, spec in schema.items()}), sent, received
    joined = join([parts[sender] for sender in sorted(parts)], schema)
    # Rows lie by sender; leg i is row `arrival.index(i)`.
    arrival = sorted(range(len(senders)), key=lambda index: senders[index])
    where = {leg: row for row, leg in enumerate(arrival)}
    return take(joined, schema, [where[leg] for leg in range(len(senders))]), sent, received


def _bytes_moved(legs: Sequence[_Leg], schema: Schema) -> int:
    lengths: dict[tuple[int, int], list[int]] = {}
    for leg in legs:
        if leg.sender != leg.receiver:
            lengths.setdefault((leg.sender, leg.receiver), []).append(leg.length)
    return sum(num_bytes(schema, between) for between in lengths.values())


def _as_batch(rows: Rows, schema: Schema) -> PackedBatch:
    # The fields were checked where the batch was made; checking them again would read the response mask back from the GPU.
    return PackedBatch.unchecked(
        tuple(rows.lengths),
        {name: rows.fields[name] for name, spec in schema.items() if spec.per_token},
        {name: rows.fields[name] for name, spec in schema.items() if not spec.per_token},
    )

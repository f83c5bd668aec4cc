"""Hold the rollouts of one iteration across ranks, and hand them out as planned mini-batches."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rlbatch.data.batching import BatchingOptions, Role
from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.distributed.exchange import exchange_samples
from lightning_rlbatch.distributed.mesh import Meshes
from lightning_rlbatch.distributed.reductions import all_gather_rows
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.plan import BatchPlan
from lightning_rlbatch.functional.segments import segment_sum

SAMPLE_ID = "sample_id"


@dataclasses.dataclass(frozen=True)
class RolloutTable:
    """What every rank knows of every rollout of an iteration; index i is the rollout with id i.

    Attributes:
        lengths: Tokens, prompt and response.
        num_response_tokens: Tokens that the policy sampled.
        rewards: ``[N]`` float64; NaN where no reward function had a verdict.
        truncated: ``[N]`` bool: cut off at the length limit.
        group_ids: ``[N]`` int64: the prompt's position in its iteration.
        rollouts_per_prompt: Rollout r of the p-th prompt has the id ``p * rollouts_per_prompt + r``.
    """

    lengths: list[int]
    num_response_tokens: list[int]
    rewards: Tensor
    truncated: Tensor
    group_ids: Tensor
    rollouts_per_prompt: int

    @classmethod
    def of_rows(cls, rows: Tensor, group_ids: Tensor, rollouts_per_prompt: int) -> "RolloutTable":
        """Make a table of what :func:`describe_samples` returned on all ranks, ``[N, 4]`` by id."""
        return cls(
            lengths=[int(value) for value in rows[:, 0].tolist()],
            num_response_tokens=[int(value) for value in rows[:, 1].tolist()],
            rewards=rows[:, 2].clone(),
            truncated=rows[:, 3].bool(),
            group_ids=group_ids,
            rollouts_per_prompt=rollouts_per_prompt,
        )

    def __len__(self) -> int:
        """Return the number of rollouts."""
        return len(self.lengths)

    def ids_of_prompts(self, prompts: Sequence[int]) -> list[int]:
        """Return the rollouts of some prompts that can be trained on: whole groups, less the rollouts without a reward."""
        size = self.rollouts_per_prompt
        missing = self.rewards.isnan().tolist()
        return [index for prompt in prompts for index in range(prompt * size, (prompt + 1) * size) if not missing[index]]


def describe_samples(samples: PackedBatch) -> Tensor:
    """Return what a :class:`RolloutTable` holds of samples: ``[n, 4]`` float64 on the CPU, for :meth:`RolloutTable.of_rows`.

    Args:
        samples: Per-sample field ``reward``, and ``truncated`` (False where it is missing).
    """
    columns = (
        samples.lengths,
        segment_sum(samples["response_mask"], samples.cu_seqlens),
        samples["reward"],
        samples["truncated"] if "truncated" in samples else torch.zeros(samples.num_samples),
    )
    return torch.stack([column.cpu().double() for column in columns], dim=1)


def gather_table(samples: PackedBatch, group_ids: Tensor, rollouts_per_prompt: int, meshes: Meshes) -> RolloutTable:
    """Tell every rank the lengths and rewards of all rollouts.

    Args:
        samples: This rank's share, the next ids after the lower ranks'; per-sample fields ``reward`` and ``truncated``.
        group_ids: ``[N]`` int64, known on every rank.
        rollouts_per_prompt: Group size.
        meshes: Groups of the run.
    """
    rows, _ = all_gather_rows(describe_samples(samples), meshes.world_group)
    return RolloutTable.of_rows(rows, group_ids, rollouts_per_prompt)


class RolloutStore:
    """This rank's rollouts of an iteration, and where all the others are.

    Samples are moved before the forward-only passes to the ranks that train on them in the first epoch, so that most of
    the data moves once. In later epochs a mini-batch has other members: only samples that change their rank are sent.

    Args:
        samples: This rank's own share in id order, with the per-sample field ``sample_id``.
        table: Lengths and rewards of all rollouts.
        mini_batches: Ids of each mini-batch of the first epoch.
        options: How to cut.
        meshes: Groups of the run.

    Attributes:
        extra: What reward functions tell of the rollouts that this rank sampled, by id; it stays here when samples move.
    """

    def __init__(
        self, samples: PackedBatch, table: RolloutTable, mini_batches: Sequence[Sequence[int]], options: BatchingOptions, meshes: Meshes
    ) -> None:
        self.table = table
        self.extra: dict[int, dict[str, Any]] = {}
        self._options = options
        self._meshes = meshes
        self._holder = [-1] * len(table)
        self._plans = {tuple(ids): options.plan([table.lengths[i] for i in ids], meshes) for ids in mini_batches if ids}
        for ids, plan in self._plans.items():
            self._assign(ids, plan)
        own = samples[SAMPLE_ID].tolist()
        sent = samples.select([position for position, index in enumerate(own) if self._holder[index] >= 0])
        destinations = [meshes.ranks_of_dp(self._holder[index]) for index in sent[SAMPLE_ID].tolist()]
        self.samples, route = exchange_samples(sent, destinations, meshes.world_group, order=sent[SAMPLE_ID].tolist())
        self.bytes_sent = route.bytes_sent
        self._bytes_moved = route.bytes_moved

    def _assign(self, ids: Sequence[int], plan: BatchPlan) -> None:
        for dp_rank, positions in enumerate(plan.samples_per_rank):
            for position in positions:
                self._holder[ids[position]] = dp_rank

    @property
    def sample_ids(self) -> list[int]:
        """Ids of this rank's samples, in the order of ``samples``."""
        return [index for index, holder in enumerate(self._holder) if holder == self._meshes.dp_rank]

    @property
    def group_ids(self) -> Tensor:
        """``[n]`` int64: groups of this rank's samples."""
        return self.table.group_ids[self.sample_ids]

    @property
    def bytes_moved(self) -> int:
        """Bytes that samples have taken between ranks so far in this iteration, over all ranks; the same number on every rank."""
        return self._bytes_moved

    def to(self, device: torch.device) -> None:
        """Move this rank's samples to the device that computes."""
        self.samples = self.samples.to(device)

    def update(self, per_token: dict[str, Tensor] | None = None, per_sample: dict[str, Tensor] | None = None) -> None:
        """Add or replace fields of this rank's samples."""
        self.samples = self.samples.with_fields(per_token=per_token or {}, per_sample=per_sample or {})

    def score(self, forward: Callable[[PackedBatch], dict[str, Tensor]], *, role: Role = "log_prob") -> dict[str, Tensor]:
        """Run a forward-only pass over this rank's samples, with as many micro-batches as every other rank.

        Args:
            forward: Returns ``[T]`` tensors by name for a micro-batch; called on fillers too.
            role: Whose token budget.

        Returns:
            ``[T]`` tensors in the order of ``samples``.
        """
        per_rank: list[list[int]] = [[] for _ in range(self._meshes.dp_size)]
        known = [index for index, holder in enumerate(self._holder) if holder >= 0]
        for position, index in enumerate(known):
            per_rank[self._holder[index]].append(position)
        plan = self._options.recut([self.table.lengths[index] for index in known], per_rank, self._meshes, role=role)
        local = {position: rank for rank, position in enumerate(per_rank[self._meshes.dp_rank])}
        micro_batches = [[local[position] for position in bucket] for bucket in plan.assignment[self._meshes.dp_rank]]
        batch = MiniBatch.cut(self.samples, micro_batches, sp_size=self._meshes.sp_size)
        results = [forward(micro) for micro in batch.micro_batches]
        order = [index for bucket in micro_batches for index in bucket]
        if not order:
            return {name: value[:0] for name, value in results[0].items()}
        scored = [self.samples.select(bucket).with_fields(per_token=result) for bucket, result in zip(micro_batches, results) if bucket]
        restored = PackedBatch.concat(scored).select(sorted(range(len(order)), key=order.__getitem__))
        return {name: restored[name] for name in results[0]}

    def mini_batch(self, ids: Sequence[int]) -> MiniBatch:
        """Move what has to move for one optimizer step, and cut this rank's part.

        Args:
            ids: Rollouts of the mini-batch, the same on every rank.

        Returns:
            This rank's micro-batches.
        """
        if not ids:  # every rollout was filtered out: a legal step without an update
            return MiniBatch.cut(self.samples, [[]], sp_size=self._meshes.sp_size, exchanged_bytes=self._bytes_moved)
        plan = self._plans.pop(tuple(ids), None) or self._options.plan([self.table.lengths[i] for i in ids], self._meshes)
        self._move(ids, plan)
        place = {index: position for position, index in enumerate(self.sample_ids)}
        micro_batches = [[place[ids[position]] for position in bucket] for bucket in plan.assignment[self._meshes.dp_rank]]
        batch = MiniBatch.cut(self.samples, micro_batches, sp_size=self._meshes.sp_size, plan=plan, exchanged_bytes=self._bytes_moved)
        if self._options.cuts_critic:
            lengths = [self.table.lengths[index] for index in ids]
            recut = self._options.recut(lengths, plan.samples_per_rank, self._meshes, role="critic")
            positions = [[place[ids[position]] for position in bucket] for bucket in recut.assignment[self._meshes.dp_rank]]
            batch.critic_micro_batches = MiniBatch.cut(self.samples, positions, sp_size=self._meshes.sp_size).micro_batches
        return batch

    def _move(self, ids: Sequence[int], plan: BatchPlan) -> None:
        before = list(self._holder)
        self._assign(ids, plan)
        if before == self._holder:  # known to every rank alike
            return
        own = [index for index, holder in enumerate(before) if holder == self._meshes.dp_rank]
        destinations = [[self._holder[index]] for index in own]
        self.samples, route = exchange_samples(self.samples, destinations, self._meshes.dp_group, order=own)
        self.bytes_sent += route.bytes_sent
        self._bytes_moved += route.bytes_moved * self._meshes.sp_size  # every data-parallel group moves its copies

"""A sampler that yields planned mini-batches of any map-style dataset whose lengths are known."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DistributedSampler

from lightning_rlbatch.data.indices import MicroBatchIndices, PlannedIndices
from lightning_rlbatch.functional.plan import BatchPlan
from lightning_rlbatch.functional.plan_input import OversizeWarning, check_at_least, checked_input
from lightning_rlbatch.functional.planning import plan_mini_batch
from lightning_rlbatch.functional.workload import DEFAULT_COEFFICIENT, Integers, to_int64

MAX_SWAPS = 1000  # random exchanges tried before a mini-batch counts as impossible to fit

Item: TypeAlias = PlannedIndices | MicroBatchIndices


class TokenBudgetSampler(DistributedSampler[Any]):
    """Yield planned mini-batches: seeded shuffle, own sharding, equal length on every rank.

    Pass it as ``TokenBudgetLoader(dataset, sampler=sampler, batch_size=None)``, or to a ``DataLoader`` in the same way. It is a
    ``DistributedSampler``, so that a plain ``Trainer()`` neither replaces nor pads it and calls ``set_epoch``. Membership of mini-batches
    never depends on lengths; groups of ``group_size`` consecutive samples stay whole. All ranks compute the same plan from the same
    lengths, without communication.

    **Default form.** One item is one mini-batch, one optimizer step: a `PlannedIndices` with this rank's micro-batches.

    **Flat form** (``flat=True``). One item is one micro-batch, a `MicroBatchIndices`, for modules that know nothing of plans. Every
    mini-batch is cut into the same number of micro-batches, `num_micro_steps`, so that an optimizer step is exactly one mini-batch with
    ``Trainer(accumulate_grad_batches=sampler.num_micro_steps)``. The loss is exact, whatever the cut, if ``training_step`` returns
    ``sum of token losses * loss_scale``, where ``loss_scale = num_micro_steps * dp_size / num_tokens`` undoes the division by the
    accumulation and the average over ranks; without accumulation by Lightning, divide it by `num_micro_steps`. `MicroBatchDataset` hands
    the scale to the batch. A mini-batch that needs more micro-steps than the others exchanges random samples with them.

    Args:
        lengths: ``[len(dataset)]``, integers, tokens of every sample of the dataset.
        mini_batch_size: Samples of one optimizer step, over all ranks; the last mini-batch of an epoch holds the rest.
        max_tokens_per_rank: Token budget of one GPU (see `plan_mini_batch`); exactly one of this and ``micro_batch_size``.
        micro_batch_size: Samples per micro-batch.
        dp_size: Number of data-parallel ranks; None takes the default process group's, divided by ``sp_size``.
        dp_rank: This data-parallel rank, the same on all ranks of a sequence-parallel group; None as above.
        sp_size: GPUs of a sequence-parallel group.
        shuffle: Whether epochs differ in order.
        seed: Seed of the shuffle, the same on every rank.
        drop_last: Drop the last mini-batch if it is short.
        balance: See `plan_mini_batch`.
        equal_size: See `plan_mini_batch`.
        planner: See `plan_mini_batch`.
        coefficient: See `attention_workload`.
        group_size: So many consecutive samples of the dataset stay in one micro-batch.
        oversize: See `plan_mini_batch`.
        padded: See `plan_mini_batch`.
        num_tokens: ``[len(dataset)]``, integers, scored tokens of every sample; default: its length.
        flat: One item per micro-batch.
        num_micro_steps: Flat form: micro-steps of every mini-batch; default: as many as the first epochs' mini-batches need.

    Raises:
        TypeError: A value is not an integer.
        ValueError: A setting is out of range, or a sample exceeds the budget; raised on every rank alike.

    Example:
        >>> sampler = TokenBudgetSampler([9, 2, 4, 4], mini_batch_size=2, max_tokens_per_rank=9, dp_size=2, dp_rank=0, shuffle=False)
        >>> [item.micro_batches for item in sampler]
        [[[0]], [[2]]]
    """

    def __init__(
        self,
        lengths: Integers,
        *,
        mini_batch_size: int,
        max_tokens_per_rank: int | None = None,
        micro_batch_size: int | None = None,
        dp_size: int | None = None,
        dp_rank: int | None = None,
        sp_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        balance: bool = True,
        equal_size: bool = False,
        planner: Literal["global", "per_rank"] = "global",
        coefficient: int = DEFAULT_COEFFICIENT,
        group_size: int = 1,
        oversize: Literal["error", "isolate"] = "error",
        padded: bool = False,
        num_tokens: Integers | None = None,
        flat: bool = False,
        num_micro_steps: int | None = None,
    ) -> None:
        _check_sizes(mini_batch_size, sp_size, group_size, seed)
        if num_micro_steps is not None and not flat:
            raise ValueError("`num_micro_steps` has no effect without flat=True. Remove it, or pass flat=True.")
        self._expects_no_group = dp_size is None and not _joined()
        size, rank = _resolve_rank(dp_size, dp_rank, sp_size)
        self.lengths = checked_input(
            lengths, max_tokens_per_rank, micro_batch_size, sp_size, coefficient, group_size, oversize, padded
        ).lengths
        self.num_tokens = self.lengths if num_tokens is None else to_int64(num_tokens, "num_tokens")
        if len(self.num_tokens) != len(self.lengths) or not len(self.lengths):
            raise ValueError(
                f"`lengths` needs one entry per sample, at least one, and `num_tokens` as many, but got {len(self.lengths)} and "
                f"{len(self.num_tokens)}."
            )
        super().__init__(range(len(self.lengths)), num_replicas=size, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]  # only its len() is taken, and a range has one
        self.mini_batch_size = mini_batch_size
        self.group_size = group_size
        self.flat = flat
        self._options: dict[str, Any] = {
            "dp_size": size,
            "max_tokens_per_rank": max_tokens_per_rank,
            "micro_batch_size": micro_batch_size,
            "sp_size": sp_size,
            "balance": balance,
            "coefficient": coefficient,
            "equal_size": equal_size,
            "group_size": group_size,
            "oversize": oversize,
            "planner": planner,
            "padded": padded,
            "refine": not flat,  # refinement may prefer one more micro-step, but in the flat form their number is fixed
        }
        self._start = 0
        self._position = 0
        self._said_bottleneck = False
        self.num_mini_batches = len(self.lengths) // mini_batch_size if drop_last else -(-len(self.lengths) // mini_batch_size)
        if not self.num_mini_batches:
            raise ValueError(f"drop_last=True leaves nothing of {len(self.lengths)} samples with mini_batch_size={mini_batch_size}.")
        self.num_micro_steps: int | None = None
        self.num_micro_steps = self._choose_num_micro_steps(num_micro_steps) if flat else None

    def __len__(self) -> int:
        """Return the number of items of an epoch, the same on every rank."""
        return self.num_mini_batches * (self.num_micro_steps or 1)

    def __iter__(self) -> Iterator[Item]:
        """Yield the items of the current epoch from the restored position on."""
        if self._expects_no_group and _joined() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"TokenBudgetSampler was made without dp_size before the process group of {dist.get_world_size()} ranks existed, so that "
                "every rank would get the same samples. Make it in a `*_dataloader` hook, or pass dp_size and dp_rank."
            )
        self._position, self._start = self._start, 0
        steps = self.num_micro_steps or 1
        for number, members in enumerate(self._mini_batches(self.epoch)):
            if (number + 1) * steps <= self._position:
                continue
            item = self._item(members)
            pieces: list[Item] = self._flat_items(item) if self.flat else [item]
            for piece in pieces[self._position - number * steps :]:
                self._position += 1  # before the yield: the state while an item is processed counts it as done
                yield piece

    @property
    def start(self) -> int:
        """Items that the next iteration leaves out, because a restored state counts them as done."""
        return self._start

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; a position restored for another epoch is dropped."""
        if epoch != self.epoch:
            self._start = self._position = 0
        super().set_epoch(epoch)

    def state_dict(self, num_consumed: int | None = None) -> dict[str, int]:
        """Return the position in the epoch.

        Args:
            num_consumed: Items that training has finished; needed where a loader with workers fetches ahead of training. Default: the
                items that this sampler has handed out.
        """
        return {"epoch": self.epoch, "position": self._position if num_consumed is None else num_consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue an epoch: the next iteration starts behind the items counted in the state.

        Raises:
            ValueError: The state is of an epoch with more items.
        """
        if not 0 <= state["position"] <= len(self):
            raise ValueError(
                f"The state is at item {state['position']} of its epoch but this sampler has {len(self)} items. "
                "Restore it with the dataset, mini_batch_size and budget that it was saved with."
            )
        self.epoch = state["epoch"]
        self._start = self._position = state["position"] % len(self)

    def _item(self, members: list[int]) -> PlannedIndices:
        plan = self._plan(members)
        if not self._said_bottleneck and (text := plan.bottleneck(members)):
            self._said_bottleneck = True
            rank_zero_info(text)
        mine = [[members[i] for i in bucket] for bucket in plan.assignment[self.rank]]
        return PlannedIndices(mine, members, plan, int(self.num_tokens[members].sum()))

    def _plan(self, members: list[int]) -> BatchPlan:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OversizeWarning)  # said once, at construction
            return plan_mini_batch(self.lengths[members], min_num_micro_steps=self.num_micro_steps or 1, **self._options)

    def _flat_items(self, item: PlannedIndices) -> list[Item]:
        assert self.num_micro_steps is not None
        scale = self.num_micro_steps * self.num_replicas / max(1, item.num_tokens)
        shortest = min(item.mini_batch, key=lambda i: (int(self.lengths[i]), i))
        last = self.num_micro_steps - 1
        return [
            MicroBatchIndices(indices or [shortest], item.num_tokens, scale if indices else 0.0, step == last)
            for step, indices in enumerate(item.micro_batches)
        ]

    def _mini_batches(self, epoch: int) -> list[list[int]]:
        """Return the members of every mini-batch: a shuffle of groups that does not look at lengths."""
        generator = np.random.default_rng([self.seed, epoch])
        groups = np.arange(len(self.lengths)).reshape(-1, self.group_size)
        if self.shuffle:
            groups = groups[generator.permutation(len(groups))]
        order = groups.reshape(-1).tolist()
        batches = [order[b * self.mini_batch_size : (b + 1) * self.mini_batch_size] for b in range(self.num_mini_batches)]
        if self.num_micro_steps is not None:
            for number in range(len(batches)):
                self._make_fit(batches, number, generator)
        return batches

    def _fits(self, members: list[int]) -> bool:
        return self._plan(members).num_micro_steps == self.num_micro_steps

    def _make_fit(self, batches: list[list[int]], number: int, generator: np.random.Generator) -> None:
        """Exchange random groups with random mini-batches, in place, until this one fits its micro-steps."""
        size = self.group_size
        for _ in range(MAX_SWAPS):
            if self._fits(batches[number]):
                return
            other = int(generator.integers(len(batches)))
            i, j = (size * int(generator.integers(len(batches[b]) // size)) for b in (number, other))
            mine, theirs = list(batches[number]), list(batches[other])
            mine[i : i + size], theirs[j : j + size] = theirs[j : j + size], mine[i : i + size]
            if other != number and self.lengths[mine].sum() < self.lengths[batches[number]].sum() and self._fits(theirs):
                batches[number], batches[other] = mine, theirs
        raise ValueError(
            f"A mini-batch of {len(batches[number])} samples with {int(self.lengths[batches[number]].sum())} tokens needs more than "
            f"num_micro_steps={self.num_micro_steps}. Raise num_micro_steps, or the budget."
        )

    def _choose_num_micro_steps(self, wanted: int | None) -> int:
        """Return the number of micro-steps of every mini-batch: the wanted one, or what the first epochs need."""
        if wanted is not None:
            check_at_least("num_micro_steps", wanted, 1)
            return wanted
        return max(self._plan(members).num_micro_steps for epoch in range(2) for members in self._mini_batches(epoch))


def _check_sizes(mini_batch_size: int, sp_size: int, group_size: int, seed: int) -> None:
    check_at_least("mini_batch_size", mini_batch_size, 1)
    check_at_least("sp_size", sp_size, 1)
    check_at_least("group_size", group_size, 1)
    check_at_least("seed", seed, 0)
    if mini_batch_size % group_size:
        raise ValueError(f"`mini_batch_size` must be a multiple of group_size={group_size} but got {mini_batch_size}.")


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def _resolve_rank(dp_size: int | None, dp_rank: int | None, sp_size: int) -> tuple[int, int]:
    """Return size and rank, taken from the default process group where they are not given."""
    size = (dist.get_world_size() // sp_size if _joined() else 1) if dp_size is None else dp_size
    rank = (dist.get_rank() // sp_size if dp_size is None and _joined() else 0) if dp_rank is None else dp_rank
    check_at_least("dp_size", size, 1)
    if not 0 <= rank < size:
        raise ValueError(f"`dp_rank` must be between 0 and dp_size - 1 = {size - 1} but got {rank}.")
    return size, rank

"""Checked input of the planners."""

import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_rlbatch.functional.plan import BatchPlan
from lightning_rlbatch.functional.rows import Bucket
from lightning_rlbatch.functional.workload import IntArray, Integers, to_int64, workload_array

Oversize = Literal["error", "isolate"]


class OversizeWarning(UserWarning):
    """A sample above the token budget runs alone (``oversize="isolate"``)."""


@dataclass(frozen=True)
class PlanInput:
    """Samples, the units that stay together, and the cap of a bucket in tokens or in units."""

    lengths: IntArray
    workloads: IntArray
    tokens: IntArray  # per unit
    work: IntArray  # per unit
    longest: IntArray  # per unit, tokens of its longest sample
    heaviest: IntArray  # per unit, workload of that sample
    group_size: int
    sp_size: int
    max_tokens_per_rank: int | None
    micro_batch_size: int | None
    padded: bool

    @property
    def budget(self) -> int:
        """Most tokens of a micro-batch."""
        assert self.max_tokens_per_rank is not None
        return self.max_tokens_per_rank * self.sp_size

    @property
    def units_per_bucket(self) -> int:
        """Units of a static micro-batch."""
        assert self.micro_batch_size is not None
        return self.micro_batch_size // self.group_size

    def to_plan(self, ranks: list[list[Bucket]]) -> BatchPlan:
        """Turn units on ``[dp_size][num_micro_steps]`` buckets into samples."""
        size = self.group_size
        assignment = [[sorted(bucket) for bucket in rank] for rank in ranks]
        if size > 1:
            assignment = [[[i for u in bucket for i in range(u * size, u * size + size)] for bucket in rank] for rank in assignment]
        return BatchPlan(
            assignment,
            self.lengths,
            self.workloads,
            sp_size=self.sp_size,
            max_tokens_per_rank=self.max_tokens_per_rank,
            micro_batch_size=self.micro_batch_size,
            group_size=size,
            padded=self.padded,
        )


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise unless ``value`` is an int of at least ``least``.

    Args:
        name: What the caller calls it.
        value: Of any type.
        least: Smallest value.

    Raises:
        TypeError: It is no int.
        ValueError: It is smaller.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be an int but got {value!r}.")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least} but got {value}.")


def check_flags(**flags: bool) -> None:
    """Raise unless every value is True or False: the string "false" of a configuration would count as True.

    Raises:
        TypeError: One is neither.
    """
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"`{name}` must be True or False but got {value!r}.")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of the choices.

    Raises:
        ValueError: It is none of them.
    """
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))} but got {value!r}.")


def checked_input(
    seq_lens: Integers,
    max_tokens_per_rank: int | None,
    micro_batch_size: int | None,
    sp_size: int,
    coefficient: int,
    group_size: int,
    oversize: Oversize,
    padded: bool = False,
) -> PlanInput:
    """Validate what all entry points share, and sum samples into units; arguments as in ``plan_mini_batch``.

    Raises:
        TypeError: A value is no integer, or a flag no bool.
        ValueError: A setting is out of range or contradicts another, or a sample exceeds the budget.
    """
    if (max_tokens_per_rank is None) == (micro_batch_size is None):
        advice = "Set one of them" if micro_batch_size is None else "Remove one of them"
        raise ValueError(
            "Exactly one of `max_tokens_per_rank` (dynamic micro-batches) and `micro_batch_size` (static micro-batches) must be set "
            f"but got max_tokens_per_rank={max_tokens_per_rank} and micro_batch_size={micro_batch_size}. {advice}."
        )
    for name, value in (("max_tokens_per_rank", max_tokens_per_rank), ("micro_batch_size", micro_batch_size)):
        if value is not None:
            check_at_least(name, value, 1)
    check_at_least("sp_size", sp_size, 1)
    check_at_least("group_size", group_size, 1)
    check_choice("oversize", oversize, ("error", "isolate"))
    check_flags(padded=padded)
    lengths = to_int64(seq_lens)
    if len(lengths) % group_size:
        raise ValueError(
            f"{len(lengths)} samples do not form groups of group_size={group_size}. Add or drop samples, or pass group_size=1."
        )
    if micro_batch_size is not None and micro_batch_size % group_size:
        raise ValueError(f"`micro_batch_size` must be a multiple of group_size={group_size} but got {micro_batch_size}.")
    workloads = workload_array(lengths, coefficient)
    longest, heaviest = (x.reshape(-1, group_size).max(axis=1) for x in (lengths, workloads))
    tokens, work = (x.reshape(-1, group_size).sum(axis=1) for x in (lengths, workloads))
    if padded:
        tokens, work = longest * group_size, heaviest * group_size
    if max_tokens_per_rank is not None:
        tokens = _check_budget(tokens, max_tokens_per_rank, sp_size, group_size, oversize)
    return PlanInput(
        lengths, workloads, tokens, work, longest, heaviest, group_size, sp_size, max_tokens_per_rank, micro_batch_size, padded
    )


def _check_budget(tokens: IntArray, max_tokens_per_rank: int, sp_size: int, group_size: int, oversize: Oversize) -> IntArray:
    """Apply the oversize policy; an isolated unit counts as just over the budget, so that nothing joins it."""
    budget = max_tokens_per_rank * sp_size
    over = np.flatnonzero(tokens > budget)
    if not len(over):
        return tokens
    worst = int(over[np.argmax(tokens[over])])
    first, last = worst * group_size, worst * group_size + group_size - 1
    what = (f"Sample {first} has" if group_size == 1 else f"The group of samples {first} to {last} has") + f" {int(tokens[worst])} tokens"
    cap = f"a micro-batch may hold {budget} (max_tokens_per_rank={max_tokens_per_rank} x sequence_parallel_size={sp_size})"
    if oversize == "error":
        more = f" {len(over) - 1} more exceed it too." if len(over) > 1 else ""
        raise ValueError(f"{what} but {cap}.{more} Raise the budget, raise sequence_parallel_size, or pass oversize='isolate'.")
    warnings.warn(
        f"{what} but {cap}; {len(over)} oversize micro-batch(es) run alone and may run out of memory.", OversizeWarning, stacklevel=4
    )
    return np.minimum(tokens, budget + 1)

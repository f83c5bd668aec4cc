"""Numbers of plans: of one setting, and of a sweep over settings."""

import argparse
import statistics
import warnings
from typing import Any

from lightning_rlbatch.functional.plan import BatchPlan
from lightning_rlbatch.functional.planning import MICRO_STEP_OVERHEAD, plan_mini_batch

NEGLIGIBLE = 0.02  # share of the time that half the memory is worth


def make_plan(lengths: list[int], options: argparse.Namespace, **changes: Any) -> BatchPlan:
    """Plan one mini-batch.

    Args:
        lengths: Of its samples.
        options: As parsed.
        **changes: Arguments of ``plan_mini_batch`` that replace those of the options.
    """
    arguments = {
        "dp_size": options.dp,
        "sp_size": options.sp,
        "max_tokens_per_rank": options.max_tokens_per_rank,
        "micro_batch_size": options.micro_batch_size,
        "equal_size": options.equal_size,
        "oversize": options.oversize,
        "coefficient": options.coefficient,
        "padded": options.padded,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # oversize samples were asked for; the table shows what they cost
        return plan_mini_batch(lengths, **(arguments | changes))


def measure(plans: list[BatchPlan]) -> dict[str, float]:
    """Return numbers of the plans of several mini-batches.

    Args:
        plans: One per mini-batch.

    Returns:
        ``efficiency`` (ideal / planned time), ``fill`` (tokens / budget), ``micro_steps`` per optimizer step, ``imbalance`` (slowest /
        mean rank of a micro-step, mean and ``imbalance_max``), ``fillers``, ``max_tokens``, and ``step_workload``: sum of
        the slowest rank's workloads.
    """
    busy = sum(int(plan.workloads.sum()) if not plan.padded else _padded_work(plan) for plan in plans)
    planned = sum(plan.step_workload() * plan.dp_size for plan in plans)
    imbalance = [value for plan in plans for value in plan.imbalance()]
    micro_steps = sum(plan.num_micro_steps for plan in plans)
    tokens = [plan.num_tokens(rank, step) for plan in plans for rank in range(plan.dp_size) for step in range(plan.num_micro_steps)]
    return {
        "efficiency": busy / planned if planned else 1.0,
        "fill": statistics.fmean(plan.fill() for plan in plans),
        "micro_steps": micro_steps / len(plans),
        "imbalance": statistics.fmean(imbalance),
        "imbalance_max": max(imbalance),
        "fillers": float(sum(plan.num_fillers for plan in plans)),
        "max_tokens": float(max(tokens)),
        "step_workload": float(sum(plan.step_workload() for plan in plans)),
    }


def _padded_work(plan: BatchPlan) -> int:
    return sum(plan.workload(rank, step) for rank in range(plan.dp_size) for step in range(plan.num_micro_steps))


def sweep(mini_batches: list[list[int]], options: argparse.Namespace) -> list[dict[str, float]]:
    """Plan under other budgets and sequence-parallel sizes on the same number of GPUs.

    The estimated time is the sum of the slowest rank's workloads divided by the sequence-parallel size, plus an overhead of 1024 tokens
    per micro-step (``MICRO_STEP_OVERHEAD``). Communication of sequence parallelism is not in it.

    Args:
        mini_batches: Lengths of each mini-batch.
        options: As parsed.

    Returns:
        One row per setting that can run, cheapest first. ``time`` is relative to the cheapest, ``memory`` (most tokens that a GPU holds at
        once) is ``max_tokens`` / ``sp``, and ``choice`` is 1 for the setting that :func:`chosen` takes.
    """
    if options.max_tokens_per_rank is None:
        raise ValueError("--sweep varies the token budget: pass --max-tokens-per-rank as its middle.")
    world = options.dp * options.sp
    longest = max(max(part) for part in mini_batches)
    rows = []
    for sp in [size for size in (1, 2, 4, 8, 16, 32, 64) if world % size == 0]:
        for budget in sorted({max(1, options.max_tokens_per_rank * factor // 4) for factor in (1, 2, 3, 4, 6, 8, 16)}):
            if budget * sp < longest and options.oversize == "error":
                continue
            plans = [make_plan(part, options, dp_size=world // sp, sp_size=sp, max_tokens_per_rank=budget) for part in mini_batches]
            numbers = measure(plans)
            overhead = MICRO_STEP_OVERHEAD * options.coefficient * numbers["micro_steps"] * len(plans)
            rows.append(
                {
                    "dp": world // sp,
                    "sp": sp,
                    "max_tokens_per_rank": budget,
                    **numbers,
                    "memory": -(-numbers["max_tokens"] // sp),
                    "time": numbers["step_workload"] / sp + overhead,
                }
            )
    if not rows:
        raise ValueError(
            f"The longest sample has {longest} tokens: no setting of the sweep holds it. Raise --max-tokens-per-rank, or pass"
            " --oversize isolate."
        )
    fastest = min(row["time"] for row in rows)
    relative = [row | {"time": row["time"] / fastest} for row in rows]
    # Of settings within a thousandth the simplest first: sequence parallelism communicates, and a larger budget needs more memory.
    ordered = sorted(relative, key=lambda row: (round(row["time"], 3), row["sp"], row["max_tokens_per_rank"]))
    # Budgets that nothing fills make the same micro-batches: the smallest of them stands for all.
    distinct: dict[tuple[float, ...], dict[str, float]] = {}
    for row in sorted(ordered, key=lambda row: row["max_tokens_per_rank"]):
        distinct.setdefault(tuple(row[name] for name in ("sp", "micro_steps", "max_tokens", "step_workload")), row)
    kept = [row for row in ordered if row in distinct.values()]
    best = chosen(kept)
    return [row | {"choice": float(row is best)} for row in kept]


def chosen(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the setting to take: of those that cost next to nothing more than the cheapest, the one that holds fewest tokens on a GPU.

    Args:
        rows: Of a sweep, cheapest first.
    """
    near = [row for row in rows if row["time"] <= rows[0]["time"] * (1 + NEGLIGIBLE)]
    return min(near, key=lambda row: (row["max_tokens_per_rank"], row["sp"]))

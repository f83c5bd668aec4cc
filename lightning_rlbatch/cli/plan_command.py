"""``rlbatch plan``: plan real lengths, and compare with no balancing and with the two-layer baseline."""

import argparse
import json
import statistics
import warnings
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_rlbatch.cli.lengths import read_lengths
from lightning_rlbatch.functional.plan import BatchPlan
from lightning_rlbatch.functional.planning import MICRO_STEP_OVERHEAD, plan_mini_batch
from lightning_rlbatch.functional.workload import DEFAULT_COEFFICIENT

METHODS: dict[str, dict[str, Any]] = {
    "before (contiguous)": {"balance": False},
    "two-layer (per_rank)": {"planner": "per_rank"},
    "ours (global)": {},
}


def main(arguments: list[str]) -> int:
    """Run the subcommand.

    Args:
        arguments: After ``plan``.

    Returns:
        0, or 1 if the lengths cannot be planned this way.
    """
    options = _parser().parse_args(arguments)
    console = Console()
    try:
        lengths = read_lengths(options.lengths, options.field)
        mini_batches = _mini_batches(lengths, options.mini_batch_size)
        if options.sweep:
            settings = sweep(mini_batches, options)
            _print_json({"settings": settings}) if options.json else _show_sweep(settings, console, options)
            return 0
        plans = {name: [_plan(part, options, **method) for part in mini_batches] for name, method in METHODS.items()}
    except (ValueError, TypeError) as error:
        Console(stderr=True).print(Text(str(error), style="bold red"))
        return 1
    rows: list[dict[str, Any]] = [{"method": name, **measure(found)} for name, found in plans.items()]
    if options.json:
        _print_json({"num_samples": len(lengths), "num_tokens": sum(lengths), "methods": rows})
    else:
        _show(rows, plans["ours (global)"], lengths, console)
    if options.picture:
        from lightning_rlbatch.callbacks.pictures import batch_plan_picture

        batch_plan_picture(plans["ours (global)"][0], options.picture)
        Console(stderr=True).print(Text(f"Wrote {options.picture}" + (" (the first mini-batch)." if len(mini_batches) > 1 else ".")))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlbatch plan", description="Plan real sample lengths over ranks and micro-steps.")
    parser.add_argument("lengths", help="JSONL of numbers or objects with a length, or plain numbers")
    parser.add_argument("--field", help="field of the objects that holds the length")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument("--sp", type=int, default=1, help="sequence-parallel size (default 1)")
    parser.add_argument("--max-tokens-per-rank", type=int, help="token budget of one GPU")
    parser.add_argument("--micro-batch-size", type=int, help="samples per micro-batch instead of a budget")
    parser.add_argument("--mini-batch-size", type=int, help="samples of one optimizer step (default: all); the file is cut in order")
    parser.add_argument("--equal-size", action="store_true", help="as many samples on every rank, plus or minus one")
    parser.add_argument("--oversize", choices=("error", "isolate"), default="error", help="what to do with a sample above the budget")
    parser.add_argument("--coefficient", type=int, default=DEFAULT_COEFFICIENT, help="linear cost of a token (default %(default)s)")
    parser.add_argument("--padded", action="store_true", help="micro-batches are padded to their longest sample")
    parser.add_argument("--sweep", action="store_true", help="try budgets and sequence-parallel sizes on the same dp x sp GPUs")
    parser.add_argument("--picture", metavar="PNG", help="draw the first mini-batch, before and after")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _mini_batches(lengths: list[int], size: int | None) -> list[list[int]]:
    if size is not None and size < 1:
        raise ValueError(f"--mini-batch-size must be at least 1 but is {size}.")
    step = size or len(lengths)
    return [lengths[start : start + step] for start in range(0, len(lengths), step)]


def _plan(lengths: list[int], options: argparse.Namespace, **changes: Any) -> BatchPlan:
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
        One row per setting that can run, cheapest first; ``time`` is relative to the cheapest.
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
            plans = [_plan(part, options, dp_size=world // sp, sp_size=sp, max_tokens_per_rank=budget) for part in mini_batches]
            numbers = measure(plans)
            overhead = MICRO_STEP_OVERHEAD * options.coefficient * numbers["micro_steps"] * len(plans)
            rows.append(
                {"dp": world // sp, "sp": sp, "max_tokens_per_rank": budget, **numbers, "time": numbers["step_workload"] / sp + overhead}
            )
    if not rows:
        raise ValueError(
            f"The longest sample has {longest} tokens: no setting of the sweep holds it. Raise --max-tokens-per-rank, or pass"
            " --oversize isolate."
        )
    fastest = min(row["time"] for row in rows)
    relative = [row | {"time": row["time"] / fastest} for row in rows]
    # Of settings within a thousandth the simplest first: sequence parallelism communicates, and a larger budget needs more memory.
    return sorted(relative, key=lambda row: (round(row["time"], 3), row["sp"], row["max_tokens_per_rank"]))


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=2))


def _show(rows: list[dict[str, Any]], plans: list[BatchPlan], lengths: list[int], console: Console) -> None:
    plan = plans[0]
    cap = f"budget {plan.budget:,} tokens" if plan.budget is not None else f"{plan.micro_batch_size} samples"
    console.print(
        Text(
            f"{len(lengths)} samples, {sum(lengths):,} tokens (longest {max(lengths):,}, mean {sum(lengths) / len(lengths):,.0f}), "
            f"{len(plans)} mini-batch(es), {plan.dp_size} data-parallel ranks x {plan.sp_size}, {cap} per micro-batch",
            style="bold",
        )
    )
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    for name in ("effi-\nciency", "time", "micro-\nsteps", "imbalance\nmean, max", "fill", "largest", "fil-\nlers"):
        table.add_column(name, justify="right", no_wrap=True)
    ours = rows[-1]["step_workload"]
    for row in rows:
        table.add_row(
            row["method"],
            f"{100 * row['efficiency']:.1f}%",
            f"{row['step_workload'] / ours:.3f}" if ours else "-",
            f"{row['micro_steps']:g}",
            f"{row['imbalance']:.2f} {row['imbalance_max']:.2f}",
            f"{100 * row['fill']:.0f}%",
            f"{row['max_tokens']:,.0f}",
            f"{row['fillers']:.0f}",
        )
    console.print(table)
    console.print(
        Text("efficiency: ideal / planned time. time: relative to ours. imbalance: slowest / mean rank of a micro-step.", style="dim")
    )
    bottleneck = plan.bottleneck()
    if bottleneck is not None:
        console.print(Text(bottleneck, style="yellow"))


def _show_sweep(rows: list[dict[str, float]], console: Console, options: argparse.Namespace) -> None:
    table = Table(title=f"{options.dp * options.sp} GPUs, cheapest first", title_justify="left", box=box.SIMPLE, pad_edge=False)
    for name in ("dp", "sp", "max tokens per rank", "time", "efficiency", "micro-steps", "fill", "imbalance"):
        table.add_column(name, justify="right")
    for row in rows[:20]:
        table.add_row(
            f"{row['dp']:g}",
            f"{row['sp']:g}",
            f"{row['max_tokens_per_rank']:g}",
            f"{row['time']:.3f}",
            f"{100 * row['efficiency']:.1f}%",
            f"{row['micro_steps']:g}",
            f"{100 * row['fill']:.1f}%",
            f"{row['imbalance']:.3f}",
        )
    console.print(table)
    best = rows[0]
    console.print(
        Text(f"Cheapest: max_tokens_per_rank={best['max_tokens_per_rank']:g}, sequence_parallel_size={best['sp']:g}.", style="bold"),
        Text("Communication of sequence parallelism and memory are not in the estimate.", style="dim"),
    )

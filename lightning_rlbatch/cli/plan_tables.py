"""Tables of plans for the terminal."""

import argparse
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_rlbatch.cli.numbers import number, percent
from lightning_rlbatch.cli.plan_numbers import NEGLIGIBLE
from lightning_rlbatch.functional.plan import BatchPlan

MAX_ROWS = 20


def show_methods(rows: list[dict[str, Any]], plans: list[BatchPlan], mini_batches: list[list[int]], console: Console) -> None:
    """Print what each method makes of all mini-batches.

    Args:
        rows: Numbers of each method; ours last.
        plans: Ours, one per mini-batch.
        mini_batches: Lengths.
        console: Where.
    """
    plan, lengths = plans[0], [length for part in mini_batches for length in part]
    cap = f"budget {number(plan.budget)} tokens" if plan.budget is not None else f"{plan.micro_batch_size} samples"
    console.print(
        Text(
            f"{number(len(lengths))} samples, {number(sum(lengths))} tokens (longest {number(max(lengths))}, mean"
            f" {number(sum(lengths) / len(lengths))}), "
            f"{len(plans)} mini-batch{'es' * (len(plans) > 1)}, {plan.dp_size} data-parallel ranks x {plan.sp_size}, {cap} per micro-batch",
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
            percent(row["efficiency"]),
            number(row["step_workload"] / ours, 3) if ours else "-",
            number(row["micro_steps"], 2),
            f"{number(row['imbalance'], 2)} {number(row['imbalance_max'], 2)}",
            percent(row["fill"]),
            number(row["max_tokens"]),
            number(row["fillers"]),
        )
    console.print(table)
    console.print(
        Text("efficiency: ideal / planned time. time: relative to ours. imbalance: slowest / mean rank of a micro-step.", style="dim")
    )
    bottleneck = plan.bottleneck()
    if bottleneck is not None:
        console.print(Text(bottleneck, style="yellow"))


def show_iterations(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a line per iteration, evenly spaced ones where there are many.

    Args:
        rows: Number, sizes, and numbers of the plans before and after.
        console: Where.
    """
    if not rows:
        return
    shown = [rows[index * len(rows) // MAX_ROWS] for index in range(MAX_ROWS)] if len(rows) > MAX_ROWS else rows
    some = "" if len(shown) == len(rows) else f", {len(shown)} of {len(rows)}"
    table = Table(title=f"Iterations{some}", title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("iter-\nation", "samples", "tokens", "longest", "steps", "micro-\nsteps", "efficiency\nbefore, ours", "fill", "largest"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in shown:
        before, planned = row["before"], row["planned"]
        table.add_row(
            str(row["iteration"]),
            number(row["num_samples"]),
            number(row["num_tokens"]),
            number(row["longest"]),
            str(len(row["mini_batches"])),
            number(planned["micro_steps"], 2),
            f"{percent(before['efficiency'])} {percent(planned['efficiency']):>6}",
            percent(planned["fill"]),
            number(planned["max_tokens"]),
        )
    console.print(table)
    console.print(Text("steps: optimizer steps. micro-steps: per optimizer step. largest: tokens of a micro-batch.", style="dim"))


def show_sweep(rows: list[dict[str, float]], console: Console, options: argparse.Namespace) -> None:
    """Print the settings of a sweep.

    Args:
        rows: From ``sweep``, cheapest first.
        console: Where.
        options: As parsed.
    """
    title = f"{options.dp * options.sp} GPUs, cheapest first"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("dp", "sp", "max tokens\nper rank", "tokens\non a GPU", "time", "effi-\nciency", "micro-\nsteps", "fill", "imbal-\nance"):
        table.add_column(name, justify="right")
    best = next(row for row in rows if row["choice"])
    shown = rows[:MAX_ROWS] if best in rows[:MAX_ROWS] else [*rows[: MAX_ROWS - 1], best]
    for row in shown:
        table.add_row(
            "*" if row is best else "",
            number(row["dp"]),
            number(row["sp"]),
            number(row["max_tokens_per_rank"]),
            number(row["memory"]),
            number(row["time"], 3),
            percent(row["efficiency"]),
            number(row["micro_steps"], 2),
            percent(row["fill"]),
            number(row["imbalance"], 2),
        )
    console.print(table)
    console.print(Text(_advice(rows[0], best), style="bold"))
    console.print(
        Text(
            "tokens on a GPU: most at once, what activations grow with. Communication of sequence parallelism is not counted.", style="dim"
        )
    )


def _advice(cheapest: dict[str, float], best: dict[str, float]) -> str:
    """Say which setting to take, and what the cheapest one would cost and gain."""
    setting = "max_tokens_per_rank={max_tokens_per_rank:g}, sequence_parallel_size={sp:g}"
    if best is cheapest:
        return f"* Take {setting.format(**best)}: the cheapest, and nothing smaller is within {percent(NEGLIGIBLE)} of it."
    return (
        f"* Take {setting.format(**best)}: it holds {number(best['memory'])} tokens on a GPU and takes {percent(best['time'] - 1)} longer"
        f" than the cheapest ({setting.format(**cheapest)}), which holds {number(cheapest['memory'])}."
    )

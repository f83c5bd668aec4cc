"""Draw the pictures of docs/balancing.md: ``python docs/make_balancing_pictures.py`` (needs matplotlib, takes some seconds)."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.balancing import FAMILIES, longest, sample_lengths
from lightning_rlbatch.functional.balancing import balanced_partition, karmarkar_karp
from lightning_rlbatch.functional.bounds import equal_partition_bound, step_workload_bound
from lightning_rlbatch.functional.plan import BatchPlan
from lightning_rlbatch.functional.planning import plan_mini_batch
from lightning_rlbatch.functional.workload import workload_array

IMAGES = Path(__file__).parent / "images"
OURS, BASELINE, IDLE, BOUND = "#1f6feb", "#d9822b", "#e6e6e6", "#333333"


def draw_timeline(axes: Axes, plan: BatchPlan, title: str, end: float) -> None:
    """Draw every rank's micro-batches; ranks wait (grey) at the end of every micro-step."""
    start = 0.0
    for step in range(plan.num_micro_steps):
        slowest = max(plan.workload(rank, step) for rank in range(plan.dp_size))
        for rank in range(plan.dp_size):
            work = plan.workload(rank, step)
            axes.barh(rank, slowest / end, left=start / end, color=IDLE, height=0.86)
            axes.barh(rank, work / end, left=start / end, color=plt.get_cmap("viridis")(0.15 + 0.7 * (step % 4) / 3), height=0.86)
            share = f"{100 * plan.num_tokens(rank, step) / (plan.budget or 1):.0f}%"
            axes.text(
                (start + 0.5 * slowest) / end, rank, share, ha="center", va="center", fontsize=6.5, color="white" if work else "black"
            )
        start += slowest
        axes.axvline(start / end, color="black", linewidth=1)
    axes.set_title(f"{title}: {plan.num_micro_steps} micro-steps, {100 * plan.efficiency():.0f}% of the time used", fontsize=10, loc="left")
    axes.set_yticks(range(plan.dp_size), [f"rank {rank}" for rank in range(plan.dp_size)], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.01)
    axes.spines[["top", "right"]].set_visible(False)


def timeline() -> None:
    """Draw one optimizer step of both planners."""
    lengths = sample_lengths("lognormal", 128, 4)
    options = {"dp_size": 8, "max_tokens_per_rank": 17408}
    baseline, plan = (plan_mini_batch(lengths, planner=planner, **options) for planner in ("per_rank", "global"))
    end = float(max(baseline.step_workload(), plan.step_workload()))
    figure, panels = plt.subplots(2, 1, figsize=(9, 5.6), sharex=True, layout="constrained")
    draw_timeline(panels[0], baseline, 'planner="per_rank" (two layers of Karmarkar-Karp)', end)
    draw_timeline(panels[1], plan, 'planner="global" (default)', end)
    panels[1].set_xlabel("time (modelled); grey: waiting for the slowest rank; numbers: tokens / budget")
    figure.savefig(IMAGES / "balancing_timeline.png", dpi=110)


def partition_gaps() -> None:
    """Draw how far equal-count partitions are from the lower bound."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    floor = 1e-6
    for axes, (num_samples, num_parts) in zip(panels, ((512, 64), (4096, 64))):
        rows = []
        for family in FAMILIES:
            weights = workload_array(sample_lengths(family, num_samples, 0))
            bound = equal_partition_bound(weights, num_parts)
            for method in (karmarkar_karp, balanced_partition):
                parts = method(weights, num_parts, equal_size=True)
                rows.append(max(max(int(weights[part].sum()) for part in parts) / bound - 1, floor))
        place = np.arange(len(FAMILIES))
        axes.bar(place - 0.2, rows[0::2], 0.4, color=BASELINE, label="karmarkar_karp")
        axes.bar(place + 0.2, rows[1::2], 0.4, color=OURS, label="balanced_partition")
        axes.set_yscale("log")
        axes.set_ylim(floor, 1)
        axes.set_xticks(place, FAMILIES, rotation=30, ha="right", fontsize=8)
        axes.set_title(f"{num_samples // num_parts} samples per rank ({num_parts} ranks)", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("heaviest rank above\nthe lower bound")
    panels[0].set_yticks([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1], ["<1e-6", "1e-5", "0.01%", "0.1%", "1%", "10%", "100%"])
    panels[1].legend(frameon=False, fontsize=8)
    figure.savefig(IMAGES / "balancing_partition.png", dpi=110)


def efficiency() -> None:
    """Draw the efficiency of both planners and its bound, averaged over the length families."""
    figure, panels = plt.subplots(1, 3, figsize=(9, 3.2), sharey=True, layout="constrained")
    for axes, per_rank in zip(panels, (8, 32, 64)):
        values: dict[str, list[float]] = {"bound": [], "global": [], "per_rank": []}
        for factor in (1, 2, 4):
            cell: dict[str, list[float]] = {name: [] for name in values}
            for family in FAMILIES:
                lengths = sample_lengths(family, 16 * per_rank, 1)
                work, budget = workload_array(lengths), longest(family) * factor
                cell["bound"].append(int(work.sum()) / (16 * step_workload_bound(lengths, work, 16, budget)))
                for planner in ("global", "per_rank"):
                    cell[planner].append(plan_mini_batch(lengths, dp_size=16, max_tokens_per_rank=budget, planner=planner).efficiency())
            for name, measured in cell.items():
                values[name].append(float(np.mean(measured)))
        place = np.arange(3)
        axes.bar(place - 0.2, values["per_rank"], 0.4, color=BASELINE, label='planner="per_rank"')
        axes.bar(place + 0.2, values["global"], 0.4, color=OURS, label='planner="global"')
        axes.hlines(values["bound"], place - 0.45, place + 0.45, color=BOUND, linewidth=1.5, label="upper bound of any plan")
        axes.set_xticks(place, ["x1", "x2", "x4"])
        axes.set_xlabel("budget / longest sample")
        axes.set_title(f"{per_rank} samples per rank", fontsize=10)
        axes.set_ylim(0, 1.03)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("efficiency (ideal / planned time)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(IMAGES / "balancing_efficiency.png", dpi=110)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    timeline()
    partition_gaps()
    efficiency()

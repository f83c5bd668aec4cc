"""Pictures of the Tower of Hanoi example: what was learnt, and how mini-batches were cut."""

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from lightning_rlbatch.functional import BatchPlan, plan_mini_batch

_BLUE, _ORANGE, _GREY, _RED = "#2166ac", "#d6604d", "#666666", "#b2182b"
_WINDOW = 5  # iterations that a smoothed curve averages, centered


def read_curve(csv_path: str | os.PathLike[str], column: str, *, x: str = "epoch") -> tuple[list[float], list[float]]:
    """Return the ``x`` values of a CSVLogger's file and the mean of ``column`` for each; rows without a value are left out.

    Raises:
        ValueError: If the file has no such column; the message lists what it has.
    """
    with open(csv_path, newline="") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or []
        if column not in names:
            raise ValueError(f"{csv_path} has no column {column!r}. It has: {', '.join(names)}.")
        values: dict[float, list[float]] = {}
        for row in reader:
            if row[column] not in ("", None):
                values.setdefault(float(row[x]), []).append(float(row[column]))
    return list(values), [sum(same) / len(same) for same in values.values()]


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def _noisy_curve(axes: Axes, xs: Sequence[float], ys: Sequence[float], color: str, label: str) -> None:
    reach = _WINDOW // 2
    windows = [ys[max(0, i - reach) : i + reach + 1] for i in range(len(ys))]
    smooth = [sum(window) / len(window) for window in windows]
    axes.plot(xs, ys, color=color, alpha=0.3, linewidth=1)
    axes.plot(xs, smooth, color=color, linewidth=2, label=label)


def reward_curve(
    csv_path: str | os.PathLike[str],
    png_path: str | os.PathLike[str],
    *,
    reward: str = "reward/hanoi_reward",
    accuracy: str = "val/reward/hanoi_reward",
    initial_accuracy: float | None = None,
) -> None:
    """Draw reward and held-out accuracy, response lengths, and entropy over the RL iterations.

    Args:
        csv_path: ``metrics.csv`` of the RL phase.
        png_path: Where the picture goes.
        reward: Column of the training reward, once per iteration.
        accuracy: Column of the held-out accuracy; left out of the picture if the file lacks it.
        initial_accuracy: Held-out accuracy before RL, drawn at iteration 0.
    """
    figure = Figure(figsize=(9, 6), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[1.7, 1])
    main, lengths, entropy = figure.add_subplot(grid[0, :]), figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    xs, ys = read_curve(csv_path, reward)
    _noisy_curve(main, xs, ys, _BLUE, "training reward (256 rollouts per iteration)")
    try:
        held_x, held_y = read_curve(csv_path, accuracy)
    except ValueError:
        held_x, held_y = [], []
    held_x = [x + 1 for x in held_x]  # measured after the iteration
    if initial_accuracy is not None:
        held_x, held_y = [0.0, *held_x], [initial_accuracy, *held_y]
    if held_y:
        main.plot(held_x, held_y, "o-", color=_ORANGE, markersize=6, linewidth=1.5, label="sampled accuracy, held-out prompts")
        main.annotate(f"{held_y[-1]:.2f}", (held_x[-1], held_y[-1]), (8, -3), textcoords="offset points", color=_ORANGE, fontsize=10)
    main.set(ylim=(0, 1.03), xlabel="iteration", title="Solved puzzles: exact success, judged by reasoning-gym")
    main.legend(loc="lower right", frameon=False)
    for column, color, style in (("length/p95", _GREY, "--"), ("length/mean", _BLUE, "-")):
        xs, ys = read_curve(csv_path, column)
        lengths.plot(xs, ys, style, color=color, linewidth=1.5, label=column.removeprefix("length/"))
    lengths.set(ylim=(0, None), xlabel="iteration", title="Response length [tokens]")
    lengths.legend(loc="lower right", frameon=False, ncols=2)
    xs, ys = read_curve(csv_path, "train/entropy")
    entropy.plot(xs, ys, color=_BLUE, linewidth=1.5)
    entropy.set(ylim=(0, None), xlabel="iteration", title="Entropy of the policy [nats per token]")
    for axes in (main, lengths, entropy):
        _plain(axes)
    figure.savefig(Path(png_path), dpi=150)


def _draw_plan(axes: Axes, plan: BatchPlan, seq_lens: Sequence[int], norm: Normalize, title: str) -> None:
    """Draw one bar per rank and micro-step; samples are its segments."""
    width = 0.8 / plan.dp_size
    colors = colormaps["viridis"]
    centers: list[float] = []
    for step in range(plan.num_micro_steps):
        for rank in range(plan.dp_size):
            center, height = step + (rank - (plan.dp_size - 1) / 2) * width, 0
            centers.append(center)
            for index in sorted(plan.assignment[rank][step], key=lambda i: -seq_lens[i]):
                axes.bar(
                    center, seq_lens[index], width * 0.92, height, color=colors(norm(seq_lens[index])), edgecolor="white", linewidth=0.4
                )
                height += seq_lens[index]
            box = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
            axes.annotate(str(height or "filler"), (center, height), (0, 3), textcoords="offset points", ha="center", fontsize=7, bbox=box)
    axes.set_xticks(centers, [f"r{rank}" for rank in range(plan.dp_size)] * plan.num_micro_steps, fontsize=7, color=_GREY)
    steps = axes.secondary_xaxis(location=0)
    steps.set_xticks(range(plan.num_micro_steps), [f"\nmicro-step {step}" for step in range(plan.num_micro_steps)])
    steps.tick_params(length=0)
    axes.set_xlim(-0.6, plan.num_micro_steps - 0.4)
    axes.set_title(f"{title}: {100 * plan.efficiency():.1f}% efficient", fontsize=11)
    if plan.budget is not None:
        axes.axhline(plan.budget, color=_RED, linestyle="--", linewidth=1.2, zorder=0.5)
    _plain(axes)


def batch_plan_picture(plan: BatchPlan, seq_lens: Sequence[int], png_path: str | os.PathLike[str]) -> None:
    """Draw which tokens each rank holds in each micro-step, cut in the given order (before) and as planned (after).

    Args:
        plan: How the mini-batch is cut.
        seq_lens: Tokens of every sample, in the order of the plan's indices.
        png_path: Where the picture goes.
    """
    lengths = [int(length) for length in seq_lens]
    before = plan_mini_batch(
        lengths,
        dp_size=plan.dp_size,
        max_tokens_per_rank=plan.max_tokens_per_rank,
        micro_batch_size=plan.micro_batch_size,
        sp_size=plan.sp_size,
        group_size=plan.group_size,
        balance=False,
    )
    # what one rank does while another works on is lost: all ranks wait for the slowest in every micro-step
    norm = Normalize(0, max(lengths, default=1))
    steps = [before.num_micro_steps, plan.num_micro_steps]
    figure = Figure(figsize=(min(16.0, max(9.5, 3.0 + 0.45 * plan.dp_size * sum(steps))), 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=steps)
    _draw_plan(left, before, lengths, norm, "In the order given")
    _draw_plan(right, plan, lengths, norm, "As planned")
    left.set_ylabel("tokens of a micro-batch")
    if plan.budget is not None:
        left.set_ylim(0, plan.budget * 1.15)
        left.text(-0.58, plan.budget * 1.08, f"token budget {plan.budget}", color=_RED, fontsize=9, va="bottom")
    figure.colorbar(ScalarMappable(norm, "viridis"), ax=[left, right], label="tokens of a sample", pad=0.01)
    figure.suptitle(
        f"{len(lengths)} samples, {sum(lengths)} tokens, {plan.dp_size} data-parallel ranks: "
        "one bar per rank (r) and micro-step, one segment per sample",
        fontsize=11,
    )
    figure.savefig(Path(png_path), dpi=150)

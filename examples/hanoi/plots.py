"""Pictures of the Tower of Hanoi example: what was learnt."""

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
    lengths.set(ylim=(0, 1.05 * lengths.get_ylim()[1]), xlabel="iteration", title="Response length [tokens]")
    lengths.legend(loc="lower right", frameon=False, ncols=2)
    xs, ys = read_curve(csv_path, "train/entropy")
    entropy.plot(xs, ys, color=_BLUE, linewidth=1.5)
    entropy.set(ylim=(0, 1.05 * entropy.get_ylim()[1]), xlabel="iteration", title="Entropy of the policy [nats per token]")
    for axes in (main, lengths, entropy):
        _plain(axes)
    figure.savefig(Path(png_path), dpi=150)

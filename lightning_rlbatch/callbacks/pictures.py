"""Draw how a mini-batch was cut and spread: one bar per rank and micro-step, in the order given and as planned."""

import importlib
import io
import os
import warnings
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_rlbatch.functional.plan import BatchPlan
from lightning_rlbatch.functional.plan_input import OversizeWarning
from lightning_rlbatch.functional.planning import plan_mini_batch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RED, _GREY = "#b2182b", "#666666"
_IDLE_TO_BUSY = ("#d6604d", "#f4a582", "#92c5de", "#2166ac")
MAX_LABELLED_BARS = 40  # bars of a panel up to which each one is labelled and its samples are told apart


def require_matplotlib() -> None:
    """Raise unless pictures can be drawn.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to get it.
    """
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Pictures are drawn with matplotlib, which is not installed. Run: pip install 'lightning-rlbatch[examples]'."
        ) from error


def contiguous_plan(plan: BatchPlan) -> BatchPlan:
    """Return the plan of the same samples without balancing: contiguous blocks, cut in the order given.

    Args:
        plan: What to compare with; sizes, budget and padding are taken from it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OversizeWarning)  # the plan itself has warned
        return plan_mini_batch(
            plan.lengths,
            dp_size=plan.dp_size,
            sp_size=plan.sp_size,
            max_tokens_per_rank=plan.max_tokens_per_rank,
            micro_batch_size=plan.micro_batch_size,
            coefficient=_coefficient(plan),
            group_size=plan.group_size,
            padded=plan.padded,
            oversize="isolate",
            balance=False,
        )


def _coefficient(plan: BatchPlan) -> int:
    """Return the coefficient that the plan's workloads were made with: workload = coefficient * length + length**2."""
    if not plan.num_samples:
        return 0
    longest = int(np.argmax(plan.lengths))
    length = int(plan.lengths[longest])
    return max(0, int(plan.workloads[longest]) // length - length) if length else 0


def batch_plan_picture(plan: BatchPlan, path: str | os.PathLike[str], *, title: str | None = None) -> None:
    """Draw which tokens each rank holds in each micro-step, before (contiguous blocks) and after (as planned).

    A bar's height is its tokens; its colour is how busy its rank is during the micro-step, in which all ranks wait for the slowest.
    Both panels have the same scales, so that fewer micro-steps show as empty space.

    Args:
        plan: How the mini-batch is cut.
        path: Picture file; its ending chooses the format (``.png``, ``.svg``, ``.pdf``, or ``.html`` for a page that holds the picture).
        title: Above the panels; default: what the mini-batch holds.

    Raises:
        ValueError: No picture has such an ending.
        ModuleNotFoundError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure

    before = contiguous_plan(plan)
    steps = max(before.num_micro_steps, plan.num_micro_steps)
    colours = ScalarMappable(Normalize(0, 1), LinearSegmentedColormap.from_list("busy", _IDLE_TO_BUSY))
    figure = Figure(figsize=(float(np.clip(3.0 + 0.32 * plan.dp_size * steps, 8.0, 18.0)), 7.0), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    tallest = max(p.num_tokens(r, k) for p in (before, plan) for r in range(p.dp_size) for k in range(p.num_micro_steps))
    top = max(tallest, plan.budget if plan.budget is not None and plan.budget <= 2.5 * tallest else 0, 1)
    panels[0].set_ylim(0, 1.16 * top)
    for axes, shown, name in zip(panels, (before, plan), ("before: contiguous blocks in the order given", "after: as planned")):
        many = "" if shown.num_micro_steps == 1 else "s"
        facts = f"{shown.num_micro_steps} micro-step{many}, ranks busy {100 * shown.efficiency():.1f}% of the time"
        _draw(axes, shown, colours, f"{name}, {facts}")
    panels[0].set_xlim(-0.5, steps - 0.5)
    panels[1].set_xticks(range(steps), [str(step) for step in range(steps)])
    panels[1].set_xlabel(f"micro-step (in each: {plan.dp_size} bars, one per data-parallel rank)")
    figure.colorbar(colours, ax=list(panels), label="busy share of the micro-step (the rest is waiting)", pad=0.01, aspect=30)
    total = f"{plan.num_samples} samples, {int(plan.lengths.sum()):,} tokens, {plan.dp_size} data-parallel ranks"
    figure.suptitle(title or total + (f" x {plan.sp_size} sequence-parallel" if plan.sp_size > 1 else ""), fontsize=12)
    if Path(path).suffix.lower() != ".html":
        figure.savefig(Path(path), dpi=130)
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    picture = drawn.getvalue()
    head = '<head><meta charset="utf-8"><title>Batch plan</title></head>'
    page = f'<!DOCTYPE html>\n<html lang="en">{head}<body>{picture[picture.index("<svg") :]}</body></html>\n'
    Path(path).write_text(page, encoding="utf-8")


def _draw(axes: "Axes", plan: BatchPlan, colours: Any, title: str) -> None:
    from matplotlib.collections import PolyCollection

    ranks, steps = plan.dp_size, plan.num_micro_steps
    labelled = ranks * steps <= MAX_LABELLED_BARS
    width = 0.86 / ranks
    boxes, shades = [], []
    for step in range(steps):
        slowest = max(plan.workload(rank, step) for rank in range(ranks))
        for rank in range(ranks):
            busy = plan.workload(rank, step) / slowest if slowest else 0.0
            left = step - 0.43 + rank * width
            right = left + width * (0.92 if ranks <= 16 else 1.0)
            heights = _segments(plan, rank, step) if labelled else [0, plan.num_tokens(rank, step)]
            boxes += [((left, low), (left, high), (right, high), (right, low)) for low, high in pairwise(heights)]
            shades += [busy] * (len(heights) - 1)
            if labelled:
                _label(axes, (left + right) / 2, rank, plan.num_tokens(rank, step), few=ranks <= 4)
    edge = {"edgecolor": "white", "linewidth": 0.5} if labelled else {"edgecolor": "none"}
    axes.add_collection(PolyCollection(boxes, facecolor=colours.to_rgba(np.array(shades)), **edge))
    _draw_budget(axes, plan.budget)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel("tokens of a micro-batch")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_budget(axes: "Axes", budget: int | None) -> None:
    if budget is None:
        return
    across, top = axes.get_yaxis_transform(), axes.get_ylim()[1]
    beyond = budget > top
    if not beyond:
        axes.axhline(budget, color=_RED, linestyle="--", linewidth=1.2)
    text = f"budget {budget:,}" + (" (far above this scale)" if beyond else "")
    height = 0.95 * top if beyond else budget
    axes.text(0.995, height, text, color=_RED, fontsize=8, ha="right", va="bottom", transform=across)


def _label(axes: "Axes", middle: float, rank: int, tokens: int, *, few: bool) -> None:
    text = f"rank {rank}\n{tokens or 'filler'}" if few else f"{rank}"
    background = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
    axes.text(middle, tokens, text, ha="center", va="bottom", fontsize=7, color=_GREY, bbox=background)


def _segments(plan: BatchPlan, rank: int, step: int) -> list[int]:
    """Return the boundaries between the samples of a bar, longest at the bottom."""
    lengths = sorted((int(plan.lengths[index]) for index in plan.assignment[rank][step]), reverse=True)
    return [0, *np.cumsum(lengths).tolist()]

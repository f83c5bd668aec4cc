"""Draw the pictures of docs/batch_sizes.md and docs/exactness.md from real plans.

Run ``python docs/make_concept_pictures.py`` (needs matplotlib, takes some seconds).
"""

import random
from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lightning_rlbatch.callbacks.pictures import batch_plan_picture
from lightning_rlbatch.data.batching import mini_batch_members
from lightning_rlbatch.functional import BatchPlan, PackedBatch, plan_mini_batch

IMAGES = Path(__file__).parent / "images"
RED, GREY, IDLE, BLUE, ORANGE = "#b2182b", "#555555", "#e6e6e6", "#1f6feb", "#d9822b"
EIGHT = [800, 6500, 1200, 4000, 9000, 2500, 1500, 7500]
SIXTEEN = [120, 3400, 560, 80, 7200, 950, 210, 4100, 330, 1500, 60, 2700, 880, 190, 5200, 640]


def plain(axes: Axes) -> None:
    """Take away what carries no information."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def stack(axes: Axes, place: float, lengths: Sequence[int], names: Sequence[str], colour: str, width: float = 0.7) -> None:
    """Draw one micro-batch: samples on top of each other, longest at the bottom, with the sum above."""
    low = 0
    for length, name in sorted(zip(lengths, names), reverse=True):
        axes.bar(place, length, width, low, color=colour, edgecolor="white", linewidth=1)
        if length > 0.055 * axes.get_ylim()[1]:
            axes.text(place, low + length / 2, name, ha="center", va="center", fontsize=8, color="white")
        low += length
    axes.text(place, low, f"{low:,}", ha="center", va="bottom", fontsize=9.5, fontweight="bold", color=GREY)


def static_and_dynamic() -> None:
    """Eight samples on one rank: two per micro-batch, and under a budget."""
    static = plan_mini_batch(EIGHT, dp_size=1, micro_batch_size=2, balance=False)
    dynamic = plan_mini_batch(EIGHT, dp_size=1, max_tokens_per_rank=13312)
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True, width_ratios=[4, 3])
    for axes, plan, colour, title in zip(panels, (static, dynamic), (ORANGE, BLUE), ("micro_batch_size: 2", "max_tokens_per_rank: 13312")):
        axes.set_ylim(0, 14500)
        totals = [plan.num_tokens(0, step) for step in range(plan.num_micro_steps)]
        for step, bucket in enumerate(plan.assignment[0]):
            lengths = [EIGHT[index] for index in bucket]
            stack(axes, step, lengths, [f"{length:,}" for length in lengths], colour)
        axes.set_title(
            f"{title}\n{len(totals)} micro-batches, largest / smallest = {max(totals) / min(totals):.2f}", fontsize=10.5, loc="left"
        )
        axes.set_xticks(range(len(totals)), [f"micro-batch {step}" for step in range(len(totals))], fontsize=9)
        plain(axes)
    panels[1].axhline(13312, color=RED, linestyle="--", linewidth=1.2)
    panels[1].text(2.45, 13400, "budget 13,312: a hard cap", color=RED, fontsize=9, ha="right", va="bottom")
    panels[0].set_ylabel("tokens")
    figure.savefig(IMAGES / "static_and_dynamic.png", dpi=130)


def draw_ranks(axes: Axes, plan: BatchPlan, title: str, end: float) -> None:
    """Draw what each rank does in one micro-step, and how long it waits."""
    slowest = max(plan.workload(rank, 0) for rank in range(plan.dp_size))
    for rank in range(plan.dp_size):
        left = 0.0
        axes.barh(rank, slowest / end, color=IDLE, height=0.8)
        for index in sorted(plan.assignment[rank][0], key=lambda index: -SIXTEEN[index]):
            width = int(plan.workloads[index]) / end
            axes.barh(rank, width, left=left, color=BLUE, height=0.8, edgecolor="white", linewidth=1)
            if width > 0.04:
                axes.text(left + width / 2, rank, str(SIXTEEN[index]), ha="center", va="center", fontsize=8, color="white")
            left += width
        axes.text(1.02, rank, f"{plan.num_tokens(rank, 0):,} tokens", va="center", fontsize=9, color=GREY)
    axes.axvline(slowest / end, color="black", linewidth=1.2)
    axes.set_title(f"{title}: ranks busy {100 * plan.efficiency():.0f}% of the time", fontsize=10.5, loc="left")
    axes.set_yticks(range(plan.dp_size), [f"rank {rank}" for rank in range(plan.dp_size)], fontsize=9)
    axes.set_xticks([])
    axes.set_xlim(0, 1.0)
    axes.invert_yaxis()
    plain(axes)


def sixteen_on_four() -> None:
    """Sixteen samples on four ranks, four each, before and after balancing."""
    before = plan_mini_batch(SIXTEEN, dp_size=4, micro_batch_size=4, balance=False)
    after = plan_mini_batch(SIXTEEN, dp_size=4, micro_batch_size=4, equal_size=True)
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    end = 1.0 * max(before.step_workload(), after.step_workload())
    draw_ranks(panels[0], before, "before: samples in the order given", end)
    draw_ranks(panels[1], after, "after: balanced by workload, four samples per rank", end)
    panels[1].set_xlabel("time of one micro-step (modelled); grey: waiting for the slowest rank; numbers: tokens of a sample", fontsize=9)
    figure.savefig(IMAGES / "sixteen_on_four.png", dpi=130)


def batch_sizes() -> None:
    """The four sizes of one iteration: prompts x responses, mini-batches, ranks, micro-batches."""
    source = random.Random(3)
    typical = [source.lognormvariate(6.1, 0.6) for _ in range(8)]
    lengths = [int(min(4000, max(60, centre * source.lognormvariate(0, 0.35)))) for centre in typical for _ in range(4)]
    colours = [colormaps["tab10"](prompt) for prompt in range(8)]
    members = mini_batch_members(8, 4, seed=0, iteration=0, epoch=0)
    figure = Figure(figsize=(9.5, 8), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=[1, 1, 1.5])
    axes = figure.add_subplot(grid[0, :])
    axes.bar(range(32), lengths, color=[colours[index // 4] for index in range(32)], width=0.85)
    axes.set_title("1. train_batch_size: 8 prompts, rollouts_per_prompt: 4 -> 32 rollouts per iteration", fontsize=10.5, loc="left")
    axes.set_xticks([4 * prompt + 1.5 for prompt in range(8)], [f"prompt {prompt}" for prompt in range(8)], fontsize=8.5)
    axes.set_ylabel("tokens")
    plain(axes)
    for part, prompts in enumerate(members):
        samples = [4 * prompt + sample for prompt in prompts for sample in range(4)]
        axes = figure.add_subplot(grid[1, part])
        axes.bar(range(16), [lengths[index] for index in samples], color=[colours[index // 4] for index in samples], width=0.85)
        axes.set_title(f"2. mini_batch_size: 4 prompts -> optimizer step {part + 1}", fontsize=10.5, loc="left")
        axes.set_xticks([4 * place + 1.5 for place in range(4)], [f"prompt {prompt}" for prompt in prompts], fontsize=8.5)
        axes.set_ylim(0, 1.05 * max(lengths))
        plain(axes)
        draw_grid(figure.add_subplot(grid[2, part]), [lengths[index] for index in samples], [colours[index // 4] for index in samples])
    figure.savefig(IMAGES / "batch_sizes.png", dpi=120)


def draw_grid(axes: Axes, lengths: list[int], colours: Sequence[tuple[float, ...]]) -> None:
    """Draw the micro-batches of one optimizer step on two ranks."""
    plan = plan_mini_batch(lengths, dp_size=2, max_tokens_per_rank=2560)
    places, names = [], []
    for step in range(plan.num_micro_steps):
        for rank in range(2):
            place, low = 2.6 * step + rank, 0
            places.append(place)
            names.append(f"rank {rank}")
            for index in sorted(plan.assignment[rank][step], key=lambda index: -lengths[index]):
                axes.bar(place, lengths[index], 0.85, low, color=colours[index], edgecolor="white", linewidth=1)
                low += lengths[index]
            axes.text(place, low, f"{low:,}", ha="center", va="bottom", fontsize=8.5, color=GREY)
        axes.text(2.6 * step + 0.5, -0.17 * 2560, f"micro-step {step}", ha="center", va="top", fontsize=9)
    axes.axhline(2560, color=RED, linestyle="--", linewidth=1.2)
    axes.text(places[-1] + 0.45, 2560, "max_tokens_per_rank: 2560", color=RED, fontsize=8.5, ha="right", va="bottom")
    axes.set_title(f"3. + 4. ranks and micro-batches: {plan.num_micro_steps} micro-steps", fontsize=10.5, loc="left")
    axes.set_xticks(places, names, fontsize=8)
    axes.set_ylim(0, 3000)
    axes.set_ylabel("tokens")
    plain(axes)


def packing() -> None:
    """Three samples padded to a rectangle, packed end to end, and shared by two ranks."""
    lengths = [5, 9, 3]
    batch = PackedBatch.from_samples([{"input_ids": list(range(length))} for length in lengths])
    colours = [BLUE, ORANGE, "#2e8b57"]
    figure = Figure(figsize=(9, 4.9), layout="constrained")
    axes = figure.subplots()
    for row, length in enumerate(lengths):
        cells(axes, 0, 7.6 - 1.05 * row, [colours[row]] * length + [IDLE] * (max(lengths) - length), range(length))
    owner = batch.sample_ids_per_token.tolist()
    positions = batch.position_ids.tolist()
    cells(axes, 0, 2.4, [colours[index] for index in owner], positions)
    for bound in batch.cu_seqlens.tolist():
        axes.plot([bound, bound], [2.2, 3.6], color="black", linewidth=1.2)
        axes.text(bound, 3.65, str(bound), ha="center", va="bottom", fontsize=9)
    shares = [[colours[index] for index in owner[:9]], [*(colours[index] for index in owner[9:]), IDLE]]
    cells(axes, 0, 0.0, shares[0], positions[:9])
    cells(axes, 9.6, 0.0, shares[1], positions[9:])
    total = batch.num_tokens
    notes = {
        8.8: "padded: 3 x 9 = 27 tokens computed (grey: padding)",
        4.3: f"packed: {total} tokens; above: cu_seqlens; in the cells: position_ids, which restart",
        1.15: "packed, sequence_parallel_size: 2: each rank holds 9 of 18 tokens (one of padding), wherever samples begin and end",
    }
    for height, note in notes.items():
        axes.text(0, height, note, fontsize=10, va="bottom")
    axes.text(4.5, -0.15, "rank 0", ha="center", va="top", fontsize=9)
    axes.text(14.1, -0.15, "rank 1", ha="center", va="top", fontsize=9)
    axes.set_xlim(-0.3, 19)
    axes.set_ylim(-0.7, 9.5)
    axes.axis("off")
    figure.savefig(IMAGES / "packing.png", dpi=130)


def cells(axes: Axes, left: float, low: float, colours: Sequence[str], texts: Sequence[int] | range) -> None:
    """Draw a row of tokens."""
    for place, colour in enumerate(colours):
        axes.add_patch(Rectangle((left + place, low), 1, 0.95, facecolor=colour, edgecolor="white"))
    for place, text in enumerate(texts):
        axes.text(left + place + 0.5, low + 0.47, str(text), ha="center", va="center", fontsize=8.5, color="white")


def plan_of_a_step() -> None:
    """What ``rlbatch plan --picture`` and BalanceMonitor draw: 64 samples on four ranks."""
    source = random.Random(1)
    lengths = [int(min(8000, 150 + source.lognormvariate(7, 0.9))) for _ in range(64)]
    batch_plan_picture(plan_mini_batch(lengths, dp_size=4, max_tokens_per_rank=8192), IMAGES / "plan.png")


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for draw in (batch_sizes, static_and_dynamic, sixteen_on_four, packing, plan_of_a_step):
        draw()

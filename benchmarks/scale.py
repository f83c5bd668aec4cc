"""Plan for clusters of 8 to 1,024 data-parallel ranks: efficiency of the plans by the cost model, and the planner's CPU time.

Run ``python -m benchmarks.scale``. Nothing is trained: the time of an optimizer step is the sum over micro-steps of the slowest rank's
workload, which is what ranks that wait for each other take. ``two layers`` is ``planner="per_rank"``, verl's way: Karmarkar-Karp over the
ranks, then inside each rank.
"""

import argparse
import math
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.balancing import longest, sample_lengths
from benchmarks.measuring import machine, print_header, print_row
from lightning_rlbatch.functional.plan import BatchPlan
from lightning_rlbatch.functional.planning import plan_mini_batch

PLANNERS = {"global": {}, "global, refine=False": {"refine": False}, "two layers": {"planner": "per_rank"}}


def plan(lengths: np.ndarray, dp_size: int, budget: int, planner: str) -> tuple[BatchPlan, float]:
    """Return a plan and the CPU seconds it took."""
    start = time.process_time()
    made = plan_mini_batch(lengths, dp_size=dp_size, max_tokens_per_rank=budget, **PLANNERS[planner])
    return made, time.process_time() - start


def growth(sizes: list[int], seconds: list[float]) -> float:
    """Return a of the best fit seconds = c * (N log N)^a: 1 if time grows as N log N."""
    x = [math.log(n * math.log(n)) for n in sizes]
    return float(np.polyfit(x, np.log(seconds), 1)[0])


def main(arguments: list[str] | None = None) -> None:
    """Print one table and the growth of each planner's time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--samples-per-rank", type=int, default=16)
    parser.add_argument("--family", default="lognormal", help="of benchmarks.balancing: lognormal, uniform, bimodal15, grpo, ...")
    parser.add_argument("--factor", type=int, default=1, help="token budget over the longest sample's tokens")
    parser.add_argument("--largest-two-layer", type=int, default=1024, help="most ranks for which the two layers are run")
    options = parser.parse_args(arguments)
    budget = longest(options.family) * options.factor
    for name in PLANNERS:
        plan(sample_lengths(options.family, 64, 0), 8, budget, name)  # compiles
    print(f"{machine()}\n{options.family}, {options.samples_per_rank} samples per rank, budget {budget:,} tokens\n")
    print_header(
        ["ranks", "samples", "best possible", *(f"{name}: busy, steps, ms" for name in PLANNERS), "step time of two layers / ours"]
    )
    times: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in PLANNERS}
    for ranks in options.ranks:
        number = ranks * options.samples_per_rank
        lengths = sample_lengths(options.family, number, ranks)
        cells, work = [], {}
        for name in PLANNERS:
            if name == "two layers" and ranks > options.largest_two_layer:
                cells.append("-")
                continue
            made, seconds = plan(lengths, ranks, budget, name)
            times[name][0].append(number)
            times[name][1].append(seconds)
            work[name] = made.step_workload()
            cells.append(f"{made.efficiency():.2%}, {made.num_micro_steps}, {1000 * seconds:,.1f}")
            bound = made.efficiency_bound()
        ratio = f"{work['two layers'] / work['global']:.3f}" if "two layers" in work else "-"
        print_row([ranks, f"{number:,}", f"{bound:.2%}", *cells, ratio])
    if len(options.ranks) > 1:
        fits = ", ".join(f"{name} {growth(*points):.2f}" for name, points in times.items() if len(points[0]) > 1)
        print(f"\nExponent a of time ~ (N log N)^a over these sizes: {fits}")


if __name__ == "__main__":
    main()

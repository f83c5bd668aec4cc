"""Measure partitions and step plans beside verl's functions, in one table.

Run ``python -m benchmarks.balancing`` (about two minutes on one core; ``--seeds 1`` is quicker). verl's column appears if its package
can be found (``pip install --no-deps verl`` suffices: only its ``seqlen_balancing.py`` is loaded). Times are CPU milliseconds of one
thread, the median of three runs. Step times are those of the cost model: the sum over micro-steps of the slowest rank's workload.
"""

import argparse
import importlib.util
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import machine
from lightning_rlbatch.functional.balancing import balanced_partition
from lightning_rlbatch.functional.bounds import equal_partition_bound, step_workload_bound
from lightning_rlbatch.functional.planning import MICRO_STEP_OVERHEAD, plan_mini_batch
from lightning_rlbatch.functional.rows import fewest_rows
from lightning_rlbatch.functional.workload import DEFAULT_COEFFICIENT, workload_array

FAMILIES = ("lognormal", "lognormal32k", "uniform", "bimodal15", "bimodal30", "grpo")
SIZES = ((128, 16), (256, 8), (512, 16), (512, 64), (1024, 32), (1024, 128), (4096, 64))
OVERHEAD = MICRO_STEP_OVERHEAD * DEFAULT_COEFFICIENT


def sample_lengths(family: str, num_samples: int, seed: int) -> np.ndarray:
    """Draw lengths: a prompt of 100 to 511 tokens and a response of the family, capped at 16,384 (32,768) tokens."""
    generator = np.random.default_rng([sum(map(ord, family)), num_samples, seed])
    prompt = generator.integers(100, 512, num_samples)

    def lognormal(median: float, sigma: float, size: int) -> np.ndarray:
        return median * np.exp(sigma * generator.standard_normal(size))

    cap = longest(family) - 1024
    if family == "lognormal":
        response = lognormal(1500, 1.0, num_samples)
    elif family == "lognormal32k":
        response = lognormal(1000, 1.35, num_samples)
    elif family == "uniform":
        response = generator.integers(200, 16384, num_samples).astype(float)
    elif family == "grpo":  # eight rollouts of a prompt have similar lengths
        groups = np.repeat(lognormal(1800, 0.9, -(-num_samples // 8)), 8)[:num_samples]
        response = groups * lognormal(1.0, 0.4, num_samples)
    else:
        response = lognormal(1300 if family.startswith("bimodal") else 1200, 0.5, num_samples)
        if family == "one_giant":
            response[num_samples // 2] = cap
        else:  # so many percent of the responses are cut off at the cap
            response[generator.random(num_samples) < int(family[-2:]) / 100] = cap
    return np.minimum(response, cap).astype(np.int64).clip(1) + prompt


def longest(family: str) -> int:
    """Return the smallest budget that holds every sample of a family."""
    return 33792 if family in ("lognormal32k", "one_giant") else 17408


def load_verl() -> Any | None:
    """Load verl's partition functions without its dependencies, or return None."""
    package = importlib.util.find_spec("verl")
    if package is None or not package.submodule_search_locations:
        return None
    stand_ins = {
        "verl": {},
        "verl.protocol": {"DataProto": object},
        "verl.utils": {"tensordict_utils": types.ModuleType("tensordict_utils")},
        "verl.utils.device": {"get_device_name": lambda: "cpu"},
    }
    kept = {name: sys.modules.get(name) for name in stand_ins}
    for name, attributes in stand_ins.items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes, __path__=[])
        sys.modules[name] = module
    try:
        path = f"{package.submodule_search_locations[0]}/utils/seqlen_balancing.py"
        spec = importlib.util.spec_from_file_location("verl_seqlen_balancing", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        for name, previous in kept.items():
            if previous is None:
                del sys.modules[name]
            else:
                sys.modules[name] = previous


def cpu_ms(function: Callable[[], Any], repeats: int = 3) -> tuple[float, Any]:
    """Return the median CPU milliseconds of a call, and its result."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        result = function()
        times.append(1e3 * (time.process_time() - start))
    return statistics.median(times), result


def heaviest(weights: np.ndarray, parts: list[list[int]]) -> int:
    return max(int(weights[part].sum()) for part in parts)


def partition_rows(verl: Any | None, seeds: int) -> Iterator[str]:
    """Compare equal-count partitions with the lower bound."""
    cells: list[tuple[str, int, int, tuple[str, ...], int, str]] = [
        ("16,384 -> 256", 16384, 256, ("lognormal", "uniform", "bimodal15", "bimodal30"), 1, "<= 25 ms, 2e-5"),
        ("16,384 -> 256, one giant", 16384, 256, ("one_giant",), 1, "<= 80 ms, 0.5%"),
        ("65,536 -> 1,024", 65536, 1024, ("lognormal", "uniform", "bimodal15"), 1, "<= 150 ms, 2e-5"),
        ("512 -> 16", 512, 16, FAMILIES, seeds, "<= 5 ms, 3e-5"),
        ("512 -> 64", 512, 64, FAMILIES, 3 * seeds, "<= 3 ms, 0.05% mean, 0.2% max"),
        ("128 -> 16", 128, 16, FAMILIES, 3 * seeds, "<= 3 ms, 0.05% mean, 0.2% max"),
    ]
    for name, n, k, families, num_seeds, goal in cells:
        ours, theirs = [], []
        for family in families:
            for seed in range(num_seeds):
                weights = workload_array(sample_lengths(family, n, seed))
                bound = equal_partition_bound(weights, k, strong=n <= 4096)
                ms, parts = cpu_ms(lambda w=weights, k=k: balanced_partition(w, k, equal_size=True))
                ours.append((heaviest(weights, parts) / bound - 1, ms))
                if verl is not None and (seed < seeds):
                    tensor = torch.from_numpy(weights)
                    ms, parts = cpu_ms(lambda t=tensor, k=k: verl.get_seqlen_balanced_partitions(t, k, equal_size=True), 1)
                    theirs.append((heaviest(weights, parts) / bound - 1, ms))
        yield f"| {name} | {describe(ours)} | {describe(theirs)} | {ratio(ours, theirs)} | {goal} |"


def describe(measured: list[tuple[float, float]]) -> str:
    if not measured:
        return "not installed"
    gaps, times = np.array(measured).T
    return f"{times.mean():.1f} ms (max {times.max():.1f}), gap {gaps.mean():.4%} (max {gaps.max():.4%})"


def ratio(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> str:
    return f"{np.mean([t[1] for t in theirs]) / np.mean([t[1] for t in ours]):.0f}x faster" if theirs else "-"


def verl_step(verl: Any, lengths: np.ndarray, dp_size: int, budget: int) -> tuple[int, int]:
    """Return step workload and micro-steps of verl 0.9.1's two layers, all ranks adding micro-batches until every one fits."""
    work, tokens = workload_array(lengths).tolist(), lengths.tolist()
    ranks = verl.get_seqlen_balanced_partitions(work, dp_size, equal_size=True)
    k = max(-(-sum(tokens[i] for i in rank) // budget) for rank in ranks)
    while True:
        cuts = [verl.get_seqlen_balanced_partitions([work[i] for i in rank], k, equal_size=False) for rank in ranks]
        if all(sum(tokens[rank[j]] for j in part) <= budget for rank, cut in zip(ranks, cuts) for part in cut):
            break
        k += 1
    loads = [sorted((sum(work[rank[j]] for j in part) for part in cut), reverse=True) for rank, cut in zip(ranks, cuts)]
    return sum(max(step) for step in zip(*loads)), k


def step_rows(verl: Any | None, seeds: int) -> Iterator[str]:
    """Compare plans of whole optimizer steps with the lower bound."""
    for name, refine in (("step plan, full", True), ("step plan, fast (refine=False)", False)):
        gaps, steps, times, relative, relative_8, their_gaps, their_steps = [], [], [], [], [], [], []
        for n, dp in SIZES:
            for family in FAMILIES:
                for seed in range(seeds):
                    lengths = sample_lengths(family, n, seed)
                    for factor in (1, 2, 4):
                        budget = longest(family) * factor
                        ms, plan = cpu_ms(
                            lambda x=lengths, d=dp, b=budget, r=refine: plan_mini_batch(x, dp_size=d, max_tokens_per_rank=b, refine=r), 1
                        )
                        plan.check()  # raises if a micro-batch is over the budget
                        bound = step_workload_bound(lengths, workload_array(lengths), dp, budget)
                        fewest = fewest_rows(lengths, dp, budget)
                        gaps.append(plan.step_workload() / bound - 1)
                        steps.append(plan.num_micro_steps / fewest)
                        times.append(ms)
                        if verl is not None:
                            total, k = verl_step(verl, lengths, dp, budget)
                            their_gaps.append(total / bound - 1)
                            their_steps.append(k / fewest)
                            relative.append((plan.step_workload() + OVERHEAD * plan.num_micro_steps) / (total + OVERHEAD * k))
                            relative_8 += relative[-1:] if n // dp == 8 else []
        theirs = f"{1 + np.mean(their_gaps):.4f}, p95 {1 + np.percentile(their_gaps, 95):.4f}" if their_gaps else "not installed"
        yield (
            f"| {name}: time / bound ({len(gaps)} instances, {np.mean(times):.1f} ms) | {1 + np.mean(gaps):.4f}, p95 "
            f"{1 + np.percentile(gaps, 95):.4f}, max {1 + np.max(gaps):.4f} | {theirs} | | <= 1.01, p95 <= 1.03, never over budget |"
        )
        theirs = f"{np.mean(their_steps):.4f}" if their_steps else "not installed"
        yield f"| {name}: micro-steps / fewest | {np.mean(steps):.4f} | {theirs} | | <= 1.03 |"
        if relative:
            yield f"| {name}: time / verl's | {np.mean(relative):.4f}, 8 per rank {np.mean(relative_8):.4f} | 1 | | <= 0.925, 0.88 |"


def planner_rows(verl: Any | None) -> Iterator[str]:
    """Time the planner at three sizes, budget = longest sample."""
    for (n, dp), goal in (((512, 16), "15 / 2"), ((4096, 64), "120 / 15"), ((16384, 256), "500 / 80")):
        full, fast, theirs = [], [], []
        for family in ("lognormal", "uniform", "bimodal15"):
            lengths = sample_lengths(family, n, 0)
            budget = longest(family)
            for times, refine in ((full, True), (fast, False)):
                times.append(
                    cpu_ms(lambda x=lengths, d=dp, b=budget, r=refine: plan_mini_batch(x, dp_size=d, max_tokens_per_rank=b, refine=r), 5)[0]
                )
            if verl is not None:
                theirs.append(cpu_ms(lambda x=lengths, d=dp, b=budget: verl_step(verl, x, d, b), 1)[0])
        other = f"{np.mean(theirs):.0f} ms, all ranks" if theirs else "not installed"
        faster = f"{np.mean(theirs) / np.mean(full):.1f}x / {np.mean(theirs) / np.mean(fast):.0f}x faster" if theirs else "-"
        ours = f"{np.mean(full):.1f} / {np.mean(fast):.1f} ms (max {max(full):.1f} / {max(fast):.1f})"
        yield f"| planner {n:,} / {dp}, full / fast | {ours} | {other} | {faster} | <= {goal} ms |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="instances per family and size (default 2)")
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    verl = load_verl()
    plan_mini_batch([3, 2, 1], dp_size=2, max_tokens_per_rank=8)  # imports and caches are not part of any measurement
    balanced_partition(list(range(100)), 4, equal_size=True)
    print(f"{machine()}\n")
    print("| item | lightning_rlbatch | verl, as it calls them | ratio | goal |\n|---|---|---|---|---|")
    for rows in (partition_rows(verl, seeds), planner_rows(verl), step_rows(verl, seeds)):
        for row in rows:
            print(row, flush=True)


if __name__ == "__main__":
    main()

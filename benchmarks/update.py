"""Compare the update phase of trainers on the same samples and weights: real tokens per second, peak memory, loss and gradient norm.

Run ``python -m benchmarks.update``, or see ``--help``. A measurement is one optimizer step (collate, forward, backward, clip, step) of
a process of its own per rank, because the peak of a process's memory never falls. Seconds are CPU time of one thread, of the slowest
rank; with several ranks, time in which a rank waits for others is not in them.

``ours, equal lengths`` is the limit of the machine: the same numbers of tokens and of attention FLOPs in samples of one length. TRL
(``pip install trl``, in an environment of its own) is compared where it can be imported.
"""

import argparse
import dataclasses
import os
import statistics

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: forked ranks of a multi-threaded parent hang
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch

from benchmarks.measuring import machine, note, print_header, print_row
from benchmarks.trainers import TRAINERS, Job, Step, trl_missing
from benchmarks.workloads import FAMILIES, cached_batch, make_batch, make_workload
from lightning_rlbatch.models.scoring import HEAD_MEMORY_MIB
from lightning_rlbatch.testing import run_distributed

LIMIT = "ours, equal lengths"


def measure(method: str, job: Job, ranks: int) -> Step:
    """Run a trainer on forked ranks.

    Returns:
        The slowest rank's median time, the largest memory of a rank, loss and gradient norm of the first real step.
    """
    # Old log-probs are made here, once, and inherited by the ranks.
    cached_batch(job.workload)
    results: list[list[Step]] = run_distributed(TRAINERS[method], ranks, job, timeout=3600.0, init_process_group=False)
    real = [steps[1:] for steps in results]
    return Step(
        max(statistics.median(step.seconds for step in steps) for steps in real),
        max(step.extra_mb for steps in real for step in steps),
        real[0][0].loss if method != "padded" else sum(steps[0].loss for steps in real),  # a plain loop logs its rank's share
        real[0][0].grad_norm,
    )


def compare(family: str, vocabulary: int, options: argparse.Namespace) -> None:
    """Measure one family at one vocabulary, and print a row for each method."""
    workload = make_workload(family, options.samples, vocabulary, seed=options.seed, cap=options.cap)
    job = Job(workload, options.micro_batch_size, options.max_tokens_per_rank, options.repeats, options.head_memory_mib)
    jobs = {method: job for method in options.method} | {LIMIT: dataclasses.replace(job, workload=workload.equal_lengths())}
    first: Step | None = None
    for method, what in jobs.items():
        step = measure("ours" if method == LIMIT else method, what, options.ranks)
        first = first or step
        speed = what.workload.num_tokens / step.seconds
        ratio = speed / (workload.num_tokens / first.seconds)
        same = "-" if method == LIMIT else f"{difference(step.loss, first.loss):.0e}, {difference(step.grad_norm, first.grad_norm):.0e}"
        print_row(
            [
                f"{family}, fill {workload.fill:.0%}",
                f"{vocabulary:,}",
                method,
                f"{speed:,.0f}",
                f"{ratio:.3f}",
                f"{1 / ratio:.2f}x",
                f"{step.extra_mb:,.0f}",
                f"{step.extra_mb / first.extra_mb:.1f}x" if first.extra_mb else "-",  # a tiny step may fit into what is there
                same,
            ]
        )


def difference(value: float, reference: float) -> float:
    """Return the relative difference."""
    return abs(value - reference) / max(abs(reference), 1e-12)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    made.add_argument("--vocabulary", type=int, nargs="+", default=[256, 32_000])
    made.add_argument("--method", nargs="+", choices=list(TRAINERS), default=list(TRAINERS))
    made.add_argument("--samples", type=int, default=16, help="rollouts of an optimizer step, over all ranks")
    made.add_argument("--micro-batch-size", type=int, default=8, help="samples of a padded micro-batch")
    made.add_argument("--max-tokens-per-rank", type=int, default=2048, help="token budget of a packed micro-batch")
    made.add_argument(
        "--head-memory-mib",
        type=float,
        default=HEAD_MEMORY_MIB,
        help="ours: memory for the LM head's products; 256 holds all of a micro-batch",
    )
    made.add_argument("--cap", type=int, default=1600, help="most tokens of a response")
    made.add_argument("--ranks", type=int, default=1)
    made.add_argument("--repeats", type=int, default=1, help="optimizer steps of which the median is taken")
    made.add_argument("--seed", type=int, default=9, help="the default makes the log-normal lengths fill 32% of their padding")
    return made


def main(arguments: list[str] | None = None) -> None:
    """Print one table."""
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    missing = trl_missing()
    if missing and "trl" in options.method:
        note(missing)
        options.method = [method for method in options.method if method != "trl"]
    make_batch(make_workload("hanoi", 2, 64), old_log_probs=False)
    print(f"{machine()}\n{options.ranks} rank(s), 1 thread each; {options.samples} samples per optimizer step\n")
    print_header(
        ["lengths", "vocabulary", "trainer", "real tokens / CPU s", "of ours", "ours is", "extra MB", "of ours", "loss, norm differ by"]
    )
    for vocabulary in options.vocabulary:
        for family in options.family:
            compare(family, vocabulary, options)


if __name__ == "__main__":
    main()

"""The main job: warm a policy up on demonstrations, improve it by RL on two FSDP ranks, show what changed.

Run ``make demo``, or ``python -m examples.hanoi`` in an environment with the ``examples`` extra.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

FOLDER = Path("examples/hanoi")
OUTPUT = Path("outputs/hanoi")
SCHEDULE = "--model.init_args.lr_scheduler.init_args"


def main() -> None:
    """Run both phases, then print a table and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of initial weights, data order and sampling")
    parser.add_argument("--sft-steps", type=int, default=250, help="optimizer steps of the warm-up")
    parser.add_argument("--iterations", type=int, default=60, help="RL iterations")
    parser.add_argument("--samples", type=int, default=16, help="answers sampled per puzzle for the table")
    arguments = parser.parse_args()
    console = Console()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    start = time.perf_counter()
    seed = [f"--seed_everything={arguments.seed}", f"--data.init_args.seed={arguments.seed}"]
    console.rule("1. Supervised warm-up on noisy demonstrations (2 FSDP ranks)")
    run("sft.yaml", f"--trainer.max_steps={arguments.sft_steps}", f"{SCHEDULE}.total_steps={arguments.sft_steps + 1}", *seed)
    warmed = time.perf_counter()
    console.rule("2. GRPO with the verifier's exact success as reward (2 FSDP ranks)")
    run("grpo.yaml", f"--trainer.max_epochs={arguments.iterations}", f"{SCHEDULE}.total_iters={4 * arguments.iterations}", *seed)
    trained = time.perf_counter()
    console.rule("3. What changed")
    report(console, arguments.samples)
    end = time.perf_counter()
    phases = f"Warm-up {warmed - start:.0f} s, RL {trained - warmed:.0f} s, report {end - trained:.0f} s"
    console.print(f"\n{phases}, total {end - start:.0f} s.")
    console.print(f"Curves, batch plans, logs and checkpoints: {OUTPUT}/")


def run(config: str, *overrides: str) -> None:
    """Run ``rlbatch fit`` with a configuration of this folder, and stop if it fails."""
    command = [sys.executable, "-m", "lightning_rlbatch", "fit", "--config", str(FOLDER / config), *overrides]
    # transformers' bars for loading 30 small tensors would fill the screen
    quiet = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    finished = subprocess.run(command, check=False, env=quiet)
    if finished.returncode:
        sys.exit(finished.returncode)


def report(console: Console, num_samples: int) -> None:
    """Print sampled accuracy before and after RL, and write the pictures."""
    # Imported here: the training commands above are processes of their own, and start sooner without these.
    import torch
    from transformers.utils.logging import disable_progress_bar

    from examples.hanoi.evaluation import accuracy_by_disks
    from examples.hanoi.plots import reward_curve

    disable_progress_bar()
    torch.set_num_threads(1)  # a model of this size gains nothing from a second thread, which would spin wherever a core is busy
    before, after = (accuracy_by_disks(OUTPUT / phase / "policy", num_samples) for phase in ("sft", "grpo"))
    table = Table(title=f"Sampled accuracy, {num_samples} answers per puzzle")
    for column in ("puzzles", "moves needed", "after warm-up", "after RL"):
        table.add_column(column, justify="right")
    for split, disks in before:
        moves = "" if disks is None else str(2**disks - 1)
        label = f"{split}, {'all' if disks is None else f'{disks} disks'}"
        table.add_row(label, moves, f"{before[split, disks]:.2f}", f"{after[split, disks]:.2f}", end_section=disks is None)
    console.print(table)
    curve = OUTPUT / "grpo" / "metrics.csv"
    reward_curve(curve, OUTPUT / "reward_curve.png", initial_accuracy=before["held-out", None])
    console.print(f"Held-out sampled accuracy: {before['held-out', None]:.3f} -> {after['held-out', None]:.3f}")


if __name__ == "__main__":
    main()

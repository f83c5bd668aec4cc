"""How long commands take to start, CPU time of fresh processes beside what they cannot avoid.

Run ``python -m benchmarks.startup`` in the repository's folder.
"""

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile

from benchmarks.measuring import machine, print_header, print_row

COMMANDS = {
    "python (nothing)": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import lightning.pytorch": ["-c", "import lightning.pytorch"],
    "import transformers.PreTrainedModel": ["-c", "from transformers import PreTrainedModel"],
    "import lightning_rlbatch": ["-c", "import lightning_rlbatch"],
    "import lightning_rlbatch.functional": ["-c", "import lightning_rlbatch.functional"],
    "from lightning_rlbatch import PPOModule": ["-c", "from lightning_rlbatch import PPOModule"],
    "rlbatch explain": ["-m", "lightning_rlbatch", "explain", "--config", "examples/hanoi/grpo.yaml"],
    "rlbatch plan (1,000 lengths)": ["-m", "lightning_rlbatch", "plan", "LENGTHS", "--dp", "8", "--max-tokens-per-rank", "8192"],
    "rlbatch fit --help": ["-m", "lightning_rlbatch", "fit", "--help"],
}


def lengths_file(folder: str) -> str:
    """Write 1,000 lengths, one a line."""
    path = os.path.join(folder, "lengths.txt")
    draw = random.Random(0)
    with open(path, "w") as file:
        file.writelines(f"{min(8000, int(draw.lognormvariate(6, 1)) + 1)}\n" for _ in range(1000))
    return path


def cpu_time(command: list[str]) -> float:
    """Return CPU seconds of a process and its children.

    Raises:
        RuntimeError: It failed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    finished = subprocess.run([sys.executable, *command], check=False, capture_output=True, text=True, env=os.environ)
    if finished.returncode:
        raise RuntimeError(f"python {' '.join(command)} failed:\n{finished.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(arguments: list[str] | None = None) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--command", nargs="+", choices=list(COMMANDS), default=list(COMMANDS))
    options = parser.parse_args(arguments)
    print(f"{machine()}\n")
    print_header(["command", "CPU s", "less what python takes"])
    empty: float | None = None
    with tempfile.TemporaryDirectory() as folder:
        lengths = lengths_file(folder)
        for name in options.command:
            command = [lengths if part == "LENGTHS" else part for part in COMMANDS[name]]
            cpu_time(command)  # files into the page cache, bytecode written
            seconds = statistics.median(cpu_time(command) for _ in range(options.repeats))
            empty = seconds if empty is None else empty
            print_row([name, f"{seconds:.2f}", f"{seconds - empty:.2f}"])


if __name__ == "__main__":
    main()

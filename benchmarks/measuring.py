"""What the benchmark scripts share: the machine in words, memory of a process, tables."""

import importlib.metadata
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

PACKAGES = ("torch", "lightning", "transformers", "trl")


def machine() -> str:
    """Return hardware and versions, one line."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{os.cpu_count()} CPU cores ({platform.machine()}), load {os.getloadavg()[0]:.0f}"
    return f"{device}; Python {platform.python_version()}, {', '.join(found)}"


def resident_mb() -> float:
    """Return the memory of this process now, in MB."""
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def forget_peak() -> None:
    """Make :func:`peak_mb` begin anew with what this process has now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # see proc(5): resets the peak of the resident set


def peak_mb() -> float:
    """Return the most memory that this process has had since :func:`forget_peak`, in MB."""
    with open("/proc/self/status") as lines:
        line = next(line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def cpu_seconds(function: Callable[[], object], repeats: int = 3) -> float:
    """Return the median CPU time of a call in this process, after one call that is not measured."""
    function()
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def print_row(cells: Sequence[object]) -> None:
    """Print one row of a Markdown table at once, so that a long run shows where it is."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_header(cells: Sequence[str]) -> None:
    """Print the head of a Markdown table."""
    print_row(cells)
    print_row(["---"] * len(cells))


def note(text: str) -> None:
    """Print a remark that is no part of the table."""
    print(text, file=sys.stderr, flush=True)

"""Memory and time of streaming sharded weights to a rollout engine: rows broadcast into their place against ``full_tensor``.

Run ``python -m benchmarks.weight_sync``, or see ``--help``.
"""

import argparse
import os
import statistics
import time
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: forked ranks of a multi-threaded parent hang

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measuring import forget_peak, machine, note, peak_mb, print_header, print_row, resident_mb
from lightning_rlbatch.rollout.weights import full_parameters
from lightning_rlbatch.testing import run_distributed


def full_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather parameters one by one as DTensor does."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


STREAMS = {"ours": full_parameters, "full_tensor": full_tensors}


def measure(rank: int, world_size: int, vocabulary: int, hidden: int, layers: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Return, for each stream, its peak in sizes of the largest parameter and the median of its wall seconds."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=8
    )
    model = LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    largest = max(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 1e6
    results = {}
    for name, stream in STREAMS.items():
        seconds, peaks = [], []
        for _ in range(repeats + 1):
            dist.barrier()
            before = resident_mb()
            forget_peak()
            start = time.perf_counter()
            for _, tensor in stream(model):
                del tensor
            seconds.append(time.perf_counter() - start)
            peaks.append((peak_mb() - before) / largest)
        results[name] = max(peaks[1:]), statistics.median(seconds[1:])  # the first one warms up
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    note(machine())
    print_header(["ranks", "stream", "peak / largest parameter", "seconds", "to ours"])
    for ranks in options.ranks:
        rows = run_distributed(measure, ranks, options.vocabulary, options.hidden, options.layers, options.repeats)
        ours = max(row["ours"][1] for row in rows)
        for name in STREAMS:
            peak, seconds = (max(row[name][position] for row in rows) for position in (0, 1))
            print_row([ranks, name, f"{peak:.2f}", f"{seconds:.3f}", f"{seconds / ours:.2f}x"])


if __name__ == "__main__":
    main()

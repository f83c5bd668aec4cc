"""Compare ways to run samples of different lengths through a model: packed, padded, and packed under one T x T mask.

Run ``python -m benchmarks.attention`` for the sizes of the documentation, or see ``--help``. Each measurement is one forward and
backward pass of a small Llama in a process of its own, because the peak of a process's memory never falls. Time is CPU time of one
thread per rank on a CPU, elapsed time on a GPU. ``packed, P ranks`` splits the sequence over P processes (Ulysses): its numbers are
those of one rank.
"""

import argparse
import os
import resource
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: forked ranks of a multi-threaded parent hang

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaModel

from benchmarks.measuring import machine, print_header, print_row
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.attention import attach_packed_attention
from lightning_rlbatch.models.packed_inputs import packed_model_kwargs
from lightning_rlbatch.testing import run_distributed


def make_batch(num_tokens: int, longest: int) -> PackedBatch:
    """Return samples whose lengths spread evenly in the logarithm from ``longest / 32`` to ``longest``."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := num_tokens - sum(lengths)) > 0:
        length = int(longest * 2 ** (-5 * torch.rand((), generator=generator).item()))
        lengths.append(min(length, left))
    ids = torch.randint(0, 1000, (num_tokens,), generator=generator)
    return PackedBatch([0, *torch.tensor(lengths).cumsum(0).tolist()], {"input_ids": ids})


def make_model(hidden_size: int, layers: int) -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=65536,
        attn_implementation="sdpa",
    )
    return LlamaModel(config)


def run(method: str, model: LlamaModel, batch: PackedBatch) -> None:
    """Run one forward and backward pass."""
    if method == "padded":
        inputs = batch.to_padded(pad_id=0)
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        hidden = model(**inputs, position_ids=positions, use_cache=False)[0][inputs["attention_mask"].bool()]
    elif method == "masked":  # transformers builds the T x T mask from the position ids
        hidden = model(batch["input_ids"][None], position_ids=batch.position_ids[None], use_cache=False)[0][0]
    else:
        group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        with attach_packed_attention(model, sp_group=group):
            model(**packed_model_kwargs(batch, sp_group=group))[0].square().mean().backward()
        return
    hidden.square().mean().backward()


def measure(rank: int, world_size: int, method: str, device: str, batch: PackedBatch, hidden_size: int, layers: int) -> tuple[float, float]:
    """Return seconds and megabytes beyond those before the pass."""
    model, batch = make_model(hidden_size, layers).to(device), batch.to(device)
    run(method, model, make_batch(64, 32).to(device))  # the first pass allocates what every pass needs
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated() / 2**20, time.perf_counter()
        run(method, model, batch)
        torch.cuda.synchronize()
        return time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**20 - before
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, time.process_time()
    run(method, model, batch)
    return time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--longest", type=int, default=4096, help="length of the longest sample")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of Ulysses ranks (CPU only)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    print(f"{machine()}\n{options.layers} layers, hidden size {options.hidden_size}, forward and backward, 1 thread per rank\n")
    print_header(["tokens", "samples, fill", "way", "CPU s", "of packed", "extra MB", "of packed"])
    for tokens in options.tokens:
        batch = make_batch(tokens, options.longest)
        fill = tokens / (batch.num_samples * batch.max_seqlen)
        jobs = [("packed", 1), *(("packed", size) for size in options.ranks if options.device == "cpu"), ("padded", 1), ("masked", 1)]
        first: tuple[float, float] | None = None
        for method, ranks in jobs:
            sizes = (method, options.device, batch, options.hidden_size, options.layers)
            if options.device == "cuda":  # a forked process cannot use a GPU that its parent has used
                seconds, memory = measure(0, 1, *sizes)
            else:
                seconds, memory = (max(values) for values in zip(*run_distributed(measure, ranks, *sizes, timeout=900.0, pg_timeout=600.0)))
            name = method if ranks == 1 else f"{method}, {ranks} ranks"
            first = first or (seconds, memory)
            numbers = [f"{seconds:.2f}", f"{seconds / first[0]:.2f}x", f"{memory:,.0f}", f"{memory / first[1]:.2f}x"]
            print_row([f"{tokens:,}", f"{batch.num_samples}, {fill:.0%}", name, *numbers])


if __name__ == "__main__":
    main()

"""Compare ways to get log-probs and entropies from hidden states: time and extra memory of one forward and backward pass.

Run ``python -m benchmarks.scoring`` for the sizes of the documentation, or see ``--help``. Each measurement runs in a process of its
own, because the peak of a process's memory never falls. Time is CPU time of one thread on a CPU, elapsed time on a GPU.
Liger (``pip install liger-kernel``) is compared where it can be imported; its log-probs come without an entropy.
"""

import argparse
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from benchmarks.measuring import machine, print_header, print_row
from lightning_rlbatch.models.scoring import token_log_probs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Write down the definition with all logits in memory."""
    log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight).float(), dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(dim=-1)


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Use the chunked log-probs inside liger-kernel's PPO loss (0.8), which know no entropy."""
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    return LigerFusedLinearPPOBase.chunk_forward(hidden[None], weight, targets[None]).squeeze(0), None


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Score with this package."""
    return token_log_probs(hidden, weight, targets)


def ours_all_kept(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Score with this package and memory for every tile."""
    return token_log_probs(hidden, weight, targets, head_memory_mib=1 << 20)


METHODS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]] = {
    "naive": naive,
    "ours": ours,
    "ours, all kept": ours_all_kept,
    "liger": liger,
}


def available(name: str) -> bool:
    """Return whether a method's package is installed."""
    if name != "liger":
        return True
    try:
        import liger_kernel  # noqa: F401  # only asks whether it is there
    except ImportError:
        return False
    return True


def measure(method: str, tokens: int, vocabulary: int, hidden_size: int, dtype: str, device: str, repeats: int) -> tuple[float, float]:
    """Return seconds (median) and extra peak memory in MB of a forward and backward pass."""
    torch.set_num_threads(1)
    generator = torch.Generator(device).manual_seed(0)
    # Made in place: a temporary copy of the weight would raise the peak before the measurement starts.
    hidden = torch.empty(tokens, hidden_size, device=device, dtype=DTYPES[dtype]).normal_(generator=generator).requires_grad_()
    weight = torch.empty(vocabulary, hidden_size, device=device, dtype=DTYPES[dtype])
    weight.normal_(std=hidden_size**-0.5, generator=generator).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
    seconds = []
    before = memory(device)
    for _ in range(repeats):
        hidden.grad = weight.grad = None
        start = clock(device)
        log_probs, entropy = METHODS[method](hidden, weight, targets)
        loss = log_probs.sum() if entropy is None else log_probs.sum() + 0.1 * entropy.sum()
        loss.backward()
        seconds.append(clock(device) - start)
        del log_probs, entropy, loss
    return statistics.median(seconds), peak_memory(device) - before


def clock(device: str) -> float:
    """Return CPU seconds, or elapsed seconds once a GPU is done."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def memory(device: str) -> float:
    """Return the memory in use now, in MB."""
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 1e6
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak_memory(device: str) -> float:
    """Return the most memory used so far, in MB."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def in_own_process(*arguments: object) -> tuple[float, float]:
    """Run `measure` in a fresh process."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, arguments))
    process.start()
    sender.close()
    try:
        result: tuple[float, float] = receiver.recv()
    except EOFError:
        result = (float("nan"), float("nan"))  # out of memory
    process.join()
    return result


def _child(pipe: Connection, arguments: tuple[object, ...]) -> None:
    pipe.send(measure(*arguments))  # type: ignore[arg-type]  # checked by the caller's signature


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 151_936])
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--method", nargs="+", choices=list(METHODS), default=[name for name in METHODS if available(name)])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    print(f"{machine()}\nOne forward and backward pass, 1 thread, hidden size {options.hidden}, median of {options.repeats}\n")
    print_header(["tokens x vocabulary", "dtype", "method", "seconds", "of the first", "extra MB", "of the first"])
    for tokens in options.tokens:
        for vocabulary in options.vocabulary:
            for dtype in options.dtype:
                first: tuple[float, float] | None = None
                for method in options.method:
                    seconds, megabytes = in_own_process(method, tokens, vocabulary, options.hidden, dtype, options.device, options.repeats)
                    first = first or (seconds, megabytes)
                    numbers = [f"{seconds:.2f}", f"{seconds / first[0]:.2f}x", f"{megabytes:,.0f}", f"{megabytes / first[1]:.3f}x"]
                    print_row([f"{tokens:,} x {vocabulary:,}", dtype, method, *numbers])


if __name__ == "__main__":
    main()

"""Check and measure everything that needs a GPU, in under 6 minutes on one: parity, attention, scoring head, training.

Run ``python -m benchmarks.gpu`` in the repository's folder on a machine with a GPU, or ``--small`` anywhere, which runs the same code with
toy sizes on the CPU. A part that fails is reported and does not stop the others; the exit code is then 1.
"""

import argparse
import dataclasses
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import scoring
from benchmarks.measuring import machine, print_header, print_row
from benchmarks.trainers import _quiet, adamw, no_reward
from lightning_rlbatch import MiniBatch, PPOModule, RLBatchFSDPStrategy
from lightning_rlbatch.callbacks.throughput_monitor import flops_coefficients, step_flops
from lightning_rlbatch.functional.attention import varlen_attention
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.planning import plan_mini_batch
from lightning_rlbatch.models.attention_backends import BACKENDS, select_attention, why_not
from lightning_rlbatch.testing.parity import compare_layouts, random_batch


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a run.

    Attributes:
        attention: Tokens, query heads, key/value heads, head size.
        parity: Lengths of the samples of the model check.
        head: Tokens, vocabulary, hidden size of the scoring head.
        models: Name to the shape of a Llama.
        budget: Tokens of a micro-batch.
        micro_batches: Per optimizer step.
        steps: Measured optimizer steps.
    """

    attention: tuple[int, int, int, int]
    parity: str
    head: tuple[int, int, int]
    models: dict[str, dict[str, int]]
    budget: int
    micro_batches: int
    steps: int


def shape(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }


FULL = Size(
    attention=(16384, 16, 4, 128),
    parity="700,1,33,256,128,19",
    head=(8192, 151_936, 1536),
    # the shapes of two well-known families of this size
    models={"0.5B": shape(896, 24, 14, 2, 4864, 151_936), "1.5B": shape(1536, 28, 12, 2, 8960, 151_936)},
    budget=16384,
    micro_batches=4,
    steps=3,
)
SMALL = Size(
    attention=(256, 4, 2, 16),
    parity="13,1,6",
    head=(64, 512, 32),
    models={"tiny": shape(64, 2, 4, 2, 96, 256)},
    budget=256,
    micro_batches=2,
    steps=1,
)


def draw_lengths(total: int, longest: int) -> list[int]:
    """Return log-normal lengths, sigma 1, that add up to ``total``."""
    draw, lengths = np.random.default_rng(0), []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, longest, max(2, int(longest / 8 * np.exp(draw.standard_normal())))))
    return lengths if lengths[-1] > 1 else [*lengths[:-2], lengths[-2] + 1]


def now(device: str) -> float:
    """Return elapsed seconds, once the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def median_seconds(call: Callable[[], object], device: str, repeats: int = 5) -> float:
    call()
    seconds = []
    for _ in range(repeats):
        start = now(device)
        call()
        seconds.append(now(device) - start)
    return statistics.median(seconds)


def check_attention(size: Size, device: str) -> None:
    """Compare every attention backend in bf16, forward and backward, with fp32; time them."""
    tokens, heads, kv_heads, width = size.attention
    lengths = draw_lengths(tokens, tokens // 4)
    generator = torch.Generator(device).manual_seed(0)
    made = [torch.randn(tokens, count, width, generator=generator, device=device) for count in (heads, kv_heads, kv_heads)]
    halves = [value.bfloat16().requires_grad_() for value in made]
    exact = [value.detach().float().requires_grad_() for value in halves]
    outside = torch.randn(tokens, heads, width, generator=generator, device=device)
    bounds = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=device)
    limit = 3e-2

    def run(attention: Any, inputs: list[Tensor], **options: Any) -> list[Tensor]:
        out = attention(*inputs, lengths, cu_seqlens=bounds, **options)
        return [out.detach(), *torch.autograd.grad((out * outside.to(out.dtype)).sum(), inputs)]

    print_header(["attention, bf16", "window", "output error", "gradient error", "ms, forward + backward"])
    for window in (None, max(2, tokens // 16)):
        reference = run(varlen_attention, exact, window=window)
        for backend in BACKENDS:
            reason = why_not(backend, *halves)
            if reason is not None:
                print_row([backend, window, f"not here: {reason}", "", ""])
                continue
            attention = select_attention(backend)
            errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(run(attention, halves, window=window), reference)]
            seconds = median_seconds(lambda f=attention, w=window: run(f, halves, window=w), device)
            print_row([backend, window, f"{errors[0]:.1e}", f"{max(errors[1:]):.1e}", f"{1000 * seconds:.1f}"])
            if not max(errors) < limit:
                raise AssertionError(f"{backend}, window {window}: relative error {max(errors):.1e} above {limit}")


def make_model(shape: dict[str, int], device: str, **options: Any) -> LlamaForCausalLM:
    """Return a Llama with random fp32 weights, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=32768, attn_implementation="sdpa", **options))


def check_model(size: Size, device: str) -> None:
    """Compare a model's packed and padded log-probs and gradients with each sample alone, fp32 and bf16, each backend."""
    name, first = next(iter(size.models.items()))
    model = make_model({**first, "num_hidden_layers": min(4, first["num_hidden_layers"])}, device)
    batch = random_batch(first["vocab_size"], [int(length) for length in size.parity.split(",")])
    probe = [torch.empty(1, 2, 16, device=device, dtype=torch.bfloat16)] * 3
    print_header([f"{name}, at most 4 layers", "layout", "log-probs", "entropy", "gradient", "norm"])
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 8e-2)):
        model = model.to(dtype)
        for backend in BACKENDS if dtype == torch.bfloat16 else ("sdpa",):
            if why_not(backend, *probe) is not None:
                continue
            report = compare_layouts(model, batch, backend=backend, tolerance=tolerance)
            for row in report.rows:
                numbers = [f"{value:.1e}" for value in (row.log_probs, row.entropy, row.gradient, row.norm)]
                print_row([f"{str(dtype)[6:]}, {backend}", row.layout, *numbers])
            if not report.passed:
                raise AssertionError(f"{dtype}, {backend}: above {tolerance}\n{report}")


def measure_head(size: Size, device: str) -> None:
    """Measure time and memory of the scoring head."""
    tokens, vocabulary, hidden = size.head
    print_header(["scoring head", "dtype", "ms", "extra MB"])
    for method in ("naive", "ours", "ours, all kept"):
        for dtype in ("bf16", "fp32"):
            seconds, megabytes = scoring.measure(method, tokens, vocabulary, hidden, dtype, device, 3)
            print_row([f"{method}, {tokens:,} x {vocabulary:,}", dtype, f"{1000 * seconds:.1f}", f"{megabytes:,.0f}"])
            if device == "cuda":
                torch.cuda.empty_cache()


class NoEngine:
    """Stands where a rollout engine would hold a second copy of the policy."""

    def wake(self) -> None: ...

    def sleep(self) -> None: ...


class UpdateOnly(PPOModule):
    """A policy that is updated and never rolled out."""

    def build_engine(self, model: Any) -> Any:
        return NoEngine()


class Batches:
    """A sized loader of the same optimizer step."""

    def __init__(self, batch: PackedBatch, steps: int, options: dict[str, Any]) -> None:
        self.batch, self.steps, self.options = batch, steps, options

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[MiniBatch]:
        for _ in range(self.steps):
            plan = plan_mini_batch(self.batch.lengths, dp_size=1, **self.options)
            yield MiniBatch.cut(self.batch, plan.assignment[0], plan=plan)


class Watch(Callback):
    """Times steps, and keeps the FLOPs of one."""

    def __init__(self, device: str) -> None:
        self.device, self.ends, self.flops, self.computed, self.losses = device, [], 0, 0, []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: MiniBatch, batch_idx: int) -> None:
        self.ends.append(now(self.device))
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        if batch_idx == 0:
            assert batch.plan is not None
            self.flops = step_flops(batch.plan, *flops_coefficients(pl_module.policy))
            self.computed = sum(batch.plan.padded_num_tokens(0, step) for step in range(batch.plan.num_micro_steps))
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()


def train(shape: dict[str, int], batch: PackedBatch, device: str, steps: int, remove_padding: bool, cut: dict[str, Any]) -> Watch:
    """Run optimizer steps through the Trainer and the strategy, bf16 compute and fp32 weights."""
    module = UpdateOnly(lambda: make_model(shape, device), [no_reward], optimizer=adamw, remove_padding=remove_padding)
    watch = Watch(device)
    trainer = pl.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        strategy=RLBatchFSDPStrategy(),
        precision="bf16-mixed",
        max_epochs=1,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, Batches(batch, 1 + steps, {**cut, "padded": not remove_padding}))
    return watch


def measure_training(size: Size, device: str) -> None:
    """Compare packed with padded updates: tokens per second, share of the device's peak, memory."""
    _quiet()
    peak = get_available_flops(torch.device(device, 0), torch.bfloat16) if device == "cuda" else None
    lengths = draw_lengths(size.budget * size.micro_batches, size.budget // 4)
    mask = torch.cat([torch.arange(length) >= max(1, length // 8) for length in lengths])
    generator = torch.Generator().manual_seed(0)
    print_header(["model, update", "computed / real tokens", "real tokens / s", "MFU", "peak GB", "loss of step 2"])
    for name, shape in size.models.items():
        ids = torch.randint(shape["vocab_size"], (len(mask),), generator=generator)
        fields = {"old_log_probs": torch.full(mask.shape, -float(np.log(shape["vocab_size"]))), "advantages": torch.ones(mask.shape)}
        batch = PackedBatch([0, *np.cumsum(lengths).tolist()], {"input_ids": ids, "response_mask": mask, **fields})
        rows = max(1, size.budget // max(lengths))  # of the longest samples as many as the budget holds: what a static size must assume
        ways: dict[str, tuple[bool, dict[str, Any]]] = {
            "packed, token budget": (True, {"max_tokens_per_rank": size.budget}),
            f"padded, {rows} samples": (False, {"micro_batch_size": rows, "balance": False}),
            "padded, token budget": (False, {"max_tokens_per_rank": size.budget}),
        }
        for way, (remove_padding, cut) in ways.items():
            watch = train(shape, batch, device, size.steps, remove_padding, cut)
            seconds = statistics.median(b - a for a, b in zip(watch.ends, watch.ends[1:]))
            mfu = f"{watch.flops / seconds / peak:.1%}" if peak else "-"
            memory = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if device == "cuda" else "-"
            real = sum(lengths)
            print_row([f"{name}, {way}", f"{watch.computed / real:.2f}", f"{real / seconds:,.0f}", mfu, memory, f"{watch.losses[1]:.6f}"])
            del watch
            gc.collect()  # Trainer and module refer to each other
            if device == "cuda":
                torch.cuda.empty_cache()


PARTS = {"attention": check_attention, "model": check_model, "head": measure_head, "training": measure_training}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="toy sizes")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=330.0, help="begin no further part after so long")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.small:
        parser.error("There is no GPU here. Pass --small to run toy sizes on the CPU.")
    size = SMALL if options.small else FULL
    print(machine())
    start, failed = time.monotonic(), []
    for name in options.part:
        if time.monotonic() - start > options.seconds:
            print(f"\nLeft out, since {options.seconds:.0f} s are over: {name}")
            continue
        print(f"\n### {name}\n", flush=True)
        try:
            PARTS[name](size, options.device)
        except Exception:  # a report of all parts is worth more than the first failure
            failed.append(name)
            traceback.print_exc(file=sys.stdout)
        print(f"\n{name}: {time.monotonic() - start:.0f} s so far", flush=True)
    print(f"\nFailed: {', '.join(failed) or 'nothing'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""Cost of a training step apart from the model: our strategy against Lightning's own, CPU time per step on two ranks.

Run ``python -m benchmarks.strategy``. The model is one layer of 8 x 8 numbers, so that nothing but the strategy and the loop takes time.
Blocks of steps of each strategy alternate, in processes of their own; the median of the blocks is printed. Function calls (Python's and
built-in ones) are counted beside the time, since they do not depend on what else the machine does.
"""

import argparse
import cProfile
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: forked ranks of a multi-threaded parent hang

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from benchmarks.measuring import machine, print_header, print_row
from benchmarks.trainers import _quiet
from lightning_rlbatch import MiniBatch, RLBatchFSDPStrategy, RLBatchModule
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.modules.base import MicroBatchOutput
from lightning_rlbatch.testing import run_distributed

WARM_UP = 20
PROFILED = 20


class Tiny(pl.LightningModule):
    """A linear layer under automatic optimization."""

    def __init__(self, shards_itself: bool) -> None:
        super().__init__()
        self.shards_itself = shards_itself
        self.layer = torch.nn.Linear(8, 8)

    def configure_model(self) -> None:
        if self.shards_itself:  # ModelParallelStrategy leaves this to the module; ours finds the layers
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class TinyPlanned(RLBatchModule):
    """The same layer under our loop: counted denominators, gradient norm, reduced metrics."""

    def build_models(self) -> None:
        self.layer = torch.nn.Linear(8, 8)

    def micro_batch_step(self, micro_batch: PackedBatch, denominators: Any) -> MicroBatchOutput:
        loss = self.layer(micro_batch["features"]).square().sum() / denominators.num_tokens
        return MicroBatchOutput(loss, {"train/something": (loss.detach(), 1.0)})


class Steps(Callback):
    """CPU time from the end of the warm-up to the end, and the function calls of some steps after that."""

    def __init__(self, num_steps: int) -> None:
        self.last_timed = WARM_UP + num_steps
        self.began = self.ended = 0.0
        self.profile = cProfile.Profile()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == WARM_UP:
            self.began = time.process_time()
        if batch_idx + 1 == self.last_timed:
            self.ended = time.process_time()
            self.profile.enable()
        if batch_idx + 1 == self.last_timed + PROFILED:
            self.profile.disable()

    @property
    def calls(self) -> float:
        """Function calls per step."""
        return sum(entry.callcount for entry in self.profile.getstats()) / PROFILED


class Same:
    """A sized loader of one batch; Lightning would take a list for several loaders."""

    def __init__(self, batch: Any, steps: int) -> None:
        self.batch, self.steps = batch, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch] * self.steps)


def mini_batch() -> MiniBatch:
    ids, mask = torch.zeros(8, dtype=torch.int64), torch.arange(8) > 0
    return MiniBatch([PackedBatch([0, 8], {"input_ids": ids, "response_mask": mask, "features": torch.ones(8, 8)})])


def measure(rank: int, ranks: int, name: str, num_steps: int) -> tuple[float, float]:
    """Return CPU milliseconds and function calls per step of this rank."""
    _quiet()
    torch.manual_seed(0)
    planned = name == "rlbatch_fsdp, RLBatchModule"
    strategies = {
        "ModelParallelStrategy": lambda: ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        "DDPStrategy": DDPStrategy,
    }
    strategy = strategies.get(name, RLBatchFSDPStrategy)()
    module = TinyPlanned() if planned else Tiny(name == "ModelParallelStrategy")
    batch = mini_batch() if planned else torch.ones(8, 8)
    watch = Steps(num_steps)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_steps=WARM_UP + num_steps + PROFILED,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, Same(batch, WARM_UP + num_steps + PROFILED))
    return 1000 * (watch.ended - watch.began) / num_steps, watch.calls


METHODS = ("ModelParallelStrategy", "rlbatch_fsdp", "DDPStrategy", "rlbatch_fsdp, RLBatchModule")


def main(arguments: list[str] | None = None) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="measured steps of a block")
    parser.add_argument("--blocks", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    blocks: dict[str, list[float]] = {name: [] for name in METHODS}
    calls: dict[str, float] = {}
    for _ in range(options.blocks):
        for name, times in blocks.items():
            ranks = run_distributed(measure, 2, name, options.steps, init_process_group=False, timeout=600.0)
            times.append(statistics.mean(seconds for seconds, _ in ranks))
            calls[name] = ranks[0][1]
    print(f"{machine()}\n2 ranks, {options.blocks} blocks of {options.steps} steps\n")
    print_header(["strategy", "CPU ms / step", "to ModelParallelStrategy", "calls / step", "to ModelParallelStrategy", "blocks, ms"])
    reference = METHODS[0]
    for name, times in blocks.items():
        middle = statistics.median(times)
        ratios = middle / statistics.median(blocks[reference]), calls[name] / calls[reference]
        listed = ", ".join(f"{value:.2f}" for value in times)
        print_row([name, f"{middle:.2f}", f"{ratios[0]:.3f}", f"{calls[name]:,.0f}", f"{ratios[1]:.3f}", listed])


if __name__ == "__main__":
    main()

"""Bytes that a rank moves per optimizer step are those of the formulas in docs/scaling.md."""

import collections

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.strategies.sharding import find_blocks, reduces_unused_parameters
from lightning_rlbatch.testing import run_distributed
from tests.helpers import make_trainer, sgd
from tests.strategies.runs import sft, sft_data

# torch 2.13 has new names for the two collectives of FSDP2.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class CountsBytes(Callback):
    """Counts what this rank receives (gather) or sends (scatter), and the sizes of all-reduces, inside optimizer steps."""

    def __init__(self):
        self.bytes, self.micro_steps, self.active = collections.Counter(), 0, False
        for name, other in ((GATHER, 0), (SCATTER, 1), ("all_reduce", None)):
            setattr(dist, name, self.counting(name, getattr(dist, name), other))  # in this forked process only

    def counting(self, name, original, smaller):
        def call(*tensors, **options):
            if self.active:
                given = [value for value in (*tensors, *options.values()) if isinstance(value, torch.Tensor)]
                sizes = sorted(tensor.numel() * tensor.element_size() for tensor in given)
                self.bytes[name] += sizes[-1] - (0 if smaller is None else sizes[0])
            return original(*tensors, **options)

        return call

    def on_train_batch_start(self, trainer, module, batch, index):
        self.active = True
        self.micro_steps += len(batch.micro_batches)

    def on_train_batch_end(self, *args):
        self.active = False


@pytest.mark.parametrize("grad_sync", ["last", "every"])
@pytest.mark.parametrize(("world_size", "reshard"), [(2, True), (2, False), (4, True), (8, True)])
def test_bytes_of_a_step_follow_the_formulas(world_size, reshard, grad_sync):
    def main(rank, size):
        counter = CountsBytes()
        strategy = RLBatchFSDPStrategy(reshard_after_forward=reshard, grad_sync=grad_sync)
        module = sft(optimizer=sgd)
        trainer = make_trainer(size, strategy, max_epochs=1, callbacks=[counter])
        trainer.fit(module, datamodule=sft_data(max_tokens_per_rank=None, micro_batch_size=1))
        in_blocks = sum(p.numel() for block in find_blocks(module.policy, None) for p in block.parameters())
        return dict(counter.bytes), counter.micro_steps, trainer.global_step, sum(p.numel() for p in module.parameters()), in_blocks

    for moved, micro_steps, steps, parameters, in_blocks in run_distributed(main, world_size, init_process_group=False):
        share = 4 * (world_size - 1) / world_size  # fp32 bytes that come from the others
        gathered = micro_steps * share * (parameters + (in_blocks if reshard else 0))
        scattered = (micro_steps if grad_sync == "every" else steps) * share * parameters
        assert moved[GATHER] == pytest.approx(gathered, rel=0.08)  # rows that do not divide are padded
        assert moved[SCATTER] == pytest.approx(scattered, rel=0.08)
        # counts before, metrics after; before torch 2.13 also which parameters have a gradient; nothing else
        assert moved["all_reduce"] == steps * (2 if reduces_unused_parameters() else 3) * 1024

"""Bytes and CPU time of moving samples to the ranks of a plan: one variable-size all-to-all against gathering everything everywhere.

Run ``python -m benchmarks.exchange``, or see ``--help``. Bytes are counted at torch's own functions; CPU time is one
rank's.
"""

import argparse
import gc
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: forked ranks of a multi-threaded parent hang

import torch
import torch.distributed as dist

from lightning_rlbatch.distributed.exchange import exchange_samples, plan_destinations
from lightning_rlbatch.distributed.mesh import build_meshes
from lightning_rlbatch.distributed.reductions import all_gather_lengths, all_gather_rows
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.planning import plan_mini_batch
from lightning_rlbatch.testing import run_distributed


def rollouts(rank: int, num_samples: int, max_length: int) -> PackedBatch:
    """Return samples with log-normal lengths (a 100-fold spread) and the fields of a policy update: 25 bytes per token."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randn(num_samples, generator=generator).mul(1.2).add(6.0).exp().long().clamp(8, max_length).tolist()
    tokens = sum(lengths)
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = False
    per_token = {
        "input_ids": torch.randint(0, 50_000, (tokens,), generator=generator),
        "response_mask": mask,
        **{name: torch.randn(tokens, generator=generator) for name in ("old_log_probs", "ref_log_probs", "advantages", "returns")},
    }
    return PackedBatch([0, *torch.tensor(lengths).cumsum(0).tolist()], per_token, {"group_ids": torch.arange(num_samples)})


def gather_everything(batch: PackedBatch, group: dist.ProcessGroup | None) -> PackedBatch:
    """Give every rank all samples, field by field."""
    lengths = [length for of_rank in all_gather_lengths(batch.lengths, group) for length in of_rank]
    per_token = {name: all_gather_rows(value, group)[0] for name, value in batch.per_token.items()}
    per_sample = {name: all_gather_rows(value, group)[0] for name, value in batch.per_sample.items()}
    return PackedBatch([0, *torch.tensor(lengths).cumsum(0).tolist()], per_token, per_sample)


def measure(rank: int, world_size: int, sp_size: int, num_samples: int, max_length: int) -> dict[str, float]:
    received = [0]
    original = dist.all_to_all_single, dist.all_gather

    def all_to_all(output, given, *rest, **options):
        received[0] += output.numel() * output.element_size()
        return original[0](output, given, *rest, **options)

    def all_gather(outputs, given, **options):
        received[0] += (len(outputs) - 1) * given.numel() * given.element_size()
        return original[1](outputs, given, **options)

    dist.all_to_all_single, dist.all_gather = all_to_all, all_gather
    meshes = build_meshes("cpu", sequence_parallel_size=sp_size)
    batch = rollouts(rank, num_samples, max_length)
    lengths = all_gather_lengths(batch.lengths, meshes.world_group)
    plan = plan_mini_batch(
        [length for of_rank in lengths for length in of_rank], dp_size=meshes.dp_size, sp_size=sp_size, max_tokens_per_rank=max_length
    )
    result: dict[str, float] = {"tokens": batch.num_tokens}

    def timed(name, action):
        received[0], started = 0, time.process_time()
        output = action()
        result[f"{name} ms"] = (time.process_time() - started) * 1e3
        result[f"{name} bytes"] = received[0]
        return output

    def one_round():
        destinations, order = plan_destinations(plan.assignment, [len(row) for row in lengths], rank, sp_size=sp_size)
        mine, route = timed("exchange", lambda: exchange_samples(batch, destinations, meshes.world_group, order=order))
        timed("back", lambda: route.back(mine["old_log_probs"]))
        everything = timed("gather", lambda: gather_everything(batch, meshes.world_group))
        picked = everything.select([index for step in plan.assignment[meshes.dp_rank] for index in step])
        assert all(mine[name].equal(picked[name]) for name in (*mine.per_token, *mine.per_sample))

    one_round()  # warm up
    gc.collect()
    gc.freeze()  # a collection of all that torch's import made takes 100 ms and would hit one cell of the table at random
    one_round()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples-per-rank", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=8192)
    options = parser.parse_args()
    print("mean per rank: MB received from other ranks (integers about samples included), milliseconds of CPU time")
    print("ranks  sp   tokens | exchange  gather all  ratio | exchange  gather all | results back")
    for world_size, sp_size in ((2, 1), (4, 1), (4, 2), (8, 1), (8, 2)):
        rows = run_distributed(measure, world_size, sp_size, options.samples_per_rank, options.max_length)
        mean = {name: sum(row[name] for row in rows) / world_size for name in rows[0]}
        ratio = mean["gather bytes"] / mean["exchange bytes"]
        size = {name: f"{mean[f'{name} bytes'] / 1e6:.2f} MB" for name in ("exchange", "gather", "back")}
        took = {name: f"{mean[f'{name} ms']:.1f} ms" for name in ("exchange", "gather", "back")}
        print(
            f"{world_size:>5} {sp_size:>3} {mean['tokens']:>8.0f} | {size['exchange']:>8}  {size['gather']:>10} {ratio:>5.1f}x "
            f"| {took['exchange']:>8}  {took['gather']:>10} | {size['back']} {took['back']}"
        )


if __name__ == "__main__":
    main()

"""What ranks do together: meshes, small reductions, the exchange of samples, sequence parallelism, failing together."""

from lightning_rlbatch.distributed.exchange import Route, exchange_samples, plan_destinations
from lightning_rlbatch.distributed.failure import PeerFailedError, fail_together
from lightning_rlbatch.distributed.fingerprint import CollectiveCheck
from lightning_rlbatch.distributed.heads import HeadPlan
from lightning_rlbatch.distributed.mesh import Meshes, build_meshes, data_parallel_meshes, single_process_meshes
from lightning_rlbatch.distributed.micro_steps import max_num_micro_steps
from lightning_rlbatch.distributed.reductions import (
    all_gather_lengths,
    all_gather_rows,
    all_reduce_max,
    all_reduce_min,
    all_reduce_sums,
    gradient_scale,
)
from lightning_rlbatch.distributed.ulysses import gather_sequence, pad_seq_lens, shard_sequence, ulysses_attention
from lightning_rlbatch.distributed.whole import reshard, whole_tensor

__all__ = [
    "CollectiveCheck",
    "HeadPlan",
    "Meshes",
    "PeerFailedError",
    "Route",
    "all_gather_lengths",
    "all_gather_rows",
    "all_reduce_max",
    "all_reduce_min",
    "all_reduce_sums",
    "build_meshes",
    "data_parallel_meshes",
    "exchange_samples",
    "fail_together",
    "gather_sequence",
    "gradient_scale",
    "max_num_micro_steps",
    "pad_seq_lens",
    "plan_destinations",
    "reshard",
    "shard_sequence",
    "single_process_meshes",
    "ulysses_attention",
    "whole_tensor",
]

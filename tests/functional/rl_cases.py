"""Shared by the tests of losses and advantages: the value file, packing of padded cases, several ranks in one process."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rlbatch.functional.algorithms import (
    CISPO,
    DPPO,
    GMPO,
    GSPO,
    SAPO,
    ClipCov,
    FunctionLoss,
    KLCov,
    PolicyLoss,
    PPOClip,
    Reinforce,
)
from lightning_rlbatch.functional.peers import Peers

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case for case in json.loads((Path(__file__).parent.parent / "data" / "algorithm_values.json").read_text())["cases"]
}


def own_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Stand for a user's loss: a penalty of the squared log-ratio."""
    return -advantages * log_probs + (log_probs - old_log_probs) ** 2


LOSSES: dict[str, PolicyLoss] = {
    "ppo": PPOClip(),
    "ppo_dual": PPOClip(clip_low=0.2, clip_high=0.28, dual_clip=1.5),
    "gspo": GSPO(clip_low=0.05, clip_high=0.1),
    "gmpo": GMPO(),
    "cispo": CISPO(clip_low=0.3, clip_high=0.3),
    "sapo": SAPO(),
    "dppo_tv": DPPO(),
    "dppo_kl": DPPO(divergence="kl", threshold_low=0.05, threshold_high=0.05, max_ratio=1.5),
    "reinforce": Reinforce(),
    "reinforce_tis": Reinforce(max_ratio=1.2),
    "clip_cov": ClipCov(fraction=0.2, lower=0.01, upper=5.0),
    "kl_cov": KLCov(fraction=0.2),
    "function": FunctionLoss(own_loss),
}


def padded(rows: Sequence[Sequence[Any]], dtype: torch.dtype = torch.float64) -> Tensor:
    """Flatten a padded ``[B, S]`` case: B samples of S tokens, whatever the mask."""
    return torch.tensor([[float(x) for x in row] for row in rows], dtype=dtype).flatten()


def mask_of(rows: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
    """Return the response mask and cu_seqlens of a padded case."""
    width = len(rows[0])
    return padded(rows).bool(), torch.arange(len(rows) + 1, dtype=torch.int32) * width


def run_ranks(num_ranks: int, work: Callable[[int, Peers], Any]) -> list[Any]:
    """Run ``work(rank, peers)`` on threads that meet at every gather, as data-parallel ranks would."""
    barrier = threading.Barrier(num_ranks, timeout=20)
    board: list[Any] = [None] * num_ranks
    results: list[Any] = [None] * num_ranks

    def gather(rank: int) -> Callable[[Tensor], tuple[Tensor, list[int]]]:
        def exchange(rows: Tensor) -> tuple[Tensor, list[int]]:
            board[rank] = rows
            barrier.wait()
            everything = list(board)
            barrier.wait()
            return torch.cat(everything), [part.shape[0] for part in everything]

        return exchange

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, Peers(gather(rank), rank))
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results

"""Measure how long each rank waits for the others, micro-step by micro-step."""

import csv
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from lightning_rlbatch.distributed.mesh import SHARD, Meshes

FILE_NAME = "waiting.csv"


class WaitingClock:
    """Times a barrier in front of every point at which ranks need each other, for one optimizer step.

    Under FSDP these points are the gatherings of parameters: before each sharded block runs forward, and before it runs backward. A rank
    that arrives early waits in the barrier, where the time can be told from computing, instead of inside the gathering that follows. All
    ranks run the same blocks in the same order (FSDP itself depends on it), so all of them meet in the same barriers. Other strategies
    wait once per step, where :meth:`meet` is called.

    Args:
        module: Its sharded blocks are watched; hooks are removed by :meth:`stop`.
        meshes: Groups of the run.
        device: Of the model.
    """

    def __init__(self, module: nn.Module, meshes: Meshes, device: torch.device) -> None:
        self._group = meshes.world_group if meshes.fsdp is None else meshes.fsdp.get_group(SHARD)
        self._world = meshes.world_group
        self._device = device
        self._seconds = [0.0]
        self._handles: list[RemovableHandle] = []
        for block in module.modules():
            if isinstance(block, FSDPModule):
                assert isinstance(block, nn.Module)
                # Before FSDP's own hooks, which gather.
                self._handles.append(block.register_forward_pre_hook(self._before_forward, prepend=True))
                self._handles.append(block.register_forward_hook(self._after_forward, prepend=True))

    @property
    def watches_blocks(self) -> bool:
        """Whether there are sharded blocks."""
        return bool(self._handles)

    def next_micro_step(self) -> None:
        """Count what follows for the next micro-step."""
        self._seconds.append(0.0)

    def meet(self) -> None:
        """Wait for the other ranks of the group, and add the time to the current micro-step."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what was launched is this rank's own work
        start = time.perf_counter()
        with torch.no_grad():
            flag = torch.zeros(1, device=self._device)
            dist.all_reduce(flag, group=self._group)
            flag.item()
        self._seconds[-1] += time.perf_counter() - start

    def stop(self) -> Tensor:
        """Stop watching.

        Returns:
            ``[W, K]`` float64, seconds that each rank waited in each micro-step, the same on every rank.
        """
        self.detach()
        own = torch.tensor(self._seconds[:-1], dtype=torch.float64, device=self._device)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(self._world))]
        dist.all_gather(found, own, group=self._world)
        return torch.stack(found).cpu()

    def detach(self) -> None:
        """Remove the hooks; no collective."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_forward(self, block: nn.Module, inputs: Any) -> None:
        self.meet()

    def _after_forward(self, block: nn.Module, inputs: Any, output: Any) -> None:
        seen: list[bool] = []

        def before_backward(gradient: Tensor) -> None:
            if not seen:  # a block with several outputs is gathered once
                seen.append(True)
                self.meet()

        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(before_backward)  # type: ignore[no-untyped-call]  # torch has no type for it


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts: Any = ()
    if isinstance(output, dict):  # outputs of transformers are dictionaries too
        parts = output.values()
    elif isinstance(output, list | tuple):
        parts = output
    elif dataclasses.is_dataclass(output):
        parts = vars(output).values()
    return [tensor for part in parts for tensor in _tensors(part)]


class WaitingFile:
    """Rows of step, rank, micro-step and seconds, beside the metrics of a CSVLogger.

    Args:
        folder: Of the logger.
        keep: Go on with the file that is there, as a resumed run does.
    """

    def __init__(self, folder: str, *, keep: bool) -> None:
        self.path = Path(folder) / FILE_NAME
        self._keep = keep

    def write(self, step: int, seconds: Sequence[Sequence[float]]) -> None:
        """Append one optimizer step.

        Args:
            step: Its number.
            seconds: ``[W][K]``.
        """
        begins = not self._keep or not self.path.exists()
        self._keep = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w" if begins else "a", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            if begins:
                writer.writerow(["step", "rank", "micro_step", "seconds"])
            for rank, row in enumerate(seconds):
                writer.writerows([step, rank, micro_step, f"{value:.6f}"] for micro_step, value in enumerate(row))

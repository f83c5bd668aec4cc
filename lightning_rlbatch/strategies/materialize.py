"""Give every rank rank 0's weights, a block at a time, wherever they lie before: on the CPU, a GPU or the meta device."""

import weakref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_rlbatch.distributed.reductions import all_gather_ints, gather_strings, stable_hash


class Materializer:
    """Copies weights from rank 0, so that shards of different initialisations are never mixed.

    Ranks other than 0 may hold meta tensors: they get memory for one block, which the caller shards before the next one, so that no
    rank but 0 ever holds the whole model. Buffers are copied too, those that no checkpoint holds included. Parameters that several
    modules share stay shared.

    Args:
        device: Device that computes and communicates.
        group: All ranks; None for a process that runs alone.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.device = device
        self.group = group
        # Old tensor to its copy, weakly: whole weights are freed as soon as the block that holds them is sharded.
        self._seen: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}

    def require_equal(self, module: nn.Module) -> None:
        """Refuse ranks that have built different models; collective.

        Args:
            module: A model that is not sharded yet.

        Raises:
            RuntimeError: Names or shapes differ; the same error on every rank.
        """
        text = "; ".join(
            f"{name} {tuple(value.shape)} {value.dtype}" for name, value in (*module.named_parameters(), *module.named_buffers())
        )
        hashes = all_gather_ints([stable_hash(text)], self.group)
        other = next((rank for rank, row in enumerate(hashes) if row != hashes[0]), None)
        if other is None:
            return
        texts = [row.split("; ") for row in gather_strings(text, self.group)]
        first = next(
            (pair for pair in zip(texts[0], texts[other]) if pair[0] != pair[1]), (f"{len(texts[0])} tensors", f"{len(texts[other])}")
        )
        raise RuntimeError(
            f"Ranks have built different models of class {type(module).__name__}: rank 0 has {first[0]}, rank {other} has {first[1]}."
            " Every rank must build the same model; seeds may differ, shapes may not."
        )

    def __call__(self, module: nn.Module) -> None:
        """Copy what is not sharded yet, in place; collective.

        Args:
            module: A block, or a root whose blocks are sharded already.
        """
        for child in module.modules():
            for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
                if not isinstance(parameter, DTensor):
                    self._replace(child, name, parameter)
            for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
                self._replace(child, name, buffer)

    def _replace(self, owner: nn.Module, name: str, old: Tensor) -> None:
        known, copied = self._seen.get(id(old), (None, None))
        new = copied() if known is not None and copied is not None and known() is old else None  # an id may belong to another one now
        if new is None:
            new = self._copied(old)
            self._seen[id(old)] = (weakref.ref(old), weakref.ref(new))
        if new is not old:
            self._seen[id(new)] = (weakref.ref(new), weakref.ref(new))  # a root meets its blocks' buffers again
            setattr(owner, name, new)

    @torch.no_grad()
    def _copied(self, old: Tensor) -> Tensor:
        data = torch.empty_like(old, device=self.device) if old.is_meta else old.detach().to(self.device)
        if self.group is not None:
            dist.broadcast(data, src=0, group=self.group)
        if not old.is_meta:
            old.data = data  # optimizers and ties that were made before keep their parameter
            return old
        return nn.Parameter(data, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else data

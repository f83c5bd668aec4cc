"""Shard the modules of a LightningModule with FSDP2, block by block."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_rlbatch.distributed.reductions import all_reduce_sums, group_size


def shardable_roots(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a module whose forward FSDP2 can hook.

    Containers without a forward of their own are opened.

    Args:
        module: Usually the LightningModule.

    Yields:
        Name and module of each child that has parameters.
    """
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            for inner_name, inner in shardable_roots(child):
                yield f"{name}.{inner_name}", inner
        else:
            yield name, child


def find_blocks(root: nn.Module, wrap_cls: Sequence[str] | None) -> list[nn.Module]:
    """Find the blocks that become FSDP2 groups of their own.

    Args:
        root: Module to search.
        wrap_cls: Class names of the blocks. None takes transformers' ``_no_split_modules`` where the model declares
            them, else the elements of every ``nn.ModuleList`` whose elements share one class.

    Returns:
        The blocks in module order, nested ones left out.

    Raises:
        MisconfigurationException: A name in ``wrap_cls`` matches no module.
    """
    if wrap_cls is None:
        declared = {name for child in root.modules() for name in getattr(child, "_no_split_modules", None) or ()}
        wrap_cls = sorted(declared)
        found = [child for child in root.modules() if type(child).__name__ in declared]
        if not found:
            found = [element for child in root.modules() if isinstance(child, nn.ModuleList) for element in _uniform(child)]
    else:
        found = [child for child in root.modules() if type(child).__name__ in wrap_cls]
        missing = sorted(set(wrap_cls) - {type(child).__name__ for child in found})
        if missing:
            present = Counter(type(child).__name__ for child in root.modules())
            raise MisconfigurationException(
                f"wrap_cls names {missing}, but no such module is in {type(root).__name__}. Classes present: {sorted(present)}."
            )
    nested = {id(inner) for block in found for inner in block.modules() if inner is not block}
    return [block for block in found if id(block) not in nested and block is not root]


def _uniform(container: nn.ModuleList) -> list[nn.Module]:
    elements = list(container)
    return elements if len({type(element) for element in elements}) == 1 else []


@dataclasses.dataclass(frozen=True)
class ShardingOptions:
    """How a model is cut.

    Attributes:
        mesh: One-dimensional (FSDP) or two-dimensional (HSDP: replicate, shard) mesh.
        policy: Mixed-precision policy.
        wrap_cls: See :func:`find_blocks`.
        reshard_after_forward: Free the gathered parameters of blocks between forward and backward.
        cpu_offload: Keep the shards in host memory.
        activation_checkpointing: Compute the activations of each block again in the backward pass.
        compile_backend: Backend with which ``torch.compile`` compiles each block, such as ``"inductor"``; None does not compile.
    """

    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    wrap_cls: Sequence[str] | None = None
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    activation_checkpointing: bool = False
    compile_backend: str | None = None


def shard(root: nn.Module, options: ShardingOptions, prepare: Callable[[nn.Module], None]) -> None:
    """Apply ``fully_shard`` to the blocks of a module, then to the module itself, in place.

    A module without trainable parameters (a frozen reference) is resharded after every forward at its root too: FSDP2
    otherwise keeps a root gathered until a backward that never comes.

    Args:
        root: Module whose forward is called as a whole.
        options: How to cut.
        prepare: Called with each part right before it is sharded, to give it its weights.

    Raises:
        MisconfigurationException: Blocks are wanted one by one, but none was found.
    """
    offload = CPUOffloadPolicy(pin_memory=options.mesh.device_type != "cpu") if options.cpu_offload else OffloadPolicy()
    frozen = not any(parameter.requires_grad for parameter in root.parameters())
    blocks = find_blocks(root, options.wrap_cls)
    if not blocks and options.compile_backend:
        raise MisconfigurationException(f"compile_backend found no blocks in {type(root).__name__}. Name their classes in wrap_cls.")
    for block in blocks:
        prepare(block)
        if options.activation_checkpointing and not frozen:
            checkpoint_activations(block)
        if options.compile_backend:
            block.compile(backend=options.compile_backend)
        fully_shard(
            block,
            mesh=options.mesh,
            mp_policy=options.policy,
            offload_policy=offload,
            reshard_after_forward=options.reshard_after_forward or frozen,
        )
    prepare(root)
    # A root without blocks is checkpointed as a whole: the option must not be without effect.
    if options.activation_checkpointing and not frozen and not blocks:
        checkpoint_activations(root)
    fully_shard(root, mesh=options.mesh, mp_policy=options.policy, offload_policy=offload, reshard_after_forward=True if frozen else None)
    if isinstance(root, FSDPModule):
        reduce_unused_parameters(root)
        root.sharding_options = options  # type: ignore[assignment]  # for `require_same_options`; neither tensor nor module


def require_same_options(root: nn.Module, options: ShardingOptions) -> None:
    """Refuse to go on with a module that an earlier run has sharded in another way.

    Args:
        root: Sharded already.
        options: What this run would do.

    Raises:
        MisconfigurationException: Names the options that would have no effect.
    """
    before = getattr(root, "sharding_options", None)
    if before is None:  # by the user's own fully_shard
        return
    changed = [
        f"{field.name} was {getattr(before, field.name)} and is {getattr(options, field.name)}"
        for field in dataclasses.fields(ShardingOptions)
        if not _is_same(getattr(before, field.name), getattr(options, field.name))
    ]
    if changed:
        raise MisconfigurationException(
            f"{type(root).__name__} was sharded by an earlier run, with other options: {'; '.join(changed)}. Make the module again (for"
            " example with load_from_checkpoint), or keep the options."
        )


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, DeviceMesh):
        return before.mesh_dim_names == now.mesh_dim_names and torch.equal(before.mesh, now.mesh)
    return bool(before == now)


def checkpoint_activations(block: nn.Module) -> None:
    """Make a module keep its inputs only, and compute its activations again in the backward pass; in place.

    The names of its parameters stay as they are. FSDP2's hooks stay outside: parameters are gathered once for the second
    computation and the backward pass.

    Args:
        block: A module whose forward is deterministic, or draws random numbers from torch's generators.
    """
    forward = block.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = recomputed


def reduces_unused_parameters() -> bool:
    """Tell whether this torch (2.13 and later) can reduce the gradients of parameters that a rank has not used."""
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def reduce_unused_parameters(root: FSDPModule) -> None:
    """Make every rank reduce the same parameters, used or not, where torch can.

    When ranks use different parameters in the synchronised backward, FSDP2 otherwise reduces the gradients of one rank's
    parameter with those of another's. On an older torch :func:`require_same_gradients` raises in that case.

    Args:
        root: A module that was sharded.
    """
    if reduces_unused_parameters():
        for module in root.modules() if isinstance(root, nn.Module) else ():
            if isinstance(module, FSDPModule):
                module.set_reduce_scatter_unused_params(True)


def require_same_gradients(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Refuse gradients that exist on some ranks only: FSDP2 has reduced different parameters with each other.

    Args:
        module: The LightningModule after the synchronised backward.
        group: All ranks.

    Raises:
        RuntimeError: On every rank, with the name of a parameter.
    """
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    present = [float(parameter.grad is not None) for parameter in module.parameters() if parameter.requires_grad]
    ranks_with = all_reduce_sums(dict(zip(names, present)), group)
    partial = [name for name, count in ranks_with.items() if 0 < count < group_size(group)]
    if partial:
        raise RuntimeError(
            f"{len(partial)} parameters have a gradient on some ranks only, for example {partial[0]!r}, so gradients of different"
            " parameters were mixed. Use torch 2.13 or later, or let every micro-batch, fillers included, use every parameter."
        )


def require_sharded(module: nn.Module) -> None:
    """Refuse trainable parameters outside every FSDP2 group: their gradients would silently differ between ranks.

    Args:
        module: The LightningModule after sharding.

    Raises:
        MisconfigurationException: Names the parameters that no group holds.
    """
    loose = [name for name, parameter in module.named_parameters() if parameter.requires_grad and not isinstance(parameter, DTensor)]
    if loose:
        raise MisconfigurationException(
            f"{len(loose)} trainable parameters are not sharded, for example {loose[0]!r}: their gradients would differ between ranks."
            " Hold them in a child module whose forward is called, not directly on the LightningModule, or freeze them."
        )

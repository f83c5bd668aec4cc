"""Refuse Trainers and options that cannot run our modules, in words that name what to use instead."""

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.distributed.tensor import DTensor


def check_makers(**makers: object) -> None:
    """Refuse an optimizer or a scheduler in the place of what makes one.

    Args:
        **makers: Options of the module by name; None is left out.

    Raises:
        TypeError: Says what to pass.
    """
    for option, maker in makers.items():
        if maker is not None and not callable(maker):
            raise TypeError(
                f"{option} must be a function that makes one, such as functools.partial(torch.optim.AdamW, lr=1e-6) for optimizer, but is a"
                f" {type(maker).__name__} that is made already: parameters exist when training starts, not before."
            )


def check_strategy(trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
    """Refuse strategies whose averaging of gradients is unknown, or that cannot run a module in shards.

    Args:
        trainer: The Trainer.
        module: The module, for the message.

    Raises:
        MisconfigurationException: The strategy is neither ours, nor DDP, nor one device; or an earlier run has sharded the module.
    """
    if hasattr(trainer.strategy, "meshes"):
        return
    if isinstance(trainer.strategy, (DDPStrategy, SingleDeviceStrategy)):
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise MisconfigurationException(
                f"{type(module).__name__} was sharded by an earlier run, but {type(trainer.strategy).__name__} needs it whole. Make it"
                " again (for example with load_from_checkpoint), or pass strategy='rlbatch_fsdp'."
            )
        return
    raise MisconfigurationException(
        f"{type(module).__name__} runs under RLBatchFSDPStrategy ('rlbatch_fsdp'), DDP or one device, but the Trainer has"
        f" {type(trainer.strategy).__name__}. Pass strategy='rlbatch_fsdp'."
    )


def check_manual_optimization(trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
    """Refuse Trainer options that have no effect under manual optimization, and point to ours.

    Args:
        trainer: The Trainer, before it checks the options itself.
        module: The module, for the message.

    Raises:
        MisconfigurationException: ``gradient_clip_val`` or ``accumulate_grad_batches`` is set.
    """
    name = type(module).__name__
    if trainer.gradient_clip_val:
        raise MisconfigurationException(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) has no effect on {name}, which optimizes manually. Remove it, and set"
            " the module's max_grad_norm: it clips the gradient of each role (policy, critic) by its global norm."
        )
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) has no effect on {name}: one batch of its loader is one"
            " optimizer step already. Remove it; micro-batches are cut by max_tokens_per_rank (or micro_batch_size), and mini_batch_size"
            " says how many samples an optimizer step has."
        )

"""Mixed precision through FSDP2's own policy, with fp32 master weights and fp32 gradient reduction."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from typing_extensions import override

_TRUE_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


class FSDPMixedPrecision(MixedPrecision):
    """Compute in bf16 or fp16 under FSDP2 while parameters, gradients and optimizer states stay fp32.

    ``Trainer(precision="bf16-mixed")`` is mapped to this plugin by :class:`RLBatchFSDPStrategy`. FSDP2 casts the
    gathered parameters, so autocast (which would gather fp32 and cast again in every operation) stays off.
    fp16 needs a dynamic loss scaler; Lightning refuses ``precision="16-mixed"`` for FSDP2 strategies, so pass
    ``Trainer(plugins=[FSDPMixedPrecision("16-mixed")])``.

    Args:
        precision: ``"bf16-mixed"`` or ``"16-mixed"``.
        device: Device type of the gradient scaler.
        scaler: The scaler of fp16; a ``torch.amp.GradScaler`` by default.
    """

    def __init__(
        self, precision: Literal["16-mixed", "bf16-mixed"] = "bf16-mixed", device: str = "cuda", scaler: torch.amp.GradScaler | None = None
    ) -> None:
        if precision == "16-mixed" and scaler is None:
            scaler = torch.amp.GradScaler(device)
        super().__init__(precision, device, scaler)

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        yield


def fsdp_precision(plugin: Precision | None) -> Precision | None:
    """Return the plugin that FSDP2 needs in place of an autocast plugin, any other plugin unchanged."""
    if isinstance(plugin, MixedPrecision) and not isinstance(plugin, FSDPMixedPrecision):
        return FSDPMixedPrecision("16-mixed" if plugin.precision == "16-mixed" else "bf16-mixed", plugin.device, plugin.scaler)
    return plugin


def convert_parameters(module: nn.Module, plugin: Precision) -> None:
    """Cast the parameters of a model as ``precision="bf16-true"`` and its kin ask for, in place; buffers keep their dtype.

    Lightning casts buffers too: positions computed from rounded rotary frequencies are wrong by more than one token at length 1,000.

    Args:
        module: A model that is not sharded yet.
        plugin: The plugin in use; any but a half-precision or double-precision one changes nothing.
    """
    dtype = _TRUE_DTYPES.get(str(plugin.precision))
    if dtype is not None:
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)


def mixed_precision_policy(plugin: Precision) -> MixedPrecisionPolicy:
    """Return FSDP2's policy for a precision plugin: half-precision compute, fp32 reduction.

    Args:
        plugin: The plugin in use.

    Returns:
        A policy for :func:`torch.distributed.fsdp.fully_shard`.
    """
    if not isinstance(plugin, FSDPMixedPrecision):
        return MixedPrecisionPolicy()
    dtype = torch.bfloat16 if plugin.precision == "bf16-mixed" else torch.float16
    kwargs: dict[str, Any] = {"param_dtype": dtype, "reduce_dtype": torch.float32}
    return MixedPrecisionPolicy(**kwargs)

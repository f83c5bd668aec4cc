"""The heads of a transformers model: what turns its hidden states into logits, and the one that makes values of them."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class ValueHead(nn.Linear):
    """One linear output on the hidden state, computed in fp32 whatever the dtype of its weight.

    It starts at zero: the first values are 0, and every rank starts alike without agreeing on a seed.
    """

    def __init__(self, hidden_size: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(hidden_size, 1, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set weight and bias to zero."""
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [n, h] to values [n], fp32 (fp64 for fp64 states)."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).squeeze(-1)


def make_value_head(model: PreTrainedModel) -> ValueHead:
    """Return a value head for a model's last hidden states, on the device and with the dtype of its weights."""
    parameter = next(model.parameters())
    head: Any = output_embeddings(model)
    # The size after the last norm, which some models project to another size than the embeddings'.
    hidden_size = head.weight.shape[1] if head is not None else model.config.get_text_config().hidden_size
    return ValueHead(hidden_size, device=parameter.device, dtype=parameter.dtype)


def output_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """Return the LM head, None if the model has none."""
    untyped: Any = model  # transformers leaves the method without annotations
    return cast(nn.Module | None, untyped.get_output_embeddings())


def logit_adjustments(model: PreTrainedModel) -> tuple[float, float | None]:
    """Return the factor on the LM head's output and the bound of its soft cap, as the model's family defines them.

    Args:
        model: A transformers model.

    Returns:
        ``(logit_scale, softcap)``: Cohere multiplies by ``logit_scale``, Granite divides and HyperCLOVA X multiplies by
        ``logits_scaling``, Falcon-H1 multiplies by ``lm_head_multiplier``; Gemma 2 and its kin cap at ``final_logit_softcapping``.
    """
    config = model.config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        scale *= float(getattr(config, name, None) or 1.0)
    if getattr(config, "logits_scaling", None):
        multiplies = "hyperclovax" in config.model_type
        scale *= config.logits_scaling if multiplies else 1.0 / config.logits_scaling
    return scale, getattr(config, "final_logit_softcapping", None)

"""The workload coefficient of a transformers model, from its config."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from lightning_rlbatch.functional.workload import workload_coefficient


def model_workload_coefficient(config: PreTrainedConfig, *, causal: bool = True) -> int:
    """Derive the coefficient of `attention_workload` from a model's config.

    The model is made without weights, so that what counts are the matrices it really has: grouped-query heads at their width, gated or
    plain MLPs, of a mixture of experts the chosen and the shared ones, and the LM head; not the embeddings, which are looked up. Layers
    with a sliding window count as linear, unless all layers have one.

    Args:
        config: Config of a causal LM.
        causal: Whether the attention kernel skips the masked half.

    Returns:
        The coefficient, for ``coefficient`` of the planners and ``workload_coefficient`` of the data modules.

    Raises:
        ValueError: transformers knows no causal LM with this config.

    Example:
        >>> from transformers import LlamaConfig
        >>> model_workload_coefficient(LlamaConfig())  # 7B
        50408
    """
    text = config.get_text_config()
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM  # transformers leaves its methods without annotations
        model = made.from_config(text)
    head = model.get_output_embeddings()
    looked_up = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outside = {id(module.weight) for module in (*looked_up, head) if module is not None}
    layers = sum(
        parameter.numel() * _share_of_experts(name, text)
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and id(parameter) not in outside
    )
    num_layers, heads = int(text.num_hidden_layers), int(text.num_attention_heads)
    kinds = list(getattr(text, "layer_types", None) or [])
    return workload_coefficient(
        params_per_layer=round(layers / num_layers),
        attention_width=heads * int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        num_layers=num_layers,
        head_params=0 if head is None else int(head.weight.numel()),
        causal=causal,
        quadratic_layers=kinds.count("full_attention") or None,
    )


def _share_of_experts(name: str, config: PreTrainedConfig) -> float:
    """Return the share of a parameter that one token passes through."""
    if ".experts." not in name:
        return 1.0
    total = next(filter(None, (getattr(config, key, None) for key in ("num_local_experts", "num_experts", "n_routed_experts"))), 1)
    return float(config.num_experts_per_tok) / float(total)

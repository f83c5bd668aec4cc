"""Tiny random causal LMs of the families that packed attention promises to run."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lightning_rlbatch.functional.packing import PackedBatch

VOCAB = 50
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LOCAL_GLOBAL = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": (LlamaConfig, {}),
    "llama-mqa": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 8, "tie_word_embeddings": True}),
    "llama-6-heads": (LlamaConfig, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 24}),
    "llama-7-heads": (LlamaConfig, {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 28}),
    "qwen2-14-heads": (Qwen2Config, {"num_attention_heads": 14, "hidden_size": 56}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 4}),
    "mistral": (MistralConfig, {"sliding_window": 3}),
    "gemma2": (Gemma2Config, {"head_dim": 4, "attn_logit_softcapping": 2.0, **_LOCAL_GLOBAL}),
    "gemma3": (Gemma3TextConfig, {"head_dim": 4, **_LOCAL_GLOBAL}),
    "gpt_neox": (GPTNeoXConfig, {}),
    "phi3": (Phi3Config, {"pad_token_id": 0}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "gpt_oss": (GptOssConfig, {"head_dim": 4, "num_local_experts": 4, **_LOCAL_GLOBAL}),
}


def tiny_config(family="llama", **changes):
    config_class, own = FAMILIES[family]
    base = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.05,  # large enough that attention is far from uniform: a leak or a wrong position shows
    }
    return config_class(**{**base, **own, **changes})


def tiny_model(family="llama", seed=0, **changes) -> PreTrainedModel:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_config(tiny_config(family, **changes)).eval()


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Turn activation checkpointing on, under the name that this version of transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def noisy_model(kind: str = "Llama", seed: int = 0, **changes: Any) -> Any:
    """A random model of a family, by its name in transformers, whose logits are large enough to tell tokens apart."""
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**{**SIZES, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def token_batch(lengths: Sequence[int] = (5, 1, 9, 3), seed: int = 0) -> PackedBatch:
    """Samples of random tokens, all of them scored."""
    generator = torch.Generator().manual_seed(seed)
    return PackedBatch.from_samples([{"input_ids": torch.randint(1, VOCAB, (length,), generator=generator)} for length in lengths])


def response_batch(*lengths: int, seed: int = 0, prompt: int = 2) -> PackedBatch:
    """Samples of random tokens, whose response begins behind so many of them."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in lengths or (5, 1, 9, 2, 6):
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        samples.append({"input_ids": ids, "response_mask": torch.arange(length) >= min(prompt, length)})
    return PackedBatch.from_samples(samples)

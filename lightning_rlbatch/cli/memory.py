"""Estimate what one rank holds in memory, from a model's files alone."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rlbatch.cli.rules_training import class_name, model_config
from lightning_rlbatch.cli.run_config import RunConfig

_MASTER_BYTES = 4  # trained weights, gradients and optimizer states are fp32 under every mixed precision
_STATES = {"AdamW": 2, "Adam": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Lion": 1, "RMSprop": 1, "Adagrad": 1, "Muon": 1}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank, by what they are for.

    Attributes:
        num_parameters: Of the policy.
        counted: ``files`` if the parameters were counted in the weight files, ``config`` if they follow from ``config.json``.
        parts: What -> bytes.
        activations: Bytes of the largest micro-batch's activations in the update; None if the configuration does not bound its tokens.
        activation_formula: How that number is made.
    """

    num_parameters: int
    counted: str
    parts: dict[str, int]
    activations: int | None
    activation_formula: str

    @property
    def total(self) -> int:
        """Sum of all parts, activations included where they are bounded."""
        return sum(self.parts.values()) + (self.activations or 0)


def estimate_memory(run: RunConfig) -> MemoryEstimate | None:
    """Estimate the memory of one rank; None if the policy is no local model folder.

    Gathered parameters, buffers of collectives, the key/value cache and the allocator's reserve are not in it.

    Args:
        run: The configuration.

    Source:
        Bytes of states: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 3.
        Activations: the tensors that the backward of a pre-norm block with a gated MLP and flash attention needs, counted by hand (the
        approach of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4).
    """
    source = run.model.get("policy")
    config = model_config(source)
    if config is None:
        return None
    number, counted = count_parameters(Path(source), config)
    if number is None:
        return None
    shards = (run.world_size or 1) // run.replicate_size if run.sharded else 1
    share = -(-number // max(1, shards))
    optimizer = class_name(run.model.get("optimizer")) or "AdamW"
    arguments = run.model.get("optimizer")
    momentum = isinstance(arguments, dict) and (arguments.get("init_args") or {}).get("momentum", 0)
    states = int(bool(momentum)) if optimizer == "SGD" else _STATES.get(optimizer, 2)
    trained = {"policy": 1.0}
    critic = run.model.get("critic")
    if critic is not None and critic != "shared":
        trained["critic"] = 1.0
    parts: dict[str, int] = {}
    for role in trained:
        parts[f"{role}: parameters (fp32)"] = share * _MASTER_BYTES
        parts[f"{role}: gradients (fp32)"] = share * _MASTER_BYTES
        parts[f"{role}: {optimizer} states (fp32 x {states})"] = share * _MASTER_BYTES * states
    if run.model.get("kl_coefficient") or run.model.get("kl_reward") is not None:
        parts["reference: parameters (fp32)"] = share * _MASTER_BYTES
    if run.kind == "rollouts":
        parts["rollout engine: its own whole copy (fp32)"] = number * _MASTER_BYTES
    activations, formula = _activations(run, config)
    return MemoryEstimate(number, counted, parts, activations, formula)


def count_parameters(folder: Path, config: dict[str, Any]) -> tuple[int | None, str]:
    """Count a model's parameters without loading it.

    Args:
        folder: Of the model.
        config: Its text configuration.

    Returns:
        The number, None if it cannot be known, and where it comes from.
    """
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return sum(_safetensors_elements(file) for file in files), "files"
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if not all(isinstance(config.get(name), int) for name in needed) or any("expert" in name for name in config):
        return None, ""
    hidden, layers, width = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    query, key_value = _attention_widths(config)
    block = 2 * hidden * (query + key_value) + 3 * hidden * width + 2 * hidden
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return layers * block + embeddings + hidden, "config"


def _safetensors_elements(file: Path) -> int:
    with file.open("rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    total = 0
    for name, entry in header.items():
        if name != "__metadata__":
            elements = 1
            for size in entry["shape"]:
                elements *= size
            total += elements
    return total


def _attention_widths(config: dict[str, Any]) -> tuple[int, int]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim


def _activations(run: RunConfig, config: dict[str, Any]) -> tuple[int | None, str]:
    precision = str(run.trainer.get("precision"))
    size = 2 if "16" in precision else 4
    formula = f"tokens of one GPU x layers x (4 hidden + 2 query width + 2 key/value width + 4 MLP width) x {size} bytes, no checkpointing"
    tokens = tokens_per_gpu(run)
    if tokens is None or not all(isinstance(config.get(name), int) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")):
        return None, formula
    query, key_value = _attention_widths(config)
    width = config.get("intermediate_size") or 4 * config["hidden_size"]
    per_token = 4 * config["hidden_size"] + 2 * (query + key_value) + 4 * width
    return tokens * config["num_hidden_layers"] * per_token * size, formula


def tokens_per_gpu(run: RunConfig) -> int | None:
    """Return the most tokens that one GPU holds in a micro-batch of the update, None if the configuration does not bound them.

    Args:
        run: The configuration.
    """
    budget, samples, longest = run.data.number("max_tokens_per_rank"), run.data.number("micro_batch_size"), run.longest_sample
    if budget is not None:
        isolated = -(-longest // run.sp_size) if longest is not None and run.data.get("oversize") == "isolate" else 0
        return max(budget, isolated)
    return None if samples is None or longest is None else -(-samples * longest // run.sp_size)

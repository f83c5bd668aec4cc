"""Estimate what one rank holds in memory, from a model's files alone."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rlbatch.cli.imports import is_import_path
from lightning_rlbatch.cli.pretrained_names import cached_folder
from lightning_rlbatch.cli.rules_training import class_name, model_config
from lightning_rlbatch.cli.run_config import RunConfig, load_pure

_STATES = {"AdamW": 2, "Adam": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Lion": 1, "RMSprop": 1, "Adagrad": 1, "Muon": 1}
_WIDTHS = {2: "16 bit", 4: "fp32", 8: "fp64"}
_TRUE_PRECISIONS = {"bf16-true": 2, "16-true": 2, "64-true": 8, "64": 8}


@dataclass(frozen=True)
class ModelFacts:
    """What is known of the policy without running it.

    Attributes:
        num_parameters: All of them.
        num_trained: Those that are trained.
        counted: Where the numbers come from: ``files`` (weight files), ``config`` (config.json) or ``model`` (made on no device).
        config: Its text configuration.
    """

    num_parameters: int
    num_trained: int
    counted: str
    config: dict[str, Any]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank, by what they are for.

    Attributes:
        num_parameters: Of the policy.
        counted: See :class:`ModelFacts`.
        parts: What -> bytes.
        activations: Bytes of the largest micro-batch's activations in the update; None if the configuration does not bound its tokens.
        activation_formula: How that number is made.
        notes: What would change a part.
    """

    num_parameters: int
    counted: str
    parts: dict[str, int]
    activations: int | None
    activation_formula: str
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Sum of all parts on the device, activations included where they are bounded."""
        return sum(size for name, size in self.parts.items() if not name.endswith(IN_HOST_MEMORY)) + (self.activations or 0)


IN_HOST_MEMORY = ", in host memory"


def estimate_memory(run: RunConfig, facts: ModelFacts | None) -> MemoryEstimate | None:
    """Estimate the memory of one rank; None if nothing is known of the policy.

    Gathered parameters, buffers of collectives, the key/value cache and the allocator's reserve are not in it.

    Args:
        run: The configuration.
        facts: Of the policy.

    Source:
        Bytes of states: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 3.
        Activations: the tensors that the backward of a pre-norm block with a gated MLP and flash attention needs, counted by hand (the
        approach of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4).
    """
    if facts is None:
        return None
    size = _TRUE_PRECISIONS.get(str(run.trainer.get("precision")), 4)
    width = _WIDTHS[size]  # weights, gradients and states are fp32 under every mixed precision
    shards = (run.world_size or 1) // run.replicate_size if run.sharded else 1
    trained, whole = _share(facts.num_trained, shards), _share(facts.num_parameters, shards)
    optimizer, states = _optimizer(run)
    host = IN_HOST_MEMORY if run.strategy.get("cpu_offload") is True else ""
    critic = run.model.get("critic")
    roles = ("policy", "critic") if critic is not None and critic != "shared" else ("policy",)
    # Reducing once per optimizer step keeps whole gradients until the last micro-batch.
    reduces_once = load_pure("functional.gradient_sync").reduces_once
    gathers = run.sharded and shards > 1 and reduces_once(run.strategy.get("grad_sync"), facts.num_trained * len(roles))
    notes = ("grad_sync: last (auto takes it for small models) keeps whole gradients until the last micro-batch; every keeps shards",)
    parts: dict[str, int] = {}
    for role in roles:
        parts[f"{role}: parameters ({width}){host}"] = whole * size
        parts[f"{role}: gradients ({width}){'' if gathers else host}"] = (facts.num_trained if gathers else trained) * size
        parts[f"{role}: {optimizer} states ({width} x {states}){host}"] = trained * size * states
    if (run.model.get("kl_coefficient") or run.model.get("kl_reward") is not None) and facts.num_trained == facts.num_parameters:
        away = IN_HOST_MEMORY if run.strategy.get("reference_cpu_offload") is True else ""
        parts[f"reference: parameters ({width}){away}"] = whole * size
    if run.kind == "rollouts":
        parts |= _engine_parts(run, facts, size)
    activations, formula = _activations(run, facts.config)
    told = (*(notes if gathers else ()), *_engine_notes(run))
    return MemoryEstimate(facts.num_parameters, facts.counted, parts, activations, formula, told)


def _engine_parts(run: RunConfig, facts: ModelFacts, size: int) -> dict[str, int]:
    """Return the bytes of the engine's weights; vLLM's ``auto`` is 16 bit, and its ranks share a copy."""
    vllm = run.engine.name == "VLLMEngineConfig"
    own = {"bfloat16": 2, "float16": 2, "float32": 4}.get(str(run.engine.get("dtype")), 2 if vllm else size)
    ranks = run.model.number("rollout_tensor_parallel_size") or 1
    copy = f"its share of a copy on {ranks} ranks" if vllm and ranks > 1 else "its own whole copy"
    return {f"rollout engine: {copy} ({_WIDTHS[own]})": _share(facts.num_parameters * own, ranks if vllm else 1)}


def _engine_notes(run: RunConfig) -> tuple[str, ...]:
    share = run.engine.get("gpu_memory_utilization")
    if run.kind != "rollouts" or not isinstance(share, int | float):
        return ()
    return (f"gpu_memory_utilization: while it samples vLLM takes up to {100 * share:.0f}% of the GPU, key/value cache included",)


def _share(number: int, shards: int) -> int:
    return -(-number // max(1, shards))


def _optimizer(run: RunConfig) -> tuple[str, int]:
    source = run.model.get("optimizer")
    name = class_name(source) or "AdamW"
    momentum = isinstance(source, dict) and (source.get("init_args") or {}).get("momentum", 0)
    return name, int(bool(momentum)) if name == "SGD" else _STATES.get(name, 2)


def model_facts(run: RunConfig) -> ModelFacts | None:
    """Read what the policy's files say; None if it has none here.

    Args:
        run: The configuration; ``policy`` may be a folder, or the hub name of a model in the hub's cache.
    """
    source = run.model.get("policy")
    folder = _folder_of(source) if isinstance(source, str) else None
    config = None if folder is None else model_config(str(folder))
    if folder is None or config is None:
        return None
    number, counted = count_parameters(folder, config)
    return None if number is None else ModelFacts(number, number, counted, config)


def _folder_of(source: str) -> Path | None:
    if Path(source).is_dir():
        return Path(source)
    if is_import_path(source) or source.count("/") != 1:
        return None
    return cached_folder(source)


def build_facts(source: Any) -> ModelFacts:
    """Make the policy without weights and count it; imports torch, transformers and the module that makes it.

    Args:
        source: The policy as configured.
    """
    import torch

    from lightning_rlbatch.cli.made import build_policy

    try:
        with torch.device("meta"):
            model = build_policy(source)
    except (NotImplementedError, RuntimeError):  # what makes it looks at the weights
        model = build_policy(source)
    parameters = list(model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return ModelFacts(sum(parameter.numel() for parameter in parameters), trained, "model", model.config.get_text_config().to_dict())


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
    size = 2 if "16" in str(run.trainer.get("precision")) else _TRUE_PRECISIONS.get(str(run.trainer.get("precision")), 4)
    block = f"(4 hidden + 2 query width + 2 key/value width + 4 MLP width) x {size} bytes"
    recomputed = run.strategy.get("activation_checkpointing") is True
    formula = f"tokens of one GPU x {f'((layers x hidden x {size} bytes) + {block})' if recomputed else f'layers x {block}'}"
    tokens = tokens_per_gpu(run)
    if tokens is None or not all(isinstance(config.get(name), int) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")):
        return None, formula
    query, key_value = _attention_widths(config)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    per_block = 4 * hidden + 2 * (query + key_value) + 4 * (config.get("intermediate_size") or 4 * hidden)
    return tokens * size * (layers * hidden + per_block if recomputed else layers * per_block), formula


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

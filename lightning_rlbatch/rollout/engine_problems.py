"""Say what keeps a configured rollout engine from working, before any model is loaded.

The standard library only: ``rlbatch explain`` asks the same questions without loading torch.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from sys import modules
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch.distributed as dist


_LEAST_TEMPERATURE_OF_VLLM = 0.01  # but 0


@dataclass(frozen=True)
class EngineContext:
    """What a run asks of its rollout engine.

    Attributes:
        policy: Folder or hub name of the policy; None for a policy that a function makes.
        longest_sample: Most tokens of a prompt with its response; None if it is not known.
        temperatures: Temperatures at which the engine will sample; 0 is greedy.
        top_k: See ``SamplingParams``.
        top_p: See ``SamplingParams``.
        tensor_parallel_size: Neighbouring ranks that share an engine (``rollout_tensor_parallel_size``).
        group: These ranks; None for this rank alone, and before there are groups.
        has_adapters: Whether the policy has LoRA adapters; False before it is loaded.
    """

    policy: str | None = None
    longest_sample: int | None = None
    temperatures: tuple[float, ...] = (1.0,)
    top_k: int = 0
    top_p: float = 1.0
    tensor_parallel_size: int = 1
    group: "dist.ProcessGroup | None" = None
    has_adapters: bool = False

    @property
    def cuts(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_k > 0 or self.top_p < 1


class Problem(NamedTuple):
    """Why a configuration would not work.

    Attributes:
        option: Name of the option that is to blame.
        text: What is needed, what there is, and what to do.
    """

    option: str
    text: str


def spanning_problem(engine: str, size: int) -> Problem:
    """Return the problem of an engine that serves one rank where several should share one.

    Args:
        engine: Name of what was configured.
        size: Ranks that should share an engine.

    Example:
        >>> spanning_problem("MyEngine", 2).option
        'rollout_tensor_parallel_size'
    """
    return Problem(
        "rollout_tensor_parallel_size",
        f"rollout_tensor_parallel_size={size} needs a rollout engine that spans as many ranks, but {engine} serves one: they would all"
        " generate the same. Set rollout_engine to VLLMEngineConfig, which spans ranks, or set rollout_tensor_parallel_size to 1.",
    )


def vllm_is_installed() -> bool:
    """Return whether ``import vllm`` would find a package; nothing is imported."""
    return modules["vllm"] is not None if "vllm" in modules else find_spec("vllm") is not None


def model_for_vllm(policy: str | None, model: str | None) -> str | None:
    """Return the folder or hub name that vLLM takes the architecture from, None if there is none.

    A folder that holds adapters alone (``adapter_config.json``) names its base model, which is what vLLM gets: adapters are added to
    the weights on their way.

    Args:
        policy: Folder or hub name of the policy.
        model: Option ``model``, which goes first.
    """
    source = policy if model is None else model
    if source is None or (Path(source) / "config.json").is_file():
        return source
    adapters = Path(source) / "adapter_config.json"
    if not adapters.is_file():
        return source
    base: str | None = json.loads(adapters.read_text(encoding="utf-8")).get("base_model_name_or_path")
    return base


def _num_heads(source: str | None) -> int | None:
    """Return the number of attention heads of a model folder; None if it is no folder, or does not say."""
    file = None if source is None else Path(source) / "config.json"
    if file is None or not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    heads = config.get("text_config", config).get("num_attention_heads")
    return heads if isinstance(heads, int) else None


def vllm_range_problems(options: dict[str, Any]) -> Iterator[Problem]:
    """Find options of ``VLLMEngineConfig`` that are out of range, each by itself.

    Args:
        options: Their values.
    """
    share = options["gpu_memory_utilization"]
    if not 0 < share <= 1:
        yield Problem(
            "gpu_memory_utilization", f"gpu_memory_utilization is a share of the GPU's memory, above 0 and at most 1, but is {share}."
        )
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        if options[name] is not None and options[name] < 1:
            yield Problem(name, f"{name} must be at least 1, or None for a limit of vLLM's own, but is {options[name]}.")
    tokens, sequences = options["max_num_batched_tokens"], options["max_num_seqs"]
    if tokens is not None and sequences is not None and tokens < sequences:
        yield Problem(
            "max_num_batched_tokens",
            f"max_num_batched_tokens={tokens} is less than max_num_seqs={sequences}, but each decoding sequence needs a token of a step."
            " Raise the former or lower the latter.",
        )


def vllm_problems(context: EngineContext, *, model: str | None, max_model_len: int | None, installed: bool) -> Iterator[Problem]:
    """Find what keeps vLLM from serving a run.

    Args:
        context: The run.
        model: Option of ``VLLMEngineConfig``.
        max_model_len: Option of ``VLLMEngineConfig``.
        installed: Whether vLLM can be imported.
    """
    if not installed:
        yield Problem(
            "rollout_engine",
            "rollout_engine is VLLMEngineConfig but vLLM is not installed. Install it with: pip install 'lightning-rlbatch[vllm]'; or take"
            " TransformersEngineConfig, as with load_from_checkpoint(path, rollout_engine=TransformersEngineConfig()).",
        )
    if model_for_vllm(context.policy, model) is None:
        made = "a function makes it" if context.policy is None else f"{context.policy} holds adapters and names no base model"
        yield Problem(
            "policy",
            f"vLLM reads the policy's architecture from a folder or hub name, but policy is none: {made}. Set policy to the name of a"
            " pretrained model, or model of VLLMEngineConfig to a folder whose config.json is that of the policy without adapters.",
        )
    heads = _num_heads(model_for_vllm(context.policy, model))
    if heads is not None and heads % context.tensor_parallel_size:
        yield Problem(
            "rollout_tensor_parallel_size",
            f"vLLM splits attention heads over the ranks of an engine, but the policy's {heads} heads cannot be split over"
            f" rollout_tensor_parallel_size={context.tensor_parallel_size}. Set it to a divisor of {heads}.",
        )
    if max_model_len is not None and context.longest_sample is not None and max_model_len < context.longest_sample:
        yield Problem(
            "max_model_len",
            f"max_model_len={max_model_len} is less than the {context.longest_sample} tokens that a sample may have (max_prompt_length +"
            " max_response_length). Raise it, or leave it out: it then follows from the two.",
        )
    raised = [temperature for temperature in context.temperatures if 0 < temperature < _LEAST_TEMPERATURE_OF_VLLM]
    if raised:
        yield Problem(
            "temperature",
            f"vLLM takes {_LEAST_TEMPERATURE_OF_VLLM} for temperatures below it, so that its log-probs would be others than the trainer's,"
            f" but the temperature is {raised[0]}. Set temperature, or validation_temperature, to at least {_LEAST_TEMPERATURE_OF_VLLM}, or"
            " the latter to 0 (greedy).",
        )
    others = [temperature for temperature in context.temperatures if temperature not in (0, 1)]
    if context.cuts and others:
        yield Problem(
            "top_k" if context.top_k > 0 else "top_p",
            f"With top_k={context.top_k} and top_p={context.top_p} vLLM reports log-probs over the whole vocabulary at temperature 1 only,"
            f" but the temperature is {others[0]}. Set temperature and validation_temperature to 1 (or 0 for the latter), switch top_k"
            " and top_p off, or use TransformersEngineConfig.",
        )

"""Rollout engines as small frozen dataclasses, chosen by ``class_path`` in a configuration file."""

import copy
import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from transformers import PreTrainedModel

from lightning_rlbatch.models.without_weights import give_memory
from lightning_rlbatch.rollout.engine import RolloutEngine
from lightning_rlbatch.rollout.engine_problems import (
    EngineContext,
    model_for_vllm,
    spanning_problem,
    vllm_is_installed,
    vllm_problems,
    vllm_range_problems,
)
from lightning_rlbatch.rollout.recorded_files import recorded_files
from lightning_rlbatch.rollout.replay_engine import ReplayEngine
from lightning_rlbatch.rollout.transformers_engine import DecodingMethod, TransformersEngine, cast_parameters
from lightning_rlbatch.rollout.vllm_engine import VLLMEngine
from lightning_rlbatch.rollout.weights import check_mergeable

EngineDtype = Literal["float32", "bfloat16", "float16"]
_DTYPES = get_args(EngineDtype)


class EngineConfig(ABC):
    """Options of a rollout engine, and what makes it; ``PPOModule(rollout_engine=...)`` takes one.

    For an engine of your own, subclass this with your options and :meth:`build`.

    Example:
        .. code-block:: python

            @dataclass(frozen=True)
            class MyEngineConfig(EngineConfig):
                num_threads: int = 4

                def build(self, model: PreTrainedModel, context: EngineContext) -> RolloutEngine:
                    return MyEngine(copy.deepcopy(model), num_threads=self.num_threads)
    """

    spans_ranks: ClassVar[bool] = False
    """Whether the engine can be shared by the ranks of ``context.group`` (``rollout_tensor_parallel_size`` above 1)."""

    def check(self, context: EngineContext) -> None:
        """Refuse, before any model is loaded, a run that this engine cannot serve.

        Args:
            context: The run.

        Raises:
            ValueError: Names options, their values and what to change.
        """
        if context.tensor_parallel_size > 1 and not self.spans_ranks:
            raise ValueError(spanning_problem(type(self).__name__, context.tensor_parallel_size).text)

    @abstractmethod
    def build(self, model: PreTrainedModel, context: EngineContext) -> RolloutEngine:
        """Return the engine; it keeps a whole copy of the policy of its own.

        Args:
            model: The policy before it is sharded; under FSDP it has its weights on rank 0's sequence-parallel group, and may be on the
                meta device elsewhere. ``update_weights`` is called before anything is generated.
            context: The run.
        """


@dataclass(frozen=True, kw_only=True)
class TransformersEngineConfig(EngineConfig):
    """Sample with :class:`TransformersEngine`: the default, on any device.

    Args:
        method: ``embedded`` shares equal prompts and refills the batch; ``generate`` is the model's own; ``continuous_batching`` is
            transformers' scheduler over a paged cache, for flash attention on a GPU. All of them give the same completions.
        max_batch_size: Most sequences that decode together on a rank; None for all. Bounds the memory of the key/value cache.
        dtype: Of the engine's copy of the policy; None takes that of the trained weights. ``bfloat16`` halves its memory; what it samples
            is then a little off from what is trained, see ``kl/rollout_mismatch`` and ``rollout_correction``.
        attn_implementation: Attention of that copy, by transformers' name; None keeps the model's.

    Raises:
        ValueError: A value is out of range.
    """

    method: DecodingMethod = "embedded"
    max_batch_size: int | None = None
    dtype: EngineDtype | None = None
    attn_implementation: str | None = "sdpa"

    def __post_init__(self) -> None:
        _check_choice("method", self.method, get_args(DecodingMethod))
        _check_choice("dtype", self.dtype, (*_DTYPES, None))
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1 (or None for no limit) but is {self.max_batch_size}.")

    def build(self, model: PreTrainedModel, context: EngineContext) -> TransformersEngine:
        """See :meth:`EngineConfig.build`; a policy with adapters is copied with them."""
        dtype: torch.dtype | None = None if self.dtype is None else getattr(torch, self.dtype)
        options: dict[str, Any] = {name: getattr(self, name) for name in ("max_batch_size", "attn_implementation", "method")}
        if not context.has_adapters:
            return TransformersEngine.from_model(model, pad_token_id=0, dtype=dtype, **options)
        replica = copy.deepcopy(model)  # a model made from the configuration would have no adapters
        give_memory(replica)
        if dtype is not None:
            cast_parameters(replica, dtype)
        return TransformersEngine(replica, pad_token_id=0, keep_dtype=dtype is not None, **options)


@dataclass(frozen=True, kw_only=True)
class VLLMEngineConfig(EngineConfig):
    """Sample with :class:`VLLMEngine`: vLLM inside the ranks that train (extra ``vllm``).

    Args:
        model: Folder or hub name that the architecture is read from; None takes ``policy``, which must be a name then. Weights come from
            the policy that is trained, LoRA adapters added to them.
        dtype: Of the engine's weights; ``auto`` takes the checkpoint's, at 16 bit.
        gpu_memory_utilization: Share of the GPU's memory that the engine may take while it samples.
        max_model_len: Most tokens of a prompt with its response; None takes ``max_prompt_length + max_response_length``.
        max_num_seqs: Most sequences that decode together; None for vLLM's default.
        max_num_batched_tokens: Most tokens of one engine step; None for vLLM's default.
        enforce_eager: Run without CUDA graphs.
        sleep_level: While the policy trains, 2 drops the engine's weights, 1 keeps them in host memory, 0 keeps all on the GPU.

    Raises:
        ValueError: A value is out of range.
    """

    spans_ranks: ClassVar[bool] = True

    model: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    gpu_memory_utilization: float = 0.4
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool = False
    sleep_level: Literal[0, 1, 2] = 2

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, ("auto", *_DTYPES))
        _check_choice("sleep_level", self.sleep_level, (0, 1, 2))
        for problem in vllm_range_problems(dataclasses.asdict(self)):
            raise ValueError(problem.text)

    def check(self, context: EngineContext) -> None:
        """See :meth:`EngineConfig.check`."""
        super().check(context)
        found = vllm_problems(context, model=self.model, max_model_len=self.max_model_len, installed=vllm_is_installed())
        for problem in found:
            raise ValueError(problem.text)

    def build(self, model: PreTrainedModel, context: EngineContext) -> VLLMEngine:
        """See :meth:`EngineConfig.build`; ``model`` is looked at only for adapters that cannot be merged."""
        check_mergeable(model)
        source = model_for_vllm(context.policy, self.model)
        assert source is not None  # else `check` refuses
        return VLLMEngine.from_pretrained(
            source,
            tensor_parallel_size=context.tensor_parallel_size,
            dtype=self.dtype,
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_model_len=context.longest_sample if self.max_model_len is None else self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enforce_eager=self.enforce_eager,
            logprobs_mode="raw_logprobs" if context.cuts else "processed_logprobs",
            sleep_level=self.sleep_level,
        )


@dataclass(frozen=True, kw_only=True)
class ReplayEngineConfig(EngineConfig):
    """Serve recorded completions with :class:`ReplayEngine` instead of sampling: to debug rewards, environments or the trainer.

    The run's prompts, seed and sizes are those of the recorded one, without validation (its completions are not recorded) and without
    sampling again (``max_sampling_rounds``: what was thrown away is not recorded). To train on recorded rewards and log-probs as well,
    use ``ReplayDataModule``.

    Args:
        path: File or folder with token ids: of ``RolloutRecorder``, of :class:`RecordingEngine`, or of a generator of your own.

    Raises:
        FileNotFoundError: There is nothing of this name; before a model is loaded.
    """

    path: str

    def check(self, context: EngineContext) -> None:
        """See :meth:`EngineConfig.check`."""
        super().check(context)
        recorded_files(Path(self.path))

    def build(self, model: PreTrainedModel, context: EngineContext) -> ReplayEngine:
        """See :meth:`EngineConfig.build`; every rank reads all of the files."""
        return ReplayEngine.from_file(self.path)


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))} but is {value!r}.")

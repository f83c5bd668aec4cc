"""The rollout engine for GPU clusters: vLLM inside the training processes."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from lightning_rlbatch.rollout.engine import Completion, ProgressCallback, RolloutRequest, SamplingParams, WeightStream
from lightning_rlbatch.rollout.vllm_start import inside_training

LogprobsMode = Literal["processed_logprobs", "raw_logprobs"]


class VLLMEngine:
    """Sample completions with a vLLM engine that shares the training processes and their GPUs (extra ``vllm``).

    Every rank holds one engine; with ``tensor_parallel_size = t`` the engines of t consecutive ranks form a group, which must be given
    the same requests in the same order. Between phases the engine sleeps and leaves its memory to training. It wakes in two steps:
    weights in :meth:`wake`, the key/value cache with the next :meth:`generate`, so that weights are copied while it is not there yet.

    A policy with LoRA adapters is loaded with these added to the weights that they adapt.

    Completions repeat for the same seed, but less strictly than those of :class:`TransformersEngine`: vLLM's kernels round differently
    from batch to batch.

    Args:
        llm: A ``vllm.LLM``; :meth:`from_pretrained` makes a suitable one.
        logprobs_mode: The ``logprobs_mode`` that ``llm`` was made with.
        sleep_level: 1 keeps a copy of the weights on the host while asleep; 2 drops them, so that :meth:`update_weights` must follow
            :meth:`wake`; 0 never sleeps (``llm`` was made without sleep mode).

    Raises:
        ValueError: If ``sleep_level`` is none of these.
    """

    merges_adapters = True
    """Weights are wanted under the names of the plain model, see :func:`full_parameters`."""

    def __init__(self, llm: Any, *, logprobs_mode: LogprobsMode = "processed_logprobs", sleep_level: Literal[0, 1, 2] = 2) -> None:
        if sleep_level not in (0, 1, 2):
            raise ValueError(f"sleep_level must be 0, 1 or 2 but is {sleep_level}.")
        self.llm = llm
        self.logprobs_mode = logprobs_mode
        self.sleep_level = sleep_level
        self._asleep = False
        self._cache_asleep = False
        self._weights_dropped = False

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        gpu_memory_utilization: float = 0.4,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enforce_eager: bool = False,
        seed: int = 0,
        logprobs_mode: LogprobsMode = "processed_logprobs",
        sleep_level: Literal[0, 1, 2] = 2,
    ) -> "VLLMEngine":
        """Make an engine in this process, in every rank of the run.

        Args:
            model: Folder or hub name of the policy.
            tensor_parallel_size: Ranks that share an engine; must divide the world size.
            dtype: Of the weights; ``"auto"`` takes the checkpoint's.
            gpu_memory_utilization: Share of the GPU's memory that the engine may take while awake.
            max_model_len: Most tokens of a prompt with its completion; None takes the model's.
            max_num_seqs: Most sequences that decode together; None for vLLM's default.
            max_num_batched_tokens: Most tokens of one engine step; None for vLLM's default.
            enforce_eager: Run without CUDA graphs.
            seed: Of the engine, the same on all ranks of a tensor-parallel group; requests bring their own.
            logprobs_mode: See :meth:`generate`.
            sleep_level: See the class.

        Raises:
            ImportError: If vLLM is not installed.
        """
        try:
            from vllm import LLM
        except ImportError as error:
            raise ImportError("VLLMEngine needs vLLM. Install it with: pip install 'lightning-rlbatch[vllm]'") from error
        limits = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        with inside_training():
            llm = LLM(
                model=model,
                tensor_parallel_size=tensor_parallel_size,
                distributed_executor_backend="external_launcher",  # joins the ranks that exist, and runs in their processes
                dtype=dtype,
                gpu_memory_utilization=gpu_memory_utilization,
                enforce_eager=enforce_eager,
                enable_sleep_mode=sleep_level > 0,
                skip_tokenizer_init=True,
                generation_config="vllm",  # no sampling defaults from the model's folder
                logprobs_mode=logprobs_mode,
                seed=seed,
                **{name: value for name, value in limits.items() if value is not None},
            )
        return cls(llm, logprobs_mode=logprobs_mode, sleep_level=sleep_level)

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_progress: ProgressCallback | None = None
    ) -> list[Completion]:
        """Sample one completion per request and return them in the order of the requests.

        The log-probs that vLLM can report are those of the distribution it draws from (``processed_logprobs``: after temperature, top-k
        and top-p) or those of the model (``raw_logprobs``: at temperature 1). The former are what :class:`Completion` promises unless
        ``top_k`` or ``top_p`` is in effect, the latter if the temperature is 0 or 1; other combinations are refused.

        Args:
            requests: Prompts and seeds; the same on all ranks of a tensor-parallel group.
            sampling: How to draw.
            on_progress: Called once, at the end.

        Raises:
            ValueError: If a prompt is empty, or the log-probs would be others than promised.
            RuntimeError: If the engine sleeps, lacks its weights, or aborts a request.
        """
        self._check(requests, sampling)
        if not requests:
            return []
        if self._cache_asleep:
            self._wake_up("kv_cache")
            self._cache_asleep = False
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(request.prompt_ids)} for request in requests],
            sampling_params=[_vllm_params(request, sampling) for request in requests],
            use_tqdm=False,
        )
        completions = [_completion(index, output.outputs[0]) for index, output in enumerate(outputs)]
        if on_progress is not None:
            on_progress(len(completions), sum(len(completion.token_ids) for completion in completions))
        return completions

    def _check(self, requests: Sequence[RolloutRequest], sampling: SamplingParams) -> None:
        if self._asleep:
            raise RuntimeError("The engine sleeps and cannot generate. Call wake() first.")
        if self._weights_dropped:
            raise RuntimeError("The engine dropped its weights when it slept (sleep_level=2). Call update_weights() before generate().")
        for index, request in enumerate(requests):
            if not request.prompt_ids:
                raise ValueError(f"Prompt {index} is empty but a prompt needs at least one token, for instance a begin token.")
        cuts = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)
        if self.logprobs_mode == "processed_logprobs" and cuts:
            raise ValueError(
                f"With top_k={sampling.top_k} and top_p={sampling.top_p}, logprobs_mode='processed_logprobs' gives log-probs over the "
                "tokens that are left, not over the vocabulary. Set logprobs_mode='raw_logprobs' and temperature 1, or switch both off."
            )
        if self.logprobs_mode == "raw_logprobs" and sampling.temperature not in (0, 1):
            raise ValueError(
                f"logprobs_mode='raw_logprobs' gives log-probs at temperature 1 but the temperature is {sampling.temperature}. "
                "Set logprobs_mode='processed_logprobs'."
            )

    def update_weights(self, weights: WeightStream) -> None:
        """Load weights by the names they have in the checkpoint, one at a time; vLLM takes its shard and fuses what it keeps fused.

        Args:
            weights: Pairs of name and whole tensor; consumed to the end.

        Raises:
            ValueError: Naming the weights that the model does not know, or its parameters that got none.
            RuntimeError: If the engine sleeps.
        """
        if self._asleep:
            raise RuntimeError("The engine sleeps and cannot take weights. Call wake() first.")
        problems: list[str] = []
        loaded: set[str] = set()
        knows_loaded = True
        for name, tensor in weights:
            result = self.llm.apply_model(_Load(name, tensor))[0]
            del tensor  # else it would live on while the next one is gathered
            if isinstance(result, str):
                problems.append(result)
            elif result is None:  # some models do not say what they loaded
                knows_loaded = False
            else:
                loaded |= result
        self.llm.reset_prefix_cache()  # cached prompts belong to the weights before
        if knows_loaded:
            names: set[str] = self.llm.apply_model(_parameter_names)[0]
            problems += [f"{name} is missing" for name in sorted(names - loaded)]
        if problems:
            raise ValueError(f"The weights do not fit vLLM's model ({len(problems)} problems): " + "; ".join(problems[:8]))
        self._weights_dropped = False

    def sleep(self) -> None:
        """Free the memory of key/value cache and weights."""
        if self.sleep_level and not self._asleep:
            self.llm.sleep(level=self.sleep_level)
            self._cache_asleep = True
            self._weights_dropped = self._weights_dropped or self.sleep_level == 2
        self._asleep = True

    def wake(self) -> None:
        """Make room for the weights again; the key/value cache follows with the next :meth:`generate`."""
        if self.sleep_level and self._asleep:
            self._wake_up("weights")
        self._asleep = False

    def _wake_up(self, what: str) -> None:
        torch.cuda.empty_cache()  # vLLM's memory is its own: what torch keeps for later is not free to it
        self.llm.wake_up(tags=[what])


class _Load:
    """Load one weight into a worker's model; called with the model."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name = name
        self._tensor = tensor

    def __call__(self, model: Any) -> set[str] | str | None:
        """Return the parameters of the model that were written (None if it does not tell), or a problem."""
        try:
            written = model.load_weights([(self._name, self._tensor)])
        except (KeyError, ValueError, AssertionError) as error:
            return f"{self._name} with shape {tuple(self._tensor.shape)} is refused ({type(error).__name__}: {error})"
        return None if written is None else set(written)


def _parameter_names(model: Any) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def _vllm_params(request: RolloutRequest, sampling: SamplingParams) -> Any:
    from vllm import SamplingParams as VLLMSamplingParams

    return VLLMSamplingParams(
        max_tokens=request.limit(sampling),
        temperature=sampling.temperature,
        top_k=sampling.top_k,  # 0 means all tokens to vLLM, too
        top_p=sampling.top_p,
        seed=request.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # a completion ends where the caller says, whatever the model's configuration calls its end
        logprobs=0,  # of the sampled token alone
        detokenize=False,
    )


def _completion(index: int, output: Any) -> Completion:
    tokens = [int(token) for token in output.token_ids]
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended completion {index} after {len(tokens)} tokens with reason {output.finish_reason!r}.")
    log_probs = [float(entry[token].logprob) for token, entry in zip(tokens, output.logprobs)]
    if len(log_probs) != len(tokens) or any(map(math.isnan, log_probs)):
        raise RuntimeError(f"vLLM returned {len(tokens)} tokens but not as many log-probs that are numbers, for completion {index}.")
    return Completion(tokens, log_probs, "stop" if output.finish_reason == "stop" else "length")

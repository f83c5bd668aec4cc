"""The embedded rollout engine: a transformers causal language model that decodes in the training process."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_rlbatch.models.probe import check_soft_cap
from lightning_rlbatch.rollout.decoding import Decoder
from lightning_rlbatch.rollout.engine import Completion, ProgressCallback, RolloutRequest, SamplingParams, WeightStream
from lightning_rlbatch.rollout.plain_generate import plain_generate
from lightning_rlbatch.rollout.weights import full_parameters

DecodingMethod: TypeAlias = Literal["embedded", "generate", "continuous_batching"]
"""Who runs the model step by step; see :class:`TransformersEngine`."""


def cast_parameters(model: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> None:
    """Change dtype and device of a model's parameters alone: buffers, such as rotary frequencies, need their precision.

    Args:
        model: Changed in place.
        dtype: Of all its parameters from now on.
        device: None leaves each where it is.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device=device, dtype=dtype)


class TransformersEngine:
    """Sample completions with a transformers causal language model that this process owns.

    The model is a whole (unsharded) copy of the policy: ranks generate independently and no collective runs per token. Three methods
    run it, with the same completions and log-probs for the same requests:

    * ``"embedded"``: a loop of our own in which equal prompts (a GRPO group) are encoded once and share the result; finished sequences
      leave the batch and its key/value cache, and with ``max_batch_size`` waiting ones take their places.
    * ``"generate"``: the model's own ``generate`` on left-padded batches, each of which runs until its longest completion ends; for
      models whose cache is of their own making, and as a reference.
    * ``"continuous_batching"``: transformers' scheduler over a key/value cache in pages, which is never copied; made for flash
      attention on a GPU. On a CPU it computes attention of every sequence with the pages of all of them: ``benchmarks/generation.py``
      measures 0.1 to 0.4 times the speed of ``"embedded"`` there, and less than that of ``"generate"`` for small models.

    The same request gives the same completion whatever else is in the batch and on any number of ranks, because its random numbers
    are a function of its seed and the step alone (up to rounding: a random number that falls within the rounding error of a boundary
    between two tokens may give the neighbour).

    Args:
        model: The engine's own model; it is put into evaluation mode and its attention may be exchanged. Use :meth:`from_model` to
            copy a policy that trains.
        pad_token_id: Token that fills the left of short prompts; any token of the vocabulary, it is masked.
        max_batch_size: Most sequences that decode together; None for all of them. Bounds the memory of the key/value cache.
        attn_implementation: Attention of the model while it generates (attention for packed samples has no cache), None to keep it.
        method: What runs the model step by step, see above.
        keep_dtype: False lets each parameter take the dtype of what :meth:`update_weights` brings for it.

    Raises:
        ValueError: If the model is sharded, an argument is out of range, or the method or the attention cannot run the model exactly.

    Example:
        .. code-block:: python

            engine = TransformersEngine.from_model(policy, pad_token_id=0)
            requests = [RolloutRequest(ids, seed=rollout_seed(0, 0, p, r)) for p, ids in enumerate(prompts) for r in range(16)]
            completions = engine.generate(requests, SamplingParams(max_new_tokens=64, stop_token_ids=(1,)))
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_token_id: int,
        max_batch_size: int | None = None,
        attn_implementation: str | None = "sdpa",
        method: DecodingMethod = "embedded",
        keep_dtype: bool = True,
    ) -> None:
        if method not in get_args(DecodingMethod):
            raise ValueError(f"method must be one of {', '.join(map(repr, get_args(DecodingMethod)))} but is {method!r}.")
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1 (or None for no limit) but is {max_batch_size}.")
        sharded = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
        if sharded:
            raise ValueError(
                f"The engine needs a whole model but parameter {sharded[0]!r} (and {len(sharded) - 1} more) is sharded. "
                "Use TransformersEngine.from_model(model, ...), then update_weights."
            )
        self.model = model
        nn.Module.eval(model)
        self.vocab_size = int(cast(nn.Embedding, model.get_input_embeddings()).num_embeddings)
        if not 0 <= pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id must be a token of the vocabulary (0 to {self.vocab_size - 1}) but is {pad_token_id}.")
        if attn_implementation is not None and model.config._attn_implementation != attn_implementation:
            model.set_attn_implementation(attn_implementation)
        check_soft_cap(model.config, paged=method == "continuous_batching")
        self.pad_token_id = pad_token_id
        self.max_batch_size = max_batch_size
        self.method = method
        self.keep_dtype = keep_dtype
        self.max_length: int | None = getattr(model.config, "max_position_embeddings", None)
        # transformers renamed the argument within version 5
        taken = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in taken else "past_key_values"
        if method == "embedded" and not {self._cache_argument, "position_ids"} <= taken.keys():
            raise ValueError(
                f"method='embedded' needs a model that takes a cache and position_ids, but {type(model).__name__}.forward takes"
                f" {', '.join(name for name in taken if name != 'kwargs')}. Set method='generate'."
            )
        self._home = model.device
        self._asleep = False

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        *,
        pad_token_id: int,
        max_batch_size: int | None = None,
        attn_implementation: str | None = "sdpa",
        method: DecodingMethod = "embedded",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "TransformersEngine":
        """Build an engine around a copy of ``model`` (same class and configuration, own weights).

        Weights are copied if ``model`` holds them whole. If it is sharded or on the meta device, they are left undefined: call
        :meth:`update_weights` before :meth:`generate`.

        Args:
            model: The policy that trains; not changed.
            pad_token_id: See the class.
            max_batch_size: See the class.
            attn_implementation: See the class.
            method: See the class.
            dtype: Of the copy; None for the model's, and that of the weights that :meth:`update_weights` brings: a strategy may cast the
                model after it was copied.
            device: Of the copy; None for the model's (the CPU if that is meta).
        """
        device = torch.device(device) if device is not None else model.device
        if device.type == "meta":
            device = torch.device("cpu")
        parameters = list(model.parameters())
        with torch.random.fork_rng(devices=[]):  # the weights drawn here are overwritten: they must not move the run's random state
            replica = type(model)(copy.deepcopy(model.config))
        cast_parameters(replica, dtype or model.dtype, device)
        nn.Module.to(replica, device=device)
        engine = cls(
            replica,
            pad_token_id=pad_token_id,
            max_batch_size=max_batch_size,
            attn_implementation=attn_implementation,
            method=method,
            keep_dtype=dtype is not None,
        )
        if not any(isinstance(parameter, DTensor) or parameter.is_meta for parameter in parameters):
            engine.update_weights(full_parameters(model))
        return engine

    @torch.no_grad()
    def update_weights(self, weights: WeightStream) -> None:
        """Copy weights by name; tied parameters may come under any of their names, buffers may be left out.

        Args:
            weights: Pairs of name and whole tensor of any device and floating-point dtype; consumed to the end.

        Raises:
            ValueError: Naming the parameters that are missing, unknown or of another shape. Those that matched are copied by then.
        """
        targets: dict[str, torch.Tensor] = {**dict(self.model.named_parameters(remove_duplicate=False)), **dict(self.model.named_buffers())}
        missing = {id(parameter): name for name, parameter in self.model.named_parameters()}
        problems: list[str] = []
        for name, tensor in weights:
            target = targets.get(name)
            if target is None:
                problems.append(f"{name} is unknown")
            else:
                missing.pop(id(target), None)
                if target.shape != tensor.shape:
                    problems.append(f"{name} has shape {tuple(tensor.shape)} but the engine's has {tuple(target.shape)}")
                elif self.keep_dtype or target.dtype == tensor.dtype or not isinstance(target, nn.Parameter):
                    target.copy_(tensor)
                else:
                    target.data = tensor.detach().to(target.device, copy=True)
            del tensor  # else it would live on while the next one is gathered
        problems += [f"{name} is missing" for name in missing.values()]
        if problems:
            raise ValueError(
                f"The weights do not fit the engine's {type(self.model).__name__} ({len(problems)} problems): " + "; ".join(problems[:8])
            )

    def sleep(self) -> None:
        """Move the weights to the host; the key/value cache lives only within :meth:`generate`."""
        if not self._asleep:
            self._home = self.model.device
            nn.Module.to(self.model, "cpu")
            self._asleep = True

    def wake(self) -> None:
        """Move the weights back to the device they were on."""
        if self._asleep:
            nn.Module.to(self.model, self._home)
            self._asleep = False

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_progress: ProgressCallback | None = None
    ) -> list[Completion]:
        """Sample one completion per request and return them in the order of the requests.

        Args:
            requests: Prompts and seeds.
            sampling: How to draw.
            on_progress: Called after decoding steps with the numbers of newly finished completions and newly sampled tokens.

        Raises:
            ValueError: If a prompt is empty, holds a token outside the vocabulary, or leaves too little of the model's
                ``max_position_embeddings`` for ``max_new_tokens``.
            RuntimeError: If the engine sleeps, or the model returns NaN.
        """
        if self._asleep:
            raise RuntimeError("The engine sleeps and cannot generate. Call wake() first.")
        self._check(requests, sampling)
        if not requests:
            return []
        limits: Any = {"pad_token_id": self.pad_token_id, "max_batch_size": self.max_batch_size}
        if self.method == "generate":
            return plain_generate(self.model, requests, sampling, on_progress=on_progress, **limits)
        if self.method == "continuous_batching":
            from lightning_rlbatch.rollout.continuous_batching import continuous_batching  # where it is asked for: it is young

            return continuous_batching(self.model, requests, sampling, on_progress=on_progress, **limits)
        return Decoder(self.model, requests, sampling, cache_argument=self._cache_argument, **limits).run(on_progress)

    def _check(self, requests: Sequence[RolloutRequest], sampling: SamplingParams) -> None:
        for index, request in enumerate(requests):
            prompt = request.prompt_ids
            if not prompt:
                raise ValueError(f"Prompt {index} is empty but a prompt needs at least one token, for instance a begin token.")
            if min(prompt) < 0 or max(prompt) >= self.vocab_size:
                bad = next(token for token in prompt if not 0 <= token < self.vocab_size)
                raise ValueError(f"Prompt {index} holds token {bad} but the model's vocabulary is 0 to {self.vocab_size - 1}.")
            limit = request.limit(sampling)
            if self.max_length is not None and len(prompt) + limit > self.max_length:
                raise ValueError(
                    f"Prompt {index} has {len(prompt)} tokens and max_new_tokens is {limit}, together more than the {self.max_length}"
                    " positions of the model (max_position_embeddings). Lower max_new_tokens (`max_response_length` of the data), or drop"
                    " the prompt."
                )
        if any(not 0 <= token < self.vocab_size for token in sampling.stop_token_ids):
            raise ValueError(f"stop_token_ids {sampling.stop_token_ids} must lie in the model's vocabulary, 0 to {self.vocab_size - 1}.")

"""Score packed samples with a transformers model: log-probability, entropy and value of each token, in one forward pass.

Everything that reads a weight happens inside ``TokenScorer.forward``, so that FSDP2 (``fully_shard(block)`` for each block, then
``fully_shard(scorer)``) gathers the embeddings, the LM head and the value head before it, and reduces their gradients after it.

Letters in shapes: N samples, T packed tokens, P sequence-parallel size, h hidden size, n scored positions.

Alignment: the result at index t describes token t and is computed from the hidden state of its SOURCE, t - 1, in the same sample.
Labels are shifted from tokens to sources on the whole batch, before anything is sharded; the last token of a sample is no source.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.scoring import token_log_probs


class TokenScores(NamedTuple):
    """What `TokenScorer` returns; a named tuple because FSDP2 finds the tensors of a result only in known containers.

    Attributes:
        log_probs: [T], fp32: log p(token t | tokens before it in its sample), in nats; 0 outside the scored positions.
        entropy: [T], fp32: entropy of the distribution that token t was drawn from, in nats; 0 outside.
        values: [T], fp32: value of the state before token t; 0 outside.
    """

    log_probs: Tensor | None
    entropy: Tensor | None
    values: Tensor | None


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


class TokenScorer(nn.Module):
    """A transformers causal LM that takes a `PackedBatch` and returns `TokenScores`.

    Args:
        model: A ``PreTrainedModel`` with an LM head, or without one if only values are asked for.
        value_head: True adds a `ValueHead` on the last hidden state (a critic, or a policy with a value head).
        remove_padding: True computes real tokens only; False pads the samples to the longest of the batch and uses the model's
            own attention. The numbers are the same.
        sp_group: Ranks that share each sample (Ulysses); all of them pass the same batch and get the same result. None: this
            process alone.
        attention_backend: Backend of the packed attention, see `attach_packed_attention`.

    Raises:
        ValueError: Sequence parallelism is asked for together with padding.

    Example:
        >>> scorer = TokenScorer(AutoModelForCausalLM.from_pretrained(name), value_head=True)  # doctest: +SKIP
        >>> scores = scorer(batch, with_entropy=True, with_values=True)  # doctest: +SKIP
        >>> scores.log_probs.shape == batch["input_ids"].shape  # doctest: +SKIP
        True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        value_head: bool = False,
        remove_padding: bool = True,
        sp_group: dist.ProcessGroup | None = None,
        attention_backend: str = "auto",
    ) -> None:
        super().__init__()
        self.sp_size = 1 if sp_group is None else dist.get_world_size(sp_group)
        self.sp_rank = 0 if sp_group is None else dist.get_rank(sp_group)
        if self.sp_size > 1 and not remove_padding:
            raise ValueError(
                f"sequence_parallel_size={self.sp_size} shards packed tokens, but remove_padding is False. "
                "Set remove_padding=True, or sequence_parallel_size=1."
            )
        self.model = model
        self.remove_padding = remove_padding
        self.sp_group = sp_group
        self.logit_scale, self.softcap = logit_adjustments(model)
        self.value_head = _make_value_head(model) if value_head else None

    @property
    def backbone(self) -> nn.Module:
        """The model without its LM head."""
        return cast(nn.Module, getattr(self.model, "base_model", self.model))

    @property
    def lm_head(self) -> nn.Module | None:
        """The module that turns hidden states into logits."""
        return cast(nn.Module | None, self.model.get_output_embeddings())  # type: ignore[operator]  # nn.Module hides the method

    def forward(
        self,
        batch: PackedBatch,
        *,
        temperature: float | Tensor = 1.0,
        with_log_probs: bool = True,
        with_entropy: bool = False,
        with_values: bool = False,
    ) -> TokenScores:
        """Score the sampled tokens of a batch.

        Scored are the tokens where ``response_mask`` is True, or without that field all but the first token of each sample. The
        heads run on scored positions only, but on at least one position on every rank, so that every rank uses the same weights.

        Args:
            batch: At least one sample; only ``input_ids`` and ``response_mask`` are read.
            temperature: One number, or [N] fp32: divides the logits of each sample. No gradient.
            with_log_probs: False leaves out the LM head (a critic).
            with_entropy: True computes entropies, with gradient.
            with_values: True computes values.

        Returns:
            The scores asked for, None for the others; equal on all ranks of ``sp_group``.

        Raises:
            ValueError: An empty batch, or values without a value head.
            TypeError: A temperature tensor that is less precise than fp32.
            RuntimeError: A head's weight is sharded: its FSDP group is not the scorer's own.
        """
        self._check_request(batch, temperature, with_log_probs or with_entropy, with_values)
        targets, scored, hidden = self._shard_and_run(batch)
        sources = scored.nonzero().squeeze(1)
        if sources.numel() == 0:
            sources = torch.zeros(1, dtype=torch.int64, device=scored.device)
        columns: list[Tensor] = []
        states = hidden[sources]
        if with_log_probs or with_entropy:
            per_token = self._local_temperature(batch, temperature)
            row_temperature = per_token[sources] if isinstance(per_token, Tensor) else per_token
            columns += self._run_lm_head(states, targets[sources], row_temperature, with_log_probs, with_entropy)
        if with_values:
            assert self.value_head is not None
            columns.append(self.value_head(states))
        scores = self._to_tokens(columns, sources, scored, batch.num_tokens)
        log_probs = scores.pop(0) if with_log_probs else None
        entropy = scores.pop(0) if with_entropy else None
        return TokenScores(log_probs, entropy, scores.pop(0) if with_values else None)

    def _check_request(self, batch: PackedBatch, temperature: float | Tensor, with_head: bool, with_values: bool) -> None:
        if batch.num_samples == 0:
            raise ValueError("The batch has no samples. Every rank must run something: use PackedBatch.filler(schema, num_tokens).")
        if not with_head and not with_values:
            raise ValueError("Nothing was asked for. Set with_log_probs, with_entropy or with_values.")
        if with_values and self.value_head is None:
            raise ValueError("with_values=True needs a value head, but this scorer has none. Construct it with value_head=True.")
        if with_head and self.lm_head is None:
            raise ValueError(f"Log-probs need an LM head, but {type(self.model).__name__} has none. Pass with_log_probs=False, or a causal LM.")
        if isinstance(temperature, Tensor):
            if temperature.dtype in (torch.bfloat16, torch.float16):
                # FSDP2's mixed precision casts tensor arguments of the root module
                raise TypeError(
                    f"temperature arrived as {temperature.dtype}: 0.7 would become {temperature.new_tensor(0.7).item():.6f}. "
                    "Pass fp32, and MixedPrecisionPolicy(cast_forward_inputs=False) to the scorer's fully_shard."
                )
            if temperature.dim() > 0 and temperature.shape != (batch.num_samples,):
                raise ValueError(f"Expected one temperature for each of {batch.num_samples} samples, but got {tuple(temperature.shape)}.")

    def _shard_and_run(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return targets, scored positions and hidden states of this rank's sources."""
        targets, scored = shift_to_sources(batch)
        hidden = self._packed_hidden(batch) if self.remove_padding else self._padded_hidden(batch)
        return targets, scored, hidden

    def _packed_hidden(self, batch: PackedBatch) -> Tensor:
        output = self.backbone(input_ids=batch["input_ids"][None], position_ids=batch.position_ids[None], use_cache=False)
        return cast(Tensor, output[0]).squeeze(0)

    def _padded_hidden(self, batch: PackedBatch) -> Tensor:
        """Run the model's own attention on right-padded samples; return the states of real tokens, [T, h]."""
        padded = batch.to_padded(pad_id=0)
        output = self.backbone(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"], use_cache=False)
        return cast(Tensor, output[0])[batch.sample_ids_per_token, batch.position_ids]

    def _local_temperature(self, batch: PackedBatch, temperature: float | Tensor) -> float | Tensor:
        if not isinstance(temperature, Tensor) or temperature.dim() == 0:
            return temperature
        return temperature.to(batch.device)[batch.sample_ids_per_token]

    def _run_lm_head(
        self, states: Tensor, targets: Tensor, temperature: float | Tensor, with_log_probs: bool, with_entropy: bool
    ) -> list[Tensor]:
        head: Any = self.lm_head
        if isinstance(head.weight, DTensor):
            raise RuntimeError(
                "The LM head's weight is still sharded inside TokenScorer.forward, so its gradient would not be reduced. "
                "Call fully_shard on the transformer blocks and on the scorer, not on the LM head, the embeddings or the inner model."
            )
        log_probs, entropy = token_log_probs(
            states,
            head.weight,
            targets,
            bias=getattr(head, "bias", None),
            temperature=temperature,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            with_entropy=with_entropy,
        )
        return [column for column, wanted in ((log_probs, with_log_probs), (entropy, with_entropy)) if wanted and column is not None]

    def _to_tokens(self, columns: list[Tensor], sources: Tensor, scored: Tensor, num_tokens: int) -> list[Tensor]:
        """Spread values at sources over the whole batch and move each to the token after its source."""
        stacked = torch.stack(columns, dim=-1)
        # The position that only keeps the heads busy is not scored: it becomes 0, with a zero gradient.
        stacked = torch.where(scored[sources, None], stacked, 0.0)
        spread = stacked.new_zeros(scored.shape[0], stacked.shape[1]).index_copy(0, sources, stacked)
        first = spread.new_zeros(1, spread.shape[1])
        return list(torch.cat([first, spread[: num_tokens - 1]]).unbind(dim=-1))


def shift_to_sources(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return what each position predicts and whether that is scored.

    Args:
        batch: Read are ``input_ids`` and ``response_mask``; without the latter every token but a sample's first is scored.

    Returns:
        ``(targets, scored)``: [T] int64 the next token, [T] bool. Both are without meaning, and False, at the last token of a sample.

    Example:
        >>> batch = PackedBatch([0, 3, 5], {"input_ids": torch.tensor([7, 8, 9, 5, 6])})
        >>> shift_to_sources(batch)[1].tolist()
        [True, True, False, True, False]
    """
    targets = batch["input_ids"].roll(-1)
    if "response_mask" in batch:
        scored = batch["response_mask"].roll(-1)
    else:
        scored = torch.ones_like(targets, dtype=torch.bool)
    return targets, scored.index_fill(0, batch.cu_seqlens[1:].long() - 1, False)


def logit_adjustments(model: nn.Module) -> tuple[float, float | None]:
    """Return the factor on the LM head's output and the bound of its soft cap, as the model's family defines them.

    Args:
        model: A transformers model.

    Returns:
        ``(logit_scale, softcap)``: Cohere multiplies by ``logit_scale``, Granite divides and HyperCLOVA X multiplies by
        ``logits_scaling``, Falcon-H1 multiplies by ``lm_head_multiplier``; Gemma 2 and its kin cap at ``final_logit_softcapping``.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        return 1.0, None
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        scale *= float(getattr(config, name, None) or 1.0)
    if getattr(config, "logits_scaling", None):
        multiplies = "hyperclovax" in config.model_type
        scale *= config.logits_scaling if multiplies else 1.0 / config.logits_scaling
    return scale, getattr(config, "final_logit_softcapping", None)


def _make_value_head(model: nn.Module) -> ValueHead:
    parameter = next(model.parameters())
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    config: Any = model.config
    hidden_size = head.weight.shape[1] if head is not None else config.get_text_config().hidden_size
    return ValueHead(hidden_size, device=parameter.device, dtype=parameter.dtype)

"""Score packed samples with a transformers model: log-probability, entropy and value of each token, in one forward pass.

Everything that reads a weight happens inside ``TokenScorer.forward``, so that FSDP2 (``fully_shard(block)`` for each block, then
``fully_shard(scorer)``) gathers the embeddings, the LM head and the value head before it, and reduces their gradients after it.

Letters in shapes: N samples, T packed tokens, P sequence-parallel size, h hidden size, n scored positions.

Alignment: the result at index t describes token t and is computed from the hidden state of its SOURCE, t - 1, in the same sample.
Labels are shifted from tokens to sources on the whole batch, before anything is sharded; the last token of a sample is no source.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_rlbatch.distributed.ulysses import gather_sequence, shard_sequence
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.attention import PackedAttention, attach_packed_attention
from lightning_rlbatch.models.attention_backends import Backend
from lightning_rlbatch.models.output_heads import logit_adjustments, make_value_head, output_embeddings
from lightning_rlbatch.models.packed_inputs import packed_model_kwargs
from lightning_rlbatch.models.probe import check_soft_cap, has_whole_weights, probe_lm_head
from lightning_rlbatch.models.scored_positions import ScoredPositions
from lightning_rlbatch.models.scoring import HEAD_MEMORY_MIB, check_head_memory, token_log_probs


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


class TokenScorer(nn.Module):
    """A transformers causal LM that takes a `PackedBatch` and returns `TokenScores`.

    With ``remove_padding`` the model is attached to packed attention for good: generate inside ``scorer.attention.paused()``.

    Args:
        model: A causal LM, or a model without LM head (``AutoModel``) if only values are asked for.
        value_head: True adds a `ValueHead` on the last hidden state (a critic, or a policy with a value head).
        remove_padding: True computes real tokens only; False pads the samples to the longest of the batch and uses the model's
            own attention. The numbers are the same.
        sp_group: Ranks that share each sample (Ulysses); all of them pass the same batch and get the same result. None: this
            process alone.
        attention_backend: Kernel of the packed attention, see `select_attention`.
        probe: False skips the five tiny forwards that check packed attention and the LM head of this model; they need real, unsharded
            weights.
        head_memory_mib: Most memory, in MiB, in which the LM head keeps its products between forward and backward pass, 4 bytes for each
            scored token and vocabulary entry; those that do not fit are computed twice. See `token_log_probs`.

    Attributes:
        attention: The `PackedAttention` of the model, None without ``remove_padding``.
        positions: Finds what is scored; ``positions.prepare(micro_batches)`` spares each forward a read from the device.

    Raises:
        ValueError: Sequence parallelism together with padding, a model that packed attention cannot run exactly, one whose own attention
            leaves out its soft cap, or one whose configuration asks for router losses.
        RuntimeError: The model is attached already, or failed the probe; its logits are not a multiple of its LM head's output.

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> scorer = TokenScorer(AutoModelForCausalLM.from_config(config), value_head=True)
        >>> batch = PackedBatch([0, 3, 5], {"input_ids": torch.tensor([7, 8, 9, 5, 6])})
        >>> scores = scorer(batch, with_entropy=True, with_values=True)
        >>> (scores.log_probs < 0).tolist(), scores.values.tolist()
        ([False, True, True, False, True], [0.0, 0.0, 0.0, 0.0, 0.0])
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        value_head: bool = False,
        remove_padding: bool = True,
        sp_group: dist.ProcessGroup | None = None,
        attention_backend: Backend = "auto",
        probe: bool = True,
        head_memory_mib: float = HEAD_MEMORY_MIB,
    ) -> None:
        super().__init__()
        sp_size = 1 if sp_group is None else dist.get_world_size(sp_group)
        if sp_size > 1 and not remove_padding:
            raise ValueError(
                f"sequence_parallel_size={sp_size} shards packed tokens, but remove_padding is False. "
                "Set remove_padding=True, or sequence_parallel_size=1."
            )
        check_head_memory(head_memory_mib)
        _check_router_losses(model)
        self.model = model
        self.sp_group = sp_group
        self.positions = ScoredPositions(sp_group)
        self.head_memory_mib = head_memory_mib
        self.logit_scale, self.softcap = logit_adjustments(model)
        self.value_head = make_value_head(model) if value_head else None
        self.attention: PackedAttention | None = None
        if remove_padding:
            self.attention = attach_packed_attention(model, sp_group=sp_group, backend=attention_backend, probe=probe)
        else:
            check_soft_cap(model.config)
        if probe:
            self._probe_lm_head()

    def _probe_lm_head(self) -> None:
        head = self.lm_head
        if head is None or type(head).forward is not nn.Linear.forward or not has_whole_weights(self.model):
            return
        try:
            with self.attention.paused() if self.attention is not None else nullcontext():
                probe_lm_head(self.model, cast(nn.Linear, head), self.logit_scale, self.softcap)
        except RuntimeError:
            if self.attention is not None:
                self.attention.detach()
            raise

    @property
    def backbone(self) -> nn.Module:
        """The model without its LM head."""
        return self.model.base_model

    @property
    def lm_head(self) -> nn.Module | None:
        """The module that turns hidden states into logits."""
        return output_embeddings(self.model)

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
            TypeError: A temperature tensor that is less precise than fp32, or an LM head that is no plain linear layer.
            RuntimeError: A head's weight is sharded: its FSDP group is not the scorer's own.
        """
        self._check_request(batch, temperature, with_log_probs or with_entropy, with_values)
        targets, scored, sources = self.positions.find(batch)
        states = self._hidden_states(batch)[sources]
        columns: list[Tensor] = []
        if with_log_probs or with_entropy:
            rows_temperature = self._temperature_of(sources, batch, temperature)
            log_probs, entropy = self._run_lm_head(states, targets[sources], rows_temperature, with_entropy)
            columns += [log_probs] if with_log_probs else []
            columns += [entropy] if entropy is not None else []
        if with_values:
            assert self.value_head is not None
            columns.append(self.value_head(states))
        results = [self._to_token(column, sources, scored, batch.num_tokens) for column in columns]
        return TokenScores(*(results.pop(0) if wanted else None for wanted in (with_log_probs, with_entropy, with_values)))

    def _check_request(self, batch: PackedBatch, temperature: float | Tensor, with_head: bool, with_values: bool) -> None:
        if batch.num_samples == 0:
            raise ValueError("The batch has no samples. Every rank must run something: use PackedBatch.filler(schema, num_tokens).")
        if not with_head and not with_values:
            raise ValueError("Nothing was asked for. Set with_log_probs, with_entropy or with_values.")
        if with_values and self.value_head is None:
            raise ValueError("with_values=True needs a value head, but this scorer has none. Construct it with value_head=True.")
        if with_head and self.lm_head is None:
            raise ValueError(
                f"Log-probs need an LM head, but {type(self.model).__name__} has none. Pass with_log_probs=False, or a causal LM."
            )
        if isinstance(temperature, Tensor):
            if temperature.dtype in (torch.bfloat16, torch.float16):
                # FSDP2's mixed precision casts tensor arguments of the root module
                raise TypeError(
                    f"temperature arrived as {temperature.dtype}: 0.7 would become {temperature.new_tensor(0.7).item():.6f}. "
                    "Pass fp32, and MixedPrecisionPolicy(cast_forward_inputs=False) to the scorer's fully_shard."
                )
            if temperature.dim() > 0 and temperature.shape != (batch.num_samples,):
                raise ValueError(f"Expected one temperature for each of {batch.num_samples} samples, but got {tuple(temperature.shape)}.")

    def _hidden_states(self, batch: PackedBatch) -> Tensor:
        """Return the states of this rank's tokens, [t, h]: all T without sequence parallelism, else ceil(T / P)."""
        if self.attention is not None:
            return cast(Tensor, self.backbone(**packed_model_kwargs(batch, sp_group=self.sp_group))[0]).squeeze(0)
        padded = batch.to_padded(pad_id=0)
        output = self.backbone(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"], use_cache=False)
        return cast(Tensor, output[0])[batch.sample_ids_per_token, batch.position_ids]

    def _temperature_of(self, sources: Tensor, batch: PackedBatch, temperature: float | Tensor) -> float | Tensor:
        if not isinstance(temperature, Tensor) or temperature.dim() == 0:
            return temperature
        return shard_sequence(temperature.to(batch.device)[batch.sample_ids_per_token], self.sp_group, pad_value=1.0)[sources]

    def _head_weights(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the LM head, which is used through these alone."""
        head: Any = self.lm_head
        if type(head).forward is not nn.Linear.forward:
            raise TypeError(
                f"The LM head is a {type(head).__name__} with a forward of its own, but only its weight and bias would be used. "
                "Leave the LM head out of LoRA and of quantization."
            )
        if isinstance(head.weight, DTensor):
            raise RuntimeError(
                "The LM head's weight is still sharded inside TokenScorer.forward, so its gradient would not be reduced. "
                "Call fully_shard on the transformer blocks and on the scorer, not on the LM head, the embeddings or the inner model."
            )
        return head.weight, head.bias

    def _run_lm_head(
        self, states: Tensor, targets: Tensor, temperature: float | Tensor, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        weight, bias = self._head_weights()
        return token_log_probs(
            states,
            weight,
            targets,
            bias=bias,
            temperature=temperature,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            with_entropy=with_entropy,
            head_memory_mib=self.head_memory_mib,
        )

    def _to_token(self, column: Tensor, sources: Tensor, scored: Tensor, num_tokens: int) -> Tensor:
        """Spread one result at sources over the whole batch and move it to the token after its source.

        Each result goes its own way: stacked, one without a gradient (an entropy that is a metric only) would get zeros for one, and
        the LM head would compute with them.
        """
        # The position that only keeps the heads busy is not scored: it becomes 0, with a zero gradient.
        local = column.new_zeros(scored.shape[0]).index_copy(0, sources, torch.where(scored[sources], column, 0.0))
        everywhere = gather_sequence(local, self.sp_group, num_tokens)
        return torch.cat([everywhere.new_zeros(1), everywhere[:-1]])


def _check_router_losses(model: PreTrainedModel) -> None:
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            f"The configuration of {type(model).__name__} asks for router losses (output_router_logits=True). They are no sums over tokens,"
            " so they would depend on how a mini-batch is cut, and are not computed here. Set output_router_logits=False."
        )

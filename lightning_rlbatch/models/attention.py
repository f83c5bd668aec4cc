"""Make a transformers causal LM attend within the samples of a packed, possibly sharded, sequence.

Invariants (each is a test):

1. Only the model that is attached changes, and ``detach`` takes everything back. Two models built from one config do not see each other.
2. Lengths are explicit keyword arguments and host integers. They are never guessed from position ids, never read from a device, and
   travel with the call, so that activation checkpointing recomputes with the lengths of its own micro-batch.
3. After every forward, each attention layer has run packed attention on exactly this rank's tokens; otherwise the forward raises.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from lightning_rlbatch.distributed.ulysses import ulysses_attention
from lightning_rlbatch.models.attention_backends import Backend, select_attention
from lightning_rlbatch.models.packed_inputs import LENGTHS, PackedLengths
from lightning_rlbatch.models.probe import check_heads, check_model, decoder_of, has_whole_weights, probe_packed_attention, rotary_limit
from lightning_rlbatch.models.registration import NAME, NO_MASK_SHAPE, RECORD, register

# What packed_model_kwargs passes and the decoder of a causal LM gets; a call with more may ask for a mask with a rule of its own.
_PLAIN = {
    "input_ids",
    "inputs_embeds",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    LENGTHS,
    "use_cache",
}


class ForwardRecord:
    """One forward pass of one attached model: its lengths, and the attention layers that have run.

    Args:
        handle: The attachment of the model.
        lengths: Lengths of the whole sequence.
        cu_seqlens: Their int32 boundaries on the model's device, if the caller gave them.
    """

    def __init__(self, handle: "PackedAttention", lengths: PackedLengths, cu_seqlens: Tensor | None) -> None:
        self.handle = handle
        self.lengths = lengths
        self.cu_seqlens = cu_seqlens
        self.layers: set[int] = set()

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Run one layer's attention, ``[t, H, D]`` to ``[t, Hq, Dv]``, and note that it ran."""
        expected = self.lengths.num_tokens // self.handle.sp_size
        if query.shape[0] != expected or self.lengths.num_tokens % self.handle.sp_size:
            raise ValueError(
                f"{type(module).__name__} got {query.shape[0]} tokens but the lengths add up to {self.lengths.num_tokens} over "
                f"{self.handle.sp_size} sequence-parallel ranks. Build the call with packed_model_kwargs(batch, sp_group=...)."
            )
        self.layers.add(id(module))
        query, key, value = _autocast(query, key, value)
        return ulysses_attention(
            query,
            key,
            value,
            self.cu_seqlens,
            group=self.handle.sp_group,
            seq_lens=self.lengths.seq_lens,
            attention=self.handle.attention,
            **options,
        )


class PackedAttention:
    """The attachment of one model; returned by :func:`attach_packed_attention`, and a context manager that detaches at its end.

    Attributes:
        sp_group: The sequence-parallel group, or None.
        sp_size: P.
        num_layers: Attention layers that every forward must run.
        num_forwards: Forward passes that ran, each with every layer.
        stand_in: Whether plain calls get an empty mask, which spares transformers a read from the device: without any mask it looks for
            packed samples among the position ids. Only models that were probed with it get one.
    """

    def __init__(self, model: PreTrainedModel, sp_group: dist.ProcessGroup | None, backend: Backend) -> None:
        self.sp_group = sp_group
        self.sp_size = 1 if sp_group is None else dist.get_world_size(sp_group)
        self.attention = select_attention(backend)
        self.num_layers = int(model.config.get_text_config().num_hidden_layers)
        self.num_forwards = 0
        self.stand_in = False
        self._rotary_limit = rotary_limit(model.config)
        self._model = model
        self._record: ForwardRecord | None = None
        self._configs = _give_own_configs(model)
        self._previous = [config._attn_implementation for config in self._configs]
        self._hooks: list[RemovableHandle] = []
        self._switch_on()

    @property
    def attached(self) -> bool:
        """False after :meth:`detach` and inside :meth:`paused`."""
        return bool(self._hooks)

    def detach(self) -> None:
        """Give the model its former attention back; calling it twice is harmless."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for config, previous in zip(self._configs, self._previous):
            config._attn_implementation_internal = previous

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Use the model's former attention inside the block, to generate or to run padded rows, for example."""
        if not self.attached:
            yield
            return
        self.detach()
        try:
            yield
        finally:
            self._switch_on()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let this rank run whole sequences by itself inside the block; the forwards are not counted."""
        kept = self.sp_group, self.sp_size, self.num_forwards
        self.sp_group, self.sp_size = None, 1
        try:
            yield
        finally:
            self.sp_group, self.sp_size, self.num_forwards = kept

    def _switch_on(self) -> None:
        for config in self._configs:
            config._attn_implementation_internal = NAME
        decoder = decoder_of(self._model)
        before = decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._hooks = [before, decoder.register_forward_hook(self._after_forward)]

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        lengths, cu_seqlens = kwargs.get(LENGTHS), kwargs.get("cu_seq_lens_q")
        if lengths is None and cu_seqlens is not None:
            bounds = cu_seqlens.tolist()  # waits for the device: packed_model_kwargs spares it
            lengths = PackedLengths([after - before for before, after in pairwise(bounds)])
        if lengths is None:
            raise ValueError(
                f"{type(module).__name__} has packed attention but was called without lengths, which are never guessed from position ids. "
                "Call it with **packed_model_kwargs(batch), or run this call inside handle.paused()."
            )
        if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
            raise ValueError("Packed attention has no cache. Pass use_cache=False, or generate inside handle.paused().")
        longest, limit = max(lengths.seq_lens), self._rotary_limit
        if limit is not None and longest > limit:
            raise ValueError(
                f"A sample has {longest} tokens, but beyond {limit} the rotary frequencies of {type(module).__name__} depend on the "
                "longest sample of a call, so packed samples would change each other. Limit the samples' length, or run padded samples one "
                "at a time (remove_padding: false, micro_batch_size: 1)."
            )
        self._record = ForwardRecord(self, lengths, cu_seqlens)
        added = {LENGTHS: lengths, "use_cache": False, RECORD: self._record}
        if self.stand_in and not args and all(value is None or name in _PLAIN for name, value in kwargs.items()):
            device = next(value.device for value in kwargs.values() if isinstance(value, Tensor))
            added["attention_mask"] = torch.empty(NO_MASK_SHAPE, dtype=torch.bool, device=device)  # bool: no mixed precision casts it
        return args, kwargs | added

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        record, self._record = self._record, None
        assert record is not None, "the hook before the forward made it"
        if len(record.layers) != self.num_layers:
            raise RuntimeError(
                f"Only {len(record.layers)} of {self.num_layers} layers of {type(module).__name__} ran packed attention; the others would "
                "mix samples. Either the model's attention was set again after attaching, or packed attention cannot be used with it."
            )
        self.num_forwards += 1

    def __enter__(self) -> "PackedAttention":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()

    def __deepcopy__(self, memo: Mapping[int, Any]) -> "PackedAttention":
        return self  # a copied model keeps working: its hooks and its own copied configs still lead here


def attach_packed_attention(
    model: PreTrainedModel, *, sp_group: dist.ProcessGroup | None = None, backend: Backend = "auto", probe: bool = True
) -> PackedAttention:
    """Make a transformers causal LM run packed batches exactly, over the ranks of ``sp_group`` if there is one.

    Call it on every rank of the group at the same point. Afterwards call the model with :func:`packed_model_kwargs`.

    Args:
        model: The causal LM, on any device; its config objects are replaced by copies of its own.
        sp_group: Ranks that share every sequence; None means that this rank runs it alone.
        backend: See :func:`select_attention`.
        probe: Run two short samples packed and separately and compare, unless the weights are on the meta device or sharded already.

    Returns:
        The attachment: ``detach()``, ``paused()``, or a ``with`` block.

    Raises:
        TypeError: Not a transformers model.
        ValueError: A model that packed attention cannot run exactly, or fewer query heads than ranks.
        RuntimeError: The model is attached already, or failed the probe.

    Example::

        with attach_packed_attention(model):
            hidden = model.base_model(**packed_model_kwargs(batch)).last_hidden_state  # [1, T, hidden size]
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"Expected a transformers PreTrainedModel but got {type(model).__name__}. Pass the inner model of a wrapper "
            "(peft_model.get_base_model()); a plain module can call ulysses_attention or varlen_attention itself."
        )
    check_model(model)
    if any(_owner(hook) is not None for hook in decoder_of(model)._forward_pre_hooks.values()):
        raise RuntimeError(f"{type(model).__name__} already has packed attention. Call detach() on its handle first.")
    if sp_group is not None:
        check_heads(model.config, dist.get_world_size(sp_group))
    register()
    handle = PackedAttention(model, sp_group, backend)
    with ExitStack() as undo:
        undo.callback(handle.detach)
        if probe and has_whole_weights(model):
            with handle.alone():
                probe_packed_attention(model)
                handle.stand_in = True
                try:
                    probe_packed_attention(model)
                except Exception:  # a decoder that reads its mask
                    handle.stand_in = False
        undo.pop_all()
    return handle


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast as autocast does for scaled_dot_product_attention: normed queries and keys are fp32 beside values that are not."""
    device = query.device.type
    if not torch.is_autocast_enabled(device) or query.dtype == torch.float64:
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _owner(hook: Any) -> PackedAttention | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, PackedAttention) else None


def _give_own_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Replace every config object inside a model by a copy, because two models built from one config share its attention setting."""
    memo: dict[int, Any] = {}
    copies: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                copies[id(value)] = copy.deepcopy(value, memo)
                setattr(module, name, copies[id(value)])
    return list({id(config): config for config in copies.values()}.values())

"""Find out whether a transformers model can be run packed, and scored, exactly: from its class, its config and a few tokens."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from lightning_rlbatch.distributed.heads import HeadPlan
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.packed_inputs import packed_model_kwargs

_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


def check_heads(config: PreTrainedConfig, sp_size: int) -> None:
    """Raise if a model with this config cannot be split over ``sp_size`` ranks; needs no weights.

    Args:
        config: The model's config.
        sp_size: P.

    Raises:
        ValueError: Fewer query heads than ranks; the message holds both numbers.
    """
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    HeadPlan.build(heads, int(kv_heads) if heads % int(kv_heads) == 0 else heads, sp_size)


def check_model(model: PreTrainedModel) -> None:
    """Raise if a model's class or config says that packed attention cannot run it exactly; needs no weights.

    Args:
        model: A transformers model, on any device.

    Raises:
        ValueError: No attention interface, layers other than attention, several modalities, or bidirectional attention.
    """
    name, text = type(model).__name__, model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) | set(getattr(text, "layers_block_type", None) or ())
    interface = model._supports_attention_backend and model._can_set_attn_implementation()
    reason = None
    if model.config.is_encoder_decoder:
        reason = "it is an encoder-decoder"
    elif text is not model.config:
        reason = "it has several modalities (pass its text model, for example model.language_model)"
    elif kinds - _LAYER_TYPES:
        reason = f"it has layers of the kinds {sorted(kinds - _LAYER_TYPES)}, whose state runs from one sample into the next"
    elif not interface:
        reason = "its attention layers do not use transformers' attention interface"
    else:
        bidirectional = sorted({type(module).__name__ for module in model.modules() if not _is_causal(module)})
        if bidirectional:
            reason = f"{bidirectional} attend in both directions"
    if reason is not None:
        raise ValueError(f"Packed attention cannot run {name}: {reason}. Use padded batches (remove_padding: false) for this model.")


def check_soft_cap(config: PreTrainedConfig, *, paged: bool = False) -> None:
    """Raise if a model's own attention leaves out the soft cap of its config; needs no weights.

    SDPA has no soft cap: transformers refuses it for such models (Gemma 2) since 5.21, and computes without the cap before. Its
    eager attention has none for keys and values in pages. Packed attention computes the cap itself.

    Args:
        config: The model's config.
        paged: Whether transformers' continuous batching runs the model.

    Raises:
        ValueError: The config has a soft cap and its attention has none.
    """
    text = config.get_text_config()
    cap, attention = getattr(text, "attn_logit_softcapping", None), str(text._attn_implementation)
    if cap is not None and attention.endswith(("sdpa", "eager") if paged else "sdpa"):
        raise ValueError(
            f"The model caps attention scores (attn_logit_softcapping={cap}), which its attention, {attention!r}, leaves out"
            + (" in continuous batching. Set method to 'embedded' and" if paged else ". Set")
            + " attn_implementation to 'eager'."
        )


def rotary_limit(config: PreTrainedConfig) -> int | None:
    """Return the longest sample that packed attention may run where rotary frequencies depend on the longest position of a call.

    Beyond it, "longrope" (Phi-3 with long context) and "dynamic" embeddings would give a sample the frequencies of its longest
    neighbour, and shards of one sample different ones.

    Args:
        config: The model's config.

    Returns:
        Tokens; None if frequencies are fixed.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    limits = []
    for kind in [parameters] if "rope_type" in parameters else parameters.values():  # or one set per type of layer
        if isinstance(kind, dict) and kind.get("rope_type") == "longrope":
            limits.append(int(kind["original_max_position_embeddings"]))
        elif isinstance(kind, dict) and "dynamic" in str(kind.get("rope_type")):
            limits.append(int(text.max_position_embeddings))
    return min(limits, default=None)


@torch.no_grad()
def probe_packed_attention(model: PreTrainedModel) -> None:
    """Run two short samples packed and one by one, and raise unless the hidden states agree.

    This finds models that ignore the registered attention function, drop its arguments, or number positions on their own. It costs three
    forwards of at most five tokens and draws no random numbers. No rank waits for another: their weights may still differ.

    Args:
        model: The model, attached without a group, with weights that are neither on the meta device nor sharded by FSDP.

    Raises:
        RuntimeError: The hidden states differ, or a layer did not run packed attention.
    """
    batch = PackedBatch([0, 3, 5], {"input_ids": _probe_ids(model, 5)})
    with evaluating(model):
        try:
            packed = _hidden_states(model, batch)
            alone = torch.cat([_hidden_states(model, batch.select([index])) for index in range(2)])
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(f"{type(model).__name__} failed the probe of packed attention: {error}") from error
    error_size, tolerance = _relative_error(packed, alone)
    if not error_size <= tolerance:
        raise RuntimeError(
            f"{type(model).__name__} failed the probe of packed attention: two samples packed differ from the same samples alone by "
            f"{error_size:.1e} (relative to the largest hidden state; at most {tolerance:.0e} is rounding). It mixes samples or numbers "
            "positions on its own. Use padded batches (remove_padding: false) for this model."
        )


@torch.no_grad()
def probe_lm_head(model: PreTrainedModel, head: nn.Linear, logit_scale: float, softcap: float | None) -> None:
    """Raise unless the logits of three tokens are what the LM head's weight makes of the last hidden states.

    This finds families whose logits are scaled or capped by an option that `logit_adjustments` does not know, and heads with layers of
    their own before the last matrix.

    Args:
        model: The model with its own attention.
        head: Its output embeddings.
        logit_scale: Factor on the head's output.
        softcap: Bound of soft-capped logits.

    Raises:
        RuntimeError: The logits differ.
    """
    inputs = {"input_ids": _probe_ids(model, 3).unsqueeze(0), "use_cache": False}
    with evaluating(model):
        expected: Tensor = model(**inputs).logits
        found = head(model.base_model(**inputs)[0]) * logit_scale
    found = found if softcap is None else softcap * torch.tanh(found / softcap)
    error_size, tolerance = _relative_error(found, expected)
    if not error_size <= tolerance:
        raise RuntimeError(
            f"{type(model).__name__} cannot be scored from its LM head: logits computed from the last hidden state with "
            f"logit_scale={logit_scale:g} and softcap={softcap} differ from the model's own by {error_size:.1e} (relative to the largest; "
            f"at most {tolerance:.0e} is rounding). Its head does more than multiply by a weight. Use a model of another family."
        )


def has_whole_weights(model: nn.Module) -> bool:
    """Return False if a weight is on the meta device or sharded by FSDP, so that the model cannot simply be run."""
    return not any(weight.is_meta or isinstance(weight, DTensor) for weight in model.parameters())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and every module's mode back afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.train(False)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _probe_ids(model: PreTrainedModel, num_tokens: int) -> Tensor:
    return (torch.arange(num_tokens, device=model.device) * 7919 + 11) % int(model.config.get_text_config().vocab_size)


def _relative_error(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the largest difference relative to the largest expected value, and how much of it may be rounding."""
    tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 5e-2
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12)), tolerance


def _hidden_states(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    found: Tensor = model.base_model(**packed_model_kwargs(batch))[0][0]  # [T, hidden size]
    return found


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the module that holds the decoder layers: every way to call the model leads through its forward."""
    decoder: object = model.get_decoder()  # type: ignore[no-untyped-call]  # transformers leaves it without annotations
    return decoder if isinstance(decoder, nn.Module) else model.base_model


def _is_causal(module: nn.Module) -> bool:
    """Return False for an attention layer that declares itself bidirectional."""
    declared = getattr(module, "is_causal", None)
    return not isinstance(declared, (bool, Tensor)) or bool(declared)

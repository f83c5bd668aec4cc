"""Register packed attention with transformers' attention and mask interfaces, under our own name."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from lightning_rlbatch.models.attention import ForwardRecord

NAME = "rlbatch_varlen"
NO_MASK_SHAPE = (1, 1, 1, 0)  # of a stand-in: transformers hands a mask of four dimensions on as it is, without looking at positions
RECORD = "packed_attention"  # keyword argument that carries the model's own state from its hook to its attention layers
# What attention layers of transformers are known to receive beyond what is handled below, without any effect on attention.
_UNSUPPORTED = ("position_bias", "head_mask", "block_table", "cache", "past_key_values")


def register() -> None:
    """Make the name known to transformers; calling it again changes nothing, and no other model is affected."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, refuse_padding)


def refuse_padding(
    *args: Any,
    attention_mask: Tensor | None = None,
    mask_function: Callable[..., Any] | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> None:
    """Return no mask, because packed attention needs none, and raise where one would have had an effect.

    Without a registered mask function transformers drops a padding mask silently.

    Args:
        *args: Ignored; transformers passes keywords.
        attention_mask: bool ``[B, L]``, True at real tokens, or None.
        mask_function: Ignored: causality and windows are applied by the attention function.
        use_vmap: True where the model adds its own rule to the mask (bidirectional image tokens, for example).
        **kwargs: Ignored: sizes, dtype and device of a mask.

    Raises:
        ValueError: Padding, or a rule that packed attention does not know.
    """
    if use_vmap:
        raise ValueError(
            "The model asks for an attention mask with a rule of its own beside causal and sliding-window attention; packed attention "
            "cannot apply it. Detach packed attention from this model."
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        padding = int((~attention_mask.bool()).sum())
        raise ValueError(
            f"Packed attention got an attention_mask with {padding} padding positions of {attention_mask.numel()}. Remove the padding "
            "(PackedBatch.from_padded, then packed_model_kwargs), or run this call inside handle.paused()."
        )


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each sample of one packed row; called by the attention layers of an attached model.

    Args:
        module: The attention layer.
        query: ``[1, Hq, t, D]``, t the tokens of this rank.
        key: ``[1, Hk, t, D]``, heads not repeated.
        value: ``[1, Hk, t, Dv]``.
        attention_mask: None, see :func:`refuse_padding`, or an empty stand-in of ``NO_MASK_SHAPE``.
        dropout: Probability of dropping an attention weight.
        scaling: Factor on the scores; None means ``D ** -0.5``.
        is_causal: None means the layer's own attribute, else True.
        sliding_window: See ``window`` of :func:`~lightning_rlbatch.functional.varlen_attention`.
        softcap: Soft-capped scores.
        s_aux: ``[Hq]``, attention sinks.
        **kwargs: The packed keyword arguments, and others without an effect on attention.

    Returns:
        ``[1, t, Hq, Dv]`` and None (no attention weights).

    Raises:
        RuntimeError: The model is not attached, or dropped the packed keyword arguments on the way.
        ValueError: Something that packed attention does not compute exactly.
    """
    record: ForwardRecord | None = kwargs.get(RECORD)
    if record is None:
        raise RuntimeError(
            f"{type(module).__name__} did not receive the keyword argument {RECORD!r}. Either the model was not prepared with "
            "attach_packed_attention, or its layers do not pass keyword arguments on: then packed attention cannot be used with it."
        )
    if (attention_mask is not None and attention_mask.shape != NO_MASK_SHAPE) or kwargs.get("output_attentions"):
        raise ValueError("Packed attention takes no attention mask and returns no attention weights. Use handle.paused() for such a call.")
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if asked or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"Packed attention needs one row without cache and position bias, but {type(module).__name__} has query {list(query.shape)}, "
            f"key {list(key.shape)} and {asked or 'no further arguments'}. Pass use_cache=False, or use handle.paused() to generate."
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = record.attend(
        module,
        *(x.squeeze(0).transpose(0, 1) for x in (query, key, value)),  # [1, H, t, D] -> [t, H, D]
        scale=scaling,
        causal=bool(causal),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        dropout=float(dropout),
    )
    return out.unsqueeze(0), None

"""Choose the attention kernel for packed samples: flash-attn, torch's varlen attention, or one SDPA call per sample.

Names: ``"flash_attn"`` (package ``flash-attn``), ``"torch_varlen"`` (``torch.nn.attention.varlen``), ``"sdpa"`` (anywhere) and ``"auto"``,
which takes the first of these that computes a call exactly. A backend named explicitly refuses a call that it cannot compute exactly.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_rlbatch.functional.attention import AttentionFunction, check_attention, varlen_attention

Backend: TypeAlias = Literal["auto", "flash_attn", "torch_varlen", "sdpa"]
BACKENDS: tuple[Backend, ...] = ("auto", "flash_attn", "torch_varlen", "sdpa")
MAX_KERNEL_HEAD_DIM = 256
_Kernel: TypeAlias = Callable[..., Tensor]


@functools.cache
def _load(backend: str) -> tuple[_Kernel | None, str]:
    """Return the kernel, or None with the reason why it is not there."""
    module, name = {
        "flash_attn": ("flash_attn", "flash_attn_varlen_func"),
        "torch_varlen": ("torch.nn.attention.varlen", "varlen_attn"),
    }[backend]
    try:
        kernel: _Kernel = getattr(importlib.import_module(module), name)
    except (ImportError, OSError, AttributeError) as error:  # OSError: a wheel built for another torch
        return None, f"{module}.{name} cannot be imported ({error})"
    if backend == "torch_varlen" and not _takes(kernel, "window_size"):
        return None, f"{module}.{name} of torch {torch.__version__} has no window_size. Install a newer torch"
    return kernel, ""


def _takes(kernel: _Kernel, name: str) -> bool:
    return name in inspect.signature(kernel).parameters


def why_not(
    backend: Backend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> str | None:
    """Say why a backend cannot compute a call exactly.

    Args:
        backend: A backend's name.
        query: ``[T, Hq, D]``.
        key: ``[T, Hk, D]``.
        value: ``[T, Hk, Dv]``.
        softcap: Soft-capped scores; as in :func:`~lightning_rlbatch.functional.varlen_attention`, like the rest.
        sinks: One more score per head.
        dropout: Probability of dropping an attention weight.

    Returns:
        The reason, or None if the backend can.
    """
    if backend in ("sdpa", "auto"):
        return None
    if query.device.type != "cuda":
        return f"it needs a CUDA device but the tensors are on {query.device}"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in fp16 and bf16 only but the tensors are {query.dtype}"
    if query.shape[2] != value.shape[2] or query.shape[2] > MAX_KERNEL_HEAD_DIM:
        return f"its head sizes must be equal and at most {MAX_KERNEL_HEAD_DIM} but are {query.shape[2]} and {value.shape[2]}"
    if sinks is not None:
        return "it has no attention sinks"
    if backend == "torch_varlen" and softcap is not None:
        return f"it has no soft-capped scores (softcap={softcap})"
    if backend == "torch_varlen" and dropout > 0:
        return f"it has no dropout (dropout={dropout})"
    kernel, reason = _load(backend)
    return None if kernel is not None else reason


def select_attention(backend: Backend = "auto") -> AttentionFunction:
    """Return an attention function with the signature of :func:`~lightning_rlbatch.functional.varlen_attention`.

    Args:
        backend: "auto" decides at every call, by device, dtype and what the layer asks for.

    Returns:
        The function. It raises ``ValueError`` where the backend cannot compute a call exactly.

    Raises:
        ValueError: An unknown name.
    """
    if backend not in BACKENDS:
        raise ValueError(f"Expected backend to be one of {list(BACKENDS)} but got {backend!r}.")
    return functools.partial(_attend, backend)


def _attend(
    backend: Backend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Sequence[int],
    *,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    asked: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "dropout": dropout}
    chosen = backend
    if backend == "auto":
        candidates: tuple[Backend, ...] = ("flash_attn", "torch_varlen") if query.is_cuda else ()
        chosen = next((name for name in candidates if why_not(name, query, key, value, **asked) is None), "sdpa")
    else:
        reason = why_not(backend, query, key, value, **asked)
        if reason is not None:
            raise ValueError(f"backend={backend!r} cannot compute this attention exactly: {reason}. Use backend='auto' or 'sdpa'.")
    if chosen == "sdpa":
        return varlen_attention(query, key, value, seq_lens, scale=scale, causal=causal, window=window, **asked)
    check_attention(query, key, value, seq_lens, causal=causal, window=window)
    if cu_seqlens is None:
        bounds = [0, *torch.tensor(seq_lens).cumsum(0).tolist()]
        cu_seqlens = torch.tensor(bounds)
    cu_seqlens = cu_seqlens.to(query.device, torch.int32)
    return _run_kernel(chosen, query, key, value, cu_seqlens, max(seq_lens), scale, causal, window, softcap, dropout)


def _run_kernel(
    backend: Backend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    kernel, _ = _load(backend)
    assert kernel is not None, "why_not() has loaded it"
    query, key, value = (x.contiguous() for x in (query, key, value))
    # Both kernels count the tokens BEFORE the query: transformers' window of W tokens includes the query itself.
    left = -1 if window is None else window - 1
    bounds = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    if backend == "torch_varlen":
        groups = query.shape[1] // key.shape[1]
        options: dict[str, Any] = {"scale": scale, "window_size": (left, 0 if causal else -1)}
        if _takes(kernel, "enable_gqa"):
            options["enable_gqa"] = groups > 1
        elif groups > 1:  # before torch 2.12
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        return kernel(query, key, value, *bounds, **options)
    return kernel(
        query,
        key,
        value,
        *bounds,
        dropout_p=dropout,
        softmax_scale=scale,
        causal=causal,
        window_size=(left, 0 if window is not None else -1),
        softcap=softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )

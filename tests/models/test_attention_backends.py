import importlib.util
import re

import pytest
import torch
from tiny_models import VOCAB, tiny_model

from lightning_rlbatch.functional.attention import varlen_attention
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models import attention_backends
from lightning_rlbatch.models.attention import attach_packed_attention
from lightning_rlbatch.models.attention_backends import BACKENDS, select_attention, why_not
from lightning_rlbatch.models.packed_inputs import packed_model_kwargs

SEQ_LENS = [5, 1, 9]


def make_inputs(heads=4, kv_heads=2, size=8, dtype=torch.float32, device="cpu", seq_lens=SEQ_LENS):
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, size), (kv_heads, size), (kv_heads, size)]
    return [torch.randn(sum(seq_lens), *shape, generator=generator).to(device, dtype) for shape in shapes]


def emulate(query, key, value, cu_seqlens, scale, left, right, softcap):
    """A kernel by its documentation: key j is seen by query i if i - left <= j <= i + right, a negative side being unlimited."""
    bounds = cu_seqlens.tolist()
    sample = torch.repeat_interleave(torch.arange(len(bounds) - 1), cu_seqlens.diff().long())
    distance = torch.arange(len(query))[:, None] - torch.arange(len(query))[None, :]
    visible = sample[:, None] == sample[None, :]
    visible &= (distance <= left) if left >= 0 else True
    visible &= (distance >= -right) if right >= 0 else True
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) * (query.shape[2] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~visible, float("-inf")).softmax(-1), value)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_q,
    cu_k,
    max_q,
    max_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
):
    assert cu_q.dtype == torch.int32
    assert max_q == max_k == int(cu_q.diff().max())
    assert all(x.is_contiguous() for x in (q, k, v))
    return emulate(q, k, v, cu_q, softmax_scale, window_size[0], 0 if causal else window_size[1], softcap)


def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa == (q.shape[1] != k.shape[1])
    return emulate(q, k, v, cu_q, scale, *window_size, 0.0)


@pytest.fixture
def kernels(monkeypatch):
    """Pretend that both GPU kernels are installed and run here."""
    made = {"flash_attn": flash_attn_varlen_func, "torch_varlen": varlen_attn}
    monkeypatch.setattr(attention_backends, "_load", lambda backend: (made[backend], ""))
    monkeypatch.setattr(attention_backends, "why_not", lambda backend, *args, **kwargs: None)


OPTIONS = [{}, {"causal": False}, {"window": 1}, {"window": 3}, {"scale": 0.3}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("backend", ["flash_attn", "torch_varlen"])
def test_a_kernel_is_called_with_the_meaning_that_it_documents(kernels, backend, options):
    tensors = make_inputs()
    expected = varlen_attention(*tensors, SEQ_LENS, **options)
    bounds = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    for cu_seqlens in (None, bounds):
        ours = select_attention(backend)(*tensors, SEQ_LENS, cu_seqlens=cu_seqlens, **options)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def older_varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    """The signature of torch 2.11, which wants as many key/value heads as query heads."""
    assert q.shape[1] == k.shape[1] == v.shape[1]
    return emulate(q, k, v, cu_q, scale, *window_size, 0.0)


def test_a_kernel_without_grouped_heads_gets_them_repeated(kernels, monkeypatch):
    monkeypatch.setattr(attention_backends, "_load", lambda backend: (older_varlen_attn, ""))
    query, key, value = make_inputs()
    assert query.shape[1] > key.shape[1]
    ours = select_attention("torch_varlen")(query, key, value, SEQ_LENS)
    torch.testing.assert_close(ours, varlen_attention(query, key, value, SEQ_LENS), rtol=1e-4, atol=1e-5)


def test_soft_capped_scores_reach_the_kernel_that_has_them(kernels):
    tensors = make_inputs()
    ours = select_attention("flash_attn")(*tensors, SEQ_LENS, softcap=1.5)
    torch.testing.assert_close(ours, varlen_attention(*tensors, SEQ_LENS, softcap=1.5), rtol=1e-4, atol=1e-5)


class OnGpu:
    """Stands for a CUDA tensor where there is none: only what the choice of a backend looks at."""

    def __init__(self, dtype=torch.bfloat16, size=64):
        self.dtype, self.shape, self.device, self.is_cuda = dtype, (10, 4, size), torch.device("cuda"), True


@pytest.mark.parametrize(
    ("backend", "tensor", "value", "options", "reason"),
    [
        ("flash_attn", OnGpu(torch.float32), OnGpu(torch.float32), {}, "fp16 and bf16 only but the tensors are torch.float32"),
        ("flash_attn", OnGpu(size=64), OnGpu(size=32), {}, "must be equal and at most 256 but are 64 and 32"),
        ("torch_varlen", OnGpu(size=512), OnGpu(size=512), {}, "at most 256"),
        ("flash_attn", OnGpu(), OnGpu(), {"sinks": torch.zeros(4)}, "no attention sinks"),
        ("torch_varlen", OnGpu(), OnGpu(), {"softcap": 30.0}, r"no soft-capped scores \(softcap=30.0\)"),
        ("torch_varlen", OnGpu(), OnGpu(), {"dropout": 0.1}, r"no dropout \(dropout=0.1\)"),
    ],
)
def test_what_a_backend_cannot_do_exactly_has_a_reason(backend, tensor, value, options, reason):
    assert re.search(reason, why_not(backend, tensor, tensor, value, **options))
    assert why_not("sdpa", tensor, tensor, value, **options) is None


def test_a_missing_package_is_a_reason_and_auto_goes_on_without_it():
    if importlib.util.find_spec("flash_attn") is None:
        assert "flash_attn.flash_attn_varlen_func cannot be imported" in why_not("flash_attn", OnGpu(), OnGpu(), OnGpu())
    assert why_not("torch_varlen", OnGpu(), OnGpu(), OnGpu()) is None


def test_an_explicit_backend_refuses_and_auto_falls_back_on_the_cpu():
    tensors = make_inputs()
    expected = varlen_attention(*tensors, SEQ_LENS)
    assert torch.equal(select_attention("auto")(*tensors, SEQ_LENS), expected)
    assert torch.equal(select_attention("sdpa")(*tensors, SEQ_LENS), expected)
    for backend in ("flash_attn", "torch_varlen"):
        with pytest.raises(ValueError, match=f"backend='{backend}' cannot compute this attention exactly: it needs a CUDA device"):
            select_attention(backend)(*tensors, SEQ_LENS)
    with pytest.raises(ValueError, match="Expected backend to be one of"):
        select_attention("eager")


@pytest.mark.cuda
@pytest.mark.parametrize("options", [*OPTIONS, {"softcap": 1.5}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_gpu_backend_in_bf16_equals_fp32_in_value_and_gradient(backend, options, kv_heads):
    lens = [300, 1, 70]
    tensors = make_inputs(kv_heads=kv_heads, size=64, device="cuda", seq_lens=lens)
    reason = why_not(backend, *(x.bfloat16() for x in tensors), softcap=options.get("softcap"))
    if reason is not None:
        pytest.skip(reason)
    results = []
    for dtype, function in ((torch.float32, varlen_attention), (torch.bfloat16, select_attention(backend))):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        out = function(*leaves, lens, **options)
        results.append([x.float() for x in (out, *torch.autograd.grad(out.float().square().sum(), leaves))])
    for reference, ours in zip(*results):
        assert float((ours - reference).abs().max()) < 2e-2 * float(reference.abs().max())  # bf16 has 8 bits


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "qwen3_moe"])
def test_a_model_on_a_gpu_in_bf16_equals_its_samples_alone(family):
    model = tiny_model(family).to("cuda", torch.bfloat16)
    batch = PackedBatch.from_samples([{"input_ids": torch.arange(1, n + 1) % VOCAB} for n in (9, 1, 30)]).to("cuda")
    expected = torch.cat([model(ids.unsqueeze(0), use_cache=False).logits[0] for ids in batch.split_per_sample("input_ids")])
    with attach_packed_attention(model):
        logits = model(**packed_model_kwargs(batch)).logits[0]
    assert float((logits - expected).abs().max()) < 4e-2 * float(expected.abs().max())

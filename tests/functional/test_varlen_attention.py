import itertools

import pytest
import torch

from lightning_rlbatch.functional import attention
from lightning_rlbatch.functional.attention import varlen_attention


def dense_attention(query, key, value, seq_lens, *, scale=None, causal=True, window=None, softcap=None, sinks=None):
    """The slow, obvious reference: all scores of all samples in one T x T matrix."""
    tokens, heads, size = query.shape
    group = heads // key.shape[1]
    sample = torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(seq_lens))
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    visible = sample[:, None] == sample[None, :]
    if causal:
        visible = visible & (distance >= 0)
    if window is not None:
        visible = visible & (distance < window)
    rows = []
    for head in range(heads):
        scores = query[:, head] @ key[:, head // group].T * (size**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp() * visible
        total = weights.sum(1, keepdim=True) + (sinks[head].exp() if sinks is not None else 0)
        rows.append(weights / total @ value[:, head // group])
    return torch.stack(rows, 1)


def inputs(seq_lens, heads=4, kv_heads=2, size=8, value_size=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, size), (kv_heads, size), (kv_heads, value_size)]
    return [torch.randn(sum(seq_lens), *shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def assert_matches_dense(seq_lens, tensors, options):
    outputs, gradients = [], []
    for function in (varlen_attention, dense_attention):
        leaves = [x.detach().requires_grad_() for x in tensors]
        sinks = options.get("sinks")
        extra = {**options, "sinks": sinks.detach().requires_grad_()} if sinks is not None else options
        out = function(*leaves, seq_lens, **extra)
        wanted = [*leaves, extra["sinks"]] if sinks is not None else leaves
        gradients.append(torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), wanted))
        outputs.append(out)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-10, atol=1e-10)
    for ours, reference in zip(*gradients):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-10)


OPTIONS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "scaled": {"scale": 0.7},
    "window": {"window": 3},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
    "everything": {"softcap": 1.5, "window": 4, "scale": 0.3, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_option_equals_the_dense_matrix_in_value_and_gradient(name, kv_heads):
    assert_matches_dense([5, 1, 9, 2], inputs([5, 1, 9, 2], kv_heads=kv_heads), OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_samples_without_tokens_change_nothing(name):
    tensors = inputs([3, 2])
    expected = varlen_attention(*tensors, [3, 2], **OPTIONS[name])
    assert torch.equal(varlen_attention(*tensors, [0, 3, 0, 2, 0], **OPTIONS[name]), expected)
    for seq_lens in ([], [0], [0, 0]):
        nothing = varlen_attention(*(x[:0] for x in tensors), seq_lens, **OPTIONS[name])
        assert nothing.shape == (0, *expected.shape[1:])
        assert nothing.requires_grad


LONG = [(300, 5), (300, 128), (257, 129), (129, 128), (256, 256), (400, 1), (1300, 600), (700, 130)]


@pytest.mark.parametrize(("length", "window"), LONG)
def test_long_samples_under_a_window_equal_the_dense_matrix(length, window):
    assert_matches_dense([3, length, 7], inputs([3, length, 7], heads=2, kv_heads=1, size=4, value_size=4), {"window": window})


@pytest.mark.parametrize("name", ["softcap", "sinks", "everything"])
def test_explicit_scores_do_not_depend_on_their_blocks(monkeypatch, name):
    for block in (1, 4 * 9 * 2, 4 * 9 * 4):
        monkeypatch.setattr(attention, "SCORE_BLOCK", block)
        assert_matches_dense([5, 9], inputs([5, 9]), OPTIONS[name])


def test_value_heads_may_have_their_own_size():
    assert_matches_dense([4, 6], inputs([4, 6], value_size=3), {})
    assert_matches_dense([4, 6], inputs([4, 6], value_size=3), {"softcap": 2.0})


@pytest.mark.parametrize("name", OPTIONS)
def test_other_samples_change_nothing_not_even_one_bit(name):
    seq_lens = [200, 4, 150]
    query, key, value = (x.detach().float() for x in inputs(seq_lens))
    options = {key_: (x.float() if isinstance(x, torch.Tensor) else x) for key_, x in OPTIONS[name].items()}
    before = varlen_attention(query, key, value, seq_lens, **options)
    for x in (query, key, value):
        x[:200] = torch.randn_like(x[:200]) * 50
    after = varlen_attention(query, key, value, seq_lens, **options)
    assert torch.equal(before[200:], after[200:])
    assert not torch.equal(before[:200], after[:200])


@pytest.mark.parametrize("name", OPTIONS)
def test_the_memory_kept_for_the_backward_grows_with_the_tokens_not_with_their_square(name):
    def kept_bytes(tokens):
        storages = {}
        options = {key_: (x.float() if isinstance(x, torch.Tensor) else x) for key_, x in OPTIONS[name].items()}
        tensors = inputs([tokens], dtype=torch.float32)

        def note(x):
            storages[x.untyped_storage().data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            varlen_attention(*tensors, [tokens], **options)
        return sum(x.untyped_storage().nbytes() for x in storages.values())

    assert kept_bytes(1024) < 2.2 * kept_bytes(512)


def test_dropout_drops_weights_and_keeps_the_mean():
    tokens = 400
    query = key = torch.zeros(tokens, 1, 4)
    value = torch.ones(tokens, 1, 4)
    for options in ({}, {"window": 50}, {"softcap": 3.0}):
        torch.manual_seed(0)
        out = varlen_attention(query, key, value, [tokens], dropout=0.5, **options)
        assert out.std() > 0.05
        assert abs(float(out[50:].mean()) - 1) < 0.1


@pytest.mark.parametrize(
    ("shapes", "seq_lens", "options", "message"),
    [
        ([(5, 3, 4), (5, 2, 4), (5, 2, 4)], [5], {}, "multiple of the key heads"),
        ([(5, 2, 4), (5, 2, 3), (5, 2, 4)], [5], {}, "equal head sizes"),
        ([(5, 2, 4), (4, 2, 4), (5, 2, 4)], [5], {}, r"key \[T, Hk, D\]"),
        ([(5, 2, 4)] * 3, [2, 2], {}, r"lengths \[2, 2\] add up to 4 but the query has 5 tokens"),
        ([(5, 2, 4)] * 3, [5], {"window": 0}, "window=0"),
        ([(5, 2, 4)] * 3, [5], {"window": 2, "causal": False}, "causal=False"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(shapes, seq_lens, options, message):
    with pytest.raises(ValueError, match=message):
        varlen_attention(*(torch.zeros(shape) for shape in shapes), seq_lens, **options)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["causal", "window", "softcap", "sinks"])
def test_a_gpu_computes_the_same_as_the_cpu(name):
    tensors = [x.detach().float() for x in inputs([300, 5])]
    options = {key_: (x.float() if isinstance(x, torch.Tensor) else x) for key_, x in OPTIONS[name].items()}
    moved = {key_: (x.cuda() if isinstance(x, torch.Tensor) else x) for key_, x in options.items()}
    ours = varlen_attention(*(x.cuda() for x in tensors), [300, 5], **moved)
    torch.testing.assert_close(ours.cpu(), varlen_attention(*tensors, [300, 5], **options), rtol=1e-4, atol=1e-4)


def test_the_dense_reference_agrees_with_a_hand_computed_case():
    query = key = torch.zeros(3, 1, 1, dtype=torch.float64)
    value = torch.tensor([3.0, 5.0, 7.0], dtype=torch.float64).view(3, 1, 1)
    assert list(itertools.chain(*dense_attention(query, key, value, [1, 2])[:, :, 0].tolist())) == [3.0, 5.0, 6.0]

"""The exact divergence from a reference: tiles equal the definition, and no tensor of all logits is ever made."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rlbatch.functional.kl import full_kl
from lightning_rlbatch.models.full_kl import ReferenceHead, divergence
from lightning_rlbatch.models.scoring import log_probs_and_squares, token_log_probs

TOKENS, HIDDEN, VOCABULARY = 13, 8, 37


def make_head(seed, *, dtype=torch.float64, bias=True, scale=1.0, softcap=None, tokens=TOKENS, vocabulary=VOCABULARY):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, HIDDEN), (vocabulary, HIDDEN), (vocabulary,)]
    states, weight, offset = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return ReferenceHead(states, weight, offset if bias else None, scale, softcap)


def trained(head):
    return [part.requires_grad_() for part in head[:3] if part is not None]


def plain_logits(head, temperature):
    logits = (head.states @ head.weight.T + (0 if head.bias is None else head.bias)) * head.logit_scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)


@pytest.mark.parametrize("tiles", [{}, {"token_tile": 4, "vocab_tile": 10}, {"token_tile": 13, "vocab_tile": 1}], ids=str)
@pytest.mark.parametrize(
    ("options", "temperature"),
    [({}, 1.0), ({"bias": False, "scale": 1.3}, 0.7), ({"softcap": 3.0, "scale": 0.7}, torch.linspace(0.5, 1.5, TOKENS).double())],
    ids=["plain", "scaled", "soft-capped, a temperature each"],
)
def test_divergence_and_gradients_equal_the_sum_over_the_vocabulary(options, temperature, tiles):
    policy, reference = make_head(0, **options), make_head(1, **options)
    leaves, weights = trained(policy), torch.linspace(-1, 1, TOKENS, dtype=torch.float64)
    log_p, log_q = (plain_logits(head, temperature).log_softmax(-1) for head in (policy, reference))
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    actual = divergence(policy, reference, temperature=temperature, **tiles)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert (actual > 0).all()
    for own, other in zip(*(torch.autograd.grad((value * weights).sum(), leaves) for value in (actual, expected))):
        torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("tiles", [{}, {"token_tile": 4, "vocab_tile": 10}], ids=["whole", "tiled"])
def test_a_policy_has_no_divergence_from_itself_and_no_gradient(tiles):
    policy = make_head(0, dtype=torch.float32)
    leaves = trained(policy)
    value = divergence(policy, ReferenceHead(*(part.detach() for part in policy[:3]), 1.0, None), **tiles)
    assert value.eq(0).all()
    assert all(gradient.abs().max() < 1e-6 for gradient in torch.autograd.grad(value.sum(), leaves))


@pytest.mark.parametrize("tiles", [{}, {"token_tile": 4, "vocab_tile": 10}], ids=["whole", "tiled"])
def test_half_precision_states_give_fp32_divergences_close_to_exact_ones(tiles):
    policy, reference = make_head(0, dtype=torch.bfloat16), make_head(1, dtype=torch.bfloat16)
    leaves = trained(policy)
    doubled = [ReferenceHead(*(part.double() for part in head[:3]), 1.0, None) for head in (policy, reference)]
    exact = divergence(*doubled)
    value = divergence(policy, reference, **tiles)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), exact, rtol=0.03, atol=0.03)
    gradients = torch.autograd.grad(divergence(policy, reference, **tiles).sum(), leaves)
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)


@pytest.mark.parametrize("tiles", [{}, {"token_tile": 4, "vocab_tile": 10}], ids=["whole", "tiled"])
def test_sum_of_squares_is_that_of_the_probabilities_and_its_log_probs_those_without_it(tiles):
    targets = torch.arange(TOKENS) * 5 % VOCABULARY
    for temperature in (0.8, torch.linspace(0.5, 1.5, TOKENS).double()):
        head = make_head(0, softcap=3.0, scale=1.3)
        options = {"bias": head.bias, "temperature": temperature, "softcap": 3.0, "logit_scale": 1.3, **tiles}
        log_probs, squares = log_probs_and_squares(head.states, head.weight, targets, **options)
        expected = plain_logits(head, temperature).softmax(-1).square().sum(-1)
        torch.testing.assert_close(squares, expected, rtol=1e-12, atol=1e-14)
        assert torch.equal(log_probs, token_log_probs(head.states, head.weight, targets, **options)[0])


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_no_tensor_is_larger_than_a_tile_or_the_head_in_either_direction():
    policy, reference = (make_head(seed, tokens=900, vocabulary=4000) for seed in (0, 1))
    leaves = trained(policy)
    with LargestTensor() as largest:
        torch.autograd.grad(divergence(policy, reference).sum(), leaves)
    assert largest.elements <= 512 * 2048 < 900 * 4000


def test_what_both_models_rule_out_counts_nothing_and_what_only_the_reference_rules_out_is_infinite():
    low = -torch.inf
    logits = torch.tensor([[0.0, 0.0, low], [0.0, 0.0, low], [0.0, 0.0, 0.0]], requires_grad=True)
    reference = torch.tensor([[0.0, 1.0, low], [0.0, 1.0, 5.0], [0.0, 0.0, low]])
    value = full_kl(logits, reference, torch.tensor([True, True, True]))
    assert value[0].item() == pytest.approx(0.1201145, rel=1e-5)
    assert value[1] > value[0]
    assert value[2] == torch.inf
    (gradient,) = torch.autograd.grad(value[:2].sum(), logits)
    assert gradient[:2].isfinite().all()

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rlbatch.models.scoring import CPU_TILE, DIRECT_ELEMENTS, token_log_probs

SMALL_TILES = {"token_tile": 3, "vocab_tile": 4}
TILES: dict[str, dict[str, Any]] = {
    "direct": {},
    "tiled": SMALL_TILES,
    "tiled, no tile kept": {**SMALL_TILES, "head_memory_mib": 0},
    "tiled, five tiles kept": {**SMALL_TILES, "head_memory_mib": 5 * 3 * 4 * 8 / 2**20},
    "one wide tile": {"token_tile": 64, "vocab_tile": 64},
}


def reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """One token after the other, with torch's own distribution."""
    log_probs, entropies = [], []
    for index, target in enumerate(targets):
        logits = (weight.double() @ hidden[index].double() + (0.0 if bias is None else bias.double())) * logit_scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        warmth = temperature[index] if isinstance(temperature, Tensor) and temperature.dim() else temperature
        distribution = torch.distributions.Categorical(logits=logits / warmth)
        log_probs.append(distribution.log_prob(target))
        entropies.append(distribution.entropy())
    return torch.stack(log_probs), torch.stack(entropies)


def problem(tokens: int = 7, vocabulary: int = 11, hidden: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens * 1000 + vocabulary)
    states = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return states, weight, torch.randint(vocabulary, (tokens,), generator=generator)


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES.keys())
@pytest.mark.parametrize(
    ("temperature", "softcap", "scale", "with_bias"),
    [
        (1.0, None, 1.0, False),
        (0.7, 2.0, 0.5, True),
        ("per token", None, 0.5, True),
        ("per token", 2.0, 1.0, False),
        (1.0, 3.0, 1.0, False),
    ],
)
def test_values_and_gradients_equal_the_definition_in_double_precision(
    tiles: dict[str, int], temperature: float | str, softcap: float | None, scale: float, with_bias: bool
) -> None:
    hidden, weight, targets = problem()
    warmth = torch.linspace(0.5, 1.5, 7, dtype=torch.float64) if isinstance(temperature, str) else temperature
    bias = torch.linspace(-1, 1, 11, dtype=torch.float64).requires_grad_() if with_bias else None
    options: dict[str, Any] = {"temperature": warmth, "softcap": softcap, "logit_scale": scale}

    def score(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return token_log_probs(hidden, weight, targets, bias=bias, **options, **tiles)

    torch.testing.assert_close(score(hidden, weight, bias), reference(hidden, weight, targets, bias, **options), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(score, (hidden, weight, bias))


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES.keys())
@pytest.mark.parametrize("output", [0, 1], ids=["log_probs only", "entropy only"])
def test_each_output_can_be_differentiated_alone(tiles: dict[str, int], output: int) -> None:
    hidden, weight, targets = problem()
    token_log_probs(hidden, weight, targets, **tiles)[output].sum().backward()
    found = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    reference(hidden, weight, targets)[output].sum().backward()
    torch.testing.assert_close(found, [hidden.grad, weight.grad], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 1), (1, 9), (5, 4), (6, 8), (3, 5), (2, 3)])
def test_sizes_that_do_not_fill_the_tiles_are_scored_completely(tokens: int, vocabulary: int) -> None:
    hidden, weight, targets = problem(tokens, vocabulary)
    found = token_log_probs(hidden, weight, targets, token_tile=3, vocab_tile=4)
    torch.testing.assert_close(found, reference(hidden, weight, targets), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_a_frozen_input_receives_no_gradient_and_the_other_the_right_one(frozen: str) -> None:
    hidden, weight, targets = problem()
    (expected,) = torch.autograd.grad(reference(hidden, weight, targets)[0].sum(), hidden if frozen == "weight" else weight)
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    log_probs, _ = token_log_probs(hidden, weight, targets, token_tile=3, vocab_tile=4)
    assert log_probs.requires_grad == (frozen != "both")
    if frozen != "both":
        log_probs.sum().backward()
        torch.testing.assert_close(hidden.grad if frozen == "weight" else weight.grad, expected)


@pytest.mark.parametrize("memory", [0, 0.15, 64], ids=["nothing kept", "some tiles kept", "all kept"])
@pytest.mark.parametrize("size", [1.0, 300.0], ids=["usual logits", "logits in the hundreds"])
def test_single_precision_keeps_single_precision_accuracy(size: float, memory: float) -> None:
    hidden, weight, targets = problem(40, 3000, 64, torch.float32)
    scaled = (hidden.detach() * size / 8).requires_grad_()
    found = token_log_probs(scaled, weight, targets, token_tile=16, vocab_tile=512, head_memory_mib=memory)
    expected = reference(scaled, weight, targets)
    for ours, exact in zip(found, expected):
        assert (ours - exact).abs().max() < 2e-6 * size * 8
    for outputs in (slice(0, 1), slice(0, 2)):  # log-probs alone take a shorter way
        gradients = torch.autograd.grad(sum(x.sum() for x in found[outputs]), [scaled, weight], retain_graph=True)
        exact_gradients = torch.autograd.grad(sum(x.sum() for x in expected[outputs]), [scaled, weight], retain_graph=True)
        for ours, exact in zip(gradients, exact_gradients):
            assert (ours - exact).norm() < 3e-5 * exact.norm()


def test_bfloat16_inputs_give_single_precision_results_as_good_as_the_plain_computation() -> None:
    hidden, weight, targets = problem(64, 2000, 32, torch.bfloat16)
    weight = (weight.detach() / 6).requires_grad_()
    log_probs, entropy = token_log_probs(hidden, weight, targets, token_tile=16, vocab_tile=256)
    assert entropy is not None
    assert log_probs.dtype == entropy.dtype == torch.float32
    plain = torch.log_softmax((hidden @ weight.t()).float(), dim=-1)
    plain_log_probs, plain_entropy = plain.gather(1, targets[:, None])[:, 0], -(plain.exp() * plain).sum(dim=-1)
    exact_log_probs, exact_entropy = reference(hidden, weight, targets)
    assert (log_probs - exact_log_probs).abs().max() <= 1.2 * (plain_log_probs - exact_log_probs).abs().max()
    assert (entropy - exact_entropy).abs().max() <= 1.2 * (plain_entropy - exact_entropy).abs().max()
    ours = torch.autograd.grad(log_probs.sum() + entropy.sum(), [hidden, weight])
    naive = torch.autograd.grad(plain_log_probs.sum() + plain_entropy.sum(), [hidden, weight])
    exact = torch.autograd.grad(exact_log_probs.sum() + exact_entropy.sum(), [hidden, weight])
    for found, usual, right in zip(ours, naive, exact):
        assert found.dtype == torch.bfloat16
        assert (found - right).double().norm() <= 2.5 * (usual - right).double().norm()


class LargestTensor(TorchDispatchMode):
    """Remember the largest tensor that any operation makes, inside autograd functions and backward passes too."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_a_large_problem_makes_nothing_larger_than_its_inputs_or_a_tile() -> None:
    tokens, vocabulary, size = 1500, 5000, 8
    assert tokens * vocabulary > DIRECT_ELEMENTS
    hidden, weight, targets = problem(tokens, vocabulary, size, torch.float32)
    with LargestTensor() as largest:
        log_probs, entropy = token_log_probs(hidden, weight, targets)
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    assert 0 < largest.elements <= max(math.prod(CPU_TILE), tokens * size, vocabulary * size)


@pytest.mark.parametrize("memory", [0, 5, 1000])
def test_kept_tiles_take_the_memory_they_may_take_and_never_more(memory: float) -> None:
    hidden, weight, targets = problem(1500, 5000, 8, torch.float32)
    saved: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        token_log_probs(hidden, weight, targets, head_memory_mib=memory)
    others = 1500 * 8 * 4 + 5000 * 8 * 4 + 1500 * (8 + 4 + 4)  # inputs, and one number per token each
    tile, centres = math.prod(CPU_TILE) * 4, 3 * 4 * 1500
    everything = 1500 * 5000 * 4
    kept = sum(saved) - others
    assert min(memory * 2**20, everything) - tile <= kept <= min(memory * 2**20, everything) + centres


def test_a_negative_head_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="head_memory_mib to be a number of MiB, at least 0, but got -1"):
        token_log_probs(*problem(), head_memory_mib=-1)


def test_the_choice_between_tiles_and_whole_logits_does_not_change_the_numbers() -> None:
    hidden, weight, targets = problem(30, 200, 16, torch.float32)
    results = [token_log_probs(hidden, weight, targets, **tiles) for tiles in ({}, {"token_tile": 7}, {"vocab_tile": 33})]
    for left, right in itertools.combinations(results, 2):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=2e-6)


def test_autocast_scores_like_a_linear_layer_under_autocast() -> None:
    hidden, weight, targets = problem(9, 12, 8, torch.float32)
    expected = reference(hidden.bfloat16(), weight.bfloat16(), targets)[0]
    for tiles in ({}, {"token_tile": 4, "vocab_tile": 5}):
        with torch.autocast("cpu", torch.bfloat16):
            log_probs, _ = token_log_probs(hidden, weight, targets, **tiles)
        assert log_probs.dtype == torch.float32
        assert (log_probs - expected).abs().max() < 0.05
        log_probs.sum().backward()
        assert weight.grad is not None
        assert weight.grad.dtype == torch.float32


def test_shapes_that_do_not_fit_are_refused_with_both_of_them() -> None:
    hidden, weight, targets = problem()
    with pytest.raises(ValueError, match=r"\(7, 5\) and \(11, 4\)"):
        token_log_probs(hidden, weight[:, :4], targets)
    with pytest.raises(ValueError, match=r"each of 7 hidden states.*\(6,\)"):
        token_log_probs(hidden, weight, targets[:6])
    with pytest.raises(ValueError, match=r"bias of shape \[11\]"):
        token_log_probs(hidden, weight, targets, bias=torch.zeros(7))
    with pytest.raises(ValueError, match=r"each of 7 tokens.*\(3,\)"):
        token_log_probs(hidden, weight, targets, temperature=torch.ones(3))


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)])
def test_a_gpu_gives_the_same_numbers(dtype: torch.dtype, bound: float) -> None:
    hidden, weight, targets = problem(300, 5000, 64, dtype)
    exact = reference(hidden, weight, targets)
    exact_gradients = torch.autograd.grad(exact[0].sum() + exact[1].sum(), [hidden, weight])
    states, head = hidden.detach().cuda().requires_grad_(), weight.detach().cuda().requires_grad_()
    found = token_log_probs(states, head, targets.cuda(), token_tile=128, vocab_tile=1024)
    for ours, right in zip(found, exact):
        assert (ours.cpu() - right).abs().max() < bound * 5
    for ours, right in zip(torch.autograd.grad(found[0].sum() + found[1].sum(), [states, head]), exact_gradients):
        assert (ours.cpu() - right).double().norm() < bound * right.double().norm()

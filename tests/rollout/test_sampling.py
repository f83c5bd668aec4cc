import numpy as np
import pytest
import torch

from lightning_rlbatch.rollout.sampling import sample_tokens, step_uniforms


def splitmix64(seed: int, count: int) -> list[int]:
    """The generator as it is published, with Python's integers."""
    mask, outputs = 2**64 - 1, []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(z ^ (z >> 31))
    return outputs


def test_uniforms_are_the_splitmix64_stream_of_each_seed() -> None:
    for seed in (0, 1, 2**63 - 1):
        expected = [((value >> 12) + 0.5) / 2**52 for value in splitmix64(seed, 20)]
        assert step_uniforms([seed], 20)[0].tolist() == expected
        assert step_uniforms([5, seed], 3, first_step=17)[1].tolist() == expected[17:]


def test_uniforms_are_uniform_and_strictly_inside_the_unit_interval() -> None:
    numbers = step_uniforms(range(2000), 50)
    assert 0 < numbers.min() < numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0] / numbers.size
    assert np.abs(counts - 0.05).max() < 0.003
    assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.1


def naive_sample(logits: list[float], u: float, temperature: float, top_k: int, top_p: float) -> int:
    """One sequence, one token at a time."""
    weights = [float(np.exp((value - max(logits)) / temperature)) for value in logits]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    kept = order[: top_k or len(order)]
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if nucleus and mass / total >= top_p:
            break
        nucleus.append(token)
        mass += weights[token]
    target, reached = u * sum(weights[token] for token in nucleus), 0.0
    for token in sorted(nucleus):
        reached += weights[token]
        if reached > target:
            return token
    raise AssertionError


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 3, 1.0), (1.3, 0, 0.6), (0.9, 5, 0.8)])
def test_samples_equal_the_token_by_token_reference(temperature: float, top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 11, generator=generator) * 2
    uniforms = torch.rand(400, generator=generator, dtype=torch.float64)
    tokens, log_probs = sample_tokens(logits, uniforms, temperature=temperature, top_k=top_k, top_p=top_p)
    expected = [naive_sample(row, u, temperature, top_k, top_p) for row, u in zip(logits.tolist(), uniforms.tolist())]
    assert tokens.tolist() == expected
    # over the whole vocabulary, whatever was cut away
    torch.testing.assert_close(log_probs, (logits / temperature).log_softmax(-1)[torch.arange(400), tokens])


def test_frequencies_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    uniforms = torch.from_numpy(step_uniforms(range(20_000), 1)[:, 0])
    tokens, _ = sample_tokens(probabilities.log().expand(20_000, 5), uniforms)
    assert (torch.bincount(tokens, minlength=5) / 20_000 - probabilities).abs().max() < 0.01


def test_a_token_of_probability_zero_is_never_drawn_even_at_the_ends_of_the_interval() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, 4)
    tokens, _ = sample_tokens(logits, torch.tensor([1e-300, 1.0], dtype=torch.float64))
    assert tokens.tolist() == [1, 2]


def test_temperature_zero_takes_the_most_likely_token_and_its_log_prob_at_temperature_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    tokens, log_probs = sample_tokens(logits, None, temperature=0.0)
    assert tokens.tolist() == [1]
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[:, 1])


def test_log_probs_of_half_precision_logits_are_fp32() -> None:
    logits = torch.randn(3, 50, dtype=torch.bfloat16)
    tokens, log_probs = sample_tokens(logits, torch.full((3,), 0.5, dtype=torch.float64))
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, logits.float().log_softmax(-1)[torch.arange(3), tokens])

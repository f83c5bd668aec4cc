import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import checkpoint_layers, noisy_model, response_batch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.scorer import TokenScorer, TokenScores
from lightning_rlbatch.testing import run_distributed


def make_model(**changes: Any) -> Any:
    return noisy_model("Qwen2", seed=3, **changes)


def make_scorer(model: nn.Module, sp_group: dist.ProcessGroup | None = None, **options: Any) -> TokenScorer:
    scorer = TokenScorer(copy.deepcopy(model), value_head=True, sp_group=sp_group, **options)  # type: ignore[arg-type]  # tests hold nn.Module
    assert scorer.value_head is not None
    with torch.no_grad():
        scorer.value_head.weight.copy_(torch.linspace(-1, 1, 32)[None])
    return scorer


def loss_of(scores: TokenScores) -> Tensor:
    """A sum over tokens in which no two weigh the same, so that a token out of place shows."""
    total = torch.zeros(())
    for size, column in zip((1.0, 0.3, 0.1), scores):
        if column is not None:
            total = total + size * (column * torch.linspace(0.5, 1.5, column.shape[0])).sum()
    return total


def shard(scorer: TokenScorer, policy: MixedPrecisionPolicy | None = None) -> FSDPModule:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in scorer.model.model.layers:  # type: ignore[union-attr]  # a Qwen2 model has them
        fully_shard(layer, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    fully_shard(scorer, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    assert isinstance(scorer, FSDPModule)
    if hasattr(scorer, "set_reduce_scatter_unused_params"):  # torch 2.13
        scorer.set_reduce_scatter_unused_params(True)
    return scorer


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            found[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
    return found


def run(scorer: Callable[..., TokenScores], batches: list[PackedBatch], factor: float, **request: Any) -> list[TokenScores]:
    """Accumulate the gradients of some micro-batches, synchronised on the last; return the scores."""
    results = []
    for index, batch in enumerate(batches):
        if isinstance(scorer, FSDPModule):
            scorer.set_requires_gradient_sync(index == len(batches) - 1)
        scores = scorer(batch, with_values=True, **request)
        (loss_of(scores) * factor).backward()
        results.append(TokenScores(*(None if column is None else column.detach() for column in scores)))
    return results


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-6)
        assert error <= relative, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_sharded_gradients_equal_those_of_one_process(tied: bool, checkpointing: bool) -> None:
    model = make_model(tie_word_embeddings=tied)
    batches = [response_batch(5, 1, 9), response_batch(4, seed=1), response_batch(7, 3, seed=2), response_batch(2, 2, seed=3)]
    alone = make_scorer(model)
    run(alone, batches, 1.0, with_entropy=True)
    expected = gradients(alone)

    def check(rank: int, world_size: int) -> None:
        scorer = make_scorer(model)
        if checkpointing:
            checkpoint_layers(scorer.model)
            scorer.train()
        shard(scorer)
        run(scorer, batches[rank::2], float(world_size), with_entropy=True)
        assert_close(gradients(scorer), expected, 1e-5)

    run_distributed(check, 2)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("lengths", [(13,), (3,), (1,), (5, 1, 9, 2), (2, 2, 20)], ids=str)
def test_sequence_parallel_scores_and_gradients_equal_those_of_one_process(lengths: tuple[int, ...], world_size: int) -> None:
    model, batch = make_model(), response_batch(*lengths, prompt=1)
    temperature = torch.linspace(0.5, 1.5, len(lengths))
    alone = make_scorer(model)
    expected_scores = run(alone, [batch], 1.0, with_entropy=True, temperature=temperature)[0]
    expected = gradients(alone)

    def check(rank: int, world_size: int) -> None:
        scorer = make_scorer(model, dist.group.WORLD)
        shard(scorer)
        scores = run(scorer, [batch], 1.0, with_entropy=True, temperature=temperature)[0]
        torch.testing.assert_close(tuple(scores), tuple(expected_scores), rtol=1e-5, atol=2e-6)
        assert_close(gradients(scorer), expected, 1e-5)

    run_distributed(check, world_size)


def test_a_response_inside_one_shard_leaves_no_rank_behind() -> None:
    model = make_model()
    batch = response_batch(16)
    response = torch.zeros(16, dtype=torch.bool)
    response[9:11] = True  # sources 8 and 9: the third of four shards
    batch = batch.with_fields(per_token={"response_mask": response})
    alone = make_scorer(model)
    run(alone, [batch], 1.0)
    expected = gradients(alone)

    def check(rank: int, world_size: int) -> None:
        scorer = make_scorer(model, dist.group.WORLD)
        shard(scorer)
        run(scorer, [batch], 1.0)
        assert_close(gradients(scorer), expected, 1e-5)

    run_distributed(check, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rank_with_nothing_but_fillers_takes_part_without_a_trace(dtype: torch.dtype) -> None:
    model = make_model()
    batches = [response_batch(5, 4), response_batch(6, seed=1)]
    alone = make_scorer(model)
    run(alone, batches, 1.0, with_entropy=True)
    expected = gradients(alone)

    def check(rank: int, world_size: int) -> None:
        scorer = make_scorer(model)
        shard(scorer, MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
        filler = PackedBatch.filler(batches[0].schema, 2)
        results = run(scorer, [filler, filler] if rank else batches, float(world_size), with_entropy=True)
        assert all(column is not None and column.dtype == torch.float32 for scores in results for column in scores)
        if rank:
            assert all(not column.any() for scores in results for column in scores if column is not None)
        assert_close(gradients(scorer), expected, 1e-5 if dtype == torch.float32 else 0.1)

    run_distributed(check, 2)


def test_a_head_with_an_fsdp_group_of_its_own_is_refused() -> None:
    model, batch = make_model(), response_batch(5)

    def check(rank: int, world_size: int) -> None:
        scorer = make_scorer(model)
        fully_shard(scorer.model.lm_head)
        fully_shard(scorer)
        with pytest.raises(RuntimeError, match=r"still sharded inside TokenScorer\.forward.*not on the LM head"):
            scorer(batch)

    run_distributed(check, 2)


def test_a_temperature_that_mixed_precision_rounded_is_refused() -> None:
    model, batch = make_model(), response_batch(5)

    def check(rank: int, world_size: int) -> None:
        scorer = make_scorer(model)
        shard(scorer, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        with pytest.raises(TypeError, match="cast_forward_inputs=False"):
            scorer(batch, temperature=torch.tensor([0.7]))

    run_distributed(check, 2)


def test_padding_and_sequence_parallelism_together_are_refused_at_construction() -> None:
    model = make_model()

    def check(rank: int, world_size: int) -> None:
        with pytest.raises(ValueError, match=r"sequence_parallel_size=2 .* remove_padding is False"):
            TokenScorer(model, remove_padding=False, sp_group=dist.group.WORLD)

    run_distributed(check, 2)

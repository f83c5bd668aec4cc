import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from lightning_rlbatch.distributed.mesh import Meshes
from lightning_rlbatch.distributed.ulysses import gather_sequence
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models import parity, scored_positions, scorer
from lightning_rlbatch.models.packed_inputs import PackedLengths, packed_model_kwargs
from lightning_rlbatch.models.scored_positions import shift_to_sources
from lightning_rlbatch.models.scorer import TokenScorer
from lightning_rlbatch.testing import run_distributed
from lightning_rlbatch.testing.parity import ParityReport, ParityRow, assert_parity, compare_layouts, random_batch
from tests.models.tiny_models import SIZES, noisy_model

# eager: SDPA, the default before transformers 5.21, leaves out the cap of the scores
SOFT_CAPS: dict[str, Any] = {
    "head_dim": 4,
    "sliding_window": 4,
    "final_logit_softcapping": 2.0,
    "attn_logit_softcapping": 1.0,
    "attn_implementation": "eager",
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama, 7 heads": lambda: noisy_model(hidden_size=28, num_attention_heads=7, num_key_value_heads=1),
    "qwen2, tied": lambda: noisy_model("Qwen2", tie_word_embeddings=True),
    "qwen3": lambda: noisy_model("Qwen3", head_dim=8),
    "mistral, sliding window": lambda: noisy_model("Mistral", sliding_window=4),
    "gemma2, soft caps": lambda: noisy_model("Gemma2", **SOFT_CAPS),
    "gpt-neox": lambda: noisy_model("GPTNeoX"),
    "phi3": lambda: noisy_model("Phi3"),
    "mixtral": lambda: noisy_model("Mixtral", num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same_packed_padded_and_on_two_ranks(family: str) -> None:
    report = assert_parity(FAMILIES[family](), sp_size=2)
    assert [row.layout for row in report.rows] == ["padded", "packed", "dp=1, sp=2"]


def test_data_and_sequence_parallelism_together_also_with_fewer_samples_than_ranks() -> None:
    model = noisy_model()
    assert_parity(model, sp_size=2, dp_size=2, temperature=0.7)
    assert_parity(model, random_batch(50, (3,)), sp_size=2, dp_size=2)


def test_the_model_is_left_as_it_was() -> None:
    model = noisy_model(attention_dropout=0.5).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert_parity(model, random_batch(50, (4, 3)))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    TokenScorer(model)  # nothing is attached to it


def test_the_same_check_runs_on_ranks_that_are_already_there() -> None:
    model = noisy_model()

    def check(rank: int, world_size: int) -> list[float]:
        from lightning_rlbatch.distributed.mesh import build_meshes

        with pytest.raises(RuntimeError, match=r"joined a process group.*meshes=build_meshes"):
            assert_parity(model, sp_size=2)
        return [row.worst for row in assert_parity(model, meshes=build_meshes("cpu", sequence_parallel_size=2)).rows]

    results = run_distributed(check, 4)
    assert all(result == results[0] for result in results)


def test_a_model_that_cannot_be_split_is_refused_before_ranks_are_forked() -> None:
    with pytest.raises(ValueError, match="8"):
        assert_parity(noisy_model(), sp_size=16)


def test_the_table_names_layout_parameter_and_verdict() -> None:
    rows = (
        ParityRow("padded", 1e-7, 2e-7, 3e-7, "lm_head.weight", 4e-8),
        ParityRow("packed", 1e-7, float("nan"), 3e-2, "norm.weight", 0.0),
    )
    report = ParityReport(rows, 1e-5)
    assert not report.passed
    lines = str(report).splitlines()
    assert "ok" in lines[1]
    assert "DIFFERS  norm.weight" in lines[2]
    assert ParityReport(rows[:1], 1e-5).passed


def test_a_few_times_the_rounding_of_the_plain_forward_passes_for_each_kind_of_number_and_a_bound_that_no_fault_is_below() -> None:
    row = ParityRow("packed", 2e-6, 1e-6, 4e-4, "lm_head.weight", 1e-5)
    rounding = ParityRow("each alone", 1e-6, 1e-6, 1e-4, "lm_head.weight", 1e-6)
    report = ParityReport((row,), 1e-5, rounding)
    assert report.passed
    assert report.limits == (1e-5, pytest.approx(5e-4))
    assert "1e-05 (log-probs, entropy) and 5e-04 (gradient, norm) pass: each sample alone differs by 1e-06 and 1e-04" in str(report)
    assert not ParityReport((dataclasses.replace(row, log_probs=4e-4),), 1e-5, rounding).passed  # passes for a gradient only
    assert not ParityReport((dataclasses.replace(row, gradient=6e-4),), 1e-5, rounding).passed
    assert ParityReport((row,), 1e-5, dataclasses.replace(rounding, gradient=3.0)).limits[1] == 5e-2
    assert not ParityReport((row,), 1e-5, dataclasses.replace(rounding, gradient=float("nan"))).passed


def test_rounding_is_measured_in_fp32_and_16_bits_and_faults_are_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = [assert_parity(noisy_model(num_hidden_layers=4).to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    assert [report.rounding is None for report in reports] == [False, False, True]
    assert reports[0].limits[1] < 1e-4 < reports[1].limits[1] <= 5e-2
    no_document_mask(monkeypatch)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(AssertionError, match=r"packed .*DIFFERS"):
            assert_parity(noisy_model(num_hidden_layers=4).to(dtype))


# -- Known bugs, planted on purpose: each must be found. ---------------------------------------------------------------------------


def without_factor(local: Tensor, group: Any, num_tokens: int) -> Tensor:
    share = 1.0 if group is None else 1.0 / dist.get_world_size(group)
    return gather_sequence(local * share + (local * (1 - share)).detach(), group, num_tokens)


def loss_factor_dp_instead_of_dp_times_sp(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scorer, "gather_sequence", without_factor)


def loss_factor_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scorer, "gather_sequence", without_factor)
    patch.setattr(parity, "gradient_scale", lambda meshes, averages_over: 1.0)


def mean_per_rank(patch: pytest.MonkeyPatch) -> None:
    lengths = random_batch(50).seq_lens

    def factor(meshes: Meshes, averages_over: str) -> float:
        return sum(lengths) / sum(lengths[meshes.dp_rank :: meshes.dp_size])

    patch.setattr(parity, "gradient_scale", factor)


def labels_sliced_before_they_are_shifted(patch: pytest.MonkeyPatch) -> None:
    def shift(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        scored = shift_to_sources(batch)[1]
        size = -(-batch.num_tokens // 2)
        return torch.cat([shard.roll(-1) for shard in batch["input_ids"].split(size)]), scored

    patch.setattr(scored_positions, "shift_to_sources", shift)


def no_document_mask(patch: pytest.MonkeyPatch) -> None:
    def inputs(batch: PackedBatch, *, sp_group: Any) -> dict[str, Any]:
        found = packed_model_kwargs(batch, sp_group=sp_group)
        total = found["packed_lengths"].num_tokens
        bounds = torch.tensor([0, total], dtype=torch.int32)
        return found | {"packed_lengths": PackedLengths([total]), "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}

    patch.setattr(scorer, "packed_model_kwargs", inputs)


def position_ids_that_restart_in_every_shard(patch: pytest.MonkeyPatch) -> None:
    def inputs(batch: PackedBatch, *, sp_group: Any) -> dict[str, Any]:
        found = packed_model_kwargs(batch, sp_group=sp_group)
        positions = found["position_ids"][0]
        begun_before = (torch.arange(len(positions)) - positions) < 0
        return found | {"position_ids": torch.where(begun_before, positions - positions[0], positions)[None]}

    patch.setattr(scorer, "packed_model_kwargs", inputs)


def the_last_token_scored_with_its_neighbour(patch: pytest.MonkeyPatch) -> None:
    def shift(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        targets, scored = shift_to_sources(batch)
        return targets, torch.ones_like(scored)

    patch.setattr(scored_positions, "shift_to_sources", shift)


@pytest.mark.parametrize(
    "plant",
    [
        loss_factor_dp_instead_of_dp_times_sp,
        loss_factor_one,
        mean_per_rank,
        labels_sliced_before_they_are_shifted,
        no_document_mask,
        position_ids_that_restart_in_every_shard,
        the_last_token_scored_with_its_neighbour,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    report = compare_layouts(noisy_model(), random_batch(50), sp_size=2, dp_size=2)
    assert report.rows[-1].layout == "dp=2, sp=2"
    assert report.rows[-1].gradient > 1e-4
    monkeypatch.undo()
    assert compare_layouts(noisy_model(), random_batch(50)).passed


def test_a_difference_raises_with_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    no_document_mask(monkeypatch)
    with pytest.raises(AssertionError, match=r"(?s)LlamaForCausalLM does not.*packed .*DIFFERS"):
        assert_parity(noisy_model())


def test_a_model_whose_head_is_more_than_a_matrix_is_found_out() -> None:
    model = transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, is_decoder=True))
    with pytest.raises(AssertionError, match=r"(?s)BertLMHeadModel does not.*padded .*DIFFERS"):
        assert_parity(model)

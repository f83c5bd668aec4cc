"""What every rollout engine must do; vLLM's is a stand-in (see vllm_stand_in.py), the others are real."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
import vllm_stand_in
from rollout_toys import STOP, mixed_requests, quick_collections, reference_log_probs, toy_llama

from lightning_rlbatch.rollout.engine import RolloutEngine, RolloutRequest, SamplingParams
from lightning_rlbatch.rollout.replay_engine import RecordingEngine, ReplayEngine
from lightning_rlbatch.rollout.transformers_engine import DecodingMethod, TransformersEngine
from lightning_rlbatch.rollout.vllm_engine import VLLMEngine

SAMPLING = SamplingParams(max_new_tokens=16, stop_token_ids=(STOP, 9))


@pytest.fixture(params=["embedded", "generate", "continuous_batching", "vllm stand-in", "recording", "replay"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutEngine]:
    """An engine whose policy is ``toy_llama(0)``."""
    with quick_collections():
        yield make_engine(request.param, tmp_path, monkeypatch)


def make_engine(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RolloutEngine:
    if kind in get_args(DecodingMethod):
        return TransformersEngine(toy_llama(0), pad_token_id=0, method=kind)  # type: ignore[arg-type]  # it is one of them
    embedded = TransformersEngine(toy_llama(0), pad_token_id=0)
    if kind == "vllm stand-in":
        monkeypatch.setitem(sys.modules, "vllm", vllm_stand_in.module())
        return VLLMEngine.from_pretrained("folder/of/the/policy")
    recording = RecordingEngine(embedded, tmp_path / "rollouts" / "rank_0.jsonl")
    if kind == "replay":
        recording.generate(mixed_requests(), SAMPLING)
        return ReplayEngine.from_file(recording.path)
    return recording


def learns(engine: RolloutEngine) -> bool:
    return not isinstance(engine, ReplayEngine)


def test_it_is_a_rollout_engine(engine: RolloutEngine) -> None:
    assert isinstance(engine, RolloutEngine)


def test_completions_come_in_the_order_of_the_requests_whatever_that_is(engine: RolloutEngine) -> None:
    requests = mixed_requests()
    expected = [completion.token_ids for completion in engine.generate(requests, SAMPLING)]
    assert len(expected) == len(requests)
    assert [completion.token_ids for completion in engine.generate(requests[::-1], SAMPLING)][::-1] == expected
    alone = [engine.generate([request], SAMPLING)[0].token_ids for request in requests[::5]]
    assert alone == expected[::5]
    assert engine.generate([], SAMPLING) == []


def test_log_probs_are_those_of_the_whole_vocabulary(engine: RolloutEngine) -> None:
    for request, completion in zip(mixed_requests(), engine.generate(mixed_requests(), SAMPLING)):
        expected = reference_log_probs(toy_llama(0), request.prompt_ids, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_log_probs_are_those_at_the_temperature_of_sampling(engine: RolloutEngine, temperature: float) -> None:
    if not learns(engine):
        return  # recorded log-probs are those of the recorded temperature
    sampling = SamplingParams(max_new_tokens=8, temperature=temperature)
    for request, completion in zip(mixed_requests(3, 2), engine.generate(mixed_requests(3, 2), sampling)):
        expected = reference_log_probs(toy_llama(0), request.prompt_ids, completion.token_ids, temperature or 1.0)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_new_tokens", [1, 5, 16])
def test_completions_end_with_the_first_stop_token_or_at_the_limit(engine: RolloutEngine, max_new_tokens: int) -> None:
    sampling = SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=(STOP, 9))
    completions = engine.generate(mixed_requests(), sampling)
    assert {completion.finish_reason for completion in completions} <= {"stop", "length"}
    for completion in completions:
        assert len(completion.token_ids) == len(completion.log_probs)
        assert not {STOP, 9} & set(completion.token_ids[:-1])
        assert (completion.token_ids[-1] in (STOP, 9)) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == max_new_tokens


def test_an_empty_prompt_is_an_error_that_names_it(engine: RolloutEngine) -> None:
    with pytest.raises(ValueError, match="Prompt 1 is empty"):
        engine.generate([mixed_requests()[0], RolloutRequest([], 0)], SAMPLING)


def test_progress_adds_up(engine: RolloutEngine) -> None:
    events: list[tuple[int, int]] = []
    completions = engine.generate(mixed_requests(), SAMPLING, on_progress=lambda *event: events.append(event))
    assert sum(finished for finished, _ in events) == len(completions)
    assert sum(tokens for _, tokens in events) == sum(len(completion.token_ids) for completion in completions)


def test_it_refuses_to_generate_asleep_and_works_after_waking_up_with_weights(engine: RolloutEngine) -> None:
    expected = engine.generate(mixed_requests(), SAMPLING)
    for _ in range(2):
        engine.sleep()
        engine.sleep()
        with pytest.raises(RuntimeError, match="sleeps and cannot generate"):
            engine.generate(mixed_requests(), SAMPLING)
        engine.wake()
        engine.wake()
        engine.update_weights(toy_llama(0).named_parameters())
        assert engine.generate(mixed_requests(), SAMPLING) == expected


def test_new_weights_are_what_is_sampled_from(engine: RolloutEngine) -> None:
    engine.generate(mixed_requests(), SAMPLING)
    engine.update_weights(toy_llama(1).named_parameters())
    policy = toy_llama(1 if learns(engine) else 0)
    for request, completion in zip(mixed_requests(), engine.generate(mixed_requests(), SAMPLING)):
        expected = reference_log_probs(policy, request.prompt_ids, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=1e-4, atol=1e-5)


def test_weights_are_consumed_to_the_end_and_wrong_ones_are_named(engine: RolloutEngine) -> None:
    weights = [*toy_llama(0).named_parameters()]
    wrong = [("model.nonsense", torch.zeros(2)), *[(name, tensor) for name, tensor in weights if name != "model.norm.weight"]]
    consumed = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in wrong:
            consumed.append(name)
            yield name, tensor

    if learns(engine):
        with pytest.raises(ValueError, match=r"model\.nonsense.*model\.norm\.weight is missing"):
            engine.update_weights(stream())
    else:
        engine.update_weights(stream())
    assert len(consumed) == len(wrong)


def test_a_request_may_have_a_limit_of_its_own(engine: RolloutEngine) -> None:
    requests = mixed_requests()
    whole = engine.generate(requests, SAMPLING)
    limits = [1 + index % 5 for index in range(len(requests))]
    cut = engine.generate([RolloutRequest(r.prompt_ids, r.seed, limit) for r, limit in zip(requests, limits)], SAMPLING)
    for full, completion, limit in zip(whole, cut, limits):
        assert completion.token_ids == full.token_ids[:limit]
        assert completion.finish_reason == (full.finish_reason if len(full.token_ids) <= limit else "length")

"""VLLMEngine against a stand-in that checks calls and arguments (see vllm_stand_in.py); the marked test runs vLLM itself."""

import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm_stand_in
from rollout_toys import STOP, mixed_requests, reference_log_probs, toy_llama

from lightning_rlbatch.rollout.engine import SamplingParams
from lightning_rlbatch.rollout.vllm_engine import VLLMEngine

SAMPLING = SamplingParams(max_new_tokens=8, stop_token_ids=(STOP,))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", vllm_stand_in.module())


def test_without_vllm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"lightning-rlbatch\[vllm\]"):
        VLLMEngine.from_pretrained("x")


@pytest.mark.usefixtures("stand_in")
def test_it_joins_the_training_processes_and_passes_limits_only_if_given() -> None:
    arguments = VLLMEngine.from_pretrained("x", tensor_parallel_size=2, max_num_seqs=64, sleep_level=0).llm.arguments
    assert arguments["distributed_executor_backend"] == "external_launcher"
    assert (arguments["tensor_parallel_size"], arguments["max_num_seqs"], arguments["max_model_len"]) == (2, 64, None)
    assert arguments["enable_sleep_mode"] is False
    assert arguments["logprobs_mode"] == "processed_logprobs"


@pytest.mark.usefixtures("stand_in")
def test_it_starts_under_any_launcher_and_leaves_what_trains_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    def seeded() -> None:
        for set_seed in (random.seed, np.random.seed, torch.manual_seed):
            set_seed(7)

    monkeypatch.delenv("RANK", raising=False)  # Lightning's own launcher does not set it
    monkeypatch.setenv("MASTER_PORT", "1")
    environment = dict(os.environ)
    seeded()
    expected = drawn()
    seeded()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):  # as Lightning makes the policy's device the default one
            launched = VLLMEngine.from_pretrained("x").llm.launched
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert drawn() == expected
    assert dict(os.environ) == environment
    assert (launched["RANK"], launched["MASTER_ADDR"]) == ("0", "127.0.0.1")
    assert int(launched["MASTER_PORT"]) > 1


@pytest.mark.usefixtures("stand_in")
def test_weights_arrive_while_the_key_value_cache_still_sleeps() -> None:
    engine = VLLMEngine.from_pretrained("x")
    engine.sleep()
    engine.wake()
    engine.update_weights(toy_llama(0).named_parameters())
    engine.generate(mixed_requests(1, 1), SAMPLING)
    engine.generate(mixed_requests(1, 1), SAMPLING)
    assert engine.llm.calls == ["sleep(2)", "wake_up(['weights'])", "reset_prefix_cache", "wake_up(['kv_cache'])"]


@pytest.mark.usefixtures("stand_in")
def test_dropped_weights_must_be_replaced_before_generating() -> None:
    engine = VLLMEngine.from_pretrained("x", sleep_level=2)
    engine.sleep()
    with pytest.raises(RuntimeError, match="cannot take weights"):
        engine.update_weights(toy_llama(0).named_parameters())
    engine.wake()
    with pytest.raises(RuntimeError, match=r"Call update_weights\(\) before generate\(\)"):
        engine.generate(mixed_requests(1, 1), SAMPLING)


@pytest.mark.usefixtures("stand_in")
def test_kept_weights_need_no_update() -> None:
    engine = VLLMEngine.from_pretrained("x", sleep_level=1)
    expected = engine.generate(mixed_requests(2, 1), SAMPLING)
    engine.sleep()
    engine.wake()
    assert engine.generate(mixed_requests(2, 1), SAMPLING) == expected
    assert engine.llm.calls[0] == "sleep(1)"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("mode", "sampling", "message"),
    [
        ("processed_logprobs", SamplingParams(top_p=0.9), "over the tokens that are left"),
        ("processed_logprobs", SamplingParams(top_k=5), "top_k=5"),
        ("raw_logprobs", SamplingParams(temperature=0.7), "gives log-probs at temperature 1 but the temperature is 0.7"),
    ],
)
def test_log_probs_other_than_promised_are_refused(mode: Any, sampling: SamplingParams, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMEngine.from_pretrained("x", logprobs_mode=mode).generate(mixed_requests(1, 1), sampling)


@pytest.mark.usefixtures("stand_in")
def test_an_aborted_request_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VLLMEngine.from_pretrained("x")
    outputs = engine.llm.generate(
        [{"prompt_token_ids": [8]}], [vllm_stand_in.SamplingParams(ignore_eos=True, detokenize=False, logprobs=0)], use_tqdm=False
    )
    outputs[0].outputs[0].finish_reason = "abort"
    monkeypatch.setattr(engine.llm, "generate", lambda *args, **kwargs: outputs)
    with pytest.raises(RuntimeError, match="with reason 'abort'"):
        engine.generate(mixed_requests(1, 1), SAMPLING)


@pytest.mark.cuda
def test_vllm_itself_samples_from_the_weights_it_is_given(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    toy_llama(0).save_pretrained(tmp_path)
    engine = VLLMEngine.from_pretrained(str(tmp_path), dtype="float32", gpu_memory_utilization=0.2, max_model_len=64, enforce_eager=True)
    engine.sleep()
    engine.wake()
    policy = toy_llama(1)
    engine.update_weights((name, tensor.detach().cuda()) for name, tensor in policy.named_parameters())
    for request, completion in zip(mixed_requests(3, 2), engine.generate(mixed_requests(3, 2), SAMPLING)):
        expected = reference_log_probs(policy, request.prompt_ids, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=1e-2, atol=1e-2)
